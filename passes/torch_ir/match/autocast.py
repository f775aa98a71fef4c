"""Whether autocast may be on where a node stands: only then do operands of different dtypes meet in a linear."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

_ENTER = torch.amp.autocast_mode._enter_autocast
_EXIT = torch.amp.autocast_mode._exit_autocast


def may_be_autocast(node: fx.Node, device: torch.device) -> bool:
    """True where autocast is on: when the model is called, or in a region of this graph around `node`. Also true inside the
    body of a higher-order op, whose surroundings are not seen from there."""
    if is_body(node.graph):
        return True
    if torch.is_autocast_enabled(device.type):
        return True
    return bool(_open_regions(node))


@contextlib.contextmanager
def autocast_around(node: fx.Node) -> Iterator[None]:
    """Inside, autocast is as in the regions of this graph around `node`; in the body of a higher-order op, whose surroundings are
    not seen, as the dtype of its first result says."""
    result = next(v for v in tree_leaves(node.meta["example_value"]) if isinstance(v, torch.Tensor))
    if is_body(node.graph) and result.dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(result.device.type, result.dtype):
            yield
        return
    entered = [_ENTER(*region.args, **region.kwargs) for region in _open_regions(node)]
    try:
        yield
    finally:
        for mode in reversed(entered):
            _EXIT(mode)


def is_body(graph: fx.Graph) -> bool:
    """Whether it is the graph of a higher-order op's body, not that of a function."""
    return not any(n.op == "placeholder" and hasattr(n, "_dynamo_source") for n in graph.nodes)


def _open_regions(node: fx.Node) -> list[fx.Node]:
    """The nodes that enter the autocast regions around `node`, the outermost first."""
    regions: list[fx.Node] = []
    for earlier in node.graph.nodes:
        if earlier is node:
            break
        if earlier.target is _ENTER:
            regions.append(earlier)
        elif earlier.target is _EXIT:
            regions.pop()
    return regions
