"""The FP8 GEMM of gate and up in one kernel with the amax of f(gate) * up, for large products on Hopper.

    C and amax: kernels/gemm/gated.py's

The ring, the groups of warps and the sums are kernels/gemm/specialized/product.py's, so C has its bits. A tile of B is two pieces,
the same columns of the one segment and of the other: the thread that holds an element of gate holds that of up as well.

Computed for every element, f would take as long as the pass over C that it saves: its approximations are the
slowest instructions there are, and the groups wait for each other at both ends of the ring. But of all tiles of a group few
raise its amax, n tiles in random order about ln(n) times, and a bound that costs two instructions a pair tells which may.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from te_dynamo.kernels.gemm.specialized.ring import (
    COPY_REGISTERS,
    GROUP_REGISTERS,
    GROUP_WARPS,
    GROUPS,
    fill,
    make_result,
    make_ring,
    split_columns,
    store,
    tile_origin,
)
from te_dynamo.kernels.gemm.specialized.sums import accumulate, scaled
from te_dynamo.kernels.gemm.tiles import specialized_tile, stages_that_fit
from te_dynamo.kernels.quantize.current import PARTIALS
from te_dynamo.kernels.runtime._gluon import gl, gluon, tma
from te_dynamo.kernels.runtime.launch import launch_prepared
from te_dynamo.kernels.runtime.margin import gemm_multiprocessors
from te_dynamo.kernels.runtime.prepared import Prepared
from te_dynamo.kernels.tiles.activations import activate
from te_dynamo.kernels.tiles.fp8 import abs_bits


def gemm_gated_specialized(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    fast: bool,
    gate: int,
    kind: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(C bf16 [M, N], fp32 [PARTIALS] whose maximum is the amax), by the module's kernel; checks nothing."""
    m, k, n = a.shape[0], a.shape[1], b.shape[0]
    c = torch.empty((m, n), dtype=torch.bfloat16, device=a.device)
    partials = torch.empty(PARTIALS, dtype=torch.float32, device=a.device)
    programs = min(gemm_multiprocessors(a.device), PARTIALS // GROUPS.value)
    prepared = _prepared(fast, n // 2, gate, kind)
    launch_prepared(prepared, (programs,), a, a_scale_inv, b, b_scale_inv, c, partials, m, n, k)
    return c, partials


@functools.cache
def _prepared(fast: bool, width: int, gate: int, kind: str) -> Prepared:
    return Prepared(gemm_gated_kernel, gemm_gated_options(fast, width, gate, kind))


def gemm_gated_options(fast: bool, width: int, gate: int, kind: str) -> dict[str, Any]:
    """The constant arguments and compile options of the kernel for segments of that width."""
    tile = specialized_tile(fast)
    return {
        "FAST": fast,
        "SEGMENT": width,
        "GATE": gate,
        "KIND": kind,
        "PARTIALS": PARTIALS,
        "STAGES": stages_that_fit(tile, 2),
        **tile.constants(),
        "num_warps": GROUP_WARPS.value,
    }


@gluon.jit
def gemm_gated_kernel(
    a,
    a_scale_inv,
    b,
    b_scale_inv,
    c,
    partials,
    M,
    N,
    K,
    FAST: gl.constexpr,
    SEGMENT: gl.constexpr,
    GATE: gl.constexpr,
    KIND: gl.constexpr,
    PARTIALS: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    """C [M, N], and partials [PARTIALS], each the amax of one group of warps."""
    descs, ring = make_ring(a, b, M, N, K, STAGES, BLOCK_M, BLOCK_N, BLOCK_K, PIECES=2)
    PART_M: gl.constexpr = BLOCK_M // GROUPS if FAST else BLOCK_M // (2 * GROUPS)
    result = make_result(c, M, N, PART_M, BLOCK_N // 2)
    scales = (a_scale_inv, b_scale_inv)
    what = (ring, scales, result, partials, (M, K))
    gl.warp_specialize(
        [
            (_multiply, (gl.constexpr(0), what, FAST, SEGMENT, GATE, KIND, PARTIALS, GROUP_M)),
            (_multiply, (gl.constexpr(1), what, FAST, SEGMENT, GATE, KIND, PARTIALS, GROUP_M)),
            (_copy, (descs, ring, (M, K), SEGMENT, GROUP_M)),
        ],
        [GROUP_WARPS, 1],
        [GROUP_REGISTERS, COPY_REGISTERS],
    )


@gluon.jit
def _copy(descs, ring, size, SEGMENT: gl.constexpr, GROUP_M: gl.constexpr):
    """Fills the ring with this program's tiles, the columns of both segments in each."""
    M, K = size
    BLOCK_M: gl.constexpr = ring[0].shape[1]
    WIDTH: gl.constexpr = ring[1].shape[1] // 2
    tiles_m, tiles_n = gl.cdiv(M, BLOCK_M), SEGMENT // WIDTH
    stage = 0
    phase = 1
    for index in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        row, column = tile_origin(index, tiles_m, tiles_n, BLOCK_M, WIDTH, GROUP_M)
        stage, phase = fill(descs, ring, (), stage, phase, row, column, 0, K, SEGMENT)


@gluon.jit
def _multiply(
    GROUP: gl.constexpr,
    what,
    FAST: gl.constexpr,
    SEGMENT: gl.constexpr,
    GATE: gl.constexpr,
    KIND: gl.constexpr,
    PARTIALS: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    """This group's rows of every tile, stored, and the amax of all."""
    ring, scales, result, partials, size = what
    M, K = size
    BLOCK_M: gl.constexpr = ring[0].shape[1]
    BLOCK_N: gl.constexpr = ring[1].shape[1]
    BLOCK_K: gl.constexpr = ring[0].shape[2]
    WIDTH: gl.constexpr = BLOCK_N // 2
    PART_M: gl.constexpr = result[1].shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [GROUP_WARPS, 1], [16, BLOCK_N, 32])
    tiles_m, tiles_n, blocks = gl.cdiv(M, BLOCK_M), SEGMENT // WIDTH, gl.cdiv(K, BLOCK_K)
    c_desc, c_tiles = result
    c_tile = c_tiles.index(GROUP)
    stage = 0
    phase = 0
    amax = gl.to_tensor(0)  # its bits: see abs_bits
    for index in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        row, column = tile_origin(index, tiles_m, tiles_n, BLOCK_M, WIDTH, GROUP_M)
        one = gl.zeros((PART_M, BLOCK_N), gl.float32, layout)
        two = gl.zeros((PART_M, BLOCK_N), gl.float32, layout)
        one, two, stage, phase = accumulate(GROUP, ring, stage, phase, blocks, one, two, FAST)
        row += GROUP * (BLOCK_M // GROUPS)
        # Bounds go before the last store, which waits for the one before it. Each half's scale is loaded for itself: so its
        # arithmetic stays behind the store before it, and hides its wait.
        left, right = split_columns(one)
        left = _rounded(left, scales, 0, c_desc.dtype)
        store(c_tile, c_desc, left, row, column)
        right = _rounded(right, scales, 1, c_desc.dtype)
        bound = _fold(_bound(left, right, GATE, KIND))
        if FAST:
            largest = _largest(abs_bits(bound))
            store(c_tile, c_desc, right, row, SEGMENT + column)
            if largest > amax:
                amax = gl.maximum(amax, _rounded_amax(_magnitudes(left, right, GATE, KIND), c_desc.dtype))
        else:
            store(c_tile, c_desc, right, row, SEGMENT + column)
            lower_left, lower_right = split_columns(two)
            lower_left = _rounded(lower_left, scales, 0, c_desc.dtype)
            store(c_tile, c_desc, lower_left, row + PART_M, column)
            lower_right = _rounded(lower_right, scales, 1, c_desc.dtype)
            largest = _largest(abs_bits(_larger(bound, _fold(_bound(lower_left, lower_right, GATE, KIND)))))
            store(c_tile, c_desc, lower_right, row + PART_M, SEGMENT + column)
            if largest > amax:
                upper, lower = _magnitudes(left, right, GATE, KIND), _magnitudes(lower_left, lower_right, GATE, KIND)
                amax = gl.maximum(amax, _rounded_amax(gl.maximum(upper, lower), c_desc.dtype))
    for place in range(gl.program_id(0) * GROUPS + GROUP, PARTIALS, gl.num_programs(0) * GROUPS):
        gl.store(partials + place, amax.to(gl.float32, bitcast=True))
    tma.store_wait(0)


@gluon.jit
def _rounded(total, scales, SEGMENT: gl.constexpr, DTYPE: gl.constexpr):
    """A sum times the scale of that segment, rounded."""
    scale = gl.load(scales[0]) * gl.load(scales[1] + SEGMENT)
    return scaled(total, scale).to(DTYPE)


@gluon.jit
def _gate_and_up(left, right, GATE: gl.constexpr):
    if GATE == 0:
        return left, right
    else:
        return right, left


@gluon.jit
def _magnitudes(left, right, GATE: gl.constexpr, KIND: gl.constexpr):
    """Bits of |f(gate) * up|, not rounded yet, by the arithmetic of kernels/activation/gated.py."""
    gate, up = _gate_and_up(left, right, GATE)
    return abs_bits(activate(gate.to(gl.float32), KIND) * up.to(gl.float32))


@gluon.jit
def _rounded_amax(bits, DTYPE: gl.constexpr):
    """Bits of the amax of values rounded to DTYPE, from those of the values: rounding keeps order, so the largest is rounded alone."""
    return abs_bits(_largest(bits).to(gl.float32, bitcast=True).to(DTYPE))


@gluon.jit
def _largest(bits):
    """The maximum of a tensor, reduced in one dimension: a warp then has one instruction for it."""
    return gl.max(bits.reshape((bits.shape[0] * bits.shape[1],)), axis=0)


BOUND = """{
.reg .b32 tiny, constant, y;
mov.b32 tiny, 0x83808380;
mov.b32 constant, 0x3E8F3E8F;
fma.rn.bf16x2 y, $1, tiny, constant;
max.NaN.bf16x2 y, y, $1;
mul.rn.bf16x2 $0, y, $2;
}"""
"""What `_bound` computes of gate $1 and up $2, two elements a word."""

BOUND_OF_SIGMOID = BOUND.replace("0x3E8F3E8F", "0x3F803F80")
"""The same with 1 for 143/512."""

_BOUND: gl.constexpr = gl.constexpr(BOUND)
_BOUND_OF_SIGMOID: gl.constexpr = gl.constexpr(BOUND_OF_SIGMOID)


@gluon.jit
def _bound(left, right, GATE: gl.constexpr, KIND: gl.constexpr):
    """A bound of |f(gate) * up| as it is computed and rounded to bf16. It is infinite or NaN where that is.

    Where x > 0 an activation is at most x, elsewhere it is above -0.2785, silu's least. So max(x, 143/512) * |up| is a bound,
    and rounding keeps order. f(-inf) may be NaN: the 143/512 has -x * 2^-120 added, nothing but for an infinity. The sigmoid
    is at most 1, which stands for 143/512 then.
    """
    ASSEMBLY: gl.constexpr = _BOUND_OF_SIGMOID if KIND == "sigmoid" else _BOUND
    gate, up = _gate_and_up(left, right, GATE)
    return gl.inline_asm_elementwise(ASSEMBLY, "=r,r,r", [gate, up], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def _fold(value):
    """The larger sizes of bf16 value [R, C] as [R, 8] of some sign; no register leaves its thread."""
    if value.shape[1] > 8:
        left, right = split_columns(value)
        return _fold(_larger(left, right))
    else:
        return value


@gluon.jit
def _larger(x, y):
    """The larger size of two in bf16, of some sign, NaN if one is that; two elements an instruction."""
    LARGER: gl.constexpr = "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;"
    return gl.inline_asm_elementwise(LARGER, "=r,r,r", [x, y], dtype=gl.bfloat16, is_pure=True, pack=2)
