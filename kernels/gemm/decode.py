"""FP8 GEMM of a few rows, whose time is that of reading the weight: the product of kernels/gemm/product.py, its operands exchanged.

    C[M, N] = round((B[N, K] @ A[M, K]^T)^T * (a_scale_inv * b_scale_inv[segment of n]) + bias[N])

or of scales of rows by a_scale_inv[m], then by b_scale_inv[n], each product rounded; scales of blocks are applied to every 128 products.

The weight has the tensor core's 64 rows and A its columns, of which there may be 16, so that little is loaded for rows that
do not exist. One tile a program, several programs a multiprocessor: what is in flight, not what is computed, decides. Loads
are by pointers: making a tensor descriptor takes a program as long as reading some blocks.

Bit for bit the other kernels with as many parts of K, and with B stacked by rows those of kernels/gemm/product.py.

`gemm_decode_gated_kernel` is the same of gate and up, two segments of one width, with the amax of f(gate) * up of C's values, rounded
as kernels/activation/gated.py rounds them. A program takes the same columns of both segments, in two products, so that one thread
holds an element of gate and that of up. C has the bits of the other kernel, and the amax those of kernels/activation/gated.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_dynamo.kernels.gemm.product import add_product, load_scales
from te_dynamo.kernels.gemm.tiles import DecodeTile
from te_dynamo.kernels.layouts.sizes import Size
from te_dynamo.kernels.quantize.current import PARTIALS
from te_dynamo.kernels.runtime._triton import libdevice, tl, triton
from te_dynamo.kernels.runtime.dependent_launch import starts_early, wait_for_predecessor
from te_dynamo.kernels.runtime.launch import launch
from te_dynamo.kernels.runtime.writes import writes
from te_dynamo.kernels.tiles.activations import activate
from te_dynamo.kernels.tiles.fp8 import abs_bits, rounded, store_amax
from te_dynamo.kernels.tiles.stacking import Stacking


def launch_decode(
    tile: DecodeTile,
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    c: torch.Tensor,
    stacking: Stacking | None = None,
    partials: torch.Tensor | None = None,
    addend: torch.Tensor | None = None,
    scaling: str = "tensor",
) -> None:
    """Writes C, or with parts of K the fp32 sums of each as c [SPLIT_K, M, N]. stacking: of B, along N. scaling: "tensor", "row", "1x128 128x128" or
    "1x128 1x128".

    partials: fp32, as many as there are programs or more, or None; their maximum becomes the amax of C, which is whole.
    addend:   None, or what is added to C, which is whole, once that is rounded; it may be c.
    """
    m, k, n = a.shape[0], a.shape[1], b.shape[0]
    # A pointer that is never used stands in for a tensor that is not there: torch wants every argument.
    optional = [a_scale_inv if x is None else x for x in (bias, partials)]
    launch(
        gemm_decode_kernel,
        (triton.cdiv(n, tile.block_n) * tile.split_k,),
        *(a, a_scale_inv, b, b_scale_inv, optional[0], c, addend, optional[1], m, n, k),
        **decode_options(
            tile,
            n,
            k,
            bias is not None,
            stacking,
            0 if partials is None else partials.shape[0],
            starts_early(m, a.device),
            scaling,
        ),
    )


def decode_options(
    tile: DecodeTile,
    n: int,
    k: Size,
    has_bias: bool,
    stacking: Stacking | None,
    partials: int,
    early: bool,
    scaling: str = "tensor",
) -> dict[str, Any]:
    """The constant arguments and compile options of `gemm_decode_kernel`. K may be symbolic: for a weight's gradient it is the tokens."""
    edges = {"EDGE_1": n, "EDGE_2": n}
    if stacking is not None:
        edges = {name: value for name, value in stacking.constants().items() if name in edges}
    return {
        "SCALING": scaling,
        "HAS_BIAS": has_bias,
        "FAST": tile.fast,
        "SPLIT_K": tile.split_k,
        "PARTIALS": partials,
        "EVEN": n % tile.block_n == 0 and statically_known_true(k % (tile.block_k * tile.split_k) == 0),
        "EARLY": early,
        **edges,
        "STAGES": tile.num_stages,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "num_warps": tile.num_warps,
    }


@writes("c", partials="PARTIALS")
@triton.jit
def gemm_decode_kernel(
    a,
    a_scale_inv,
    b,
    b_scale_inv,
    bias,
    c,
    addend,
    partials,
    M,
    N,
    K,
    SCALING: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FAST: tl.constexpr,
    SPLIT_K: tl.constexpr,
    PARTIALS: tl.constexpr,
    EVEN: tl.constexpr,
    EARLY: tl.constexpr,
    EDGE_1: tl.constexpr,
    EDGE_2: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """C, or with SPLIT_K > 1 the fp32 sums of each part of K as c [SPLIT_K, M, N], scales of tensors and rows left out. EVEN: N and K fill whole tiles.

    PARTIALS: places for an amax of C, or 0. addend: None, or what is added to C once that is rounded; it may be c.
    """
    column = tl.program_id(0) // SPLIT_K * BLOCK_N
    part = tl.program_id(0) % SPLIT_K
    blocks = tl.cdiv(K, BLOCK_K * SPLIT_K)
    rows = tl.arange(0, BLOCK_M)
    columns = column + tl.arange(0, BLOCK_N)
    wait_for_predecessor(EARLY)
    B_TWO_D: tl.constexpr = SCALING == "1x128 128x128"
    # What each step of the sum scales by, with the operands exchanged; scales of rows come after it, as a tensor's do.
    EXCHANGED: tl.constexpr = "128x128 1x128" if B_TWO_D else "tensor" if SCALING == "row" else SCALING
    if SCALING == "tensor":
        segment = (column >= EDGE_1).to(tl.int32) + (column >= EDGE_2).to(tl.int32)
        scale = tl.load(a_scale_inv) * tl.load(b_scale_inv + segment)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for block in tl.range(blocks, num_stages=STAGES):
        k = (part * blocks + block) * BLOCK_K + tl.arange(0, BLOCK_K)
        # The weight is read once; x, by every program, stays in the cache.
        x_mask = (rows < M)[:, None] if EVEN else (rows < M)[:, None] & (k < K)[None, :]
        x = tl.load(a + rows[:, None] * K + k[None, :], mask=x_mask, other=0.0)
        weight = b + columns.to(tl.int64)[:, None] * K + k[None, :]
        if EVEN:
            y = tl.load(weight, eviction_policy="evict_first")
        else:
            y = tl.load(
                weight, mask=(columns < N)[:, None] & (k < K)[None, :], other=0.0, eviction_policy="evict_first"
            )
        x_scale, y_scale = None, None
        if EXCHANGED != "tensor":
            at = part * blocks + block
            x_scale = load_scales(a_scale_inv, 0, at, tl.cdiv(K, BLOCK_K), M, BLOCK_M, False)
            y_scale = load_scales(b_scale_inv, column, at, tl.cdiv(K, BLOCK_K), N, BLOCK_N, B_TWO_D)
        total = add_product(y, x, y_scale, x_scale, total, None, EXCHANGED, FAST)
    if SPLIT_K == 1:
        if SCALING == "tensor":
            total = libdevice.mul_rn(total, scale)
        elif SCALING == "row":
            total = libdevice.mul_rn(total, tl.load(a_scale_inv + rows, mask=rows < M, other=0.0)[None, :])
            total = libdevice.mul_rn(total, tl.load(b_scale_inv + columns, mask=columns < N, other=0.0)[:, None])
        if HAS_BIAS:
            total += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[:, None]
    target = c + part.to(tl.int64) * M * N
    inside = (columns < N)[:, None] & (rows < M)[None, :]
    result = total.to(c.dtype.element_ty)
    if addend is not None:
        other = tl.load(addend + rows.to(tl.int64)[None, :] * N + columns[:, None], mask=inside, other=0.0)
        result = (result.to(tl.float32) + other.to(tl.float32)).to(c.dtype.element_ty)
    tl.store(target + rows.to(tl.int64)[None, :] * N + columns[:, None], result, mask=inside)
    if PARTIALS > 0:
        store_amax(partials, tl.where(inside, abs_bits(result), 0), PARTIALS)


def launch_gated_decode(
    tile: DecodeTile,
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    gate: int,
    kind: str,
    c: torch.Tensor,
    partials: torch.Tensor,
) -> None:
    """Writes C [M, 2 * width] and partials fp32 [PARTIALS], whose maximum is the amax. gate: its segment of b, 0 or 1; kind: f's."""
    m, k, width = a.shape[0], a.shape[1], b.shape[0] // 2
    launch(
        gemm_decode_gated_kernel,
        (triton.cdiv(width, tile.block_n),),
        *(a, a_scale_inv, b, b_scale_inv, c, partials, m, width, k),
        **gated_decode_options(tile, width, k, gate, kind, starts_early(m, a.device)),
    )


def gated_decode_options(tile: DecodeTile, width: int, k: int, gate: int, kind: str, early: bool) -> dict[str, Any]:
    """The constant arguments and compile options of `gemm_decode_gated_kernel`."""
    return {
        "GATE": gate,
        "KIND": kind,
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
def gemm_decode_gated_kernel(
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
    KIND: tl.constexpr,
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
    result = rounded(activate(gate.to(tl.float32), KIND) * up.to(tl.float32), c.dtype.element_ty)
    store_amax(partials, tl.where(inside, abs_bits(result), 0), PARTIALS)


@triton.jit
def _weight(rows_of_b, columns, k, WIDTH, K, EVEN: tl.constexpr):
    """A block of the weight, which is read once: x, read by every program, is to stay in the cache."""
    if EVEN:
        return tl.load(rows_of_b + k[None, :], eviction_policy="evict_first")
    else:
        mask = (columns < WIDTH)[:, None] & (k < K)[None, :]
        return tl.load(rows_of_b + k[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
