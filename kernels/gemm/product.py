"""The Triton kernel of every FP8 product whose tensor cores know no scales, and the device functions that its grouped twin shares.

    C[m, n] = round(sum over k of A[m, k] B[n, k], scaled as SCALING and STACKED say, + bias[n])    then + addend[m, n], rounded again

A [M, K] and B [N, K] are float8, both contiguous, so that the contracted dimension lies in memory order: what Hopper's tensor cores read.
SCALING "tensor" multiplies the sum by a_scale_inv * b_scale_inv, of an operand that is STACKED by that of the segment. "row" multiplies row m of it by a_scale_inv[m], then column n by b_scale_inv[n]. Every step after the
sum is one fp32 operation with its own rounding, so that a product with a bias equals one in fp32, an addition and a rounding, bit for bit.
The others ("1x128 128x128", A's and B's blocks) add what the tensor core makes of each 128 products to an fp32 sum, by one fused multiply-add
with the product of the two scales. Layouts of scales: kernels/layouts.

Fast accumulation keeps the whole sum in the tensor core's accumulator, which holds fewer bits than fp32 when the operands are FP8. Slow
accumulation adds what the tensor core makes of every 128 products to an fp32 sum.

STACKED "K": the sum is held in units of one segment's scale. At a border it is multiplied by the quotient of the two scales. Segments are
taken in ascending order of their scales: the quotient is at most 1, and no sum overflows that would not in fp32.

The kernel is persistent: each program takes tiles in turn, and loads of its next tile overlap the end of the last.
"""

from __future__ import annotations

from te_dynamo.kernels.runtime._triton import libdevice, tl, triton
from te_dynamo.kernels.runtime.dependent_launch import wait_for_predecessor
from te_dynamo.kernels.runtime.writes import writes
from te_dynamo.kernels.tiles.blocks import decode_e8m0
from te_dynamo.kernels.tiles.fp8 import abs_bits, store_amax


@writes("c")
@triton.jit
def gemm_kernel(
    a,
    a_scale_inv,
    b,
    b_scale_inv,
    bias,
    c,
    addend,
    M,
    N,
    K,
    SCALING: tl.constexpr,
    STACKED: tl.constexpr,
    SEGMENTS: tl.constexpr,
    EDGE_1: tl.constexpr,
    EDGE_2: tl.constexpr,
    FAST: tl.constexpr,
    HALVES: tl.constexpr,
    SPLIT_K: tl.constexpr,
    DESCRIPTOR_STORE: tl.constexpr,
    MAY_BE_EMPTY: tl.constexpr,  # K may be 0, as it is in wgrad of no tokens
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """C, or with SPLIT_K > 1 the fp32 sums of each part of K as c [SPLIT_K, M, N], scales of tensors and rows left out.

    bias: [N] or None. addend: None, or what is added to C once that is rounded, with DESCRIPTOR_STORE; it may be c.
    """
    # A tile leaves in two parts: its upper and its lower half with HALVES, its left and its right half otherwise.
    PART_M: tl.constexpr = BLOCK_M // 2 if HALVES else BLOCK_M
    PART_N: tl.constexpr = BLOCK_N if HALVES else BLOCK_N // 2
    # Between two tiles, loads of the next one overlap the store only where one loop makes the whole sum.
    FLATTEN: tl.constexpr = STACKED != "K"
    # Of a size that data decides Inductor knows no bound, and a descriptor takes 32 bits.
    M, N, K = tl.cast(M, tl.int32), tl.cast(N, tl.int32), tl.cast(K, tl.int32)
    a_desc = tl.make_tensor_descriptor(a, [M, K], [K, 1], [PART_M, BLOCK_K])
    b_desc = tl.make_tensor_descriptor(b, [N, K], [K, 1], [BLOCK_N, BLOCK_K])
    c_desc = tl.make_tensor_descriptor(c, [M, N], [N, 1], [PART_M, PART_N]) if DESCRIPTOR_STORE else None
    addend_desc = tl.make_tensor_descriptor(addend, [M, N], [N, 1], [PART_M, PART_N]) if addend is not None else None
    if not MAY_BE_EMPTY:
        tl.assume(K > 0)
    all_blocks = tl.cdiv(K, 128)
    # Scales of rows too are the whole sum's.
    SUMMED: tl.constexpr = "tensor" if SCALING == "row" else SCALING
    blocks = tl.cdiv(K, BLOCK_K * SPLIT_K) if SUMMED == "tensor" else tl.cdiv(all_blocks, SPLIT_K)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    if SCALING == "tensor" and (STACKED == "" or STACKED == "K"):
        scale = tl.load(a_scale_inv) * tl.load(b_scale_inv)

    for index in tl.range(tl.program_id(0), tiles_m * tiles_n * SPLIT_K, tl.num_programs(0), flatten=FLATTEN):
        row, column, part = tile_origin(index, tiles_m, tiles_n, SPLIT_K, BLOCK_M, BLOCK_N, GROUP_M)
        # A last part that reaches past K reads zeros: the descriptors' bounds.
        first = part * blocks
        if SUMMED == "tensor":
            first *= BLOCK_K
        one = tl.zeros((PART_M, BLOCK_N), tl.float32)
        two = tl.zeros((PART_M, BLOCK_N), tl.float32)  # without HALVES nobody's
        if STACKED == "K":
            one, scale = accumulate_segments(
                *(a_desc, a_scale_inv, b_desc, b_scale_inv, row, column, K, one),
                *(SEGMENTS, EDGE_1, EDGE_2, FAST, BLOCK_K),
            )
        else:
            one, two = accumulate(
                *(
                    a_desc,
                    a_scale_inv,
                    b_desc,
                    b_scale_inv,
                    row,
                    column,
                    first,
                    blocks,
                    all_blocks,
                    M,
                    0,
                    all_blocks,
                    N,
                ),
                *(one, two, SUMMED, FAST, HALVES, BLOCK_K),
            )
        if not HALVES:
            one, two = split_columns(one)
        if STACKED == "M":
            scale = tl.load(a_scale_inv + segment_at(row, EDGE_1, EDGE_2)) * tl.load(b_scale_inv)
        elif STACKED == "N":
            scale = tl.load(a_scale_inv) * tl.load(b_scale_inv + segment_at(column, EDGE_1, EDGE_2))
        # Computed only here: no register holds it through the loop.
        row_2 = row + (PART_M if HALVES else 0)
        column_2 = column + (0 if HALVES else PART_N)
        if SCALING == "row" and SPLIT_K == 1:
            one = scaled_by_rows(one, a_scale_inv, b_scale_inv, row, column, M, N)
            two = scaled_by_rows(two, a_scale_inv, b_scale_inv, row_2, column_2, M, N)
        tile_scale = scale if SCALING == "tensor" and SPLIT_K == 1 else None
        one = finished(one, tile_scale, bias, column, N, SPLIT_K)
        two = finished(two, tile_scale, bias, column_2, N, SPLIT_K)
        if addend is not None:
            one = plus(one, addend_desc, row, column)
            two = plus(two, addend_desc, row_2, column_2)
        target = c + part.to(tl.int64) * M * N
        store_part(target, c_desc, one, row, column, M, N, False, DESCRIPTOR_STORE)
        store_part(target, c_desc, two, row_2, column_2, M, N, False, DESCRIPTOR_STORE)


@triton.jit
def tile_origin(
    index, tiles_m, tiles_n, SPLIT_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr
):
    """(first row, first column, part of K) of a tile; GROUP_M rows of tiles are walked together, column by column."""
    tile = index // SPLIT_K
    group = tile // (GROUP_M * tiles_n)
    rows_in_group = min(tiles_m - group * GROUP_M, GROUP_M)
    row = (group * GROUP_M + tile % rows_in_group) * BLOCK_M
    return row, (tile % (GROUP_M * tiles_n)) // rows_in_group * BLOCK_N, index % SPLIT_K


@triton.jit
def segment_at(position, EDGE_1: tl.constexpr, EDGE_2: tl.constexpr):
    """The segment that holds a position."""
    return (position >= EDGE_1).to(tl.int32) + (position >= EDGE_2).to(tl.int32)


@triton.jit
def ranked_segment(
    rank, a_scale_inv, b_scale_inv, K, SEGMENTS: tl.constexpr, EDGE_1: tl.constexpr, EDGE_2: tl.constexpr
):
    """(first k, last k + 1, scale) of the segment of that rank by scale, the smallest first."""
    one = tl.load(a_scale_inv) * tl.load(b_scale_inv)
    two = tl.load(a_scale_inv + 1) * tl.load(b_scale_inv + 1)
    if SEGMENTS == 2:
        is_two = (two < one) != (rank == 1)
        return tl.where(is_two, EDGE_1, 0), tl.where(is_two, K, EDGE_1), tl.where(is_two, two, one)
    else:
        three = tl.load(a_scale_inv + 2) * tl.load(b_scale_inv + 2)
        is_one = (two < one).to(tl.int32) + (three < one).to(tl.int32) == rank
        is_two = (one <= two).to(tl.int32) + (three < two).to(tl.int32) == rank
        first = tl.where(is_one, 0, tl.where(is_two, EDGE_1, EDGE_2))
        last = tl.where(is_one, EDGE_1, tl.where(is_two, EDGE_2, K))
        return first, last, tl.where(is_one, one, tl.where(is_two, two, three))


@triton.jit
def accumulate(
    a_desc, a_scale_inv, b_desc, b_scale_inv, row, b_row, first, blocks, a_blocks, M, b_ahead, b_blocks, N, one, two,
    SCALING: tl.constexpr, FAST: tl.constexpr, HALVES: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """one and two + the tile's products of `blocks` blocks of K from `first` on: a k, or with scales of blocks a block.

    Scales of blocks: A has M rows of a_blocks blocks, B has N of b_blocks, whose own are b_ahead further. two: with HALVES.
    """
    HALF: tl.constexpr = one.shape[0]
    nothing = tl.minimum(M, 0)  # 0, which the compiler does not know
    begin = 0 if SCALING == "tensor" else first
    for block in range(begin, begin + blocks):
        k = first + block * BLOCK_K if SCALING == "tensor" else block * BLOCK_K
        b_k = k if SCALING == "tensor" else (block + b_ahead) * BLOCK_K
        scale, scale_2, b_scale = None, None, None
        if SCALING != "tensor":
            A_TWO_D: tl.constexpr = SCALING == "128x128 1x128"
            B_TWO_D: tl.constexpr = SCALING == "1x128 128x128"
            scale = load_scales(a_scale_inv, row, block, a_blocks, M, HALF, A_TWO_D)
            if HALVES:
                scale_2 = load_scales(a_scale_inv, row + HALF, block, a_blocks, M, HALF, A_TWO_D)
            b_scale = load_scales(b_scale_inv, b_row, block + b_ahead, b_blocks, N, one.shape[1], B_TWO_D)
        if HALVES:
            # Triton puts a barrier before the first use of what was loaded last; in this order it falls before
            # both products, and one warp group can add while the other multiplies.
            x_2 = a_desc.load([row + HALF, k])
        x = a_desc.load([row, k])
        y = b_desc.load([b_row, b_k])
        one = add_product(x, y, scale, b_scale, one, None, SCALING, FAST)
        if HALVES:
            # The zeros that the second product starts from are made of the first one's sum. Otherwise ptxas starts it before
            # the first one's terms are added, and two sets of terms beside two halves of sums do not fit in the registers.
            zeros = None
            if SCALING != "tensor":
                zeros = (one.to(tl.int32, bitcast=True) & nothing).to(tl.float32, bitcast=True)
            two = add_product(x_2, y, scale_2, b_scale, two, zeros, SCALING, FAST)
    return one, two


@triton.jit
def add_product(x, y, a_scale, b_scale, total, zeros, SCALING: tl.constexpr, FAST: tl.constexpr):
    """total + x @ y^T; by blocks times the product of the scales, one rounding for that and one for the rest."""
    if FAST:
        return tl.dot(x, y.T, total)
    elif SCALING == "tensor":
        return total + tl.dot(x, y.T)
    else:
        terms = tl.dot(x, y.T, zeros)
        if a_scale.dtype == tl.uint8:
            a_scale = decode_e8m0(a_scale)
            b_scale = decode_e8m0(b_scale)
        if SCALING == "128x128 1x128":
            scale = (a_scale * b_scale)[None, :]
        elif SCALING == "1x128 128x128":
            scale = (a_scale * b_scale)[:, None]
        else:
            scale = a_scale[:, None] * b_scale[None, :]
        return tl.fma(terms, tl.broadcast_to(scale, terms.shape), total)


@triton.jit
def load_scales(scale_inv, index, block, blocks, SIZE, COUNT: tl.constexpr, TWO_D: tl.constexpr):
    """The scale of rows index : index + COUNT of an operand, [COUNT] or for TWO_D a scalar, for a block of K.

    Past the last row or block the last one's is read again: it scales zeros or what is not stored. In Triton a clamp
    takes fewer registers than a mask.
    """
    block = tl.minimum(block, blocks - 1)
    if TWO_D:
        stride = (blocks + 3) // 4 * 4
        value = tl.load(scale_inv + tl.minimum(index, SIZE - 1) // 128 * stride + block)
    else:
        rows = tl.minimum(index + tl.arange(0, COUNT), SIZE - 1)
        if scale_inv.dtype.element_ty == tl.uint8:
            value = tl.load(scale_inv + 4 * block + rows * (4 * blocks))
        else:
            value = tl.load(scale_inv + tl.cast(block, tl.int64) * ((SIZE + 3) // 4 * 4) + rows)
    return value


@triton.jit
def accumulate_segments(
    a_desc, a_scale_inv, b_desc, b_scale_inv, row, column, K, total,
    SEGMENTS: tl.constexpr, EDGE_1: tl.constexpr, EDGE_2: tl.constexpr, FAST: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """(a tile's sum over all segments, the scale whose units it is in)."""
    scale = tl.full((), 0.0, tl.float32)
    for rank in tl.range(SEGMENTS):
        first, last, next_scale = ranked_segment(rank, a_scale_inv, b_scale_inv, K, SEGMENTS, EDGE_1, EDGE_2)
        total *= tl.where(next_scale > 0.0, scale / next_scale, 0.0)
        scale = next_scale
        total, _ = accumulate(
            *(
                a_desc,
                a_scale_inv,
                b_desc,
                b_scale_inv,
                row,
                column,
                first,
                tl.cdiv(last - first, BLOCK_K),
                0,
                0,
                0,
                0,
                0,
            ),
            *(total, total, "tensor", FAST, False, BLOCK_K),
        )
    return total, scale


@triton.jit
def split_columns(total):
    """The left and the right half of a tile, so that its way out needs half the shared memory."""
    halves: tl.constexpr = (total.shape[0], 2, total.shape[1] // 2)
    return tl.split(tl.permute(tl.reshape(total, halves), (0, 2, 1)))


@triton.jit
def scaled_by_rows(value, a_scale_inv, b_scale_inv, row, column, M, N):
    """A part of the sum by the scales of A's rows, then by those of B's; both products are rounded."""
    rows, columns = row + tl.arange(0, value.shape[0]), column + tl.arange(0, value.shape[1])
    a_scales = tl.load(a_scale_inv + rows, mask=rows < M, other=0.0)
    b_scales = tl.load(b_scale_inv + columns, mask=columns < N, other=0.0)
    return libdevice.mul_rn(libdevice.mul_rn(value, a_scales[:, None]), b_scales[None, :])


@triton.jit
def finished(value, scale, bias, column, N, SPLIT_K: tl.constexpr):
    """A part of the sum, scaled, plus the bias with a rounding of its own: mul_rn is never contracted with the addition."""
    if scale is not None:
        value = libdevice.mul_rn(value, scale)
    if bias is not None and SPLIT_K == 1:
        columns = column + tl.arange(0, value.shape[1])
        value += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    return value


@triton.jit
def plus(value, addend_desc, row, column):
    """A part of C rounded to its dtype, and that of the addend: their sum in fp32."""
    addend = addend_desc.load([row, column])
    return value.to(addend.dtype).to(tl.float32) + addend.to(tl.float32)


@triton.jit
def store_part(c, c_desc, value, row, column, end, N, CUT: tl.constexpr, DESCRIPTOR_STORE: tl.constexpr):
    """Writes the rows before `end` of a part of C, rounded to its dtype, at (row, column). CUT: `end` may lie inside of C."""
    if not DESCRIPTOR_STORE:
        store_elements(c, value, row, column, end, N)
    elif not CUT:  # noqa: SIM114 (a branch of the compiler's, and one of the GPU's)
        c_desc.store([row, column], value.to(c.dtype.element_ty))
    elif row + value.shape[0] <= end:
        c_desc.store([row, column], value.to(c.dtype.element_ty))
    else:
        store_elements(c, value, row, column, end, N)


@triton.jit
def store_elements(c, value, row, column, end, N):
    value = value.to(c.dtype.element_ty)
    rows = row + tl.arange(0, value.shape[0])[:, None]
    columns = column + tl.arange(0, value.shape[1])[None, :]
    tl.store(c + tl.cast(rows, tl.int64) * N + columns, value, mask=(rows < end) & (columns < N))


@writes("c", partials="PARTIALS")
@triton.jit
def gemm_reduce_kernel(
    parts,
    a_scale_inv,
    b_scale_inv,
    bias,
    c,
    addend,
    partials,
    SIZE,
    N,
    SCALING: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    PARTIALS: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """c = round(sum of parts [SPLIT_K, SIZE], in order, (* scale) + bias), SIZE = M * N. PARTIALS: places for its amax, or 0.

    addend: None, or what is added once that is rounded; it may be c.
    """
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < SIZE
    wait_for_predecessor(EARLY)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(SPLIT_K):
        total += tl.load(parts + part * tl.cast(SIZE, tl.int64) + offsets, mask=inside, other=0.0)
    if SCALING == "tensor":
        total = libdevice.mul_rn(total, tl.load(a_scale_inv) * tl.load(b_scale_inv))
    elif SCALING == "row":
        total = libdevice.mul_rn(total, tl.load(a_scale_inv + offsets // N, mask=inside, other=0.0))
        total = libdevice.mul_rn(total, tl.load(b_scale_inv + offsets % N, mask=inside, other=0.0))
    if HAS_BIAS:
        total += tl.load(bias + offsets % N, mask=inside, other=0.0).to(tl.float32)
    result = total.to(c.dtype.element_ty)
    if addend is not None:
        other = tl.load(addend + offsets, mask=inside, other=0.0).to(tl.float32)
        result = (result.to(tl.float32) + other).to(c.dtype.element_ty)
    tl.store(c + offsets, result, mask=inside)
    if PARTIALS > 0:
        store_amax(partials, tl.where(inside, abs_bits(result), 0), PARTIALS)
