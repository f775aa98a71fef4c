"""Several tensors -> float8 in the buffers of one, each with its own scale (kernels/quantize/current.py).

Stacked by rows, tensors [M_i, K] are written as one [sum of M_i, K]; stacked by columns, [M, K_i] as one [M, sum of K_i].
`scale_inv` has an element for each. Every element has the bits that `quantize` gives it. The GEMMs of kernels/gemm/stacked.py
read this.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from te_dynamo.kernels.quantize.current import PARTIALS, cast_tile, partial_amaxes, quantize_reference
from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.runtime.launch import launch
from te_dynamo.kernels.runtime.writes import writes
from te_dynamo.kernels.tiles.fp8 import (
    Fp8Buffers,
    Size,
    load_scale,
    load_tile,
    program_count,
    rows_and_columns,
    store_quantized_tile,
    tile_from_the_end,
    tile_total,
)
from te_dynamo.kernels.tiles.stacking import check_segments


def stacked_size(xs: Sequence[torch.Tensor], by_columns: bool) -> tuple[Size, Size]:
    """(M, K) of the stack. Raises ValueError unless the tensors fit and their stacked sides are what kernels take."""
    sizes = [rows_and_columns(x) for x in xs]
    check_segments(tuple(size[by_columns] for size in sizes))
    if any(size[not by_columns] != sizes[0][not by_columns] for size in sizes) or len({x.dtype for x in xs}) > 1:
        what = "rows" if by_columns else "columns"
        found = ", ".join(f"{x.dtype} {tuple(x.shape)}" for x in xs)
        raise ValueError(f"te quantize_stacked: expected tensors of one dtype with equally many {what}, got {found}")
    total = sum(size[by_columns] for size in sizes)
    return (sizes[0][0], total) if by_columns else (total, sizes[0][1])


def quantize_stacked_reference(
    xs: Sequence[torch.Tensor],
    fp8_dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool,
    eps: float,
    by_columns: bool,
) -> list[torch.Tensor]:
    """`quantize_stacked` in plain PyTorch, on any device."""
    stacked_size(xs, by_columns)
    each = [quantize_reference(x, fp8_dtype, rowwise, columnwise, power_of_two, eps) for x in xs]
    return stack_buffers(each, rowwise, columnwise, by_columns)


def stack_buffers(
    each: Sequence[Sequence[torch.Tensor]], rowwise: bool, columnwise: bool, by_columns: bool
) -> list[torch.Tensor]:
    """The buffers of the stack from the buffers of each tensor, in plain PyTorch."""
    dims = ([int(by_columns)] if rowwise else []) + ([int(not by_columns)] if columnwise else []) + [0]
    parts = zip(*each, strict=True)
    # float8 travels as integers: torch concatenates no float8 on every device.
    return [
        torch.cat([p.view(torch.uint8) for p in part], dim).view(part[0].dtype)
        if part[0].element_size() == 1
        else torch.cat(part, dim)
        for dim, part in zip(dims, parts, strict=True)
    ]


@writes("scale_inv", data="ROWWISE", transpose="COLUMNWISE")
@triton.jit
def quantize_stacked_kernel(
    x,
    partials,
    data,
    transpose,
    scale_inv,
    M,
    K,
    first,
    length,
    SLOT: tl.constexpr,
    BY_COLUMNS: tl.constexpr,
    FMAX: tl.constexpr,
    EPS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    PARTIALS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Every tile of x [M, K], scaled and cast, to its place in the stack: number SLOT, at `first` of `length`."""
    scale = load_scale(partials, scale_inv + SLOT, PARTIALS, FMAX, EPS, POWER_OF_TWO)
    padded = (M + 15) // 16 * 16
    if BY_COLUMNS:
        data += first
        transpose += tl.cast(first, tl.int64) * padded
        data_stride = length
        transpose_stride = padded
    else:
        data += tl.cast(first, tl.int64) * K
        transpose += first
        data_stride = K
        transpose_stride = length
    tiles = tile_total(M, K, BLOCK_M, BLOCK_K)
    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=1):
        row, column = tile_from_the_end(index, tiles, K, BLOCK_M, BLOCK_K)
        value = load_tile(x, row, column, K, M, K, BLOCK_M, BLOCK_K)
        store_quantized_tile(
            value,
            scale,
            row,
            column,
            M,
            K,
            data,
            transpose,
            ROWWISE,
            COLUMNWISE,
            BLOCK_M,
            BLOCK_K,
            data_stride,
            transpose_stride,
        )


def quantize_stacked(
    xs: Sequence[torch.Tensor],
    fp8_dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool,
    eps: float,
    by_columns: bool,
    amaxes: Sequence[torch.Tensor | None] | None = None,
) -> list[torch.Tensor]:
    """[data?, transpose?, scale_inv] of the stack of xs, each of any rank >= 1 and read as a matrix.

    data [M, K] and transpose [K, M rounded up to 16] of the stack's M and K are `fp8_dtype`, scale_inv is fp32 [len(xs)].
    The stacked sides are two or three multiples of 128. amaxes: fp32 [1] of each x whose amax is known already.
    Raises ValueError for tensors that do not stack.
    """
    rows, columns = stacked_size(xs, by_columns)
    buffers = Fp8Buffers(rows, columns, xs[0].device, fp8_dtype, rowwise, columnwise, scales=len(xs))
    sides = [rows_and_columns(x)[by_columns] for x in xs]
    firsts = itertools.accumulate(sides, initial=0)
    for slot, (x, amax, first) in enumerate(zip(xs, amaxes or [None] * len(xs), firsts, strict=False)):
        x = x.contiguous()
        m, k = rows_and_columns(x)
        partials = partial_amaxes(x) if amax is None else amax
        block_m, block_k, warps = cast_tile(m, k, columnwise)
        for usage in buffers.launches(x.element_size()):
            launch(
                quantize_stacked_kernel,
                (program_count(m, k, block_m, block_k, x.device),),
                x=x,
                partials=partials,
                M=m,
                K=k,
                first=first,
                length=sum(sides),
                SLOT=slot,
                BY_COLUMNS=by_columns,
                **buffers.pointers(unused=x),
                **buffers.constants(power_of_two, eps),
                **usage,
                PARTIALS=PARTIALS if amax is None else 1,
                BLOCK_M=block_m,
                BLOCK_K=block_k,
                num_warps=warps,
            )
    return buffers.as_list()
