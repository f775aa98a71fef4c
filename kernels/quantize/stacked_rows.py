"""Two or three tensors -> float8 with one scale a row, in the buffers of one tensor whose rows are theirs, one below the other.

    rows      data [sum of M_i, K], scale_inv [sum of M_i]                        of x_i [M_i, K]
    columns   transpose [sum of K_i, M^16], columnwise_scale_inv [sum of K_i]     of x_i [M, K_i], whose columns these rows are

The bits of `quantize_rowwise` of each. What would lie side by side in a row has a scale a tensor, and no buffer holds it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from te_dynamo.kernels.layouts.row import RowForm
from te_dynamo.kernels.layouts.sizes import Size, rows_and_columns
from te_dynamo.kernels.quantize.current import concatenated, stacked_size
from te_dynamo.kernels.quantize.float8_rowwise import columns_tile, quantize_rows, quantize_rowwise_reference, rows_tile
from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.runtime.launch import launch
from te_dynamo.kernels.runtime.writes import writes
from te_dynamo.kernels.tiles.stacking import MOST_SEGMENTS


def quantize_stacked_rows_reference(xs: Sequence[torch.Tensor], form: RowForm, by_columns: bool) -> list[torch.Tensor]:
    """`quantize_stacked_rows` in plain PyTorch, on any device."""
    stacked_rows_size(xs, form.rowwise, form.columnwise, by_columns)
    each = [quantize_rowwise_reference(x, form) for x in xs]
    return [concatenated(parts, 0) for parts in zip(*each, strict=True)]


def quantize_stacked_rows(xs: Sequence[torch.Tensor], form: RowForm, by_columns: bool) -> list[torch.Tensor]:
    """[data, scale_inv] of the rows of a stack by rows, or [transpose, columnwise_scale_inv] of the columns of one by columns.

    xs: of any rank >= 1, read as matrices; the stacked sides are two or three multiples of 128. Raises ValueError for others.
    """
    shape = stacked_rows_size(xs, form.rowwise, form.columnwise, by_columns)
    xs = [x.contiguous() for x in xs]
    sides = [rows_and_columns(x.shape)[by_columns] for x in xs]
    data, scale_inv = form.allocate(shape, xs[0].device).values()
    block_m, block_k, warps = columns_tile(max(sides)) if by_columns else rows_tile(shape[1])
    missing = MOST_SEGMENTS - len(xs)
    launch(
        quantize_stacked_rows_kernel,
        (triton.cdiv(max(sides), block_m), len(xs)),
        *(*xs, *missing * xs[:1], data, scale_inv, *sides, *missing * [0], shape[not by_columns]),
        **form.constants(),
        **{"TURNED": by_columns, "BLOCK_M": block_m, "BLOCK_K": block_k},
        num_warps=warps,
    )
    return [data, scale_inv]


def stacked_rows_size(
    xs: Sequence[torch.Tensor], rowwise: bool, columnwise: bool, by_columns: bool
) -> tuple[Size, Size]:
    """(M, K) of the stack. Raises ValueError for tensors that do not stack, and for usages that it has no buffers for."""
    if (rowwise, columnwise) != (not by_columns, by_columns):
        raise ValueError(
            "te quantize_stacked: with a scale a row, expected the rows of a stack by rows, or the columns of one by columns"
        )
    return stacked_size(xs, by_columns)


@writes("data", "scale_inv")
@triton.jit
def quantize_stacked_rows_kernel(
    x0,
    x1,
    x2,
    data,
    scale_inv,
    SIDE_0,
    SIDE_1,
    SIDE_2,
    other,
    FMAX: tl.constexpr,
    EPS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    TURNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """`quantize_rows_kernel` of each x_i, to its place in the stack: SIDE_i are its rows, `other` is what all have in common."""
    slot = tl.program_id(1)
    x = tl.where(slot == 0, x0, tl.where(slot == 1, x1, x2))
    side = tl.where(slot == 0, SIDE_0, tl.where(slot == 1, SIDE_1, SIDE_2))
    first = tl.where(slot == 0, 0, tl.where(slot == 1, SIDE_0, SIDE_0 + SIDE_1))
    width = (other + 15) // 16 * 16 if TURNED else other
    M = other if TURNED else side
    K = side if TURNED else other
    quantize_rows(
        *(x, data + tl.cast(first, tl.int64) * width, scale_inv + first, M, K),
        *(FMAX, EPS, POWER_OF_TWO, TURNED, BLOCK_M, BLOCK_K),
    )
