"""The FP8 GEMM of kernels/gemm.py for large products on Hopper, by warps that each do one thing.

One warp copies tiles of A and B into a ring in shared memory; two groups of four warps multiply, the upper and the lower
half of the SPECIALIZED. The groups wait for the copies only, never for each other: with slow accumulation one adds while the other
multiplies, which one program whose warps all run the same code cannot do. It is written in Gluon, and equals the other kernel
bit for bit.

Inductor writes launches of Triton-language kernels only; lowering/extern_gemm.py makes its code call `gemm_specialized_out`.
A call costs the CPU more than such a launch does, so `gemm_tiles.specialized_tile` takes this kernel for large products only.
"""

from __future__ import annotations

import torch

from te_dynamo.kernels._gluon import async_load, async_store, gl, gluon, hopper, mbarrier, tma
from te_dynamo.kernels.gemm_tiles import SPECIALIZED, specialized_is_faster, specialized_stages
from te_dynamo.kernels.launch import is_hopper, launch, multiprocessor_count, size_hint

__all__ = ["gemm_specialized_out", "runs_specialized", "specialized_options"]

GROUPS = gl.constexpr(2)  # of warps that multiply
_GROUP_WARPS = gl.constexpr(4)
_GROUP_REGISTERS = gl.constexpr(240)
_COPY_REGISTERS = gl.constexpr(24)


def runs_specialized(a: torch.Tensor, b: torch.Tensor, fast_accum: bool) -> bool:
    """Whether this kernel runs a [M, K] by b [N, K]: on this device, and faster than kernels/gemm.py's own."""
    m, k, n = size_hint(a.shape[0]), size_hint(a.shape[1]), size_hint(b.shape[0])
    return is_hopper(a.device) and specialized_is_faster(m, n, k, fast_accum, multiprocessor_count(a.device))


def gemm_specialized_out(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
) -> None:
    """Writes `kernels.gemm.gemm`'s C of a [M, K] and b [N, K], by slow accumulation, to out [M, N]; N a multiple of 8.

    Checks nothing.
    """
    m, k, n = a.shape[0], a.shape[1], b.shape[0]
    bias_or_any = a_scale_inv if bias is None else bias
    options = specialized_options(bias is not None, out.element_size())
    programs = multiprocessor_count(a.device)
    launch(gemm_specialized_kernel, (programs,), a, a_scale_inv, b, b_scale_inv, bias_or_any, out, m, n, k, **options)


def specialized_options(has_bias: bool, out_bytes: int) -> dict[str, int]:
    """The constant arguments and compile options of the kernel for a C of elements of `out_bytes`."""
    return {
        "HAS_BIAS": has_bias,
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
    result_of = (c_tiles, c_desc, a_scale_inv, b_scale_inv, bias)
    size = (M, N, K)
    gl.warp_specialize(
        [
            (_multiply, (gl.constexpr(0), ring, result_of, size, HAS_BIAS, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M)),
            (_multiply, (gl.constexpr(1), ring, result_of, size, HAS_BIAS, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M)),
            (_copy, (a_desc, b_desc, ring, size, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M)),
        ],
        [_GROUP_WARPS, 1],
        [_GROUP_REGISTERS, _COPY_REGISTERS],
    )


@gluon.jit
def _copy(
    a_desc,
    b_desc,
    ring,
    size,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    """Fills the ring with this program's tiles, block of K by block of K, as far ahead as it has slots."""
    a_tiles, b_tiles, full, empty = ring
    M, N, K = size
    tiles_m, tiles_n, blocks = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N), gl.cdiv(K, BLOCK_K)
    stage = 0
    phase = 1  # a wait for the phase before the first passes: every slot begins empty
    for index in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        row, column = _tile_origin(index, tiles_m, tiles_n, BLOCK_M, BLOCK_N, GROUP_M)
        for block in range(blocks):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), (BLOCK_M + BLOCK_N) * BLOCK_K)
            async_load(a_desc, [row, block * BLOCK_K], full.index(stage), a_tiles.index(stage))
            async_load(b_desc, [column, block * BLOCK_K], full.index(stage), b_tiles.index(stage))
            stage, phase = _next_slot(stage, phase, a_tiles.shape[0])


@gluon.jit
def _multiply(
    GROUP: gl.constexpr,
    ring,
    result_of,
    size,
    HAS_BIAS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    """This group's rows of every tile: multiplied from the ring, scaled, stored."""
    PART_M: gl.constexpr = BLOCK_M // (2 * GROUPS)
    c_tiles, c_desc, a_scale_inv, b_scale_inv, bias = result_of
    M, N, K = size
    tiles_m, tiles_n, blocks = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N), gl.cdiv(K, BLOCK_K)
    scale = gl.load(a_scale_inv) * gl.load(b_scale_inv)
    c_tile = c_tiles.index(GROUP)
    stage = 0
    phase = 0
    for index in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        row, column = _tile_origin(index, tiles_m, tiles_n, BLOCK_M, BLOCK_N, GROUP_M)
        upper, lower, stage, phase = _sum(GROUP, ring, stage, phase, blocks, PART_M, BLOCK_N)
        row += GROUP * 2 * PART_M
        _store(c_tile, c_desc, _scale_and_shift(upper, scale, bias, column, N, HAS_BIAS), row, column)
        _store(c_tile, c_desc, _scale_and_shift(lower, scale, bias, column, N, HAS_BIAS), row + PART_M, column)
    tma.store_wait(0)


@gluon.jit
def _sum(GROUP: gl.constexpr, ring, stage, phase, blocks, PART_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """The two halves' sums over K: what the tensor core makes of each block is added in fp32."""
    a_tiles, b_tiles, full, empty = ring
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_GROUP_WARPS, 1], [16, BLOCK_N, 32])
    nothing = gl.zeros((PART_M, BLOCK_N), gl.float32, layout)
    upper = nothing
    lower = gl.zeros((PART_M, BLOCK_N), gl.float32, layout)
    for _ in range(blocks):
        mbarrier.wait(full.index(stage), phase)
        x_upper, x_lower, y = _operands(GROUP, a_tiles, b_tiles, stage, PART_M)
        term = hopper.warpgroup_mma(x_upper, y, nothing, use_acc=False, is_async=True)
        upper += hopper.warpgroup_mma_wait(0, deps=[term])
        term = hopper.warpgroup_mma(x_lower, y, nothing, use_acc=False, is_async=True)
        term = hopper.warpgroup_mma_wait(0, deps=[term])
        mbarrier.arrive(empty.index(stage))
        lower += term
        stage, phase = _next_slot(stage, phase, a_tiles.shape[0])
    return upper, lower, stage, phase


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
