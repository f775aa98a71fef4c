"""Where the amax of a quantized tensor is best computed.

A tensor that Inductor itself writes (the residual gradient after a norm's backward, say) gets its amax as aten operations:
Inductor fuses the row maxima into the kernel that writes the tensor, and one pass over memory is saved. Any other tensor
(a weight, a GEMM's output) is read by our own amax kernel.
"""

from __future__ import annotations

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import guard_or_false

__all__ = ["amax_by_rows", "written_by_inductor"]

_aten = torch.ops.aten
_VIEWS = {_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default}
_ALSO_POINTWISE = {_aten._to_copy.default, _aten.clone.default, torch.ops.prims.convert_element_type.default}


def written_by_inductor(tensor: Node) -> bool:
    """Whether Inductor's own code, and not an input, a GEMM or a kernel of ours, writes `tensor`."""
    while tensor.op == "call_function" and tensor.target in _VIEWS:
        source = tensor.args[0]
        assert isinstance(source, Node)
        tensor = source
    if tensor.op != "call_function" or not isinstance(tensor.target, torch._ops.OpOverload):
        return False
    return tensor.target in _ALSO_POINTWISE or torch.Tag.pointwise in tensor.target.tags


def amax_by_rows(x: torch.Tensor) -> torch.Tensor:
    """max|x| in fp32, shape [1], rows first: the row maxima fuse with a kernel that works by rows. NaN propagates, no rows give 0."""
    if guard_or_false(x.numel() == 0):
        return torch.zeros(1, dtype=torch.float32, device=x.device)
    return x.abs().amax(-1).amax().to(torch.float32).reshape(1)
