"""The GEMMs of kernels/gemm/block.py for G groups of rows, of sizes that only the device knows: a mixture's experts.

    rows     C[m, N]    = round(sum over blocks kb of 128 k: (A_kb @ B[g]_kb^T) * (a_scale_kb * b_scale_kb))    m in group g
    columns  C[g, N, K] = round(sum over the blocks of group g: (A_mb @ B_mb^T) * (a_scale_mb * b_scale_mb))    wgrad

Group g is offs[g - 1] <= m < offs[g], as in kernels/gemm/grouped.py. Operands and scales are those of block.py:

    A of rows        [M, K], scales 1D of its rows
    B of rows        [G N, K], or [N, G K] if b_columnwise: a weight [G, N, K], or [G, K, N], of which each expert begins with a block.
                     Scales 1D or 2D of that matrix
    A, B of columns  [N, P], [K, P], scales 1D: tokens in the padded order of kernels/tiles/groups.py, by columns

A block is one group's, so each product is that of block.py of the group's own tensors, bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch

from te_dynamo.kernels.gemm.block import (
    accumulate,
    accumulate_halves,
    check_scale,
    scales_reference,
    sum_reference,
)
from te_dynamo.kernels.gemm.choose import choose_for
from te_dynamo.kernels.gemm.current import check_formats, check_operands
from te_dynamo.kernels.gemm.grouped import check_offsets, store_part, store_zeros_behind, swizzled
from te_dynamo.kernels.gemm.tiles import Tile, stores_by_descriptor
from te_dynamo.kernels.layouts.block import BLOCK
from te_dynamo.kernels.layouts.sizes import round_up
from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.runtime.launch import launch
from te_dynamo.kernels.runtime.margin import gemm_multiprocessors
from te_dynamo.kernels.runtime.writes import writes
from te_dynamo.kernels.tiles.groups import group_bounds, padded_bounds, rows_of_tile, tiles_of_groups

# --- checks and references ----------------------------------------------------------------------------------


def check_block_rows(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
    b_two_d: bool,
    b_columnwise: bool,
) -> None:
    """Raises ValueError, saying what is wrong, for operands that `gemm_grouped_block` does not take."""
    check_formats(a, b, out_dtype)
    check_offsets(offs)
    check_weight(a, b, offs, b_columnwise)
    check_scale("a", a, a_scale_inv, False)
    check_scale("b", b, b_scale_inv, b_two_d)


def check_weight(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, by_columns: bool) -> None:
    """Raises ValueError unless b is a [M, K]'s [G N, K], or by columns [N, G K], of groups that begin with a block of 128."""
    groups, rows = offs.shape[0], a.dim() == b.dim() == 2
    k, grouped = (b.shape[1] // groups, b.shape[1]) if by_columns and rows else (b.shape[-1], b.shape[0])
    if not rows or a.shape[1] != k or grouped % (groups * BLOCK):
        wanted = "[N, G K], K" if by_columns else "[G N, K], N"
        raise ValueError(
            f"te grouped gemm: expected a [M, K] and b {wanted} a multiple of {BLOCK}, got {tuple(a.shape)} and "
            f"{tuple(b.shape)} of {groups} groups"
        )


def check_block_columns(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
) -> None:
    """Raises ValueError, saying what is wrong, for operands that `gemm_grouped_block_columns` does not take."""
    check_operands(a, b, None, out_dtype)
    check_offsets(offs)
    check_scale("a", a, a_scale_inv, False)
    check_scale("b", b, b_scale_inv, False)


def gemm_grouped_block_reference(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
    b_two_d: bool,
    b_columnwise: bool,
) -> torch.Tensor:
    """`gemm_grouped_block` in plain PyTorch on any device, products and sums in fp32."""
    check_block_rows(a, a_scale_inv, b, b_scale_inv, offs, out_dtype, b_two_d, b_columnwise)
    groups, dim = offs.shape[0], 1 if b_columnwise else 0
    a_scales = scales_reference(a_scale_inv, *a.shape, two_d=False)
    b_scales = scales_reference(b_scale_inv, *b.shape, two_d=b_two_d).chunk(groups, dim)
    weights = b.view(torch.uint8).chunk(groups, dim)
    c = torch.zeros(a.shape[0], weights[0].shape[0], dtype=out_dtype, device=a.device)
    for group, (start, end) in enumerate(group_bounds(offs, a.shape[0])):
        weight = weights[group].contiguous().view(b.dtype)
        c[start:end] = sum_reference(a[start:end], a_scales[start:end], weight, b_scales[group])
    return c


def gemm_grouped_block_columns_reference(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """`gemm_grouped_block_columns` in plain PyTorch on any device, products and sums in fp32."""
    check_block_columns(a, a_scale_inv, b, b_scale_inv, offs, out_dtype)
    a_scales = scales_reference(a_scale_inv, *a.shape, two_d=False)
    b_scales = scales_reference(b_scale_inv, *b.shape, two_d=False)
    c = torch.empty(offs.shape[0], a.shape[0], b.shape[0], dtype=out_dtype, device=a.device)
    for group, (start, end) in enumerate(padded_bounds(offs, a.shape[1])):
        columns = slice(start, start + round_up(end - start, 16))
        blocks = slice(start // BLOCK, None)
        c[group] = sum_reference(a[:, columns], a_scales[:, blocks], b[:, columns], b_scales[:, blocks])
    return c


# --- launchers ----------------------------------------------------------------------------------------------


def gemm_grouped_block(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
    b_two_d: bool,
    b_columnwise: bool,
) -> torch.Tensor:
    """The module docstring's C of groups of rows, [M, N] of `out_dtype`, on a CUDA device. Rows behind the last group are zero.

    a [M, K], b [G N, K] or [N, G K]: float8, contiguous, K a multiple of 16; not both e5m2. M may be symbolic.
    a_scale_inv, b_scale_inv: both float32 or both uint8 E8M0 codes. offs [G]: int32, ascending, at most M.
    Raises ValueError for anything else, `offs`' values excepted: offsets that are out of range are clamped.
    """
    check_block_rows(a, a_scale_inv, b, b_scale_inv, offs, out_dtype, b_two_d, b_columnwise)
    groups = offs.shape[0]
    weight = b if b_columnwise else b.view(groups, -1, b.shape[1])
    scaling = "1x128" if b_two_d else "1x128 by 1x128"
    choice = choose_for(a, weight, out_dtype=out_dtype, scaling=scaling, m_groups=groups)
    arguments = (a, a_scale_inv, b, b_scale_inv, offs, out_dtype, b_two_d, b_columnwise)
    return gemm_grouped_block_with_tile(choice.tile, *arguments)


def gemm_grouped_block_with_tile(
    tile: Tile,
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
    b_two_d: bool,
    b_columnwise: bool,
) -> torch.Tensor:
    """`gemm_grouped_block` with a tile of the caller's choice; checks nothing."""
    (m, k), groups = a.shape, offs.shape[0]
    n = b.shape[0] if b_columnwise else b.shape[0] // groups
    c = torch.empty((m, n), dtype=out_dtype, device=a.device)
    arguments = (a, a_scale_inv, b, b_scale_inv, offs, c, m, n, k, groups)
    options = {"B_TWO_D": b_two_d, "B_COLUMNWISE": b_columnwise, **grouped_block_options(tile, n, groups)}
    programs = gemm_multiprocessors(a.device) * tile.ctas_per_sm
    launch(gemm_grouped_block_kernel, (programs,), *arguments, **options)
    return c


def gemm_grouped_block_columns(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """The module docstring's C of groups of columns, [G, N, K] of `out_dtype`, on a CUDA device. An empty group's C is zero.

    a [N, P], b [K, P]: float8, contiguous, P as `padded_rows` says and possibly symbolic; not both e5m2.
    a_scale_inv, b_scale_inv: both float32 or both uint8 E8M0 codes. offs [G]: int32, ascending, of the order without padding.
    Raises ValueError for anything else, `offs`' values excepted: offsets that are out of range are clamped.
    """
    check_block_columns(a, a_scale_inv, b, b_scale_inv, offs, out_dtype)
    choice = choose_for(a, b, out_dtype=out_dtype, scaling="1x128 by 1x128", k_groups=offs.shape[0])
    return gemm_grouped_block_columns_with_tile(choice.tile, a, a_scale_inv, b, b_scale_inv, offs, out_dtype)


def gemm_grouped_block_columns_with_tile(
    tile: Tile,
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """`gemm_grouped_block_columns` with a tile of the caller's choice; checks nothing."""
    (n, padded), k, groups = a.shape, b.shape[0], offs.shape[0]
    c = torch.empty((groups, n, k), dtype=out_dtype, device=a.device)
    arguments = (a, a_scale_inv, b, b_scale_inv, offs, c, padded, n, k, groups)
    programs = gemm_multiprocessors(a.device) * tile.ctas_per_sm
    launch(gemm_grouped_block_columns_kernel, (programs,), *arguments, **grouped_block_options(tile, k, groups))
    return c


def grouped_block_options(tile: Tile, width: int | torch.SymInt, groups: int) -> dict[str, Any]:
    """The constant arguments and compile options that both kernels take for a tile, a width of C and a number of groups."""
    return {
        "GROUPS": triton.next_power_of_2(groups),
        "HALVES": tile.halves,
        "DESCRIPTOR_STORE": isinstance(width, int) and stores_by_descriptor(width),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "GROUP_M": tile.group_m,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


# --- kernels ------------------------------------------------------------------------------------------------


@writes("c")
@triton.jit
def gemm_grouped_block_kernel(
    a,
    a_scale_inv,
    b,
    b_scale_inv,
    offs,
    c,
    M,
    N,
    K,
    G,
    B_TWO_D: tl.constexpr,
    B_COLUMNWISE: tl.constexpr,
    GROUPS: tl.constexpr,  # G rounded up to a power of two
    HALVES: tl.constexpr,
    DESCRIPTOR_STORE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """C of groups of rows; a tile lies in one group, and what it reads of rows of the next one is not stored."""
    PART_M: tl.constexpr = BLOCK_M // 2 if HALVES else BLOCK_M
    PART_N: tl.constexpr = BLOCK_N if HALVES else BLOCK_N // 2
    tl.assume(K > 0)
    blocks = tl.cdiv(K, 128)
    rows_of_b = N if B_COLUMNWISE else G * N
    blocks_of_b = G * blocks if B_COLUMNWISE else blocks
    a_desc = tl.make_tensor_descriptor(a, [M, K], [K, 1], [PART_M, 128])
    width_of_b = G * K if B_COLUMNWISE else K
    b_desc = tl.make_tensor_descriptor(b, [rows_of_b, width_of_b], [width_of_b, 1], [BLOCK_N, 128])
    c_desc = tl.make_tensor_descriptor(c, [M, N], [N, 1], [PART_M, PART_N]) if DESCRIPTOR_STORE else None
    groups = tl.arange(0, GROUPS)
    before = tl.load(offs + groups - 1, mask=(groups > 0) & (groups < G), other=0)
    starts, ends, tiles = tiles_of_groups(before, tl.load(offs + groups, mask=groups < G, other=0), M, BLOCK_M)
    after = tl.cumsum(tiles, axis=0)
    tiles_m = tl.sum(tiles, axis=0)
    tiles_n = tl.cdiv(N, BLOCK_N)

    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        row_tile, column_tile = swizzled(tile, tiles_m, tiles_n, GROUP_M)
        group, row, end = rows_of_tile(row_tile, starts, ends, tiles, after, BLOCK_M)
        column = column_tile * BLOCK_N
        b_row = column if B_COLUMNWISE else group * N + column
        b_ahead = group * blocks if B_COLUMNWISE else 0
        if HALVES:
            one, two = accumulate_halves(
                *(a_desc, a_scale_inv, b_desc, b_scale_inv, row, b_row, 0, blocks),
                *(blocks, M, b_ahead, blocks_of_b, rows_of_b, False, B_TWO_D, PART_M, BLOCK_N),
            )
        else:
            one, two = accumulate(
                *(a_desc, a_scale_inv, b_desc, b_scale_inv, row, b_row, 0, blocks),
                *(blocks, M, b_ahead, blocks_of_b, rows_of_b, False, B_TWO_D, BLOCK_M, BLOCK_N),
            )
        row_2 = row + (PART_M if HALVES else 0)
        column_2 = column + (0 if HALVES else PART_N)
        store_part(c, c_desc, one, row, column, end, N, DESCRIPTOR_STORE)
        store_part(c, c_desc, two, row_2, column_2, end, N, DESCRIPTOR_STORE)

    store_zeros_behind(c, tl.load(offs + G - 1), M, N)


@writes("c")
@triton.jit
def gemm_grouped_block_columns_kernel(
    a,
    a_scale_inv,
    b,
    b_scale_inv,
    offs,
    c,
    P,
    N,
    K,
    G,
    GROUPS: tl.constexpr,
    HALVES: tl.constexpr,
    DESCRIPTOR_STORE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """C [G, N, K] of groups of columns; a tile is BLOCK_M of N by BLOCK_N of K, its sum goes over the blocks of its group."""
    PART_M: tl.constexpr = BLOCK_M // 2 if HALVES else BLOCK_M
    PART_N: tl.constexpr = BLOCK_N if HALVES else BLOCK_N // 2
    a_desc = tl.make_tensor_descriptor(a, [N, P], [P, 1], [PART_M, 128])
    b_desc = tl.make_tensor_descriptor(b, [K, P], [P, 1], [BLOCK_N, 128])
    c_desc = tl.make_tensor_descriptor(c, [G * N, K], [K, 1], [PART_M, PART_N]) if DESCRIPTOR_STORE else None
    groups = tl.arange(0, GROUPS)
    before = tl.load(offs + groups - 1, mask=(groups > 0) & (groups < G), other=0)
    _, _, group_blocks = tiles_of_groups(before, tl.load(offs + groups, mask=groups < G, other=0), P, 128)
    after = tl.cumsum(group_blocks, axis=0)
    all_blocks = P // 128
    tiles_m = tl.cdiv(N, BLOCK_M)
    tiles_n = tl.cdiv(K, BLOCK_N)

    for tile in tl.range(tl.program_id(0), G * tiles_m * tiles_n, tl.num_programs(0)):
        group = tile // (tiles_m * tiles_n)
        row_tile, column_tile = swizzled(tile % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
        row, column = row_tile * BLOCK_M, column_tile * BLOCK_N
        mine = tl.arange(0, GROUPS) == group
        first = tl.sum(tl.where(mine, after - group_blocks, 0), axis=0)
        blocks = tl.sum(tl.where(mine, group_blocks, 0), axis=0)
        if HALVES:
            one, two = accumulate_halves(
                *(a_desc, a_scale_inv, b_desc, b_scale_inv, row, column, first, blocks),
                *(all_blocks, N, 0, all_blocks, K, False, False, PART_M, BLOCK_N),
            )
        else:
            one, two = accumulate(
                *(a_desc, a_scale_inv, b_desc, b_scale_inv, row, column, first, blocks),
                *(all_blocks, N, 0, all_blocks, K, False, False, BLOCK_M, BLOCK_N),
            )
        above, end = group * N, group * N + N
        row_2 = row + (PART_M if HALVES else 0)
        column_2 = column + (0 if HALVES else PART_N)
        store_part(c, c_desc, one, above + row, column, end, K, DESCRIPTOR_STORE)
        store_part(c, c_desc, two, above + row_2, column_2, end, K, DESCRIPTOR_STORE)
