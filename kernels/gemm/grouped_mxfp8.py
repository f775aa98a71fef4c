"""MXFP8 GEMMs, blocks of 32, of G groups of rows, of sizes that only the device knows: a mixture's experts.

    rows     C[m, N]    = round(sum over k of A[m, k] * 2^(ea[m, k/32] - 127) * B[g, n, k] * 2^(eb[g, n, k/32] - 127))    m in group g
    columns  C[g, N, K] = round(sum over the m of g of A[m, n] * 2^(ea[m/32, n] - 127) * B[m, k] * 2^(eb[m/32, k] - 127))    wgrad

Group g is offs[g - 1] <= m < offs[g], as in grouped_product.py. Operands and scales are those of kernels/quantize/mxfp8.py, plain:

    A of rows        [M, K], rowwise
    B of rows        [G N, K] rowwise, or if b_columnwise [G K, N] columnwise: a weight [G, N, K], or [G, K, N], of which each expert
                     begins with a block. What the last 128 of an expert's K have of the next one is read as zeros
    A, B of columns  [P, N], [P, K], columnwise: tokens in the padded order of kernels/tiles/groups.py

One kernel for every GPU: where tensor cores apply no scales of blocks, Triton makes bf16 of both operands, which holds all their values.
Where they do, it also multiplies blocks of 128, whose columns are held as rows of the transpose: the operands of grouped_product.py.
Scales are read one by one, because groups begin at any row of A and swizzled scales come in tiles of 128.
"""

from __future__ import annotations

import torch

from te_dynamo.kernels.gemm.block_scales import load_operand, operand_descriptor
from te_dynamo.kernels.gemm.grouped_product import store_zeros_behind
from te_dynamo.kernels.gemm.product import store_elements, tile_origin
from te_dynamo.kernels.gemm.request import Request
from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.runtime.launch import launch
from te_dynamo.kernels.runtime.margin import gemm_multiprocessors
from te_dynamo.kernels.runtime.target import Target, target_of
from te_dynamo.kernels.runtime.writes import writes
from te_dynamo.kernels.tiles.groups import rows_of_tile, tiles_of_groups


def multiply_groups(r: Request) -> torch.Tensor:
    """C of a request by groups in MXFP8, on a CUDA device."""
    c = r.empty()
    launch(
        gemm_grouped_mxfp8_kernel,
        (gemm_multiprocessors(c.device),),
        *(r.a.codes, r.a.scale_inv, r.b.codes, r.b.scale_inv, r.offs, c, *r.mnk, r.count),
        **{"COLUMNS": r.groups == "columns", "A_TURNED": r.a.turned, "B_TURNED": r.b.turned, "B_DEEP": r.deep},
        **{"TAIL": r.deep and r.groups == "rows" and r.mnk[2] % 128 != 0},
        **{"GROUPS": triton.next_power_of_2(r.count), **tile(target_of(c.device))},
    )
    return c


def tile(target: Target) -> dict[str, int]:
    """The kernel's constants and options. Where bf16 is made of both operands in registers, there are fewer for the sums."""
    size = {"BLOCK_M": 128, "BLOCK_N": 128, "GROUP_M": 8, "num_warps": 8, "num_stages": 3}
    if target.has_tensor_memory:
        return {**size, "BLOCK_N": 256, "num_stages": 4}
    return size if target.has_block_scales else {**size, "BLOCK_M": 64, "BLOCK_N": 64}


# --- kernel -------------------------------------------------------------------------------------------------


@writes("c")
@triton.jit
def gemm_grouped_mxfp8_kernel(
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
    COLUMNS: tl.constexpr,
    A_TURNED: tl.constexpr,
    B_TURNED: tl.constexpr,
    B_DEEP: tl.constexpr,
    TAIL: tl.constexpr,
    GROUPS: tl.constexpr,  # G rounded up to a power of two
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """C [M, N] of groups of rows, as `multiply_rows`; with COLUMNS C [G, M, N] of groups of K, which is in the padded order.

    TAIL: whether an expert of a B_DEEP operand ends within a tile. A has zeros there, and NaN times zero is NaN.
    """
    A_FORMAT: tl.constexpr = "e4m3" if a.dtype.element_ty == tl.float8e4nv else "e5m2"
    B_FORMAT: tl.constexpr = "e4m3" if b.dtype.element_ty == tl.float8e4nv else "e5m2"
    M, N, K = tl.cast(M, tl.int32), tl.cast(N, tl.int32), tl.cast(K, tl.int32)  # as product.py does
    tl.assume(K > 0)
    all_blocks = tl.cdiv(K, 128)
    side_of_b = N if COLUMNS or B_DEEP else G * N
    depth_of_b = G * K if B_DEEP else K
    a_desc = operand_descriptor(a, M, K, A_TURNED, BLOCK_M, 128)
    b_desc = operand_descriptor(b, side_of_b, depth_of_b, B_TURNED, BLOCK_N, 128)
    a_stride = tl.cdiv(M, 128) * 128 if A_TURNED else all_blocks * 4
    b_stride = tl.cdiv(side_of_b, 128) * 128 if B_TURNED else tl.cdiv(depth_of_b, 128) * 4
    groups = tl.arange(0, GROUPS)
    before = tl.load(offs + groups - 1, mask=(groups > 0) & (groups < G), other=0)
    starts, ends, tiles = tiles_of_groups(
        before, tl.load(offs + groups, mask=groups < G, other=0), K if COLUMNS else M, 128 if COLUMNS else BLOCK_M
    )
    after = tl.cumsum(tiles, axis=0)
    tiles_m = tl.cdiv(M, BLOCK_M) if COLUMNS else tl.sum(tiles, axis=0)
    tiles_n = tl.cdiv(N, BLOCK_N)

    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n * (G if COLUMNS else 1), tl.num_programs(0)):
        row_tile, column, _ = tile_origin(tile % (tiles_m * tiles_n), tiles_m, tiles_n, 1, 1, BLOCK_N, GROUP_M)
        if COLUMNS:
            group = tile // (tiles_m * tiles_n)
            mine = tl.arange(0, GROUPS) == group
            first = tl.sum(tl.where(mine, after - tiles, 0), axis=0)
            blocks = tl.sum(tl.where(mine, tiles, 0), axis=0)
            row, above = row_tile * BLOCK_M, group * M
            end = above + M
            b_row, b_ahead = column, 0
        else:
            group, row, end = rows_of_tile(row_tile, starts, ends, tiles, after, BLOCK_M)
            above, first, blocks = 0, 0, all_blocks
            b_row = column if B_DEEP else group * N + column
            b_ahead = group * K if B_DEEP else 0
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for block in range(first, first + blocks):
            k = block * 128
            x = load_operand(a_desc, row, k, A_TURNED)
            y = load_operand(b_desc, b_row, b_ahead + k, B_TURNED)
            if TAIL:
                bits = tl.where(k + tl.arange(0, 128)[None, :] < K, y.to(tl.uint8, bitcast=True), 0)
                y = bits.to(b.dtype.element_ty, bitcast=True)
            x_scale = load_codes(a_scale_inv, row, k // 32, M, K, a_stride, A_TURNED, BLOCK_M)
            y_scale = load_codes(
                b_scale_inv, b_row, (b_ahead + k) // 32, side_of_b, b_ahead + K, b_stride, B_TURNED, BLOCK_N
            )
            total = tl.dot_scaled(x, x_scale, A_FORMAT, y.T, y_scale, B_FORMAT, total)
        # Left and right half one after the other: the addresses of a whole tile do not fit in registers beside it.
        left, right = tl.split(tl.permute(tl.reshape(total, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
        store_elements(c, left, above + row, column, end, N)
        store_elements(c, right, above + row, column + BLOCK_N // 2, end, N)

    if not COLUMNS:
        store_zeros_behind(c, tl.load(offs + G - 1), M, N)


@triton.jit
def load_codes(scale_inv, first, block, SIDE, DEPTH, STRIDE, TURNED: tl.constexpr, BLOCK: tl.constexpr):
    """The plain codes [BLOCK, 4] of a tile's rows, from `first` on, for four blocks. Past SIDE and DEPTH the last one's are read
    again: they scale what is not stored, and zeros."""
    rows = tl.minimum(first + tl.arange(0, BLOCK), SIDE - 1)[:, None]
    blocks = tl.minimum(block + tl.arange(0, 4), tl.cdiv(DEPTH, 32) - 1)[None, :]
    return tl.load(scale_inv + (blocks * STRIDE + rows if TURNED else rows * STRIDE + blocks))
