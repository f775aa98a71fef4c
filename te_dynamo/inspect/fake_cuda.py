"""Compiling for CUDA on a machine without one: what the graph snapshots of tests are taken with, and what `explain` says of a GPU.

Fake tensors carry device "cuda" through every build of torch, but training graphs need more:

- autograd asks a CUDA device guard for streams while it builds a graph. CUDA builds without a device get a
  no-op guard from torch itself; for CPU-only builds the CPU's, which does nothing either, is put in its
  place (te_dynamo/inspect/device_guard.py).
- the C++ engine asks for a CUDA context before it runs a backward pass, so AOTAutograd's call of
  `torch.autograd.grad` is answered by a walk over the same autograd nodes in Python (`grad`).
- buffers that backward may overwrite are donated by the engine's word alone that nobody keeps the graph: it is given in its place.
- Inductor stops after its last graph pass, before it generates code, and the graph runs as it is.
- torch finds out which arguments a Triton kernel writes by compiling it for Triton's active device: that, and
  what torch tells of the device, is one of `TARGETS`, an H200 normally.
"""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.fx import traceback as fx_traceback
from torch.utils._pytree import tree_map

from te_dynamo.errors import InvalidOptionError
from te_dynamo.inspect.device_guard import ensure_device_guard
from te_dynamo.inspect.fake_autocast import autocast_on_cuda
from te_dynamo.inspect.target import exchange_tensors, held_as_before
from te_dynamo.kernels.runtime.target import TARGETS, Target, acting_as
from te_dynamo.quantized.tensor import QuantizedTensor
from te_dynamo.quantized.tensor_proto import TensorProto
from te_dynamo.torch_private.table import FAKE_CUDA
from te_dynamo.weights.frozen import FROZEN, Frozen, frozen_name, is_dropped

_WITHOUT_FP8 = "a10", "a100", "a30", "a40", "a6000", "p100", "rtx3080", "rtx3090", "t4", "titanv", "v100"


def checked_gpu(name: object, others: Sequence[str] = ()) -> str:
    """The name of one in `TARGETS`, or of the other devices, in any case of letters, as it is written there.

    Raises InvalidOptionError, which names the nearest, for another one.
    """
    spelled = str(name).lower()
    if spelled in _WITHOUT_FP8:
        raise InvalidOptionError(
            f"te_dynamo: {name!r} has no FP8: every linear would stay in the model's precision there; with FP8: {', '.join(TARGETS)}"
        )
    if spelled not in TARGETS and spelled not in others:
        raise InvalidOptionError.unknown("device", name, [*others, *TARGETS])
    return spelled


def _show_dynamo_torch() -> None:
    """Dynamo learns which functions are torch's, by identity: not inside of `fake_cuda`, where `grad` is ours. It remembers them until
    a process group is made."""
    from torch._dynamo.trace_rules import get_torch_obj_rule_map
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    get_torch_obj_rule_map()
    TorchInGraphFunctionVariable._get_handlers()


@contextlib.contextmanager
def fake_cuda(device: str | Target = "h200") -> Iterator[None]:
    """Inside, tensors are fake, and `torch.compile` traces forward and backward graphs for "cuda".

    device: a GPU, or the name of one in `TARGETS` (kernels/runtime/target.py), whose properties torch and Triton then tell.
    Raises UnsupportedError on a torch without a name that is patched.
    """
    FAKE_CUDA.require()
    import torch._functorch.config
    import torch._inductor.config
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    ensure_device_guard()
    _show_dynamo_torch()
    with (
        FakeTensorMode(shape_env=ShapeEnv()),
        mock.patch("torch.autograd.grad", grad),
        # Backward is compiled with forward: what is compiled later is copied first, with the real tensors of torch.tensor(1.0).
        torch._functorch.config.patch(force_non_lazy_backward_lowering=True),
        mock.patch("torch._C._autograd._get_current_graph_task_keep_graph", lambda: False),
        torch._inductor.config.patch(joint_graph_constant_folding=False),  # it makes real tensors
        mock.patch("torch.fx.experimental.proxy_tensor.CONSTANT_NUMEL_LIMIT", -1),  # so does this, of torch.tensor(1.0)
        mock.patch("torch.cuda._lazy_init", lambda: None),  # torch.tensor(..., device="cuda") and x[[0, 1]] call it
        autocast_on_cuda(),
        _inductor_passes_only(),
        _described_as(TARGETS[device] if isinstance(device, str) else device),
    ):
        yield


def grad(
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Sequence[Tensor],
    grad_outputs: Sequence[Tensor | None] | None = None,
    create_graph: bool = False,
    **_: Any,
) -> tuple[Tensor | None, ...]:
    """`torch.autograd.grad` without the C++ engine: same nodes, same order, ones for a missing grad_output.

    An input that no output depends on gets None. Of the other arguments of `torch.autograd.grad` none
    changes a trace.
    """
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    wanted = [_edge(tensor) for tensor in inputs]
    roots = [_edge(tensor) for tensor in outputs]
    needed, waiting = _plan({node for node, _ in roots}, {node for node, _ in wanted})
    arrived: dict[Node, dict[int, Tensor]] = {}
    for position, (root, output) in enumerate(zip(roots, outputs, strict=True)):
        given = grad_outputs[position] if grad_outputs is not None else None
        _accumulate(arrived, root, torch.ones_like(output) if given is None else given)

    ready = [(-node._sequence_nr(), id(node), node) for node in needed if not waiting[node]]
    heapq.heapify(ready)
    results: dict[tuple[Node, int], Tensor] = {}
    with torch.set_grad_enabled(create_graph):
        while ready:
            node = heapq.heappop(ready)[2]  # the engine's order: the youngest node first
            grads = arrived.pop(node, {})
            results.update({(node, slot): value for slot, value in grads.items()})
            with _numbered(node):
                results_of_call = _call(node, grads, needed)
            for edge, value in results_of_call:
                if value is not None:
                    _accumulate(arrived, edge, value)
                waiting[edge[0]] -= 1
                if not waiting[edge[0]]:
                    heapq.heappush(ready, (-edge[0]._sequence_nr(), id(edge[0]), edge[0]))
    return tuple(results.get(edge) for edge in wanted)


def _edge(tensor: Tensor) -> tuple[Node, int]:
    edge = torch.autograd.graph.get_gradient_edge(tensor)
    return edge[0], edge[1]


def _plan(roots: set[Node], wanted: set[Node]) -> tuple[set[Node], dict[Node, int]]:
    """(the nodes on a path from a root to a wanted node, how many gradients each waits for)"""
    order: list[Node] = []
    seen: set[Node] = set()
    stack = [(node, False) for node in roots]
    while stack:
        node, finished = stack.pop()
        if finished:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((child, False) for child, _ in node.next_functions if child is not None)
    needed = wanted & seen
    for node in order:  # children come before their parents
        if any(child in needed for child, _ in node.next_functions):
            needed.add(node)
    waiting = dict.fromkeys(needed, 0)
    for node in needed:
        for child, _ in node.next_functions:
            if child in needed:
                waiting[child] += 1
    return needed, waiting


@contextlib.contextmanager
def _numbered(node: Node) -> Iterator[None]:
    """Inside, traced operations have the number of the forward operation that they belong to, as the engine's hooks give it."""
    fx_traceback.set_grad_fn_seq_nr(node._sequence_nr())
    try:
        yield
    finally:
        fx_traceback.reset_grad_fn_seq_nr()


def _call(node: Node, grads: dict[int, Tensor], needed: set[Node]) -> list[tuple[tuple[Node, int], Tensor | None]]:
    """(edge, gradient) for each needed edge below `node`; gradients None where nothing arrived at `node`."""
    edges: list[Any] = [edge for edge in node.next_functions if edge[0] is not None]
    if not any(child in needed for child, _ in edges):
        return []
    values: list[Tensor | None] = [None] * len(edges)
    if grads:
        arguments = [grads.get(slot) for slot in range(len(node._input_metadata))]
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            if _counts_on_zeros(node):
                arguments = [
                    torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device) if grad is None else grad
                    for grad, meta in zip(arguments, node._input_metadata, strict=True)
                ]
            # Not callable, and it answers for arguments that are no tensors too: those have no edge.
            result = _as_list(node.apply(*arguments))
            values = [value for value, wanted in zip(result, node.needs_input_grad, strict=False) if wanted]
        else:
            result = _as_list(node(*arguments))  # type: ignore[operator]
            values = [value for value, edge in zip(result, node.next_functions, strict=True) if edge[0] is not None]
    return [(edge, value) for edge, value in zip(edges, values, strict=True) if edge[0] in needed]


def _counts_on_zeros(node: Node) -> bool:
    """Whether it takes no None: AOTAutograd's and torch's control flow (associative_scan) have the engine make zeros."""
    forward = getattr(type(node), "_forward_cls", None)
    return type(node).__name__ == "CompiledFunctionBackward" or getattr(forward, "__module__", "").startswith(
        "torch._higher_order_ops"
    )


def _as_list(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _accumulate(arrived: dict[Node, dict[int, Tensor]], edge: tuple[Node, int], value: Tensor) -> None:
    node, slot = edge
    metadata = node._input_metadata[slot]
    if len(metadata.shape) != value.dim() or any(
        a is not b and a != b for a, b in zip(metadata.shape, value.shape, strict=True)
    ):
        value = value.sum_to_size(metadata.shape)  # a broadcast operand
    if value.dtype != metadata.dtype:
        value = value.to(metadata.dtype)
    slots = arrived.setdefault(node, {})
    slots[slot] = value if slot not in slots else slots[slot] + value


class _Stopped(BaseException):
    """Not an Exception: Inductor wraps those into its own."""


def _inductor_passes_only() -> contextlib.AbstractContextManager[None]:
    from torch._inductor import compile_fx

    name = "_recursive_post_grad_passes"
    return inductor_until(compile_fx, name, getattr(compile_fx, name))


@contextlib.contextmanager
def inductor_until(owner: Any, name: str, last: Callable[..., object]) -> Iterator[None]:
    """Inside, Inductor compiles until it calls `owner.name`: `last` is called in its place, and the graph runs as it is then."""
    from functorch.compile import make_boxed_func
    from torch._inductor import compile_fx

    compile_inner: Any = compile_fx._compile_fx_inner  # type: ignore[attr-defined]

    def last_then_stop(*args: Any, **kwargs: Any) -> None:
        last(*args, **kwargs)
        raise _Stopped

    def without_the_rest(gm: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return compile_inner(gm, *args, **kwargs)
        except _Stopped:
            gm.recompile()
            return make_boxed_func(gm.forward)

    with (
        mock.patch.object(owner, name, last_then_stop),
        mock.patch.object(compile_fx, "_compile_fx_inner", without_the_rest),
    ):
        yield


@contextlib.contextmanager
def moved(target: Any, tree: Any) -> Iterator[Any]:
    """Inside `fake_cuda`: a module's tensors are fake ones on "cuda" until the context ends; gives `tree` with such tensors too."""
    modules = list(target.modules()) if isinstance(target, nn.Module) else []
    fakes: dict[int, Tensor] = {}
    with held_as_before(target):
        for module in modules:
            exchange_tensors(module, lambda tensor: _faked(tensor, fakes))
        yield tree_map(lambda leaf: _faked(leaf, fakes) if isinstance(leaf, Tensor) else leaf, tree)


def move(model: nn.Module) -> None:
    """Replaces every tensor of `model` by a fake one on "cuda"; `Module.to` cannot under a fake mode."""
    fakes: dict[int, Tensor] = {}  # tied parameters stay tied
    for module in model.modules():
        exchange_tensors(module, lambda tensor: _faked(tensor, fakes))


def _faked(tensor: Tensor, fakes: dict[int, Tensor]) -> Tensor:
    if id(tensor) not in fakes:
        if isinstance(tensor, QuantizedTensor):
            fake = TensorProto(
                tuple(tensor.shape), tensor.dtype, tensor.quantizer, device=torch.device("cuda")
            ).create_tensor()
        else:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
        if isinstance(tensor, nn.Parameter):
            fake = nn.Parameter(fake, tensor.requires_grad)
            if tensor in FROZEN:
                dropped = fake if is_dropped(tensor) else None
                FROZEN[fake] = Frozen(frozen_name(tensor), source=dropped, place_holder=dropped)
        # What torch._dynamo.mark_dynamic and its like say of it.
        vars(fake).update({name: mark for name, mark in vars(tensor).items() if name.startswith("_dynamo_")})
        fakes[id(tensor)] = fake if isinstance(fake, nn.Parameter) else fake.requires_grad_(tensor.requires_grad)
    return fakes[id(tensor)]


@contextlib.contextmanager
def _described_as(target: Target) -> Iterator[None]:
    """Torch and Triton describe the device as this one, as far as compiling asks."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    major, minor = target.capability
    properties = SimpleNamespace(
        name=f"NVIDIA {target.name}",
        major=major,
        minor=minor,
        multi_processor_count=target.multiprocessors,
        shared_memory_per_block_optin=target.shared_bytes,
        gcnArchName="",  # Inductor asks before it compares algorithms
    )
    triton_target = GPUTarget("cuda", 10 * major + minor, 32)
    active = SimpleNamespace(get_current_target=lambda: triton_target, get_current_device=lambda: 0)
    with (
        acting_as(target),
        mock.patch.object(driver, "_active", active),  # driver.reset_active() fails where there is no device
        mock.patch("torch.cuda.get_device_properties", lambda device=None: properties),
        mock.patch("torch.cuda.get_device_capability", lambda device=None: target.capability),
    ):
        yield
