"""The FP8 GEMM of kernels/gemm.py for large products on Hopper, by warps that each do one thing.

One warp copies, two groups of warps multiply (gemm_ring.py): with slow accumulation one adds while the other multiplies. It is
written in Gluon, and equals the other kernel bit for bit.

Inductor writes launches of Triton-language kernels only; lowering/extern_gemm.py makes its code call `gemm_specialized_out`.
A call costs the CPU more than such a launch does, so `gemm_tiles.specialized_is_faster` takes this kernel for large products only.
"""

from __future__ import annotations

import torch

from te_dynamo.kernels._gluon import gl, gluon, hopper, mbarrier, tma
from te_dynamo.kernels.gemm_ring import (
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
from te_dynamo.kernels.gemm_tiles import SPECIALIZED, specialized_is_faster, stages_that_fit
from te_dynamo.kernels.launch import is_hopper, launch, multiprocessor_count, size_hint

__all__ = ["gemm_specialized_out", "runs_specialized", "specialized_options"]


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
        "STAGES": stages_that_fit(SPECIALIZED, out_bytes),
        "BLOCK_M": SPECIALIZED.block_m,
        "BLOCK_N": SPECIALIZED.block_n,
        "BLOCK_K": SPECIALIZED.block_k,
        "GROUP_M": SPECIALIZED.group_m,
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
    descs, ring = make_ring(a, b, M, N, K, STAGES, BLOCK_M, BLOCK_N, BLOCK_K)
    c_desc, c_tiles = make_result(c, M, N, BLOCK_M // (2 * GROUPS), BLOCK_N)
    result_of = (c_desc, c_tiles, a_scale_inv, b_scale_inv, bias)
    size = (M, N, K)
    gl.warp_specialize(
        [
            (_multiply, (gl.constexpr(0), ring, result_of, size, HAS_BIAS, GROUP_M)),
            (_multiply, (gl.constexpr(1), ring, result_of, size, HAS_BIAS, GROUP_M)),
            (copy, (descs, ring, (), size, GROUP_M)),
        ],
        [GROUP_WARPS, 1],
        [GROUP_REGISTERS, COPY_REGISTERS],
    )


@gluon.jit
def _multiply(GROUP: gl.constexpr, ring, result_of, size, HAS_BIAS: gl.constexpr, GROUP_M: gl.constexpr):
    """This group's rows of every tile: multiplied from the ring, scaled, stored."""
    BLOCK_M: gl.constexpr = ring[0].shape[1]
    BLOCK_N: gl.constexpr = ring[1].shape[1]
    PART_M: gl.constexpr = BLOCK_M // (2 * GROUPS)
    c_desc, c_tiles, a_scale_inv, b_scale_inv, bias = result_of
    M, N, K = size
    tiles_m, tiles_n, blocks = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N), gl.cdiv(K, ring[0].shape[2])
    scale = gl.load(a_scale_inv) * gl.load(b_scale_inv)
    c_tile = c_tiles.index(GROUP)
    stage = 0
    phase = 0
    for index in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        row, column = tile_origin(index, tiles_m, tiles_n, BLOCK_M, BLOCK_N, GROUP_M)
        upper, lower, stage, phase = _sum(GROUP, ring, stage, phase, blocks)
        row += GROUP * 2 * PART_M
        store(c_tile, c_desc, _scale_and_shift(upper, scale, bias, column, N, HAS_BIAS), row, column)
        store(c_tile, c_desc, _scale_and_shift(lower, scale, bias, column, N, HAS_BIAS), row + PART_M, column)
    tma.store_wait(0)


@gluon.jit
def _sum(GROUP: gl.constexpr, ring, stage, phase, blocks):
    """The two halves' sums over K: what the tensor core makes of each block is added in fp32."""
    a_tiles, b_tiles, full, empty = ring
    PART_M: gl.constexpr = a_tiles.shape[1] // (2 * GROUPS)
    BLOCK_N: gl.constexpr = b_tiles.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [GROUP_WARPS, 1], [16, BLOCK_N, 32])
    nothing = gl.zeros((PART_M, BLOCK_N), gl.float32, layout)
    upper = nothing
    lower = gl.zeros((PART_M, BLOCK_N), gl.float32, layout)
    for _ in range(blocks):
        mbarrier.wait(full.index(stage), phase)
        x_upper, x_lower, y = operands(GROUP, a_tiles, b_tiles, stage)
        term = hopper.warpgroup_mma(x_upper, y, nothing, use_acc=False, is_async=True)
        upper += hopper.warpgroup_mma_wait(0, deps=[term])
        term = hopper.warpgroup_mma(x_lower, y, nothing, use_acc=False, is_async=True)
        term = hopper.warpgroup_mma_wait(0, deps=[term])
        mbarrier.arrive(empty.index(stage))
        lower += term
        stage, phase = next_slot(stage, phase, a_tiles.shape[0])
    return upper, lower, stage, phase


@gluon.jit
def _scale_and_shift(total, scale, bias, column, N, HAS_BIAS: gl.constexpr):
    """total * scale + bias with two roundings: mul.rn is never contracted with the addition."""
    value = gl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=f,f,f", [total, scale], dtype=gl.float32, is_pure=True, pack=1
    )
    if HAS_BIAS:
        value = add_bias(value, bias, column, N)
    return value
