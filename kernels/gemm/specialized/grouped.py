"""The wgrad of kernels/gemm/grouped_product.py for large experts on Hopper, by warps that each do one thing.

    C[g, N, K] = round((A[N, m] @ B[K, m]^T) * (a_scale_inv * b_scale_inv))        sum over the m of group g

With a scale a row, by a_scale_inv[g, n], then by b_scale_inv[g, k], each product rounded.

As in product.py one warp copies and two groups of warps multiply, but two more warps stand between them: a group's blocks
begin at the last multiple of 16 before it, and of its first and its last block they replace by zero, in shared memory, what is its
neighbours'. They and the copies run ahead of the products, over the borders of tiles and groups: nothing waits at the start of a
group, where the kernel of grouped.py does three times a tile. Bit for bit an ungrouped product of each group's blocks.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from te_dynamo.kernels.gemm.specialized.ring import (
    COPY_REGISTERS,
    GROUP_WARPS,
    GROUPS,
    make_result,
    make_ring,
    next_slot,
    split_columns,
    store,
    tile_origin,
)
from te_dynamo.kernels.gemm.specialized.sums import accumulate, scaled, scaled_by_rows
from te_dynamo.kernels.gemm.tiles import specialized_tile, stages_that_fit
from te_dynamo.kernels.runtime._gluon import async_load, gl, gluon, hopper, mbarrier, reinterpret, tma
from te_dynamo.kernels.runtime.launch import launch_prepared
from te_dynamo.kernels.runtime.margin import gemm_multiprocessors
from te_dynamo.kernels.runtime.prepared import Prepared

_MASK_WARPS = gl.constexpr(2)
_MASK_ROWS = gl.constexpr(32)  # of a tile in registers at once
_MASK_REGISTERS = gl.constexpr(80)
_MULTIPLY_REGISTERS = gl.constexpr(216)


def columns_specialized_out(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    offs: torch.Tensor,
    fast: bool,
    *,
    scaling: str = "tensor",
    out: torch.Tensor,
) -> None:
    """Writes `gemm_grouped_columns`'s C to out [G, N, K]; N a multiple of 64, K of 8; scaling: "tensor" or "row". Checks nothing."""
    (n, m), k, groups = a.shape, b.shape[0], offs.shape[0]
    arguments = (a, a_scale_inv, b, b_scale_inv, offs, out, m, n, k, groups)
    launch_prepared(_prepared(out.element_size(), fast, scaling), (gemm_multiprocessors(a.device),), *arguments)


@functools.cache
def _prepared(*form: Any) -> Prepared:
    return Prepared(gemm_grouped_columns_specialized_kernel, columns_specialized_options(*form))


def columns_specialized_options(out_bytes: int, fast: bool, scaling: str = "tensor") -> dict[str, Any]:
    """The constant arguments and compile options of the kernel for a C of elements of `out_bytes`."""
    tile = specialized_tile(fast)
    return {
        "SCALING": scaling,
        "FAST": fast,
        "STAGES": stages_that_fit(tile, out_bytes),
        **tile.constants(),
        "num_warps": GROUP_WARPS.value,
    }


@gluon.jit
def gemm_grouped_columns_specialized_kernel(
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
    SCALING: gl.constexpr,
    FAST: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    """C [G, N, K] from a [N, M] and b [K, M]; a tile is BLOCK_M of N by BLOCK_N of K, its sum goes over M by BLOCK_K."""
    # Of each slot: "the tiles have arrived, and somebody has to mask them before they are full".
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(loaded.index(stage), count=1)
    descs, ring = make_ring(a, b, N, K, M, STAGES, BLOCK_M, BLOCK_N, BLOCK_K)
    PART_M: gl.constexpr = BLOCK_M // GROUPS if FAST else BLOCK_M // (2 * GROUPS)
    PART_N: gl.constexpr = BLOCK_N // 2 if FAST else BLOCK_N
    result = make_result(c, G * N, K, PART_M, PART_N)
    size = (M, N, K, G)
    gl.warp_specialize(
        [
            (_multiply, (gl.constexpr(0), ring, a_scale_inv, b_scale_inv, offs, result, size, SCALING, FAST, GROUP_M)),
            (_multiply, (gl.constexpr(1), ring, a_scale_inv, b_scale_inv, offs, result, size, SCALING, FAST, GROUP_M)),
            (_mask, (ring, loaded, offs, size)),
            (_copy, (descs, ring, loaded, offs, size, GROUP_M)),
        ],
        [GROUP_WARPS, _MASK_WARPS, 1],
        [_MULTIPLY_REGISTERS, _MASK_REGISTERS, COPY_REGISTERS],
    )


@gluon.jit
def _group_blocks(offs, group, M, BLOCK_K: gl.constexpr):
    """(start, end, first k, number of blocks) of a group: its blocks begin at the last multiple of 16 before it."""
    before = gl.where(group > 0, gl.load(offs + gl.maximum(group - 1, 0)), 0)
    start = gl.minimum(gl.maximum(before, 0), M)
    end = gl.maximum(gl.minimum(gl.maximum(gl.load(offs + group), 0), M), start)
    first = gl.where(start < end, start // 16 * 16, end)
    return start, end, first, gl.cdiv(end - first, BLOCK_K)


@gluon.jit
def _copy(descs, ring, loaded, offs, size, GROUP_M: gl.constexpr):
    """Fills the ring with the blocks of this program's tiles; one with columns of other groups goes to the masking warps first."""
    a_desc, b_desc = descs
    a_tiles, b_tiles, full, empty = ring
    M, N, K, G = size
    BLOCK_M: gl.constexpr = a_tiles.shape[1]
    BLOCK_N: gl.constexpr = b_tiles.shape[1]
    BLOCK_K: gl.constexpr = a_tiles.shape[2]
    tiles_m, tiles_n = gl.cdiv(N, BLOCK_M), gl.cdiv(K, BLOCK_N)
    stage = 0
    phase = 1  # a wait for the phase before the first passes: every slot begins empty
    for index in range(gl.program_id(0), G * tiles_m * tiles_n, gl.num_programs(0)):
        start, end, first, blocks = _group_blocks(offs, index // (tiles_m * tiles_n), M, BLOCK_K)
        row, column = tile_origin(index % (tiles_m * tiles_n), tiles_m, tiles_n, BLOCK_M, BLOCK_N, GROUP_M)
        for block in range(blocks):
            k = first + block * BLOCK_K
            mbarrier.wait(empty.index(stage), phase)
            if (k < start) | (k + BLOCK_K > end):
                mbarrier.expect(loaded.index(stage), (BLOCK_M + BLOCK_N) * BLOCK_K)
                async_load(a_desc, [row, k], loaded.index(stage), a_tiles.index(stage))
                async_load(b_desc, [column, k], loaded.index(stage), b_tiles.index(stage))
            else:
                mbarrier.expect(full.index(stage), (BLOCK_M + BLOCK_N) * BLOCK_K)
                async_load(a_desc, [row, k], full.index(stage), a_tiles.index(stage))
                async_load(b_desc, [column, k], full.index(stage), b_tiles.index(stage))
            stage, phase = next_slot(stage, phase, a_tiles.shape[0])


@gluon.jit
def _mask(ring, loaded, offs, size):
    """Replaces by zero, in every tile's first and last block, the columns of other groups."""
    a_tiles, b_tiles, full, _ = ring
    M, N, K, G = size
    BLOCK_M: gl.constexpr = a_tiles.shape[1]
    BLOCK_N: gl.constexpr = b_tiles.shape[1]
    BLOCK_K: gl.constexpr = a_tiles.shape[2]
    STAGES: gl.constexpr = a_tiles.shape[0]
    tiles = gl.cdiv(N, BLOCK_M) * gl.cdiv(K, BLOCK_N)
    slot = 0  # of a tile's first block
    phases = 0  # of `loaded`, a bit a slot: it completes only where a block was masked
    for index in range(gl.program_id(0), G * tiles, gl.num_programs(0)):
        start, end, first, blocks = _group_blocks(offs, index // tiles, M, BLOCK_K)
        for edge in range(gl.minimum(blocks, 2)):
            block = edge * (blocks - 1)
            k = first + block * BLOCK_K
            if (k < start) | (k + BLOCK_K > end):
                stage = (slot + block) % STAGES
                mbarrier.wait(loaded.index(stage), (phases >> stage) & 1)
                _keep_columns(a_tiles.index(stage), start - k, end - k)
                _keep_columns(b_tiles.index(stage), start - k, end - k)
                hopper.fence_async_shared()
                mbarrier.arrive(full.index(stage), count=1)
                phases = phases ^ (1 << stage)
        slot = (slot + blocks) % STAGES


@gluon.jit
def _keep_columns(tile, first, end):
    """Zero in the columns of a tile [rows, BLOCK_K] of bytes in shared memory that are not first..end, word by word."""
    ROWS: gl.constexpr = tile.shape[0]
    WORDS: gl.constexpr = tile.shape[1] // 4
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [_MASK_WARPS, 1], [1, 0])
    words = reinterpret(tile, gl.int32, [ROWS, WORDS], shared)
    places = 4 * gl.arange(0, WORDS, layout=gl.SliceLayout(0, layout))
    kept = _low_bytes(end - places) & ~_low_bytes(first - places)
    for part in gl.static_range(ROWS // _MASK_ROWS):
        rows = words.slice(part * _MASK_ROWS, _MASK_ROWS)
        rows.store(rows.load(layout) & kept[None, :])


@gluon.jit
def _low_bytes(count):
    """A word whose lowest `count` bytes are ones: none below 0, all from 4 on."""
    inside = gl.minimum(gl.maximum(count, 0), 3)
    return gl.where(count >= 4, -1, (1 << (8 * inside)) - 1)


@gluon.jit
def _multiply(
    GROUP: gl.constexpr, ring, a_scale_inv, b_scale_inv, offs, result, size,
    SCALING: gl.constexpr, FAST: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """This group of warps' rows of every tile: multiplied from the ring, scaled, stored in two parts as in product.py."""
    c_desc, c_tiles = result
    M, N, K, G = size
    BLOCK_M: gl.constexpr = ring[0].shape[1]
    BLOCK_N: gl.constexpr = ring[1].shape[1]
    BLOCK_K: gl.constexpr = ring[0].shape[2]
    PART_M: gl.constexpr = c_tiles.shape[1]
    PART_N: gl.constexpr = c_tiles.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [GROUP_WARPS, 1], [16, BLOCK_N, 32])
    tiles_m, tiles_n = gl.cdiv(N, BLOCK_M), gl.cdiv(K, BLOCK_N)
    if SCALING == "tensor":
        scale = gl.load(a_scale_inv) * gl.load(b_scale_inv)
    c_tile = c_tiles.index(GROUP)
    stage = 0
    phase = 0
    for index in range(gl.program_id(0), G * tiles_m * tiles_n, gl.num_programs(0)):
        group = index // (tiles_m * tiles_n)
        _, _, _, blocks = _group_blocks(offs, group, M, BLOCK_K)
        one = gl.zeros((PART_M, BLOCK_N), gl.float32, layout)
        two = gl.zeros((PART_M, BLOCK_N), gl.float32, layout)
        one, two, stage, phase = accumulate(GROUP, ring, stage, phase, blocks, one, two, FAST)
        if FAST:
            one, two = split_columns(one)
        row, column = tile_origin(index % (tiles_m * tiles_n), tiles_m, tiles_n, BLOCK_M, BLOCK_N, GROUP_M)
        row += GROUP * (BLOCK_M // GROUPS)
        next_row = row if FAST else row + PART_M
        next_column = column + PART_N if FAST else column
        # N is a multiple of PART_M: a part is all inside its group's rows of C, or none of it.
        a_scales, b_scales = a_scale_inv + group * N, b_scale_inv + group * K
        if row < N:
            if SCALING == "tensor":
                one = scaled(one, scale)
            else:
                one = scaled_by_rows(one, a_scales, b_scales, row, column, N, K)
            store(c_tile, c_desc, one, group * N + row, column)
        if next_row < N:
            if SCALING == "tensor":
                two = scaled(two, scale)
            else:
                two = scaled_by_rows(two, a_scales, b_scales, next_row, next_column, N, K)
            store(c_tile, c_desc, two, group * N + next_row, next_column)
    tma.store_wait(0)
