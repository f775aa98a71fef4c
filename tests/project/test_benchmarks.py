"""benchmarks/: the parts that decide what a published number means, on a tiny block on the CPU."""

from __future__ import annotations

import argparse
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode


@pytest.fixture
def train_blocks(import_benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return import_benchmark("train_blocks")


@pytest.fixture
def tiny(train_blocks: ModuleType, monkeypatch: pytest.MonkeyPatch):
    """A small block, and a provider for each thing that can happen to one."""
    models = pytest.importorskip("models")
    block = models.Block("tiny", lambda: models.GatedMLP(32, 64), (1, 16, 32))
    monkeypatch.setitem(train_blocks.BLOCKS, "tiny", block)

    def broken(module):
        raise RuntimeError("no such kernel\nand a long trace")

    providers = {
        "bf16": lambda m: m,
        "same": lambda m: m,
        "wrong": lambda m: lambda x: m(x) * 2,
        "broken": broken,
    }
    monkeypatch.setattr(train_blocks, "PROVIDERS", providers)
    return block


def test_a_failing_or_wrong_provider_is_a_row_with_its_error(train_blocks: ModuleType, tiny) -> None:
    rows = train_blocks.measure_block(tiny, ["bf16", "same", "wrong", "broken"], rounds=3, device="cpu")
    reference, same, wrong, broken = rows
    assert reference.speedup == 1.0 and reference.block == "tiny, 16 tokens"
    assert same.output_error == same.grad_error == 0.0
    assert same.p20_ms <= same.step_ms <= same.p80_ms
    assert same.speedup == reference.step_ms / same.step_ms
    assert wrong.step_ms is None and "ArithmeticError" in wrong.error
    assert broken.error == "RuntimeError: no such kernel"


def test_memory_reports_each_provider_beside_bf16(train_blocks: ModuleType, tiny, monkeypatch) -> None:
    memory = pytest.importorskip("memory")
    providers = memory.PROVIDERS.split(",")[:3]
    for provider in providers:
        monkeypatch.setitem(train_blocks.PROVIDERS, provider, lambda m: m)
    rows, held = memory.measure(tiny, providers, rounds=1, device="cpu", kernels=False)
    assert [row.provider for row in rows] == providers and held == []
    rows[0].peak_mib, rows[1].peak_mib, rows[2].peak_mib = 2.0, 3.0, 1.0
    train_blocks.summarize([train_blocks.Candidate(row, lambda: None, [[1.0]]) for row in rows])
    assert [row.peak_ratio for row in rows] == [1.0, 1.5, 0.5]


def test_providers_are_timed_in_turn(train_blocks: ModuleType, tiny, monkeypatch) -> None:
    timed: list[object] = []
    monkeypatch.setattr(train_blocks, "time_step", lambda step, device: timed.append(step) or [1.0])
    train_blocks.measure_block(tiny, ["bf16", "same"], rounds=2, device="cpu")
    assert "".join("a" if step is timed[0] else "b" for step in timed) == "abab"


def test_the_reference_failing_ends_the_run(train_blocks: ModuleType, tiny) -> None:
    with pytest.raises(RuntimeError, match="no such kernel"):
        train_blocks.PROVIDERS["bf16"] = train_blocks.PROVIDERS["broken"]
        train_blocks.measure_block(tiny, ["bf16"], rounds=1, device="cpu")


def test_relative_error(train_blocks: ModuleType) -> None:
    one, two = torch.tensor([3.0, 4.0]), torch.tensor([0.0])
    assert train_blocks.relative_error([one, two], [one, two]) == 0.0
    assert train_blocks.relative_error([one * 1.5, two], [one, two]) == pytest.approx(0.5)
    assert train_blocks.relative_error([one * float("nan"), two], [one, two]) == float("inf")


def test_environment_names_what_it_ran_on(train_blocks: ModuleType) -> None:
    environment = pytest.importorskip("environment")
    facts = environment.collect("cpu")
    assert facts["torch"] == torch.__version__
    assert set(facts) >= {"device", "driver", "cuda", "triton", "commit", "date"}


def test_an_unknown_word_is_named_beside_those_that_are_known(train_blocks: ModuleType, capsys) -> None:
    report = pytest.importorskip("report")
    parser = argparse.ArgumentParser()
    args = argparse.Namespace(blocks="swiglu,gelu", providers="te")
    report.split_choices(parser, args, blocks=["gelu", "swiglu"])
    assert args.blocks == ["swiglu", "gelu"] and args.providers == "te"
    with pytest.raises(SystemExit):
        report.split_choices(parser, args, providers=["bf16", "torchao"])
    assert "unknown providers: te; known: bf16, torchao" in capsys.readouterr().err


def test_all_providers_are_measured_without_a_choice(train_blocks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train_blocks.py"])
    args = train_blocks.parse_args()
    assert args.providers == list(train_blocks.PROVIDERS) and args.blocks == list(train_blocks.BLOCKS)


@pytest.mark.slow
def test_frozen_models_beside_bf16(train_blocks: ModuleType) -> None:
    inference = pytest.importorskip("inference")
    models = pytest.importorskip("models")
    tiny = "tiny", inference.layers(2, lambda: models.GatedMLP(32, 64))
    names = ["bf16", "float8_current_scaling, frozen", "float8_block_scaling, frozen", "no recipe, frozen"]
    rows = inference.measure(tiny, [1, 4], names, rounds=2, device="cpu")
    assert [row.tokens for row in rows] == [1] * 4 + [4] * 4
    assert rows[0].plain_speedup == 1.0 and rows[0].output_error == 0.0
    assert all(0 < row.output_error < 0.2 and row.plain_us for row in (rows[1], rows[2]))
    assert rows[3].plain_us is None and "unknown recipe" in rows[3].error


def test_the_quantizing_kernels_are_called_with_arguments_that_they_have(
    import_benchmark: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize = import_benchmark("quantize")
    for name, function in vars(quantize).copy().items():
        if inspect.isfunction(function) and function.__module__.startswith("te_dynamo."):
            monkeypatch.setattr(quantize, name, mock.create_autospec(function, return_value=["data", "scale_inv"]))
    with FakeTensorMode():
        for cases in quantize.RECIPES.values():
            for _, function, _, _, _ in cases(256, 128):
                function(None)


def test_bytes_of_a_recipe_are_beside_bf16s(import_benchmark: Callable[[str], ModuleType]) -> None:
    wire = import_benchmark("wire")

    def run(body: object, layout: str, checkpoint: bool, steps: int, options: dict[str, str], *_: object, **__: object):
        if options["recipe"] is None:
            return [{"wire": {("all_gather", torch.bfloat16): 4096, ("reduce_scatter", torch.bfloat16): 2048}}]
        codes = {("all_gather", torch.uint8): 2048, ("all_reduce", torch.float32): 512}
        return [{"wire": {**codes, ("reduce_scatter", torch.bfloat16): 2048}}]

    rows = wire.rows_of(mock.Mock(run=run), 2, "sequence")
    assert [(row.collective, row.recipe, row.kib, row.ratio, row.dtypes) for row in rows] == [
        ("all_gather", "bf16", 4.0, 1.0, ["bfloat16"]),
        ("reduce_scatter", "bf16", 2.0, 1.0, ["bfloat16"]),
        ("all_gather", "te", 2.0, 0.5, ["uint8"]),
        ("all_reduce", "te", 0.5, 1.0, ["float32"]),
        ("reduce_scatter", "te", 2.0, 1.0, ["bfloat16"]),
    ]


def test_losses_of_the_demo_are_beside_bf16s_of_their_seed(import_benchmark: Callable[[str], ModuleType]) -> None:
    losses = import_benchmark("demo_losses")

    def file(name: str, seed: int, loss: float, **settings: str) -> dict[str, object]:
        run = {"name": name, "seed": seed, "losses": [3.0] * 9 + [loss], "validation_loss": 2 * loss}
        return {"settings": {"device": "cuda"} | settings, "run": run | {"tokens_per_second": 10.0 + seed}}

    files = [file("a", 0, 2.02), file("a", 1, 0.96), file("b", 0, 1.9), file("bf16", 0, 2.0), file("bf16", 1, 1.0)]
    rows = losses.rows_of(files)
    assert [(row.recipe, row.seed, row.training_loss, row.training_change, row.validation_change) for row in rows] == [
        ("bf16", "seed 0", 2.0, 0.0, 0.0), ("bf16", "seed 1", 1.0, 0.0, 0.0), ("bf16", "mean", 1.5, 0.0, 0.0),
        ("a", "seed 0", 2.02, 1.0, 1.0), ("a", "seed 1", 0.96, -4.0, -4.0), ("a", "mean", 1.49, -0.67, -0.67),
        ("b", "seed 0", 1.9, -5.0, -5.0),
    ]  # fmt: skip
    assert [row.tokens_per_second for row in rows] == [10.5] * 6 + [10.0]
    (row,) = losses.rows_of([file("fp32", 0, 2.0, device="cpu")])
    assert (row.recipe, row.tokens_per_second) == ("fp32", None)
    with pytest.raises(ValueError, match=r"b, seed 0, was trained with other settings: .*'lr': '1'"):
        losses.rows_of([*files, file("b", 0, 2.0, lr="1")])


@pytest.mark.slow
def test_checkpoints_beside_bf16(import_benchmark: Callable[[str], ModuleType], tmp_path: Path) -> None:
    """transformers' linear has no kernel on a CPU, and is a row all the same."""
    report = import_benchmark("report")
    command = [sys.executable, report.ROOT / "benchmarks" / "checkpoint.py", "--quick", "--device", "cpu"]
    chosen = ["--recipes", "float8_rowwise", "--providers", "te,dequantized,transformers eager", "--out", tmp_path]
    done = subprocess.run(command + chosen, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    runs = {run.name: run.rows for run in map(report.read, tmp_path.iterdir())}
    assert set(runs) == {"checkpoint", "checkpoint_lora"}
    found = [(row["tokens"], row["provider"], 0 < row["output_error"] < 0.1) for row in runs["checkpoint"]]
    te = "rowwise"
    assert found == [(1, "bf16", False), (1, te, True), (16, "bf16", False), (16, te, True)]
    bf16, ours, dequantized, transformers = runs["checkpoint_lora"]
    assert bf16["speedup"] == 1.0 and transformers["provider"] == "transformers eager" and transformers["error"]
    assert 0 < dequantized["grad_error"] < ours["grad_error"] < 0.1 and ours["step_ms"] and dequantized["step_ms"]


@pytest.mark.slow
def test_an_encoder_beside_its_stored_weights(import_benchmark: Callable[[str], ModuleType]) -> None:
    encoder = import_benchmark("encoder")
    (row,) = encoder.rows_of(["float8_rowwise"], encoder.lineage(6))
    assert row.output_db > row.worst_linear_db > 15 and row.top_1 > 0.5 and row.top_5 == 1.0


@pytest.mark.parametrize("name", ["GatedMLP", "GeluMLP", "Llama"])
def test_transformer_engines_modules_compute_the_block(train_blocks: ModuleType, name: str) -> None:
    """te_dynamo.nn has modules of Transformer Engine's names."""
    import te_dynamo.nn

    models, nvidia_blocks = pytest.importorskip("models"), pytest.importorskip("nvidia_blocks")
    torch.manual_seed(0)
    block = {
        "GatedMLP": lambda: models.GatedMLP(64, 128),
        "GeluMLP": lambda: models.GeluMLP(64, 128),
        "Llama": lambda: models.llama_block(64, 128, 4, 2),
    }[name]().bfloat16()
    inputs = train_blocks.Inputs.make(models.Block(name, lambda: block, (2, 16, 64)), "cpu")
    theirs = nvidia_blocks.converted(block, te_dynamo.nn)
    want, got = (train_blocks.answer(module, module, inputs) for module in (block, theirs))
    assert 0 < train_blocks.relative_error([got[0]], [want[0]]) < 0.1
    assert 0 < train_blocks.relative_error([got[1]], [want[1]]) < 0.12
    with pytest.raises(TypeError, match="GegluMLP has no module in Transformer Engine"):
        nvidia_blocks.converted(models.GegluMLP(64, 128), te_dynamo.nn)
