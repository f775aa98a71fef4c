"""Whether autocast may be on where a node stands: only then do operands of different dtypes meet in a linear."""

from __future__ import annotations

import torch
from torch import fx

__all__ = ["may_be_autocast"]

_ENTER = torch.amp.autocast_mode._enter_autocast
_EXIT = torch.amp.autocast_mode._exit_autocast


def may_be_autocast(node: fx.Node, device: torch.device) -> bool:
    """True where autocast is on: when the model is called, or in a region of this graph around `node`. Also true inside the
    body of a higher-order op, whose surroundings are not seen from there."""
    if not any(n.op == "placeholder" and hasattr(n, "_dynamo_source") for n in node.graph.nodes):
        return True
    if torch.is_autocast_enabled(device.type):
        return True
    open_regions = 0
    for earlier in node.graph.nodes:
        if earlier is node:
            break
        open_regions += (earlier.target is _ENTER) - (earlier.target is _EXIT)
    return open_regions > 0
