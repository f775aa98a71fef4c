"""The FP8 GEMM of kernels/gemm.py for large products on Hopper, by warps that each do one thing.

One warp copies tiles of A and B into a ring in shared memory; two groups of four warps multiply, the upper and the lower
half of the SPECIALIZED. The groups wait for the copies only, never for each other: with slow accumulation one adds while the other
multiplies, which one program whose warps all run the same code cannot do. It is written in Gluon, and equals the other kernel
bit for bit.

Of operands stacked along K (kernels/gemm_stacked.py) it also runs the product with fast accumulation: its copies go on
while the sum is rescaled at the border of two segments.

Inductor writes launches of Triton-language kernels only; lowering/extern_gemm.py makes its code call `gemm_specialized_out`.
A call costs the CPU more than such a launch does, so `gemm_tiles.specialized_tile` takes this kernel for large products only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from te_dynamo.kernels._gluon import async_load, async_store, gl, gluon, hopper, mbarrier, tma
from te_dynamo.kernels.gemm_tiles import (
    SPECIALIZED,
    specialized_is_faster,
    specialized_stages,
    stacked_is_specialized,
)
from te_dynamo.kernels.launch import is_hopper, launch, multiprocessor_count, size_hint
from te_dynamo.kernels.stacking import NOT_STACKED, Stacking

__all__ = [
    "gemm_specialized_out",
    "runs_specialized",
    "specialized_options",
    "stacked_runs_specialized",
    "stacked_specialized_out",
]

GROUPS = gl.constexpr(2)  # of warps that multiply
_GROUP_WARPS = gl.constexpr(4)
_GROUP_REGISTERS = gl.constexpr(240)
_COPY_REGISTERS = gl.constexpr(24)


def runs_specialized(a: torch.Tensor, b: torch.Tensor, fast_accum: bool) -> bool:
    """Whether this kernel runs a [M, K] by b [N, K]: on this device, and faster than kernels/gemm.py's own."""
    m, k, n = size_hint(a.shape[0]), size_hint(a.shape[1]), size_hint(b.shape[0])
    return is_hopper(a.device) and specialized_is_faster(m, n, k, fast_accum, multiprocessor_count(a.device))


def stacked_runs_specialized(a: torch.Tensor, b: torch.Tensor, fast_accum: bool, along: str) -> bool:
    """The same of operands stacked along a dimension."""
    m, k, n = size_hint(a.shape[0]), size_hint(a.shape[1]), size_hint(b.shape[0])
    multiprocessors = multiprocessor_count(a.device)
    return is_hopper(a.device) and stacked_is_specialized(m, n, k, fast_accum, along, multiprocessors)


def gemm_specialized_out(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    fast: bool = False,
    stacking: Stacking = NOT_STACKED,
    out: torch.Tensor,
) -> None:
    """Writes `kernels.gemm.gemm`'s C of a [M, K] and b [N, K] to out [M, N]; N a multiple of 8.

    fast: by fast accumulation. stacking: of operands as `kernels.gemm_stacked.gemm_stacked` takes them. Checks nothing.
    """
    m, k, n = a.shape[0], a.shape[1], b.shape[0]
    bias_or_any = a_scale_inv if bias is None else bias
    options = specialized_options(bias is not None, out.element_size(), fast, stacking)
    programs = multiprocessor_count(a.device)
    launch(gemm_specialized_kernel, (programs,), a, a_scale_inv, b, b_scale_inv, bias_or_any, out, m, n, k, **options)


def stacked_specialized_out(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    fast: bool,
    along: str,
    segments: Sequence[int],
    *,
    out: torch.Tensor,
) -> None:
    """Writes `kernels.gemm_stacked.gemm_stacked`'s C to out [M, N], N a multiple of 8. Checks nothing."""
    stacking = Stacking(along, tuple(segments))
    gemm_specialized_out(a, a_scale_inv, b, b_scale_inv, fast=fast, stacking=stacking, out=out)


def specialized_options(
    has_bias: bool, out_bytes: int, fast: bool = False, stacking: Stacking = NOT_STACKED
) -> dict[str, Any]:
    """The constant arguments and compile options of the kernel for a C of elements of `out_bytes`."""
    return {
        "HAS_BIAS": has_bias,
        "FAST": fast,
        **stacking.constants(),
        "STAGES": specialized_stages(out_bytes),
        "BLOCK_M": SPECIALIZED.block_m,
        "BLOCK_N": SPECIALIZED.block_n,
        "BLOCK_K": SPECIALIZED.block_k,
        "GROUP_M": SPECIALIZED.group_m,
        "num_warps": _GROUP_WARPS.value,
    }


@gluon.jit
def gemm_specialized_kernel(
    a,
    a_scale_inv,
    b,
    b_scale_inv,
    bias,
    c,
    M,
    N,
    K,
    HAS_BIAS: gl.constexpr,
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
    """C [M, N] from a [M, K] and b [N, K]; see kernels/gemm.py for the equation."""
    PART_M: gl.constexpr = BLOCK_M // (2 * GROUPS)
    operand: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    result: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=c.dtype.element_ty.primitive_bitwidth, rank=2
    )
    a_desc = tma.make_tensor_descriptor(a, [M, K], [K, 1], [BLOCK_M, BLOCK_K], operand)
    b_desc = tma.make_tensor_descriptor(b, [N, K], [K, 1], [BLOCK_N, BLOCK_K], operand)
    c_desc = tma.make_tensor_descriptor(c, [M, N], [N, 1], [PART_M, BLOCK_N], result)
    a_tiles = gl.allocate_shared_memory(a.dtype.element_ty, [STAGES, BLOCK_M, BLOCK_K], operand)
    b_tiles = gl.allocate_shared_memory(b.dtype.element_ty, [STAGES, BLOCK_N, BLOCK_K], operand)
    c_tiles = gl.allocate_shared_memory(c.dtype.element_ty, [GROUPS, PART_M, BLOCK_N], result)
    # Of each slot of the ring: "its tiles have arrived" and "every group has read them".
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    hopper.fence_async_shared()
    ring = (a_tiles, b_tiles, full, empty)
    scales = (a_scale_inv, b_scale_inv)
    result_of = (c_tiles, c_desc, bias)
    size = (M, N, K)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    gl.constexpr(0),
                    ring,
                    scales,
                    result_of,
                    size,
                    HAS_BIAS,
                    FAST,
                    STACKED,
                    SEGMENTS,
                    EDGE_1,
                    EDGE_2,
                    BLOCK_M,
                    BLOCK_N,
                    BLOCK_K,
                    GROUP_M,
                ),
            ),
            (
                _multiply,
                (
                    gl.constexpr(1),
                    ring,
                    scales,
                    result_of,
                    size,
                    HAS_BIAS,
                    FAST,
                    STACKED,
                    SEGMENTS,
                    EDGE_1,
                    EDGE_2,
                    BLOCK_M,
                    BLOCK_N,
                    BLOCK_K,
                    GROUP_M,
                ),
            ),
            (
                _copy,
                (
                    a_desc,
                    b_desc,
                    ring,
                    scales,
                    size,
                    STACKED,
                    SEGMENTS,
                    EDGE_1,
                    EDGE_2,
                    BLOCK_M,
                    BLOCK_N,
                    BLOCK_K,
                    GROUP_M,
                ),
            ),
        ],
        [_GROUP_WARPS, 1],
        [_GROUP_REGISTERS, _COPY_REGISTERS],
    )


@gluon.jit
def _copy(
    a_desc,
    b_desc,
    ring,
    scales,
    size,
    STACKED: gl.constexpr,
    SEGMENTS: gl.constexpr,
    EDGE_1: gl.constexpr,
    EDGE_2: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    """Fills the ring with this program's tiles, block of K by block of K, as far ahead as it has slots."""
    M, N, K = size
    tiles_m, tiles_n = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N)
    stage = 0
    phase = 1  # a wait for the phase before the first passes: every slot begins empty
    for index in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        row, column = _tile_origin(index, tiles_m, tiles_n, BLOCK_M, BLOCK_N, GROUP_M)
        if STACKED == "K":
            for rank in gl.static_range(SEGMENTS):
                first, last, _ = _ranked_segment(rank, scales, K, SEGMENTS, EDGE_1, EDGE_2)
                stage, phase = _fill(
                    a_desc, b_desc, ring, stage, phase, row, column, first, last, BLOCK_M, BLOCK_N, BLOCK_K
                )
        else:
            stage, phase = _fill(a_desc, b_desc, ring, stage, phase, row, column, 0, K, BLOCK_M, BLOCK_N, BLOCK_K)


@gluon.jit
def _fill(
    a_desc,
    b_desc,
    ring,
    stage,
    phase,
    row,
    column,
    first,
    last,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
):
    """Copies the blocks of one tile from k = `first` up to `last`; returns the next slot."""
    a_tiles, b_tiles, full, empty = ring
    for block in range(gl.cdiv(last - first, BLOCK_K)):
        k = first + block * BLOCK_K
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(full.index(stage), (BLOCK_M + BLOCK_N) * BLOCK_K)
        async_load(a_desc, [row, k], full.index(stage), a_tiles.index(stage))
        async_load(b_desc, [column, k], full.index(stage), b_tiles.index(stage))
        stage, phase = _next_slot(stage, phase, a_tiles.shape[0])
    return stage, phase


@gluon.jit
def _multiply(
    GROUP: gl.constexpr,
    ring,
    scales,
    result_of,
    size,
    HAS_BIAS: gl.constexpr,
    FAST: gl.constexpr,
    STACKED: gl.constexpr,
    SEGMENTS: gl.constexpr,
    EDGE_1: gl.constexpr,
    EDGE_2: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    """This group's rows of every tile: multiplied from the ring, scaled, stored."""
    PART_M: gl.constexpr = BLOCK_M // (2 * GROUPS)
    c_tiles, c_desc, bias = result_of
    M, N, K = size
    tiles_m, tiles_n, blocks = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N), gl.cdiv(K, BLOCK_K)
    scale = gl.load(scales[0]) * gl.load(scales[1])
    c_tile = c_tiles.index(GROUP)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_GROUP_WARPS, 1], [16, BLOCK_N, 32])
    stage = 0
    phase = 0
    for index in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        row, column = _tile_origin(index, tiles_m, tiles_n, BLOCK_M, BLOCK_N, GROUP_M)
        upper = gl.zeros((PART_M, BLOCK_N), gl.float32, layout)
        lower = gl.zeros((PART_M, BLOCK_N), gl.float32, layout)
        if STACKED == "K":
            for rank in gl.static_range(SEGMENTS):
                first, last, next_scale = _ranked_segment(rank, scales, K, SEGMENTS, EDGE_1, EDGE_2)
                if rank > 0:
                    ratio = gl.where(next_scale > 0.0, scale / next_scale, 0.0)
                    upper *= ratio
                    lower *= ratio
                scale = next_scale
                count = gl.cdiv(last - first, BLOCK_K)
                upper, lower, stage, phase = _sum(GROUP, ring, stage, phase, count, upper, lower, FAST)
        else:
            upper, lower, stage, phase = _sum(GROUP, ring, stage, phase, blocks, upper, lower, FAST)
        row += GROUP * 2 * PART_M
        if STACKED == "M":
            scale = gl.load(scales[0] + _segment_at(row, EDGE_1, EDGE_2)) * gl.load(scales[1])
        if STACKED == "N":
            scale = gl.load(scales[0]) * gl.load(scales[1] + _segment_at(column, EDGE_1, EDGE_2))
        _store(c_tile, c_desc, _scale_and_shift(upper, scale, bias, column, N, HAS_BIAS), row, column)
        _store(c_tile, c_desc, _scale_and_shift(lower, scale, bias, column, N, HAS_BIAS), row + PART_M, column)
    tma.store_wait(0)


@gluon.jit
def _sum(GROUP: gl.constexpr, ring, stage, phase, blocks, upper, lower, FAST: gl.constexpr):
    """The two halves' sums, begun in `upper` and `lower`, over the next blocks of K.

    What the tensor core makes of each block is added in fp32, or with FAST by the tensor core itself.
    """
    a_tiles, b_tiles, full, empty = ring
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_GROUP_WARPS, 1], [16, upper.shape[1], 32])
    nothing = gl.zeros((upper.shape[0], upper.shape[1]), gl.float32, layout)
    for _ in range(blocks):
        mbarrier.wait(full.index(stage), phase)
        x_upper, x_lower, y = _operands(GROUP, a_tiles, b_tiles, stage, upper.shape[0])
        if FAST:
            one = hopper.warpgroup_mma(x_upper, y, upper, is_async=True)
            two = hopper.warpgroup_mma(x_lower, y, lower, is_async=True)
            upper, lower = hopper.warpgroup_mma_wait(0, deps=[one, two])
            mbarrier.arrive(empty.index(stage))
        else:
            term = hopper.warpgroup_mma(x_upper, y, nothing, use_acc=False, is_async=True)
            upper += hopper.warpgroup_mma_wait(0, deps=[term])
            term = hopper.warpgroup_mma(x_lower, y, nothing, use_acc=False, is_async=True)
            term = hopper.warpgroup_mma_wait(0, deps=[term])
            mbarrier.arrive(empty.index(stage))
            lower += term
        stage, phase = _next_slot(stage, phase, a_tiles.shape[0])
    return upper, lower, stage, phase


@gluon.jit
def _segment_at(position, EDGE_1: gl.constexpr, EDGE_2: gl.constexpr):
    """The segment that holds a position."""
    return (position >= EDGE_1).to(gl.int32) + (position >= EDGE_2).to(gl.int32)


@gluon.jit
def _ranked_segment(rank: gl.constexpr, scales, K, SEGMENTS: gl.constexpr, EDGE_1: gl.constexpr, EDGE_2: gl.constexpr):
    """(first k, last k + 1, scale) of the segment of that rank by scale, the smallest first: see kernels/gemm_stacked.py."""
    one = gl.load(scales[0]) * gl.load(scales[1])
    two = gl.load(scales[0] + 1) * gl.load(scales[1] + 1)
    if SEGMENTS == 2:
        two_first = two < one
        second: gl.constexpr = rank == 1
        is_two = two_first != second
        return gl.where(is_two, EDGE_1, 0), gl.where(is_two, K, EDGE_1), gl.where(is_two, two, one)
    else:
        three = gl.load(scales[0] + 2) * gl.load(scales[1] + 2)
        is_one = (two < one).to(gl.int32) + (three < one).to(gl.int32) == rank
        is_two = (one <= two).to(gl.int32) + (three < two).to(gl.int32) == rank
        first = gl.where(is_one, 0, gl.where(is_two, EDGE_1, EDGE_2))
        last = gl.where(is_one, EDGE_1, gl.where(is_two, EDGE_2, K))
        return first, last, gl.where(is_one, one, gl.where(is_two, two, three))


@gluon.jit
def _operands(GROUP: gl.constexpr, a_tiles, b_tiles, stage, PART_M: gl.constexpr):
    """The upper and the lower half of this group's rows of A, and B transposed, in one slot of the ring."""
    x = a_tiles.index(stage)
    first: gl.constexpr = GROUP * 2 * PART_M
    return x.slice(first, PART_M), x.slice(first + PART_M, PART_M), b_tiles.index(stage).permute((1, 0))


@gluon.jit
def _next_slot(stage, phase, STAGES: gl.constexpr):
    stage += 1
    wraps = stage == STAGES
    return gl.where(wraps, 0, stage), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def _tile_origin(index, tiles_m, tiles_n, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr):
    """(first row, first column) of a tile; GROUP_M rows of tiles are walked together, column by column."""
    group = index // (GROUP_M * tiles_n)
    rows_in_group = gl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    row = (group * GROUP_M + index % rows_in_group) * BLOCK_M
    return row, (index % (GROUP_M * tiles_n)) // rows_in_group * BLOCK_N


@gluon.jit
def _scale_and_shift(total, scale, bias, column, N, HAS_BIAS: gl.constexpr):
    """total * scale + bias with two roundings: mul.rn is never contracted with the addition."""
    value = gl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=f,f,f", [total, scale], dtype=gl.float32, is_pure=True, pack=1
    )
    if HAS_BIAS:
        columns = column + gl.arange(0, total.shape[1], layout=gl.SliceLayout(0, total.type.layout))
        value += gl.load(bias + columns, mask=columns < N, other=0.0).to(gl.float32)[None, :]
    return value


@gluon.jit
def _store(c_tile, c_desc, value, row, column):
    """Rounds to C's dtype and stores through shared memory; the last store must have read it first."""
    tma.store_wait(0)
    c_tile.store(value.to(c_desc.dtype))
    hopper.fence_async_shared()
    async_store(c_desc, [row, column], c_tile)
