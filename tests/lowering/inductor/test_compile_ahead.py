"""lowering/inductor/compile_ahead.py: what Inductor's code calls is compiled before it runs."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.graphs.lowered_graphs import CASES, graph_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from te_dynamo.dialect.gemm import values_of
from te_dynamo.kernels.runtime.launch import compiling_only, is_recording, launch
from te_dynamo.lowering.extern.gemm import _EXTERNS, _compile_kernel_of
from te_dynamo.lowering.inductor.compile_ahead import compile_ahead, compiles_ahead
from te_dynamo.testing import fake_cuda


class Kernel:
    def __init__(self) -> None:
        self.compiled: list[Any] = []

    def warmup(self, *args: Any, **kwargs: Any) -> None:
        self.compiled.append((args, kwargs))


def test_a_launch_becomes_a_compilation() -> None:
    kernel = Kernel()
    with compiling_only():
        launch(kernel, (3,), torch.empty(2, device="meta"), 16, BLOCK=32)
    (((tensor, size), keywords),) = kernel.compiled
    assert tensor.dtype == torch.float32 and size == 16 and keywords == {"grid": (3,), "BLOCK": 32}


def test_a_launch_that_is_early_is_compiled_as_one() -> None:
    kernel = Kernel()
    with compiling_only():
        launch(kernel, (3,), EARLY=True)
    ((_, keywords),) = kernel.compiled
    assert keywords == {"grid": (3,), "EARLY": True, "launch_pdl": True}


def test_a_mode_that_watches_does_not_record() -> None:
    """AOTAutograd's, around the first call of every graph: a kernel that is wrapped for a record has another key, and compiles again."""

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return func(*args, **(kwargs or {}))

    assert not is_recording()
    with Watching():
        assert not is_recording()
        with FakeTensorMode():
            assert is_recording()
    recorded = []
    make_fx(lambda x: recorded.append(is_recording()) or x + 1)(torch.ones(1))
    assert recorded == [True]


def test_nothing_without_a_gpu_and_outside() -> None:
    def launches(*tensors: torch.Tensor) -> None:
        raise AssertionError

    with compiles_ahead() if not torch.cuda.is_available() else compiling_only():
        compile_ahead(launches, [torch.empty(2)])


def test_nothing_of_a_size_that_is_known_only_at_run_time(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[torch.Tensor] = []
    size = ShapeEnv().create_unbacked_symint()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    with compiles_ahead():
        for shape in ((2, 16), (size, 16)):
            compile_ahead(launched.append, [torch.empty(shape, device="meta")])
    assert [tensor.shape for tensor in launched] == [(2, 16)]


def test_one_inside_another() -> None:
    with compiles_ahead(), compiles_ahead():
        pass


EXTERNS = [
    "gemm",
    "gemm with bias",
    "gemm_add",
    "gemm_block",
    "gemm_block_e8m0",
    "gemm_stacked",
    "gemm_gated",
    "gemm_grouped_columns",
]


@pytest.mark.parametrize("case", EXTERNS)
def test_what_is_compiled_is_what_is_launched(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys by which Triton finds a compiled kernel, of the fakes and of the tensors of a call."""
    keys: list[tuple[str, str]] = []
    monkeypatch.setattr(JITFunction, "_do_compile", lambda self, key, *_: keys.append((self.__name__, key)))
    target, arguments, _ = CASES[case]
    extern = _EXTERNS[target.default]
    with fake_cuda(), mock.patch.object(driver, "_active", Device()):
        graph = graph_of(target.default, *arguments())
        (node,) = graph.find_nodes(op="call_function", target=target.default)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        with compiles_ahead():
            _compile_kernel_of(node, extern)
    monkeypatch.undo()
    monkeypatch.setattr(JITFunction, "_do_compile", lambda self, key, *_: keys.append((self.__name__, key)))
    ahead, keys[:] = list(keys), []

    def real(value: torch.Tensor) -> torch.Tensor:
        return torch.empty(value.shape, dtype=value.dtype)

    asked = values_of(node)
    tensors = [real(x) for x in extern.tensors(asked) if x is not None]
    keywords = extern.keywords(asked)
    if extern.planned:
        keywords["out"] = real(node.meta["val"])
    with mock.patch.object(driver, "_active", Device()):
        extern.call(*tensors, **keywords)
    assert keys == ahead and ahead


class Device:
    """What Triton asks of an H200."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


PROGRAM = textwrap.dedent(
    """
    import json
    import torch
    from torch._inductor.select_algorithm import extern_kernels
    from triton import knobs
    from te_dynamo.lowering.extern import gemm as extern_gemm

    class Gated(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up, self.down = (torch.nn.Linear(*s, bias=False) for s in ((2048, 4096), (2048, 4096), (4096, 2048)))

        def forward(self, x):
            return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))

    events = []
    knobs.runtime.jit_post_compile_hook = lambda **given: events.append(given["fn"].name.rsplit(".")[-1])
    extern_gemm.register()
    for name in ("te_gemm", "te_gemm_gated"):
        def call(*args, _of=getattr(extern_kernels, name), **keywords):
            events.append("call")
            return _of(*args, **keywords)
        setattr(extern_kernels, name, call)
    x = torch.randn(8192, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    model = Gated().to("cuda", torch.bfloat16)
    loss = torch.compile(model, backend="te")(x).sum()
    forward, events[:] = list(events), []
    loss.backward()
    torch.cuda.synchronize()
    print(json.dumps([forward, events]))
    """
)


@pytest.mark.gpu
def test_every_called_kernel_is_compiled_before_the_first_call(tmp_path: Path) -> None:
    folders = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=os.environ | folders, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for events in json.loads(done.stdout.splitlines()[-1]):
        first = events.index("call")
        assert any("gemm" in event for event in events[:first]), events
        assert not any("gemm" in event for event in events[first:]), events
