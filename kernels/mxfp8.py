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

from te_dynamo.kernels._triton import tl, triton
from te_dynamo.kernels.fp8 import abs_bits, cast_launches, load_tile, round_up_16, rows_and_columns, store_tile
from te_dynamo.kernels.launch import launch, multiprocessor_count
from te_dynamo.kernels.tile128 import (
    column_amax_bits,
    in_row_order,
    load_four_rows,
    row_amax_bits,
    store_every_fourth_row,
    store_transposed,
)

__all__ = [
    "SCALE_BLOCKS",
    "quantize_mxfp8",
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


# --- kernels ------------------------------------------------------------------------------------------------


@triton.jit
def code_and_multiplier(amax_bits, FMAX: tl.constexpr):
    """Of blocks whose amaxes have these bit patterns, the code (int32) and 2^(127 - code), as in the reference."""
    INVERSE: tl.constexpr = 1.0 / FMAX
    bits = (amax_bits.to(tl.float32, bitcast=True) * INVERSE).to(tl.int32, bitcast=True)
    # As unsigned, 255 comes from infinity and 256 from NaN: one more than the codes.
    code = ((bits.to(tl.uint32, bitcast=True) + 0x7FFFFF) >> 23).to(tl.int32)
    beyond = code > 254
    code = tl.where(bits <= 0x00400000, 0, tl.where(beyond, code - 1, code))
    # The bit makes 2^-127 of the zero that code 254 gives, and NaN of the infinity that code 255 gives.
    multiplier = ((254 - code) << 23) | tl.where(beyond, 0x00400000, 0)
    return code, multiplier.to(tl.float32, bitcast=True)


@triton.jit
def scale_offsets(i, j, PER_ROW, SWIZZLED: tl.constexpr):
    """Where code (i, j) of rowwise scales lies, PER_ROW codes a row (swizzled: `swizzle_scales`)."""
    if SWIZZLED:
        return ((i // 128) * (PER_ROW // 4) + j // 4) * 512 + (i % 32) * 16 + (i % 128) // 32 * 4 + j % 4
    return i * PER_ROW + j


@triton.jit
def columnwise_scale_offsets(i, j, M, K, SWIZZLED: tl.constexpr):
    """Where the code of block j of column i lies in the columnwise scales of blocks of 32 of a [M, K] tensor."""
    if SWIZZLED:
        return scale_offsets(i, j, tl.cdiv(M, 128) * 4, SWIZZLED)
    return j * (tl.cdiv(K, 128) * 128) + i


@triton.jit
def quantize_mxfp8_kernel(
    x,
    data,
    scale_inv,
    columnwise_data,
    columnwise_scale_inv,
    M,
    K,
    FMAX: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    SWIZZLED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Blocks of 32. Every tile of x, read once: codes and data of its blocks along rows, along columns or both.

    Tiles cover [M^128, K^128]: what lies outside x reads as zero and has code 0, which is how scales are padded.
    """
    BLOCKS_M: tl.constexpr = BLOCK_M // 32
    BLOCKS_K: tl.constexpr = BLOCK_K // 32
    tiles_k = tl.cdiv(K, 128) * (128 // BLOCK_K)
    tiles_m = tl.cdiv(M, 128) * (128 // BLOCK_M)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_k, tl.num_programs(0), num_stages=1):
        row = tile // tiles_k * BLOCK_M
        column = tile % tiles_k * BLOCK_K
        value = load_tile(x, row, column, K, M, K, BLOCK_M, BLOCK_K)
        bits = abs_bits(value)
        rows = row + tl.arange(0, BLOCK_M)[:, None]
        columns = column + tl.arange(0, BLOCK_K)[None, :]
        if ROWWISE:
            amax = tl.max(tl.reshape(bits, (BLOCK_M, BLOCKS_K, 32)), axis=2)
            code, multiplier = code_and_multiplier(amax, FMAX)
            scaled = tl.reshape(value, (BLOCK_M, BLOCKS_K, 32)) * multiplier[:, :, None]
            # The conversion saturates by itself.
            quantized = tl.reshape(scaled, (BLOCK_M, BLOCK_K)).to(data.dtype.element_ty)
            store_tile(data, quantized, row, column, M, K, BLOCK_M, BLOCK_K)
            blocks = column // 32 + tl.arange(0, BLOCKS_K)[None, :]
            tl.store(scale_inv + scale_offsets(rows, blocks, tl.cdiv(K, 128) * 4, SWIZZLED), code.to(tl.uint8))
        if COLUMNWISE:
            amax = tl.max(tl.reshape(bits, (BLOCKS_M, 32, BLOCK_K)), axis=1)
            code, multiplier = code_and_multiplier(amax, FMAX)
            scaled = tl.reshape(value, (BLOCKS_M, 32, BLOCK_K)) * multiplier[:, None, :]
            quantized = tl.reshape(scaled, (BLOCK_M, BLOCK_K)).to(columnwise_data.dtype.element_ty)
            store_tile(columnwise_data, quantized, row, column, M, K, BLOCK_M, BLOCK_K)
            blocks = row // 32 + tl.arange(0, BLOCKS_M)[:, None]
            offsets = columnwise_scale_offsets(columns, blocks, M, K, SWIZZLED)
            tl.store(columnwise_scale_inv + offsets, code.to(tl.uint8))


@triton.jit
def store_repeated_codes(scale_inv, code, first_i, first_j, BLOCKS, SWIZZLED: tl.constexpr):
    """Writes the codes [128] of blocks of 128 four times each, as words: zero past the last of BLOCKS blocks of 32."""
    i = first_i + tl.arange(0, 128)
    offsets = scale_offsets(i, first_j, tl.cdiv(BLOCKS, 4) * 4, SWIZZLED)
    missing = tl.maximum(first_j + 4 - BLOCKS, 0)
    words = code * (0x01010101 >> (missing * 8))
    tl.store(scale_inv.to(tl.pointer_type(tl.int32), bitcast=True) + offsets // 4, words)


@triton.jit
def quantize_every_fourth_row(value, data, row, column, M, K, FMAX: tl.constexpr):
    """Writes every fourth row of a tile from `row` on; returns the codes [32]."""
    code, multiplier = code_and_multiplier(row_amax_bits(value), FMAX)
    store_every_fourth_row(data, (value.to(tl.float32) * multiplier[:, None]).to(data.dtype.element_ty), row, column, M, K)
    return code


@triton.jit
def quantize_mxfp8_128_kernel(
    x,
    data,
    scale_inv,
    columnwise_data,
    columnwise_scale_inv,
    M,
    K,
    FMAX: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    SWIZZLED: tl.constexpr,
):
    """Blocks of 128: the same for tiles of 128 x 128, with columnwise data transposed."""
    tiles_k = tl.cdiv(K, 128)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, 128) * tiles_k, tl.num_programs(0), num_stages=1):
        row = tile // tiles_k * 128
        column = tile % tiles_k * 128
        value_0, value_1, value_2, value_3 = load_four_rows(x, row, column, M, K)
        if ROWWISE:
            code_0 = quantize_every_fourth_row(value_0, data, row, column, M, K, FMAX)
            code_1 = quantize_every_fourth_row(value_1, data, row + 1, column, M, K, FMAX)
            code_2 = quantize_every_fourth_row(value_2, data, row + 2, column, M, K, FMAX)
            code_3 = quantize_every_fourth_row(value_3, data, row + 3, column, M, K, FMAX)
            code = in_row_order(code_0, code_1, code_2, code_3)
            store_repeated_codes(scale_inv, code, row, column // 32, tl.cdiv(K, 32), SWIZZLED)
        if COLUMNWISE:
            code, multiplier = code_and_multiplier(column_amax_bits(value_0, value_1, value_2, value_3), FMAX)
            multiplier = multiplier[None, :]
            DTYPE: tl.constexpr = columnwise_data.dtype.element_ty
            store_transposed(
                columnwise_data,
                (value_0.to(tl.float32) * multiplier).to(DTYPE),
                (value_1.to(tl.float32) * multiplier).to(DTYPE),
                (value_2.to(tl.float32) * multiplier).to(DTYPE),
                (value_3.to(tl.float32) * multiplier).to(DTYPE),
                row,
                column,
                M,
                K,
            )
            store_repeated_codes(columnwise_scale_inv, code, column, row // 32, tl.cdiv(M, 32), SWIZZLED)


# --- launchers ----------------------------------------------------------------------------------------------


def quantize_mxfp8(
    x: torch.Tensor,
    fp8_dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    scale_block: int,
    swizzled: bool = False,
    tile: Tile | None = None,
) -> list[torch.Tensor]:
    """[data, scale_inv] if rowwise, and [columnwise_data, columnwise_scale_inv] if columnwise, of x on a CUDA device.

    x: bfloat16, float16 or float32 of any rank >= 1, read as [M, K]; M may be symbolic. Buffers: the module's table.
    swizzled: scales as tensor cores read them (`swizzle_scales`), the columnwise ones of blocks of 32 as (K^128, ceil(M/32)^4).
    `tile` overrides the choice for blocks of 32; its sides divide 128. Raises ValueError for another scale_block.
    """
    check_scale_block(scale_block)
    x = x.contiguous()
    rows, columns = rows_and_columns(x)
    m128, m4, k128, k4 = _up(rows, 128), _up(rows, 128) // 32, _up(columns, 128), _up(columns, 128) // 32
    transposed = scale_block == 128
    shapes = []
    if rowwise:
        shapes += [(rows, columns), (m128, k4)]
    if columnwise:
        shapes += [(columns, round_up_16(rows)) if transposed else (rows, columns)]
        shapes += [(k128, m4) if transposed or swizzled else (m4, k128)]
    dtypes = (fp8_dtype, torch.uint8) * 2
    buffers = [torch.empty(shape, dtype=dtype, device=x.device) for shape, dtype in zip(shapes, dtypes, strict=False)]
    usages = cast_launches(rowwise, columnwise, x.element_size()) if transposed else [(rowwise, columnwise)]
    block_m, block_k, warps = TILE_128 if transposed else tile or (TILE_BOTH if columnwise else TILE_ROWWISE)
    sides = {} if transposed else {"BLOCK_M": block_m, "BLOCK_K": block_k}
    most = PROGRAM_WARPS // warps * multiprocessor_count(x.device)
    tiles = m128 // block_m * (k128 // block_k)
    for by_rows, by_columns in usages:
        launch(
            quantize_mxfp8_128_kernel if transposed else quantize_mxfp8_kernel,
            (min(max(tiles, 1), most) if isinstance(tiles, int) else most,),
            x=x,
            data=buffers[0] if rowwise else x,
            scale_inv=buffers[1] if rowwise else x,
            columnwise_data=buffers[-2] if columnwise else x,
            columnwise_scale_inv=buffers[-1] if columnwise else x,
            M=rows,
            K=columns,
            FMAX=torch.finfo(fp8_dtype).max,
            ROWWISE=by_rows,
            COLUMNWISE=by_columns,
            SWIZZLED=swizzled,
            **sides,
            num_warps=warps,
        )
    return buffers
