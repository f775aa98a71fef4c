"""Linears that share an input, as one GEMM in forward, one dgrad and one wgrad: gate and up; q and k, or q, k and v.

    before    q_1 = te.quantize(gate.weight, e4m3[row+column]);  q_2 = te.quantize(up.weight, e4m3[row+column])
              gate: bf16[M, N] = te.gemm(x.data, x.scale_inv, q_1.data, q_1.scale_inv, None, bf16, fast_accum=False)
              up: bf16[M, N] = te.gemm(x.data, x.scale_inv, q_2.data, q_2.scale_inv, None, bf16, fast_accum=False)
              ...
              p_1 = te.quantize(dgate, e5m2[row+column]);  p_2 = te.quantize(dup, e5m2[row+column])
              dx = te.gemm(p_1.data, .., q_1.transpose, ..) + te.gemm(p_2.data, .., q_2.transpose, ..)
              dw_1: bf16[N, K] = te.gemm(p_1.transpose, .., x.transpose, ..);  dw_2 = te.gemm(p_2.transpose, .., x.transpose, ..)
    after     q: (f8e4m3[2N, K], f8e4m3[K, 2N], f32[2]) = te.quantize_stacked([gate.weight, up.weight], e4m3[row+column], False)
              y: bf16[M, 2N] = te.gemm_stacked(x.data, x.scale_inv, q.data, q.scale_inv, bf16, False, "N", [N, N])
              gate = y[:, :N];  up = y[:, N:]
              ...
              p: (f8e5m2[M, 2N], f8e5m2[2N, M], f32[2]) = te.quantize_stacked([dgate, dup], e5m2[row+column], True)
              dx = te.gemm_stacked(p.data, .., q.transpose, .., "K", [N, N])
              dw: bf16[2N, K] = te.gemm_stacked(p.transpose, .., x.transpose, .., "M", [N, N]);  dw_1 = dw[:N];  dw_2 = dw[N:]

Each tensor keeps its own scale, so forward and the quantized tensors have the bits that they have apart. dx is rounded once,
where the sum of two GEMMs rounds three times. Weight gradients have the same bits where the GEMMs apart do not cut K.

Kept weights (passes/torch_ir/workspaces.py) are inputs of the graph as such a stack. Each linear reads slices of it, and the fusion takes the
slices away.

These are left as they are:

- linears with a bias, of another recipe, with sides that are no multiples of 128, or more than three;
- results that the graph returns, or that a view cannot read by rows of one stride;
- a mixture of weights with and without gradient;
- GEMMs that the cost model finds slower together;
- results that backward reads beside results that it does not read. What is saved of a stack keeps the whole stack alive. This parts v from
  q and k in an attention with rotary embedding.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from te_dynamo.dialect.define import is_te
from te_dynamo.dialect.gated import gated, gated_backward
from te_dynamo.dialect.gemm import gemm
from te_dynamo.dialect.memory import RESHAPES, is_view
from te_dynamo.dialect.quantize import quantize
from te_dynamo.dialect.stacked import MOST_SEGMENTS, gemm_stacked, quantize_stacked, segments_stack, stacking_pays
from te_dynamo.passes.dialect.graph import (
    call_like,
    calls,
    fakes_of,
    getitem_after,
    item_users,
    reshaped_like,
    retrace_views,
    sorted_topologically,
)

__all__ = ["fuse_shared_input"]

_aten = torch.ops.aten
_BY_ROWS = (gated, gated_backward)  # the te operations that read tensors with a row stride of their own


@dataclasses.dataclass(frozen=True)
class _Part:
    """A weight that is a part of a stack which the graph is given (passes/torch_ir/workspaces.py): the stack's buffers, and where."""

    data: Node
    scales: Node
    transpose: Node | None
    first: int
    end: int
    index: int

    @property
    def stack(self) -> tuple[Any, ...]:
        return self.data, self.scales, self.transpose


@dataclasses.dataclass(frozen=True)
class _Linear:
    """One linear's nodes: te.quantize of the weight, te.gemm of forward; in backward te.quantize of dy, dgrad and wgrad."""

    weight: Node | _Part
    product: Node
    grad: Node | None
    dgrad: Node | None
    wgrad: Node | None

    @property
    def width(self) -> Any:
        """N, the rows of the weight."""
        if isinstance(self.weight, _Part):
            return self.weight.end - self.weight.first
        return _source(self.weight).meta["val"].shape[0]

    @property
    def kind(self) -> tuple[Any, ...]:
        """What the weights of a stack have in common."""
        weight = self.weight
        own = weight.stack if isinstance(weight, _Part) else (weight.args[1], _source(weight).meta["val"].dtype)
        return *own, self.dgrad is None


def fuse_shared_input(graph: Graph) -> int:
    """Linears of one input -> te.quantize_stacked and te.gemm_stacked.

    A joint fusion; among the forward ones for inference graphs. In the forward part of a divided graph nothing is left to find.
    """
    fired = 0
    for group in list(_groups(graph)):
        linears = _in_order(group)
        total = _Sum.of([x.dgrad for x in linears if x.dgrad is not None]) if linears[0].dgrad is not None else None
        if not _alike(linears, total) or not _pays(linears):
            continue
        views = _views_of_slices(linears)
        if views is None:
            continue
        _stack(graph, linears, total)
        for node, value in views.items():
            node.meta["val"] = value
        fired += 1
    if fired:
        sorted_topologically(graph)
    return fired


# --- finding ------------------------------------------------------------------------------------------------


def _groups(graph: Graph) -> Iterator[list[_Linear]]:
    """Linears of one input, one configuration and one region of checkpointing; those that backward reads apart from others."""
    in_backward = _reachable([n for n in graph.nodes if n.op == "placeholder" and "tangents" in n.name])
    groups: dict[Any, list[_Linear]] = {}
    for product in calls(graph, gemm):
        linear = _linear_of(product)
        if linear is None:
            continue
        x, x_scale, _, _, _, out_dtype, fast_accum = product.args
        tag = product.meta.get("ac_graph_id"), str(product.meta.get("recompute"))
        saved = product not in in_backward and any(user in in_backward for user in _readers(product))
        groups.setdefault((x, x_scale, out_dtype, fast_accum, tag, saved, linear.kind), []).append(linear)
    yield from (group for group in groups.values() if 2 <= len(group) <= MOST_SEGMENTS)


def _linear_of(product: Node) -> _Linear | None:
    """The linear whose forward product this is, if nothing else reads what it quantizes."""
    _, _, data, scale, bias, _, _ = product.args
    if _slice_of_input(data, 0) is not None:
        return _linear_of_part(product)
    weight = _quantize_behind(data, "data")
    if weight is None or bias is not None or _quantize_behind(scale, "scale_inv") is not weight:
        return None
    if len(_source(weight).meta["val"].shape) != 2 or not _from_an_input(_source(weight)):
        return None
    readers = _readers_by_name(weight)
    transposed = readers.get("transpose", set())
    if readers["data"] != {product} or len(transposed) > 1 or readers["scale_inv"] != {product, *transposed}:
        return None
    if not transposed:
        return _Linear(weight, product, None, None, None)
    (dgrad,) = transposed
    if dgrad.target is not gemm or _quantize_behind(dgrad.args[2], "transpose") is not weight:
        return None
    return _with_backward(weight, product, dgrad)


def _linear_of_part(product: Node) -> _Linear | None:
    """The linear of that forward product by a part of a given stack."""
    _, _, data, scale, bias, _, _ = product.args
    rows, scales = _slice_of_input(data, 0), _slice_of_input(scale, 0)
    if rows is None or scales is None or bias is not None or set(data.users) != {product}:  # type: ignore[union-attr]
        return None
    (stack, first, end), (scale_inv, index, after) = rows, scales
    dgrads = set(scale.users) - {product}  # type: ignore[union-attr]
    if after != index + 1 or len(dgrads) > 1 or not _has_scale_a_part(stack, scale_inv):
        return None
    if not dgrads:
        return _Linear(_Part(stack, scale_inv, None, first, end, index), product, None, None, None)
    (dgrad,) = dgrads
    copied: Any = dgrad.args[2] if dgrad.target is gemm and dgrad.args[3] is scale else None
    columns = (
        _slice_of_input(copied.args[0], 1) if copied is not None and copied.target is _aten.clone.default else None
    )
    if columns is None or columns[1:] != (first, end):
        return None
    return _with_backward(_Part(stack, scale_inv, columns[0], first, end, index), product, dgrad)


def _has_scale_a_part(stack: Node, scale_inv: Node) -> bool:
    """Whether these are buffers of te.quantize_stacked: more scales than one, of a matrix."""
    return stack.meta["val"].dim() == 2 and scale_inv.meta["val"].dim() == 1 and scale_inv.meta["val"].shape[0] > 1


def _slice_of_input(node: Any, dim: int) -> tuple[Node, int, int] | None:
    """(input, first, end) of a slice along `dim` of an input of the graph."""
    if not (isinstance(node, Node) and node.target is _aten.slice.Tensor and node.args[1:2] == (dim,)):
        return None
    source, _, first, end = node.args if len(node.args) == 4 else (None,) * 4
    is_input = isinstance(source, Node) and source.op == "placeholder"
    return (source, first, end) if is_input and isinstance(first, int) and isinstance(end, int) else None  # type: ignore[return-value]


def _with_backward(weight: Node | _Part, product: Node, dgrad: Node) -> _Linear | None:
    """The linear with its dgrad and its wgrad, if nothing else reads the gradient that they quantize."""
    grad = _quantize_behind(dgrad.args[0], "data")
    if grad is None or dgrad.args[4] is not None:
        return None
    grad_readers = _readers_by_name(grad)
    wgrads = grad_readers.get("transpose", set())
    if grad_readers["data"] != {dgrad} or len(wgrads) > 1 or grad_readers["scale_inv"] != {dgrad, *wgrads}:
        return None
    wgrad = next(iter(wgrads), None)
    if wgrad is not None and (wgrad.target is not gemm or _quantize_behind(wgrad.args[0], "transpose") is not grad):
        return None
    return _Linear(weight, product, grad, dgrad, wgrad)


def _quantize_behind(buffer: Any, name: str) -> Node | None:
    """The te.quantize, of a format that stacks, whose buffer of that name this is."""
    if not (isinstance(buffer, Node) and buffer.target is operator.getitem):
        return None
    node, index = buffer.args
    if not (isinstance(node, Node) and node.target is quantize and node.args[1].stacks):  # type: ignore[union-attr]
        return None
    return node if _names(node)[index] == name else None  # type: ignore[index]


def _names(quantized: Node) -> list[str]:
    return quantized.args[1].buffer_names()  # type: ignore[union-attr]


def _readers_by_name(quantized: Node) -> dict[str, set[Node]]:
    """Buffer name -> who reads it, of a te.quantize."""
    items = item_users(quantized)
    return {
        name: {user for item in items.get(i, ()) for user in item.users} for i, name in enumerate(_names(quantized))
    }


def _source(quantized: Node) -> Node:
    source = quantized.args[0]
    assert isinstance(source, Node)
    return source


def _from_an_input(node: Node) -> bool:
    """Whether it is an input of the graph, cast or viewed: so it depends on no product of the group."""
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node.op in ("placeholder", "get_attr")


def _reachable(nodes: list[Node]) -> set[Node]:
    """The nodes, and all that depends on them."""
    reached, waiting = set(nodes), list(nodes)
    while waiting:
        for user in waiting.pop().users:
            if user not in reached:
                reached.add(user)
                waiting.append(user)
    return reached


def _readers(node: Node) -> Iterator[Node]:
    """Who reads the node's value, through views; the output node if the graph returns it."""
    for user in node.users:
        if is_view(user):
            yield from _readers(user)
        else:
            yield user


@dataclasses.dataclass
class _Sum:
    """dgrads that are only added to each other and to further terms of the same shape.

    node: the sum. others: the terms that are no dgrads of the group, in the order in which they are added.
    view: how a dgrad [M, K] becomes a term, None where it is one.
    """

    node: Node
    others: list[Node]
    view: Node | None

    @classmethod
    def of(cls, dgrads: list[Node]) -> _Sum | None:
        """None where a dgrad is read by something else."""
        terms = [term for dgrad in dgrads if (term := _only_view(dgrad)) is not None]
        above = [list(_additions(term)) for term in terms]
        root = next((add for add in above[0] if all(add in adds for adds in above)), None) if above else None
        if len(terms) < len(dgrads) or root is None:
            return None
        inner = {add for adds in above for add in adds[: adds.index(root) + 1]}
        others = [side for add in inner for side in add.all_input_nodes if side not in inner and side not in terms]
        return cls(root, sorted(others), terms[0] if terms[0] not in dgrads else None)


def _only_view(node: Node) -> Node | None:
    """The node behind its views, each the only reader of the one before."""
    while len(node.users) == 1 and next(iter(node.users)).target in RESHAPES:
        node = next(iter(node.users))
    return node if len(node.users) == 1 else None


def _additions(term: Node) -> Iterator[Node]:
    """The sums that a term is part of, from the first on, as long as nothing else reads it or them."""
    while len(term.users) == 1:
        add = next(iter(term.users))
        sides = add.all_input_nodes
        if add.target is not _aten.add.Tensor or len(add.args) != 2 or add.kwargs or len(sides) != 2:
            return
        value = add.meta["val"]
        if any(s.meta["val"].shape != value.shape or s.meta["val"].dtype != value.dtype for s in sides):
            return
        yield add
        term = add


# --- judging ------------------------------------------------------------------------------------------------


def _in_order(linears: list[_Linear]) -> list[_Linear]:
    """As in the graph, but a gate before what it gates: te.gated_backward_quantize writes them so."""

    def place(linear: _Linear) -> int:
        grad = None if linear.grad is None else _source(linear.grad)
        if grad is None or grad.target is not operator.getitem or grad.args[0].target is not gated_backward:  # type: ignore[union-attr]
            return 0
        return int(grad.args[1])  # type: ignore[arg-type]

    return sorted(linears, key=place)


def _alike(linears: list[_Linear], total: _Sum | None) -> bool:
    """Whether forward and backward of the linears can be one GEMM each."""
    if not segments_stack([linear.width for linear in linears]) or not _whole(linears):
        return False
    if linears[0].grad is None:
        return True
    if total is None or any(linear.grad is None for linear in linears):
        return False

    def same(values: Iterator[Any]) -> bool:
        first = next(values, None)  # none where the weights learn nothing
        return all(value == first for value in values)

    wgrads = [linear.wgrad for linear in linears]
    with_wgrad = [w for w in wgrads if w is not None]
    return (
        len({linear.grad for linear in linears}) == len(linears)
        and len(with_wgrad) in (0, len(linears))
        and same((x.grad.args[1], _source(x.grad).meta["val"].dtype) for x in linears if x.grad is not None)
        and same(x.dgrad.args[5:] for x in linears if x.dgrad is not None)
        and same(w.args[2:] for w in with_wgrad)
    )


def _whole(linears: list[_Linear]) -> bool:
    """Whether parts of a given stack are all of it, in its order."""
    parts = [linear.weight for linear in linears if isinstance(linear.weight, _Part)]
    if not parts:
        return True
    ends = [part.end for part in parts]
    return (
        [part.first for part in parts] == [0, *ends[:-1]]
        and ends[-1] == parts[0].data.meta["val"].shape[0]
        and [part.index for part in parts] == list(range(parts[0].scales.meta["val"].shape[0]))
    )


def _pays(linears: list[_Linear]) -> bool:
    """Whether the cost model finds each stacked GEMM at least as fast as its parts."""
    segments = [linear.width for linear in linears]
    (m, k), n = linears[0].product.args[0].meta["val"].shape, sum(segments)  # type: ignore[union-attr]
    device = linears[0].product.meta["val"].device
    shapes = [(linears[0].product, "N", (m, n, k), 6), (linears[0].dgrad, "K", (m, k, n), 6)]
    shapes += [(linears[0].wgrad, "M", (n, k, m), 6)]
    return all(
        stacking_pays(*size, device, bool(node.args[at]), along, segments)
        for node, along, size, at in shapes
        if node is not None
    )


def _views_of_slices(linears: list[_Linear]) -> dict[Node, Any] | None:
    """The values of all views of the products as slices of one tensor; None where a reader needs its own contiguous tensor."""
    rows, total = linears[0].product.meta["val"].shape[0], sum(linear.width for linear in linears)
    values: dict[Node, Any] = {}
    for linear in linears:
        for reader in _readers(linear.product):
            if reader.op == "output" or (is_te(reader.target) and reader.target not in _BY_ROWS):
                return None
        with fakes_of(linear.product):
            apart = linear.product.meta["val"].new_empty(rows, total)[:, : linear.width]
        views = retrace_views(linear.product, apart)
        if views is None:
            return None
        values |= views
    return values


# --- rewriting ----------------------------------------------------------------------------------------------


def _stack(graph: Graph, linears: list[_Linear], total: _Sum | None) -> None:
    """Replaces the linears' nodes; the graph's order is left to be put right."""
    segments = [linear.width for linear in linears]
    weights = _stacked_weights(graph, [linear.weight for linear in linears])
    product = linears[0].product
    x, x_scale, _, _, _, out_dtype, fast_accum = product.args
    args = (x, x_scale, weights["data"], weights["scale_inv"], out_dtype, fast_accum, "N", segments)
    _take_slices(graph, call_like(graph, gemm_stacked, args, product), 1, [linear.product for linear in linears])
    if total is not None:
        _stack_backward(graph, linears, segments, weights, total)
    for linear in linears:
        for quantized in (linear.grad, linear.weight):
            if isinstance(quantized, Node):
                _erase(graph, quantized)


def _stacked_weights(graph: Graph, weights: list[Node | _Part]) -> dict[str, Node]:
    """Buffer name -> node of the stack of the weights: what the graph is given, or one te.quantize_stacked."""
    first = weights[0]
    if isinstance(first, _Part):
        transpose = {} if first.transpose is None else {"transpose": first.transpose}
        return {"data": first.data, "scale_inv": first.scales, **transpose}
    return _quantize_all(graph, [weight for weight in weights if isinstance(weight, Node)], by_columns=False)


def _stack_backward(
    graph: Graph, linears: list[_Linear], segments: list[int], weights: dict[str, Node], total: _Sum
) -> None:
    grads = _quantize_all(graph, [x.grad for x in linears if x.grad is not None], by_columns=True)
    dgrad, wgrads = linears[0].dgrad, [x.wgrad for x in linears if x.wgrad is not None]
    assert dgrad is not None
    args = (
        grads["data"],
        grads["scale_inv"],
        weights["transpose"],
        weights["scale_inv"],
        *dgrad.args[5:],
        "K",
        segments,
    )
    dx = call_like(graph, gemm_stacked, args, dgrad)
    if total.view is not None:
        dx = reshaped_like(graph, dx, total.view)
    for other in total.others:
        dx = call_like(graph, _aten.add.Tensor, (dx, other), total.node)
    total.node.replace_all_uses_with(dx)
    if wgrads:
        _, _, x, x_scale, _, out_dtype, fast_accum = wgrads[0].args
        args = (grads["transpose"], grads["scale_inv"], x, x_scale, out_dtype, fast_accum, "M", segments)
        _take_slices(graph, call_like(graph, gemm_stacked, args, wgrads[0]), 0, wgrads)
    # The old sum and its dgrads, which nobody reads any more.
    waiting = [total.node]
    ends = {*total.others, *(q for x in linears for q in (x.weight, x.grad) if isinstance(q, Node))}
    while waiting:
        node = waiting.pop()
        if node.users or node in ends or node._erased or node.op != "call_function" or node.target is operator.getitem:
            continue
        waiting += node.all_input_nodes
        graph.erase_node(node)


def _quantize_all(graph: Graph, quantized: list[Node], by_columns: bool) -> dict[str, Node]:
    """Buffer name -> node, of one te.quantize_stacked in place of several te.quantize."""
    args = ([_source(node) for node in quantized], quantized[0].args[1], by_columns)
    stack = call_like(graph, quantize_stacked, args, quantized[-1])
    names = _names(quantized[0])
    return {name: getitem_after(stack, names.index(name)) for name in reversed(names)}


def _take_slices(graph: Graph, whole: Node, dim: int, parts: list[Node]) -> None:
    """The parts are replaced by slices of `whole` along `dim`, and erased."""
    ends = list(itertools.accumulate(part.meta["val"].shape[dim] for part in parts))
    for first, end, part in zip([0, *ends], ends, parts, strict=False):
        piece = call_like(graph, _aten.slice.Tensor, (whole, dim, first, end), part)
        if piece.meta.get("recompute") in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE):
            del piece.meta["recompute"]  # of the product itself, of which this is a view
        part.replace_all_uses_with(piece)
        graph.erase_node(part)


def _erase(graph: Graph, quantized: Node) -> None:
    for items in item_users(quantized).values():
        for item in items:
            graph.erase_node(item)
    graph.erase_node(quantized)
