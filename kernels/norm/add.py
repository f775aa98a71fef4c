"""h = x + residual, and the norm of h quantized: the residual stream's addition fused with what reads it (norms: norm.py).

    h      = round(x + residual)                 in x's dtype, as an addition of its own gives it
    y      = rms_norm(h) or layer_norm(h)
    data, transpose, scale_inv = quantize(y)

Launch 1 adds, writes h, and finds each row's statistics and the amax of y; launch 2 is that of the norm without an addition, on
h. Memory is passed over as often as without writing h: launch 2 then reads one tensor in place of two.

The statistics are the sum that `norm_rows_kernel` makes of h, in its order: equal to an addition, then `rms_norm_quantize`, bit
for bit.
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
from te_dynamo.kernels.norm.norm import (
    layer_norm_quantize_reference,
    norm_arguments,
    rms_norm_quantize_reference,
    row_block,
    row_programs,
    write_quantized,
)
from te_dynamo.kernels.quantize.current import Tile
from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.runtime.launch import launch
from te_dynamo.kernels.runtime.writes import writes
from te_dynamo.kernels.tiles.fp8 import Fp8Buffers, rows_and_columns

__all__ = [
    "add_layer_norm_quantize",
    "add_layer_norm_quantize_reference",
    "add_rms_norm_quantize",
    "add_rms_norm_quantize_reference",
]


# --- reference ----------------------------------------------------------------------------------------------


def add_rms_norm_quantize_reference(x: torch.Tensor, residual: torch.Tensor, *norm: Any) -> list[torch.Tensor]:
    """`add_rms_norm_quantize` in plain PyTorch; `norm` are the further arguments of `rms_norm_quantize`."""
    h = x + residual
    return [h, *rms_norm_quantize_reference(h, *norm)]


def add_layer_norm_quantize_reference(x: torch.Tensor, residual: torch.Tensor, *norm: Any) -> list[torch.Tensor]:
    """`add_layer_norm_quantize` in plain PyTorch; `norm` are the further arguments of `layer_norm_quantize`."""
    h = x + residual
    return [h, *layer_norm_quantize_reference(h, *norm)]


# --- kernel -------------------------------------------------------------------------------------------------


@triton.jit
def _load_sum(x, residual, start, K, BLOCK: tl.constexpr):
    """(x + residual)[start : start + BLOCK], rounded to x's dtype; zero past K."""
    total = load_columns(x, start, K, BLOCK).to(tl.float32) + load_columns(residual, start, K, BLOCK).to(tl.float32)
    return total.to(x.dtype.element_ty)


@triton.jit
def _store_columns(y, values, start, K, BLOCK: tl.constexpr):
    """y[start : start + BLOCK] = values, as far as K."""
    columns = start + tl.arange(0, BLOCK)
    tl.store(y + columns, values, mask=columns < K)


@writes("h", "rstd", "partials", mean="LAYER")
@triton.jit
def add_norm_rows_kernel(
    x,
    residual,
    weight,
    bias,
    h,
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
    ONE_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTIALS: tl.constexpr,
):
    """h, the statistics of every num_programs-th row of it, and the partial amax of their y."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    bits = no_magnitudes(BLOCK, DTYPE)
    if ONE_BLOCK:
        w, b = load_affine(weight, bias, 0, K, HAS_WEIGHT, HAS_BIAS, BLOCK)
    # The next two rows are on their way to shared memory while this one is summed.
    for row in tl.range(tl.program_id(0), M, tl.num_programs(0), num_stages=3):
        row_start = tl.cast(row, tl.int64) * K
        first = _load_sum(x + row_start, residual + row_start, 0, K, BLOCK)
        _store_columns(h + row_start, first, 0, K, BLOCK)
        if not ONE_BLOCK:
            for start in range(BLOCK, K, BLOCK):
                piece = _load_sum(x + row_start, residual + row_start, start, K, BLOCK)
                _store_columns(h + row_start, piece, start, K, BLOCK)
            tl.debug_barrier()  # the pieces are read again, not always by the threads that wrote them
        row_mean, row_rstd = row_statistics(h + row_start, first, K, EPS_NORM, LAYER, ONE_BLOCK, BLOCK)
        tl.store(rstd + row, row_rstd)
        if LAYER:
            tl.store(mean + row, row_mean)
        for block in range(1 if ONE_BLOCK else tl.cdiv(K, BLOCK)):
            start = block * BLOCK
            columns = start + tl.arange(0, BLOCK)
            values = first
            if not ONE_BLOCK:
                values = load_columns(h + row_start, start, K, BLOCK)
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
            bits = tl.maximum(bits, row_magnitudes(result, columns, K, LAYER))
    store_row_amax(partials, bits, PARTIALS, DTYPE)


# --- launchers ----------------------------------------------------------------------------------------------


def add_rms_norm_quantize(
    x: torch.Tensor,
    residual: torch.Tensor,
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
    """[h, y?, rstd, data?, transpose?, scale_inv], equal to x + residual, then `rms_norm_quantize`.

    x and residual are of one shape and dtype (bf16, fp16 or fp32), as h is.
    """
    norm = norm_arguments(x, weight, None, False, cast_before_weight, zero_centered)
    quantization = (fp8_dtype, rowwise, columnwise, power_of_two, eps_amax)
    h, _, rstd, y, buffers = _add_norm_quantize(x, residual, norm, eps, *quantization, keep_output, tile)
    return [h, *y, rstd, *buffers]


def add_layer_norm_quantize(
    x: torch.Tensor,
    residual: torch.Tensor,
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
    """[h, y?, mean, rstd, data?, transpose?, scale_inv], equal to x + residual, then `layer_norm_quantize`."""
    norm = norm_arguments(x, weight, bias, True, False, False)
    quantization = (fp8_dtype, rowwise, columnwise, power_of_two, eps_amax)
    h, mean, rstd, y, buffers = _add_norm_quantize(x, residual, norm, eps, *quantization, keep_output, tile)
    return [h, *y, mean, rstd, *buffers]


def _add_norm_quantize(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm: dict[str, Any],
    eps: float,
    fp8_dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool,
    eps_amax: float,
    keep_output: bool,
    tile: Tile | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """(h, mean, rstd, [y] if it is kept, buffers); mean is another tensor where the norm has none."""
    x, residual = x.contiguous(), residual.contiguous()
    rows, columns = rows_and_columns(x)
    h = torch.empty_like(x)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    mean = torch.empty_like(rstd) if norm["LAYER"] else x
    block, warps = row_block(columns, x.element_size(), norm["LAYER"])
    programs = row_programs(warps, x.device)
    partials = torch.empty(triton.next_power_of_2(programs), dtype=torch.float32, device=x.device)
    launch(
        add_norm_rows_kernel,
        (programs,),
        x=x,
        residual=residual,
        **norm,
        h=h,
        mean=mean,
        rstd=rstd,
        partials=partials,
        M=rows,
        K=columns,
        EPS_NORM=eps,
        ONE_BLOCK=columns <= block,
        BLOCK=block,
        PARTIALS=partials.shape[0],
        num_warps=warps,
    )
    buffers = Fp8Buffers(rows, columns, x.device, fp8_dtype, rowwise, columnwise)
    constants = buffers.constants(power_of_two, eps_amax)
    y = write_quantized(h, norm, mean, rstd, partials, buffers, constants, keep_output, tile)
    return h, mean, rstd, y, buffers.as_list()
