"""benchmarks/cpu_time.py: providers are timed in turn, a failure is a row, and a block's input has the tokens that its name says."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.fixture
def cpu_time(import_benchmark: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    benchmark = import_benchmark("cpu_time")

    def broken(module):
        raise RuntimeError("no such kernel\nand a long trace")

    providers = {"bf16": lambda m: m, "same": lambda m: m, "broken": broken}
    monkeypatch.setattr(benchmark, "PROVIDERS", providers)
    return benchmark


def tiny(cpu_time: ModuleType):
    return cpu_time.models.Block("tiny", lambda: cpu_time.models.GatedMLP(32, 64), (1, 16, 32))


def test_every_provider_is_a_row_beside_bf16(cpu_time: ModuleType) -> None:
    rows = cpu_time.measure_block(tiny(cpu_time), list(cpu_time.PROVIDERS), rounds=2, device="cpu")
    first, same, failed = rows
    assert (first.block, first.provider, first.speedup, first.enqueue_ratio) == ("tiny, 16 tokens", "bf16", 1.0, 1.0)
    assert same.speedup == first.wall_ms / same.wall_ms and same.enqueue_ratio == first.enqueue_ms / same.enqueue_ms
    assert same.p20_ms <= same.wall_ms <= same.p80_ms
    assert failed.error == "RuntimeError: no such kernel" and failed.wall_ms is None
    assert first.kernels is None and first.allocations is None  # there is no GPU to ask


def test_providers_are_timed_in_turn(cpu_time: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[object] = []
    monkeypatch.setattr(cpu_time, "time_round", lambda step, device: (timed.append(step), (1.0, len(timed)))[1])
    first, same = cpu_time.measure_block(tiny(cpu_time), ["bf16", "same"], rounds=3, device="cpu")
    assert "".join("a" if step is timed[0] else "b" for step in timed) == "ababab"
    assert (first.wall_ms, same.wall_ms, same.speedup) == (3, 4, 0.75)


def test_the_reference_failing_ends_the_run(cpu_time: ModuleType) -> None:
    cpu_time.PROVIDERS["bf16"] = cpu_time.PROVIDERS["broken"]
    with pytest.raises(RuntimeError, match="no such kernel"):
        cpu_time.measure_block(tiny(cpu_time), ["bf16"], rounds=1, device="cpu")


def test_blocks_have_the_tokens_of_their_names(cpu_time: ModuleType) -> None:
    titles = [block.title for name, block in cpu_time.BLOCKS.items() if name.startswith("llama")]
    assert titles == [
        "Llama-1B block, 2048 tokens",
        "Llama-1B block, 4096 tokens",
        "Llama-1B block, 8192 tokens",
        "Llama-3B block, 4096 tokens",
        "4 Llama-1B blocks, 4096 tokens",
    ]
    assert all(tokens <= 4096 for _, tokens, _ in (block.shape for block in cpu_time.BLOCKS.values()))


def test_every_provider_compiles_a_module(import_benchmark: Callable[[str], ModuleType]) -> None:
    """Wrong options are errors of torch.compile's own, before any call."""
    benchmark = import_benchmark("cpu_time")
    for name, compile_ in benchmark.PROVIDERS.items():
        if name != "torchao":
            assert callable(compile_(benchmark.models.GatedMLP(32, 64)))
