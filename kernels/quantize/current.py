"""x -> float8 with one scale a tensor, rowwise, transposed or both (equations and buffers: kernels/tiles/fp8.py).

`quantize` makes two launches, or one of few values: there each program reads all of them for the amax. `quantize_reference` is
the same function in plain PyTorch, equal bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch

from te_dynamo.kernels.layouts.sizes import Size, rows_and_columns, transposed
from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.runtime.dependent_launch import starts_early, wait_for_predecessor
from te_dynamo.kernels.runtime.launch import launch, size_hint
from te_dynamo.kernels.runtime.writes import writes
from te_dynamo.kernels.tiles.fp8 import (
    FLOAT32_MAX,
    Fp8Buffers,
    abs_bits,
    load_scale,
    load_tile,
    program_count,
    saturating_cast,
    scale_from_amax,
    store_partial_amax,
    store_quantized_tile,
    tile_from_the_end,
    tile_origin,
    tile_total,
    zero_padded,
)

PARTIALS = 512
"""Programs of an amax launch, so also partial amaxes: a power of two, four a multiprocessor of the H200."""

Tile = tuple[int, int, int]
"""(rows, columns, warps)"""


FEW_VALUES = 16384
"""At most so many are quantized in one launch: a program reads them in less time than a launch takes (twice as many it does not)."""

_FEW_BLOCK = 8192

CAST_TILE: Tile = (128, 128, 8)
"""Tile of `quantize`'s cast launch: the fastest of nine on an H200 at 14336x4096 (benchmarks/quantize.py --sweep)."""


# --- reference ----------------------------------------------------------------------------------------------


def scale_reference(
    amax: torch.Tensor,
    fp8_dtype: torch.dtype,
    power_of_two: bool,
    eps: float,
    largest: float = torch.finfo(torch.float32).max,
) -> torch.Tensor:
    """The scale rule of kernels/tiles/fp8.py for fp32 amaxes; an infinite quotient becomes `largest`."""
    amax = torch.where(amax < eps, torch.full_like(amax, eps), amax)
    scale = torch.full_like(amax, torch.finfo(fp8_dtype).max) / amax
    scale = torch.where(scale == torch.inf, torch.full_like(scale, largest), scale)
    scale = torch.where((amax > 0) & (amax < torch.inf), scale, torch.ones_like(scale))
    return (scale.view(torch.int32) & 0x7F800000).view(torch.float32) if power_of_two else scale


def quantize_reference(
    x: torch.Tensor,
    fp8_dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool,
    eps: float,
    amax: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """`quantize` in plain PyTorch, on any device; `amax` may be partial ones, as there."""
    rows, columns = rows_and_columns(x.shape)
    if amax is None:
        low, high = torch.aminmax(x) if x.numel() else (x.new_zeros(()), x.new_zeros(()))
        amax = torch.maximum(high, -low)
    scale = scale_reference(amax.max().abs().to(torch.float32).reshape(1), fp8_dtype, power_of_two, eps)
    fmax = torch.finfo(fp8_dtype).max
    value = (x.reshape(rows, columns).to(torch.float32) * scale).clamp_(-fmax, fmax)
    value.masked_fill_(value.isnan(), torch.nan)  # one NaN, as the hardware casts it: a CPU would keep its sign
    data = value.to(fp8_dtype)
    buffers = [data] if rowwise else []
    if columnwise:
        buffers.append(zero_padded(data.t(), *transposed(rows, columns)))
    return [*buffers, 1.0 / scale]


# --- kernels ------------------------------------------------------------------------------------------------


@writes("partials")
@triton.jit
def quantize_amax_kernel(x, partials, M, K, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """partials[p] = amax of every PARTIALS-th tile of x, from tile p on."""
    bits = tl.zeros((BLOCK_M, BLOCK_K), tl.int32)
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(K, BLOCK_K)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, column = tile_origin(tile, K, BLOCK_M, BLOCK_K)
        bits = tl.maximum(bits, abs_bits(load_tile(x, row, column, K, M, K, BLOCK_M, BLOCK_K)))
    store_partial_amax(partials, bits)


@writes("scale_inv", data="ROWWISE", transpose="COLUMNWISE")
@triton.jit
def quantize_cast_kernel(
    x,
    partials,
    data,
    transpose,
    scale_inv,
    M,
    K,
    FMAX: tl.constexpr,
    EPS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    PARTIALS: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Every tile of x: scale, cast, store."""
    wait_for_predecessor(EARLY)
    scale = load_scale(partials, scale_inv, PARTIALS, FMAX, EPS, POWER_OF_TWO)
    tiles = tile_total(M, K, BLOCK_M, BLOCK_K)
    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=1):
        row, column = tile_from_the_end(index, tiles, K, BLOCK_M, BLOCK_K)
        value = load_tile(x, row, column, K, M, K, BLOCK_M, BLOCK_K)
        store_quantized_tile(value, scale, row, column, M, K, data, transpose, ROWWISE, COLUMNWISE, BLOCK_M, BLOCK_K)


@writes("data", "scale_inv")
@triton.jit
def quantize_few_kernel(
    x,
    data,
    scale_inv,
    SIZE,
    FMAX: tl.constexpr,
    EPS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """data = x in one scale, both of SIZE values: every program finds the amax of all and casts its BLOCK."""
    wait_for_predecessor(EARLY)
    bits = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, SIZE, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        bits = tl.maximum(bits, abs_bits(tl.load(x + offsets, mask=offsets < SIZE, other=0.0)))
    amax = tl.max(bits, axis=0).to(tl.float32, bitcast=True)
    scale = scale_from_amax(amax, FMAX, EPS, POWER_OF_TWO, FLOAT32_MAX)
    if tl.program_id(0) == 0:
        tl.store(scale_inv, tl.div_rn(tl.full((), 1.0, tl.float32), scale))
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offsets, mask=offsets < SIZE, other=0.0)
    tl.store(data + offsets, saturating_cast(value, scale, data.dtype.element_ty), mask=offsets < SIZE)


# --- launcher -----------------------------------------------------------------------------------------------


def quantize(
    x: torch.Tensor,
    fp8_dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool,
    eps: float,
    amax: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> list[torch.Tensor]:
    """[data?, transpose?, scale_inv] of x, of any rank >= 1, read as [M, K].

    data [M, K] and transpose [K, M rounded up to 16] (zero past M) are `fp8_dtype`, scale_inv is fp32 [1].
    amax (fp32 [1], or a power of two of partial ones), where the caller knows it, saves a launch and a read of x. `tile`
    overrides the cast's.
    """
    x = x.contiguous()
    rows, columns = rows_and_columns(x.shape)
    buffers = Fp8Buffers(rows, columns, x.device, fp8_dtype, rowwise, columnwise)
    if amax is None and in_one_launch(x, columnwise):
        _quantize_few(x, buffers, buffers.constants(power_of_two, eps))
        return buffers.as_list()
    partials = partial_amaxes(x) if amax is None else amax
    block_m, block_k, warps = tile or cast_tile(rows, columns, columnwise)
    for usage in buffers.launches(x.element_size()):
        launch(
            quantize_cast_kernel,
            (program_count(rows, columns, block_m, block_k, x.device),),
            x=x,
            partials=partials,
            M=rows,
            K=columns,
            **buffers.pointers(unused=x),
            **buffers.constants(power_of_two, eps),
            **usage,
            PARTIALS=partials.shape[0],
            EARLY=starts_early(rows, x.device),
            BLOCK_M=block_m,
            BLOCK_K=block_k,
            num_warps=warps,
        )
    return buffers.as_list()


def in_one_launch(x: torch.Tensor, columnwise: bool) -> bool:
    """Whether `quantize` finds the amax in the launch that casts."""
    return not columnwise and isinstance(x.numel(), int) and x.numel() <= FEW_VALUES


def _quantize_few(x: torch.Tensor, buffers: Fp8Buffers, constants: dict[str, Any]) -> None:
    block = min(_FEW_BLOCK, max(triton.next_power_of_2(x.numel()), 32))
    launch(
        quantize_few_kernel,
        (max(triton.cdiv(x.numel(), block), 1),),
        x=x,
        **buffers.held,
        SIZE=x.numel(),
        **constants,
        EARLY=starts_early(rows_and_columns(x.shape)[0], x.device),
        BLOCK=block,
        num_warps=max(block // 1024, 1),
    )


def partial_amaxes(x: torch.Tensor) -> torch.Tensor:
    """fp32 [PARTIALS], whose maximum is the amax of a contiguous x."""
    rows, columns = rows_and_columns(x.shape)
    partials = torch.empty(PARTIALS, dtype=torch.float32, device=x.device)
    block_m, block_k, warps = amax_tile(columns)
    launch(
        quantize_amax_kernel,
        (PARTIALS,),
        x=x,
        partials=partials,
        M=rows,
        K=columns,
        BLOCK_M=block_m,
        BLOCK_K=block_k,
        num_warps=warps,
    )
    return partials


# --- tile choice --------------------------------------------------------------------------------------------


def amax_tile(columns: int) -> Tile:
    """Tile of an amax launch, whose rows are long: two 16-byte loads a thread and tensor, the fastest on an H200."""
    block_k = min(max(triton.next_power_of_2(columns), 16), 1024)
    return 4096 // block_k, block_k, 8


def cast_tile(rows: Size, columns: int, columnwise: bool, large: Tile = CAST_TILE) -> Tile:
    """Tile of a cast launch: `large` (the kernel's own choice), or a small one.

    With a transpose, its side of the tile fills whole 128-byte lines of fp8, unless the tensor is too small
    to give every multiprocessor several such tiles. Without one, only rows count.
    """
    if not columnwise:
        return amax_tile(columns)
    small = size_hint(rows) * columns < 4 * 132 * 128 * 128
    return (64, 64, 4) if small and large[0] * large[1] > 64 * 64 else large
