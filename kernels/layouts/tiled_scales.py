"""Where the scales of blocks lie, those of a tensor [R, C] being R^128 rows of S^4, for S blocks a row (^n: rounded up, the padding zero).

    plain     [R^128, S^4]
    swizzled  [R^128 / 4, S^4, 4], the memory of [R^128 / 128, S^4 / 4, 32, 4, 4] with scale (i, j) at [i / 128, j / 4, i % 32, i % 128 / 32, j % 4]

Swizzled they lie as tensor cores read them that apply the scales of blocks themselves. (Source: cuBLAS, 1D block scaling factors layout.)
No dimension of either is ever 1: a symbolic one that could be would be asked whether it is.
"""

from __future__ import annotations

import torch

from te_dynamo.kernels.layouts.sizes import Size, round_up
from te_dynamo.kernels.runtime._triton import tl, triton


def scale_shape(rows: Size, blocks: Size, swizzled: bool) -> tuple[Size, ...]:
    """The shape of the scales of `blocks` blocks in each of `rows` rows."""
    if swizzled:
        return round_up(rows, 128) // 4, round_up(blocks, 4), 4
    return round_up(rows, 128), round_up(blocks, 4)


def swizzle_scales(scale_inv: torch.Tensor) -> torch.Tensor:
    """Plain scales swizzled; swizzled ones as they are."""
    if scale_inv.dim() == 3:
        return scale_inv
    rows, columns = scale_inv.shape
    tiles = scale_inv.reshape(rows // 128, 4, 32, columns // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).contiguous().view(rows // 4, columns, 4)


def plain_scales(scale_inv: torch.Tensor) -> torch.Tensor:
    """Swizzled scales in order; plain ones as they are."""
    if scale_inv.dim() == 2:
        return scale_inv
    rows, columns = 4 * scale_inv.shape[0], scale_inv.shape[1]
    tiles = scale_inv.reshape(rows // 128, columns // 4, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows, columns)


@triton.jit
def scale_offsets(i, j, PER_ROW, SWIZZLED: tl.constexpr):
    """Where scale (i, j) lies, PER_ROW scales a row."""
    if SWIZZLED:
        return (i // 128 * (PER_ROW // 4) + j // 4) * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4
    return i * PER_ROW + j
