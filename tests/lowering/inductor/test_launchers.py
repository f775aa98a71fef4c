"""lowering/inductor/launchers.py: Inductor's launches through Triton tell hooks that are there, and pay for none that are not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor.runtime.triton_heuristics import TritonCompileResult

from te_dynamo.kernels.runtime._triton import INSTALLED, tl, triton
from te_dynamo.kernels.runtime.scratch import fresh, scratch
from te_dynamo.lowering.inductor.install import install
from te_dynamo.torch_private.private import compiling_ours

pytestmark = pytest.mark.skipif(not INSTALLED, reason="launchers are Triton's")


@triton.jit
def kernel(x, n, BLOCK: tl.constexpr):
    tl.store(x, n)


class Binary:
    """A compiled kernel. seen: (what was passed behind the stream, the allocator) of each launch."""

    def __init__(self, launch_pdl: bool = False) -> None:
        from triton.runtime._allocation import _allocator

        self.src = SimpleNamespace(fn=kernel, signature={"x": "*fp32", "n": "i32", "BLOCK": "constexpr"}, constants={})
        self.metadata = SimpleNamespace(
            shared=0, num_warps=4, num_ctas=1, cluster_dims=(1, 1, 1), global_scratch_size=128, launch_pdl=launch_pdl
        )
        self.function, self.packed_metadata, self.hash = "function", (4, 1, 0), "ab" * 32
        self.seen: list[tuple[tuple[Any, ...], Any]] = []
        self.run = lambda *arguments: self.seen.append((arguments, _allocator.get()))
        self.asked = 0

    def _init_handles(self) -> None:
        pass

    def launch_metadata(self, *_: Any) -> str:
        self.asked += 1
        return "metadata for hooks"


def launcher_of(binary: Binary) -> Any:
    from torch._inductor.runtime.triton_heuristics import Config

    meta = {"signature": binary.src.signature, "constants": {"BLOCK": 16}, "num_warps": 4}
    extra = {"grid_type": "FixedGrid", "fixed_grid": ["_grid_0", "_grid_1", "_grid_2"], "extra_launcher_args": GRID}
    result = TritonCompileResult(binary, Config({"BLOCK": 16}, num_warps=4), meta, extra)
    return result.make_launcher()


GRID = ["_grid_0", "_grid_1", "_grid_2"]
X = torch.zeros(4)


def launch(launcher: Any) -> None:
    launcher(X, 3, 5, 1, 1, stream=7)


def test_a_launch_asks_nothing_for_hooks_that_are_not_there() -> None:
    install()
    theirs, ours = Binary(), Binary()
    before = launcher_of(theirs)
    with compiling_ours():
        launcher = launcher_of(ours)
    launch(before)
    launch(launcher)
    assert (theirs.asked, ours.asked) == (1, 0)
    ((arguments, allocator),) = ours.seen
    assert arguments[:6] == (5, 1, 1, 7, "function", (4, 1, 0)) and arguments[6:9] == (None, None, None)
    assert arguments[9:] == theirs.seen[0][0][9:] and allocator is scratch
    assert vars(before).keys() <= vars(launcher).keys() and launcher.config.kwargs == {"BLOCK": 16}


def test_an_early_launch_has_scratch_of_its_own() -> None:
    """It may write its descriptors while its predecessor still reads others."""
    install()
    early = Binary(launch_pdl=True)
    with compiling_ours():
        launcher = launcher_of(early)
    launch(launcher)
    assert early.seen[0][1] is fresh and not early.asked


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_a_hook_that_comes_later_is_told(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    binary, told = Binary(), []
    with compiling_ours():
        launcher = launcher_of(binary)
    launch(launcher)
    monkeypatch.setattr(getattr(triton.knobs.runtime, hook), "calls", [told.append])
    launch(launcher)
    assert binary.asked == 1
    (*_, (arguments, _)) = binary.seen
    runtime = triton.knobs.runtime
    assert arguments[6:9] == ("metadata for hooks", runtime.launch_enter_hook, runtime.launch_exit_hook)
