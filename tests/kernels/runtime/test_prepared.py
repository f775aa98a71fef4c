"""kernels/runtime/prepared.py: a launch like an earlier one goes by what Triton found then, and never by more than that."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from te_dynamo.kernels.runtime.launch import compiling_only, launch, launch_prepared
from te_dynamo.kernels.runtime.prepared import Prepared, binder
from te_dynamo.kernels.runtime.scratch import scratch

HERE = -1
"""The device of tensors on a CPU, which stands for the current one."""


@triton.jit
def kernel(x, y, n, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    tl.store(y, tl.load(x) + n)


@triton.jit
def early_kernel(x, EARLY: tl.constexpr):
    tl.store(x, 1.0)


class Gpu:
    """What Triton asks of a device, and what it launched: [(who, arguments)]."""

    def __init__(self) -> None:
        self.device, self.stream = HERE, 7
        self.compiled: list[dict[str, Any]] = []
        self.launches: list[tuple[Any, ...]] = []

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return self.stream

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def compile(
        self, function: Any, key: Any, signature: Any, device: Any, constants: Any, options: Any, *_: Any
    ) -> Any:
        """JITFunction._do_compile, which keeps nothing here: each launch by Triton comes through it."""
        self.compiled.append({"signature": signature, "options": options})
        return SimpleNamespace(
            run=lambda *arguments: self.launches.append(arguments),
            launch_metadata=lambda *_: None,
            function=f"function {len(self.compiled)}",
            packed_metadata=(4, 1, 0),
        )


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    found = Gpu()
    monkeypatch.setattr(driver, "_active", found, raising=False)
    monkeypatch.setattr(JITFunction, "_do_compile", lambda self, *given: found.compile(self, *given))
    monkeypatch.setattr("te_dynamo.kernels.runtime.prepared._spellings", {})
    yield found
    kernel.device_caches.clear()


def add(x: torch.Tensor, y: torch.Tensor, n: Any = 3, grid: tuple[int, ...] = (5,), **constants: Any) -> None:
    launch(kernel, grid, x, y, n, **{"EVEN": True, "BLOCK": 16, "num_warps": 4, **constants})


X, Y = torch.zeros(64), torch.zeros(64)


def test_triton_binds_the_first_launch_alone(gpu: Gpu) -> None:
    for x in (X, torch.ones(64), X):
        add(x, Y)
        add(x, Y, grid=(2, 3))
    assert len(gpu.compiled) == 1
    grids, streams, functions = zip(
        *((launched[:3], launched[3], launched[4]) for launched in gpu.launches), strict=True
    )
    assert grids == ((5, 1, 1), (2, 3, 1)) * 3 and set(streams) == {7} and set(functions) == {"function 1"}
    metadata, *hooks = gpu.launches[-1][5:9]
    assert metadata == (4, 1, 0) and hooks == [None, None, None]


def test_addresses_are_those_of_the_call(gpu: Gpu) -> None:
    add(X, Y)
    other = torch.ones(64)
    add(other, Y, n=5)
    assert gpu.launches[-1][9:] == (other.data_ptr(), Y.data_ptr(), 5, None, None)


@pytest.mark.parametrize(
    ("change", "signature"),
    [
        ({"x": X[1:]}, {}),
        ({"x": X.double()}, {"x": "*fp64"}),
        ({"n": 16}, {}),
        ({"n": 1}, {"n": "constexpr"}),
        ({"n": 0.5}, {"n": "fp32"}),
        ({"n": True}, {"n": "u1"}),
        ({"n": None}, {"n": "constexpr"}),
        ({"EVEN": 1}, {}),
        ({"BLOCK": 32}, {}),
        ({"num_warps": 8}, {}),
    ],
    ids=str,
)
def test_other_kinds_are_other_kernels(gpu: Gpu, change: dict[str, Any], signature: dict[str, str]) -> None:
    usual: dict[str, Any] = {"x": X, "y": Y}
    for _ in range(2):
        add(**usual)
        add(**usual | change)
    assert len(gpu.compiled) == 2
    assert gpu.compiled[1]["signature"] == gpu.compiled[0]["signature"] | signature
    assert [launched[4] for launched in gpu.launches] == ["function 1", "function 2"] * 2


def test_arguments_by_name_are_the_same_launch_in_the_kernels_order(gpu: Gpu) -> None:
    for _ in range(2):
        launch(kernel, (5,), n=3, y=Y, BLOCK=16, x=X, EVEN=True)
    assert len(gpu.compiled) == 1
    assert gpu.launches[-1][9:12] == (X.data_ptr(), Y.data_ptr(), 3)


def test_device_and_stream_are_asked_each_time(gpu: Gpu) -> None:
    add(X, Y)
    gpu.stream = 9
    add(X, Y)
    assert gpu.launches[-1][3] == 9 and len(gpu.compiled) == 1
    gpu.device = 0
    for _ in range(2):
        add(X, Y)  # tensors of another device than the current one are Triton's to judge, each time
    assert len(gpu.compiled) == 3
    gpu.device = HERE
    add(X, Y)
    assert len(gpu.compiled) == 3


@pytest.mark.parametrize("n", [2**31, (1, 2)], ids=["33 bits", "a tuple"])
def test_triton_judges_other_arguments_each_time(gpu: Gpu, n: Any) -> None:
    for _ in range(2):
        add(X, Y, n=n)
    assert len(gpu.compiled) == 2


@pytest.mark.parametrize("watch", ["enter", "exit", "hook", "debug", "instrumentation", "stages", "pre_run"])
def test_triton_launches_what_is_watched(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, watch: str) -> None:
    runtime, seen = triton.knobs.runtime, []
    add(X, Y)
    if watch in ("enter", "exit"):
        chain = getattr(runtime, f"launch_{watch}_hook")
        monkeypatch.setattr(chain, "calls", [seen.append])
    elif watch == "hook":
        monkeypatch.setattr(runtime, "launch_enter_hook", seen.append)
    elif watch == "debug":
        monkeypatch.setattr(runtime, "debug", True)
    elif watch == "instrumentation":
        monkeypatch.setattr(triton.knobs.compilation, "instrumentation_mode", "fpsan")
    elif watch == "stages":
        monkeypatch.setattr(runtime, "add_stages_inspection_hook", lambda *_: ("key", "hash"))
    else:
        monkeypatch.setattr(kernel, "pre_run_hooks", [lambda *_, **__: None])
    for _ in range(2):
        add(X, Y)
    assert len(gpu.compiled) == 3
    monkeypatch.undo()


def test_what_was_compiled_for_a_watcher_is_not_kept(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "debug", True)
        add(X, Y)
    for _ in range(2):
        add(X, Y)
    assert [launched[4] for launched in gpu.launches] == ["function 1", "function 2", "function 2"]


def test_a_kernel_that_does_not_compile_raises_each_time(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_resources(*_: Any) -> Any:
        raise triton.OutOfResources(300_000, 232_448, "shared memory")

    with monkeypatch.context() as patch:
        patch.setattr(gpu, "compile", out_of_resources)
        for _ in range(2):
            with pytest.raises(triton.OutOfResources):
                add(X, Y)
        patch.setattr(gpu, "compile", lambda *_: None)  # as a hook has it that refuses
        for _ in range(2):
            add(X, Y)
    assert not gpu.launches
    add(X, Y)
    assert len(gpu.launches) == 1


def test_recording_and_compiling_launch_nothing(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def both(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        add(x, y)
        launch_prepared(Prepared(kernel, {"EVEN": True, "BLOCK": 16}), (5,), x, y, 3)
        return y

    recorded = make_fx(both, tracing_mode="fake")(X)
    names = [str(node.target) for node in recorded.graph.nodes if node.op == "call_function"]
    assert names.count("triton_kernel_wrapper_mutation") == 2
    with compiling_only():
        both(X)
    assert not gpu.launches and len(gpu.compiled) == 2


def test_an_early_launch_has_the_attribute(gpu: Gpu) -> None:
    for early in (True, False):
        for _ in range(2):
            launch(early_kernel, (1,), X, EARLY=early)
    assert [compiled["options"].launch_pdl for compiled in gpu.compiled] == [True, False]


def test_each_thread_has_the_allocator(gpu: Gpu) -> None:
    from triton.runtime._allocation import _allocator

    add(X, Y)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: (add(X, Y), found.append(_allocator.get())))
    thread.start()
    thread.join()
    assert found == [scratch] and len(gpu.compiled) == 1


def test_a_fork_of_a_process_that_launched_is_told(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    add(X, Y)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    monkeypatch.setattr(gpu, "get_current_device", torch.cuda.current_device)
    with pytest.raises(RuntimeError, match="forked subprocess"):
        add(X, Y)
    assert len(gpu.launches) == 1


_BYTES = torch.zeros(256, dtype=torch.uint8)
TENSORS = st.builds(
    lambda dtype, offset: _BYTES[offset : offset + 64].view(dtype),
    st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.bool]),
    st.sampled_from([0, 16, 4, 64]),
)
EDGES = [sign * 2**power + step for power in (0, 4, 31, 32, 63, 64) for step in (-1, 0, 1, 16) for sign in (1, -1)]
INTEGERS = st.sampled_from([number for number in EDGES if -(2**63) <= number < 2**64]) | st.integers(
    -(2**63), 2**64 - 1
)
ARGUMENT = TENSORS | INTEGERS | st.floats() | st.booleans() | st.none() | TENSORS.map(torch.Tensor.clone)
SPECIALIZED: dict[Any, Any] = {}


@settings(max_examples=1000, deadline=None)
@given(arguments=st.lists(ARGUMENT, min_size=3, max_size=3))
def test_one_key_is_one_specialization_of_tritons(arguments: list[Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "_active", Gpu(), raising=False)
        triton_binds = kernel.create_binder()[-1]
    key, values = binder(tuple(map(type, arguments)))(HERE, *arguments)
    if key is None:
        assert any(type(x) is int and not -(2**31) <= x < 2**31 for x in arguments)
        return
    _, specialized, _ = triton_binds(*arguments, EVEN=True, BLOCK=16)
    assert SPECIALIZED.setdefault(key, specialized) == specialized
    for value, x in zip(values, arguments, strict=True):
        assert value is x or value == x.data_ptr()
