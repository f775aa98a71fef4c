"""The GEMM of gate and up that knows the amax of silu(gate) * up."""

import torch

from te_dynamo.dialect.define import te_op
from te_dynamo.dialect.fakes import plain
from te_dynamo.kernels.gemm import swiglu as kernels
from te_dynamo.kernels.quantize.current import PARTIALS

__all__ = ["gemm_swiglu"]


@te_op(reference=kernels.gemm_swiglu_reference, kernel=kernels.gemm_swiglu)
def gemm_swiglu(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    fast_accum: bool,
    gate: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, partial amaxes, fp32 [PARTIALS], of te.swiglu of y's halves): y = te.gemm_stacked along "N" of two halves, in bf16.

    gate: which half is the gate's, 0 or 1.
    """
    return plain((a.shape[0], b.shape[0]), torch.bfloat16, a), plain((PARTIALS,), torch.float32, a)
