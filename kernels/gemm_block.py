"""FP8 GEMM with one scale for every 128 products: Float8 block scaling, and MXFP8 whose codes repeat four times.

    C[M, N] = round(sum over blocks kb of 128 k: (A_kb @ B_kb^T) * (a_scale_kb * b_scale_kb) + bias[N])

A and B are float8_e4m3fn or float8_e5m2, both contiguous, the contracted dimension in memory order. Scales are
`scale_inv` in the rowwise layouts of kernels/float8_block.py, float32:

    1D (one scale a row and block):       [ceil(K/128), M^4], of row m at [kb, m]
    2D (one scale for 128 rows):          [ceil(M/128), ceil(K/128)^4]

or uint8 E8M0 codes in the rowwise layout of MXFP8, 1D only: [M^128, (K/32)^4], of row m at [m, 4 * kb]. Code c is
2^(c - 127), 255 is NaN. At most one of A and B is 2D, as in Transformer Engine.
"""

from __future__ import annotations

import torch

from te_dynamo.kernels.float8_block import BLOCK
from te_dynamo.kernels.gemm import check_operands

__all__ = ["gemm_block_reference"]


def gemm_block_reference(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    a_two_d: bool,
    b_two_d: bool,
) -> torch.Tensor:
    """`gemm_block` in plain PyTorch on any device, products and sums in fp32."""
    check_block_operands(a, a_scale_inv, b, b_scale_inv, bias, out_dtype, a_two_d, b_two_d)
    k = a.shape[1]
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float32, device=a.device)
    a_scales = _scales_reference(a_scale_inv, a.shape[0], k, a_two_d)
    b_scales = _scales_reference(b_scale_inv, b.shape[0], k, b_two_d)
    for block in range(-(-k // BLOCK)):
        columns = slice(block * BLOCK, (block + 1) * BLOCK)
        product = a[:, columns].float() @ b[:, columns].float().t()
        total += product * (a_scales[:, block, None] * b_scales[None, :, block])
    if bias is not None:
        total = total + bias.float()
    return total.to(out_dtype)


def _scales_reference(scale_inv: torch.Tensor, rows: int, k: int, two_d: bool) -> torch.Tensor:
    """The scale of every row and block of 128, fp32 [rows, ceil(K/128)], from any of the layouts."""
    blocks = -(-k // BLOCK)
    if scale_inv.dtype == torch.uint8:
        codes = scale_inv[:rows, : 4 * blocks : 4].to(torch.int32)
        # 2^-127 is subnormal: its exponent field is 0 and its highest mantissa bit set.
        bits = torch.where(codes == 0, 0x00400000, codes << 23)
        return torch.where(codes == 255, 0x7FC00000, bits).view(torch.float32)
    if two_d:
        return scale_inv[:, :blocks].repeat_interleave(BLOCK, dim=0)[:rows]
    return scale_inv[:, :rows].t()


def check_block_operands(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    a_two_d: bool,
    b_two_d: bool,
) -> None:
    """Raises ValueError, saying what is wrong, for operands that the GEMM does not take."""
    check_operands(a, b, bias, out_dtype)
    if a_two_d and b_two_d:
        raise ValueError(
            f"te gemm_block: 128x128 x 128x128 blocks are not supported, for a {tuple(a.shape)} and b "
            f"{tuple(b.shape)}; quantize one operand in blocks of 1x128"
        )
    if a_scale_inv.dtype != b_scale_inv.dtype or a_scale_inv.dtype not in (torch.float32, torch.uint8):
        raise ValueError(
            "te gemm_block: scales must both be float32 or both be uint8 (E8M0), got "
            f"{a_scale_inv.dtype} and {b_scale_inv.dtype}"
        )
    for name, operand, scale_inv, two_d in (("a", a, a_scale_inv, a_two_d), ("b", b, b_scale_inv, b_two_d)):
        _check_scale(name, operand, scale_inv, two_d)


def _check_scale(name: str, operand: torch.Tensor, scale_inv: torch.Tensor, two_d: bool) -> None:
    if scale_inv.dtype == torch.uint8 and two_d:
        raise ValueError(f"te gemm_block: {name} has E8M0 scales, which are 1D, and {name}_two_d is set")
    if not scale_inv.is_contiguous():
        raise ValueError(f"te gemm_block: {name}_scale_inv must be contiguous")
    rows, k = operand.shape
    if not (isinstance(rows, int) and isinstance(k, int)):
        return  # a guard on a symbolic size would specialize the graph
    expected = scale_shape(rows, k, two_d, scale_inv.dtype)
    if tuple(scale_inv.shape) != expected:
        kind = "E8M0" if scale_inv.dtype == torch.uint8 else "128x128" if two_d else "1x128"
        raise ValueError(
            f"te gemm_block: expected {name}_scale_inv {list(expected)} for {name} {list(operand.shape)} in {kind} "
            f"blocks, got {list(scale_inv.shape)}"
        )


def scale_shape(rows: int, k: int, two_d: bool, dtype: torch.dtype) -> tuple[int, int]:
    """The shape of the scales of an operand [rows, k] (module docstring)."""
    blocks = -(-k // BLOCK)
    if dtype == torch.uint8:
        return -(-rows // 128) * 128, blocks * 4
    if two_d:
        return -(-rows // BLOCK), -(-blocks // 4) * 4
    return blocks, -(-rows // 4) * 4
