"""Stretches of a model's graph as lists of operations, for passes/torch_ir/operation_fusions.py. Reading changes nothing.

    n = te.rms_norm(x, w)[0]                               RMSNorm
    g, u = te.linear(n, wg)[0], te.linear(n, wu)[0]        BasicLinear(K, 2 N), whose weight is [wg, wu] in one
    a = te.gated(g, u, 'silu')                             SwiGLU
    d = te.linear(a, wd, b)[0]                             BasicLinear, Bias
    y = x + d                                              AddExtraInput, with the extra input x
    m = layer_norm(y); ...; z = y + ...                    MakeExtraOutput, LayerNorm: y goes to the second sum too

A chain is a row of links, each of which reads what the one before gives. Nobody else reads it, but for one sum, to which a
MakeExtraOutput gives it; the same before the first link. A norm that q, k and v read is no link of theirs.

What the matcher left to Inductor (a norm beside MXFP8) is read all the same. Not read: norms without a weight, a LayerNorm without a
bias, sums that broadcast, promote or work in place, anything between tensors of several dtypes (autocast's casts).
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._pytree import tree_leaves

from te_dynamo.operations import (
    GEGLU,
    GELU,
    GLU,
    QGEGLU,
    QGELU,
    AddExtraInput,
    BasicLinear,
    Bias,
    LayerNorm,
    MakeExtraOutput,
    ReGLU,
    ReLU,
    RMSNorm,
    SiLU,
    SReLU,
    SwiGLU,
)
from te_dynamo.operations.op import BasicOperation
from te_dynamo.operations.run import Call
from te_dynamo.options import Options
from te_dynamo.passes.torch_ir.match.patterns.activation import activation_of, factors
from te_dynamo.passes.torch_ir.match.patterns.formulas import ADD, SIGMOID
from te_dynamo.passes.torch_ir.match.patterns.norm import Norm, called_norm, why_no_te_norm
from te_dynamo.passes.torch_ir.match.patterns.written_norm import written_norm
from te_dynamo.passes.torch_ir.match.values import (
    FLOATS,
    arguments,
    calls,
    fixed,
    left_as_plain,
    name_of,
    sole_user,
    tensor_of,
)
from te_dynamo.passes.torch_ir.match.where import linear_path

_te = torch.ops.te
_LINEAR = _te.linear.default
_CHUNK = ({torch.chunk}, {"chunk"})


@dataclasses.dataclass(eq=False)
class Link:
    """One step of a chain: the operations that stand for `nodes`, from `input` to `output`.

    params:  the operations' parameters; a tuple is one that stands in the model as several tensors, stacked along dimension 0.
    extra:   what an AddExtraInput adds.
    second:  of a MakeExtraOutput, which stands for no node: the sum that reads its input as well.
    parts:   of gate and up in one: the two linears by themselves.
    flags:   which of params (and of the extra input) need a gradient.
    """

    ops: list[BasicOperation]
    input: fx.Node
    output: fx.Node
    nodes: list[fx.Node]
    params: list[fx.Node | tuple[fx.Node, ...]] = dataclasses.field(default_factory=list)
    flags: list[bool] = dataclasses.field(default_factory=list)
    extra: fx.Node | None = None
    extra_flags: list[bool] = dataclasses.field(default_factory=list)
    second: fx.Node | None = None
    parts: list[Link] = dataclasses.field(default_factory=list)

    @property
    def input_flag(self) -> bool:
        """Whether the input needs a gradient."""
        return _needs_grad(self.input, self.output)

    def is_closed(self) -> bool:
        """Whether what is computed on the way from the input to the output is read nowhere else."""
        inside = set(self.nodes)
        return all(set(node.users) <= inside for node in self.nodes if node is not self.output)


def chains(graph: fx.Graph, options: Options) -> Iterator[list[Link]]:
    """The chains of the graph that hold a te.linear, each te.linear in one of them; gate and up in one and then, for fusions that
    know no gated activation, each by itself."""
    reader = _Reader(graph, options)
    seen: set[fx.Node] = set()
    for node in graph.nodes:
        start = None if node in seen else reader.start(node)
        if start is not None:
            chain = [*reader.branch(start, reader.sums(start.input)), start]
            while chain[-1].output not in seen:  # behind a sum that another chain came to, that one goes on
                seen.update(chain[-1].nodes)
                chain += reader.following(chain[-1].output)
            if any(isinstance(op, BasicLinear) for link in chain for op in link.ops):
                yield chain
            for part in (part for link in chain for part in link.parts):
                yield [part, *reader.following(part.output)]


class _Reader:
    """What of a graph are links."""

    def __init__(self, graph: fx.Graph, options: Options) -> None:
        self.options = options
        self.norms: dict[fx.Node, Link] = {}
        for node in graph.nodes:
            link = _norm(node)
            if link is not None:
                self.norms[link.output] = link
        self.norms_of: dict[fx.Node, list[Link]] = {}
        for link in self.norms.values():
            self.norms_of.setdefault(link.input, []).append(link)

    def start(self, node: fx.Node) -> Link | None:
        """The link that a chain may start with at `node`: the output of a norm, or a te.linear."""
        return self.norms.get(node) or (self.linear(node) if node.target is _LINEAR else None)

    def following(self, value: fx.Node) -> list[Link]:
        """The links that read `value`: one, with a MakeExtraOutput before it where a sum does too; none where a chain ends."""
        sums = self.sums(value)
        others = [reader for reader in value.users if reader not in sums]
        if not others:
            return [self._sum(sums[0], value)] if len(sums) == 1 else []
        link = self._reading(value, others)
        if link is None or (sums and not self.branch(link, sums)):
            return []
        return [*self.branch(link, sums), link]

    def sums(self, value: fx.Node) -> list[fx.Node]:
        """The readers of `value` that add it to another tensor of its kind, in the order of the graph."""
        return sorted(node for node in value.users if _is_sum(node, value))

    def branch(self, link: Link, sums: Sequence[fx.Node]) -> list[Link]:
        """A MakeExtraOutput that gives the link's input to the only one of `sums`."""
        if len(sums) != 1 or sums[0] in link.nodes:
            return []
        return [Link([MakeExtraOutput()], link.input, link.input, [], second=sums[0])]

    def _reading(self, value: fx.Node, readers: Sequence[fx.Node]) -> Link | None:
        """The link that all of `readers` are of."""
        links: list[Link | None] = [*self.norms_of.get(value, ())]
        (first, *_) = readers
        links.append(
            self.linear(first) if first.target is _LINEAR else _halves(first, value) or _activation(first, value)
        )
        for link in links:
            if link is None or link.input is not value or value in tree_leaves(link.params):
                continue
            if {node for node in link.nodes if value in node.all_input_nodes} == set(readers):
                return link
        return None

    def linear(self, node: fx.Node) -> Link | None:
        """te.linear with what belongs to it: its bias; another one, where they are gate and up of a gated activation."""
        alone = self._linear(node)
        if alone is None:
            return None
        gated = _gated_product(alone.output)
        if gated is None:
            return alone
        op, values, nodes = gated
        pair = [_linear_of(value) for value in values]
        links = [alone if n is node else None if n is None else self._linear(n) for n in pair]
        return _stacked(op, [link for link in links if link is not None], nodes) or alone

    def _linear(self, node: fx.Node) -> Link | None:
        """One te.linear; None where its recipe is not the one that the options give it."""
        args: tuple[Any, ...] = node.args
        read, weight, bias, config = args
        output = sole_user(node)
        if output is None:
            return None
        recipe, _ = self.options.recipe_for(*linear_path(node, weight))
        if recipe is None:
            return None
        out_features, in_features = tensor_of(weight).shape  # type: ignore[union-attr]
        linear = BasicLinear(in_features, out_features, recipe)
        link = Link([linear], read, output, [node, output], [weight], [config.weight_requires_grad])
        if bias is not None:
            link.ops.append(Bias(out_features))
            link.params.append(bias)
            link.flags.append(_needs_grad(bias, output))
        call = Call.of(link.ops, [config.input_requires_grad, *link.flags], training=True)
        return link if linear.config(call.requires_grad[0]) == config else None

    def _sum(self, node: fx.Node, value: fx.Node) -> Link:
        """value + another tensor."""
        extra: Any = node.args[1] if node.args[0] is value else node.args[0]
        return Link([AddExtraInput()], value, node, [node], extra=extra, extra_flags=[_needs_grad(extra, node)])


def _needs_grad(node: fx.Node, output: fx.Node) -> bool:
    """Whether `node` gets a gradient from `output`: not where grad mode was off."""
    return bool(tensor_of(output).requires_grad and tensor_of(node).requires_grad)  # type: ignore[union-attr]


def _same_kind(*nodes: fx.Node) -> bool:
    """Whether all are plain tensors of one floating dtype."""
    values = [tensor_of(node) for node in nodes]
    return not left_as_plain(*nodes) and all(v.dtype in FLOATS and v.dtype == values[0].dtype for v in values)  # type: ignore[union-attr]


# ---- norms


def _norm(node: fx.Node) -> Link | None:
    """The norm whose first, only or most telling node is `node`, if the operations have it."""
    norm = _te_norm(node) or called_norm(node) or written_norm(node)
    if not isinstance(norm, Norm) or not all(isinstance(weight, fx.Node) for weight in norm.weights):
        return None
    eps, *flags = norm.options
    if not isinstance(eps, (int, float)) or why_no_te_norm(norm):
        return None
    if tensor_of(norm.last).dtype != tensor_of(norm.x).dtype:  # autocast's; the operations keep the dtype
        return None
    features = int(tensor_of(norm.weights[0]).shape[0])  # type: ignore[union-attr]
    op: BasicOperation
    if norm.kind == "layer_norm":
        op = LayerNorm(features, float(eps))
    else:
        before, centered = flags
        op = RMSNorm(features, float(eps), zero_centered=centered, cast_before_weight=before)
    flags = [_needs_grad(weight, norm.last) for weight in norm.weights if weight is not None]
    link = Link([op], norm.x, norm.last, list(norm.nodes), [w for w in norm.weights if w is not None], flags)
    return link if link.is_closed() else None


def _te_norm(node: fx.Node) -> Norm | None:
    """A te norm that the matcher put in."""
    if not calls(node, {_te.rms_norm.default, _te.layer_norm.default}):
        return None
    kind, output = name_of(node), sole_user(node)
    x, *rest = node.args
    weights = 1 if kind == "rms_norm" else 2
    return None if output is None else Norm(kind, x, tuple(rest[:weights]), tuple(rest[weights:]), (node, output))  # type: ignore[arg-type]


# ---- activations

_ACTIVATIONS: dict[str, tuple[BasicOperation | None, BasicOperation | None]] = {
    "gelu": (GELU(), GEGLU()),
    "gelu_tanh": (GELU("tanh"), GEGLU("tanh")),
    "quick_gelu": (QGELU(), QGEGLU()),
    "relu": (ReLU(), ReGLU()),
    "relu2": (SReLU(), None),
    "sigmoid": (None, GLU()),
    "silu": (SiLU(), SwiGLU()),
}
"""Kind -> (the operation, its gated form)."""

_LONGEST = 9
"""No activation that is written out has more operations one after another."""

_OF_TE = {_te.gelu.default, _te.quick_gelu.default, _te.silu.default, _te.relu.default, _te.relu2.default}


def _activation_of(node: Any) -> tuple[str, Any, tuple[fx.Node, ...]] | None:
    """(kind, x, nodes) of the activation that `node` ends: the matcher's, or as the user spells it."""
    if calls(node, _OF_TE):
        x, *approximate = node.args
        return name_of(node) + "_tanh" * (approximate == ["tanh"]), x, (node,)
    if calls(node, *SIGMOID) and len(node.args) == 1 and not node.kwargs:
        return "sigmoid", node.args[0], (node,)
    return activation_of(node)


def _activation(node: fx.Node, x: fx.Node) -> Link | None:
    """The activation of x that `node` begins, the longest: the square of a relu is no relu."""
    ends = [node]
    while len(ends) < _LONGEST and (user := sole_user(ends[-1])) is not None:
        ends.append(user)
    for last in reversed(ends):
        kind, of, nodes = _activation_of(last) or ("", None, ())
        op = _ACTIVATIONS[kind][0] if of is x and node in nodes else None
        if op is not None:
            return Link([op], x, nodes[-1], list(nodes)) if _same_kind(x, *nodes) else None
    return None


_Gated = tuple[BasicOperation, tuple[fx.Node, fx.Node], list[fx.Node]]
"""(operation, (gate, up), nodes)."""


def _gated_product(value: fx.Node) -> _Gated | None:
    """The gated activation that reads `value`, as its gate or as its other factor, and nothing else does."""
    reader = sole_user(value)
    if reader is None:
        return None
    found = _as_gated(reader)
    if found is None and (product := sole_user(reader)) is not None:
        found = _as_gated(product)
    return found if found is not None and value in found[1] else None


def _as_gated(node: fx.Node) -> _Gated | None:
    """`node` as the product f(gate) * up."""
    if calls(node, {_te.gated.default}):
        given: tuple[Any, ...] = node.args
        _, op = _ACTIVATIONS.get(given[2], (None, None))
        return None if op is None else (op, given[:2], [node])
    gate: Any
    for f, up in factors(node):
        kind, gate, nodes = _activation_of(f) or ("sigmoid", None, ())
        _, op = _ACTIVATIONS[kind]
        tensors = gate, up, *nodes, node
        if op is None or nodes != (f,) or gate is up or sole_user(f) is not node:
            continue
        if _same_kind(*tensors) and _same_shape(gate, up, node):
            return op, (gate, up), [f, node]
    return None


def _cast_of(value: fx.Node) -> Any:
    """What autocast makes anew for each of its readers: a cast of one node to one dtype; else the node."""
    return ("to", *value.args) if calls(value, set(), {"to"}) and not value.kwargs else value


def _linear_of(value: fx.Node) -> fx.Node | None:
    """The te.linear whose output `value` is."""
    source = value.args[0] if calls(value, {operator.getitem}) else None
    return source if isinstance(source, fx.Node) and source.target is _LINEAR else None


def _stacked(op: BasicOperation, pair: Sequence[Link], nodes: list[fx.Node]) -> Link | None:
    """Gate and up as one linear, and the activation; None where they are not two halves of one."""
    if len(pair) != 2:
        return None
    gate, up = pair
    kinds = [
        (
            _cast_of(link.input),
            link.nodes[0].args[3],
            [(tensor_of(p).shape, tensor_of(p).dtype) for p in link.params],
            link.flags,
        )  # type: ignore[union-attr,arg-type]
        for link in pair
    ]
    if gate.ops != up.ops or kinds[0] != kinds[1]:
        return None
    linear, *bias = gate.ops
    params: Any = list(zip(gate.params, up.params, strict=True))
    assert isinstance(linear, BasicLinear)
    both = [dataclasses.replace(linear, out_features=2 * linear.out_features), *(Bias(2 * b.features) for b in bias)]  # type: ignore[attr-defined]
    link = Link(
        [*both, op], gate.input, nodes[-1], [*gate.nodes, *up.nodes, *nodes], params, gate.flags, parts=[gate, up]
    )  # type: ignore[arg-type]
    return link if link.is_closed() else None


def _halves(node: fx.Node, value: fx.Node) -> Link | None:
    """A gated activation of the two halves of one tensor: f(a) * b, a, b = value.chunk(2, -1)."""
    if not calls(node, *_CHUNK):
        return None
    given = arguments(node, "input", "chunks", "dim") or {}
    shape = tensor_of(value).shape  # type: ignore[union-attr]
    features = fixed(shape[-1])
    if given.get("chunks") != 2 or given.get("dim", 0) not in (-1, len(shape) - 1) or features is None or features % 2:
        return None
    halves = {use.args[1]: use for use in node.users if calls(use, {operator.getitem})}
    if set(halves) != {0, 1} or len(node.users) != 2:
        return None
    found = _gated_product(halves[0])
    if found is None or found[1] != (halves[0], halves[1]) or not _same_kind(value, found[2][-1]):
        return None
    link = Link([found[0]], value, found[2][-1], [node, *halves.values(), *found[2]])
    return link if link.is_closed() else None


# ---- sums


def _is_sum(node: fx.Node, value: fx.Node) -> bool:
    """Whether `node` is value + another tensor of its shape and dtype, a new tensor."""
    if not calls(node, *ADD) or node.kwargs or len(node.args) != 2:
        return False
    a, b = node.args
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node) or a is b or value not in (a, b):
        return False
    return tensor_of(a) is not None and tensor_of(b) is not None and _same_kind(a, b, node) and _same_shape(a, b, node)


def _same_shape(*nodes: fx.Node) -> bool:
    """Whether their shapes are known to be equal: asking about a symbolic size must not fix it."""
    first, *rest = [tensor_of(node).shape for node in nodes]  # type: ignore[union-attr]
    return all(
        len(shape) == len(first) and all(statically_known_true(a == b) for a, b in zip(shape, first, strict=True))
        for shape in rest
    )
