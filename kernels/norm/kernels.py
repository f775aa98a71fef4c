"""The kernels of all norms: their statistics, by rows, and the cast of what is quantized, by tiles (norm.py has the formulas).

    launch 1    [h = round(x + residual)]    mean, rstd of each row of x, or of h    y, or the partial amaxes of y
    launch 2    y made again from the statistics -> data, transpose, scale_inv [, y]

y is rounded to a dtype that is x's or another. Under autocast x is fp32, and what the product reads is bf16: so launch 1 writes y too, as
that has half of x's bytes, and launch 2 is that of `quantize`. Where y is read in fp32 as well, both launches are as above.

With one scale a row, or one for 1x128 of its values, launch 1 has all of a row and makes data and scale_inv itself.

The fused form reads x twice and writes no bf16. `norm_rows_kernel` is launch 1 and the unfused kernel alike, with one block shape, so
that the statistics are the same sum in the same order; the rest is elementwise in shared device functions (tiles/norms.py). Fused therefore
equals unfused plus `quantize`, bit for bit, and with a residual an addition before it too: memory is passed over as often as
without writing h, as launch 2 then reads one tensor in place of two.

Launch 2 takes weight and bias of one row of tiles where all rows have them, and holds those of every row where a sample has its own
(modulate.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from te_dynamo.kernels.layouts.block import BLOCK, BlockForm
from te_dynamo.kernels.layouts.row import RowForm
from te_dynamo.kernels.layouts.sizes import rows_and_columns
from te_dynamo.kernels.produce.produce import NAMES
from te_dynamo.kernels.quantize.current import Tile
from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.runtime.launch import launch, multiprocessor_count
from te_dynamo.kernels.runtime.writes import writes
from te_dynamo.kernels.tiles.blocks import fp32_bits
from te_dynamo.kernels.tiles.fp8 import (
    FLOAT32_MAX,
    load_scale,
    load_tile,
    rounded,
    saturating_cast,
    scale_from_amax,
    store_quantized_tile,
    store_tile,
    tile_from_the_end,
    tile_total,
)
from te_dynamo.kernels.tiles.norms import (
    as_wide,
    load_affine,
    load_columns,
    no_magnitudes,
    normalize,
    row_magnitudes,
    row_statistics,
    store_row_amax,
)

ROW_WARPS = 16
"""Warps of the row launch a multiprocessor, all of them resident."""

MAX_ROW_BYTES = 32768
"""Longest row that is held in registers; a longer one is read in pieces, several times."""

PIECE = 8192
"""Values in such a piece."""

CAST_TILE: Tile = (128, 64, 4)
"""Tile of the cast launch: the fastest of eleven on an H100 at 8192x4096."""

SMALL_CAST_TILE: Tile = (64, 64, 4)
"""The same where it holds weight and bias of every row beside x, or y in two dtypes."""


# --- kernels ------------------------------------------------------------------------------------------------


@triton.jit
def _store_sum(x, residual, h, start, K, BLOCK: tl.constexpr):
    """Writes h[start : start + BLOCK] = x + residual, rounded to h's dtype, as far as K; returns it, zero past K."""
    values = load_columns(x, start, K, BLOCK).to(tl.float32)
    if residual.dtype == x.dtype:
        added = load_columns(residual, start, K, BLOCK)
    else:
        added = tl.load(as_wide(residual, x.dtype, start, BLOCK), mask=start + tl.arange(0, BLOCK) < K, other=0.0)
    total = values + added.to(tl.float32)
    total = total.to(h.dtype.element_ty)
    columns = start + tl.arange(0, BLOCK)
    tl.store(h + columns, total, mask=columns < K)
    return total


@triton.jit
def store_row_scales(scale_inv, inverses, row, stride, K, SCALE_BLOCK: tl.constexpr):
    """Column `row` of scale_inv [ceil(K/SCALE_BLOCK), stride]."""
    blocks = tl.arange(0, inverses.shape[0])
    tl.store(scale_inv + tl.cast(blocks, tl.int64) * stride + row, inverses, mask=blocks * SCALE_BLOCK < K)


@writes("rstd", h="ADDS", y="STORES", mean="LAYER", partials="QUANTIZE", data="ROWWISE", scale_inv="ROWWISE")
@triton.jit
def norm_rows_kernel(
    x,
    residual,
    weight,
    bias,
    h,
    y,
    mean,
    rstd,
    partials,
    M,
    K,
    rows_of_sample,
    weight_stride,
    bias_stride,
    data,  # what ROWWISE takes beside the others' arguments
    scale_inv,
    scale_stride,
    EPS_NORM: tl.constexpr,  # not a float argument: Inductor would pass it as fp64
    ADDS: tl.constexpr,
    LAYER: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CAST_BEFORE_WEIGHT: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    MODULATED: tl.constexpr,
    ROUNDED_TO: tl.constexpr,  # "bf16", "fp16" or "fp32"; a dtype itself no graph takes
    STORES: tl.constexpr,
    QUANTIZE: tl.constexpr,
    BY_COLUMNS: tl.constexpr,
    ROWWISE: tl.constexpr,
    FMAX: tl.constexpr,
    EPS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    LARGEST: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTIALS: tl.constexpr,
):
    """h where a residual is added, statistics of every num_programs-th row, then what is asked for: y (STORES), the partial amax of y
    (QUANTIZE; BY_COLUMNS a row of them), y with a scale for each SCALE_BLOCK values of a row (ROWWISE, of rows of ONE_BLOCK).

    scale_inv [ceil(K/SCALE_BLOCK), scale_stride] has zeros past M.
    """
    DTYPE: tl.constexpr = tl.bfloat16 if ROUNDED_TO == "bf16" else tl.float16 if ROUNDED_TO == "fp16" else tl.float32
    KEPT: tl.constexpr = y.dtype.element_ty if STORES else DTYPE
    BLOCKS: tl.constexpr = BLOCK // SCALE_BLOCK
    if ROWWISE and tl.program_id(0) == 0:
        for row in range(M, scale_stride):
            store_row_scales(scale_inv, tl.zeros((BLOCKS,), tl.float32), row, scale_stride, K, SCALE_BLOCK)
    bits = no_magnitudes(BLOCK, DTYPE)
    if ONE_BLOCK and not MODULATED:
        w, b = load_affine(weight, bias, 0, K, HAS_WEIGHT, HAS_BIAS, BLOCK)
    # The next two rows are on their way to shared memory while this one is summed.
    for row in tl.range(tl.program_id(0), M, tl.num_programs(0), num_stages=3):
        row_start = tl.cast(row, tl.int64) * K
        if ADDS:
            normed = h + row_start
            first = _store_sum(x + row_start, residual + row_start, normed, 0, K, BLOCK)
            if not ONE_BLOCK:
                for start in range(BLOCK, K, BLOCK):
                    _store_sum(x + row_start, residual + row_start, normed, start, K, BLOCK)
                tl.debug_barrier()  # the pieces are read again, not always by the threads that wrote them
                if (
                    residual.dtype != x.dtype
                ):  # held over the loop, the first one would take more registers than there are
                    first = load_columns(normed, 0, K, BLOCK)
        else:
            normed = x + row_start
            first = load_columns(normed, 0, K, BLOCK)
        row_mean, row_rstd = row_statistics(normed, first, K, EPS_NORM, LAYER, ONE_BLOCK, BLOCK)
        tl.store(rstd + row, row_rstd)
        if LAYER:
            tl.store(mean + row, row_mean)
        for block in range(1 if ONE_BLOCK else tl.cdiv(K, BLOCK)):
            start = block * BLOCK
            columns = start + tl.arange(0, BLOCK)
            values = first if ONE_BLOCK else load_columns(normed, start, K, BLOCK)
            if MODULATED:
                sample = tl.cast(row // rows_of_sample, tl.int64)
                its_weight, its_bias = weight + sample * weight_stride, bias + sample * bias_stride
                w, b = load_affine(its_weight, its_bias, start, K, HAS_WEIGHT, HAS_BIAS, BLOCK)
            elif not ONE_BLOCK:
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
                values.dtype,
                KEPT,
            )
            if STORES:
                tl.store(as_wide(y + row_start, x.dtype, start, BLOCK), result, mask=columns < K)
            if KEPT != DTYPE:
                result = rounded(result.to(tl.float32), DTYPE)
            if QUANTIZE or ROWWISE:
                magnitudes = row_magnitudes(result, columns, K, LAYER)
            if QUANTIZE:
                bits = tl.maximum(bits, magnitudes)
            if ROWWISE:
                amaxes = fp32_bits(tl.max(tl.reshape(magnitudes, (BLOCKS, SCALE_BLOCK)), axis=1), DTYPE)
                scales = scale_from_amax(amaxes.to(tl.float32, bitcast=True), FMAX, EPS, POWER_OF_TWO, LARGEST)
                codes = saturating_cast(
                    tl.reshape(result, (BLOCKS, SCALE_BLOCK)), scales[:, None], data.dtype.element_ty
                )
                codes = tl.reshape(codes, (BLOCK,))
                tl.store(as_wide(data + row_start, x.dtype, start, BLOCK), codes, mask=columns < K)
                inverses = tl.div_rn(tl.full((BLOCKS,), 1.0, tl.float32), scales)
                store_row_scales(scale_inv, inverses, row, scale_stride, K, SCALE_BLOCK)
    if BY_COLUMNS:
        columns = tl.arange(0, BLOCK)
        own = partials + tl.cast(tl.program_id(0), tl.int64) * K
        tl.store(as_wide(own, x.dtype, 0, BLOCK), bits.to(DTYPE, bitcast=True), mask=columns < K)
    elif QUANTIZE:
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
    rows_of_sample,
    weight_stride,
    bias_stride,
    LAYER: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CAST_BEFORE_WEIGHT: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    MODULATED: tl.constexpr,
    ROUNDED_TO: tl.constexpr,
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
    """Every tile of y, made again from the rows' statistics, to every output that is asked for; y itself in the dtype of its memory."""
    DTYPE: tl.constexpr = tl.bfloat16 if ROUNDED_TO == "bf16" else tl.float16 if ROUNDED_TO == "fp16" else tl.float32
    KEPT: tl.constexpr = y.dtype.element_ty if KEEP_OUTPUT else DTYPE
    scale = load_scale(partials, scale_inv, PARTIALS, FMAX, EPS, POWER_OF_TWO)
    tiles = tile_total(M, K, BLOCK_M, BLOCK_K)
    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=1):
        row, column = tile_from_the_end(index, tiles, K, BLOCK_M, BLOCK_K)
        values = load_tile(x, row, column, K, M, K, BLOCK_M, BLOCK_K)
        # Loaded flat: as a column, every thread would load its row's statistics once for each of its elements.
        rows = row + tl.arange(0, BLOCK_M)
        row_mean = tl.load(mean + rows, mask=rows < M, other=0.0)[:, None] if LAYER else 0.0
        if MODULATED:
            columns = column + tl.arange(0, BLOCK_K)[None, :]
            inside = (rows < M)[:, None] & (columns < K)
            samples = tl.cast(rows // rows_of_sample, tl.int64)[:, None]
            w = tl.load(weight + samples * weight_stride + columns, mask=inside, other=0.0)
            b = tl.load(bias + samples * bias_stride + columns, mask=inside, other=0.0)
        else:
            w, b = load_affine(weight, bias, column, K, HAS_WEIGHT, HAS_BIAS, BLOCK_K)
            w, b = w[None, :] if HAS_WEIGHT else w, b[None, :] if HAS_BIAS else b
        result = normalize(
            values,
            row_mean,
            tl.load(rstd + rows, mask=rows < M, other=0.0)[:, None],
            w,
            b,
            LAYER,
            HAS_WEIGHT,
            HAS_BIAS,
            CAST_BEFORE_WEIGHT,
            ZERO_CENTERED,
            x.dtype.element_ty,
            KEPT,
        )
        if KEEP_OUTPUT:
            store_tile(y, result, row, column, M, K, BLOCK_M, BLOCK_K)
        if KEPT != DTYPE:
            result = rounded(result, DTYPE)
        if not MODULATED:  # past the last row y is the bias of all rows, but the transpose's padding is zero
            result = tl.where((rows < M)[:, None], result, 0.0)
        store_quantized_tile(result, scale, row, column, M, K, data, transpose, ROWWISE, COLUMNWISE, BLOCK_M, BLOCK_K)


# --- launchers ----------------------------------------------------------------------------------------------


def norm_arguments(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    layer: bool,
    cast_before_weight: bool = False,
    zero_centered: bool = False,
) -> dict[str, Any]:
    """The kernel arguments that say which norm it is."""
    return {
        "weight": x if weight is None else weight.contiguous(),
        "bias": x if bias is None else bias.contiguous(),
        "rows_of_sample": 0,
        "weight_stride": 0,
        "bias_stride": 0,
        "LAYER": layer,
        "HAS_WEIGHT": weight is not None,
        "HAS_BIAS": bias is not None,
        "CAST_BEFORE_WEIGHT": cast_before_weight,
        "ZERO_CENTERED": zero_centered,
        "MODULATED": False,
    }


def launch_rows(
    x: torch.Tensor,
    norm: dict[str, Any],
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    y: torch.Tensor | None = None,
    rounded_to: torch.dtype | None = None,
    quantizes: bool = False,
    by_rows: RowForm | BlockForm | None = None,
    buffers: Mapping[str, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(h, mean, rstd, partials) of launch 1: it writes y if that is given, partial amaxes of y in the dtype `rounded_to` if it quantizes.
    h is x without a residual; a tensor stands in for what is not written.

    by_rows: with one scale a row, or for 1x128, into `buffers`; the partials are then those of each column, and of each program.
    """
    rows, columns = rows_and_columns(x.shape)
    h = x
    if residual is not None:
        x, residual = (x, residual) if x.element_size() >= residual.element_size() else (residual, x)
        h = torch.empty_like(x, dtype=torch.promote_types(x.dtype, residual.dtype))
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    mean = torch.empty_like(rstd) if norm["LAYER"] else x
    block, warps = row_block(columns, h.element_size(), norm["LAYER"])
    programs = row_programs(warps, x.device)
    count = triton.next_power_of_2(programs)
    shape, dtype = ((programs, columns), rounded_to or h.dtype) if by_rows else ((count,), torch.float32)
    partials = torch.empty(shape, dtype=dtype, device=x.device) if quantizes else rstd
    of_rows = by_rows.constants() if by_rows else {"FMAX": 1.0, "EPS": 0.0, "POWER_OF_TWO": False}
    of_rows |= {"LARGEST": FLOAT32_MAX.value, "SCALE_BLOCK": block}
    if of_rows.pop("SCALING", ""):
        of_rows |= {"LARGEST": torch.finfo(dtype).max, "SCALE_BLOCK": min(BLOCK, block)}
    held = buffers or {}
    scale_inv = held.get("scale_inv", rstd)
    launch(
        norm_rows_kernel,
        (programs,),
        x=x,
        residual=x if residual is None else residual,
        **norm,
        h=h,
        y=x if y is None else y,
        mean=mean,
        rstd=rstd,
        partials=partials,
        M=rows,
        K=columns,
        data=held.get("data", x),
        scale_inv=scale_inv,
        scale_stride=scale_inv.shape[-1],
        EPS_NORM=eps,
        ADDS=residual is not None,
        ROUNDED_TO=NAMES[rounded_to or (h if y is None else y).dtype],
        STORES=y is not None,
        QUANTIZE=quantizes,
        BY_COLUMNS=quantizes and by_rows is not None,
        ROWWISE=by_rows is not None and by_rows.rowwise,
        **of_rows,
        ONE_BLOCK=columns <= block,
        BLOCK=block,
        PARTIALS=count,
        num_warps=warps,
    )
    return h, mean, rstd, partials


def row_block(columns: int, itemsize: int, layer: bool) -> tuple[int, int]:
    """(block, warps) of the row launch: 32 values a thread, 16 where it also holds weight and bias."""
    block = max(triton.next_power_of_2(columns), 32)
    if block * itemsize > MAX_ROW_BYTES:
        block = PIECE
    return block, min(max(block // (512 if layer else 1024), 1), 16)


def row_programs(warps: int, device: torch.device) -> int:
    """Programs of the row launch: ROW_WARPS warps a multiprocessor, where that is not more than eight programs."""
    return multiprocessor_count(device) * min(ROW_WARPS // warps, 8)
