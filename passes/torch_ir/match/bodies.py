"""The walk over a graph and the bodies inside it.

`torch.utils.checkpoint`, `mark_compile_region`, `torch.cond` and their like are higher-order ops: nodes that
hold their body as a GraphModule. A body that is a plain stretch of the model is matched like the model.
Inside any other (a scan, a custom autograd function) nothing is rewritten, and each linear is recorded with
that reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import fx

from te_dynamo.options import Options
from te_dynamo.passes.torch_ir.match.checkpoint import ask_for_what_was_replaced
from te_dynamo.passes.torch_ir.match.patterns.activation import match_activation, match_written_activation
from te_dynamo.passes.torch_ir.match.patterns.attention import match_attention
from te_dynamo.passes.torch_ir.match.patterns.compounds import match_compound
from te_dynamo.passes.torch_ir.match.patterns.experts import match_expert_loop
from te_dynamo.passes.torch_ir.match.patterns.gated import match_gated
from te_dynamo.passes.torch_ir.match.patterns.grouped import match_grouped
from te_dynamo.passes.torch_ir.match.patterns.linears.linear import RecipeFor, match_linear
from te_dynamo.passes.torch_ir.match.patterns.modulated_norm import match_modulated_norm
from te_dynamo.passes.torch_ir.match.patterns.norm import match_norm
from te_dynamo.passes.torch_ir.match.patterns.sequence import match_sequence
from te_dynamo.passes.torch_ir.match.patterns.written_norm import match_written_norm
from te_dynamo.passes.torch_ir.match.readers import INSIDE
from te_dynamo.passes.torch_ir.match.root import also_named, also_run_at, tell_apart
from te_dynamo.passes.torch_ir.match.where import SOURCE, module_path
from te_dynamo.recipe import Recipe
from te_dynamo.report import MatchRecord

_PLAIN_BODIES = {
    "tag_activation_checkpoint", "wrap", "wrap_activation_checkpoint", "wrap_with_set_grad_enabled",
    "wrap_with_autocast", "invoke_subgraph", "cond",
}  # fmt: skip

_LINEARS = (match_expert_loop, match_grouped, match_linear, match_compound)
"""Matchers of linears, in order: a loop over experts before each of its linears becomes one of its own."""

_AFTER_LINEARS = (
    match_modulated_norm,
    match_norm,
    match_written_norm,
    match_gated,
    match_written_activation,
    match_activation,
)
"""Matchers that look whether an FP8 linear is next to them, in order: a modulated norm before the norm inside it, a gated unit before
the activation inside it, the square of a relu before the relu."""


class Matcher:
    """Rewrites graphs under one set of options, a body that several nodes share only once."""

    def __init__(self, options: Options, linears_only: bool = False) -> None:
        self.options, self.linears_only = options, linears_only
        self._bodies: dict[int, list[MatchRecord]] = {}

    def match(self, gm: fx.GraphModule, recipe_for: RecipeFor | None = None, outside: str = "") -> list[MatchRecord]:
        """Rewrites `gm` and its bodies in place; its records in the order of the graph.

        recipe_for: (recipe, which rule chose it or why it is None) by `linear_path`, the options' own by default.
        outside: why nothing in here may be rewritten, "" normally.
        """
        recipe_for = recipe_for or self.recipe_for
        _drop_metadata_assertions(gm.graph)
        records: list[tuple[int, MatchRecord]] = []
        whole = {node: match_attention(node, recipe_for, outside) for node in list(gm.graph.nodes)}
        place = {node: index for index, node in enumerate(gm.graph.nodes)}
        for body, calls in _bodies(gm).items():
            for call, record in self._match_body(body, calls, recipe_for, outside):
                records.append((place[call], record))
        records += [(place[node], record) for node, left in whole.items() for record in left]
        for matcher in _LINEARS:
            for node, index in place.items():
                if not node._erased:
                    records += [(index, record) for record in matcher(node, recipe_for, outside)]
        for node, index in place.items():
            if not node._erased:
                records += [(index, record) for record in match_sequence(node, self.options.fusions)]
        for match_other in () if outside or self.linears_only else _AFTER_LINEARS:
            for node in list(gm.graph.nodes):
                inside = INSIDE in node.meta
                if node in place and not node._erased and (record := match_other(node)) is not None:
                    records += [(place[node], record)] if record.matched or not inside else []
        gm.graph.lint()
        gm.recompile()
        return [record for _, record in sorted(records, key=lambda pair: pair[0])]

    def recipe_for(self, path: str, parameter: str) -> tuple[Recipe | None, str]:
        """The options' choice, None where another module that runs the same graph has a choice of its own."""
        chosen, others = self.options.recipe_for(path, parameter), also_run_at(path)
        names = also_named(path)
        if any(self.options.recipe_for(name, parameter)[0] != chosen[0] for name in names):
            listed = " and ".join(map(repr, sorted({path, *names})))
            return (
                None,
                f"one module or parameter at {listed}, behind graph breaks, and the rules treat these differently; name all in one rule",
            )
        alike = all(self.options.recipe_for(other, parameter)[0] == chosen[0] for other in others)
        if alike or tell_apart(1 + len(others)):
            return chosen
        return None, (
            f"{1 + len(others)} modules run this graph, behind graph breaks, and the rules treat them differently; compile each "
            "with options of its own"
        )

    def _match_body(
        self, body: fx.GraphModule, calls: list[fx.Node], recipe_for: RecipeFor, outside: str
    ) -> Iterator[tuple[fx.Node, MatchRecord]]:
        """Rewrites a body; its records once for each call, under the path that the call has in the model."""
        names = {call.target.name() for call in calls}  # type: ignore[union-attr]
        for name in sorted(names - _PLAIN_BODIES):
            outside = outside or f"inside {name}, whose body te_dynamo does not rewrite"
        # The names inside are those of the first call; the others run the same code at other places of the model.
        first, *_ = paths = [module_path(call) for call in calls]

        def recipe_for_all(path: str, parameter: str) -> tuple[Recipe | None, str]:
            recipes = [recipe_for(_moved(path, first, to), parameter) for to in paths]
            if any(recipe != recipes[0][0] for recipe, _ in recipes):
                return None, f"{len(calls)} modules share this compiled region, and the rules treat them differently"
            return recipes[0]

        if id(body) not in self._bodies:
            ask_for_what_was_replaced(body)
            _name_parameters(body, calls[0])
            self._bodies[id(body)] = self.match(body, recipe_for_all, outside)
        for call, path in zip(calls, paths, strict=True):
            for record in self._bodies[id(body)]:
                yield call, dataclasses.replace(record, module=_moved(record.module, first, path))


def _drop_metadata_assertions(graph: fx.Graph) -> None:
    """Removes the assertions that torch.export writes before each cast: Dynamo's guards hold the same, and they would count as
    readers of the tensors."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._assert_tensor_metadata.default):
        graph.erase_node(node)


def _name_parameters(body: fx.GraphModule, call: fx.Node) -> None:
    """A body's parameters know which of the model's they are: both have one name. Not as the graph's own know it, by which a body is told."""
    known = {operand.name: operand for operand in call.all_input_nodes}
    for placeholder in body.graph.find_nodes(op="placeholder"):
        if source := getattr(known.get(placeholder.name), "_dynamo_source", None):
            placeholder.meta[SOURCE] = source


def _bodies(gm: fx.GraphModule) -> dict[fx.GraphModule, list[fx.Node]]:
    """The bodies in a graph, each with the higher-order ops that run it."""
    found: dict[fx.GraphModule, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            for operand in node.all_input_nodes:
                body = getattr(gm, str(operand.target), None) if operand.op == "get_attr" else None
                if isinstance(body, fx.GraphModule):
                    found.setdefault(body, []).append(node)
    return found


def _moved(path: str, origin: str, target: str) -> str:
    """`path` with its part `origin` replaced: "layers.0.fc" from "layers.0" to "layers.1" is "layers.1.fc"."""
    if origin and (path == origin or path.startswith(origin + ".")):
        return target + path[len(origin) :]
    return path
