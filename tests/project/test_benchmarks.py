"""benchmarks/: the parts that decide what a published number means, on a tiny block on the CPU."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from types import ModuleType

import pytest
import torch


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
    assert reference.ratio_to_bf16 == 1.0
    assert same.output_error == same.grad_error == 0.0
    assert same.p20_ms <= same.step_ms <= same.p80_ms
    assert same.ratio_to_bf16 == reference.step_ms / same.step_ms
    assert wrong.step_ms is None and "ArithmeticError" in wrong.error
    assert broken.error == "RuntimeError: no such kernel"

    report = train_blocks.markdown({"device": "CPU", "torch": "2"}, rows, rounds=3)
    table = [line for line in report.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(rows), "a failed provider keeps its row"
    assert {line.count("|") for line in table} == {9}


def test_memory_reports_each_provider_beside_bf16(train_blocks: ModuleType, tiny, monkeypatch) -> None:
    memory = pytest.importorskip("memory")
    for provider in memory.PROVIDERS:
        monkeypatch.setitem(train_blocks.PROVIDERS, provider, lambda m: m)
    rows, held = memory.measure(tiny, rounds=1, device="cpu", kernels=False)
    assert [row.provider for row in rows] == list(memory.PROVIDERS) and held == []
    rows[0].peak_gib, rows[1].peak_gib, rows[2].peak_gib = 2.0, 3.0, 1.0
    table = [line for line in memory.markdown({"device": "CPU"}, rows, 1).splitlines() if line.startswith("| tiny")]
    assert [line.split("|")[4].strip() for line in table] == ["1.000", "1.500", "0.500"]


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
    assert environment.device_slug({"device": "NVIDIA H200"}) == "nvidia-h200"


def test_a_report_is_two_files_that_name_what_it_ran_on(train_blocks: ModuleType, tmp_path) -> None:
    report = pytest.importorskip("report")
    facts = {"device": "NVIDIA H200", "torch": "2", "commit": "abc"}
    text = "\n".join(report.heading("Speed", facts))
    assert text == "# Speed, NVIDIA H200\n\ntorch 2, commit abc\n"
    rows = [train_blocks.Row("tiny", "bf16", step_ms=1.0)]
    report.write(tmp_path / "new", "speed", facts, text, rows, rounds=3)
    assert (tmp_path / "new" / "speed-nvidia-h200.md").read_text() == text
    held = json.loads((tmp_path / "new" / "speed-nvidia-h200.json").read_text())
    assert list(held) == ["environment", "rounds", "rows"]
    assert held["environment"] == facts and held["rounds"] == 3 and held["rows"][0]["step_ms"] == 1.0
    report.write(tmp_path, "memory", facts, text)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["memory-nvidia-h200.md", "new"]


def test_an_unknown_word_is_named_beside_those_that_are_known(train_blocks: ModuleType, capsys) -> None:
    report = pytest.importorskip("report")
    parser = argparse.ArgumentParser()
    args = argparse.Namespace(blocks="swiglu,gelu", providers="te")
    report.split_choices(parser, args, blocks=["gelu", "swiglu"])
    assert args.blocks == ["swiglu", "gelu"] and args.providers == "te"
    with pytest.raises(SystemExit):
        report.split_choices(parser, args, providers=["bf16", "torchao"])
    assert "unknown providers: te; known: bf16, torchao" in capsys.readouterr().err


@pytest.mark.slow
def test_frozen_models_beside_bf16(train_blocks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    inference = pytest.importorskip("inference")
    models = pytest.importorskip("models")
    monkeypatch.setitem(inference.CASES, "tiny", ("tiny", inference.layers(2, lambda: models.GatedMLP(32, 64))))
    names = ["bf16", "float8_current_scaling, frozen", "float8_block_scaling, frozen", "no recipe, frozen"]
    recipes = ["float8_current_scaling", "float8_block_scaling", "no recipe"]
    rows = inference.measure("tiny", [1, 4], names, recipes, rounds=2, device="cpu")
    assert [row.tokens for row in rows] == [1] * 4 + [4] * 4
    assert rows[0].plain_ratio == 1.0 and rows[0].output_error == 0.0
    assert all(0 < row.output_error < 0.2 and row.plain_us for row in (rows[1], rows[2]))
    assert rows[3].plain_us is None and "unknown recipe" in rows[3].error
    table = [line for line in inference.markdown({"device": "CPU"}, rows, 2).splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(rows) and {line.count("|") for line in table} == {9}
