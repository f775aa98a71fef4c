"""The code that Inductor writes for a GPU, on a machine without one: the bytes that are alive while it runs, and its launches.

    with kernels_everywhere(), generated_code() as graphs:
        capture_on_fake_cuda(make_model, make_inputs, options=...)
    peak_bytes(graphs)
    launches_and_allocations(graphs)

The code is run on meta tensors with launches that do nothing: allocations, reuse and releases are Inductor's own.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import re
import weakref
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils._triton import has_triton
from torch.utils.weak import WeakIdKeyDictionary

from te_dynamo.inspect.fake_cuda import inductor_until
from te_dynamo.kernels.runtime.target import TARGETS, Target


@dataclasses.dataclass
class Generated:
    """text: a module of Python, whose `call` takes the list of `inputs`."""

    text: str
    inputs: dict[str, Any]


def peak_bytes(graphs: Sequence[Generated]) -> list[int]:
    """Of the forward graph and of its backward: the most that is alive at once, but parameters, inputs and gradients of outputs.

    The model's outputs are gone in backward; what forward has saved is there.
    """
    peaks, saved = [], []
    with contextlib.ExitStack() as stack:
        for patch in _WITHOUT_A_GPU:
            stack.enter_context(patch)
        callers = [
            {name: _like(x) for name, x in graph.inputs.items() if name.startswith(_CALLERS)} for graph in graphs
        ]
        alive = stack.enter_context(_Alive(tree_leaves(callers)))
        for graph, given in zip(graphs, callers, strict=True):
            module: dict[str, Any] = {}
            exec(compile(graph.text, "<generated>", "exec"), module)
            module.update(_STAND_INS)
            names = [name for name in graph.inputs if not name.startswith("tangents_")]
            arguments = saved[len(saved) - len(names) :] if saved else []
            arguments += [given[name] for name in list(graph.inputs)[len(arguments) :]]
            saved = []
            alive.most = alive.now
            saved += module["call"](arguments)
            peaks.append(alive.most)
    return peaks


def launch_bytes(graphs: Sequence[Generated]) -> int:
    """Of the forward graph and of its backward together: the bytes of the tensors that launches read or write, each once a launch."""
    _Launch.bytes = 0
    peak_bytes(graphs)
    return _Launch.bytes


def launches_and_allocations(graphs: Sequence[Generated]) -> dict[str, int]:
    """How often a step does what the CPU pays for, by what it costs: the code is one line after the other.

    A launch is made by torch's launcher, or by Triton's if the kernel needs scratch memory or is launched early. Calls are those of
    our Gluon kernels and of torch's operations. What these allocate themselves is not in the code.
    """
    counted: collections.Counter[str] = collections.Counter()
    for graph in graphs:
        kernels = dict(
            re.findall(r"^(\w+) = async_compile\.triton\(.*?'''(.*?)'''", graph.text, re.DOTALL | re.MULTILINE)
        )
        for name in re.findall(r"^ *(\w+)\.run\(", graph.text, re.MULTILINE):
            by_triton = any(mark in kernels[name] for mark in ("make_tensor_descriptor", "'launch_pdl': True"))
            counted["launches by Triton" if by_triton else "launches by torch"] += 1
        for called in re.findall(r"^ *(?:\w+ = )?(?:extern_kernels|torch\.ops)\.(\S+?)\(", graph.text, re.MULTILINE):
            counted["calls of ours" if called.startswith("te_") else "calls of torch"] += 1
        counted["allocations"] += len(re.findall(r"= empty_strided_\w+\(", graph.text))
    return dict(counted)


def _like(x: Any) -> Any:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x


_CALLERS = ("primals_", "tangents_")
"""What the names of inputs begin with that the caller holds."""


class _Alive(TorchDispatchMode):
    """Counts the bytes of the storages of all results, each until nothing holds it; but not those of `held`."""

    def __init__(self, held: Sequence[Any]) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen = WeakIdKeyDictionary()
        for x in held:
            if isinstance(x, Tensor):
                self._seen[x.untyped_storage()] = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # NVFP4's random words are made on a device.
        results = func(*args, **{name: "meta" if name == "device" else x for name, x in (kwargs or {}).items()})
        for x in tree_leaves(results):
            if isinstance(x, Tensor):
                self._count(x)
        return results

    def _count(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        if storage not in self._seen:
            self._seen[storage] = True
            size = storage.nbytes()
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._forget, size)

    def _forget(self, size: int) -> None:
        self.now -= size


class _Kernels:
    """In the place of the kernels that Inductor's code calls: ours write to `out`, or make their results; torch's run on meta tensors."""

    def __getattr__(self, name: str) -> Any:
        from torch._inductor.select_algorithm import extern_kernels

        function = getattr(extern_kernels, name)
        if not name.startswith("te_"):
            return function

        def call(*args: Any, out: Tensor | None = None, **keywords: Any) -> Any:
            return function(*args, **keywords) if out is None else out

        return call


class _Launch:
    bytes = 0
    """Of the tensors that launches were given, each once a launch."""

    def __getattr__(self, name: str) -> Any:
        def run(*args: Any, **kwargs: Any) -> None:
            given = {(x.untyped_storage()._cdata, x.numel()): x.nbytes for x in args if isinstance(x, Tensor)}
            _Launch.bytes += sum(given.values())

        return run


_STAND_INS: dict[str, Any] = {
    "empty_strided_cuda": lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device="meta"),
    "reinterpret_tensor": lambda x, size, stride, offset=0: torch.as_strided(x, size, stride, offset),
    "assert_size_stride": lambda *args: None,
    "assert_alignment": lambda *args: None,
    "get_raw_stream": lambda index: 0,
    "extern_kernels": _Kernels(),
}

_WITHOUT_A_GPU = (
    mock.patch("torch._C._cuda_getCurrentRawStream", lambda index: 0, create=True),
    mock.patch("torch.cuda._DeviceGuard", lambda index: contextlib.nullcontext()),
    mock.patch("torch.cuda.set_device", lambda index: None),
    mock.patch("torch._inductor.async_compile.AsyncCompile.triton", lambda *args, **kwargs: _Launch()),
    mock.patch("torch._inductor.async_compile.AsyncCompile.wait", lambda *args: None),
    mock.patch("te_dynamo.kernels.gemm.specialized.gated.launch_prepared", lambda *args, **kwargs: None),
)


@contextlib.contextmanager
def generated_code() -> Iterator[list[Generated]]:
    """Inside, `fake_cuda` goes on to Inductor's code for an H200; gives the list of it, in the order of compilation."""
    from torch._inductor.graph import GraphLowering

    made: list[Generated] = []

    def write(graph: Any) -> None:
        code = graph.codegen()[0]
        inputs = zip(graph.graph_input_names, graph.example_inputs, strict=True)
        made.append(Generated(getattr(code, "value", code), dict(inputs)))

    until_loading = functools.partial(inductor_until, GraphLowering, "compile_to_module", write)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("te_dynamo.inspect.fake_cuda._inductor_passes_only", until_loading))
        stack.enter_context(mock.patch("torch._inductor.compile_fx._check_triton_bf16_support", lambda graph: None))
        for patch in _as_on(TARGETS["h200"]):
            stack.enter_context(patch)
        stack.callback(has_triton.cache_clear)
        has_triton.cache_clear()
        yield made


def _as_on(target: Target) -> Sequence[contextlib.AbstractContextManager[Any]]:
    """Torch's code generation is told of this GPU what it asks."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.runtime.hints import DeviceProperties

    major, minor = target.capability
    told = DeviceProperties("cuda", 0, target.multiprocessors, 10 * major + minor, major, 65536, 2048, 1024, 32)
    properties = SimpleNamespace(**told._asdict(), gcnArchName="", total_memory=2**37, shared_memory_per_block=49152)
    static = {
        "is_available": lambda: True,
        "is_triton_capable": lambda device=None: True,
        "raise_if_triton_unavailable": lambda device=None: None,
        "current_device": lambda: 0,
        "get_compute_capability": lambda device=None: told.cc,
        "get_device_properties": lambda device=None: properties,
    }
    return [
        mock.patch.object(DeviceProperties, "create", lambda device: told),
        mock.patch("torch.cuda.current_device", lambda: 0),
        *(mock.patch.object(CudaInterface, name, staticmethod(function)) for name, function in static.items()),
        mock.patch.object(CudaInterface.Worker, "get_device_properties", staticmethod(static["get_device_properties"])),
    ]
