"""FP8 GEMM with one scale an operand.

    C[M, N] = round((A[M, K] @ B[N, K]^T) * (a_scale_inv * b_scale_inv) + bias[N])

A and B are float8_e4m3fn or float8_e5m2, both contiguous, so that the contracted dimension lies in memory
order: what Hopper's tensor cores read. Every step after the product is one fp32 operation with its own
rounding, so a GEMM with bias equals an fp32 GEMM, an fp32 addition and a rounding, bit for bit.

Fast accumulation keeps the whole sum in the tensor core's accumulator, which holds fewer bits than fp32 when
the operands are FP8; slow accumulation adds what the tensor core makes of every 128 products to an fp32 sum.

The kernel is persistent: each program takes tiles in turn, and loads of its next tile overlap the end of the
last. Which tile, how many parts K is cut into, and whether another kernel runs the product, is kernels/gemm/choose.py's answer.
"""

from __future__ import annotations

from typing import Any

import torch

from te_dynamo.kernels.gemm.choose import choose_for
from te_dynamo.kernels.gemm.cublaslt import gemm_cublaslt
from te_dynamo.kernels.gemm.decode import launch_decode
from te_dynamo.kernels.gemm.specialized.current import gemm_specialized_out
from te_dynamo.kernels.gemm.tiles import REDUCE_BLOCK, DecodeTile, Tile, stores_by_descriptor
from te_dynamo.kernels.runtime._triton import libdevice, tl, triton
from te_dynamo.kernels.runtime.dependent_launch import starts_early, wait_for_predecessor
from te_dynamo.kernels.runtime.launch import is_recording, launch
from te_dynamo.kernels.runtime.margin import gemm_multiprocessors
from te_dynamo.kernels.runtime.writes import writes
from te_dynamo.kernels.tiles.fp8 import abs_bits, store_amax

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_OUT = (torch.bfloat16, torch.float16, torch.float32)


def gemm(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:
    """The module docstring's C, of dtype `out_dtype` (bfloat16, float16 or float32), on a CUDA device.

    a [M, K], b [N, K]: float8, contiguous, K a multiple of 16; not both e5m2. M may be symbolic.
    a_scale_inv, b_scale_inv [1]: float32. bias [N]: any floating dtype, or None.
    Raises ValueError for anything else. The same input gives the same bits on every run.
    """
    check_operands(a, b, bias, out_dtype)
    choice = choose_for(a, b, fast_accum, out_dtype, recorded=is_recording())
    if choice.specialized:
        c = torch.empty((a.shape[0], b.shape[0]), dtype=out_dtype, device=a.device)
        gemm_specialized_out(a, a_scale_inv, b, b_scale_inv, bias, fast=fast_accum, out=c)
        return c
    if choice.kernel == "cublaslt":
        return gemm_cublaslt(a, a_scale_inv, b, b_scale_inv, bias, out_dtype, fast_accum)
    return gemm_with_tile(choice.tile, a, a_scale_inv, b, b_scale_inv, bias, out_dtype)


def gemm_reference(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:
    """The same in plain PyTorch on any device, products and sums in fp32 whatever `fast_accum` says."""
    check_operands(a, b, bias, out_dtype)
    value = (a.float() @ b.float().t()) * (a_scale_inv * b_scale_inv)
    if bias is not None:
        value = value + bias.float()
    return value.to(out_dtype)


def check_operands(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> None:
    """Raises ValueError, saying what is wrong, for operands that the GEMM does not take."""
    check_formats(a, b, out_dtype)
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"te gemm: expected a [M, K] and b [N, K], got {tuple(a.shape)} and {tuple(b.shape)}")
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != b.shape[0]):
        raise ValueError(f"te gemm: expected bias [{b.shape[0]}], got {tuple(bias.shape)}")


def check_formats(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> None:
    """The part of it that does not ask for the operands' ranks: their last dimension is the one that is contracted."""
    if a.dtype not in _FP8 or b.dtype not in _FP8:
        raise ValueError(f"te gemm: operands must be float8_e4m3fn or float8_e5m2, got {a.dtype} and {b.dtype}")
    if a.dtype == b.dtype == torch.float8_e5m2:
        raise ValueError("te gemm: e5m2 x e5m2 is not supported; hold one operand in e4m3")
    if out_dtype not in _OUT:
        raise ValueError(f"te gemm: out_dtype must be bfloat16, float16 or float32, got {out_dtype}")
    if not (a.is_contiguous() and b.is_contiguous()):
        raise ValueError("te gemm: both operands must be contiguous; use the columnwise buffer for a transposed one")
    if isinstance(a.shape[-1], int) and a.shape[-1] % 16:
        raise ValueError(f"te gemm: K must be a multiple of 16, got {a.shape[-1]}")


def gemm_with_tile(
    tile: Tile | DecodeTile,
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    partials: torch.Tensor | None = None,
    addend: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
) -> torch.Tensor:
    """`gemm` with a tile of the caller's choice, which decides fast or slow accumulation; checks nothing.

    partials: of a DecodeTile, fp32 [PARTIALS] whose maximum becomes the amax of the result, or None.
    addend:   as of `kernels/gemm/epilogue.py`, its rows whole 16 bytes; or None. Not beside partials.
    c:        what the result is written to, the addend's memory perhaps; a new tensor otherwise.
    """
    m, k, n = a.shape[0], a.shape[1], b.shape[0]
    c = torch.empty((m, n), dtype=out_dtype, device=a.device) if c is None else c
    split = tile.split_k > 1
    target = torch.empty((tile.split_k, m, n), dtype=torch.float32, device=a.device) if split else c
    if isinstance(tile, DecodeTile):
        whole = {} if split else {"partials": partials, "addend": addend}
        launch_decode(tile, a, a_scale_inv, b, b_scale_inv, bias, target, **whole)
    else:
        programs = gemm_multiprocessors(a.device) * tile.ctas_per_sm
        # A pointer that is never read stands in for a bias that is not there: torch wants every argument.
        bias_or_any = a_scale_inv if bias is None else bias
        # None is no argument of the compiled kernel, so that one without an addend is what it is without this.
        arguments = (a, a_scale_inv, b, b_scale_inv, bias_or_any, target, None if split else addend, m, n, k)
        launch(gemm_kernel, (programs,), *arguments, **kernel_options(tile, n, bias is not None))
    if split:
        add_parts(target, a_scale_inv, b_scale_inv, bias, c, scaled=True, partials=partials, addend=addend)
    return c


def add_parts(
    parts: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    c: torch.Tensor,
    scaled: bool,
    partials: torch.Tensor | None = None,
    addend: torch.Tensor | None = None,
) -> None:
    """c [M, N] = round(sum of parts [SPLIT_K, M, N] (* a_scale_inv * b_scale_inv) + bias).

    partials, addend: as of `launch_decode`.
    """
    m, n = c.shape
    optional = [a_scale_inv if x is None else x for x in (bias, partials)]
    launch(
        gemm_reduce_kernel,
        (triton.cdiv(m * n, REDUCE_BLOCK),),
        *(parts, a_scale_inv, b_scale_inv, optional[0], c, addend, optional[1], m * n, n),
        **{"SCALED": scaled, "HAS_BIAS": bias is not None, "SPLIT_K": parts.shape[0]},
        **{"PARTIALS": 0 if partials is None else partials.shape[0], "EARLY": starts_early(m, c.device)},
        BLOCK=REDUCE_BLOCK,
    )


def kernel_options(tile: Tile, n: int | torch.SymInt, has_bias: bool) -> dict[str, Any]:
    """The constant arguments and compile options of `gemm_kernel` for a tile and a width N."""
    return {
        "HAS_BIAS": has_bias,
        "FAST": tile.fast,
        "HALVES": tile.halves,
        "SPLIT_K": tile.split_k,
        "DESCRIPTOR_STORE": tile.split_k == 1 and isinstance(n, int) and stores_by_descriptor(n),
        **tile.constants(),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


@writes("c")
@triton.jit
def gemm_kernel(
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
    HAS_BIAS: tl.constexpr,
    FAST: tl.constexpr,
    HALVES: tl.constexpr,
    SPLIT_K: tl.constexpr,
    DESCRIPTOR_STORE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """C, or with SPLIT_K > 1 the unscaled fp32 sums of each part of K as c [SPLIT_K, M, N].

    addend: None, or what is added to C once that is rounded, with DESCRIPTOR_STORE; it may be c.
    """
    # A tile leaves in two parts: its upper and its lower half with HALVES, its left and its right half otherwise.
    PART_M: tl.constexpr = BLOCK_M // 2 if HALVES else BLOCK_M
    PART_N: tl.constexpr = BLOCK_N if HALVES else BLOCK_N // 2
    a_desc = tl.make_tensor_descriptor(a, [M, K], [K, 1], [PART_M, BLOCK_K])
    b_desc = tl.make_tensor_descriptor(b, [N, K], [K, 1], [BLOCK_N, BLOCK_K])
    c_desc = tl.make_tensor_descriptor(c, [M, N], [N, 1], [PART_M, PART_N]) if DESCRIPTOR_STORE else None
    if addend is not None:
        addend_desc = tl.make_tensor_descriptor(addend, [M, N], [N, 1], [PART_M, PART_N])
    tl.assume(K > 0)
    blocks = tl.cdiv(K, BLOCK_K * SPLIT_K)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    scale = tl.load(a_scale_inv) * tl.load(b_scale_inv)

    for index in tl.range(tl.program_id(0), tiles_m * tiles_n * SPLIT_K, tl.num_programs(0), flatten=True):
        row, column, part = tile_origin(index, tiles_m, tiles_n, SPLIT_K, BLOCK_M, BLOCK_N, GROUP_M)
        # A last part that reaches past K reads zeros: the descriptors' bounds.
        first_k = part * blocks * BLOCK_K
        if HALVES:
            one = tl.zeros((PART_M, BLOCK_N), tl.float32)
            two = tl.zeros((PART_M, BLOCK_N), tl.float32)
            one, two = accumulate_halves(a_desc, b_desc, row, column, first_k, blocks, one, two, BLOCK_K)
        else:
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            one, two = split_columns(accumulate(a_desc, b_desc, row, column, first_k, blocks, total, FAST, BLOCK_K))
        # Computed only here: no register holds it through the loop.
        row_2 = row + (PART_M if HALVES else 0)
        column_2 = column + (0 if HALVES else PART_N)
        if SPLIT_K == 1:
            one = scale_and_shift(one, scale, bias, column, N, HAS_BIAS)
            two = scale_and_shift(two, scale, bias, column_2, N, HAS_BIAS)
        if addend is not None:
            one = plus(one, addend_desc, row, column)
            two = plus(two, addend_desc, row_2, column_2)
        target = c + part.to(tl.int64) * M * N
        store_result(target, c_desc, one, row, column, M, N, DESCRIPTOR_STORE)
        store_result(target, c_desc, two, row_2, column_2, M, N, DESCRIPTOR_STORE)


@triton.jit
def tile_origin(
    index,
    tiles_m,
    tiles_n,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """(first row, first column, part of K) of a tile; GROUP_M rows of tiles are walked together, column by column."""
    tile = index // SPLIT_K
    group = tile // (GROUP_M * tiles_n)
    rows_in_group = min(tiles_m - group * GROUP_M, GROUP_M)
    row = (group * GROUP_M + tile % rows_in_group) * BLOCK_M
    return row, (tile % (GROUP_M * tiles_n)) // rows_in_group * BLOCK_N, index % SPLIT_K


@triton.jit
def accumulate(a_desc, b_desc, row, column, first_k, blocks, total, FAST: tl.constexpr, BLOCK_K: tl.constexpr):
    """total [BLOCK_M, BLOCK_N] + the tile's products of `blocks` blocks of K from first_k on."""
    for block in range(blocks):
        k = first_k + block * BLOCK_K
        x = a_desc.load([row, k])
        y = b_desc.load([column, k])
        if FAST:
            total = tl.dot(x, y.T, total)
        else:
            total += tl.dot(x, y.T)
    return total


@triton.jit
def split_columns(total):
    """The left and the right half of a tile, so that its way out needs half the shared memory."""
    halves: tl.constexpr = (total.shape[0], 2, total.shape[1] // 2)
    return tl.split(tl.permute(tl.reshape(total, halves), (0, 2, 1)))


@triton.jit
def accumulate_halves(a_desc, b_desc, row, column, first_k, blocks, upper, lower, BLOCK_K: tl.constexpr):
    """Slow accumulation onto the two halves [BLOCK_M / 2, BLOCK_N] of a tile, one after the other: terms of one half are all
    beside the sum."""
    for block in range(blocks):
        k = first_k + block * BLOCK_K
        # Triton puts a barrier before the first use of what was loaded last; in this order it falls before
        # both products, and one warp group can add while the other multiplies.
        x_lower = a_desc.load([row + lower.shape[0], k])
        x_upper = a_desc.load([row, k])
        y = b_desc.load([column, k])
        upper += tl.dot(x_upper, y.T)
        lower += tl.dot(x_lower, y.T)
    return upper, lower


@triton.jit
def scale_and_shift(total, scale, bias, column, N, HAS_BIAS: tl.constexpr):
    """total * scale + bias with two roundings: mul_rn is never contracted with the addition."""
    value = libdevice.mul_rn(total, scale)
    if HAS_BIAS:
        columns = column + tl.arange(0, total.shape[1])
        value += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    return value


@triton.jit
def plus(value, addend_desc, row, column):
    """A part of C rounded to its dtype, and that of the addend: their sum in fp32."""
    addend = addend_desc.load([row, column])
    return value.to(addend.dtype).to(tl.float32) + addend.to(tl.float32)


@triton.jit
def store_result(c, c_desc, value, row, column, M, N, DESCRIPTOR_STORE: tl.constexpr):
    """Writes a part of C, rounded to its dtype, at (row, column)."""
    value = value.to(c.dtype.element_ty)
    if DESCRIPTOR_STORE:
        c_desc.store([row, column], value)
    else:
        rows = row + tl.arange(0, value.shape[0])[:, None]
        columns = column + tl.arange(0, value.shape[1])[None, :]
        tl.store(c + rows.to(tl.int64) * N + columns, value, mask=(rows < M) & (columns < N))


@writes("c", partials="PARTIALS")
@triton.jit
def gemm_reduce_kernel(
    parts,
    a_scale_inv,
    b_scale_inv,
    bias,
    c,
    addend,
    partials,
    SIZE,
    N,
    SCALED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    PARTIALS: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """c = round(sum of parts [SPLIT_K, SIZE], in order, (* scale) + bias), SIZE = M * N. PARTIALS: places for its amax, or 0.

    addend: None, or what is added once that is rounded; it may be c.
    """
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < SIZE
    wait_for_predecessor(EARLY)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(SPLIT_K):
        total += tl.load(parts + part * tl.cast(SIZE, tl.int64) + offsets, mask=inside, other=0.0)
    if SCALED:
        total = libdevice.mul_rn(total, tl.load(a_scale_inv) * tl.load(b_scale_inv))
    if HAS_BIAS:
        total += tl.load(bias + offsets % N, mask=inside, other=0.0).to(tl.float32)
    result = total.to(c.dtype.element_ty)
    if addend is not None:
        other = tl.load(addend + offsets, mask=inside, other=0.0).to(tl.float32)
        result = (result.to(tl.float32) + other).to(c.dtype.element_ty)
    tl.store(c + offsets, result, mask=inside)
    if PARTIALS > 0:
        store_amax(partials, tl.where(inside, abs_bits(result), 0), PARTIALS)
