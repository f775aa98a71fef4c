"""The FP8 GEMM of gate and up for a few rows, with the amax of silu(gate) * up: kernels/gemm/decode.py and a pass in one.

    C = gemm_stacked along N of two segments of one width: gate | up, or up | gate
    amax = max |silu(gate) * up| of C's values, rounded as kernels/activation/swiglu.py rounds them

A program takes the same columns of both segments, in two products, so that one thread holds an element of gate and that of
up. C has the bits of kernels/gemm/decode.py, and the amax those of kernels/activation/swiglu.py.
"""

from __future__ import annotations

from typing import Any

import torch

from te_dynamo.kernels.activation.functions import activate
from te_dynamo.kernels.gemm.decode import DecodeTile, decode_tile
from te_dynamo.kernels.quantize.current import PARTIALS
from te_dynamo.kernels.runtime._triton import libdevice, tl, triton
from te_dynamo.kernels.runtime.dependent_launch import starts_early, wait_for_predecessor
from te_dynamo.kernels.runtime.launch import launch
from te_dynamo.kernels.runtime.writes import writes
from te_dynamo.kernels.tiles.fp8 import abs_bits, rounded, store_amax

__all__ = ["gemm_decode_swiglu_kernel", "launch_swiglu_decode", "swiglu_decode_options", "swiglu_decode_tile"]


def swiglu_decode_tile(
    m: int | torch.SymInt, width: int, k: int, fast_accum: bool, hopper: bool, multiprocessors: int
) -> DecodeTile | None:
    """How gate and up, each [m, width], run here; its block_n columns are taken of each. None where other kernels should.

    They should where decode.py would not take the whole product in one part, and for more programs than there are
    places for an amax.
    """
    whole = decode_tile(m, 2 * width, k, fast_accum, hopper, multiprocessors)
    if whole is None or whole.split_k > 1 or triton.cdiv(width, whole.block_n) > PARTIALS:
        return None
    # A step reads as many bytes of the weight as one of twice the depth does there.
    return DecodeTile(whole.block_m, whole.block_n, 128, 4, 3 if whole.block_m > 32 else 4, fast_accum, 1)


def launch_swiglu_decode(
    tile: DecodeTile,
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    gate: int,
    c: torch.Tensor,
    partials: torch.Tensor,
) -> None:
    """Writes C [M, 2 * width] and partials fp32 [PARTIALS], whose maximum is the amax. gate: its segment of b, 0 or 1."""
    m, k, width = a.shape[0], a.shape[1], b.shape[0] // 2
    launch(
        gemm_decode_swiglu_kernel,
        (triton.cdiv(width, tile.block_n),),
        *(a, a_scale_inv, b, b_scale_inv, c, partials, m, width, k),
        **swiglu_decode_options(tile, width, k, gate, starts_early(m, a.device)),
    )


def swiglu_decode_options(tile: DecodeTile, width: int, k: int, gate: int, early: bool) -> dict[str, Any]:
    """The constant arguments and compile options of `gemm_decode_swiglu_kernel`."""
    return {
        "GATE": gate,
        "FAST": tile.fast,
        "EVEN": width % tile.block_n == 0 and k % tile.block_k == 0,
        "EARLY": early,
        "PARTIALS": PARTIALS,
        "STAGES": tile.num_stages,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "num_warps": tile.num_warps,
    }


@writes("c", "partials")
@triton.jit
def gemm_decode_swiglu_kernel(
    a,
    a_scale_inv,
    b,
    b_scale_inv,
    c,
    partials,
    M,
    WIDTH,
    K,
    GATE: tl.constexpr,
    FAST: tl.constexpr,
    EVEN: tl.constexpr,
    EARLY: tl.constexpr,
    PARTIALS: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """C and this program's amax. EVEN: the width and K fill whole tiles."""
    rows = tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    wait_for_predecessor(EARLY)
    a_scale = tl.load(a_scale_inv)
    left = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    right = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    first = b + columns.to(tl.int64)[:, None] * K
    second = first + tl.cast(WIDTH, tl.int64) * K
    for block in tl.range(tl.cdiv(K, BLOCK_K), num_stages=STAGES):
        k = block * BLOCK_K + tl.arange(0, BLOCK_K)
        x_mask = (rows < M)[:, None] if EVEN else (rows < M)[:, None] & (k < K)[None, :]
        x = tl.load(a + rows[:, None] * K + k[None, :], mask=x_mask, other=0.0)
        one = _weight(first, columns, k, WIDTH, K, EVEN)
        two = _weight(second, columns, k, WIDTH, K, EVEN)
        if FAST:
            left = tl.dot(one, x.T, left)
            right = tl.dot(two, x.T, right)
        else:
            left += tl.dot(one, x.T)
            right += tl.dot(two, x.T)
    inside = (columns < WIDTH)[:, None] & (rows < M)[None, :]
    target = c + rows.to(tl.int64)[None, :] * (2 * WIDTH) + columns[:, None]
    left = libdevice.mul_rn(left, a_scale * tl.load(b_scale_inv)).to(c.dtype.element_ty)
    right = libdevice.mul_rn(right, a_scale * tl.load(b_scale_inv + 1)).to(c.dtype.element_ty)
    tl.store(target, left, mask=inside)
    tl.store(target + WIDTH, right, mask=inside)
    gate = left if GATE == 0 else right
    up = right if GATE == 0 else left
    result = rounded(activate(gate.to(tl.float32), "silu") * up.to(tl.float32), c.dtype.element_ty)
    store_amax(partials, tl.where(inside, abs_bits(result), 0), PARTIALS)


@triton.jit
def _weight(rows_of_b, columns, k, WIDTH, K, EVEN: tl.constexpr):
    """A block of the weight, which is read once: x, read by every program, is to stay in the cache."""
    if EVEN:
        return tl.load(rows_of_b + k[None, :], eviction_policy="evict_first")
    else:
        mask = (columns < WIDTH)[:, None] & (k < K)[None, :]
        return tl.load(rows_of_b + k[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
