"""FP8 GEMMs of G groups of rows, of sizes that only the device knows: a mixture's experts.

    rows     C[m, N]    = round((A[m, K] @ B[g, N, K]^T) * (a_scale_inv * b_scale_inv[g]))    m in group g: fprop, dgrad
    columns  C[g, N, K] = round((A[N, m] @ B[K, m]^T) * (a_scale_inv * b_scale_inv))          sum over the m of g: wgrad

Group g is offs[g - 1] <= m < offs[g], with 0 before the first. Groups may have any size, none included: nothing is
padded, and nothing but the device reads `offs`. Rows behind the last group are zero in C.

The operands are those of kernels/gemm/current.py, contiguous in the contracted dimension, and so are the sums. A tile lies in
one group. Tensor copies start at any row, so a tile of rows also reads rows of the next group, which are not stored.
Along the contracted dimension, the contiguous one, copies start at multiples of 16 bytes only, and what they read of other
groups would enter the sum. So a group's blocks begin at the last multiple of 16 before it, and its first and last block,
where they are not the group's alone, are multiplied apart from the others, with both operands' foreign elements replaced
by zero (in both, since 0 * NaN is NaN). Groups that begin at a multiple of 16 have no such first block. Large products over
columns are kernels/gemm/specialized/grouped.py's on Hopper.
"""

from __future__ import annotations

from typing import Any

import torch

from te_dynamo.kernels.gemm.choose import choose_for
from te_dynamo.kernels.gemm.current import (
    accumulate,
    accumulate_halves,
    check_formats,
    check_operands,
    split_columns,
    store_result,
)
from te_dynamo.kernels.gemm.specialized.grouped import columns_specialized_out
from te_dynamo.kernels.gemm.tiles import Tile, stores_by_descriptor
from te_dynamo.kernels.runtime._triton import libdevice, tl, triton
from te_dynamo.kernels.runtime.launch import is_recording, launch
from te_dynamo.kernels.runtime.margin import gemm_multiprocessors
from te_dynamo.kernels.runtime.writes import writes
from te_dynamo.kernels.tiles.groups import clamped, group_bounds, rows_of_tile, tiles_of_groups

# --- checks and references ----------------------------------------------------------------------------------


def check_rows(
    a: torch.Tensor, b: torch.Tensor, b_scale_inv: torch.Tensor, offs: torch.Tensor, out_dtype: torch.dtype
) -> None:
    """Raises ValueError, saying what is wrong, for operands that `gemm_grouped` does not take."""
    if a.dim() != 2 or b.dim() != 3 or a.shape[1] != b.shape[2]:
        raise ValueError(
            f"te grouped gemm: expected a [M, K] and b [G, N, K], got {tuple(a.shape)} and {tuple(b.shape)}"
        )
    check_formats(a, b, out_dtype)
    check_offsets(offs, b.shape[0])
    if tuple(b_scale_inv.shape) != (b.shape[0],):
        raise ValueError(f"te grouped gemm: expected b_scale_inv [{b.shape[0]}], got {tuple(b_scale_inv.shape)}")


def check_columns(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, out_dtype: torch.dtype) -> None:
    """Raises ValueError, saying what is wrong, for operands that `gemm_grouped_columns` does not take."""
    check_operands(a, b, None, out_dtype)
    check_offsets(offs)


def check_offsets(offs: torch.Tensor, groups: int | None = None) -> None:
    """Raises ValueError for the ends of groups that no kernel reads."""
    if offs.dtype != torch.int32 or offs.dim() != 1 or groups not in (None, offs.shape[0]) or offs.shape[0] == 0:
        raise ValueError(
            f"te grouped gemm: expected offs int32 [{'G' if groups is None else groups}], the end of each group, "
            f"got {offs.dtype} {tuple(offs.shape)}"
        )


def gemm_grouped_reference(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:
    """`gemm_grouped` in plain PyTorch on any device, products and sums in fp32 whatever `fast_accum` says."""
    check_rows(a, b, b_scale_inv, offs, out_dtype)
    c = torch.zeros(a.shape[0], b.shape[1], dtype=out_dtype, device=a.device)
    for group, (start, end) in enumerate(group_bounds(offs, a.shape[0])):
        product = a[start:end].float() @ b[group].float().t()
        c[start:end] = product * (a_scale_inv * b_scale_inv[group])
    return c


def gemm_grouped_columns_reference(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:
    """`gemm_grouped_columns` in plain PyTorch on any device, products and sums in fp32 whatever `fast_accum` says."""
    check_columns(a, b, offs, out_dtype)
    c = torch.empty(offs.shape[0], a.shape[0], b.shape[0], dtype=out_dtype, device=a.device)
    for group, (start, end) in enumerate(group_bounds(offs, a.shape[1])):
        product = a[:, start:end].float() @ b[:, start:end].float().t()
        c[group] = product * (a_scale_inv * b_scale_inv)
    return c


# --- launchers ----------------------------------------------------------------------------------------------


def gemm_grouped(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:
    """The module docstring's C of groups of rows, [M, N] of `out_dtype`, on a CUDA device.

    a [M, K], b [G, N, K]: float8, contiguous, K a multiple of 16; not both e5m2. M may be symbolic.
    a_scale_inv [1], b_scale_inv [G]: float32. offs [G]: int32, ascending, at most M.
    Raises ValueError for anything else, `offs`' values excepted: offsets that are out of range are clamped.
    """
    check_rows(a, b, b_scale_inv, offs, out_dtype)
    choice = choose_for(a, b, fast_accum, out_dtype, m_groups=b.shape[0])
    return gemm_grouped_with_tile(choice.tile, a, a_scale_inv, b, b_scale_inv, offs, out_dtype)


def gemm_grouped_with_tile(
    tile: Tile,
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """`gemm_grouped` with a tile of the caller's choice, which decides fast or slow accumulation; checks nothing."""
    m, (groups, n, k) = a.shape[0], b.shape
    c = torch.empty((m, n), dtype=out_dtype, device=a.device)
    programs = gemm_multiprocessors(a.device) * tile.ctas_per_sm
    arguments = (a, a_scale_inv, b, b_scale_inv, offs, c, m, n, k, groups)
    options = {"GROUPS": triton.next_power_of_2(groups), **grouped_options(tile, n)}
    launch(gemm_grouped_kernel, (programs,), *arguments, **options)
    return c


def gemm_grouped_columns(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:
    """The module docstring's C of groups of columns, [G, N, K] of `out_dtype`, on a CUDA device.

    a [N, M], b [K, M]: float8, contiguous, M a multiple of 16 and possibly symbolic; not both e5m2.
    a_scale_inv, b_scale_inv [1]: float32. offs [G]: int32, ascending, at most M. An empty group's C is zero.
    Raises ValueError for anything else, `offs`' values excepted: offsets that are out of range are clamped.
    """
    check_columns(a, b, offs, out_dtype)
    choice = choose_for(a, b, fast_accum, out_dtype, k_groups=offs.shape[0], recorded=is_recording())
    if choice.specialized:
        c = torch.empty((offs.shape[0], a.shape[0], b.shape[0]), dtype=out_dtype, device=a.device)
        columns_specialized_out(a, a_scale_inv, b, b_scale_inv, offs, fast_accum, out=c)
        return c
    return gemm_grouped_columns_with_tile(choice.tile, a, a_scale_inv, b, b_scale_inv, offs, out_dtype)


def gemm_grouped_columns_with_tile(
    tile: Tile,
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """`gemm_grouped_columns` with a tile of the caller's choice, which decides fast or slow accumulation; checks nothing."""
    (n, m), k, groups = a.shape, b.shape[0], offs.shape[0]
    c = torch.empty((groups, n, k), dtype=out_dtype, device=a.device)
    programs = gemm_multiprocessors(a.device) * tile.ctas_per_sm
    arguments = (a, a_scale_inv, b, b_scale_inv, offs, c, m, n, k, groups)
    launch(gemm_grouped_columns_kernel, (programs,), *arguments, **grouped_options(tile, k))
    return c


def grouped_options(tile: Tile, width: int | torch.SymInt) -> dict[str, Any]:
    """The constant arguments and compile options that both kernels take for a tile and a width of C."""
    return {
        "FAST": tile.fast,
        "HALVES": tile.halves,
        "DESCRIPTOR_STORE": isinstance(width, int) and stores_by_descriptor(width),
        **tile.constants(),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


# --- kernels ------------------------------------------------------------------------------------------------


@triton.jit
def swizzled(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """(row, column) of a tile: GROUP_M rows of tiles are walked together, column by column."""
    group = tile // (GROUP_M * tiles_n)
    rows_in_group = min(tiles_m - group * GROUP_M, GROUP_M)
    return group * GROUP_M + tile % rows_in_group, (tile % (GROUP_M * tiles_n)) // rows_in_group


@triton.jit
def store_part(c, c_desc, value, row, column, end, N, DESCRIPTOR_STORE: tl.constexpr):
    """Writes the rows of a part of C that lie before `end`."""
    if DESCRIPTOR_STORE:
        if row + value.shape[0] <= end:
            c_desc.store([row, column], value.to(c.dtype.element_ty))
        else:
            store_result(c, c_desc, value, row, column, end, N, False)
    else:
        store_result(c, c_desc, value, row, column, end, N, False)


@writes("c")
@triton.jit
def gemm_grouped_kernel(
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
    GROUPS: tl.constexpr,  # G rounded up to a power of two
    FAST: tl.constexpr,
    HALVES: tl.constexpr,
    DESCRIPTOR_STORE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """C of groups of rows: each program finds its tiles' groups in the running sum of the groups' tiles."""
    PART_M: tl.constexpr = BLOCK_M // 2 if HALVES else BLOCK_M
    PART_N: tl.constexpr = BLOCK_N if HALVES else BLOCK_N // 2
    a_desc = tl.make_tensor_descriptor(a, [M, K], [K, 1], [PART_M, BLOCK_K])
    b_desc = tl.make_tensor_descriptor(b, [G * N, K], [K, 1], [BLOCK_N, BLOCK_K])
    c_desc = tl.make_tensor_descriptor(c, [M, N], [N, 1], [PART_M, PART_N]) if DESCRIPTOR_STORE else None
    tl.assume(K > 0)
    groups = tl.arange(0, GROUPS)
    before = tl.load(offs + groups - 1, mask=(groups > 0) & (groups < G), other=0)
    starts, ends, tiles = tiles_of_groups(before, tl.load(offs + groups, mask=groups < G, other=0), M, BLOCK_M)
    after = tl.cumsum(tiles, axis=0)
    tiles_m = tl.sum(tiles, axis=0)
    tiles_n = tl.cdiv(N, BLOCK_N)
    blocks = tl.cdiv(K, BLOCK_K)
    x_scale = tl.load(a_scale_inv)

    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        row_tile, column_tile = swizzled(tile, tiles_m, tiles_n, GROUP_M)
        group, row, end = rows_of_tile(row_tile, starts, ends, tiles, after, BLOCK_M)
        column = column_tile * BLOCK_N
        b_row = group * N + column
        if HALVES:
            zeros = tl.zeros((PART_M, BLOCK_N), tl.float32)
            one, two = accumulate_halves(a_desc, b_desc, row, b_row, 0, blocks, zeros, zeros, BLOCK_K)
        else:
            zeros = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            one, two = split_columns(accumulate(a_desc, b_desc, row, b_row, 0, blocks, zeros, FAST, BLOCK_K))
        scale = x_scale * tl.load(b_scale_inv + group)
        row_2 = row + (PART_M if HALVES else 0)
        column_2 = column + (0 if HALVES else PART_N)
        store_part(c, c_desc, libdevice.mul_rn(one, scale), row, column, end, N, DESCRIPTOR_STORE)
        store_part(c, c_desc, libdevice.mul_rn(two, scale), row_2, column_2, end, N, DESCRIPTOR_STORE)

    store_zeros_behind(c, tl.load(offs + G - 1), M, N)


@triton.jit
def store_zeros_behind(c, end, M, N):
    """Zeros to the rows of c [M, N] behind the last group, which ends at `end`."""
    columns = tl.arange(0, 1024)
    for row in range(clamped(end, M) + tl.program_id(0), M, tl.num_programs(0)):
        for column in range(0, N, 1024):
            zeros = tl.zeros((1024,), c.dtype.element_ty)
            tl.store(c + tl.cast(row, tl.int64) * N + column + columns, zeros, mask=column + columns < N)


@writes("c")
@triton.jit
def gemm_grouped_columns_kernel(
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
    FAST: tl.constexpr,
    HALVES: tl.constexpr,
    DESCRIPTOR_STORE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """C [G, N, K] of groups of columns; a tile is BLOCK_M of N by BLOCK_N of K, its sum goes over M by BLOCK_K."""
    PART_M: tl.constexpr = BLOCK_M // 2 if HALVES else BLOCK_M
    PART_N: tl.constexpr = BLOCK_N if HALVES else BLOCK_N // 2
    a_desc = tl.make_tensor_descriptor(a, [N, M], [M, 1], [PART_M, BLOCK_K])
    b_desc = tl.make_tensor_descriptor(b, [K, M], [M, 1], [BLOCK_N, BLOCK_K])
    c_desc = tl.make_tensor_descriptor(c, [G * N, K], [K, 1], [PART_M, PART_N]) if DESCRIPTOR_STORE else None
    tiles_m = tl.cdiv(N, BLOCK_M)
    tiles_n = tl.cdiv(K, BLOCK_N)
    scale = tl.load(a_scale_inv) * tl.load(b_scale_inv)

    for tile in tl.range(tl.program_id(0), G * tiles_m * tiles_n, tl.num_programs(0)):
        group = tile // (tiles_m * tiles_n)
        row_tile, column_tile = swizzled(tile % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
        row, column = row_tile * BLOCK_M, column_tile * BLOCK_N
        start = clamped(tl.load(offs + group - 1, mask=group > 0, other=0), M)
        end = tl.maximum(clamped(tl.load(offs + group), M), start)
        inner, blocks, edge, apart, edges = cut(start, end, BLOCK_K)
        # The edges are masked in a loop of their own: that over the whole blocks is the other GEMMs'.
        if HALVES:
            one = tl.zeros((PART_M, BLOCK_N), tl.float32)
            two = tl.zeros((PART_M, BLOCK_N), tl.float32)
            one, two = accumulate_edges_halves(a_desc, b_desc, row, column, start, end, edge, apart, edges, one, two)
            one, two = accumulate_halves(a_desc, b_desc, row, column, inner, blocks, one, two, BLOCK_K)
        else:
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            total = accumulate_edges(a_desc, b_desc, row, column, start, end, edge, apart, edges, total, FAST)
            one, two = split_columns(accumulate(a_desc, b_desc, row, column, inner, blocks, total, FAST, BLOCK_K))
        first, last = group * N, group * N + N
        row_2 = row + (PART_M if HALVES else 0)
        column_2 = column + (0 if HALVES else PART_N)
        store_part(c, c_desc, libdevice.mul_rn(one, scale), first + row, column, last, K, DESCRIPTOR_STORE)
        store_part(c, c_desc, libdevice.mul_rn(two, scale), first + row_2, column_2, last, K, DESCRIPTOR_STORE)


@triton.jit
def cut(start, end, BLOCK_K: tl.constexpr):
    """How the columns start..end are cut into blocks: (first, number) of the whole ones, (first, distance, number) of the edges.

    Blocks begin at multiples of 16. Edges are the blocks with columns of other groups: the first one, if `start` is no
    multiple of 16, and the last one, if it ends behind `end`. Either may be missing, and one block may be both.
    """
    # The compiler has to see multiples of 16: without a copy engine it could not load 16 bytes at once.
    some = start < end
    aligned = start // 16 * 16
    head = some & (aligned < start)
    inner = tl.where(head, aligned + BLOCK_K, aligned)
    blocks = tl.maximum(end - inner, 0) // BLOCK_K
    tail = inner + blocks * BLOCK_K
    edges = head.to(tl.int32) + (some & (tail < end)).to(tl.int32)
    return inner, blocks, tl.where(head, aligned, tail), tail - aligned, edges


@triton.jit
def accumulate_edges(a_desc, b_desc, row, column, start, end, first_k, apart, edges, total, FAST: tl.constexpr):
    """total [BLOCK_M, BLOCK_N] + the tile's products of the edges at first_k and, if there are two, first_k + apart."""
    for edge in tl.range(edges, num_stages=3):  # two stages ahead: both edges are loaded at once
        k = first_k + edge * apart
        x = own(a_desc.load([row, k]), k, start, end)
        y = own(b_desc.load([column, k]), k, start, end)
        if FAST:
            total = tl.dot(x, y.T, total)
        else:
            total += tl.dot(x, y.T)
    return total


@triton.jit
def accumulate_edges_halves(a_desc, b_desc, row, column, start, end, first_k, apart, edges, upper, lower):
    """The same with slow accumulation onto the two halves [BLOCK_M / 2, BLOCK_N] of a tile."""
    for edge in tl.range(edges, num_stages=3):
        k = first_k + edge * apart
        y = own(b_desc.load([column, k]), k, start, end)
        upper += tl.dot(own(a_desc.load([row, k]), k, start, end), y.T)
        lower += tl.dot(own(a_desc.load([row + lower.shape[0], k]), k, start, end), y.T)
    return upper, lower


@triton.jit
def own(x, k, start, end):
    """The float8 x [rows, BLOCK_K], whose first column is k, with zeros in all columns but start..end."""
    columns = k + tl.arange(0, x.shape[1])
    inside = (columns >= start) & (columns < end)
    return tl.where(inside[None, :], x.to(tl.uint8, bitcast=True), 0).to(tl.uint8).to(x.dtype, bitcast=True)
