"""A graph and the bodies in it that take inputs as it does: checkpointed regions, compile regions.

A body is run by higher-order ops of other regions, which pass an operand for each of its placeholders.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

_HAVE_OPERANDS = {
    "tag_activation_checkpoint", "wrap", "wrap_activation_checkpoint", "wrap_with_set_grad_enabled", "wrap_with_autocast",
    "invoke_subgraph",
}  # fmt: skip
"""Those whose last arguments are what they pass to one body."""


class Region:
    """A graph, and who runs it.

    calls:    (region, higher-order op) of those that run a body; none for the whole graph.
    operands: placeholder -> what each call passes for it.
    inputs:   placeholder -> which inputs of the whole graph it is, one for each way that leads here; [] where a call
              passes something else.
    """

    def __init__(self, gm: fx.GraphModule, calls: list[tuple[Region, fx.Node]]) -> None:
        self.gm, self.graph, self.calls = gm, gm.graph, calls
        placeholders: list[fx.Node] = gm.graph.find_nodes(op="placeholder")
        count = len(placeholders)
        passed = [call.args[-count:] for _, call in calls]
        self.operands: dict[fx.Node, list[Any]] = {
            node: [args[i] for args in passed] for i, node in enumerate(placeholders)
        }
        self.inputs: dict[fx.Node, list[int]] = {}
        for i, node in enumerate(placeholders):
            ways = [
                caller.inputs.get(operand, []) for (caller, _), operand in zip(calls, self.operands[node], strict=True)
            ]
            known = [] not in ways
            self.inputs[node] = [position for way in ways for position in way if known] if calls else [i]
        self._given = placeholders

    def take(self, name: str, value: torch.Tensor, operands: list[fx.Node]) -> fx.Node:
        """A placeholder of that fake value behind the others, and an operand for each call."""
        with self.graph.inserting_after(next(reversed(self.operands))):
            node = self.graph.placeholder(name)
        node._dynamo_source = None  # type: ignore[attr-defined]  # AOTAutograd asks each input for it
        node.meta["example_value"] = value
        self.operands[node] = operands
        return node

    def drop(self, placeholder: fx.Node) -> None:
        """Takes away a placeholder that nothing reads."""
        del self.operands[placeholder]
        self.graph.erase_node(placeholder)

    def close(self) -> None:
        """The calls pass what was taken, and no more what was dropped."""
        count = len(self._given)
        for i, (_, call) in enumerate(self.calls):
            given = dict(
                zip(self._given, call.args[-count:], strict=True)
            )  # as they are now: callers are rewritten too
            operands = [given[p] if p in given else passed[i] for p, passed in self.operands.items()]
            call.args = (*call.args[:-count], *operands)
        self.gm.recompile()


def regions(gm: fx.GraphModule) -> list[Region]:
    """The whole graph first, every body behind those that run it. Without bodies that a cond or a scan runs too."""
    calls: dict[fx.GraphModule, list[tuple[fx.GraphModule, fx.Node]]] = {gm: []}
    order: list[fx.GraphModule] = []
    elsewhere: set[nn.Module] = set()

    def visit(module: fx.GraphModule) -> None:
        for call in reversed(module.graph.nodes):
            if not isinstance(call.target, torch._ops.HigherOrderOperator):
                continue
            bodies = bodies_of(module, call)
            if not has_operands(call, bodies):
                elsewhere.update(inner for body in bodies for inner in body.modules())
                continue
            known = bodies[0] in calls
            calls.setdefault(bodies[0], []).append((module, call))
            if not known:
                visit(bodies[0])
        order.append(module)

    visit(gm)
    found: dict[fx.GraphModule, Region] = {}
    for module in reversed(order):
        if module not in elsewhere and all(caller in found for caller, _ in calls[module]):
            found[module] = Region(module, [(found[caller], call) for caller, call in calls[module]])
    return list(found.values())


def bodies_of(gm: fx.GraphModule | None, call: fx.Node) -> list[fx.GraphModule]:
    """What a higher-order op of that module's graph may run."""
    named = [getattr(gm, str(node.target), None) for node in call.all_input_nodes if node.op == "get_attr"]
    return [body for body in named if isinstance(body, fx.GraphModule)]


def has_operands(call: fx.Node, bodies: list[fx.GraphModule]) -> bool:
    """Whether its last arguments are what it passes to the placeholders of its one body."""
    if call.target.name() not in _HAVE_OPERANDS or len(bodies) != 1:  # type: ignore[union-attr]
        return False
    count = len(bodies[0].graph.find_nodes(op="placeholder"))
    return 0 < count < len(call.args)
