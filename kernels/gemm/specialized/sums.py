"""What the warp-specialized GEMMs make of the ring's tiles: sums over K, and their scale."""

from __future__ import annotations

from te_dynamo.kernels.gemm.specialized.ring import GROUP_WARPS, GROUPS, next_slot
from te_dynamo.kernels.runtime._gluon import gl, gluon, hopper, mbarrier


@gluon.jit
def accumulate(GROUP: gl.constexpr, ring, stage, phase, blocks, one, two, FAST: gl.constexpr):
    """The two halves' sums, begun in `one` and `two`, over the next blocks of K. Of a group whose rows are one part both are in `one`.

    What the tensor core makes of each block is added in fp32, or with FAST, of one part, by the tensor core itself.
    """
    a_tiles, b_tiles, full, empty = ring
    ROWS: gl.constexpr = one.shape[0]
    ONE_PART: gl.constexpr = a_tiles.shape[1] == GROUPS * ROWS
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [GROUP_WARPS, 1], [16, one.shape[1], 32])
    nothing = gl.zeros((ROWS, one.shape[1]), gl.float32, layout)
    if ONE_PART:
        for _ in range(blocks):
            mbarrier.wait(full.index(stage), phase)
            x, y = a_tiles.index(stage).slice(GROUP * ROWS, ROWS), b_tiles.index(stage).permute((1, 0))
            if FAST:
                one = hopper.warpgroup_mma(x, y, one, is_async=True)
                one = hopper.warpgroup_mma_wait(0, deps=[one])
                mbarrier.arrive(empty.index(stage))
            else:
                term = hopper.warpgroup_mma(x, y, nothing, use_acc=False, is_async=True)
                term = hopper.warpgroup_mma_wait(0, deps=[term])
                mbarrier.arrive(empty.index(stage))
                one += term
            stage, phase = next_slot(stage, phase, a_tiles.shape[0])
    else:
        for _ in range(blocks):
            mbarrier.wait(full.index(stage), phase)
            x_one, x_two, y = operands(GROUP, a_tiles, b_tiles, stage)
            term = hopper.warpgroup_mma(x_one, y, nothing, use_acc=False, is_async=True)
            one += hopper.warpgroup_mma_wait(0, deps=[term])
            term = hopper.warpgroup_mma(x_two, y, nothing, use_acc=False, is_async=True)
            term = hopper.warpgroup_mma_wait(0, deps=[term])
            mbarrier.arrive(empty.index(stage))
            two += term
            stage, phase = next_slot(stage, phase, a_tiles.shape[0])
    return one, two, stage, phase


@gluon.jit
def accumulate_blocks(GROUP: gl.constexpr, ring, scales, b_scale_inv, stage, phase, blocks, upper, lower):
    """The same with scales of blocks (scales.py): what the tensor core makes of each is scaled and added in fp32. Nothing is added to the
    `lower` of a group whose rows are one part.

    scales: of A, or of A and B, what `make_scales` gives; b_scale_inv: B's scale of each block, where there is one for 128 columns.
    """
    a_tiles, b_tiles, full, empty = ring
    ROWS: gl.constexpr = upper.shape[0]
    layout: gl.constexpr = upper.type.layout
    PARTS: gl.constexpr = a_tiles.shape[1] // (GROUPS * ROWS)
    first: gl.constexpr = GROUP * PARTS * ROWS
    B_TWO_D: gl.constexpr = len(scales) == 1
    # Every product overwrites the terms of the one before: were its target its own, ptxas would start it before those are
    # added, and two sets of terms beside two halves of sums do not fit in the registers. `never` is false, unknown to it.
    terms = gl.zeros((ROWS, upper.shape[1]), gl.float32, layout)
    never = blocks < 0
    if B_TWO_D:
        b_next = gl.load(b_scale_inv)
    for block in range(blocks):
        if B_TWO_D:
            b_scale = b_next
            b_next = gl.load(b_scale_inv + gl.minimum(block + 1, blocks - 1))
        mbarrier.wait(full.index(stage), phase)
        x, y = a_tiles.index(stage), b_tiles.index(stage).permute((1, 0))
        terms = hopper.warpgroup_mma(x.slice(first, ROWS), y, terms, use_acc=never, is_async=True)
        a_scales = scales[0][2].index(stage)
        upper_scale = a_scales.slice(first, ROWS).load(gl.SliceLayout(1, layout))
        if PARTS == 2:
            lower_scale = a_scales.slice(first + ROWS, ROWS).load(gl.SliceLayout(1, layout))
        if not B_TWO_D:
            b_scale = scales[1][2].index(stage).load(gl.SliceLayout(0, layout))
        terms = hopper.warpgroup_mma_wait(0, deps=[terms])
        if PARTS == 2:
            upper = add_scaled(terms, upper_scale, b_scale, upper, B_TWO_D)
            upper = hopper.warpgroup_mma_wait(0, deps=[upper])
            terms = hopper.warpgroup_mma(x.slice(first + ROWS, ROWS), y, terms, use_acc=never, is_async=True)
            terms = hopper.warpgroup_mma_wait(0, deps=[terms])
            mbarrier.arrive(empty.index(stage))
            lower = add_scaled(terms, lower_scale, b_scale, lower, B_TWO_D)
        else:
            mbarrier.arrive(empty.index(stage))
            upper = add_scaled(terms, upper_scale, b_scale, upper, B_TWO_D)
        stage, phase = next_slot(stage, phase, a_tiles.shape[0])
    return upper, lower, stage, phase


@gluon.jit
def add_scaled(terms, a_scale, b_scale, total, B_TWO_D: gl.constexpr):
    """total + terms * (a_scale * b_scale), one rounding for the scales' product and one for the rest."""
    scale = (a_scale * b_scale)[:, None] if B_TWO_D else a_scale[:, None] * b_scale[None, :]
    return gl.fma(terms, scale, total)


@gluon.jit
def operands(GROUP: gl.constexpr, a_tiles, b_tiles, stage):
    """The upper and the lower half of this group's rows of A, and B transposed, in one slot of the ring."""
    PART_M: gl.constexpr = a_tiles.shape[1] // (2 * GROUPS)
    x = a_tiles.index(stage)
    first: gl.constexpr = GROUP * 2 * PART_M
    return x.slice(first, PART_M), x.slice(first + PART_M, PART_M), b_tiles.index(stage).permute((1, 0))


@gluon.jit
def scaled(total, scale):
    """total * scale: mul.rn is never contracted with an addition."""
    return gl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=f,f,f", [total, scale], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def scaled_by_rows(total, a_scale_inv, b_scale_inv, row, column, M, N):
    """total by the scales of A's rows, of which there are M, then by those of B's N; both products are rounded."""
    rows = row + gl.arange(0, total.shape[0], layout=gl.SliceLayout(1, total.type.layout))
    columns = column + gl.arange(0, total.shape[1], layout=gl.SliceLayout(0, total.type.layout))
    a_scales = gl.load(a_scale_inv + rows, mask=rows < M, other=0.0)
    b_scales = gl.load(b_scale_inv + columns, mask=columns < N, other=0.0)
    return scaled(scaled(total, a_scales[:, None]), b_scales[None, :])
