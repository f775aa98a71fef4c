"""The product of gate and up that finds the amax of f(gate) * up while it multiplies.

C = A @ B^T of two segments of one width along N: gate | up, or up | gate, in bf16
amax = max |f(gate) * up| of C's values, the product rounded to bf16 as kernels/activation/gated.py rounds it
"""

from __future__ import annotations

import torch

from te_dynamo.kernels.activation.gated import BOUNDED_KINDS, check_kind
from te_dynamo.kernels.gemm.request import Request


def check_gated(r: Request, gate: int, kind: str) -> None:
    """Raises ValueError for scales, a b, a gate (0 or 1: its half of b) or a kind (f) that is not meant."""
    check_kind(kind, BOUNDED_KINDS)
    if r.scaling != "tensor":
        raise ValueError(f"te gemm_gated: expected operands with one scale a tensor, got scales of {r.scaling}")
    if gate not in (0, 1):
        raise ValueError(f"te gemm_gated: gate must be the gate's half of b, 0 or 1, got {gate}")
    rows = r.b.codes.shape[0]
    if rows % 2:
        raise ValueError(f"te gemm_gated: expected b of two halves, got {rows} rows")


def halves(c: torch.Tensor, gate: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(gate, up) of C."""
    left, right = c[:, : c.shape[1] // 2], c[:, c.shape[1] // 2 :]
    return (left, right) if gate == 0 else (right, left)
