"""The block-scaled FP8 GEMM of kernels/gemm/product.py for large products on Hopper, by warps that each do one thing.

As kernels/gemm/specialized/current.py (in Gluon; what both are made of is in ring.py), with scales: the copying warp brings those of
a tile's 256 rows, and of its 128 columns where B has one a row, with each block of 128 k. B's one scale for 128x128 is loaded a
block ahead. Equals the other kernel bit for bit: the scales' product is rounded, and scales and adds in one rounding.

E8M0 codes are written as fp32 scales in the layout of Float8 block scaling first: 4 bytes for 128, a hundredth of the product's time.
"""

from __future__ import annotations

import functools

import torch

from te_dynamo.kernels.gemm.specialized.ring import (
    COPY_REGISTERS,
    GROUP_REGISTERS,
    GROUP_WARPS,
    GROUPS,
    add_bias,
    copy,
    make_result,
    make_ring,
    next_slot,
    operands,
    store,
    tile_origin,
)
from te_dynamo.kernels.gemm.tiles import SPECIALIZED_BLOCK, stages_that_fit
from te_dynamo.kernels.layouts import block as layout
from te_dynamo.kernels.runtime._gluon import gl, gluon, hopper, mbarrier, tma
from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.runtime.launch import launch, launch_prepared
from te_dynamo.kernels.runtime.margin import gemm_multiprocessors
from te_dynamo.kernels.runtime.prepared import Prepared
from te_dynamo.kernels.tiles.blocks import decode_e8m0

_DECODE_ROWS = 128
_DECODE_BLOCKS = 8


def gemm_block_specialized_out(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    b_two_d: bool,
    out: torch.Tensor,
) -> None:
    """Writes `kernels/gemm/product.py`'s C of a [M, K], which is 1D, and b [N, K] to out [M, N]; N a multiple of 8.

    Checks nothing.
    """
    (m, k), n = a.shape, b.shape[0]
    if a_scale_inv.dtype == torch.uint8:
        a_scale_inv, b_scale_inv = _decode(a_scale_inv, m), _decode(b_scale_inv, n)
    prepared = _prepared(bias is not None, b_two_d, out.element_size())
    arguments = (a, a_scale_inv, b, b_scale_inv, a_scale_inv if bias is None else bias, out, m, n, k)
    launch_prepared(prepared, (gemm_multiprocessors(a.device),), *arguments)


@functools.cache
def _prepared(has_bias: bool, b_two_d: bool, out_bytes: int) -> Prepared:
    return Prepared(gemm_block_specialized_kernel, specialized_block_options(has_bias, b_two_d, out_bytes))


def specialized_block_options(has_bias: bool, b_two_d: bool, out_bytes: int) -> dict[str, int]:
    """The constant arguments and compile options of the kernel for a C of elements of `out_bytes`."""
    return {
        "HAS_BIAS": has_bias,
        "B_TWO_D": b_two_d,
        "STAGES": stages_that_fit(SPECIALIZED_BLOCK, out_bytes),
        "BLOCK_M": SPECIALIZED_BLOCK.block_m,
        "BLOCK_N": SPECIALIZED_BLOCK.block_n,
        "GROUP_M": SPECIALIZED_BLOCK.group_m,
        "num_warps": GROUP_WARPS.value,
    }


@gluon.jit
def gemm_block_specialized_kernel(
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
    B_TWO_D: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    """C [M, N] from a [M, K] and b [N, K]; see kernels/gemm/product.py for the equation."""
    descs, ring = make_ring(a, b, M, N, K, STAGES, BLOCK_M, BLOCK_N, 128)
    result_of = make_result(c, M, N, BLOCK_M // (2 * GROUPS), BLOCK_N // 2)
    a_scales = _make_scales(a_scale_inv, M, K, STAGES, BLOCK_M)
    scales = (a_scales,) if B_TWO_D else (a_scales, _make_scales(b_scale_inv, N, K, STAGES, BLOCK_N))
    size = (M, N, K)
    gl.warp_specialize(
        [
            (
                _multiply,
                (gl.constexpr(0), ring, scales, b_scale_inv, result_of, bias, size, HAS_BIAS, B_TWO_D, GROUP_M),
            ),
            (
                _multiply,
                (gl.constexpr(1), ring, scales, b_scale_inv, result_of, bias, size, HAS_BIAS, B_TWO_D, GROUP_M),
            ),
            (copy, (descs, ring, scales, size, GROUP_M)),
        ],
        [GROUP_WARPS, 1],
        [GROUP_REGISTERS, COPY_REGISTERS],
    )


@gluon.jit
def _make_scales(scale_inv, ROWS, K, STAGES: gl.constexpr, BLOCK: gl.constexpr):
    """What `copy` needs of scales [ceil(K/128), ROWS^4]. Past the last row it reads those of the next block of K, which
    scale zeros that are not stored."""
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    stride = (ROWS + 3) // 4 * 4
    desc = tma.make_tensor_descriptor(scale_inv, [gl.cdiv(K, 128) * stride], [1], [BLOCK], layout)
    return desc, stride, gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], layout)


@gluon.jit
def _multiply(
    GROUP: gl.constexpr,
    ring,
    scales,
    b_scale_inv,
    result_of,
    bias,
    size,
    HAS_BIAS: gl.constexpr,
    B_TWO_D: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    """This group's rows of every tile: multiplied from the ring, scaled and added block by block, stored."""
    BLOCK_M: gl.constexpr = ring[0].shape[1]
    BLOCK_N: gl.constexpr = ring[1].shape[1]
    PART_M: gl.constexpr = BLOCK_M // (2 * GROUPS)
    c_desc, c_tiles = result_of
    M, N, K = size
    tiles_m, tiles_n, blocks = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N), gl.cdiv(K, 128)
    c_tile = c_tiles.index(GROUP)
    stage = 0
    phase = 0
    for index in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        row, column = tile_origin(index, tiles_m, tiles_n, BLOCK_M, BLOCK_N, GROUP_M)
        b_scale_of_tile = b_scale_inv + column // 128 * ((blocks + 3) // 4 * 4)
        upper, lower, stage, phase = _sum(GROUP, ring, scales, b_scale_of_tile, stage, phase, blocks, B_TWO_D)
        row += GROUP * 2 * PART_M
        if HAS_BIAS:
            upper = add_bias(upper, bias, column, N)
            lower = add_bias(lower, bias, column, N)
        store(c_tile, c_desc, upper, row, column)
        store(c_tile, c_desc, lower, row + PART_M, column)
    tma.store_wait(0)


@gluon.jit
def _sum(GROUP: gl.constexpr, ring, scales, b_scale_of_tile, stage, phase, blocks, B_TWO_D: gl.constexpr):
    """The two halves' sums over K: what the tensor core makes of each block is scaled and added in fp32."""
    a_tiles, b_tiles, full, empty = ring
    PART_M: gl.constexpr = a_tiles.shape[1] // (2 * GROUPS)
    BLOCK_N: gl.constexpr = b_tiles.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [GROUP_WARPS, 1], [16, BLOCK_N, 32])
    first: gl.constexpr = GROUP * 2 * PART_M
    upper = gl.zeros((PART_M, BLOCK_N), gl.float32, layout)
    lower = gl.zeros((PART_M, BLOCK_N), gl.float32, layout)
    # Every product overwrites the terms of the one before: were its target its own, ptxas would start it before those are
    # added, and two sets of terms beside two halves of sums do not fit in the registers. `never` is false, unknown to it.
    terms = gl.zeros((PART_M, BLOCK_N), gl.float32, layout)
    never = blocks < 0
    if B_TWO_D:
        b_next = gl.load(b_scale_of_tile)
    for block in range(blocks):
        if B_TWO_D:
            b_scale = b_next
            b_next = gl.load(b_scale_of_tile + gl.minimum(block + 1, blocks - 1))
        mbarrier.wait(full.index(stage), phase)
        x_upper, x_lower, y = operands(GROUP, a_tiles, b_tiles, stage)
        terms = hopper.warpgroup_mma(x_upper, y, terms, use_acc=never, is_async=True)
        a_scales = scales[0][2].index(stage)
        upper_scale = a_scales.slice(first, PART_M).load(gl.SliceLayout(1, layout))
        lower_scale = a_scales.slice(first + PART_M, PART_M).load(gl.SliceLayout(1, layout))
        if not B_TWO_D:
            b_scale = scales[1][2].index(stage).load(gl.SliceLayout(0, layout))
        terms = hopper.warpgroup_mma_wait(0, deps=[terms])
        upper = _add_scaled(terms, upper_scale, b_scale, upper, B_TWO_D)
        upper = hopper.warpgroup_mma_wait(0, deps=[upper])
        terms = hopper.warpgroup_mma(x_lower, y, terms, use_acc=never, is_async=True)
        terms = hopper.warpgroup_mma_wait(0, deps=[terms])
        mbarrier.arrive(empty.index(stage))
        lower = _add_scaled(terms, lower_scale, b_scale, lower, B_TWO_D)
        stage, phase = next_slot(stage, phase, a_tiles.shape[0])
    return upper, lower, stage, phase


@gluon.jit
def _add_scaled(terms, a_scale, b_scale, total, B_TWO_D: gl.constexpr):
    """total + terms * (a_scale * b_scale), one rounding for the scales' product and one for the rest."""
    scale = (a_scale * b_scale)[:, None] if B_TWO_D else a_scale[:, None] * b_scale[None, :]
    return gl.fma(terms, scale, total)


# -- E8M0 codes ----------------------------------------------------------------------------------------------


def _decode(codes: torch.Tensor, rows: int | torch.SymInt) -> torch.Tensor:
    """fp32 [blocks, rows^4] of E8M0 codes [rows^128, 4 * blocks], of which four are equal."""
    blocks = codes.shape[1] // 4
    scale_inv = torch.empty(
        layout.scale_shape(rows, blocks * layout.BLOCK, False), dtype=torch.float32, device=codes.device
    )
    grid = (triton.cdiv(rows, _DECODE_ROWS), triton.cdiv(blocks, _DECODE_BLOCKS))
    launch(decode_kernel, grid, codes, scale_inv, rows, blocks, ROWS=_DECODE_ROWS, BLOCKS=_DECODE_BLOCKS)
    return scale_inv


@triton.jit
def decode_kernel(codes, scale_inv, M, blocks, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """scale_inv [blocks, M^4] of codes [M^128, 4 * blocks]; the first of four is read."""
    stride = (M + 3) // 4 * 4
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)[None, :]
    inside = (row < stride) & (block < blocks)
    code = tl.load(codes + row.to(tl.int64) * (4 * blocks) + 4 * block, mask=inside, other=127)
    tl.store(scale_inv + block.to(tl.int64) * stride + row, decode_e8m0(code), mask=inside)
