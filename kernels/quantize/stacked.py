"""Several tensors -> float8 in the buffers of one, each with its own scale (kernels/quantize/current.py).

Stacked by rows, tensors [M_i, K] are written as one [sum of M_i, K]; stacked by columns, [M, K_i] as one [M, sum of K_i].
`scale_inv` has an element for each. Every element has the bits that `quantize` gives it. All of them take two launches. The GEMMs of kernels/gemm/product.py
read this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from te_dynamo.kernels.layouts.sizes import Size, rows_and_columns
from te_dynamo.kernels.quantize.amaxes import partial_amaxes_of
from te_dynamo.kernels.quantize.current import PARTIALS, cast_tile, quantize_reference
from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.runtime.launch import launch
from te_dynamo.kernels.runtime.writes import writes
from te_dynamo.kernels.tiles.fp8 import (
    Fp8Buffers,
    load_scale,
    load_tile,
    program_count,
    store_quantized_tile,
    tile_from_the_end,
    tile_total,
)
from te_dynamo.kernels.tiles.stacking import MOST_SEGMENTS, check_segments


def stacked_size(xs: Sequence[torch.Tensor], by_columns: bool) -> tuple[Size, Size]:
    """(M, K) of the stack. Raises ValueError unless the tensors fit and their stacked sides are what kernels take."""
    sizes = [rows_and_columns(x.shape) for x in xs]
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
    amaxes: Sequence[torch.Tensor | None] | None = None,
) -> list[torch.Tensor]:
    """`quantize_stacked` in plain PyTorch, on any device."""
    stacked_size(xs, by_columns)
    form = fp8_dtype, rowwise, columnwise, power_of_two, eps
    each = [quantize_reference(x, *form, amax) for x, amax in zip(xs, amaxes or [None] * len(xs), strict=True)]
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
    x0,
    x1,
    x2,
    partials0,
    partials1,
    partials2,
    COUNT_0,
    COUNT_1,
    COUNT_2,
    data,
    transpose,
    scale_inv,
    SIDE_0,
    SIDE_1,
    SIDE_2,
    other,
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
    """Every tile of x_i, scaled and cast, to its place in the stack: SIDE_i is what is stacked, `other` what all have in common.

    The last tensor comes first, as its amaxes were found last. COUNT_i of PARTIALS partial amaxes are there.
    """
    slot = tl.num_programs(1) - 1 - tl.program_id(1)
    x = tl.where(slot == 0, x0, tl.where(slot == 1, x1, x2))
    partials = tl.where(slot == 0, partials0, tl.where(slot == 1, partials1, partials2))
    count = tl.where(slot == 0, COUNT_0, tl.where(slot == 1, COUNT_1, COUNT_2))
    side = tl.where(slot == 0, SIDE_0, tl.where(slot == 1, SIDE_1, SIDE_2))
    first = tl.where(slot == 0, 0, tl.where(slot == 1, SIDE_0, SIDE_0 + SIDE_1))
    length = SIDE_0 + SIDE_1 + SIDE_2
    scale = load_scale(partials, scale_inv + slot, PARTIALS, FMAX, EPS, POWER_OF_TWO, count)
    if BY_COLUMNS:
        M = other
        K = side
        padded = (M + 15) // 16 * 16
        data += first
        transpose += tl.cast(first, tl.int64) * padded
        data_stride = length
        transpose_stride = padded
    else:
        M = side
        K = other
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
    The stacked sides are two or three multiples of 128. amaxes: of each x whose amax is known already, fp32 [1] or PARTIALS partial ones.
    Raises ValueError for tensors that do not stack.
    """
    rows, columns = stacked_size(xs, by_columns)
    buffers = Fp8Buffers(rows, columns, xs[0].device, fp8_dtype, rowwise, columnwise, scales=len(xs))
    xs = [x.contiguous() for x in xs]
    sizes = [rows_and_columns(x.shape) for x in xs]
    partials = _with_all_amaxes(xs, amaxes or [None] * len(xs))
    block_m, block_k, warps = cast_tile(rows, columns, columnwise)
    for usage in buffers.launches(xs[0].element_size()):
        launch(
            quantize_stacked_kernel,
            (max(program_count(m, k, block_m, block_k, xs[0].device) for m, k in sizes), len(xs)),
            **_numbered("x", xs, xs[0]),
            **_numbered("partials", partials, partials[0]),
            **_numbered("COUNT_", [p.shape[0] for p in partials], 1),
            **_numbered("SIDE_", [size[by_columns] for size in sizes], 0),
            other=sizes[0][not by_columns],
            BY_COLUMNS=by_columns,
            **buffers.pointers(unused=xs[0]),
            **buffers.constants(power_of_two, eps),
            **usage,
            PARTIALS=PARTIALS,
            BLOCK_M=block_m,
            BLOCK_K=block_k,
            num_warps=warps,
        )
    return buffers.as_list()


def _with_all_amaxes(xs: Sequence[torch.Tensor], amaxes: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """The amaxes, those that are not known found in one launch."""
    unknown = [x for x, amax in zip(xs, amaxes, strict=True) if amax is None]
    found = iter(partial_amaxes_of(unknown) if unknown else ())
    return [next(found) if amax is None else amax for amax in amaxes]


def _numbered(name: str, values: Sequence[Any], unused: Any) -> dict[str, Any]:
    """The kernel's arguments of that name, one for each tensor that may be in a stack."""
    return {f"{name}{i}": values[i] if i < len(values) else unused for i in range(MOST_SEGMENTS)}
