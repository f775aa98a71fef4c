"""Whether several nodes may become one, at the place of the last: nothing between them writes what they read, or changes what they
would mean there.

The one node reads its inputs later than the user's nodes did, and may keep them for the backward pass where the user's formula kept a
copy. Torch IR has in-place methods, augmented assignments and `out=`, so both need proof. memory.py and writes.py have the facts, which
`facts_known` takes before anything is rewritten.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Sequence

from torch import fx

from te_dynamo.passes.torch_ir.match.memory import CHANGED_BY, Memory, memory_of, note_body, note_graph, share
from te_dynamo.passes.torch_ir.match.values import name_of, tensor_of
from te_dynamo.passes.torch_ir.match.writes import changes_form, written_by
from te_dynamo.passes.torch_ir.regions import regions

_MODES = {
    "_set_grad_enabled", "_enter_autocast", "_exit_autocast", "_enter_inference_mode", "_exit_inference_mode",
    "_saved_tensors_hooks_disable", "_saved_tensors_hooks_enable",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Effect:
    """A node that writes the tensors that lie in `memory`, or changes grad mode or autocast."""

    node: fx.Node
    memory: Memory
    changes_mode: bool


def refuses(nodes: Sequence[fx.Node]) -> str:
    """Why the nodes of a match must not become one node in the place of the last; "" when they may.

    Refused: a node that works in place; a write between two of them to what an earlier one reads, or to what it gives a later one; a
    write behind them to what they read, when backward will want its value; a change of grad mode or autocast in between.
    """
    result = tensor_of(max(nodes))
    return _conflict(nodes, keeps=result is None or result.requires_grad)


def reads_through(reader: fx.Node, *between: fx.Node) -> bool:
    """Whether `reader` may read what the nodes `between` are views, casts or stacks of, in their place."""
    return not _conflict([*between, reader], keeps=False)


def is_written(*nodes: fx.Node) -> bool:
    """Whether something in the graph writes memory of theirs."""
    return any(share(effect.memory, memory_of(node)) for effect in _effects_of(nodes[0].graph) for node in nodes)


def written_inputs(graph: fx.Graph) -> set[fx.Node]:
    """The placeholders that share memory with what something in the graph writes."""
    return {node for node in graph.find_nodes(op="placeholder") if is_written(node)}


def _conflict(nodes: Sequence[fx.Node], keeps: bool) -> str:
    first, last, own = min(nodes), max(nodes), set(nodes)
    for effect in _effects_of(first.graph):
        node = effect.node
        if node._erased or node < first:
            continue
        inside = node < last
        if node in own:
            return f"its {name_of(node)} works in place"
        if not (inside or keeps):
            break
        if inside and effect.changes_mode:
            return f"{name_of(node)} changes the mode inside the pattern"
        if any(share(effect.memory, memory_of(value)) for value in _values_at(node, nodes, own)):
            when = "inside the pattern" if inside else "after it, and backward needs its value"
            return f"{name_of(node)} writes an input in place {when}"
    return ""


def _values_at(place: fx.Node, nodes: Sequence[fx.Node], own: set[fx.Node]) -> Iterator[fx.Node]:
    """The values whose write at `place` the one node would see, and the user's nodes did not, or the other way round: what is read from
    outside before it, and what is made inside before it and read after it."""
    for reader in nodes:
        for value in reader.all_input_nodes:
            if value < place < reader if value in own else reader < place:
                yield value


# --- facts


@contextlib.contextmanager
def facts_known(gm: fx.GraphModule) -> Iterator[None]:
    """Inside, the questions above are asked of `gm` and the bodies in it, whose memory and writes were noted at the beginning."""
    if gm.graph in (_known.get() or {}):
        yield
        return
    graphs = [module.graph for module in gm.modules() if isinstance(module, fx.GraphModule)]
    for graph in graphs:
        note_graph(graph)
    for region in regions(gm):  # callers first
        note_body(region.graph, region.operands)
    token = _known.set({graph: list(_effects(graph)) for graph in graphs})
    try:
        yield
    finally:
        _known.reset(token)


_known: contextvars.ContextVar[dict[fx.Graph, list[_Effect]] | None] = contextvars.ContextVar(
    "te_dynamo_effects", default=None
)


def _effects_of(graph: fx.Graph) -> list[_Effect]:
    known = _known.get()
    assert known is not None, "outside of facts_known"
    return known[graph]


def _effects(graph: fx.Graph) -> Iterator[_Effect]:
    """The nodes that write to a tensor or change grad mode or autocast, in order."""
    changed: dict[int, str] = {}
    for node in graph.nodes:
        written, changes_mode = written_by(node), name_of(node) in _MODES
        if written and changes_form(node):
            changed |= {id(n.meta["example_value"]): name_of(node) for n in written if "example_value" in n.meta}
        if written or changes_mode:
            yield _Effect(node, frozenset().union(*map(memory_of, written)), changes_mode)
    for node in graph.nodes if changed else ():
        if id(node.meta.get("example_value")) in changed:
            node.meta[CHANGED_BY] = changed[id(node.meta["example_value"])]
