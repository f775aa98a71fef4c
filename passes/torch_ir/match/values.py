"""What the matcher asks a node: which call it is, what tensor it gives, and how a te node is put in its
place."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from te_dynamo.passes.torch_ir.match.memory import CHANGED_BY, note_new, take_over
from te_dynamo.quantized.tensor import QuantizedTensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
"""The precisions a te operation computes for."""

_DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}


def dtype_name(dtype: torch.dtype) -> str:
    """ "bf16", "fp16", "fp32", "fp64"; any other dtype as torch spells it, without "torch."."""
    return _DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


def tensor_of(node: Any) -> torch.Tensor | None:
    """The (fake) tensor Dynamo recorded for a node; None for anything that is not a node giving one
    tensor, and for a tensor whose form changes later."""
    known = isinstance(node, fx.Node) and CHANGED_BY not in node.meta
    value = node.meta.get("example_value") if known else None
    return value if isinstance(value, torch.Tensor) else None


def quantized_of(node: Any) -> QuantizedTensor | None:
    """The same of a node that gives a QuantizedTensor of fake buffers; None for any other."""
    value = tensor_of(node)
    return value if isinstance(value, QuantizedTensor) else None


def calls(node: Any, functions: frozenset[Any] | set[Any], methods: frozenset[str] | set[str] = frozenset()) -> bool:
    """Whether a node calls one of these functions or tensor methods, and its result keeps its form."""
    return spells(node, functions, methods) and CHANGED_BY not in node.meta


def name_of(node: fx.Node) -> str:
    """What a node calls, as the user's line spells it: "add_" of aten.add_.Tensor."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        target = target.overloadpacket
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def spells(node: Any, functions: frozenset[Any] | set[Any], methods: frozenset[str] | set[str] = frozenset()) -> bool:
    """Whether a node calls one of these functions or tensor methods, or the aten operation of that name, as a module that
    torch.export made does."""
    if not isinstance(node, fx.Node):
        return False
    if node.op == "call_method":
        return node.target in methods
    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten":
        name = name_of(node)
        return node.target in functions or name in methods or any(getattr(f, "__name__", "") == name for f in functions)
    return node.target in functions


def arguments(node: fx.Node, *names: str) -> dict[str, Any] | None:
    """A call's arguments by name, however they were passed; None when it has arguments that `names` does not
    list."""
    if len(node.args) > len(names) or not set(node.kwargs) <= set(names):
        return None
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def fixed(size: int | torch.SymInt) -> int | None:
    """A size as a Python int, also where Dynamo traced it as a symbol that the graph has since fixed to one value; None
    where it is dynamic."""
    return size if isinstance(size, int) else size.node.maybe_as_int()


def hint(size: Any) -> int:
    """The size, the one seen while tracing where dynamic, 0 where data decides it or it is a nested tensor's lengths."""
    if isinstance(size, int):
        return size
    seen = size.node.hint if size.node.has_hint() else 0
    return seen if isinstance(seen, int) else 0


def times_mapped(value: torch.Tensor) -> int:
    """How often torch.vmap computes what `value` is of one element; 1 outside of it."""
    whole = value
    while torch._C._functorch.is_functorch_wrapped_tensor(whole):
        whole = torch._C._functorch.get_unwrapped(whole)
    if whole is value:
        return 1
    sizes = [fixed(math.prod(tensor.shape)) for tensor in (whole, value)]
    return sizes[0] // sizes[1] if all(sizes) else 1  # type: ignore[operator]


def is_number(argument: Any) -> bool:
    """Whether a call's argument is a Python number, or was one until torch.compile(dynamic=True) made it an input."""
    if isinstance(argument, fx.Node):
        argument = argument.meta.get("example_value")
    return isinstance(argument, (int, float, torch.SymInt, torch.SymFloat))


def number(argument: Any) -> float:
    """The value of what `is_number` accepts. Of an input it becomes a guard, and Dynamo traces anew with the number."""
    return float(argument.meta["example_value"] if isinstance(argument, fx.Node) else argument)


def sole_user(node: fx.Node) -> fx.Node | None:
    """The only node that reads `node`; None when there are none or several."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def left_as_plain(*nodes: fx.Node | None) -> str:
    """Why a te operation cannot take these operands whatever their shape, "" when it can (None operands are
    absent)."""
    for node in nodes:
        if node is None:
            continue
        value = tensor_of(node)
        if CHANGED_BY in node.meta:
            return f"{node.meta[CHANGED_BY]} changes the size, the strides or the storage of {node} in place"
        if value is None:
            return f"the graph does not say what tensor {node} is"
        if torch._C._functorch.is_functorch_wrapped_tensor(value):
            return "inside a torch.func transform"
        if value.is_nested:
            return "an operand is a nested tensor"
        plain = type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)
        if not plain or is_traceable_wrapper_subclass(value):
            return f"an operand is a {type(value).__name__}, not a plain tensor"
        if value.layout != torch.strided:
            return f"an operand has the layout {value.layout}, not strided"
        if value.device.type not in ("cuda", "cpu"):
            no_gpu = '; te_dynamo.explain(.., device="h200") needs no GPU' * (value.device.type == "meta")
            return f"on the device {value.device.type!r}; te_dynamo runs on cuda and cpu{no_gpu}"
    return ""


def emit(graph: fx.Graph, op: Callable[..., Any], args: Sequence[Any], like: fx.Node, **kwargs: Any) -> fx.Node:
    """A call of `op` at the graph's insert point, standing for the user's node `like`: same source line,
    module and grad mode; its example value is what `op` gives for the arguments' example values."""
    return _with_meta(graph.call_function(op, tuple(args), kwargs), like, op)


def emit_method(graph: fx.Graph, method: str, args: Sequence[Any], like: fx.Node) -> fx.Node:
    """The same for a tensor method."""
    return _with_meta(graph.call_method(method, tuple(args)), like, lambda self, *rest: getattr(self, method)(*rest))


def emit_getitem(graph: fx.Graph, node: fx.Node, index: int) -> fx.Node:
    """`node[index]`, of a node that `emit` made."""
    return _with_meta(graph.call_function(operator.getitem, (node, index)), node, operator.getitem)


def replace(node: fx.Node, new: fx.Node) -> None:
    """Readers of `node` read `new`, which takes over what is known of its memory."""
    take_over(node, new)
    node.replace_all_uses_with(new)


def put_back(node: fx.Node, new: fx.Node, before: fx.Node) -> None:
    """Readers of `new` read `node` again, and what was added between `before` and `node` is gone."""
    new.replace_all_uses_with(node)
    while node.prev is not before:
        node.graph.erase_node(node.prev)


def erase_unused(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    """Removes the nodes of a finished match that nothing reads any more. Never a graph-wide elimination: at
    Torch IR that would take in-place methods, whose results nobody reads, for dead."""
    for node in sorted(nodes, reverse=True):
        if not node.users:
            graph.erase_node(node)


def _with_meta(new: fx.Node, like: fx.Node, run: Callable[..., Any]) -> fx.Node:
    new.meta = {**like.meta}
    values, options = fx.map_arg((new.args, new.kwargs), lambda node: node.meta["example_value"])
    replaced = tensor_of(like)
    fake_modes = [v.fake_mode for v in (*tree_leaves(values), replaced) if isinstance(v, FakeTensor)]
    grad = replaced is None or replaced.requires_grad
    with fake_modes[0] if fake_modes else contextlib.nullcontext(), torch.set_grad_enabled(grad):
        new.meta["example_value"] = run(*values, **options)
    note_new(new)
    return new
