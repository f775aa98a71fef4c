"""MXFP8: float8 data with one power of two for every block of 32 or 128 values, held as an 8-bit exponent (E8M0).

    e = E8M0(max|block| * (1 / fmax)), rounded up
    q = cast(clamp(x * 2^(127 - e), -fmax, fmax)),   x ~ q * 2^(e - 127)

Code 0 is 2^-127, also for a block of zeros; 254 is the largest, also for a block with an infinity; 255 is NaN, and makes
every element of its block NaN. (Rule: OCP Microscaling Formats v1.0, with the scale rounded up so that nothing saturates.)

Of x read as [M, K], n^m being n rounded up to a multiple of m, and every padding zero:

| usage | blocks | data | scale_inv, uint8 |
| --- | --- | --- | --- |
| rowwise, either block | 1 x block | [M, K] | (M^128, ceil(K/32)^4) |
| columnwise, blocks of 32 | 32 x 1 | [M, K] | (ceil(M/32)^4, K^128) |
| columnwise, blocks of 128 | 128 x 1 | [K, M^16], transposed | (K^128, ceil(M/32)^4): the rowwise form of x^T |

A block of 128 has its code four times, once for every 32 values, so that both are the same format to who reads it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from te_dynamo.kernels.fp8 import Size, round_up_16, rows_and_columns

__all__ = [
    "SCALE_BLOCKS",
    "dequantize_mxfp8_reference",
    "gemm_mxfp8_reference",
    "quantize_mxfp8_reference",
    "swizzle_scales",
]

SCALE_BLOCKS = (32, 128)


# --- reference ----------------------------------------------------------------------------------------------


def quantize_mxfp8_reference(
    x: torch.Tensor, fp8_dtype: torch.dtype, rowwise: bool, columnwise: bool, scale_block: int, swizzled: bool = False
) -> list[torch.Tensor]:
    """`quantize_mxfp8` in plain PyTorch, on any device."""
    check_scale_block(scale_block)
    rows, columns = rows_and_columns(x)
    matrix = x.reshape(rows, columns)
    buffers = list(_quantize_rows(matrix, fp8_dtype, scale_block)) if rowwise else []
    if columnwise:
        data, scale_inv = _quantize_rows(matrix.t(), fp8_dtype, scale_block)
        if scale_block == 32:
            buffers += [data.t().contiguous(), scale_inv if swizzled else scale_inv.t().contiguous()]
        else:
            buffers += [_pad(data, 1, 16), scale_inv]
    if swizzled:
        buffers[1::2] = [swizzle_scales(scale_inv) for scale_inv in buffers[1::2]]
    return buffers


def dequantize_mxfp8_reference(
    data: torch.Tensor, scale_inv: torch.Tensor, columnwise: bool, dtype: torch.dtype
) -> torch.Tensor:
    """`dequantize_mxfp8` in plain PyTorch, on any device."""
    if columnwise:
        return dequantize_mxfp8_reference(data.t(), scale_inv.t(), False, dtype).t().contiguous()
    rows, columns = data.shape
    codes = scale_inv[:rows].repeat_interleave(32, dim=1)[:, :columns].to(torch.int32)
    bits = torch.where(codes == 0, 0x00400000, codes << 23)  # 2^(code - 127); 2^-127 is a denormal
    bits = torch.where(codes == 255, 0x7FC00000, bits)
    return (data.to(torch.float32) * bits.view(torch.float32)).to(dtype)


def gemm_mxfp8_reference(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    a_columnwise: bool,
    b_columnwise: bool,
) -> torch.Tensor:
    """`gemm_mxfp8` in plain PyTorch on any device, products and sums in fp32."""
    value_a = dequantize_mxfp8_reference(a, a_scale_inv, a_columnwise, torch.float32)
    value_b = dequantize_mxfp8_reference(b, b_scale_inv, b_columnwise, torch.float32)
    value = (value_a.t() if a_columnwise else value_a) @ (value_b if b_columnwise else value_b.t())
    if bias is not None:
        value = value + bias.float()
    return value.to(out_dtype)


def swizzle_scales(scale_inv: torch.Tensor) -> torch.Tensor:
    """Rowwise scales [R, C] (R a multiple of 128, C of 4) in the order in which tensor cores read them, of the same shape.

    Code (i, j) goes to ((i / 128) * (C / 4) + j / 4) * 512 + (i % 32) * 16 + ((i % 128) / 32) * 4 + j % 4. Columnwise scales of
    blocks of 32 are swizzled as their transpose: give that. (Source: cuBLAS, 1D block scaling factors layout.)
    """
    rows, columns = scale_inv.shape
    tiles = scale_inv.reshape(rows // 128, 4, 32, columns // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows, columns)


def check_scale_block(scale_block: int) -> None:
    """Raises ValueError for a block size that the format does not have here."""
    if scale_block not in SCALE_BLOCKS:
        raise ValueError(f"te mxfp8: scale_block must be 32 or 128, got {scale_block}")


def _quantize_rows(x: torch.Tensor, fp8_dtype: torch.dtype, scale_block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Data [R, C] and codes (R^128, ceil(C/32)^4) of x [R, C] in blocks along its rows."""
    rows, columns = x.shape
    blocks = _pad(x.to(torch.float32), 1, scale_block).reshape(rows, -(-columns // scale_block), scale_block)
    codes = _codes(blocks.abs().amax(-1), fp8_dtype)
    bits = torch.where(codes == 254, 0x00400000, (254 - codes) << 23)  # 2^(127 - code); 2^-127 is a denormal
    bits = torch.where(codes == 255, 0x7FC00000, bits)
    value = (blocks * bits.view(torch.float32).unsqueeze(-1)).flatten(1)[:, :columns]
    fmax = torch.finfo(fp8_dtype).max
    value = value.clamp(-fmax, fmax)
    value = value.masked_fill_(value.isnan(), torch.nan)  # one NaN, as the hardware casts it: a CPU would keep its sign
    codes = codes.repeat_interleave(scale_block // 32, dim=1)[:, : -(-columns // 32)]
    return value.to(fp8_dtype), _pad(_pad(codes.to(torch.uint8), 0, 128), 1, 4)


def _codes(amax: torch.Tensor, fp8_dtype: torch.dtype) -> torch.Tensor:
    """E8M0 of amax * (1 / fmax), fp32, rounded up: int32. A code is the exponent field, plus one where anything follows it."""
    bits = (amax * (1.0 / torch.finfo(fp8_dtype).max)).view(torch.int32)
    rounded = ((bits + 0x7FFFFF) >> 23).clamp(max=254)
    rounded = torch.where(bits <= 0x00400000, 0, rounded)  # up to 2^-127, which is what code 0 means
    return torch.where(amax.isnan(), 255, rounded)


def _pad(x: torch.Tensor, dim: int, multiple: int) -> torch.Tensor:
    """x with zero bytes up to a multiple along a dimension of two."""
    missing = -x.shape[dim] % multiple
    if not missing:
        return x.contiguous()
    integer = x if x.element_size() > 1 else x.view(torch.uint8)
    return F.pad(integer, (0, missing) if dim else (0, 0, 0, missing)).view(x.dtype)
