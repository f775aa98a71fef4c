"""examples/: the training demos run from end to end, and their text source is what it says."""

from __future__ import annotations

import io
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@pytest.fixture
def byte_text(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return pytest.importorskip("byte_text")


def test_text_is_split_without_overlap(byte_text) -> None:
    text = byte_text.standard_library(max_bytes=50_000, validation=0.1)
    assert (len(text.train), len(text.validation)) == (45_000, 5_000)
    whole = byte_text.standard_library(max_bytes=50_000, validation=0.0).train
    assert bytes(whole.tolist()) == bytes(text.train.tolist()) + bytes(text.validation.tolist())
    assert "def " in byte_text.decode(text.train)


def test_the_english_text_is_words(byte_text) -> None:
    text = byte_text.decode(byte_text.english(max_bytes=100_000, validation=0.0).train)
    assert len(text) == 100_000
    words = sum(len(word) for word in re.findall(r"[A-Za-z]+", text))
    assert words > 0.75 * len(text) and "  " not in text and "self.self" not in text


def test_equal_seeds_give_equal_batches(byte_text) -> None:
    text = byte_text.standard_library(max_bytes=50_000)
    first, again, other = (list(text.batches("train", 3, 2, 16, seed)) for seed in (1, 1, 2))
    assert [b.shape for b in first] == [(2, 16)] * 3
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert not all((a == b).all() for a, b in zip(first, other, strict=True))
    source = bytes(text.train.tolist())
    assert all(bytes(row.tolist()) in source for row in first[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    ["nvfp4", *(pytest.param(r, marks=pytest.mark.exhaustive) for r in ("float8_block_scaling", "mxfp8", "mxfp8-128"))],
)
def test_a_short_training_in_each_recipe_ends_where_bf16s_does(tmp_path: pathlib.Path, recipe: str) -> None:
    """The default one: below. 2%, for NVFP4 5%, is what decides the exit status."""
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    size = ["--fast", "--steps", "60", "--hidden", "128", "--layers", "2"]
    command = [
        sys.executable,
        EXAMPLES / "train_text.py",
        *size,
        "--device",
        "cpu",
        "--out",
        tmp_path,
        "--recipe",
        recipe,
    ]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    reference, ours = json.loads((tmp_path / "summary.json").read_text())["runs"]
    assert ours["losses"][-1] < 0.8 * ours["losses"][0] and ours["losses"] != reference["losses"]


@pytest.mark.slow
def test_train_text_runs_and_writes_its_results(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    command = [sys.executable, EXAMPLES / "train_text.py", "--fast", "--device", "cpu", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "validation loss" in done.stdout
    assert "coverage" in done.stdout
    assert "te." in (tmp_path / "forward_graph.txt").read_text()
    assert max(map(len, done.stdout.splitlines())) < 90
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>") and "report.html" in done.stdout
    assert "tokens/s" not in done.stdout  # a CPU runs references
    assert "Time of the linears" not in (tmp_path / "report.html").read_text()
    said = " ".join(done.stdout.split())
    assert "forces every linear layer but lm_head" in said and "a model of this size gains nothing" in said
    assert len(re.findall(r"the first step, which compiles, took \d+ s", done.stdout)) == 2
    assert " 0/8 " not in done.stderr and "8/8" in done.stderr  # the bar counts what follows
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    reference, ours = json.loads((tmp_path / "summary.json").read_text())["runs"]
    assert len(reference["losses"]) == len(ours["losses"]) == 8
    assert ours["losses"][-1] < ours["losses"][0], "the model did not learn"
    (tmp_path / "run-float8_current_scaling-0.json").unlink()
    again = subprocess.run([*command, "--resume"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert len(re.findall(r"seed 0: as in .*run-", again.stdout)) == again.stdout.count("the first step") == 1
    assert json.loads((tmp_path / "summary.json").read_text())["runs"][0] == reference


def train_parallel(out: pathlib.Path, processes: int, steps: int) -> float:
    """The last loss, which it prints."""
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [
        sys.executable,
        *run,
        EXAMPLES / "train_parallel.py",
        "--codegen",
        "eager",
        "--out",
        out,
        "--steps",
        str(steps),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = re.fullmatch(rf"step {steps}: loss ([\d.]+)\n", done.stdout)
    assert found, done.stdout
    return float(found[1])


@pytest.mark.slow
def test_train_parallel_says_how_it_is_started() -> None:
    command, environment = (
        [sys.executable, str(EXAMPLES / "train_parallel.py")],
        os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    asked = subprocess.run([*command, "--help"], capture_output=True, text=True, env=environment)
    assert asked.returncode == 0 and "--tensor" in asked.stdout
    graph = subprocess.run([*command, "--graph"], capture_output=True, text=True, env=environment | {"RANK": "0"})
    assert graph.returncode == 2 and "--graph needs GPUs" in graph.stderr
    alone = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert alone.returncode == 2 and "it is started by torchrun: torchrun --nproc-per-node 2" in alone.stderr


@pytest.mark.slow
def test_generate_says_how_it_is_called() -> None:
    alone = subprocess.run([sys.executable, str(EXAMPLES / "generate.py")], capture_output=True, text=True)
    assert (
        alone.returncode == 1
        and "python examples/generate.py FOLDER" in alone.stderr
        and "Traceback" not in alone.stderr
    )


@pytest.mark.slow
def test_train_parallel_goes_on_with_another_number_of_processes(tmp_path: pathlib.Path) -> None:
    """Two by two, then one by two: the losses of a run of one by two."""
    pytest.importorskip("tqdm")
    straight = train_parallel(tmp_path / "straight", processes=2, steps=8)
    resumed = tmp_path / "resumed"
    train_parallel(resumed, processes=4, steps=4)
    assert [folder.name for folder in resumed.iterdir()] == ["step_4"]
    assert train_parallel(resumed, processes=2, steps=8) == pytest.approx(straight, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "close"), [(2.0, True), (2.03, True), (1.9, False), (2.1, False), (float("nan"), False)]
)
def test_the_demo_fails_on_a_loss_that_is_not_close(loss: float, close: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    pytest.importorskip("transformers")
    from rich.console import Console
    from train_text import Run, compare

    def run(name: str, final: float = 2.0, validation: float = 2.0) -> Run:
        return Run(name, 0, [3.0, final], validation_loss=validation, tokens_per_second=10.0)

    for other in (run("fp8", final=loss), run("fp8", validation=loss)):
        assert compare([run("bf16")], [[other]], Console(quiet=True)) is close
        assert compare([run("bf16")] * 2, [[other] * 2], Console(quiet=True)) is close


@pytest.mark.slow
def test_the_lower_panel_of_the_figure_has_the_band_that_is_allowed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    pytest.importorskip("transformers")
    import matplotlib.pyplot
    from train_text import Run, plot

    runs = [[Run(name, 0, [3.0, 2.0, factor], 2.0, 10.0)] for name, factor in (("bf16", 1.0), ("fp8", 1.001))]
    plot(runs, tmp_path / "loss.png")
    assert matplotlib.pyplot.gcf().axes[1].get_ylim() == (-2.0, 2.0)


@pytest.mark.slow
def test_the_demo_compares_the_means_of_several_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    pytest.importorskip("transformers")
    from rich.console import Console
    from train_text import Run, compare

    losses = {"bf16": (2.0, 1.0), "fp8": (2.1, 0.94), "other": (2.1, 1.0)}
    bf16, fp8, other = ([Run(name, i, [loss], loss, 10.0) for i, loss in enumerate(losses[name])] for name in losses)
    console = Console(record=True, width=200, file=io.StringIO())
    assert compare(bf16, [fp8], console)
    assert "1.5200 +1.33% (+5.00%, -6.00%)" in console.export_text()
    assert not compare(bf16, [fp8, other], Console(quiet=True))
