"""RMSNorm and LayerNorm over the last dimension, and both fused with quantization.

    rms_norm    y = x * rstd * w             rstd = 1 / sqrt(mean(x^2) + eps)
    layer_norm  y = (x - mean) * rstd * w + b      rstd = 1 / sqrt(mean((x - mean)^2) + eps)

w is weight, or 1 + weight when `zero_centered` (Gemma); with `cast_before_weight` (Hugging Face's Llama) the
product x * rstd is rounded to x's dtype before w. Arithmetic is fp32 with one rounding at the end; rstd and
mean are fp32 [rows].

The fused form reads x twice and writes no bf16: launch 1 finds each row's statistics and the amax of the
rounded y, launch 2 makes y again from the statistics and casts it. `norm_rows_kernel` is launch 1 and the
unfused kernel alike, with one block shape, so that the statistics are the same sum in the same order; the
rest is elementwise in shared device functions. Fused therefore equals unfused plus `quantize`, bit for bit.
"""

from __future__ import annotations

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
from te_dynamo.kernels.quantize.current import Tile, cast_tile, quantize_reference
from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.runtime.launch import launch, multiprocessor_count
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
    "layer_norm",
    "layer_norm_quantize",
    "layer_norm_quantize_reference",
    "layer_norm_reference",
    "rms_norm",
    "rms_norm_quantize",
    "rms_norm_quantize_reference",
    "rms_norm_reference",
]

ROW_WARPS = 16
"""Warps of the row launch a multiprocessor, all of them resident."""

MAX_ROW_BYTES = 32768
"""Longest row that is held in registers; a longer one is read in pieces, several times."""

CAST_TILE: Tile = (128, 64, 4)
"""Tile of the cast launch: the fastest of eleven on an H200 at 8192x4096."""

PIECE = 8192
"""Values in such a piece."""


# --- reference ----------------------------------------------------------------------------------------------


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, cast_before_weight: bool, zero_centered: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm` in plain PyTorch."""
    value = x.to(torch.float32)
    rstd = torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    value = value * rstd
    if cast_before_weight:
        value = value.to(x.dtype).to(torch.float32)
    if weight is not None:
        value = value * (weight.to(torch.float32) + (1.0 if zero_centered else 0.0))
    return value.to(x.dtype), rstd.reshape(-1)


def layer_norm_reference(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`layer_norm` in plain PyTorch."""
    value = x.to(torch.float32)
    mean = value.mean(-1, keepdim=True)
    value = value - mean
    rstd = torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    value = value * rstd
    if weight is not None:
        value = value * weight.to(torch.float32)
    if bias is not None:
        value = value + bias.to(torch.float32)
    return value.to(x.dtype), mean.reshape(-1), rstd.reshape(-1)


def rms_norm_quantize_reference(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    cast_before_weight: bool,
    zero_centered: bool,
    fp8_dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool,
    eps_amax: float,
    keep_output: bool,
) -> list[torch.Tensor]:
    """`rms_norm_quantize` in plain PyTorch."""
    y, rstd = rms_norm_reference(x, weight, eps, cast_before_weight, zero_centered)
    buffers = quantize_reference(y, fp8_dtype, rowwise, columnwise, power_of_two, eps_amax)
    return [*([y] if keep_output else []), rstd, *buffers]


def layer_norm_quantize_reference(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    fp8_dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool,
    eps_amax: float,
    keep_output: bool,
) -> list[torch.Tensor]:
    """`layer_norm_quantize` in plain PyTorch."""
    y, mean, rstd = layer_norm_reference(x, weight, bias, eps)
    buffers = quantize_reference(y, fp8_dtype, rowwise, columnwise, power_of_two, eps_amax)
    return [*([y] if keep_output else []), mean, rstd, *buffers]


# --- kernels ------------------------------------------------------------------------------------------------


@writes("rstd", y="not QUANTIZE", mean="LAYER", partials="QUANTIZE")
@triton.jit
def norm_rows_kernel(
    x,
    weight,
    bias,
    y,
    mean,
    rstd,
    partials,
    M,
    K,
    EPS_NORM: tl.constexpr,  # not a float argument: Inductor would pass it as fp64
    LAYER: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CAST_BEFORE_WEIGHT: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    QUANTIZE: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTIALS: tl.constexpr,
):
    """Statistics of every num_programs-th row, then y (unfused) or the partial amax of y (QUANTIZE)."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    bits = no_magnitudes(BLOCK, DTYPE)
    if ONE_BLOCK:
        w, b = load_affine(weight, bias, 0, K, HAS_WEIGHT, HAS_BIAS, BLOCK)
    # The next two rows are on their way to shared memory while this one is summed.
    for row in tl.range(tl.program_id(0), M, tl.num_programs(0), num_stages=3):
        row_start = x + tl.cast(row, tl.int64) * K
        first = load_columns(row_start, 0, K, BLOCK)
        row_mean, row_rstd = row_statistics(row_start, first, K, EPS_NORM, LAYER, ONE_BLOCK, BLOCK)
        tl.store(rstd + row, row_rstd)
        if LAYER:
            tl.store(mean + row, row_mean)
        for block in range(1 if ONE_BLOCK else tl.cdiv(K, BLOCK)):
            start = block * BLOCK
            columns = start + tl.arange(0, BLOCK)
            values = first
            if not ONE_BLOCK:
                values = load_columns(row_start, start, K, BLOCK)
                w, b = load_affine(weight, bias, start, K, HAS_WEIGHT, HAS_BIAS, BLOCK)
            result = normalize(
                values,
                row_mean,
                row_rstd,
                w,
                b,
                LAYER,
                HAS_WEIGHT,
                HAS_BIAS,
                CAST_BEFORE_WEIGHT,
                ZERO_CENTERED,
                DTYPE,
            )
            if QUANTIZE:
                bits = tl.maximum(bits, row_magnitudes(result, columns, K, LAYER))
            else:
                tl.store(y + tl.cast(row, tl.int64) * K + columns, result, mask=columns < K)
    if QUANTIZE:
        store_row_amax(partials, bits, PARTIALS, DTYPE)


@writes("scale_inv", y="KEEP_OUTPUT", data="ROWWISE", transpose="COLUMNWISE")
@triton.jit
def norm_cast_kernel(
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
    LAYER: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CAST_BEFORE_WEIGHT: tl.constexpr,
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
        # Loaded flat: as a column, every thread would load its row's statistics once for each of its elements.
        rows = row + tl.arange(0, BLOCK_M)
        row_mean = tl.load(mean + rows, mask=rows < M, other=0.0)[:, None] if LAYER else 0.0
        w, b = load_affine(weight, bias, column, K, HAS_WEIGHT, HAS_BIAS, BLOCK_K)
        result = normalize(
            values,
            row_mean,
            tl.load(rstd + rows, mask=rows < M, other=0.0)[:, None],
            w[None, :] if HAS_WEIGHT else w,
            b[None, :] if HAS_BIAS else b,
            LAYER,
            HAS_WEIGHT,
            HAS_BIAS,
            CAST_BEFORE_WEIGHT,
            ZERO_CENTERED,
            x.dtype.element_ty,
        )
        if KEEP_OUTPUT:
            store_tile(y, result, row, column, M, K, BLOCK_M, BLOCK_K)
        # Past the last row y is bias, but the transpose's padding is zero.
        result = tl.where((rows < M)[:, None], result, 0.0)
        store_quantized_tile(result, scale, row, column, M, K, data, transpose, ROWWISE, COLUMNWISE, BLOCK_M, BLOCK_K)


# --- launchers ----------------------------------------------------------------------------------------------


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, cast_before_weight: bool, zero_centered: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, rstd): y in x's shape and dtype, rstd fp32 [rows]. weight (any float dtype, [K]) may be None."""
    x = x.contiguous()
    y = torch.empty_like(x)
    _, rstd, _ = _rows(x, eps, norm_arguments(x, weight, None, False, cast_before_weight, zero_centered), y)
    return y, rstd


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, mean, rstd): y in x's shape and dtype, the statistics fp32 [rows]. weight and bias may be None."""
    x = x.contiguous()
    y = torch.empty_like(x)
    mean, rstd, _ = _rows(x, eps, norm_arguments(x, weight, bias, True, False, False), y)
    return y, mean, rstd


def rms_norm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    cast_before_weight: bool,
    zero_centered: bool,
    fp8_dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool,
    eps_amax: float,
    keep_output: bool,
    tile: Tile | None = None,
) -> list[torch.Tensor]:
    """[y?, rstd, data?, transpose?, scale_inv], equal to `rms_norm` then `quantize`."""
    x = x.contiguous()
    norm = norm_arguments(x, weight, None, False, cast_before_weight, zero_centered)
    mean, rstd, partials = _rows(x, eps, norm, None)
    buffers = Fp8Buffers(*rows_and_columns(x), x.device, fp8_dtype, rowwise, columnwise)
    quantization = buffers.constants(power_of_two, eps_amax)
    y = write_quantized(x, norm, mean, rstd, partials, buffers, quantization, keep_output, tile)
    return [*y, rstd, *buffers.as_list()]


def layer_norm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    fp8_dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool,
    eps_amax: float,
    keep_output: bool,
    tile: Tile | None = None,
) -> list[torch.Tensor]:
    """[y?, mean, rstd, data?, transpose?, scale_inv], equal to `layer_norm` then `quantize`."""
    x = x.contiguous()
    norm = norm_arguments(x, weight, bias, True, False, False)
    mean, rstd, partials = _rows(x, eps, norm, None)
    buffers = Fp8Buffers(*rows_and_columns(x), x.device, fp8_dtype, rowwise, columnwise)
    quantization = buffers.constants(power_of_two, eps_amax)
    y = write_quantized(x, norm, mean, rstd, partials, buffers, quantization, keep_output, tile)
    return [*y, mean, rstd, *buffers.as_list()]


def norm_arguments(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    layer: bool,
    cast_before_weight: bool,
    zero_centered: bool,
) -> dict[str, Any]:
    """The kernel arguments that say which norm it is."""
    return {
        "weight": x if weight is None else weight.contiguous(),
        "bias": x if bias is None else bias.contiguous(),
        "LAYER": layer,
        "HAS_WEIGHT": weight is not None,
        "HAS_BIAS": bias is not None,
        "CAST_BEFORE_WEIGHT": cast_before_weight,
        "ZERO_CENTERED": zero_centered,
    }


def _rows(
    x: torch.Tensor, eps: float, norm: dict[str, Any], y: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(mean, rstd, partials) of the row launch: it writes y if that is given, partial amaxes if not."""
    rows, columns = rows_and_columns(x)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    mean = torch.empty_like(rstd) if norm["LAYER"] else x
    block, warps = row_block(columns, x.element_size(), norm["LAYER"])
    programs = row_programs(warps, x.device)
    count = triton.next_power_of_2(programs)
    partials = torch.empty(count, dtype=torch.float32, device=x.device) if y is None else rstd
    launch(
        norm_rows_kernel,
        (programs,),
        x=x,
        **norm,
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


def write_quantized(
    x: torch.Tensor,
    norm: dict[str, Any],
    mean: torch.Tensor,
    rstd: torch.Tensor,
    partials: torch.Tensor,
    buffers: Fp8Buffers,
    quantization: dict[str, Any],
    keep_output: bool,
    tile: Tile | None,
) -> list[torch.Tensor]:
    """Fills `buffers`; returns [y] when it is kept, else []."""
    rows, columns = rows_and_columns(x)
    y = [torch.empty_like(x)] if keep_output else []
    block_m, block_k, warps = tile or cast_tile(rows, columns, buffers.transpose is not None, CAST_TILE)
    for number, usage in enumerate(buffers.launches(x.element_size())):
        launch(
            norm_cast_kernel,
            (program_count(rows, columns, block_m, block_k, x.device),),
            x=x,
            **norm,
            mean=mean,
            rstd=rstd,
            partials=partials,
            y=y[0] if y else x,
            M=rows,
            K=columns,
            KEEP_OUTPUT=keep_output and number == 0,
            **buffers.pointers(unused=x),
            **quantization,
            **usage,
            PARTIALS=partials.shape[0],
            BLOCK_M=block_m,
            BLOCK_K=block_k,
            num_warps=warps,
        )
    return y


def row_block(columns: int, itemsize: int, layer: bool) -> tuple[int, int]:
    """(block, warps) of the row launch: 32 values a thread, 16 where it also holds weight and bias."""
    block = max(triton.next_power_of_2(columns), 32)
    if block * itemsize > MAX_ROW_BYTES:
        block = PIECE
    return block, min(max(block // (512 if layer else 1024), 1), 16)


def row_programs(warps: int, device: torch.device) -> int:
    """Programs of the row launch: ROW_WARPS warps a multiprocessor, where that is not more than eight programs."""
    return multiprocessor_count(device) * min(ROW_WARPS // warps, 8)
