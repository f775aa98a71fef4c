"""The FP8 GEMM of kernels/gemm/product.py for large products on Hopper, by warps that each do one thing.

One warp copies, two groups of warps multiply (ring.py, sums.py). It is written in Gluon, and equals the other kernel bit for bit.
With slow accumulation a group multiplies two products of 64 x 128, one below the other, and one group adds while the other
multiplies. With fast accumulation nothing is added, and a group multiplies one product of 64 x 256: the tensor core then reads a
sixth less from shared memory, which a GPU at its power limit runs faster by. Of a small tile it is one product of 64 x 128 in both.
Scales of blocks come with the tiles that they scale: scales.py. Of 128x128 the one scale of B is loaded a block ahead.

Inductor writes launches of Triton-language kernels only; lowering/extern/gemm.py makes its code call `gemm_specialized_out`.
A call costs the CPU more than such a launch does, so kernels/gemm/choose.py takes this kernel for large products only.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from te_dynamo.kernels.gemm.request import sum_of_nothing
from te_dynamo.kernels.gemm.specialized.ring import (
    COPY_REGISTERS,
    GROUP_REGISTERS,
    GROUP_WARPS,
    GROUPS,
    fill,
    make_result,
    make_ring,
    next_slot,
    split_columns,
    store,
    tile_origin,
)
from te_dynamo.kernels.gemm.specialized.scales import decoded, make_scales
from te_dynamo.kernels.gemm.specialized.sums import accumulate, accumulate_blocks, scaled, scaled_by_rows
from te_dynamo.kernels.gemm.tiles import specialized_tile, stages_that_fit
from te_dynamo.kernels.runtime._gluon import async_load, gl, gluon, hopper, mbarrier, reinterpret, tma
from te_dynamo.kernels.runtime.launch import launch_prepared
from te_dynamo.kernels.runtime.margin import gemm_multiprocessors
from te_dynamo.kernels.runtime.prepared import Prepared
from te_dynamo.kernels.tiles.stacking import Stacking


def gemm_specialized_out(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None = None,
    addend: torch.Tensor | None = None,
    *,
    scaling: str = "tensor",
    fast: bool = False,
    along: str = "",
    segments: Sequence[int] = (),
    small: bool = False,
    out: torch.Tensor,
) -> None:
    """Writes `kernels/gemm/product.py`'s C of a [M, K] and b [N, K] to out [M, N]; N a multiple of 8. Checks nothing.

    scaling: "tensor", "row", or "1x128 1x128" or "1x128 128x128" of A's and B's blocks. fast: by fast accumulation. along, segments: of
    operands with a tensor's scale that are stacked. addend: None, or what is added to C as kernels/gemm/product.py does, of two bytes an
    element, not stacked and not beside scales of b's rows of blocks. It may be out. small: by one of SPECIALIZED_SMALL, stacked only beside
    scales of blocks.
    """
    (m, k), n = a.shape, b.shape[0]
    if k == 0:
        sum_of_nothing(out, bias, addend)
        return
    if a_scale_inv.dtype == torch.uint8:
        a_scale_inv, b_scale_inv = decoded(a_scale_inv, m), decoded(b_scale_inv, n)
    prepared = _prepared(out.element_size(), scaling, fast, along, tuple(segments), small)
    programs = gemm_multiprocessors(a.device)
    launch_prepared(prepared, (programs,), a, a_scale_inv, b, b_scale_inv, bias, out, addend, m, n, k)


@functools.cache
def _prepared(*form: Any) -> Prepared:
    return Prepared(gemm_specialized_kernel, specialized_options(*form))


def specialized_options(
    out_bytes: int,
    scaling: str = "tensor",
    fast: bool = False,
    along: str = "",
    segments: tuple[int, ...] = (),
    small: bool = False,
) -> dict[str, Any]:
    """The constant arguments and compile options of the kernel for a C of elements of `out_bytes`."""
    tile = specialized_tile(fast, scaling not in ("tensor", "row"), small)
    return {
        "SCALING": scaling,
        "FAST": tile.fast,
        **Stacking(along, segments).constants(),
        "STAGES": stages_that_fit(tile, out_bytes),
        **tile.constants(),
        "num_warps": GROUP_WARPS.value,
    }


@gluon.jit
def gemm_specialized_kernel(
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
    SCALING: gl.constexpr,
    FAST: gl.constexpr,
    STACKED: gl.constexpr,
    SEGMENTS: gl.constexpr,
    EDGE_1: gl.constexpr,
    EDGE_2: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    """C [M, N] from a [M, K] and b [N, K], + bias [N], + addend [M, N]; see kernels/gemm/product.py for the equation."""
    descs, ring = make_ring(a, b, M, N, K, STAGES, BLOCK_M, BLOCK_N, BLOCK_K)
    PART_M: gl.constexpr = 64  # rows of one product of a group of warps
    # The scales of blocks lie in the ring too, and leave room for half a part.
    BY_BLOCKS: gl.constexpr = SCALING != "tensor" and SCALING != "row"
    ONE_PART: gl.constexpr = BLOCK_M == GROUPS * PART_M
    PART_N: gl.constexpr = BLOCK_N // 2 if ONE_PART or BY_BLOCKS else BLOCK_N
    result = make_result(c, M, N, PART_M, PART_N)
    a_scales = (make_scales(a_scale_inv, M, K, STAGES, BLOCK_M),) if BY_BLOCKS else ()
    b_scales = (make_scales(b_scale_inv, N, K, STAGES, BLOCK_N),) if SCALING == "1x128 1x128" else ()
    PLACED: gl.constexpr = result[0].layout
    ADDED_N: gl.constexpr = BLOCK_N // 2 if ONE_PART else BLOCK_N
    addends = () if addend is None else (tma.make_tensor_descriptor(addend, [M, N], [N, 1], [PART_M, ADDED_N], PLACED),)
    what = (ring, a_scales + b_scales, (a_scale_inv, b_scale_inv), (M, N, K), addends)
    STACK: gl.constexpr = (STACKED, SEGMENTS, EDGE_1, EDGE_2)
    gl.warp_specialize(
        [
            (_multiply, (gl.constexpr(0), what, result, bias, SCALING, FAST, STACK, GROUP_M)),
            (_multiply, (gl.constexpr(1), what, result, bias, SCALING, FAST, STACK, GROUP_M)),
            (_copy, (descs, what, STACK, GROUP_M)),
        ],
        [GROUP_WARPS, 1],
        [GROUP_REGISTERS, COPY_REGISTERS],
    )


@gluon.jit
def _copy(descs, what, STACK: gl.constexpr, GROUP_M: gl.constexpr):
    """Fills the ring with this program's tiles, block of K by block of K, as far ahead as it has slots.

    Of operands stacked along K it does so segment by segment, in the order of their scales. Behind a tile's blocks comes its addend in
    two slots: first what the groups' first parts take, then what their second do.
    """
    ring, scales, scale_inv, size, addends = what
    M, N, K = size
    a_tiles, b_tiles, full, empty = ring
    BLOCK_M: gl.constexpr = a_tiles.shape[1]
    BLOCK_N: gl.constexpr = b_tiles.shape[1]
    tiles_m, tiles_n = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N)
    stage = 0
    phase = 1  # a wait for the phase before the first passes: every slot begins empty
    for index in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        row, column = tile_origin(index, tiles_m, tiles_n, BLOCK_M, BLOCK_N, GROUP_M)
        if STACK[0] == "K":
            for rank in gl.static_range(STACK[1]):
                first, last, _ = _ranked_segment(rank, scale_inv, K, STACK)
                stage, phase = fill(descs, ring, (), stage, phase, row, column, first, last)
        else:
            stage, phase = fill(descs, ring, scales, stage, phase, row, column, 0, K)
        if len(addends) > 0:
            desc = addends[0]
            PART_M: gl.constexpr = desc.block_shape[0]
            PART_N: gl.constexpr = desc.block_shape[1]
            ONE_PART: gl.constexpr = BLOCK_M == GROUPS * PART_M
            places = _addend_places(ring, desc)
            for part in gl.static_range(2):
                mbarrier.wait(empty.index(stage), phase)
                mbarrier.expect(full.index(stage), GROUPS * desc.block_type.nbytes)
                for group in gl.static_range(GROUPS):
                    first = row + group * (BLOCK_M // GROUPS) + (0 if ONE_PART else part * PART_M)
                    left = column + (part * PART_N if ONE_PART else 0)
                    async_load(desc, [first, left], full.index(stage), places.index(stage * GROUPS + group))
                stage, phase = next_slot(stage, phase, a_tiles.shape[0])


@gluon.jit
def _addend_places(ring, desc):
    """Where each slot of the ring holds a part of the addend for each group, of desc's block and layout: [slots * GROUPS, rows,
    columns], in the memory of its larger tile, which is as many bytes."""
    tiles = ring[1] if ring[1].shape[1] > ring[0].shape[1] else ring[0]
    ROWS: gl.constexpr = desc.block_shape[0]
    COLUMNS: gl.constexpr = desc.block_shape[1]
    return reinterpret(tiles, desc.dtype, [tiles.shape[0] * GROUPS, ROWS, COLUMNS], desc.layout)


@gluon.jit
def _multiply(
    GROUP: gl.constexpr, what, result, bias,
    SCALING: gl.constexpr, FAST: gl.constexpr, STACK: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """This group's rows of every tile: multiplied from the ring, scaled, added to what the ring brings behind, stored.

    They leave in two parts, each of one segment: an upper and a lower half, or, where a group multiplies 64 rows, a left and a right one.
    """
    ring, scales, scale_inv, size, addends = what
    M, N, K = size
    BLOCK_M: gl.constexpr = ring[0].shape[1]
    BLOCK_N: gl.constexpr = ring[1].shape[1]
    BLOCK_K: gl.constexpr = ring[0].shape[2]
    c_desc, c_tiles = result
    PART_M: gl.constexpr = c_tiles.shape[1]
    PART_N: gl.constexpr = c_tiles.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [GROUP_WARPS, 1], [16, BLOCK_N, 32])
    tiles_m, tiles_n, blocks = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N), gl.cdiv(K, BLOCK_K)
    BY_BLOCKS: gl.constexpr = len(scales) > 0
    ONE_PART: gl.constexpr = BLOCK_M == GROUPS * PART_M
    scale = None
    if SCALING == "tensor":
        scale = gl.load(scale_inv[0]) * gl.load(scale_inv[1])
    c_tile = c_tiles.index(GROUP)
    stage = 0
    phase = 0
    for index in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        row, column = tile_origin(index, tiles_m, tiles_n, BLOCK_M, BLOCK_N, GROUP_M)
        one = gl.zeros((PART_M, BLOCK_N), gl.float32, layout)
        two = gl.zeros((PART_M, BLOCK_N), gl.float32, layout)
        if BY_BLOCKS:
            b_scale_inv = scale_inv[1] + column // 128 * ((blocks + 3) // 4 * 4)
            one, two, stage, phase = accumulate_blocks(GROUP, ring, scales, b_scale_inv, stage, phase, blocks, one, two)
        elif STACK[0] == "K":
            for rank in gl.static_range(STACK[1]):
                first, last, next_scale = _ranked_segment(rank, scale_inv, K, STACK)
                if rank > 0:
                    ratio = gl.where(next_scale > 0.0, scale / next_scale, 0.0)
                    one *= ratio
                    two *= ratio
                scale = next_scale
                count = gl.cdiv(last - first, BLOCK_K)
                one, two, stage, phase = accumulate(GROUP, ring, stage, phase, count, one, two, FAST)
        else:
            one, two, stage, phase = accumulate(GROUP, ring, stage, phase, blocks, one, two, FAST)
        if ONE_PART:
            one, two = split_columns(one)
        row += GROUP * (BLOCK_M // GROUPS)
        next_row = row if ONE_PART else row + PART_M
        next_column = column + PART_N if ONE_PART else column
        next_scale = scale
        if STACK[0] == "M":
            scale = gl.load(scale_inv[0] + _segment_at(row, STACK)) * gl.load(scale_inv[1])
            next_scale = scale
        if STACK[0] == "N":
            scale = gl.load(scale_inv[0]) * gl.load(scale_inv[1] + _segment_at(column, STACK))
            next_scale = gl.load(scale_inv[0]) * gl.load(scale_inv[1] + _segment_at(next_column, STACK))
        if SCALING == "row":
            one = scaled_by_rows(one, scale_inv[0], scale_inv[1], row, column, M, N)
        one = _finished(one, scale, bias, column, N)
        if BY_BLOCKS and not ONE_PART:  # by then without a scale to load, and with the same bias
            two = _finished(two, scale, bias, column, N)
        if len(addends) > 0:
            one, stage, phase = _plus(GROUP, ring, addends[0], stage, phase, one)
        store(c_tile, c_desc, one, row, column)
        if SCALING == "row":
            two = scaled_by_rows(two, scale_inv[0], scale_inv[1], next_row, next_column, M, N)
        if ONE_PART or not BY_BLOCKS:
            two = _finished(two, next_scale, bias, next_column, N)
        if len(addends) > 0:
            two, stage, phase = _plus(GROUP, ring, addends[0], stage, phase, two)
        store(c_tile, c_desc, two, next_row, next_column)
    tma.store_wait(0)


@gluon.jit
def _segment_at(position, STACK: gl.constexpr):
    """The segment that holds a position; past the end, where a group's rows or columns may begin, the last one."""
    segment = (position >= STACK[2]).to(gl.int32)
    if STACK[1] == 3:
        segment += (position >= STACK[3]).to(gl.int32)
    return segment


@gluon.jit
def _ranked_segment(rank: gl.constexpr, scale_inv, K, STACK: gl.constexpr):
    """(first k, last k + 1, scale) of the segment of that rank by scale, the smallest first: see kernels/gemm/product.py."""
    EDGE_1: gl.constexpr = STACK[2]
    EDGE_2: gl.constexpr = STACK[3]
    one = gl.load(scale_inv[0]) * gl.load(scale_inv[1])
    two = gl.load(scale_inv[0] + 1) * gl.load(scale_inv[1] + 1)
    if STACK[1] == 2:
        two_first = two < one
        second: gl.constexpr = rank == 1
        is_two = two_first != second
        return gl.where(is_two, EDGE_1, 0), gl.where(is_two, K, EDGE_1), gl.where(is_two, two, one)
    else:
        three = gl.load(scale_inv[0] + 2) * gl.load(scale_inv[1] + 2)
        is_one = (two < one).to(gl.int32) + (three < one).to(gl.int32) == rank
        is_two = (one <= two).to(gl.int32) + (three < two).to(gl.int32) == rank
        first = gl.where(is_one, 0, gl.where(is_two, EDGE_1, EDGE_2))
        last = gl.where(is_one, EDGE_1, gl.where(is_two, EDGE_2, K))
        return first, last, gl.where(is_one, one, gl.where(is_two, two, three))


@gluon.jit
def _finished(total, scale, bias, column, N):
    """total, of sums that are scaled or * a tensor's scale, + bias[column :] in fp32: each with a rounding of its own."""
    if scale is not None:
        total = scaled(total, scale)
    if bias is not None:
        columns = column + gl.arange(0, total.shape[1], layout=gl.SliceLayout(0, total.type.layout))
        total += gl.load(bias + columns, mask=columns < N, other=0.0).to(gl.float32)[None, :]
    return total


@gluon.jit
def _plus(GROUP: gl.constexpr, ring, desc, stage, phase, value):
    """This group's part of C rounded to its dtype, and that of the addend, which is in the next slot: their sum in fp32."""
    a_tiles, _, full, empty = ring
    places = _addend_places(ring, desc)
    mbarrier.wait(full.index(stage), phase)
    addend = places.index(stage * GROUPS + GROUP).load(value.type.layout)
    # Without a fence nothing waits for these loads before the slot is given back, and the next copy may overwrite what is not read yet.
    hopper.fence_async_shared()
    mbarrier.arrive(empty.index(stage))
    stage, phase = next_slot(stage, phase, a_tiles.shape[0])
    return value.to(desc.dtype).to(gl.float32) + addend.to(gl.float32), stage, phase
