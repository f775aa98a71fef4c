"""The Triton kernel of products by G groups, of sizes that only the device knows: a mixture's experts. The twin of product.py's.

    rows     C[m, N]    = round(A[m, K] @ B[g, N, K]^T)    m in group g: fprop, dgrad
    columns  C[g, M, N] = round(A[M, k] @ B[N, k]^T)       over the k of group g: wgrad

Group g is offs[g - 1] <= i < offs[g], with 0 before the first. Groups may have any size, none included: nothing is padded, and nothing but the
device reads `offs`. Rows behind the last group are zero in C. Operands, scales and sums are those of product.py: of a tensor's scale B has one
a group, of rows' scales [G, N], and A of columns [G, M]; with scales of blocks B is [G N, K], or [N, G K] if B_COLUMNWISE, of which each group begins with a block.

A tile lies in one group. Tensor copies start at any row, so a tile of rows also reads rows of the next group, which are not stored.
Along the contracted dimension, the contiguous one, copies start at multiples of 16 bytes only, and what they read of other groups would enter
the sum. So with scales of tensors or rows a group's blocks begin at the last multiple of 16 before it, and its first and last block, where they are not
the group's alone, are multiplied apart from the others, with both operands' foreign elements replaced by zero (in both, since 0 * NaN is NaN).
Groups that begin at a multiple of 16 have no such first block. With scales of blocks k is in the padded order of kernels/tiles/groups.py, and a
block is one group's.
"""

from __future__ import annotations

from te_dynamo.kernels.gemm.product import (
    accumulate,
    add_product,
    finished,
    scaled_by_rows,
    split_columns,
    store_part,
    tile_origin,
)
from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.runtime.writes import writes
from te_dynamo.kernels.tiles.groups import clamped, rows_of_tile, tiles_of_groups


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
    COLUMNS: tl.constexpr,  # K is what has groups
    GROUPS: tl.constexpr,  # G rounded up to a power of two
    SCALING: tl.constexpr,
    B_COLUMNWISE: tl.constexpr,
    FAST: tl.constexpr,
    HALVES: tl.constexpr,
    DESCRIPTOR_STORE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """C of groups. Each program finds the groups of its tiles in the running sum of the groups' tiles, or of their blocks of k."""
    PART_M: tl.constexpr = BLOCK_M // 2 if HALVES else BLOCK_M
    PART_N: tl.constexpr = BLOCK_N if HALVES else BLOCK_N // 2
    # Scales of rows too are the whole sum's.
    SUMMED: tl.constexpr = "tensor" if SCALING == "row" else SCALING
    M, N, K = tl.cast(M, tl.int32), tl.cast(N, tl.int32), tl.cast(K, tl.int32)  # as product.py does
    EDGES: tl.constexpr = COLUMNS and SUMMED == "tensor"
    b_rows = N if COLUMNS or B_COLUMNWISE else G * N
    b_width = G * K if B_COLUMNWISE else K
    c_rows = G * M if COLUMNS else M
    a_desc = tl.make_tensor_descriptor(a, [M, K], [K, 1], [PART_M, BLOCK_K])
    b_desc = tl.make_tensor_descriptor(b, [b_rows, b_width], [b_width, 1], [BLOCK_N, BLOCK_K])
    c_desc = tl.make_tensor_descriptor(c, [c_rows, N], [N, 1], [PART_M, PART_N]) if DESCRIPTOR_STORE else None
    if not COLUMNS:
        tl.assume(K > 0)
    a_blocks = tl.cdiv(K, 128)
    b_blocks = tl.cdiv(b_width, 128)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    if not EDGES:
        groups = tl.arange(0, GROUPS)
        before = tl.load(offs + groups - 1, mask=(groups > 0) & (groups < G), other=0)
        behind = tl.load(offs + groups, mask=groups < G, other=0)
        starts, ends, counts = tiles_of_groups(before, behind, K if COLUMNS else M, 128 if COLUMNS else BLOCK_M)
        after = tl.cumsum(counts, axis=0)
    if COLUMNS:
        tiles = G * tiles_m * tiles_n
    else:
        tiles_m = tl.sum(counts, axis=0)
        tiles = tiles_m * tiles_n
    if SCALING == "tensor":
        scale = tl.load(a_scale_inv) * tl.load(b_scale_inv) if COLUMNS else tl.load(a_scale_inv)

    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        UNIT: tl.constexpr = BLOCK_M if COLUMNS else 1
        tile = index % (tiles_m * tiles_n) if COLUMNS else index
        row, column, _ = tile_origin(tile, tiles_m, tiles_n, 1, UNIT, BLOCK_N, GROUP_M)
        if COLUMNS:
            group = index // (tiles_m * tiles_n)
            c_row, end, b_row, b_ahead = group * M + row, group * M + M, column, 0
            if EDGES:
                start = clamped(tl.load(offs + group - 1, mask=group > 0, other=0), K)
                last = tl.maximum(clamped(tl.load(offs + group), K), start)
                first, blocks, edge, apart, edges = cut(start, last, BLOCK_K)
            else:
                mine = tl.arange(0, GROUPS) == group
                first = tl.sum(tl.where(mine, after - counts, 0), axis=0)
                blocks = tl.sum(tl.where(mine, counts, 0), axis=0)
        else:
            group, row, end = rows_of_tile(row, starts, ends, counts, after, BLOCK_M)
            c_row, first, blocks = row, 0, tl.cdiv(K, BLOCK_K)
            b_row = column if B_COLUMNWISE else group * N + column
            b_ahead = group * a_blocks if B_COLUMNWISE else 0
        one = tl.zeros((PART_M, BLOCK_N), tl.float32)
        two = tl.zeros((PART_M, BLOCK_N), tl.float32)  # without HALVES nobody's
        if EDGES:
            # The edges are masked in a loop of their own: that over the whole blocks is the other GEMMs'.
            one, two = accumulate_edges(
                a_desc, b_desc, row, column, start, last, edge, apart, edges, one, two, FAST, HALVES
            )
        one, two = accumulate(
            *(
                a_desc,
                a_scale_inv,
                b_desc,
                b_scale_inv,
                row,
                b_row,
                first,
                blocks,
                a_blocks,
                M,
                b_ahead,
                b_blocks,
                b_rows,
            ),
            *(one, two, SUMMED, FAST, HALVES, BLOCK_K),
        )
        if not HALVES:
            one, two = split_columns(one)
        tile_scale = None
        if SCALING == "tensor":
            tile_scale = scale if COLUMNS else scale * tl.load(b_scale_inv + group)
        c_row_2 = c_row + (PART_M if HALVES else 0)
        column_2 = column + (0 if HALVES else PART_N)
        if SCALING == "row":
            a_scales = a_scale_inv + (group * M if COLUMNS else 0)
            b_scales = b_scale_inv + group * N
            row_2 = row + (PART_M if HALVES else 0)
            one = scaled_by_rows(one, a_scales, b_scales, row, column, M, N)
            two = scaled_by_rows(two, a_scales, b_scales, row_2, column_2, M, N)
        one = finished(one, tile_scale, None, column, N, 1)
        store_part(c, c_desc, one, c_row, column, end, N, True, DESCRIPTOR_STORE)
        two = finished(two, tile_scale, None, column_2, N, 1)
        store_part(c, c_desc, two, c_row_2, column_2, end, N, True, DESCRIPTOR_STORE)

    if not COLUMNS:
        store_zeros_behind(c, tl.load(offs + G - 1), M, N)


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
def accumulate_edges(
    a_desc, b_desc, row, column, start, end, first_k, apart, edges, one, two, FAST: tl.constexpr, HALVES: tl.constexpr
):
    """The sums + the tile's products of the edges at first_k and, if there are two, first_k + apart."""
    for edge in tl.range(edges, num_stages=3):  # two stages ahead: both edges are loaded at once
        k = first_k + edge * apart
        x = own(a_desc.load([row, k]), k, start, end)
        y = own(b_desc.load([column, k]), k, start, end)
        one = add_product(x, y, None, None, one, None, "tensor", FAST)
        if HALVES:
            two += tl.dot(own(a_desc.load([row + one.shape[0], k]), k, start, end), y.T)
    return one, two


@triton.jit
def own(x, k, start, end):
    """The float8 x [rows, BLOCK_K], whose first column is k, with zeros in all columns but start..end."""
    columns = k + tl.arange(0, x.shape[1])
    inside = (columns >= start) & (columns < end)
    return tl.where(inside[None, :], x.to(tl.uint8, bitcast=True), 0).to(tl.uint8).to(x.dtype, bitcast=True)


@triton.jit
def store_zeros_behind(c, end, M, N):
    """Zeros to the rows of c [M, N] behind the last group, which ends at `end`."""
    columns = tl.arange(0, 1024)
    for row in range(clamped(end, M) + tl.program_id(0), M, tl.num_programs(0)):
        for column in range(0, N, 1024):
            zeros = tl.zeros((1024,), c.dtype.element_ty)
            tl.store(c + tl.cast(row, tl.int64) * N + column + columns, zeros, mask=column + columns < N)
