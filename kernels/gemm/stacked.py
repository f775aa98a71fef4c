"""FP8 GEMM of stacked operands: linears that share an input, in one product.

    along "M"    C[m, n] = round(A @ B^T * (a_scale_inv[segment of m] * b_scale_inv))          A stacks tensors by rows
    along "N"    C[m, n] = round(A @ B^T * (a_scale_inv * b_scale_inv[segment of n]) + bias[n])  B stacks tensors by rows
    along "K"    C[m, n] = round(sum over segments s: (A_s @ B_s^T) * (a_scale_inv[s] * b_scale_inv[s]))      both, by columns

Along M and N every element has the bits that kernels/gemm/current.py gives the segment by itself, K in one part. Along K the sum is
rounded to C's dtype once, where a sum of products has each of them rounded. Segments are multiples of 128, and a tile is
taken only if it divides them, so that it has one scale and a block of K one too.

Along K the sum is held in units of one segment's scale. At a border it is multiplied by the quotient of the two scales.
Segments are taken in ascending order of their scales: the quotient is at most 1, and no sum overflows that would not in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from te_dynamo.kernels.gemm.choose import choose_for
from te_dynamo.kernels.gemm.current import (
    accumulate,
    accumulate_halves,
    check_operands,
    kernel_options,
    scale_and_shift,
    split_columns,
    store_result,
    tile_origin,
)
from te_dynamo.kernels.gemm.decode import launch_decode
from te_dynamo.kernels.gemm.specialized.current import stacked_specialized_out
from te_dynamo.kernels.gemm.tiles import DecodeTile, Tile
from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.runtime.launch import is_recording, launch
from te_dynamo.kernels.runtime.margin import gemm_multiprocessors
from te_dynamo.kernels.runtime.writes import writes
from te_dynamo.kernels.tiles.stacking import Stacking, check_segments


def gemm_stacked(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
    along: str,
    segments: Sequence[int],
) -> torch.Tensor:
    """The module docstring's C [M, N] of dtype `out_dtype` (bfloat16, float16 or float32), on a CUDA device.

    a [M, K], b [N, K]: float8, contiguous, K a multiple of 16; not both e5m2. M may be symbolic unless a is stacked by rows.
    a_scale_inv, b_scale_inv: float32, [S] of an operand that is stacked, else [1].
    bias: [N], along "N" only, or None; the biases of the parts, one behind the other.
    along, segments: the stacked dimension, "M", "N" or "K", and its two or three parts, multiples of 128.
    Raises ValueError for anything else. The same input gives the same bits on every run.
    """
    stacking = check_stack(a, a_scale_inv, b, b_scale_inv, bias, out_dtype, along, segments)
    choice = choose_for(a, b, fast_accum, out_dtype, stacking=stacking, recorded=is_recording())
    if choice.specialized:
        c = torch.empty((a.shape[0], b.shape[0]), dtype=out_dtype, device=a.device)
        stacked_specialized_out(
            a, a_scale_inv, b, b_scale_inv, bias, fast=fast_accum, along=along, segments=segments, out=c
        )
        return c
    return gemm_stacked_with_tile(choice.tile, a, a_scale_inv, b, b_scale_inv, bias, out_dtype, stacking)


def gemm_stacked_reference(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
    along: str,
    segments: Sequence[int],
) -> torch.Tensor:
    """The same in plain PyTorch on any device, products and sums in fp32 whatever `fast_accum` says."""
    stacking = check_stack(a, a_scale_inv, b, b_scale_inv, bias, out_dtype, along, segments)
    lengths = list(stacking.segments)
    scales = a_scale_inv * b_scale_inv
    if along == "K":
        parts = zip(a.float().split(lengths, 1), b.float().split(lengths, 1), scales, strict=True)
        return sum(one @ other.t() * scale for one, other, scale in parts).to(out_dtype)  # type: ignore[union-attr]
    if along == "M":
        rows = a.float().split(lengths)
        return torch.cat([part @ b.float().t() * s for part, s in zip(rows, scales, strict=True)]).to(out_dtype)
    columns = b.float().split(lengths)
    total = torch.cat([a.float() @ part.t() * s for part, s in zip(columns, scales, strict=True)], 1)
    return (total if bias is None else total + bias.float()).to(out_dtype)


def check_stack(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    along: str,
    segments: Sequence[int],
) -> Stacking:
    """Raises ValueError, saying what is wrong, for operands that the GEMM does not take."""
    check_operands(a, b, bias, out_dtype)
    stacking = Stacking(along, tuple(segments))
    check_segments(stacking.segments)
    if along not in ("M", "N", "K"):
        raise ValueError(f"te gemm_stacked: expected a stacked dimension M, N or K, got {along!r}")
    if bias is not None and along != "N":
        raise ValueError(f"te gemm_stacked: expected no bias of operands stacked along {along}")
    length = {"M": a.shape[0], "N": b.shape[0], "K": a.shape[1]}[along]
    if sum(segments) != length:
        raise ValueError(f"te gemm_stacked: segments {tuple(segments)} must sum to {along} = {length}")
    for name, scales, dims in (("a", a_scale_inv, "MK"), ("b", b_scale_inv, "NK")):
        expected = len(segments) if along in dims else 1
        if tuple(scales.shape) != (expected,):
            raise ValueError(f"te gemm_stacked: expected {name}_scale_inv [{expected}], got {tuple(scales.shape)}")
    return stacking


def gemm_stacked_with_tile(
    tile: Tile | DecodeTile,
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    stacking: Stacking,
) -> torch.Tensor:
    """`gemm_stacked` with a tile of the caller's choice, which decides fast or slow accumulation; checks nothing."""
    m, k, n = a.shape[0], a.shape[1], b.shape[0]
    c = torch.empty((m, n), dtype=out_dtype, device=a.device)
    if isinstance(tile, DecodeTile):
        launch_decode(tile, a, a_scale_inv, b, b_scale_inv, bias, c, stacking)
        return c
    programs = gemm_multiprocessors(a.device) * tile.ctas_per_sm
    arguments = (a, a_scale_inv, b, b_scale_inv, a_scale_inv if bias is None else bias, c, m, n, k)
    launch(gemm_stacked_kernel, (programs,), *arguments, **stacked_options(tile, n, stacking, bias is not None))
    return c


def stacked_options(tile: Tile, n: int, stacking: Stacking, has_bias: bool = False) -> dict[str, object]:
    """The constant arguments and compile options of `gemm_stacked_kernel`."""
    options = kernel_options(tile, n, has_bias)
    del options["SPLIT_K"]
    return {**stacking.constants(), **options}


@writes("c")
@triton.jit
def gemm_stacked_kernel(
    a,
    a_scale_inv,
    b,
    b_scale_inv,
    bias,
    c,
    M,
    N,
    K,
    STACKED: tl.constexpr,
    SEGMENTS: tl.constexpr,
    EDGE_1: tl.constexpr,
    EDGE_2: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FAST: tl.constexpr,
    HALVES: tl.constexpr,
    DESCRIPTOR_STORE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """C of operands stacked along STACKED."""
    PART_M: tl.constexpr = BLOCK_M // 2 if HALVES else BLOCK_M
    PART_N: tl.constexpr = BLOCK_N if HALVES else BLOCK_N // 2
    # Between two tiles, loads of the next one overlap the store only where one loop makes the whole sum.
    FLATTEN: tl.constexpr = STACKED != "K"
    a_desc = tl.make_tensor_descriptor(a, [M, K], [K, 1], [PART_M, BLOCK_K])
    b_desc = tl.make_tensor_descriptor(b, [N, K], [K, 1], [BLOCK_N, BLOCK_K])
    c_desc = tl.make_tensor_descriptor(c, [M, N], [N, 1], [PART_M, PART_N]) if DESCRIPTOR_STORE else None
    tl.assume(K > 0)
    blocks = tl.cdiv(K, BLOCK_K)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for index in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=FLATTEN):
        row, column, _ = tile_origin(index, tiles_m, tiles_n, 1, BLOCK_M, BLOCK_N, GROUP_M)
        if STACKED == "K":
            total, scale = _accumulate_segments(
                a_desc,
                b_desc,
                a_scale_inv,
                b_scale_inv,
                row,
                column,
                K,
                SEGMENTS,
                EDGE_1,
                EDGE_2,
                FAST,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
            )
            one, two = split_columns(total)
        else:
            if HALVES:
                one = tl.zeros((PART_M, BLOCK_N), tl.float32)
                two = tl.zeros((PART_M, BLOCK_N), tl.float32)
                one, two = accumulate_halves(a_desc, b_desc, row, column, 0, blocks, one, two, BLOCK_K)
            else:
                total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                one, two = split_columns(accumulate(a_desc, b_desc, row, column, 0, blocks, total, FAST, BLOCK_K))
            if STACKED == "M":
                scale = tl.load(a_scale_inv + _segment_at(row, EDGE_1, EDGE_2)) * tl.load(b_scale_inv)
            else:
                scale = tl.load(a_scale_inv) * tl.load(b_scale_inv + _segment_at(column, EDGE_1, EDGE_2))
        row_2 = row + (PART_M if HALVES else 0)
        column_2 = column + (0 if HALVES else PART_N)
        one = scale_and_shift(one, scale, bias, column, N, HAS_BIAS)
        two = scale_and_shift(two, scale, bias, column_2, N, HAS_BIAS)
        store_result(c, c_desc, one, row, column, M, N, DESCRIPTOR_STORE)
        store_result(c, c_desc, two, row_2, column_2, M, N, DESCRIPTOR_STORE)


@triton.jit
def _accumulate_segments(
    a_desc,
    b_desc,
    a_scale_inv,
    b_scale_inv,
    row,
    column,
    K,
    SEGMENTS: tl.constexpr,
    EDGE_1: tl.constexpr,
    EDGE_2: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """(a tile's sum over all segments, the scale whose units it is in)."""
    scale = tl.full((), 0.0, tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for rank in tl.range(SEGMENTS):
        first, last, next_scale = _ranked_segment(rank, a_scale_inv, b_scale_inv, K, SEGMENTS, EDGE_1, EDGE_2)
        total *= tl.where(next_scale > 0.0, scale / next_scale, 0.0)
        scale = next_scale
        blocks = tl.cdiv(last - first, BLOCK_K)
        total = accumulate(a_desc, b_desc, row, column, first, blocks, total, FAST, BLOCK_K)
    return total, scale


@triton.jit
def _segment_at(position, EDGE_1: tl.constexpr, EDGE_2: tl.constexpr):
    """The segment that holds a position."""
    return (position >= EDGE_1).to(tl.int32) + (position >= EDGE_2).to(tl.int32)


@triton.jit
def _ranked_segment(
    rank, a_scale_inv, b_scale_inv, K, SEGMENTS: tl.constexpr, EDGE_1: tl.constexpr, EDGE_2: tl.constexpr
):
    """(first k, last k + 1, scale) of the segment of that rank by scale, the smallest first."""
    one = tl.load(a_scale_inv) * tl.load(b_scale_inv)
    two = tl.load(a_scale_inv + 1) * tl.load(b_scale_inv + 1)
    if SEGMENTS == 2:
        is_two = (two < one) != (rank == 1)
        return tl.where(is_two, EDGE_1, 0), tl.where(is_two, K, EDGE_1), tl.where(is_two, two, one)
    else:
        three = tl.load(a_scale_inv + 2) * tl.load(b_scale_inv + 2)
        is_one = (two < one).to(tl.int32) + (three < one).to(tl.int32) == rank
        is_two = (one <= two).to(tl.int32) + (three < two).to(tl.int32) == rank
        first = tl.where(is_one, 0, tl.where(is_two, EDGE_1, EDGE_2))
        last = tl.where(is_one, EDGE_1, tl.where(is_two, EDGE_2, K))
        return first, last, tl.where(is_one, one, tl.where(is_two, two, three))
