"""Which inputs of Dynamo's graph FSDP manages: weights whose memory is there while the graph runs, and whose values change between calls."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import fx


def managed_by_fsdp(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> set[int]:
    """Their positions."""
    managed = _parameters_of_fsdp()
    placeholders = gm.graph.find_nodes(op="placeholder")
    return {
        position
        for position, (placeholder, value) in enumerate(zip(placeholders, example_inputs, strict=False))
        if is_from_fsdp(placeholder) or id(value) in managed
    }


def is_from_fsdp(placeholder: fx.Node) -> bool:
    """Whether Dynamo took it from a module of FSDP, whose parameters change under the same version counter."""
    source = getattr(placeholder, "_dynamo_source", None)
    while source is not None:
        if "FSDP" in type(source).__name__:
            return True
        source = getattr(source, "base", None)
    return False


def _parameters_of_fsdp() -> set[int]:
    """The ids of what FSDP2 manages in this process: torch's `replicate` runs on it too, which Dynamo does not know of."""
    states, fsdp = (sys.modules.get(f"torch.distributed.{name}") for name in ("_composable_state", "fsdp"))
    if states is None or fsdp is None:
        return set()
    managed = [module for module in list(states._module_state_mapping) if isinstance(module, fsdp.FSDPModule)]
    return {id(parameter) for module in managed for parameter in module.parameters()}
