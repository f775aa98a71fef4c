"""The command line: targets, options, and that each failure is one line with its exit code."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

from te_dynamo.command_line import hugging_face, memory
from te_dynamo.command_line.main import main
from te_dynamo.command_line.memory import free_bytes

FILE = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)), torch.randn(8, 32)

def keyed():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(32, 32)
        def forward(self, x, scale=None):
            return self.fc(x) * scale
    return Net(), (torch.randn(8, 32),), {"scale": torch.ones(())}

model = nn.Sequential(nn.Linear(32, 32))

def bare():
    return model

def raises():
    raise ValueError("no such checkpoint\\nand a long trace")

def wants(width):
    return nn.Linear(width, width)

def wrong_shapes():
    return nn.Linear(32, 64), torch.randn(8, 33)

def no_linear():
    return nn.ReLU(), torch.randn(8, 32)

def leaves():
    raise SystemExit(0)

class Leaving(nn.Linear):
    def forward(self, x):
        raise SystemExit(0)

def leaving():
    return Leaving(32, 32), torch.randn(8, 32)

def number():
    return 3

def kwargs_of_another_kind():
    return model, (), 3

constant = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_models.py").write_text(FILE)
    (tmp_path / "broken.py").write_text("def make(:\n    pass\n")
    (tmp_path / "leaves.py").write_text("raise SystemExit(0)")
    (tmp_path / "list.json").write_text("[]")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("my_models", "broken", "leaves"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


EAGER = ["--codegen", "eager"]


@pytest.mark.one_fast_case
@pytest.mark.parametrize("target", ["my_models:make", "my_models.py:make", "./my_models.py:make", "my_models:keyed"])
def test_targets(folder: Path, capsys: pytest.CaptureFixture[str], target: str) -> None:
    assert main(["explain", target, *EAGER, "--device", "cpu"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("coverage 100.0% of linear FLOPs in float8_current_scaling") and not printed.err


@pytest.mark.one_fast_case
@pytest.mark.parametrize("target", ["my_models:bare", "my_models:model", "my_models:make"])
def test_inputs_of_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str], target: str) -> None:
    assert main(["explain", target, *EAGER, "--json", "--input", "48x32"]) == 0
    assert json.loads(capsys.readouterr().out)["linears"][0]["shape"][0] == "48"


def test_named_inputs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "my_models:keyed", *EAGER, "--input", "16x32:float32", "--input", "scale=32"]) == 0


def test_options(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--recipe", "mxfp8", "--rules", "^1=none", "--rules", "0=nvfp4", "--dynamic", "--html", "page.html"]
    assert main(["explain", "my_models:make", *EAGER, *given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(row["recipe"], row["reason"]) for row in found["linears"]] == [
        ("nvfp4", ""), ("", "rule '^1' leaves it in the model's precision"),
    ]  # fmt: skip
    assert not found["linears"][0]["shape"][0].isdigit()  # a symbol
    assert (folder / "page.html").read_text().startswith("<!DOCTYPE html>")


def test_compare(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "my_models:make", "--json", "--html", "page.html"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sorted(row["module"] for row in found["rows"]) == ["0", "1"]
    assert found["summary"]["linears"] == 2 and 20 < found["summary"]["snr_output_db"] < 60
    assert '<section id="numerics"' in (folder / "page.html").read_text()


def test_a_gpu_that_is_not_here(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "my_models:make", "--device", "h200"]) == 0
    assert capsys.readouterr().out.startswith("on an NVIDIA H200, where it was not run: coverage")


@pytest.mark.slow
def test_a_model_of_transformers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    small = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 96,
    }
    config = transformers.LlamaConfig(**small, num_key_value_heads=2, architectures=["LlamaForCausalLM"])
    (folder / "config.json").write_text(config.to_json_string())
    assert main(["explain", "hf:config.json", *EAGER, "--json", "--input", "1x32:int64"]) == 0
    rows = json.loads(capsys.readouterr().out)["linears"]
    assert len(rows) == 8 and rows[0]["module"] == "model.layers.0.self_attn.q_proj" and rows[0]["dtype"] == "bf16"


WRONG = [
    (["explain", "my_models"], 2, "'my_models' names no model: expected package.module:factory"),
    (["explain", "my_models:mak"], 2, "has no 'mak'; did you mean 'make'?"),
    (["explain", "my_model:make"], 2, "there is no module 'my_model'; for a file write file.py:factory"),
    (["explain", "other.py:make"], 2, "there is no file 'other.py'"),
    (["explain", "my_models:constant"], 2, "'my_models:constant': expected a function, got int"),
    (["explain", "my_models:bare"], 2, "has a model and no inputs: return (model, args), or give them by --input"),
    (["explain", "my_models:number"], 2, "returns int; a factory returns model, (model, args) or (model, args, kwargs)"),
    (["explain", "my_models:kwargs_of_another_kind"], 2, "expected kwargs to be a dictionary, got int"),
    (["explain", "my_models:wants"], 2, "wants arguments (width): name a function that takes none"),
    (["explain", "torch.nn:Linear"], 2, "wants arguments (in_features"),
    (["explain", "my_models:raises"], 1, "my_models:raises raised ValueError: no such checkpoint; --debug shows where"),
    (["explain", "broken.py:make"], 1, "broken.py cannot be run: line 1, SyntaxError: "),
    (["explain", "broken:make"], 1, "broken cannot be imported: line 1, SyntaxError: "),
    (["explain", "my_models:make", "--recipe", "mxfp9"], 2, "unknown recipe 'mxfp9'; did you mean 'mxfp8'?"),
    (["explain", "my_models:make", "--rules", "lm_head"], 2, "--rules 'lm_head': expected PATTERN=RECIPE, as lm_head=none"),
    (["explain", "my_models:make", "--rules", "(=mxfp8"], 2, "'(' is not a regular expression: missing ), unterminated subpattern at position 0 (in rules[0])"),
    (["explain", "my_models:make", "--mode", "fast"], 2, "valid: 'default', "),
    (["explain", "my_models:make", "--device", "H20"], 2, "unknown device 'H20'; did you mean 'h200'?"),
    (["compare", "my_models:make", "--device", "meta"], 2, "unknown device 'meta'; valid: 'cpu', 'cuda'"),
    (["compare", "my_models:make", "--device", "H200"], 2, "--device H200: only explain takes a GPU by its name"),
    (["bench", "my_models:make", "--device", "h200"], 2, "--device h200: only explain takes a GPU by its name"),
    (["explain", "my_models:make", "--device", "cuda:99"], 2, "--device cuda:99: torch can use "),
    (["compare", "my_models:no_linear"], 1, "te-dynamo: no linear of the model is in a recipe: "),
    (["explain", "my_models:make", "--input", "1xx2"], 2, "--input '1xx2': expected a size and a dtype of torch's"),
    (["explain", "my_models:make", "--input", "1x2:int65"], 2, "--input '1x2:int65': expected a size and a dtype"),
    (["explain", "my_models:leaves"], 1, "my_models:leaves raised SystemExit: 0"),
    (["explain", "leaves.py:make"], 1, "leaves.py cannot be run: SystemExit: 0"),
    (["explain", "leaves:make"], 1, "leaves cannot be imported: SystemExit: 0"),
    (["explain", "my_models:leaving"], 1, "the model itself fails on these inputs: SystemExit: 0"),
    (["explain", "my_models:make", "--input", "99999999999999x64"], 2, "--input '99999999999999x64': torch cannot make it: RuntimeError: "),
    (["explain", "my_models:make", "--input", "8x32:quint8"], 2, "--input '8x32:quint8': torch cannot make it: "),
    (["explain", "my_models:make", "--input", "8x32:bits8"], 2, "--input '8x32:bits8': torch cannot make it: TypeError: "),
    (["explain", "my_models:make", "--input", "input=8x32", "--input", "input=4x32"], 2, "'input' is given twice"),
    (["explain", "my_models:make", "--device", ":0"], 2, "--device: unknown device ':0'; valid: "),
    (["explain", "my_models:make", "--html", ""], 2, "cannot write '': No such file"),
    (["explain", "my_models:make", "--html", "no/such/folder.html"], 2, "cannot write 'no/such/folder.html': No such file"),
    (["explain", "my_models:make", "--device", "A100"], 2, "'A100' has no FP8: every linear would stay in the model's precision there"),
    (["explain", "my_models:make", "--colour"], 2, "unrecognized arguments: --colour; te-dynamo explain --help lists what there is"),
    (["explain", "my_models:make", "--recepie=mxfp8"], 2, "unrecognized arguments: --recepie=mxfp8, did you mean --recipe?; te-dynamo explain --help"),
    (["explain"], 2, "the following arguments are required: TARGET; te-dynamo explain --help lists what there is"),
    (["--json", "explain", "my_models:make"], 2, "unknown command '--json'; valid: 'bench', "),
    (["exlpain", "my_models:make"], 2, "unknown command 'exlpain'; did you mean 'explain'?"),
    ([], 2, "the following arguments are required: COMMAND"),
    (["explain", "hf:LlamaForCausalLM"], 2, "'hf:LlamaForCausalLM' has no inputs: give them by --input 1x128:int64"),
    (["explain", "hf:LlamaForCausalLMM", "--input", "1x8:int64"], 2, "transformers has no model class 'LlamaForCausalLMM'; did you mean"),
    (["explain", "hf:LlamaConfig", "--input", "1x8:int64"], 2, "transformers has no model class 'LlamaConfig'; name one such as LlamaForCausalLM"),
    (["explain", "hf:list.json", "--input", "1x8:int64"], 2, "hf:list.json: no configuration of transformers with a model_type can be read"),
    (["explain", "hf:none.json", "--input", "1x8:int64"], 2, "hf:none.json: no configuration of transformers with a model_type can be read"),
    (["explain", "my_models:wrong_shapes"], 1, "the model itself fails on these inputs: RuntimeError: "),
    pytest.param(["explain", "my_models:no_linear"], 1, "the model has no linear, and te_dynamo quantizes nothing else", marks=pytest.mark.slow),
    (["bench", "my_models:make", "--device", "cpu"], 1, "bench times a model on a CUDA GPU, and this is none: run it where"),
    (["bench", "my_models:make", "--rounds", "0"], 2, "--rounds 0: expected 1 or more"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "status", "line"), WRONG, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_a_failure_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, line: str
) -> None:
    if "hf:" in " ".join(arguments):
        pytest.importorskip("transformers")
    assert main(arguments) == status
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1 and told[0].startswith("te-dynamo: ") and line in told[0], told


def test_a_command_does_not_look_for_garbage_all_the_time() -> None:
    usual = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    try:
        assert main(["exlpain"]) == 2
        assert gc.get_threshold()[0] >= 50_000
    finally:
        gc.set_threshold(*usual)


def test_each_mode_is_listed_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["explain", "my_models:make", "--mode", "fast"])
    assert capsys.readouterr().err.count("'default'") == 1


def test_a_gpu_is_named_in_any_case(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "my_models:make", "--device", "H200", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["device"] == "h200"


def test_a_gpu_that_torch_cannot_use(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for command in ("explain", "compare", "bench"):
        assert main([command, "my_models:make", "--device", "CUDA"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "--device CUDA: torch can use 0 CUDA devices here; `te-dynamo doctor` shows why" in line


def test_a_model_that_memory_cannot_hold(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a transformers of our own: a class of 3 billion parameters."""

    class Large(nn.Linear):
        class config_class:
            dtype = torch.bfloat16

        def __init__(self, config: object) -> None:
            assert torch.get_default_device().type == "meta", "made before it was counted"
            super().__init__(30_000, 100_000, bias=False)

    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(Large=Large))
    monkeypatch.setattr(hugging_face, "free_bytes", lambda device: 8 * 2**30)
    assert main(["compare", "hf:Large", "--input", "1x8"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "hf:Large has 3.0 billion parameters: with gradients they take 11.2 GiB, and 8.0 GiB are free; " in line
    assert main(["explain", "hf:Large", "--device", "h200", "--input", "8x30000:bfloat16"]) == 0
    assert free_bytes("cpu") > 0


def test_files_that_the_kernel_keeps_in_memory_are_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's limit counts them: reading a checkpoint once would leave no room for a model."""
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    for name, text in {
        "max": "1000\n",
        "current": "900\n",
        "stat": "anon 300\nfile 600\ninactive_file 400\nactive_file 150\n",
    }.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert free_bytes("cpu") == 650


def test_a_path_is_tried_before_anything_is_compiled_and_left_as_it_was(folder: Path) -> None:
    (folder / "page.html").write_text("kept")
    assert main(["explain", "my_models:raises", "--html", "page.html"]) == 1
    assert main(["explain", "my_models:raises", "--html", "new.html"]) == 1
    assert (folder / "page.html").read_text() == "kept" and not (folder / "new.html").exists()


def test_debug_has_the_traceback(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "my_models:raises", "--debug"]) == 1
    told = capsys.readouterr().err
    assert 'raise ValueError("no such checkpoint' in told and told.splitlines()[-1].startswith("te-dynamo: ")


@pytest.mark.slow
def test_torch_itself_adds_no_line(folder: Path) -> None:
    command = [sys.executable, "-m", "te_dynamo", "explain", "my_models:wrong_shapes"]
    done = subprocess.run(command, env=os.environ, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and not done.stdout, done.stderr


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    printed = capsys.readouterr().out
    assert stopped.value.code == 0
    assert all(command in printed for command in ("explain", "compare", "bench", "doctor"))


# ---- bench


@pytest.mark.gpu
def test_bench(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["bench", "my_models:make", "--json", "--rounds", "3", "--input", "4096x32:bfloat16"]) == 1
    )  # fp32 weights
    assert "the model itself fails" in capsys.readouterr().err
    assert main(["bench", "my_models:make", "--json", "--rounds", "3"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["call"] for row in rows] == ["forward", "forward and backward"]
    assert all(row["ms_with"] > 0 and row["gib_with"] > 0 for row in rows)


def test_what_bench_runs_and_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the GPU's clock and memory stood in for."""
    from te_dynamo.command_line import bench
    from te_dynamo.command_line.target import Subject

    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2**30)
    monkeypatch.setattr(torch, "compile", lambda model, **given: lambda *args: calls.append(given) or model(*args))
    times = iter([4.0, 2.0, 6.0, 2.0, 5.0, 2.0] * 2)
    monkeypatch.setattr(bench, "_milliseconds", lambda call: [call(), next(times)][1])
    calls: list[dict[str, object]] = []
    rows = bench.rows_of(Subject(nn.Linear(4, 4), (torch.randn(2, 4),), {}), {"recipe": "mxfp8"}, None, rounds=3)
    assert rows == [bench.Row(call, 5.0, 2.0, 1.0, 1.0) for call in ("forward", "forward and backward")]
    with_te = [given.get("backend") == "te" for given in calls[-6:]]
    assert with_te == [False, True] * 3
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert [row[3] for row in bench._table(rows).rows] == ["2.50x", "2.50x"]


def test_bench_asks_the_gpu_that_the_model_is_on(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events, memory and names are of the current device."""
    from te_dynamo.command_line import bench
    from te_dynamo.command_line.target import Subject

    current = ["cuda:0"]

    @contextlib.contextmanager
    def device(name: str) -> Iterator[None]:
        current.append(name)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: current[-1])
    monkeypatch.setattr(bench, "load", lambda parsed, device: Subject(nn.Linear(4, 4), (torch.randn(2, 4),), {}))
    monkeypatch.setattr(bench, "rows_of", lambda *_: [bench.Row(current[-1], 5.0, 2.0, 1.0, 1.0)])
    assert main(["bench", "my_models:make", "--device", "cuda:1"]) == 0
    assert capsys.readouterr().out.count("cuda:1") == 2 and current == ["cuda:0"]


@pytest.mark.parametrize("text", ["x" * 100_000, "x"])
def test_a_reader_that_has_enough(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """`te-dynamo doctor | head -3`: no traceback, and none when Python ends and flushes what is left."""
    reader, writer = os.pipe()
    os.close(reader)
    closed = os.fdopen(writer, "w")
    monkeypatch.setattr(sys, "stdout", closed)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("te_dynamo.command_line.doctor.run", lambda parsed: [print(text), 0][1])
        assert main(["doctor"]) == 1
    closed.close()


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr("te_dynamo.command_line.doctor.run", lambda parsed: [print("x"), 0][1])
        assert main(["doctor"]) == 1
    assert capsys.readouterr().err == "te-dynamo: OSError: [Errno 28] No space left on device\n"


@pytest.mark.parametrize(
    ("stop", "status", "said"),
    [
        (KeyboardInterrupt(), 130, ""),
        (OSError(28, "No space left on device"), 1, "te-dynamo: OSError: [Errno 28] No space left on device\n"),
    ],
)
def test_what_ends_a_command_from_outside(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stop: BaseException, status: int, said: str
) -> None:
    monkeypatch.setattr("te_dynamo.command_line.doctor.run", mock.Mock(side_effect=stop))
    assert main(["doctor"]) == status
    assert capsys.readouterr().err == said


def test_letters_that_the_terminal_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, "ascii", write_through=True))
    monkeypatch.setattr("te_dynamo.command_line.doctor.run", lambda parsed: print("größe"))
    main(["doctor"])
    assert printed.getvalue() == b"gr\\xf6\\xdfe\n"
