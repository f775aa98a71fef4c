"""lowering/inductor/install.py: torch's privates are wrapped for graphs of ours alone, and what is gone is said."""

from __future__ import annotations

import json
import os
import pkgutil
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._higher_order_ops import triton_kernel_wrap
from torch.nn import functional as F

import te_dynamo
from te_dynamo._compat import mutation_analysis_name
from te_dynamo.errors import UnsupportedError
from te_dynamo.lowering.inductor import install as door
from te_dynamo.torch_private import private
from te_dynamo.torch_private.private import Private, compiling_ours
from te_dynamo.torch_private.table import TABLE

PROGRAM = textwrap.dedent(
    """
    import json, sys, warnings
    import torch
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.utils import run_fw_bw_and_get_code

    warnings.simplefilter("ignore")
    AsyncCompile.cpp_pybinding = lambda *_: lambda *_: None  # code for a CPU is looked at, not compiled
    backend, device = sys.argv[1], "cuda" if torch.cuda.is_available() else "cpu"

    def compiled(backend, *layers):
        model = torch.nn.Sequential(*layers).to(device, torch.bfloat16)
        return torch.compile(model, backend=backend)

    class Scale(torch.nn.Module):
        def forward(self, x):
            return scaled(x)

    def scaled(x):
        return x * 2

    if device == "cuda":
        import triton
        import triton.language as tl

        @triton.jit
        def scale_kernel(x, y, EARLY: tl.constexpr, BLOCK: tl.constexpr):
            at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            tl.store(y + at, tl.load(x + at) * 2)

        @torch.library.triton_op("a_user::scaled", mutates_args={})
        def scaled(x: torch.Tensor) -> torch.Tensor:
            y = torch.empty_like(x)
            torch.library.wrap_triton(scale_kernel)[(x.numel() // 1024,)](x, y, EARLY=True, BLOCK=1024)
            return y

        scaled.register_autograd(lambda ctx, dy: dy * 2)

    x = torch.randn(512, 1024, device=device, dtype=torch.bfloat16, requires_grad=True)
    compiled(backend, torch.nn.Linear(1024, 1024, bias=False))(x).backward(x)

    ours = set()

    def watch(frame, event, arg):
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith("te_dynamo"):
            ours.add(f"{module}.{frame.f_code.co_name}")

    plain = compiled("inductor", torch.nn.Linear(1024, 1024, bias=False), torch.nn.GELU(), Scale())
    if backend == "te":
        sys.setprofile(watch)
    _, codes = run_fw_bw_and_get_code(lambda: plain(x))
    sys.setprofile(None)
    print(json.dumps({"codes": codes, "ours": sorted(ours), "imported": "te_dynamo" in sys.modules}))
    """
)


def plain_model_after(backend: str, folder: Path) -> dict[str, Any]:
    """What plain Inductor makes of a model after `backend` has compiled its like, and which functions of ours were called meanwhile."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    environment = os.environ | {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    done = subprocess.run([sys.executable, program, backend], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_plain_models_code_is_what_it_is_without_us(tmp_path: Path) -> None:
    """Byte for byte; and nothing of ours runs while it compiles, but for the step into torch's own functions."""
    alone, beside_us = plain_model_after("inductor", tmp_path), plain_model_after("te", tmp_path)
    assert len(alone["codes"]) == 2
    assert beside_us["codes"] == alone["codes"]
    assert beside_us["imported"] and not alone["imported"]
    assert set(beside_us["ours"]) == {"te_dynamo.torch_private.private.ours_or_own"}


def test_wrappers_act_on_their_own_thread_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd compiles a backward graph on a thread of its own; another may compile somebody else's model meanwhile."""
    monkeypatch.setattr(sys.modules[__name__], "_doubled", _doubled)
    Private(f"{__name__}._doubled", "", "a test").wrap(lambda own, x: own(x) + 1)
    elsewhere: list[int] = []
    with compiling_ours():
        other = threading.Thread(target=lambda: elsewhere.append(_doubled(2)))
        other.start()
        other.join()
        assert _doubled(2) == 5
        with compiling_ours():
            pass
        assert _doubled(2) == 5
    assert _doubled(2) == 4 and elsewhere == [4]


def _doubled(x: int) -> int:
    return 2 * x


class _Holder:
    @staticmethod
    def halved(x: int) -> int:
        return x // 2


def test_a_static_method_stays_one() -> None:
    Private(f"{__name__}._Holder.halved", "", "a test").wrap(lambda own, x: own(x) + 1)
    assert _Holder().halved(4) == 2
    with compiling_ours():
        assert _Holder().halved(4) == _Holder.halved(4) == 3


def test_a_second_installation_changes_nothing() -> None:
    door.install()
    wrapped = [entry for entry in TABLE if entry.name in door.WRAPPERS and entry.active]
    before = [pkgutil.resolve_name(entry.name) for entry in wrapped]
    door.install()
    assert [pkgutil.resolve_name(entry.name) for entry in wrapped] == before and len(before) >= 4


def compiled_linear(**options: Any) -> torch.Tensor:
    x, w = torch.randn(16, 32), torch.randn(64, 32)
    return torch.compile(lambda x: F.linear(x, w), backend="te", options=options)(x)


@pytest.fixture
def warned_afresh() -> Iterator[None]:
    private.warn_skipped.cache_clear()
    yield
    private.warn_skipped.cache_clear()


@pytest.mark.usefixtures("warned_afresh")
def test_a_speed_up_whose_name_is_gone_is_skipped_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    name = mutation_analysis_name()
    monkeypatch.delattr(triton_kernel_wrap, name)
    gone = rf"no torch\._higher_order_ops\.triton_kernel_wrap\.{name}, so that models lose 1\.5 s of a cold compile .* doctor"
    with pytest.warns(UserWarning, match=gone) as warned:
        assert compiled_linear().shape == (16, 64)
        torch._dynamo.reset()
        assert compiled_linear().shape == (16, 64)
    assert len([w for w in warned if name in str(w.message)]) == 1
    (entry,) = [entry for entry in TABLE if entry.name.endswith(name)]
    assert entry.state == f"skipped: {entry.name} is gone"


@pytest.mark.parametrize("codegen", ["inductor", "eager"])
@pytest.mark.parametrize(
    "name", ["torch._inductor.select_algorithm.extern_kernels", "torch._inductor.decomposition.select_decomp_table"]
)
def test_nothing_compiles_without_what_results_depend_on(
    monkeypatch: pytest.MonkeyPatch, name: str, codegen: str
) -> None:
    monkeypatch.delattr(name)
    gone = rf"has no {re.escape(name)}, without which graphs would fail or be wrong .* 2\.11 to 2\.15 are tested"
    with pytest.raises(BackendCompilerFailed, match=gone) as raised:
        compiled_linear(codegen=codegen)
    assert isinstance(raised.value.inner_exception, UnsupportedError)
    (entry,) = [entry for entry in TABLE if name in entry.names]
    assert entry.state == f"cannot compile: {name} is gone"


@pytest.mark.usefixtures("warned_afresh")
def test_weights_are_not_kept_where_a_write_to_them_would_not_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch._C._after_ADInplaceOrView_keyset")
    with (
        pytest.warns(UserWarning, match=r"no torch\._C\._after_ADInplaceOrView_keyset, .*'weight_cache': 'step'"),
        pytest.raises(
            BackendCompilerFailed,
            match=r"no torch\._C\._after_ADInplaceOrView_keyset, without which there is no .*'weight_cache': 'step'",
        ) as raised,
    ):
        torch.compile(torch.nn.Linear(32, 64), backend="te", options={"weight_cache": "step"})(torch.randn(16, 32))
    assert isinstance(raised.value.inner_exception, UnsupportedError)


def test_no_graph_is_made_for_a_gpu_that_is_not_here_without_what_it_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch._inductor.compile_fx._recursive_post_grad_passes")
    with pytest.raises(
        UnsupportedError,
        match=r"no torch\._inductor\.compile_fx\._recursive_post_grad_passes, without which there is no explain\(device",
    ):
        te_dynamo.explain(torch.nn.Linear(32, 64), torch.randn(16, 32), device="h200")


def test_what_only_an_older_torch_needs_may_be_gone() -> None:
    entry = Private("torch._inductor.not_there", "", "a test", last=(2, 10))
    assert not entry.needed and not entry.active and entry.state == "not needed"
