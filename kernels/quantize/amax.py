"""The amax of a tensor in aten operations: amax = max|x|.

A tensor that Inductor itself writes (the residual gradient after a norm's backward, say) gets its amax so: Inductor fuses the row
maxima into the kernel that writes the tensor, and one pass over memory is saved. Any other tensor that is quantized here (a weight, a
GEMM's output) is read by the amax kernel of current.py.
"""

from __future__ import annotations

import torch
from torch.fx.experimental.symbolic_shapes import guard_or_false


def amax_by_rows(x: torch.Tensor) -> torch.Tensor:
    """max|x| in fp32, shape [1], rows first: the row maxima fuse with a kernel that works by rows. NaN propagates, no rows give 0."""
    if guard_or_false(x.numel() == 0):
        return torch.zeros(1, dtype=torch.float32, device=x.device)
    return x.abs().amax(-1).amax().to(torch.float32).reshape(1)
