"""What every test runs under: caches of its own, a fresh compiler, and no GPU test without a GPU."""

from __future__ import annotations

import gc
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import ModuleType
from unittest import mock

import pytest
import torch
from helpers.dynamo import collect_no_garbage, explain_here_alone, few_rows_too, time_no_guards

ROOT = pathlib.Path(__file__).parents[1]
_CACHE = tempfile.TemporaryDirectory(prefix="te_dynamo_tests_")


def pytest_configure() -> None:
    """Caches of the session's own: a warm one would skip the passes that the tests are about. And what makes small tests quick."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(_CACHE.name, "inductor"))
    os.environ.setdefault("TRITON_CACHE_DIR", os.path.join(_CACHE.name, "triton"))
    os.environ.pop("COLUMNS", None)  # a terminal's width decides what is printed
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # The compiler knows this processor: each process with a cache of its own would compile three programs, for seconds, to find that out.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    # Programs that tests start import the helpers too.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT / "tests"), os.environ.get("PYTHONPATH"))))
    # What a CI machine has; more only makes the small tests slower.
    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)
    # Compiling makes many objects, and a collection goes over all that torch has imported.
    gc.set_threshold(50_000, 20, 20)


def pytest_collection_finish() -> None:
    """What is imported by now lives on. Refuses to test another checkout's code, which an editable install can bring in unnoticed."""
    gc.freeze()
    kernels = sys.modules.get("te_dynamo.kernels")
    if kernels is not None and (found := pathlib.Path(kernels.__path__[0]).resolve()) != ROOT / "kernels":
        raise pytest.UsageError(f"te_dynamo.kernels comes from {found}, not from {ROOT}: run `pip install -e .` here")


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a function marked `one_fast_case` the others are slow; tests marked `gpu` are skipped where there is no device that they could run on."""
    seen = set()
    for item in items:
        function = (item.path, getattr(item, "originalname", ""))
        if "one_fast_case" in item.keywords and "slow" not in item.keywords:
            if function in seen:
                item.add_marker(pytest.mark.slow)
            seen.add(function)
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0):
        return
    skip = pytest.mark.skip(reason="needs a CUDA device of compute capability 9.0 or newer")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True, scope="session")
def what_tests_leave_out() -> Iterator[None]:
    with collect_no_garbage(), time_no_guards(), few_rows_too():
        yield


@pytest.fixture(autouse=True)
def torchs_settings_stay() -> Iterator[None]:
    """As they were, whatever a test calls: torchao's quantize_ makes Inductor time kernels on a GPU from then on."""
    import torch._dynamo.config  # not above: to import them sets the directory of their caches
    import torch._functorch.config
    import torch._inductor.config

    configs = (torch._inductor.config, torch._dynamo.config, torch._functorch.config)
    before = [config.get_config_copy() for config in configs]
    precision = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(precision)
    for config, settings in zip(configs, before, strict=True):
        after = config.get_config_copy()
        config.load_config({name: value for name, value in settings.items() if after[name] != value})


@pytest.fixture(autouse=True)
def but_for_tests_of_that_rule(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those marked `cost_rule`."""
    if "cost_rule" in request.keywords:
        from te_dynamo.passes.torch_ir.match.cost import linear_cost_reason
        from te_dynamo.passes.torch_ir.match.cpu_bound import cpu_known

        monkeypatch.setattr(
            "te_dynamo.passes.torch_ir.match.patterns.linears.linear.linear_cost_reason", linear_cost_reason
        )
        monkeypatch.setattr("te_dynamo.passes.torch_ir.match.cpu_known", cpu_known)


@pytest.fixture(autouse=True)
def but_for_tests_of_what_a_gpu_would_take(request: pytest.FixtureRequest) -> Iterator[None]:
    """Those marked `h200_too`."""
    with nullcontext() if "h200_too" in request.keywords else explain_here_alone():
        yield


@pytest.fixture(autouse=True, scope="session")
def facts_of_this_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    """What is measured of a GPU is kept in a folder of this process, but for tests that name another cache folder."""
    own, caches = tmp_path_factory.mktemp("facts"), os.environ["TORCHINDUCTOR_CACHE_DIR"]

    def folder() -> pathlib.Path:
        named = os.environ["TORCHINDUCTOR_CACHE_DIR"]
        return own if named == caches else pathlib.Path(named) / "te_dynamo"

    with mock.patch("te_dynamo.remembered._folder", folder):
        yield own


@pytest.fixture(autouse=True)
def forgotten_after_a_test(facts_of_this_worker: pathlib.Path) -> Iterator[None]:
    """What one test has timed decides nothing in another."""
    from te_dynamo import remembered
    from te_dynamo.kernels.gemm.choose import CHOSEN, TUNED, choose
    from te_dynamo.lowering.tune import _use_remembered

    yield
    if TUNED:
        for file in facts_of_this_worker.iterdir():
            file.unlink()
        TUNED.clear()
        CHOSEN.clear()
        for read in (choose, remembered._read, _use_remembered):
            read.cache_clear()


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Alone, and after other tests."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """No compiled code, guard or recompilation count crosses from one test to the next."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def import_benchmark(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a file of benchmarks/ by name; skips where something that it imports is missing."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return pytest.importorskip
