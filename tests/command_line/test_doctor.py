"""doctor: what it says about a working, a deviceless and a broken installation."""

import json
import types

import pytest
import torch

import te_dynamo.__main__ as command_line
import te_dynamo.remembered as remembered_module
from te_dynamo import recipe
from te_dynamo._compat import torch_version
from te_dynamo.command_line import doctor
from te_dynamo.kernels.runtime.target import described
from te_dynamo.lowering import device
from te_dynamo.lowering.tune import PRODUCTS
from te_dynamo.remembered import remember, remembered_file

H200 = device.DeviceInfo("NVIDIA H200", (9, 0), 132, 232448, 50 * 2**20, 141 * 2**30, "13.0", 0)


def no_device(*_):
    raise device.NoDeviceError("te_dynamo: no driver here")


def entry(load=lambda: None, name="te"):
    return types.SimpleNamespace(name=name, load=load)


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine with a working backend and no device."""
    monkeypatch.setattr(doctor, "entry_points", lambda group: [entry(name="other"), entry()])
    monkeypatch.setattr(device, "read_device", no_device)


def test_no_device_is_no_problem():
    found = doctor.diagnose()
    assert found.exit_status == 0
    assert found.no_device == "no driver here"
    names = [*recipe.names(), "mxfp8(scale_block=128)"]
    assert [row[:2] for row in found.recipes] == [(name, "reference") for name in names]
    text = str(found)
    assert torch.__version__ in text
    assert "no device: no driver here" in text
    assert text.startswith("no problem found")


@pytest.fixture
def an_h200(monkeypatch, tmp_path):
    """The first of eight, and an empty cache folder."""
    monkeypatch.setattr(device, "read_device", lambda index: H200)
    monkeypatch.setattr(device, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    remembered_module._read.cache_clear()
    yield
    remembered_module._read.cache_clear()


def test_device_table(an_h200):
    found = doctor.diagnose()
    assert found.exit_status == 0
    assert dict(found.device)["compute capability"] == "9.0 (sm_90)"
    assert "the first of 8" in dict(found.device)["name"]
    assert dict((row[0], row[1]) for row in found.recipes)["float8_current_scaling"] == "native"


def test_products_that_were_timed(an_h200):
    def timed():
        return dict(doctor.diagnose().device)["products timed"]

    assert timed().startswith("0, with this driver, torch and Triton (")
    remember(PRODUCTS, {"a": "usual", "b": "cublaslt"})
    assert timed() == f"2, with this driver, torch and Triton ({remembered_file(PRODUCTS)})"
    held = json.loads(remembered_file(PRODUCTS).read_text())
    held["made_with"]["driver"] = "1.0"
    remembered_file(PRODUCTS).write_text(json.dumps(held))
    remembered_module._read.cache_clear()
    assert timed().startswith("not used: it was made with driver 1.0, not ")


def test_torch_that_cannot_use_the_device_is_a_problem(monkeypatch):
    monkeypatch.setattr(device, "read_device", lambda index: H200)
    monkeypatch.setattr(device, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor.diagnose().exit_status == 1


@pytest.mark.parametrize(
    ("name", "capability", "runs"),
    [
        ("float8_current_scaling", (8, 0), "16 bits"),
        ("float8_current_scaling", (8, 9), "native"),
        ("float8_current_scaling", (9, 0), "native"),
        ("float8_current_scaling", (12, 1), "16 bits"),
        ("float8_current_scaling", (10, 0), "native"),
        ("float8_block_scaling", (9, 0), "native"),
        ("float8_rowwise", (9, 0), "native"),
        ("mxfp8", (8, 9), "emulated"),
        ("mxfp8", (9, 0), "emulated"),
        ("mxfp8", (12, 0), "native"),
        ("mxfp8", (10, 0), "native"),
        ("mxfp8(scale_block=128)", (9, 0), "native"),
        ("nvfp4", (9, 0), "emulated"),
        ("nvfp4", (10, 0), "native"),
    ],
)
def test_recipe_support(name, capability, runs):
    recipe = next(recipe for recipe in doctor._RECIPES if recipe.describe() == name)
    assert doctor._recipe_support(recipe, described("a GPU", capability, 100, 99 * 1024))[0] == runs


def test_recipe_support_without_a_device():
    assert doctor._recipe_support(doctor._RECIPES[0], None)[0] == "reference"


def broken_load():
    raise ImportError("no module")


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ([], "entry point .* is not installed"),
        ([entry(load=broken_load)], "does not load: ImportError: no module"),
    ],
)
def test_broken_installation_exits_with_1(monkeypatch, capsys, entries, problem):
    monkeypatch.setattr(doctor, "entry_points", lambda group: entries)
    found = doctor.diagnose()
    assert found.exit_status == 1
    assert len(found.problems) == 1
    import re

    assert re.search(problem, found.problems[0])
    assert command_line.main(["doctor"]) == 1
    assert "PROBLEM:" in capsys.readouterr().out


def test_missing_triton_is_a_problem(monkeypatch):
    real = doctor.importlib.import_module

    def import_module(name):
        if name == "triton":
            raise ImportError("no triton")
        return real(name)

    monkeypatch.setattr(doctor.importlib, "import_module", import_module)
    assert "Triton cannot be imported (no triton)" in doctor.diagnose().problems[0]


def test_privates_of_torch_are_listed():
    found = doctor.diagnose()
    rows = {name.rpartition(".")[2]: row for name, *row in found.privates}
    what_for, lost, releases, state = rows["define_kernel"]
    assert what_for.startswith("wrapped in lowering/inductor: ") and "0.8 s of a cold compile" in lost
    assert (releases, state) == ("2.11 to 2.15", "active")
    assert (
        rows["extern_kernels"][0].startswith("used in lowering/extern: ")
        and rows["extern_kernels"][1] == "failure or wrong results"
    )
    assert rows["cpp_scratch"][3] == ("active" if torch_version() <= (2, 12) else "not needed")
    assert "define_kernel" in "".join(found.text(verbose=True).split()).replace("|", "")


def test_a_private_that_is_gone_is_a_problem_where_results_depend_on_it(monkeypatch):
    monkeypatch.delattr("torch._inductor.select_algorithm.extern_kernels")
    monkeypatch.delattr("torch._inductor.fx_utils.FakeTensorUpdater.incremental_update")
    found = doctor.diagnose()
    (problem,) = found.problems
    assert "no torch._inductor.select_algorithm.extern_kernels; install a release of torch 2.11 to 2.15" in problem
    states = [row[-1] for row in found.privates]
    assert "skipped: torch._inductor.fx_utils.FakeTensorUpdater.incremental_update is gone" in states


def test_command_line(capsys):
    assert command_line.main(["doctor"]) == 0
    assert "no problem found" in capsys.readouterr().out


def test_help_names_the_commands(capsys):
    with pytest.raises(SystemExit):
        command_line.main(["--help"])
    printed = capsys.readouterr().out
    assert "doctor" in printed
    assert "explain" in printed
