"""A sequence-parallel linear's input, or its dy, quantized by each rank before it is gathered: one byte per value travels.

    before    g: bf16[P*B, S, K] = _c10d_functional.all_gather_into_tensor(x, P, group)        x: bf16[B, S, K], a rank's tokens
              w: bf16[P*B, S, K] = _c10d_functional.wait_tensor(g)
              y: bf16[B, P*S, K] = aten.cat(aten.split(w, B), 1)
              q: (f8e4m3[B*P*S, K], f8e4m3[K, B*P*S], f32[1]) = te.quantize(y, e4m3[row+column])
    after     a: f32[1] = te.amax(x), its largest of all ranks by _c10d_functional.all_reduce(a, 'max', group)
              c: (f8e4m3[B*S, K], f32[1]) = te.quantize_with_amax(x, e4m3[row], a)
              g: u8[P*B, S, K] = _c10d_functional.all_gather_into_tensor(c[0], P, group)
              w: u8[P*B, S, K] = _c10d_functional.wait_tensor(g)
              y: u8[B, P*S, K] = aten.cat(aten.split(w, B), 1)
              t: f8e4m3[K, B*P*S] = te.transpose(y)
              q[0] -> y, q[1] -> t, q[2] -> c[1]

Every bit is the same: the largest of the ranks' amaxes is the amax of what is gathered. It is compared as the integer that its bits are, so
that a NaN is the largest. What moves the gathered values (split, cat, views, a slice of all; there may be none) moves their codes.

A bias gradient (te.bias_grad) of what is gathered becomes the sum of the ranks' own ones, in fp32 and another order.

An all-gather stays in its own precision, and `explain` says why, where

- something else reads what is gathered, such as a linear of another recipe;
- the ranks do not divide the tokens, so that some of what is gathered is padding;
- blocks have scales of their own. There columns, which backward multiplies, are no transposition of the rows. To gather both is to gather
  two bytes per value, as many as in 16 bits.

What is reduced and scattered stays in its own precision, as it is a sum.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Container, Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true, sym_eq

from te_dynamo.dialect.gemm import bias_grad
from te_dynamo.dialect.memory import RESHAPES
from te_dynamo.dialect.quantize import amax, quantize, quantize_with_amax, transpose
from te_dynamo.passes.dialect.graph import call_like, calls, getitem_after, item_users, sizes
from te_dynamo.user_code import source_line

_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional

ALL_GATHER = _c10d.all_gather_into_tensor.default

ALL_TO_ALL = _c10d.all_to_all_single.default

_COLLECTIVES: dict[Any, str] = {ALL_GATHER: "all-gather", ALL_TO_ALL: "all-to-all"}
"""Those whose results are values of the ranks' tensors: the first argument is a rank's own, the last the group."""

_PICKS = (_aten.index.Tensor, _aten.index_select.default)

_ORDERS = (_aten.permute.default, _aten.clone.default, *_PICKS)

_SLICE = _aten.slice.Tensor

_SPLITS = (_aten.split.Tensor, _aten.split_with_sizes.default)


class Gathered(NamedTuple):
    """A te.quantize of what a collective gives: an all-gather, or an all-to-all.

    moves: the nodes between the two, in the order of the graph. They change the order of values, and no value.
    """

    quantize: Node
    gather: Node
    moves: list[Node]


def fuse_gather_quantize(graph: Graph) -> int:
    """An all-gather + te.quantize -> te.amax, te.quantize_with_amax of a rank's part, an all-gather of bytes, te.transpose."""
    fired = 0
    for gathered in list(gathered_quantizations(graph)):
        if not reason_to_leave(gathered):
            gather_own(graph, gathered, *quantize_own(graph, gathered))
            fired += 1
    return fired


def gathers_left(graph: Graph) -> list[str]:
    """A sentence for each collective of a quantized tensor that the fusions leave in its own precision."""
    found = itertools.chain.from_iterable(gathered_quantizations(graph, collective) for collective in _COLLECTIVES)
    left = ((gathered, reason_to_leave(gathered)) for gathered in found)
    return [
        f"the {_COLLECTIVES[gathered.gather.target]} for {source_line(gathered.quantize) or gathered.quantize.name} is in "
        f"{str(gathered.gather.meta['val'].dtype).removeprefix('torch.')}: {reason}"
        for gathered, reason in left
        if reason
    ]


def gathered_quantizations(graph: Graph, collective: torch._ops.OpOverload = ALL_GATHER) -> Iterator[Gathered]:
    """Every te.quantize of a graph that reads what a collective gives, its values moved or not."""
    for node in calls(graph, quantize):
        found = before_moves(node.args[0], collective)
        if found is not None:
            yield Gathered(node, *found)


def reason_to_leave(gathered: Gathered) -> str:
    """Why a collective stays in its own precision; "" if codes may travel."""
    quantizer: Any = gathered.quantize.args[1]
    if not quantizer.one_scale:
        return f"codes travel where a tensor has one scale; it is read as {quantizer.in_words()}"
    chain = [gathered.gather, *gathered.moves]
    aside = {*chain, gathered.quantize, *_bias_grads(gathered), *_sizes(gathered)}
    others = [user for node in chain for user in node.users if user not in aside]
    if others:
        return f"{_described(others[0])} reads it too, beside {_described(gathered.quantize)}"
    if any(move.target is _SLICE and _drops_values(move) for move in gathered.moves):
        return "the ranks' parts are of different sizes, and some are padded"
    if any(move.target in _PICKS and not _is_order_of_all(move) for move in gathered.moves):
        return "tokens are picked by indices that are not known to be an order of all of them (torch.argsort)"
    return ""


def _described(reader: Node) -> str:
    while reader.target in RESHAPES and reader.users:
        reader = next(iter(reader.users))
    if reader.target is quantize:
        return f"te.quantize to {reader.args[1].describe()}"  # type: ignore[union-attr]
    return "the graph's caller" if reader.op == "output" else str(reader.target).removesuffix(".default")


def _drops_values(part: Node) -> bool:
    """Whether what stands for a slice among moves is less than what it is of. Of more than 256 values DTensors have a slice of all."""
    joined = any(user.target is _aten.cat.default for user in part.users)  # with the others
    whole: Any = part.args[0]
    return not joined and not statically_known_true(sym_eq(part.meta["val"].shape, whole.meta["val"].shape))


def _is_order_of_all(move: Node) -> bool:
    """Whether one of _PICKS puts all rows of a tensor into an order that aten.sort gives."""
    tensor, *dim, picked = move.args
    index: Any = picked[0] if isinstance(picked, (list, tuple)) and len(picked) == 1 else picked
    if (
        dim not in ([], [0])
        or not isinstance(index, Node)
        or index.target is not operator.getitem
        or index.args[1] != 1
    ):
        return False
    rows, order = tensor.meta["val"].shape[:1], index.meta["val"].shape  # type: ignore[union-attr]
    sort: Any = index.args[0]
    return sort.target in (_aten.sort.default, _aten.sort.stable) and guard_or_false(sym_eq(order, rows))


def _sizes(gathered: Gathered) -> list[Node]:
    """What asks a collective's result for a size that is not known."""
    return [user for user in gathered.gather.users if user.target is _aten.sym_size.int]


def _is_no_expansion(node: Node) -> bool:
    """Whether it is an aten.expand to the shape that is there, as gradients of an index have it."""
    if node.target is not _aten.expand.default:
        return False
    return statically_known_true(sym_eq(node.meta["val"].shape, node.args[0].meta["val"].shape))  # type: ignore[union-attr]


def _bias_grads(gathered: Gathered) -> list[Node]:
    """Every te.bias_grad that reads what the te.quantize reads, where its columns are those of a rank's part of an all-gather."""
    if gathered.gather.target is not ALL_GATHER:
        return []
    part: Any = gathered.gather.args[0]
    tensor: Any = gathered.quantize.args[0]
    alike = tensor.meta["val"].shape[-1] == part.meta["val"].shape[-1]
    return [user for user in tensor.users if alike and user.target is bias_grad]


def before_moves(value: Any, collective: torch._ops.OpOverload) -> tuple[Node, list[Node]] | None:
    """(the collective whose values `value` has, the nodes between them in order), None for anything else."""
    moves: list[Node] = []
    while isinstance(value, Node):
        moves.insert(0, value)
        if value.target is _c10d.wait_tensor.default:
            gather: Any = value.args[0]
            if gather.target is not _c10d.wait_tensor.default:
                return (gather, moves) if gather.target is collective else None
            value = gather
        elif value.target in (*RESHAPES, *_ORDERS, _SLICE) or _is_no_expansion(value):
            value = value.args[0]
        elif (parts := _joined_parts(value)) is not None:
            moves[:0] = parts
            value = parts[0].args[0]
        else:
            return None
    return None


def _joined_parts(node: Node) -> list[Node] | None:
    """What divides a tensor into the parts that an aten.cat joins, each value once: an aten.split and its items, or slices."""
    if node.target is not _aten.cat.default:
        return None
    parts: Any = node.args[0]
    how = parts[0].target
    source: Any = parts[0].args[0] if how in (operator.getitem, _SLICE) else None
    if source is None or any(part.target is not how or part.args[0] is not source for part in parts):
        return None
    if how is operator.getitem:
        once = source.target in _SPLITS and sorted(part.args[1] for part in parts) == [*range(len(source.meta["val"]))]
        return [source, *parts] if once else None
    dims, ranges = zip(*map(_range, parts), strict=True)
    size = source.meta["val"].shape[dims[0]]
    once = len(set(dims)) == 1 and isinstance(size, int) and [*itertools.chain(*ranges)] == [*range(size)]
    return [*parts] if once else None


def _range(part: Node) -> tuple[int, range]:
    """(the dimension, the indices) of a slice; none of one whose sizes are not known."""
    arguments: Any = (*part.args, *(0, None, None, 1)[len(part.args) - 1 :])
    whole, dim, *bounds = arguments
    size = whole.meta["val"].shape[dim]
    known = all(isinstance(bound, int) or bound is None for bound in (size, *bounds))
    return dim, range(*slice(*bounds).indices(size)) if known else range(0)


def gather_own(graph: Graph, gathered: Gathered, own: Node, scale_inv: Node) -> None:
    """All readers of a te.quantize read `own`, the codes of quantize_own, gathered; what stood there goes."""
    part, *_, group = gathered.gather.args
    for total in _bias_grads(gathered):
        of_part = call_like(graph, bias_grad, (part,), total)
        reduced = call_like(graph, _c10d.all_reduce.default, (of_part, "sum", group), total)
        total.replace_all_uses_with(call_like(graph, _c10d.wait_tensor.default, (reduced,), total))
        graph.erase_node(total)
    rows = gather_codes(graph, gathered, own, gathered.gather, gathered.quantize)
    for size in _sizes(gathered):
        size.replace_input_with(gathered.gather, gathered.gather.prev)  # the collective of codes
    read_instead(gathered.quantize, rows, scale_inv, gathered.quantize)
    for items in item_users(gathered.quantize).values():
        for item in items:
            graph.erase_node(item)
    for node in (gathered.quantize, *reversed(gathered.moves), gathered.gather):
        graph.erase_node(node)


def quantize_own(graph: Graph, gathered: Gathered) -> tuple[Node, Node]:
    """(codes as bytes in the shape of the rank's part, fp32 [1] scale_inv of all parts), made before the all-gather."""
    gather = gathered.gather
    part: Any = gather.args[0]
    quantizer: Any = gathered.quantize.args[1]
    bits = call_like(graph, _aten.view.dtype, (call_like(graph, amax, (part,), gather), torch.int32), gather)
    reduced = call_like(graph, _c10d.all_reduce.default, (bits, "max", gather.args[2]), gather)
    largest = call_like(graph, _c10d.wait_tensor.default, (reduced,), gather)
    of_all = call_like(graph, _aten.view.dtype, (largest, torch.float32), gather)
    cast = call_like(graph, quantize_with_amax, (part, quantizer.with_usage(True, False), of_all), gather)
    scale_inv, codes = getitem_after(cast, 1), getitem_after(cast, 0)
    as_bytes = call_like(graph, _aten.view.dtype, (codes, torch.uint8), gather)
    return call_like(graph, _aten.view.default, (as_bytes, sizes(graph, part, gather)), gather), scale_inv


def gather_codes(graph: Graph, gathered: Gathered, own: Node, start: Node, reader: Node) -> Node:
    """float8 [M, K] of all ranks: the bytes `own` are gathered before the node `start`, and moved before `reader` as the values were."""
    again = {gathered.gather: call_like(graph, gathered.gather.target, (own, *gathered.gather.args[1:]), start)}
    for node in gathered.moves:
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: again.get(n, n))
        again[node] = call_like(graph, node.target, args, reader, kwargs)  # type: ignore[arg-type]
    moved = again[gathered.moves[-1]]
    rows = call_like(graph, _aten.view.default, (moved, [-1, moved.meta["val"].shape[-1]]), reader)
    return call_like(graph, _aten.view.dtype, (rows, gathered.quantize.args[1].dtype), reader)  # type: ignore[union-attr]


def read_instead(
    quantized: Node, rows: Node, scale_inv: Node, before: Node, readers: Container[Node] | None = None
) -> None:
    """Readers of a te.quantize's buffers, all or these, read `rows`, their transposition made before `before`, and `scale_inv`."""
    names = quantized.args[1].buffer_names()  # type: ignore[union-attr]
    for index, items in item_users(quantized).items():
        for item in items:
            if not any(readers is None or user in readers for user in item.users):
                continue
            buffer = {"data": rows, "scale_inv": scale_inv}.get(names[index])
            item.replace_all_uses_with(
                buffer or call_like(quantized.graph, transpose, (rows,), before),
                delete_user_cb=lambda user: readers is None or user in readers,
            )
