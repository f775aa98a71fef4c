"""Linear layers that share an input, as one GEMM in forward, one dgrad and one wgrad: gate and up; q and k, or q, k and v.

    before    q_1 = te.quantize(gate.weight, e4m3[row+column]);  q_2 = te.quantize(up.weight, e4m3[row+column])
              gate: bf16[M, N] = te.gemm([x.data, x.scale_inv], e4m3[row], [q_1.data, q_1.scale_inv], e4m3[row], bf16, False)
              up: bf16[M, N] = te.gemm([x.data, x.scale_inv], e4m3[row], [q_2.data, q_2.scale_inv], e4m3[row], bf16, False)
              ...
              p_1 = te.quantize(dgate, e5m2[row+column]);  p_2 = te.quantize(dup, e5m2[row+column])
              dx = te.gemm([p_1.data, ..], .., [q_1.transpose, ..], ..) + te.gemm([p_2.data, ..], .., [q_2.transpose, ..], ..)
              dw_1: bf16[N, K] = te.gemm([p_1.transpose, ..], .., [x.transpose, ..], ..);  dw_2 = te.gemm([p_2.transpose, ..], ..)
    after     q: (f8e4m3[2N, K], f8e4m3[K, 2N], f32[2]) = te.quantize_stacked([gate.weight, up.weight], e4m3[row+column], False)
              y: bf16[M, 2N] = te.gemm([x.data, x.scale_inv], e4m3[row], [q.data, q.scale_inv], e4m3[row], bf16, False, along='N', segments=[N, N])
              gate = y[:, :N];  up = y[:, N:]
              ...
              p: (f8e5m2[M, 2N], f8e5m2[2N, M], f32[2]) = te.quantize_stacked([dgate, dup], e5m2[row+column], True)
              dx = te.gemm([p.data, ..], .., [q.transpose, ..], .., along='K', segments=[N, N])
              dw: bf16[2N, K] = te.gemm([p.transpose, ..], .., [x.transpose, ..], .., along='M', segments=[N, N]);  dw_1 = dw[:N];  dw_2 = dw[N:]

With a scale a row, dgrads stay apart: along K, segments with scales of rows each would have to be scaled before they are added.

    after     q: (f8e4m3[2N, K], f32[2N]) = te.quantize_stacked([gate.weight, up.weight], e4m3 by rows[row], False)
              y = te.gemm(x, .., [q.data, q.scale_inv], .., along='N', segments=[N, N])
              q_1 = te.quantize(gate.weight, e4m3 by rows[column]);  q_2, p_1 and p_2 the same, of which dgrads read their own
              p: (f8e5m2[2N, M], f32[2N]) = te.quantize_stacked([dgate, dup], e5m2 by rows[column], True)
              dw: bf16[2N, K] = te.gemm([p.transpose, ..], .., [x.transpose, ..], .., along='M', segments=[N, N])

Wgrads stay apart too where a gated unit's backward writes dgate and dup with such scales itself (activation_backward_quantize.py).

With a scale a block, no block is of two tensors: the stack's buffers are those of the concatenation, and each of the three GEMMs is one as any
other. Gate and up stay apart in training: of both gradients in one tensor a step's peak would be higher than in 16 bits (low_memory.py).

    after     q: (f8e4m3[2N, K], f32[2N/128, K/128], f8e4m3[K, 2N], f32[K/128, 2N/128]) = te.quantize_stacked([gate.weight, up.weight], e4m3 128x128[row+column], False)
              y: bf16[M, 2N] = te.gemm([x.data, x.scale_inv], e4m3 1x128[row], [q.data, q.scale_inv], e4m3 128x128[row], bf16, False)

Each tensor keeps its own scales, so forward and the quantized tensors have the bits that they have apart. dx is rounded once,
where the sum of two GEMMs rounds three times. Weight gradients have the same bits where the GEMMs apart do not cut K.

With biases, `y` is te.add_bias of the product and of all biases, one behind the other. A linear without one among them adds -0.0, which
changes no bit. Their gradients are sums of their own, as before.

Cached weights (passes/torch_ir/workspaces.py) are inputs of the graph as such a stack: those with one scale each, and in blocks those of which
backward reads nothing. Each linear reads slices of it, and the fusion takes the slices away.

More than three become stacks of two or three neighbours each, gate and up one of their own: four 2 and 2, five 3 and 2. dx is the sum of
their dgrads.

These are left as they are, and `explain` gives the reason of all but the first:

- linear layers in NVFP4, of several inputs or regions of checkpointing, or with weights that others read;
- weights whose first dimension is no multiple of 128;
- results that the graph returns, or that a view cannot read by rows of one stride;
- a mixture of weights with and without gradient;
- GEMMs that the cost model finds slower together;
- results that backward reads beside results that it does not read. What is saved of a stack keeps the whole stack alive. This parts v from
  q and k in an attention with rotary embedding.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from te_dynamo.dialect.define import is_te
from te_dynamo.dialect.gated import gated, gated_backward
from te_dynamo.dialect.gemm import Gemm, add_bias, gemm
from te_dynamo.dialect.stacked import SEGMENT_MULTIPLE, quantize_stacked, side_stacks, stacking_pays
from te_dynamo.passes.dialect.fusions.linears_of_one_input import (
    Linear,
    Part,
    Sum,
    buffer_names,
    readers,
    source_of,
    stacks_of_linears,
)
from te_dynamo.passes.dialect.graph import (
    call_like,
    fakes_of,
    getitem_after,
    item_users,
    reshaped_like,
    retrace_views,
    sorted_topologically,
)
from te_dynamo.quantized.quantizers import Quantizer
from te_dynamo.user_code import module_here

_aten = torch.ops.aten
_BY_ROWS = (gated, gated_backward)  # the te operations that read tensors with a row stride of their own


def fuse_shared_input(graph: Graph) -> int:
    """Linear layers of one input -> te.quantize_stacked and te.gemm of a stack.

    A joint fusion; among the forward ones for inference graphs. In the forward part of a divided graph nothing is left to find.
    """
    fired = 0
    for linears, total, views, reason in _judged(graph):
        if not reason:
            _stack(graph, linears, total)
            for node, value in views.items():
                node.meta["val"] = value
            fired += 1
    if fired:
        sorted_topologically(graph)
    return fired


def linears_left(graph: Graph) -> list[str]:
    """A sentence for each reason why linears of one input stay apart, of a graph that the fusion has not seen."""
    left: dict[str, dict[str, None]] = {}
    for linears, _, _, reason in _judged(graph):
        paths = (module_here(linear.product) or linear.product.name for linear in linears)
        left.setdefault(reason, {}).update(dict.fromkeys(paths))
    left.pop("", None)
    return [
        f"linears are not stacked with others of their input ({', '.join([*paths][:3])}"
        f"{f' and {len(paths) - 3} more' if len(paths) > 3 else ''}): {reason}"
        for reason, paths in left.items()
    ]


def _judged(graph: Graph) -> Iterator[tuple[list[Linear], Sum | None, dict[Node, Any], str]]:
    """What may be a stack, the sum of its dgrads, the values of its views, and why it is none: "" where it is one."""
    for stack in list(stacks_of_linears(graph)):
        linears = _in_order(stack)
        total = Sum.of([x.dgrad for x in linears if x.dgrad is not None]) if _sums_dgrads(linears) else None
        reason = _reason_to_leave(linears, total)
        views = {} if reason else _views_of_slices(linears)
        if views is None:
            reason = "a result is returned, or what reads it takes no rows of a larger tensor"
        yield linears, total, views or {}, reason


def _sums_dgrads(linears: list[Linear]) -> bool:
    """Whether dgrads of the linears become one."""
    return linears[0].dgrad is not None and Gemm.of(linears[0].product).a_quantizer.stacks != "rows"


# --- judging ------------------------------------------------------------------------------------------------


def _in_order(linears: Sequence[Linear]) -> list[Linear]:
    """As in the graph, but a gate before what it gates: te.gated_backward_quantize writes them so."""

    def place(linear: Linear) -> int:
        grad = None if linear.grad is None else source_of(linear.grad)
        if grad is None or grad.target is not operator.getitem or grad.args[0].target is not gated_backward:  # type: ignore[union-attr]
            return 0
        return int(grad.args[1])  # type: ignore[arg-type]

    return sorted(linears, key=place)


def _reason_to_leave(linears: list[Linear], total: Sum | None) -> str:
    """Why forward and backward of the linears are not one GEMM each; "" if they can be."""
    if not all(side_stacks(linear.width) for linear in linears):
        return f"a weight's first dimension is no multiple of {SEGMENT_MULTIPLE}"
    if len(linears) == 1:
        return "backward reads its result and not theirs, or theirs and not its, one of them is no multiple of 128 wide, or two are gate and up"
    if not _whole(linears):
        return "their cached weights are parts of a stack that others read"
    if len({bias.meta["val"].dtype for bias in _biases(linears) if bias is not None}) > 1:
        return "their biases have different dtypes"
    if linears[0].grad is not None and not _alike_in_backward(linears, total):
        return "some weights get no gradient, gradients differ in format, or the input's is more than their sum"
    if _quantized_where_made(linears, "blocks"):
        return "both gradients of gate and up in one tensor take a step's peak above that in 16 bits"
    return "" if _pays(linears) else "one GEMM takes longer by the cost model"


def _alike_in_backward(linears: list[Linear], total: Sum | None) -> bool:
    if (total is None and _sums_dgrads(linears)) or any(linear.grad is None for linear in linears):
        return False

    def same(values: Iterator[Any]) -> bool:
        first = next(values, None)  # none where the weights learn nothing
        return all(value == first for value in values)

    wgrads = [linear.wgrad for linear in linears]
    with_wgrad = [w for w in wgrads if w is not None]
    return (
        len({linear.grad for linear in linears}) == len(linears)
        and len(with_wgrad) in (0, len(linears))
        and same((x.grad.args[1], source_of(x.grad).meta["val"].dtype) for x in linears if x.grad is not None)
        and same(Gemm.of(x.dgrad)[4:] for x in linears if x.dgrad is not None)
        and same(Gemm.of(w)[2:] for w in with_wgrad)
    )


def _biases(linears: list[Linear]) -> list[Node | None]:
    return [linear.biased and linear.biased.args[1] for linear in linears]  # type: ignore[misc]


def _whole(linears: list[Linear]) -> bool:
    """Whether parts of a given stack are all of it, in its order."""
    parts = [linear.weight for linear in linears if isinstance(linear.weight, Part)]
    if not parts:
        return True
    rows, scales = parts[0].data.meta["val"].shape[0], parts[0].scales.meta["val"].shape[parts[0].own_scales[0]]
    return _cover([(p.first, p.end) for p in parts], rows) and _cover([p.own_scales[1:] for p in parts], scales)


def _cover(slices: list[tuple[int, int]], size: int) -> bool:
    edges = [0, *(end for _, end in slices)]
    return [first for first, _ in slices] == edges[:-1] and edges[-1] == size


def _pays(linears: list[Linear]) -> bool:
    """Whether the cost model finds each stacked GEMM at least as fast as its parts."""
    segments = [linear.width for linear in linears]
    (m, k), n = linears[0].product.all_input_nodes[0].meta["val"].shape, sum(segments)
    device = linears[0].product.meta["val"].device
    shapes = [
        (linears[0].product, "N", (m, n, k)),
        (linears[0].dgrad if _sums_dgrads(linears) else None, "K", (m, k, n)),
        (linears[0].wgrad, "M", (n, k, m)),
    ]
    return all(
        stacking_pays(*size, device, Gemm.of(node).fast_accum, along, segments, Gemm.of(node).a_quantizer.scaling())
        for node, along, size in shapes
        if node is not None
    )


def _views_of_slices(linears: list[Linear]) -> dict[Node, Any] | None:
    """The values of all views of the products as slices of one tensor; None where a reader needs its own contiguous tensor."""
    rows, total = linears[0].product.meta["val"].shape[0], sum(linear.width for linear in linears)
    values: dict[Node, Any] = {}
    for linear in linears:
        for reader in readers(linear.result):
            if reader.op == "output" or (is_te(reader.target) and reader.target not in _BY_ROWS):
                return None
        with fakes_of(linear.product):
            apart = linear.result.meta["val"].new_empty(rows, total)[:, : linear.width]
        views = retrace_views(linear.result, apart)
        if views is None:
            return None
        values |= views
    return values


def _quantized_where_made(linears: list[Linear], scales: str) -> bool:
    """Whether a gated unit's backward writes each gradient with such scales."""
    grads: list[Any] = [linear.grad for linear in linears if linear.grad is not None]
    made = {node for grad in grads for node in source_of(grad).all_input_nodes}
    apart = all(grad.args[1].stacks == scales for grad in grads)
    return apart and len(made) == 1 and made.pop().target is gated_backward


# --- rewriting ----------------------------------------------------------------------------------------------


def _stack(graph: Graph, linears: list[Linear], total: Sum | None) -> None:
    """Replaces the linears' nodes; the graph's order is left to be put right."""
    segments = [linear.width for linear in linears]
    weights = _stacked_weights(graph, [linear.weight for linear in linears])
    first = linears[0]
    asked = Gemm.of(first.product)
    bias = _stacked_biases(graph, linears)
    dtype = first.result.meta["val"].dtype
    of_product = dtype if bias is None else torch.float32
    b = _operand(weights, asked.b_quantizer)
    result = call_like(graph, gemm, _stacked(asked, "N", segments)._replace(b=b, out_dtype=of_product), first.product)
    if bias is not None:
        result = call_like(graph, add_bias, (result, bias, dtype), first.result)
    _take_slices(graph, result, 1, [linear.result for linear in linears])
    for linear in linears:
        if linear.biased is not None:
            graph.erase_node(linear.product)
    wgrads = [] if _quantized_where_made(linears, "rows") else [x.wgrad for x in linears if x.wgrad is not None]
    if total is not None or wgrads:
        grads = _quantize_all(graph, [x.grad for x in linears if x.grad is not None], by_columns=True)
        if total is not None and first.dgrad is not None:
            _stack_dgrads(graph, first.dgrad, segments, grads, weights, total)
        if wgrads:
            _stack_wgrads(graph, wgrads, segments, grads)
        if total is not None:
            _erase_sum(graph, linears, total)
    for linear in linears:
        for quantized in (linear.grad, linear.weight):
            if isinstance(quantized, Node):
                _erase(graph, quantized)


def _stacked_weights(graph: Graph, weights: list[Node | Part]) -> dict[str, Node]:
    """Buffer name -> node of the stack of the weights: what the graph is given, or one te.quantize_stacked."""
    first = weights[0]
    if isinstance(first, Part):
        transpose = {} if first.transpose is None else {"transpose": first.transpose}
        return {"data": first.data, "scale_inv": first.scales, **transpose}
    return _quantize_all(graph, [weight for weight in weights if isinstance(weight, Node)], by_columns=False)


def _stacked_biases(graph: Graph, linears: list[Linear]) -> Node | None:
    """The linears' biases one behind the other, -0.0 for a linear without; None if no linear has one."""
    biases = _biases(linears)
    some = next((bias for bias in biases if bias is not None), None)
    if some is None:
        return None

    def zeros(linear: Linear) -> Node:  # aten.new_full has no lowering in Inductor
        value = some.meta["val"]
        how = {"dtype": value.dtype, "device": value.device}
        return call_like(graph, _aten.full.default, ([linear.width], -0.0), linear.product, how)

    parts = [bias if bias is not None else zeros(linear) for bias, linear in zip(biases, linears, strict=True)]
    return call_like(graph, _aten.cat.default, (parts,), linears[0].product)


def _operand(buffers: dict[str, Node], quantizer: Quantizer) -> list[Node]:
    """What a GEMM reads of those buffers. quantizer: the operand's, of one usage."""
    return [buffers[name] for name in quantizer.buffer_names()]


def _stacked(asked: Any, along: str, segments: list[int]) -> Any:
    """The GEMM of the stack; with scales of blocks it is one as any other."""
    return asked if asked.a_quantizer.stacks == "blocks" else asked._replace(along=along, segments=segments)


def _stack_dgrads(
    graph: Graph, dgrad: Node, segments: list[int], grads: dict[str, Node], weights: dict[str, Node], total: Sum
) -> None:
    asked = Gemm.of(dgrad)
    a, b = _operand(grads, asked.a_quantizer), _operand(weights, asked.b_quantizer)
    dx = call_like(graph, gemm, _stacked(asked, "K", segments)._replace(a=a, b=b), dgrad)
    if total.view is not None:
        dx = reshaped_like(graph, dx, total.view)
    for other in total.others:
        dx = call_like(graph, _aten.add.Tensor, (dx, other), total.node)
    total.node.replace_all_uses_with(dx)


def _stack_wgrads(graph: Graph, wgrads: list[Node], segments: list[int], grads: dict[str, Node]) -> None:
    asked = Gemm.of(wgrads[0])
    stacked = _stacked(asked, "M", segments)._replace(a=_operand(grads, asked.a_quantizer))
    _take_slices(graph, call_like(graph, gemm, stacked, wgrads[0]), 0, wgrads)


def _erase_sum(graph: Graph, linears: list[Linear], total: Sum) -> None:
    """The old sum and its dgrads, which nobody reads any more."""
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
    quantizer: Any = quantized[0].args[1]
    if quantizer.stacks == "rows":  # side by side in a row, each has scales of its own
        quantizer = quantizer.reading(columnwise=by_columns)
    stack = call_like(
        graph, quantize_stacked, ([source_of(node) for node in quantized], quantizer, by_columns), quantized[-1]
    )
    names = buffer_names(stack)
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
    """Unless dgrads that stay apart read it."""
    if any(item.users for items in item_users(quantized).values() for item in items):
        return
    for items in item_users(quantized).values():
        for item in items:
            graph.erase_node(item)
    graph.erase_node(quantized)
