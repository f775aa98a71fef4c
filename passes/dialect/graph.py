"""Small helpers on FX graphs that every pass needs: looking through getitem, inserting nodes that carry their metadata."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

from te_dynamo.dialect.fakes import fake_mode_of
from te_dynamo.dialect.memory import is_view


def calls(graph: Graph, *targets: torch._ops.OpOverload) -> Iterator[Node]:
    """The nodes that call one of `targets`, in graph order; safe while the graph changes."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in targets and not node._erased:
            yield node


def item_users(node: Node) -> dict[int, list[Node]]:
    """Index -> the getitem nodes that read it, for a node with several results."""
    users: dict[int, list[Node]] = {}
    for user in node.users:
        assert user.target is operator.getitem, f"{node.target} has results only getitem can read, found {user.target}"
        index = user.args[1]
        assert isinstance(index, int)
        users.setdefault(index, []).append(user)
    return users


def call_like(
    graph: Graph, target: torch._ops.OpOverload, args: tuple[Any, ...], like: Node, kwargs: dict[str, Any] | None = None
) -> Node:
    """A new call before `like`, with its fake result computed and `like`'s stack trace and module path kept."""
    kwargs = kwargs or {}
    with graph.inserting_before(like):
        node = graph.call_function(target, tuple(args), kwargs)
    inherited = (
        "stack_trace",
        "nn_module_stack",
        "fwd_nn_module_stack",
        "seq_nr",
        "recompute",
        "ac_graph_id",
        "partitioner_tag",
        "source_fn_stack",
    )
    node.meta.update({key: like.meta[key] for key in inherited if key in like.meta})
    fakes, named = torch.fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    with fake_mode_of(fakes), disable_proxy_modes_tracing():
        node.meta["val"] = target(*fakes, **named)
    return node


@contextlib.contextmanager
def fakes_of(node: Node) -> Iterator[None]:
    """Inside, tensors are fakes of the mode that `node`'s value is of, and nothing is traced."""
    with fake_mode_of([node.meta["val"]]), disable_proxy_modes_tracing():
        yield


def is_plain_sum(node: Any, promotes: bool = False) -> bool:
    """x + y of two contiguous tensors of one shape and dtype, the result's. promotes: one of them may be narrower."""
    if not (isinstance(node, Node) and node.target is torch.ops.aten.add.Tensor) or node.kwargs:
        return False
    total: torch.Tensor = node.meta["val"]
    operands = [arg.meta["val"] if isinstance(arg, Node) else None for arg in node.args]
    dtypes = [value.dtype for value in operands if isinstance(value, torch.Tensor)]
    if total.dtype not in dtypes:
        return False
    return is_contiguous(total) and all(
        isinstance(value, torch.Tensor)
        and (value.dtype == total.dtype or (promotes and value.dtype in (torch.bfloat16, torch.float16)))
        and value.dim() == total.dim()
        and statically_known_true(sym_eq(tuple(value.shape), tuple(total.shape)))
        and is_contiguous(value)
        for value in operands
    )


def is_contiguous(value: torch.Tensor) -> bool:
    """Whether a fake tensor is known to be: where data decides its sizes, torch's own method raises."""
    steps = itertools.accumulate(value.shape[:0:-1], operator.mul, initial=1)
    inner_first = zip(value.shape[::-1], value.stride()[::-1], steps, strict=False)
    return all(statically_known_true(size == 1) or statically_known_true(s == step) for size, s, step in inner_first)


def reshaped_like(graph: Graph, node: Node, view: Node) -> Node:
    """`node` in the shape of `view`, one of RESHAPES; it stands before `view`."""
    assert isinstance(view.target, torch._ops.OpOverload)
    return call_like(graph, view.target, (node, *view.args[1:]), view)


def sizes(graph: Graph, node: Node, before: Node) -> list[int | Node]:
    """The shape of `node` as an argument of a node that stands before `before`: a symbol is asked of the tensor."""
    return [
        size if isinstance(size, int) else call_like(graph, torch.ops.aten.sym_size.int, (node, dim), before)
        for dim, size in enumerate(node.meta["val"].shape)
    ]


def retrace_views(node: Node, value: Any) -> dict[Node, Any] | None:
    """The fake value of each view of `node`, and of each view of those, if `node` had `value`.

    None where a view cannot be made of a tensor of these strides, or names strides of its own.
    """
    values: dict[Node, Any] = {node: value}
    waiting = [node]
    with fakes_of(node):
        while waiting:
            for user in waiting.pop().users:
                if not is_view(user):
                    continue
                if user.target is torch.ops.aten.as_strided.default:
                    return None
                args, kwargs = torch.fx.map_arg((user.args, user.kwargs), lambda n: values.get(n, n.meta["val"]))
                try:
                    values[user] = user.target(*args, **kwargs)  # type: ignore[operator]
                except (RuntimeError, ValueError):
                    return None
                waiting.append(user)
    del values[node]
    return values


def sorted_topologically(graph: Graph) -> None:
    """Puts nodes that stand before their inputs behind them, and leaves the order otherwise."""
    from torch._inductor.pattern_matcher import stable_topological_sort

    stable_topological_sort(graph)


def getitem_after(node: Node, index: int) -> Node:
    """A getitem of `node`'s result `index`, right after it."""
    with node.graph.inserting_after(node):
        item = node.graph.call_function(operator.getitem, (node, index))
    item.meta["val"] = node.meta["val"][index]
    return item


def read_item(node: Node, index: int, readers: list[Node]) -> None:
    """`readers` (nodes whose value is what `node`, which stands before them, returns at `index`) become reads of that item.

    They change in place: to replace a node that the graph returns costs as much as the graph returns nodes, which for a forward
    graph is all that backward reads.
    """
    for reader in readers:
        reader.target, reader.args, reader.kwargs = operator.getitem, (node, index), {}
        reader.meta.pop("eager_input_vals", None)  # of the arguments it had
        reader.meta["val"] = node.meta["val"][index]


def replace_items(old: Node, new: Node, index_map: dict[int, int]) -> None:
    """Makes every reader of `old`'s result i read `new`'s result index_map[i]; `old` is left without readers of those.

    `new` stands before `old`.
    """
    for index, readers in item_users(old).items():
        if index in index_map:
            read_item(new, index_map[index], readers)
