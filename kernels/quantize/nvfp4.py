"""x -> NVFP4: e2m1 elements, one e4m3 scale for 16 of them, one fp32 amax a tensor.

    S     = min(2688 / amax, largest fp32), 1 where amax is 0 or inf           amax = max|x|
    scale = e4m3(min(block_amax * (S * (1/6)), 448))
    enc   = min(1 / (scale * (1/S)), largest fp32), 0 where amax is NaN
    q     = e2m1(clamp(x * enc, -6, 6))            x ~ q * scale * amax / 2688

All arithmetic is fp32, every operation rounded on its own. A block is 16 consecutive elements of a row (rowwise) or
of a column (columnwise), or 16x16 with `two_d`, whose scales rows and columns share. Tensors are read as [M, K].

| buffer | shape | holds |
| --- | --- | --- |
| data | [M, K^32/2] uint8 | codes of x, the element of the even column in the low four bits: rows of whole 16 bytes |
| scale_inv | [M^128, ceil(K/16)^4] uint8, or swizzled (kernels/layouts/tiled_scales.py) | the bits of the e4m3 scales |
| amax | [1] fp32 | |
| columnwise_data, columnwise_scale_inv, columnwise_amax | the same with M and K exchanged | of x^T |

^n is rounded up to a multiple of n; what is past M, K or their blocks is zero.

Rounding is to the nearest, ties to the even code; -0 keeps its sign. A NaN in x makes amax and every scale NaN, so
that the whole tensor reads back as NaN, and so does what is multiplied by it; every code is then 0.

`hadamard`: x^T is first multiplied from the right, 16 columns at a time, by diag(HADAMARD_SIGNS) H16 / 4, H16 being
Sylvester's matrix. That matrix is orthogonal, so the product of two tensors that are both transformed along the
contracted dimension needs no inverse. columnwise_amax is then that of the transformed tensor, and where M is no
multiple of 16 the last block, zero past M before the transform, keeps all of its 16 outputs.

`stochastic_rounding`: q is one of v's two neighbours, the upper in magnitude with probability t rounded to a multiple of 2^-9, t the
distance from the lower in steps and v = |x| * enc: v 2^-14 is rounded to fp16, whose exponents are then those of e2m1 with
nine bits below each code, and nine random bits are added, 6 being the most that comes of it. (The instruction of sm_100 and sm_103,
`cvt.rs`, takes 32 random bits for four elements: eight each can not give these numbers.)

`random`, int32 [2], is the key of a hash of each block's number in the data, from which its elements take their
bits (`random_bits`); columns take the key with its words exchanged. Nothing else is read, and the same key gives the
same bits on every device.
"""

from __future__ import annotations

import torch

from te_dynamo.kernels.layouts import nvfp4
from te_dynamo.kernels.layouts.nvfp4 import BLOCK, HADAMARD_SIGNS, NVFP4Form
from te_dynamo.kernels.layouts.sizes import Size, blocks_of, round_up, rows_and_columns
from te_dynamo.kernels.layouts.tiled_scales import plain_scales, swizzle_scales
from te_dynamo.kernels.quantize.current import PARTIALS, Tile, partial_amaxes
from te_dynamo.kernels.quantize.nvfp4_kernels import (
    HIGH_ROTATIONS,
    LOW_ROTATIONS,
    dequantize_nvfp4_kernel,
    hadamard_amax_kernel,
    quantize_nvfp4_kernel,
)
from te_dynamo.kernels.runtime._triton import triton
from te_dynamo.kernels.runtime.launch import launch
from te_dynamo.kernels.runtime.target import target_of
from te_dynamo.kernels.tiles.fp8 import program_count, zero_padded

TENSOR_MAX = 2688.0
"""Largest scale (448) times largest element (6): what amax becomes."""

TILE: Tile = (64, 64, 8)
"""(rows, columns, warps) of a program: codes fill whole sectors by rows and by columns, and no register is spilled."""

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

_FLOAT32_MAX = torch.finfo(torch.float32).max


# --- reference: quantize ------------------------------------------------------------------------------------


def quantize_nvfp4_reference(
    x: torch.Tensor, form: NVFP4Form, random: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """[data, scale_inv, amax] if rowwise, then [columnwise_data, columnwise_scale_inv, columnwise_amax] if columnwise.

    x: any rank >= 1, bf16, fp16 or fp32, on any device. random: see the module; read if rounding is stochastic, ValueError without it.
    """
    check_random(form, random)
    rows, columns = rows_and_columns(x.shape)
    matrix = x.reshape(rows, columns).to(torch.float32)
    key = random if form.stochastic_rounding else None
    buffers = []
    if form.rowwise:
        buffers += quantize_rows(matrix, form.two_d, key)
    if form.columnwise:
        turned = hadamard_reference(matrix.t()) if form.hadamard else matrix.t()
        buffers += quantize_rows(turned, form.two_d, None if key is None else key.flip(0))
    if form.swizzled:
        buffers[1::3] = map(swizzle_scales, buffers[1::3])
    return buffers


def check_random(form: NVFP4Form, random: torch.Tensor | None) -> None:
    """Raises ValueError for stochastic rounding without its key."""
    if form.stochastic_rounding and (random is None or random.dtype != torch.int32 or tuple(random.shape) != (2,)):
        raise ValueError(
            "te nvfp4: stochastic rounding takes `random`, int32 [2] (te_dynamo.quantized.quantize.random_key)"
        )


def quantize_rows(matrix: torch.Tensor, two_d: bool, key: torch.Tensor | None) -> list[torch.Tensor]:
    """The three buffers of a float32 matrix [R, C], rounded stochastically if there is a key."""
    rows, width = matrix.shape
    amax = matrix.abs().amax().reshape(1) if matrix.numel() else matrix.new_zeros(1)
    amax = amax.masked_fill(amax.isnan(), torch.nan)  # one NaN of all
    scale_s = (torch.full_like(amax, TENSOR_MAX) / amax).clamp(max=_FLOAT32_MAX)
    scale_s = torch.where((amax == 0) | (amax == torch.inf), torch.ones_like(amax), scale_s)
    height, blocks_wide = BLOCK if two_d else 1, blocks_of(width, BLOCK)
    blocks = zero_padded(matrix, round_up(rows, height), blocks_wide * BLOCK)
    blocks = blocks.reshape(blocks.shape[0] // height, height, blocks_wide, BLOCK)
    block_amax = blocks.abs().amax(dim=(1, 3), keepdim=True)
    scale = (block_amax * (scale_s * torch.full_like(scale_s, 1 / 6))).clamp(max=448.0)
    scale = scale.masked_fill(scale.isnan(), torch.nan).to(torch.float8_e4m3fn)  # one NaN: a CPU would keep its sign
    enc = torch.ones_like(scale_s) / (scale.to(torch.float32) * (torch.ones_like(scale_s) / scale_s))
    enc = enc.nan_to_num(nan=0.0, posinf=_FLOAT32_MAX)
    blocks = torch.where(amax.isnan(), torch.zeros_like(blocks), blocks)
    if key is None:
        code = nearest_codes(blocks * enc)
    else:
        bits = random_bits(key, len(blocks) * height, blocks_wide)
        code = stochastic_codes(blocks * enc, bits.reshape(blocks.shape))
    code = code | (blocks.signbit().to(torch.uint8) << 3)
    code = code.flatten(2).flatten(0, 1)[:rows]
    data = zero_padded(code[:, 0::2] | (code[:, 1::2] << 4), *nvfp4.data_shape(rows, width))
    scale = scale.view(torch.uint8).expand(-1, height, -1, 1).flatten(2).flatten(0, 1)[:rows]
    return [data, zero_padded(scale, *nvfp4.scale_shape(rows, width)), amax]


def nearest_codes(value: torch.Tensor) -> torch.Tensor:
    """The codes, uint8 and without their signs, of fp32 values.

    Below 2 the codes count halves, then ones, then twos: 0 to 7 is 0, .5, 1, 1.5, 2, 3, 4, 6.
    """
    magnitude = value.abs().clamp(max=6.0)
    low, middle = magnitude < 2, magnitude < 4
    steps = torch.where(low, magnitude * 2, torch.where(middle, magnitude, magnitude * 0.5))  # exact
    offset = torch.where(low, 0.0, torch.where(middle, 2.0, 4.0))
    return (steps.round() + offset).to(torch.uint8)  # half to even, and the offsets are even


def stochastic_codes(value: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """The codes, uint8 and without their signs, of fp32 values rounded by nine bits (int32) each.

    Times 2^-14 fp16 has the exponents of e2m1, with nine bits below each code.
    """
    steps = (value.abs() * 2.0**-14).to(torch.float16).view(torch.int16).to(torch.int32)
    return ((steps + bits).clamp(max=0xFFF) >> 9).to(torch.uint8)


def random_bits(key: torch.Tensor, rows: int, blocks_wide: int) -> torch.Tensor:
    """Nine random bits, int32 [rows, 16 blocks_wide], for each element of data [rows, 8 blocks_wide].

    Those of a block are bits of the xor of its hash's two words (`block_hashes`), rotated to the left: elements 8 h + p and
    8 h + p + 4 have the low nine bits of the lower and of the upper half of low <<< LOW_ROTATIONS[p] ^ high <<< HIGH_ROTATIONS[h].
    """
    low, high = block_hashes(key, rows * blocks_wide)
    elements = []
    for second in HIGH_ROTATIONS:
        pairs = [rotated(low, first) ^ rotated(high, second) for first in LOW_ROTATIONS]
        elements += [pair & 0x1FF for pair in pairs] + [pair >> 16 & 0x1FF for pair in pairs]
    return torch.stack(elements, dim=-1).to(torch.int32).reshape(rows, blocks_wide * BLOCK)


def block_hashes(key: torch.Tensor, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """64 bits of each block, as the low and the high 32 in int64 [blocks].

    The block's number is hashed by a multiply-xorshift of good avalanche, the key's first word added before it, the second mixed in
    halfway; of the last product both halves are taken.
    """
    mask = 0xFFFFFFFF
    first, second = key.to(torch.int64) & mask
    h = torch.arange(blocks, device=key.device)
    h = (h * 0x9E3779B1 + first) & mask
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & mask
    h = (h ^ (h >> 15) ^ second) * 0x846CA68B  # 64 bits, whose highest is int64's sign
    return h & mask, h >> 32 & mask


def rotated(word: torch.Tensor, by: int) -> torch.Tensor:
    """32 bits in int64, rotated to the left."""
    return (word << by | word >> (32 - by)) & 0xFFFFFFFF


def hadamard_reference(matrix: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """matrix [R, C] in float32, 16 columns at a time times diag(signs) H16 / 4, or times its inverse: [R, C^16].

    Butterflies over neighbours that move the halves apart, four times: the order of the additions is part of the rule.
    """
    rows = matrix.shape[0]
    matrix = matrix.to(torch.float32)
    blocks = zero_padded(matrix, rows, round_up(matrix.shape[1], BLOCK)).unflatten(1, (-1, BLOCK))
    signs = torch.tensor(HADAMARD_SIGNS, dtype=torch.float32, device=matrix.device)
    if not inverse:
        blocks = blocks * signs
    for _ in range(4):
        even, odd = blocks[..., 0::2], blocks[..., 1::2]
        blocks = torch.cat([even + odd, even - odd], dim=-1)
    blocks = blocks * 0.25
    if inverse:
        blocks = blocks * signs
    return blocks.flatten(1)


# --- reference: dequantize, GEMM ----------------------------------------------------------------------------


def _e2m1_values(codes: torch.Tensor) -> torch.Tensor:
    """The fp32 values of int32 codes: a sign, two bits of exponent, one of mantissa. No table: te_dynamo.export traces it, constants it cannot."""
    exponent, mantissa = (codes >> 1) & 3, codes & 1
    normal = ((exponent + 126) << 23 | mantissa << 22).view(torch.float32)
    magnitude = torch.where(exponent == 0, mantissa * 0.5, normal)
    return torch.where(codes < 8, magnitude, -magnitude)


def dequantize_nvfp4_reference(
    data: torch.Tensor, scale_inv: torch.Tensor, amax: torch.Tensor | None, columns: int, dtype: torch.dtype
) -> torch.Tensor:
    """[R, columns] of `dtype` from one usage's buffers: (q * scale) * (amax / 2688), rounded once.

    data [R, C^32/2], scale_inv [R^128, ceil(C/16)^4] or swizzled, columns <= C^32. Without amax it is q * scale, which bfloat16
    holds exactly. What was transformed stays so: `hadamard_reference(..., inverse=True)` undoes it.
    """
    rows = data.shape[0]
    codes = torch.stack([data & 15, data >> 4], dim=-1).flatten(1).to(torch.int32)
    blocks = codes.shape[1] // BLOCK
    scale = plain_scales(scale_inv)[:rows, :blocks].view(torch.float8_e4m3fn).to(torch.float32)
    value = (_e2m1_values(codes).reshape(rows, blocks, BLOCK) * scale[:, :, None]).flatten(1)[:, :columns]
    if amax is not None:
        value = value * (amax / torch.full_like(amax, TENSOR_MAX))
    return value.to(dtype).contiguous()


# --- launchers ----------------------------------------------------------------------------------------------


def quantize_nvfp4(
    x: torch.Tensor, form: NVFP4Form, random: torch.Tensor | None = None, tile: Tile | None = None
) -> list[torch.Tensor]:
    """`quantize_nvfp4_reference` on a CUDA device, bit for bit: one launch for amax, one for everything else.

    x with 4-byte elements takes a launch for each usage. M may be symbolic. tile: rows and columns are divisors of 128, 16 or more.
    """
    check_random(form, random)
    x = x.contiguous()
    rows, columns = rows_and_columns(x.shape)
    buffers = form.allocate((rows, columns), x.device)
    block_m, block_k, warps = tile or TILE
    tiles = {"M": rows, "K": columns, "BLOCK_M": block_m, "BLOCK_K": block_k, "num_warps": warps}
    if form.columnwise and form.hadamard:
        partials = torch.empty(PARTIALS, dtype=torch.float32, device=x.device)
        columnwise_partials = torch.empty_like(partials)
        launch(
            hadamard_amax_kernel,
            (PARTIALS,),
            x=x,
            partials=partials,
            columnwise_partials=columnwise_partials,
            ROWWISE=form.rowwise,
            **tiles,
        )
    else:
        partials = columnwise_partials = partial_amaxes(x)
    for usage in form.launches(x.element_size()):
        launch(
            quantize_nvfp4_kernel,
            (program_count(rows, columns, block_m, block_k, x.device),),
            x=x,
            partials=partials,
            columnwise_partials=columnwise_partials,
            random=random if form.stochastic_rounding else x,
            **form.pointers(buffers, unused=x),
            **form.constants(),
            **usage,
            CASTS=target_of(x.device).has_e2m1_casts,
            PARTIALS=PARTIALS,
            **tiles,
        )
    return list(buffers.values())


def dequantize_nvfp4(
    data: torch.Tensor, scale_inv: torch.Tensor, amax: torch.Tensor | None, columns: Size, dtype: torch.dtype
) -> torch.Tensor:
    """`dequantize_nvfp4_reference` on a CUDA device, bit for bit."""
    rows, row_bytes = data.shape
    scale_inv = plain_scales(scale_inv)
    y = torch.empty(rows, columns, dtype=dtype, device=data.device)
    launch(
        dequantize_nvfp4_kernel,
        (triton.cdiv(rows, 16) * triton.cdiv(row_bytes, 128),),
        data=data,
        scale_inv=scale_inv,
        amax=scale_inv if amax is None else amax,
        y=y,
        R=rows,
        columns=columns,
        row_bytes=row_bytes,
        HAS_AMAX=amax is not None,
        BLOCK_R=16,
        BLOCK_B=128,
        num_warps=4,
    )
    return y
