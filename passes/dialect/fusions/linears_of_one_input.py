"""Finds the linears that share an input in a graph of te operations: what fuse_shared_input (shared_input.py) makes one GEMM of."""

from __future__ import annotations

import collections
import dataclasses
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from te_dynamo.dialect.gated import gated
from te_dynamo.dialect.gemm import Gemm, add_bias, gemm
from te_dynamo.dialect.memory import RESHAPES, is_view
from te_dynamo.dialect.quantize import quantize
from te_dynamo.dialect.stacked import side_stacks, stacks_of
from te_dynamo.passes.dialect.graph import calls, item_users

_aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Part:
    """A weight that is a part of a stack which the graph is given (passes/torch_ir/workspaces.py): the stack's buffers, and where.

    first, end: rows of the stack. own_scales: (dimension, first, end) of its scales in the stack's.
    """

    data: Node
    scales: Node
    transpose: Node | None
    first: int
    end: int
    own_scales: tuple[int, int, int]

    @property
    def stack(self) -> tuple[Any, ...]:
        return self.data, self.scales, self.transpose


@dataclasses.dataclass(frozen=True)
class Linear:
    """One linear's nodes: te.quantize of the weight, te.gemm of forward, its te.add_bias; in backward te.quantize of dy, dgrad and wgrad."""

    weight: Node | Part
    product: Node
    biased: Node | None
    grad: Node | None
    dgrad: Node | None
    wgrad: Node | None

    @property
    def result(self) -> Node:
        """What the linear's readers read."""
        return self.biased or self.product

    @property
    def width(self) -> Any:
        """N, the rows of the weight."""
        if isinstance(self.weight, Part):
            return self.weight.end - self.weight.first
        return source_of(self.weight).meta["val"].shape[0]

    @property
    def kind(self) -> tuple[Any, ...]:
        """What the weights of a stack have in common."""
        weight = self.weight
        own = weight.stack if isinstance(weight, Part) else (weight.args[1], source_of(weight).meta["val"].dtype)
        return *own, self.dgrad is None


def stacks_of_linears(graph: Graph) -> Iterator[Sequence[Linear]]:
    """Linears of one input, one configuration and one region of checkpointing, those of a stack together; alone what suits none of the others.

    Those that backward reads are apart from others, and gate and up, which further fusions look for, are a stack of their own.
    """
    in_backward = _reachable([n for n in graph.nodes if n.op == "placeholder" and "tangents" in n.name])
    linears = [linear for product in calls(graph, gemm) if (linear := _linear_of(product)) is not None]
    read = collections.Counter(r for linear in linears for r in {*readers(linear.result)} if r.target is gated)
    groups: dict[Any, dict[Any, list[Linear]]] = {}
    for linear in linears:
        asked, result, alike = Gemm.of(linear.product), linear.result, None
        tag = result.meta.get("ac_graph_id"), str(result.meta.get("recompute"))
        if isinstance(linear.weight, Node):
            saved = result not in in_backward and any(user in in_backward for user in readers(result))
            gates = next((reader for reader in readers(result) if read[reader] == 2), None)
            alike = saved, gates, side_stacks(linear.width)
        key = (*asked.a, result.meta["val"].dtype, asked.fast_accum, tag, linear.kind)
        groups.setdefault(key, {}).setdefault(alike, []).append(linear)
    for group in groups.values():
        if len(group) > 1 or len(next(iter(group.values()))) > 1:
            for suited in group.values():
                yield from stacks_of(suited)


def _linear_of(product: Node) -> Linear | None:
    """The linear whose forward product this is, if nothing else reads what it quantizes."""
    asked = Gemm.of(product)
    if not (asked.a_quantizer.stacks and asked.of_a_linear) or asked.bias is not None:
        return None
    data, scale = asked.b
    if _slice_of_input(data, 0) is not None:
        return _linear_of_part(product)
    weight = _quantize_behind(data)
    if weight is None or _quantize_behind(scale, scales=True) is not weight:
        return None
    if len(source_of(weight).meta["val"].shape) != 2 or not _from_an_input(source_of(weight)):
        return None
    transposed = _only_readers_of_columns(weight, product)
    if transposed is None:
        return None
    if not transposed:
        return Linear(weight, product, _biased(product), None, None, None)
    (dgrad,) = transposed
    if dgrad.target is not gemm or _quantize_behind(_operands(dgrad)[1][0], columnwise=True) is not weight:
        return None
    return _with_backward(weight, product, dgrad)


def _linear_of_part(product: Node) -> Linear | None:
    """The linear of that forward product by a part of a given stack."""
    data, scale = _operands(product)[1]
    own = scale.args[0] if scale.target is _aten.clone.default else scale  # of what lies side by side it is a copy
    rows, dim = _slice_of_input(data, 0), int(_slice_of_input(own, 0) is None)
    scales = _slice_of_input(own, dim)
    if rows is None or scales is None or set(data.users) != {product}:
        return None
    (stack, first, end), (scale_inv, index, after) = rows, scales
    dgrads = set(scale.users) - {product}
    place = dim, index, after
    one = after == index + 1 and _has_scale_a_part(stack, scale_inv)
    if len(dgrads) > 1 or (Gemm.of(product).b_quantizer.one_scale and not one):
        return None
    if not dgrads:
        return Linear(Part(stack, scale_inv, None, first, end, place), product, _biased(product), None, None, None)
    (dgrad,) = dgrads
    weight = _operands(dgrad)[1] if dgrad.target is gemm else (None, None)
    copied = weight[0] if weight[1] is scale else None
    columns = (
        _slice_of_input(copied.args[0], 1) if copied is not None and copied.target is _aten.clone.default else None
    )
    if columns is None or columns[1:] != (first, end):
        return None
    return _with_backward(Part(stack, scale_inv, columns[0], first, end, place), product, dgrad)


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


def _with_backward(weight: Node | Part, product: Node, dgrad: Node) -> Linear | None:
    """The linear with its dgrad and its wgrad, if nothing else reads the gradient that they quantize."""
    grad = _quantize_behind(_operands(dgrad)[0][0])
    if grad is None or Gemm.of(dgrad).bias is not None or not Gemm.of(dgrad).of_a_linear:
        return None
    wgrads = _only_readers_of_columns(grad, dgrad)
    if wgrads is None:
        return None
    wgrad = next(iter(wgrads), None)
    if wgrad is not None and (
        wgrad.target is not gemm or _quantize_behind(_operands(wgrad)[0][0], columnwise=True) is not grad
    ):
        return None
    return Linear(weight, product, _biased(product), grad, dgrad, wgrad)


def _operands(product: Node) -> tuple[Any, Any]:
    """(a's codes and scales, b's) of a te.gemm."""
    asked = Gemm.of(product)
    return asked.a, asked.b


def _biased(product: Node) -> Node | None:
    """The te.add_bias of a parameter that alone reads the product."""
    reader = next(iter(product.users)) if len(product.users) == 1 else None
    if reader is None or reader.target is not add_bias or reader.args[0] is not product:
        return None
    return reader if _from_an_input(reader.args[1]) else None  # type: ignore[arg-type]


def _quantize_behind(buffer: Any, columnwise: bool = False, scales: bool = False) -> Node | None:
    """The te.quantize, of a format that stacks, whose codes of that usage this is, or their scales."""
    if not (isinstance(buffer, Node) and buffer.target is operator.getitem):
        return None
    node, index = buffer.args
    if not (isinstance(node, Node) and node.target is quantize and node.args[1].stacks):  # type: ignore[union-attr]
        return None
    return node if buffer_names(node)[index] == _operand_names(node, columnwise)[scales] else None  # type: ignore[index]


def buffer_names(quantized: Node) -> list[str]:
    return quantized.args[1].buffer_names()  # type: ignore[union-attr]


def _operand_names(quantized: Node, columnwise: bool) -> list[str]:
    """(codes, scales) of one usage."""
    return quantized.args[1].reading(columnwise).buffer_names()  # type: ignore[union-attr]


def _only_readers_of_columns(quantized: Node, product: Node) -> set[Node] | None:
    """The one GEMM that reads the columns of a te.quantize, or none; None where not the product alone reads its rows, or others a scale."""
    by_name = _readers_by_name(quantized)
    by_rows, by_columns = (_operand_names(quantized, columnwise) for columnwise in (False, True))
    columns = {reader for name in by_columns for reader in by_name.get(name, ())} - {product}
    expected = {n: {x for x in (product, *columns) if n in (by_rows if x is product else by_columns)} for n in by_name}
    return columns if len(columns) <= 1 and by_name == expected else None


def _readers_by_name(quantized: Node) -> dict[str, set[Node]]:
    """Buffer name -> who reads it, of a te.quantize."""
    items = item_users(quantized)
    return {
        name: {user for item in items.get(i, ()) for user in item.users}
        for i, name in enumerate(buffer_names(quantized))
    }


def source_of(quantized: Node) -> Node:
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


def readers(node: Node) -> Iterator[Node]:
    """Who reads the node's value, through views; the output node if the graph returns it."""
    for user in node.users:
        if is_view(user):
            yield from readers(user)
        else:
            yield user


@dataclasses.dataclass
class Sum:
    """dgrads that are only added to each other and to further terms of the same shape.

    node: the sum. others: the terms that are no dgrads of the group, in the order in which they are added.
    view: how a dgrad [M, K] becomes a term, None where it is one.
    """

    node: Node
    others: list[Node]
    view: Node | None

    @classmethod
    def of(cls, dgrads: list[Node]) -> Sum | None:
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
