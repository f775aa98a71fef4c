"""Products that an author computes in fp32 on purpose, in a model of 16 bits: a mixture's router, whose small errors send tokens elsewhere.

    F.linear(x.type(torch.float32), weight.type(torch.float32))      stays in fp32, unless a rule names it

Autocast casts down, and casts nothing that the graph shows. So both casts up are the author's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from te_dynamo.passes.torch_ir.match.cost import BY_RULE
from te_dynamo.passes.torch_ir.match.values import name_of, tensor_of

_SAME_VALUES = {
    "to", "type", "type_as", "float", "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "expand", "contiguous",
    "t", "transpose", "permute", "swapaxes", "swapdims", "mT", "T", "numpy_T", "getattr",
}  # fmt: skip


def kept_in_fp32(node: fx.Node, x: Any, weight: Any) -> str:
    """Why the product `node` of x and a weight stays in fp32; "" where its author does not cast both up to it."""
    if tensor_of(node).dtype is torch.float32 and _is_cast_up(x) and _is_cast_up(weight):
        return f"its input and its weight are cast up to fp32 for it; {BY_RULE}"
    return ""


def _is_cast_up(node: Any) -> bool:
    value = tensor_of(node)
    while value is not None and value.dtype is torch.float32 and name_of(node) in _SAME_VALUES and node.args:
        node = node.args[0]
        value = tensor_of(node)
    return value is not None and value.dtype in (torch.bfloat16, torch.float16)
