"""x -> float8 with one scale a row, of several matrices at once: for products by groups (kernels/gemm/grouped_product.py), and of linears that
share a GEMM.

    quantize_grouped_rows       weights [G, N, K]: data [G, N, K], scale_inv [G, N], transpose [G, K, N^16], columnwise_scale_inv [G, K]
    quantize_columns_of_groups  tokens [M, K] of groups that end at offs: transpose [K, M^16], columnwise_scale_inv [G, K]
    quantize_stacked_rows       two or three tensors in the buffers of one, whose rows are theirs, one below the other:
        rows                    data [sum of M_i, K], scale_inv [sum of M_i]                        of x_i [M_i, K]
        columns                 transpose [sum of K_i, M^16], columnwise_scale_inv [sum of K_i]     of x_i [M, K_i], whose columns these rows are

Each matrix, and each group of tokens, has the bits of `quantize_rowwise` of it alone. Tokens stay in their order; behind the last group is zero.
What would lie side by side in a row of a stack has a scale a tensor, and no buffer holds it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from te_dynamo.kernels.layouts.row import GroupColumnsForm, GroupedRowForm, RowForm
from te_dynamo.kernels.layouts.sizes import Size, rows_and_columns, transposed
from te_dynamo.kernels.quantize.current import concatenated, stacked_size
from te_dynamo.kernels.quantize.float8_rowwise import (
    columns_tile,
    launch_rows,
    quantize_rows,
    quantize_rows_kernel,
    quantize_rowwise_reference,
    rows_reference,
    rows_tile,
)
from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.runtime.launch import launch
from te_dynamo.kernels.runtime.writes import writes
from te_dynamo.kernels.tiles.fp8 import FLOAT32_MAX, abs_bits, saturating_cast, scale_from_amax
from te_dynamo.kernels.tiles.groups import clamped, group_bounds
from te_dynamo.kernels.tiles.stacking import MOST_SEGMENTS

# --- reference ----------------------------------------------------------------------------------------------


def quantize_grouped_rows_reference(x: torch.Tensor, form: GroupedRowForm) -> list[torch.Tensor]:
    """`quantize_grouped_rows` in plain PyTorch, on any device."""
    each = [quantize_rowwise_reference(matrix, form) for matrix in x]
    return [concatenated(parts, 0).view(len(x), *parts[0].shape) for parts in zip(*each, strict=True)]


def quantize_columns_of_groups_reference(x: torch.Tensor, offs: torch.Tensor, form: RowForm) -> list[torch.Tensor]:
    """`quantize_columns_of_groups` in plain PyTorch, on any device."""
    codes = torch.zeros(transposed(*x.shape), dtype=torch.uint8, device=x.device)
    scales = []
    for start, end in group_bounds(offs, x.shape[0]):
        data, scale_inv = rows_reference(x[start:end].t(), form)
        codes[:, start:end] = data.view(torch.uint8)
        scales.append(scale_inv)
    return [codes.view(form.dtype), torch.stack(scales)]


def quantize_stacked_rows_reference(xs: Sequence[torch.Tensor], form: RowForm, by_columns: bool) -> list[torch.Tensor]:
    """`quantize_stacked_rows` in plain PyTorch, on any device."""
    stacked_rows_size(xs, form.rowwise, form.columnwise, by_columns)
    each = [quantize_rowwise_reference(x, form) for x in xs]
    return [concatenated(parts, 0) for parts in zip(*each, strict=True)]


# --- kernels ------------------------------------------------------------------------------------------------


@writes("data", "scale_inv")
@triton.jit
def quantize_columns_of_groups_kernel(
    x,
    offs,
    data,
    scale_inv,
    M,
    K,
    G,
    FMAX: tl.constexpr,
    EPS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_M rows of x^T, those of one group in its own scales: data [K, M^16], scale_inv [G, K]. Behind the last group, G + 1 of them, zeros."""
    row, group = tl.program_id(0) * BLOCK_M, tl.program_id(1)
    width = (M + 15) // 16 * 16
    start = clamped(tl.load(offs + group - 1, mask=group > 0, other=0), M)
    end = tl.maximum(
        clamped(tl.load(offs + group, mask=group < G, other=0), M), start
    )  # of the last one nothing is read
    rows = row + tl.arange(0, BLOCK_M)
    bits = tl.zeros((BLOCK_M, BLOCK_K), tl.int32)
    for column in range(start, end, BLOCK_K):
        bits = tl.maximum(bits, abs_bits(_load(x, rows, column, end, K, BLOCK_K)))
    scale = scale_from_amax(tl.max(bits, axis=1).to(tl.float32, bitcast=True), FMAX, EPS, POWER_OF_TWO, FLOAT32_MAX)
    inverse = tl.div_rn(tl.full((BLOCK_M,), 1.0, tl.float32), scale)
    tl.store(scale_inv + group.to(tl.int64) * K + rows, inverse, mask=(rows < K) & (group < G))
    stored = tl.where(group < G, end, width)
    for column in range(start, stored, BLOCK_K):
        columns = column + tl.arange(0, BLOCK_K)
        value = _load(x, rows, column, end, K, BLOCK_K)
        codes = saturating_cast(value, scale[:, None], data.dtype.element_ty)
        inside = (rows < K)[:, None] & (columns < stored)[None, :]
        tl.store(data + rows.to(tl.int64)[:, None] * width + columns[None, :], codes, mask=inside)


@triton.jit
def _load(x, rows, column, end, K, BLOCK_K: tl.constexpr):
    """Rows of x^T in fp32, their columns from `column` on and before `end`, zero outside."""
    columns = column + tl.arange(0, BLOCK_K)
    inside = (columns < end)[:, None] & (rows < K)[None, :]
    return tl.trans(tl.load(x + columns.to(tl.int64)[:, None] * K + rows[None, :], mask=inside, other=0.0)).to(
        tl.float32
    )


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
        *(x, data + tl.cast(first, tl.int64) * width, scale_inv + first, tl.program_id(0) * BLOCK_M, M, K),
        *(FMAX, EPS, POWER_OF_TWO, TURNED, BLOCK_M, BLOCK_K, x.dtype.element_ty),
    )


# --- launchers ----------------------------------------------------------------------------------------------


def quantize_grouped_rows(x: torch.Tensor, form: GroupedRowForm) -> list[torch.Tensor]:
    """[data, scale_inv] if rowwise, + [transpose, columnwise_scale_inv] if columnwise, of x [G, N, K], bf16, fp16 or fp32."""
    x = x.contiguous()
    groups, rows, columns = x.shape
    buffers = form.allocate(tuple(x.shape), x.device)
    if form.rowwise:
        launch_rows(x, buffers["data"], buffers["scale_inv"], (groups * rows, columns), False, form)
    if form.columnwise:
        block_m, block_k, warps = columns_tile(columns)
        block_k //= 2  # the matrix's place takes registers
        launch(
            quantize_rows_kernel,
            (triton.cdiv(columns, block_m), groups),
            *(x, buffers["transpose"], buffers["columnwise_scale_inv"], rows, columns),
            **form.constants(),
            **{"TURNED": True, "MATRICES": True, "BLOCK_M": block_m, "BLOCK_K": block_k},
            num_warps=warps,
        )
    return list(buffers.values())


def quantize_columns_of_groups(x: torch.Tensor, offs: torch.Tensor, form: RowForm) -> list[torch.Tensor]:
    """[transpose, columnwise_scale_inv] of x [M, K], bf16, fp16 or fp32, and offs int32 [G], the end of each group."""
    x = x.contiguous()
    (rows, columns), groups = x.shape, offs.shape[0]
    by_groups = GroupColumnsForm(form.dtype, False, True, groups=groups)
    data, scale_inv = by_groups.allocate((rows, columns), x.device).values()
    block_m, block_k, warps = columns_tile(columns)
    launch(
        quantize_columns_of_groups_kernel,
        (triton.cdiv(columns, block_m), groups + 1),
        *(x, offs, data, scale_inv, rows, columns, groups),
        **form.constants(),
        **{"BLOCK_M": block_m, "BLOCK_K": block_k},
        num_warps=warps,
    )
    return [data, scale_inv]


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
