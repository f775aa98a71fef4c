"""What an operation is lowered to, traced once for all nodes that are equal but for the tensors they read.

The blocks of a model repeat the same few operations on tensors of the same shapes. Tracing one costs 10 ms, a copy of the
trace less than one. No kernel is compiled for it: launches stay what writes their buffers, and where they are made functional the kernel
says what it writes (lowering/inductor/mutation.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
from torch.utils._pytree import tree_flatten

from te_dynamo.dialect.define import KERNELS
from te_dynamo.dialect.fakes import fake_mode_of
from te_dynamo.dialect.gemm import bias_grad
from te_dynamo.dialect.memory import is_view, written_by_inductor
from te_dynamo.dialect.quantize import quantize, quantize_bias_grad, quantize_with_amax
from te_dynamo.dialect.stacked import quantize_stacked, quantize_stacked_with_amaxes
from te_dynamo.errors import LoweringError
from te_dynamo.kernels.quantize.current import amax_by_rows
from te_dynamo.lowering.in_place import launches_in_place
from te_dynamo.quantized.quantizers import Quantizer


class Traces:
    """The traces of one graph's nodes, by what they depend on."""

    def __init__(self) -> None:
        self._traces: dict[Any, GraphModule] = {}

    def copy_before(self, node: Node, hint: Node | None = None) -> tuple[list[Node], list[Node]]:
        """Copies the trace of `node`'s implementation in front of it: (the nodes that are its results, all call nodes).

        hint: of its scales, where it guesses them (one_pass.py).
        Raises LoweringError for an implementation that cannot be traced.
        """
        leaves, spec = tree_flatten((node.args, node.kwargs))
        inputs = [leaf for leaf in leaves if isinstance(leaf, Node)]
        key = _key(node, leaves, spec, hint)
        traced, known = self._traces.get(key), key in self._traces
        if traced is None:
            traced = _trace(node, leaves, spec, hint)
            if key is not None:
                self._traces[key] = traced
        given = inputs if hint is None else [*inputs, hint]
        copies = _copy_into(node.graph, traced, node, given, again=known)
        output = next(n for n in traced.graph.nodes if n.op == "output")
        calls = [copies[n] for n in traced.graph.nodes if n.op == "call_function"]
        return [copies[result] for result in output.args[0]], calls


def _key(node: Node, leaves: list[Any], spec: Any, hint: Node | None) -> Any:
    """What the trace depends on; None for something that cannot be compared, whose trace nobody shares."""
    inputs = [leaf for leaf in leaves if isinstance(leaf, Node)]
    # 1, 1.0 and True are equal, and no kernel takes one for the other.
    constants = tuple((type(leaf), leaf) for leaf in leaves if not isinstance(leaf, Node))
    tensors = tuple(
        (inputs.index(leaf), _described(leaf.meta["val"])) if isinstance(leaf, Node) else None for leaf in leaves
    )
    how = _known_amaxes(node), launches_in_place(node), hint is not None
    key = (node.target, how, spec, constants, tensors)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _described(value: Any) -> Any:
    """All that a kernel's launcher sees of a fake value: sizes by their expressions."""
    if not isinstance(value, torch.Tensor):
        return type(value), _expression(value)
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    return value.dtype, value.device, value.dim(), tuple(_expression(size) for size in sizes)


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) else size


def _trace(node: Node, leaves: list[Any], spec: Any, hint: Node | None) -> GraphModule:
    from torch._subclasses.functional_tensor import dispatch_functionalize

    launches = _launches(node)

    def implementation(*values: Any) -> list[Any]:
        given = iter(values)
        args, kwargs = spec.unflatten([next(given) if isinstance(leaf, Node) else leaf for leaf in leaves])
        results = launches(*args, **kwargs) if hint is None else launches(*args, **kwargs, hint=next(given))
        return [results] if isinstance(results, torch.Tensor) else list(results)

    values = [leaf.meta["val"] for leaf in (*leaves, hint) if isinstance(leaf, Node)]
    try:
        with fake_mode_of(values):
            # Launches that write their buffers, which nothing else knows yet, stay what they are: made functional, Inductor would
            # trace every one of them again to undo that. No pass between this and code generation drops what has no reader.
            traced = None if launches_in_place(node) is not None else _traced(implementation, values)
            if traced is None or any(_writes(n) for n in traced.graph.nodes):
                traced = _traced(dispatch_functionalize(implementation), values)
                _drop_dead_views(traced.graph)
    except Exception as error:
        raise LoweringError(f"{node.target} could not be lowered{where(node)}: {error}") from error
    if any(n.op == "get_attr" for n in traced.graph.nodes):
        raise LoweringError(f"{node.target} was traced with a tensor constant{where(node)}")
    return traced


def _traced(function: Callable[..., Any], values: list[Any]) -> GraphModule:
    from torch._inductor.decomposition import select_decomp_table

    return make_fx(function, select_decomp_table(), tracing_mode="real")(*values)


def _writes(node: Node) -> bool:
    """Whether an aten operation writes in place, as an operation's class may have it: `output.add_(extra)`."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _drop_dead_views(graph: Graph) -> None:
    """Making a launch that writes its argument functional leaves views of what it had not written yet. Launches stay, read or not."""
    for node in reversed(graph.nodes):
        if not node.users and is_view(node):
            graph.erase_node(node)


def _launches(node: Node) -> Callable[..., Any]:
    """What is traced in place of `node`: a function of the operation's own arguments."""
    known = _known_amaxes(node)
    if not any(known):
        if (in_place := launches_in_place(node)) is not None:
            return in_place
        assert isinstance(node.target, torch._ops.OpOverload)
        return KERNELS[node.target]
    if node.target is quantize_stacked:

        def with_amaxes(xs: list[torch.Tensor], quantizer: Quantizer, by_columns: bool) -> list[torch.Tensor]:
            amaxes = [amax_by_rows(x) if is_known else None for x, is_known in zip(xs, known, strict=True)]
            return KERNELS[quantize_stacked_with_amaxes](xs, quantizer, by_columns, amaxes)

        return with_amaxes
    sums: list[Callable[..., Any]] = [KERNELS[bias_grad]] if node.target is quantize_bias_grad else []
    cast = KERNELS[quantize_with_amax]
    return lambda x, quantizer: [*(f(x) for f in sums), *cast(x, quantizer, amax_by_rows(x))]


def _known_amaxes(node: Node) -> tuple[bool, ...]:
    """Whether Inductor's own code writes the tensor, for each one that the node quantizes with one scale. Such code computes
    the amax too. Empty for other operations."""
    if node.target not in (quantize, quantize_bias_grad, quantize_stacked) or not node.args[1].one_scale:  # type: ignore[union-attr]
        return ()
    if node.target is quantize_stacked:
        return tuple(written_by_inductor(x) for x in node.all_input_nodes)
    return (written_by_inductor(node.args[0]),)  # type: ignore[arg-type]


def _copy_into(graph: Graph, traced: GraphModule, node: Node, inputs: list[Node], again: bool) -> dict[Node, Node]:
    """Copies the traced nodes before `node`; returns the copy of each, the placeholders' being `inputs`.

    again: the trace was copied before, and its fake results belong to those copies.
    """
    placeholders = [n for n in traced.graph.nodes if n.op == "placeholder"]
    copies: dict[Node, Node] = dict(zip(placeholders, inputs, strict=True))
    kept: dict[str, Any] = {k: node.meta[k] for k in ("stack_trace", "nn_module_stack") if k in node.meta}
    with fake_mode_of([n.meta["val"] for n in inputs]), disable_proxy_modes_tracing():
        for original in traced.graph.nodes:
            if original.op in ("placeholder", "output"):
                continue
            with graph.inserting_before(node):
                copied = graph.node_copy(original, lambda n: copies[n])
            copied.meta = {**kept, **original.meta}
            copied.meta.pop("eager_input_vals", None)  # of the trace's own arguments
            if again and "val" in original.meta:
                copied.meta["val"] = _value(copied)
            copies[original] = copied
    return copies


def _value(node: Node) -> Any:
    """A fake result of its own: Inductor takes nodes that share a storage for views of one buffer."""
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    assert callable(node.target)
    value: Any = node.target(*args, **kwargs)
    return value


def where(node: Node) -> str:
    """at "file.py", line 17, in forward: the user's line, from torch's stack trace."""
    lines = [
        line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip().startswith("File")
    ]
    return f" ({lines[-1]})" if lines else ""
