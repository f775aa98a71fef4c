"""A LayerNorm whose weight and bias are a sample's own, alone and fused with quantization: adaLN, of DiT, Flux and Stable Diffusion 3.

    y[b, t] = (x[b, t] - mean) * rstd * w[b] + bias[b]          w = weight, or 1 + weight when `zero_centered`

x is [B, .., K], weight and bias are [B, 1, .., K], computed by the model (from the time step). All else is as in norm.py: fp32 with one
rounding at the end, two launches where it is fused, and the same bits as unfused and then `quantize`.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from te_dynamo.kernels.norm.functions import (
    load_affine,
    load_columns,
    no_magnitudes,
    normalize,
    row_magnitudes,
    row_statistics,
    store_row_amax,
)
from te_dynamo.kernels.norm.norm import layer_norm_reference, row_block, row_programs
from te_dynamo.kernels.quantize.current import Tile, cast_tile, quantize_reference
from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.runtime.launch import launch
from te_dynamo.kernels.runtime.writes import writes
from te_dynamo.kernels.tiles.fp8 import (
    Fp8Buffers,
    load_scale,
    load_tile,
    program_count,
    rows_and_columns,
    store_quantized_tile,
    store_tile,
    tile_from_the_end,
    tile_total,
)

__all__ = [
    "layer_norm_modulate",
    "layer_norm_modulate_quantize",
    "layer_norm_modulate_quantize_reference",
    "layer_norm_modulate_reference",
]

CAST_TILE: Tile = (64, 64, 4)
"""Tile of the cast launch: it holds weight and bias of every row beside x."""


# --- reference ----------------------------------------------------------------------------------------------


def layer_norm_modulate_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, zero_centered: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`layer_norm_modulate` in plain PyTorch."""
    return layer_norm_reference(x, 1.0 + weight.to(torch.float32) if zero_centered else weight, bias, eps)


def layer_norm_modulate_quantize_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    zero_centered: bool,
    fp8_dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool,
    eps_amax: float,
    keep_output: bool,
) -> list[torch.Tensor]:
    """`layer_norm_modulate_quantize` in plain PyTorch."""
    y, mean, rstd = layer_norm_modulate_reference(x, weight, bias, eps, zero_centered)
    buffers = quantize_reference(y, fp8_dtype, rowwise, columnwise, power_of_two, eps_amax)
    return [*([y] if keep_output else []), mean, rstd, *buffers]


# --- kernels ------------------------------------------------------------------------------------------------


@writes("mean", "rstd", y="not QUANTIZE", partials="QUANTIZE")
@triton.jit
def modulated_norm_rows_kernel(
    x,
    weight,
    bias,
    y,
    mean,
    rstd,
    partials,
    M,
    K,
    rows_of_sample,
    weight_stride,
    bias_stride,
    EPS_NORM: tl.constexpr,  # not a float argument: Inductor would pass it as fp64
    ZERO_CENTERED: tl.constexpr,
    QUANTIZE: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTIALS: tl.constexpr,
):
    """Statistics of every num_programs-th row, then y (unfused) or the partial amax of y (QUANTIZE)."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    bits = no_magnitudes(BLOCK, DTYPE)
    for row in tl.range(tl.program_id(0), M, tl.num_programs(0), num_stages=3):
        row_start = x + tl.cast(row, tl.int64) * K
        sample = tl.cast(row // rows_of_sample, tl.int64)
        first = load_columns(row_start, 0, K, BLOCK)
        row_mean, row_rstd = row_statistics(row_start, first, K, EPS_NORM, True, ONE_BLOCK, BLOCK)
        tl.store(rstd + row, row_rstd)
        tl.store(mean + row, row_mean)
        for block in range(1 if ONE_BLOCK else tl.cdiv(K, BLOCK)):
            start = block * BLOCK
            columns = start + tl.arange(0, BLOCK)
            values = first
            if not ONE_BLOCK:
                values = load_columns(row_start, start, K, BLOCK)
            w, b = load_affine(
                weight + sample * weight_stride, bias + sample * bias_stride, start, K, True, True, BLOCK
            )
            result = normalize(values, row_mean, row_rstd, w, b, True, True, True, False, ZERO_CENTERED, DTYPE)
            if QUANTIZE:
                bits = tl.maximum(bits, row_magnitudes(result, columns, K, True))
            else:
                tl.store(y + tl.cast(row, tl.int64) * K + columns, result, mask=columns < K)
    if QUANTIZE:
        store_row_amax(partials, bits, PARTIALS, DTYPE)


@writes("scale_inv", y="KEEP_OUTPUT", data="ROWWISE", transpose="COLUMNWISE")
@triton.jit
def modulated_norm_cast_kernel(
    x,
    weight,
    bias,
    mean,
    rstd,
    partials,
    y,
    data,
    transpose,
    scale_inv,
    M,
    K,
    rows_of_sample,
    weight_stride,
    bias_stride,
    ZERO_CENTERED: tl.constexpr,
    KEEP_OUTPUT: tl.constexpr,
    FMAX: tl.constexpr,
    EPS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    PARTIALS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Every tile of y, made again from the rows' statistics, to every output that is asked for."""
    scale = load_scale(partials, scale_inv, PARTIALS, FMAX, EPS, POWER_OF_TWO)
    tiles = tile_total(M, K, BLOCK_M, BLOCK_K)
    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=1):
        row, column = tile_from_the_end(index, tiles, K, BLOCK_M, BLOCK_K)
        values = load_tile(x, row, column, K, M, K, BLOCK_M, BLOCK_K)
        rows, columns = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_K)
        inside = (rows < M)[:, None] & (columns < K)[None, :]
        samples = tl.cast(rows // rows_of_sample, tl.int64)[:, None]
        w = tl.load(weight + samples * weight_stride + columns[None, :], mask=inside, other=0.0)
        b = tl.load(bias + samples * bias_stride + columns[None, :], mask=inside, other=0.0)
        result = normalize(
            values,
            tl.load(mean + rows, mask=rows < M, other=0.0)[:, None],
            tl.load(rstd + rows, mask=rows < M, other=0.0)[:, None],
            w,
            b,
            True,
            True,
            True,
            False,
            ZERO_CENTERED,
            x.dtype.element_ty,
        )
        if KEEP_OUTPUT:
            store_tile(y, result, row, column, M, K, BLOCK_M, BLOCK_K)
        store_quantized_tile(result, scale, row, column, M, K, data, transpose, ROWWISE, COLUMNWISE, BLOCK_M, BLOCK_K)


# --- launchers ----------------------------------------------------------------------------------------------


def layer_norm_modulate(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, zero_centered: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, mean, rstd): y in x's shape and dtype, the statistics fp32 [rows]. weight and bias: any float dtype, [B, 1, .., K]."""
    x = x.contiguous()
    y = torch.empty_like(x)
    mean, rstd, _ = _rows(x, eps, _modulation(x, weight, bias, zero_centered), y)
    return y, mean, rstd


def layer_norm_modulate_quantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    zero_centered: bool,
    fp8_dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool,
    eps_amax: float,
    keep_output: bool,
    tile: Tile | None = None,
) -> list[torch.Tensor]:
    """[y?, mean, rstd, data?, transpose?, scale_inv], equal to `layer_norm_modulate` then `quantize`."""
    x = x.contiguous()
    rows, columns = rows_and_columns(x)
    modulation = _modulation(x, weight, bias, zero_centered)
    mean, rstd, partials = _rows(x, eps, modulation, None)
    buffers = Fp8Buffers(rows, columns, x.device, fp8_dtype, rowwise, columnwise)
    y = [torch.empty_like(x)] if keep_output else []
    block_m, block_k, warps = tile or cast_tile(rows, columns, columnwise, CAST_TILE)
    for number, usage in enumerate(buffers.launches(x.element_size())):
        launch(
            modulated_norm_cast_kernel,
            (program_count(rows, columns, block_m, block_k, x.device),),
            x=x,
            **modulation,
            mean=mean,
            rstd=rstd,
            partials=partials,
            y=y[0] if y else x,
            M=rows,
            K=columns,
            KEEP_OUTPUT=keep_output and number == 0,
            **buffers.pointers(unused=x),
            **buffers.constants(power_of_two, eps_amax),
            **usage,
            PARTIALS=partials.shape[0],
            BLOCK_M=block_m,
            BLOCK_K=block_k,
            num_warps=warps,
        )
    return [*y, mean, rstd, *buffers.as_list()]


def _modulation(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, zero_centered: bool) -> dict[str, Any]:
    """The kernel arguments that say which modulation it is. Parts of a wider tensor are read where they lie."""
    weight, bias = (t if t.stride(-1) == 1 else t.contiguous() for t in (weight, bias))
    return {
        "weight": weight,
        "bias": bias,
        "rows_of_sample": math.prod(x.shape[1:-1]),
        "weight_stride": weight.stride(0),
        "bias_stride": bias.stride(0),
        "ZERO_CENTERED": zero_centered,
    }


def _rows(
    x: torch.Tensor, eps: float, modulation: dict[str, Any], y: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(mean, rstd, partials) of the row launch: it writes y if that is given, partial amaxes if not."""
    rows, columns = rows_and_columns(x)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    mean = torch.empty_like(rstd)
    block, warps = row_block(columns, x.element_size(), True)
    programs = row_programs(warps, x.device)
    count = triton.next_power_of_2(programs)
    partials = torch.empty(count, dtype=torch.float32, device=x.device) if y is None else rstd
    launch(
        modulated_norm_rows_kernel,
        (programs,),
        x=x,
        **modulation,
        y=x if y is None else y,
        mean=mean,
        rstd=rstd,
        partials=partials,
        M=rows,
        K=columns,
        EPS_NORM=eps,
        QUANTIZE=y is None,
        ONE_BLOCK=columns <= block,
        BLOCK=block,
        PARTIALS=count,
        num_warps=warps,
    )
    return mean, rstd, partials
