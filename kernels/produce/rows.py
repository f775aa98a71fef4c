"""What sources.py makes, quantized with one scale a row: rows by programs that have all of a row's columns, columns by those that have all rows.

    produce_rows_kernel       the result -> data, scale_inv [, the result] [, amaxes of the columns of each program's rows]
    produce_columns_kernel    these amaxes, the result again -> transpose, columnwise_scale_inv [, sums of columns]

A program of the first goes through its rows one after the other. It holds a row from the amax to the cast, where a row has no more than
MOST_HELD values; the pieces of a longer row are made twice, of inputs that are still in the cache. The first kernel of a norm is that of
its statistics (kernels/norm/kernels.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_dynamo.kernels.layouts.row import RowForm
from te_dynamo.kernels.layouts.sizes import rows_and_columns
from te_dynamo.kernels.produce.sources import has_second, made_elements
from te_dynamo.kernels.quantize.float8_rowwise import columns_tile
from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.runtime.launch import launch, multiprocessor_count
from te_dynamo.kernels.runtime.writes import writes
from te_dynamo.kernels.tiles.blocks import magnitude, row_amax
from te_dynamo.kernels.tiles.fp8 import (
    FLOAT32_MAX,
    abs_bits,
    load_values,
    rounded,
    saturating_cast,
    scale_from_amax,
    store_quantized_tile,
    store_tile,
)

if TYPE_CHECKING:
    from te_dynamo.kernels.produce.produce import Source

MOST_HELD = 16384
"""Values of a row that its program holds; half of it where it holds two gradients, or elements of 4 bytes."""

WARPS = 32
"""Warps a multiprocessor of programs that go through rows one after the other."""


# --- rows -----------------------------------------------------------------------------------------------------


@triton.jit
def made_rows(inputs, strides, place, outputs, HOW: tl.constexpr, DTYPE: tl.constexpr, KEEP_OUTPUT: tl.constexpr,
              BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """(these rows' piece of the result, of the second gradient) at place, rounded, zero outside; to the outputs if it is kept.

    outputs: where the first value of each goes, and the values from row to row.
    """
    row, column, M, K = place
    first, second = made_elements(inputs, strides, place, tl.arange(0, BLOCK_M), HOW, BLOCK_K)
    first, second = rounded(first, DTYPE), rounded(second, DTYPE)
    if KEEP_OUTPUT:
        y, second_y, width = outputs
        store_tile(y, first, row, column, M, K, BLOCK_M, BLOCK_K, width)
        if HOW[0] == "gated_backward":
            store_tile(second_y, second, row, column, M, K, BLOCK_M, BLOCK_K, width)
    return first, second


@triton.jit
def scale_of_rows(
    bits, scale_inv, row, M, FMAX: tl.constexpr, EPS: tl.constexpr, POWER_OF_TWO: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Scales [BLOCK_M, 1] of rows of those amaxes, as bits; their inverses go to scale_inv."""
    scale = scale_from_amax(bits.to(tl.float32, bitcast=True), FMAX, EPS, POWER_OF_TWO, FLOAT32_MAX)
    rows = row + tl.arange(0, BLOCK_M)
    tl.store(scale_inv + rows, tl.div_rn(tl.full((BLOCK_M,), 1.0, tl.float32), scale), mask=rows < M)
    return scale[:, None]


@triton.jit
def column_maxima(magnitudes, DTYPE: tl.constexpr):
    """The largest of each column of magnitudes, as a value."""
    most = tl.max(magnitudes, axis=0)
    if DTYPE.primitive_bitwidth == 16:
        most = most.to(tl.int16)
    return most.to(DTYPE, bitcast=True)


@triton.jit
def keep_maxima(maxima, values, column, K, BLOCK_K: tl.constexpr):
    """maxima[column :] becomes the largest of itself and of the columns of values."""
    columns = column + tl.arange(0, BLOCK_K)
    before = magnitude(tl.load(maxima + columns, mask=columns < K, other=0.0))
    both = tl.maximum(before, magnitude(column_maxima(magnitude(values), values.dtype)))
    tl.store(maxima + columns, both.to(values.dtype, bitcast=True), mask=columns < K)


@writes(
    y="KEEP_OUTPUT",
    second_y=lambda k: k.KEEP_OUTPUT and has_second(k),
    **dict.fromkeys(("data", "scale_inv"), "ROWWISE"),
    **dict.fromkeys(("second_data", "second_scale_inv"), lambda k: k.ROWWISE and has_second(k)),
    maxima="COLUMNWISE",
)
@triton.jit
def produce_rows_kernel(
    a,
    b,
    c,
    y,
    second_y,
    data,
    scale_inv,
    second_data,
    second_scale_inv,
    maxima,
    M,
    K,
    a_stride,
    b_stride,
    c_stride,
    SOURCE: tl.constexpr,
    KIND: tl.constexpr,
    ROUNDED_TO: tl.constexpr,
    KEEP_OUTPUT: tl.constexpr,
    HALF: tl.constexpr,
    FMAX: tl.constexpr,
    EPS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Every num_programs-th BLOCK_M rows. maxima [num_programs, K, or 2K of two gradients]: the largest of a program's rows, by columns.

    HALF: 0 or 1 where both gradients are halves of one tensor [M, 2K], the first this one; -1 elsewhere.
    """
    PAIR: tl.constexpr = SOURCE == "gated_backward"
    HALVES: tl.constexpr = HALF != -1
    DTYPE: tl.constexpr = tl.bfloat16 if ROUNDED_TO == "bf16" else tl.float16 if ROUNDED_TO == "fp16" else tl.float32
    HOW: tl.constexpr = (SOURCE, KIND, False, False, False, False, False, False)
    inputs, strides = (a, b, c, a, a), (a_stride, b_stride, c_stride, 0)
    width = 2 * K if HALVES else K
    first_at, second_at = K if HALF == 1 else 0, K if HALF == 0 else 0
    outputs = y + first_at, (y if HALVES else second_y) + second_at, width
    codes = data + first_at, (data if HALVES else second_data) + second_at
    own = maxima + tl.cast(tl.program_id(0), tl.int64) * (2 * K if PAIR else K)
    own_second = own + (0 if HALF == 1 else K)
    own += first_at
    largest = magnitude(tl.zeros((BLOCK_M, BLOCK_K), DTYPE))
    second_largest = largest
    if COLUMNWISE and not ONE_BLOCK:
        for column in tl.range(0, K, BLOCK_K):
            columns = column + tl.arange(0, BLOCK_K)
            tl.store(own + columns, tl.zeros((BLOCK_K,), DTYPE), mask=columns < K)
            if PAIR:
                tl.store(own_second + columns, tl.zeros((BLOCK_K,), DTYPE), mask=columns < K)
    for group in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.num_programs(0), num_stages=1):
        row = tl.cast(group * BLOCK_M, tl.int32)
        if ONE_BLOCK:
            x, z = made_rows(inputs, strides, (row, 0, M, K), outputs, HOW, DTYPE, KEEP_OUTPUT, BLOCK_M, BLOCK_K)
            bits = row_amax(x)
            second_bits = row_amax(z) if PAIR else bits
            if COLUMNWISE:
                largest = tl.maximum(largest, magnitude(x))
                second_largest = tl.maximum(second_largest, magnitude(z)) if PAIR else largest
        else:
            bits = tl.zeros((BLOCK_M,), tl.int32)
            second_bits = bits
            tl.debug_barrier()  # maxima are not always read by the threads that wrote them
            for column in tl.range(0, K, BLOCK_K, num_stages=1):
                place = row, column, M, K
                x, z = made_rows(inputs, strides, place, outputs, HOW, DTYPE, KEEP_OUTPUT, BLOCK_M, BLOCK_K)
                bits = tl.maximum(bits, row_amax(x))
                second_bits = tl.maximum(second_bits, row_amax(z)) if PAIR else bits
                if COLUMNWISE:
                    keep_maxima(own, x, column, K, BLOCK_K)
                    if PAIR:
                        keep_maxima(own_second, z, column, K, BLOCK_K)
        if ROWWISE:
            if HALVES:
                bits = tl.maximum(bits, second_bits)
            scale = scale_of_rows(bits, scale_inv, row, M, FMAX, EPS, POWER_OF_TWO, BLOCK_M)
            second_scale = scale
            if PAIR and not HALVES:
                second_scale = scale_of_rows(second_bits, second_scale_inv, row, M, FMAX, EPS, POWER_OF_TWO, BLOCK_M)
            for column in tl.range(0, K, BLOCK_K, num_stages=1):
                if not ONE_BLOCK:
                    place = row, column, M, K
                    x, z = made_rows(inputs, strides, place, outputs, HOW, DTYPE, False, BLOCK_M, BLOCK_K)
                of_x = saturating_cast(x, scale, data.dtype.element_ty)
                store_tile(codes[0], of_x, row, column, M, K, BLOCK_M, BLOCK_K, width)
                if PAIR:
                    of_z = saturating_cast(z, second_scale, data.dtype.element_ty)
                    store_tile(codes[1], of_z, row, column, M, K, BLOCK_M, BLOCK_K, width)
    if COLUMNWISE and ONE_BLOCK:
        columns = tl.arange(0, BLOCK_K)
        tl.store(own + columns, column_maxima(largest, DTYPE), mask=columns < K)
        if PAIR:
            tl.store(own_second + columns, column_maxima(second_largest, DTYPE), mask=columns < K)


# --- columns --------------------------------------------------------------------------------------------------


@triton.jit
def scale_of_columns(
    maxima, scale_inv, column, K, width, PROGRAMS: tl.constexpr,
    FMAX: tl.constexpr, EPS: tl.constexpr, POWER_OF_TWO: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Scales [1, BLOCK_K] of the columns from column on, by maxima [PROGRAMS, width]; their inverses go to scale_inv."""
    bits = tl.zeros((32, BLOCK_K), tl.int32)
    for start in tl.range(0, PROGRAMS, 32):
        bits = tl.maximum(
            bits, abs_bits(load_values(maxima, tl.cast(start, tl.int32), column, width, PROGRAMS, K, 32, BLOCK_K))
        )
    amax = tl.max(bits, axis=0).to(tl.float32, bitcast=True)
    scale = scale_from_amax(amax, FMAX, EPS, POWER_OF_TWO, FLOAT32_MAX)
    columns = column + tl.arange(0, BLOCK_K)
    tl.store(scale_inv + columns, tl.div_rn(tl.full((BLOCK_K,), 1.0, tl.float32), scale), mask=columns < K)
    return scale[None, :]


@writes(
    sums="SUMS",
    **dict.fromkeys(("transpose", "columnwise_scale_inv"), "COLUMNWISE"),
    **dict.fromkeys(("second_transpose", "second_columnwise_scale_inv"), lambda k: k.COLUMNWISE and has_second(k)),
)
@triton.jit
def produce_columns_kernel(
    a,
    b,
    c,
    mean,
    rstd,
    maxima,
    sums,
    transpose,
    columnwise_scale_inv,
    second_transpose,
    second_columnwise_scale_inv,
    M,
    K,
    a_stride,
    b_stride,
    c_stride,
    rows_of_sample,
    SOURCE: tl.constexpr,
    KIND: tl.constexpr,
    LAYER: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CAST_BEFORE_WEIGHT: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    MODULATED: tl.constexpr,
    ROUNDED_TO: tl.constexpr,
    HALF: tl.constexpr,
    FMAX: tl.constexpr,
    EPS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    SUMS: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_K columns, in all rows. maxima, HALF: as `produce_rows_kernel` writes and takes them, of PROGRAMS programs."""
    PAIR: tl.constexpr = SOURCE == "gated_backward"
    DTYPE: tl.constexpr = tl.bfloat16 if ROUNDED_TO == "bf16" else tl.float16 if ROUNDED_TO == "fp16" else tl.float32
    HOW: tl.constexpr = (SOURCE, KIND, LAYER, HAS_WEIGHT, HAS_BIAS, CAST_BEFORE_WEIGHT, ZERO_CENTERED, MODULATED)
    inputs, strides = (a, b, c, mean, rstd), (a_stride, b_stride, c_stride, rows_of_sample)
    column = tl.program_id(0) * BLOCK_K
    length = (M + 15) // 16 * 16
    if COLUMNWISE:
        HALVES: tl.constexpr = HALF != -1
        width = 2 * K if PAIR else K
        first_at, second_at = K if HALF == 1 else 0, K if HALF == 0 else 0
        scales = columnwise_scale_inv + first_at
        scale = scale_of_columns(
            *(maxima + first_at, scales, column, K, width, PROGRAMS, FMAX, EPS, POWER_OF_TWO, BLOCK_K)
        )
        codes = transpose + first_at * tl.cast(length, tl.int64)
        if PAIR:
            scales = (columnwise_scale_inv if HALVES else second_columnwise_scale_inv) + second_at
            others = maxima + (0 if HALF == 1 else K)
            second_scale = scale_of_columns(
                *(others, scales, column, K, width, PROGRAMS, FMAX, EPS, POWER_OF_TWO, BLOCK_K)
            )
            second_codes = (transpose if HALVES else second_transpose) + second_at * tl.cast(length, tl.int64)
    total = tl.zeros((BLOCK_K,), tl.float32)
    for row in tl.range(0, length, BLOCK_M, num_stages=1):
        x, z = made_elements(inputs, strides, (row, column, M, K), tl.arange(0, BLOCK_M), HOW, BLOCK_K)
        x, z = rounded(x, DTYPE), rounded(z, DTYPE)
        if SUMS:
            total += tl.sum(x.to(tl.float32), axis=0)
        if COLUMNWISE:
            store_quantized_tile(x, scale, row, column, M, K, codes, codes, False, True, BLOCK_M, BLOCK_K)
            if PAIR:
                store_quantized_tile(
                    *(z, second_scale, row, column, M, K, second_codes, second_codes),
                    *(False, True, BLOCK_M, BLOCK_K),
                )
    if SUMS:
        columns = column + tl.arange(0, BLOCK_K)
        tl.store(sums + columns, total, mask=columns < K)


# --- launchers ------------------------------------------------------------------------------------------------


def produce_rows(
    source: Source, form: RowForm, keep_output: bool, sums: bool, half: int
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """`produce` of kernels/produce/produce.py, of a source that is no norm."""
    x, (rows, columns) = source.like, rows_and_columns(source.like.shape)
    width, count = (columns, 1 + source.is_pair) if half == -1 else (2 * columns, 1)
    kept = [torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device) for _ in range(count * keep_output)]
    held = [form.allocate((rows, width), x.device) for _ in range(count)]
    one_block, block_m, block_k, warps = rows_tile(columns, source.is_pair or source.itemsize() == 4)
    groups = triton.cdiv(rows, block_m)
    programs = multiprocessor_count(x.device) * (WARPS // warps) if form.columnwise else groups
    programs = max(min(programs, groups), 1) if isinstance(groups, int) else programs
    maxima = x
    if form.columnwise:
        maxima = torch.empty((programs, columns * (1 + source.is_pair)), dtype=x.dtype, device=x.device)
    given = {**source.arguments(), "M": rows, "K": columns, "HALF": half}
    if not isinstance(columns, int) or columns:
        launch(
            produce_rows_kernel,
            (programs,),
            **{name: value for name, value in given.items() if name in produce_rows_kernel.arg_names},
            **dict(zip(("y", "second_y"), (*kept, x, x), strict=False)),
            **_pointers(held, ("data", "scale_inv"), x),
            maxima=maxima,
            KEEP_OUTPUT=keep_output,
            ROWWISE=form.rowwise,
            COLUMNWISE=form.columnwise,
            **form.constants(),
            ONE_BLOCK=one_block,
            BLOCK_M=block_m,
            BLOCK_K=block_k,
            num_warps=warps,
        )
    summed = [torch.empty(columns, dtype=torch.float32, device=x.device)] if sums else []
    launch_columns(source, form, held, maxima, half, summed)
    return kept, summed, [buffer for each in held for buffer in each.values()]


def launch_columns(
    source: Source,
    form: RowForm,
    held: list[dict[str, torch.Tensor]],
    maxima: torch.Tensor,
    half: int = -1,
    sums: list[torch.Tensor] | None = None,
) -> None:
    """Fills columnwise buffers of `held`, and sums with those of columns, if there are any."""
    x, (rows, columns) = source.like, rows_and_columns(source.like.shape)
    if not (form.columnwise or sums) or (isinstance(columns, int) and columns == 0):
        return
    block_k, block_m, warps = columns_tile(columns)
    # A thread holds half as many values where it has several inputs, or elements of 4 bytes.
    block_m //= 1 + ("backward" in source.name or source.itemsize() == 4)
    names = "transpose", "columnwise_scale_inv"
    launch(
        produce_columns_kernel,
        (triton.cdiv(columns, block_k),),
        **source.arguments(),
        **_pointers(held, names, x),
        **{"M": rows, "K": columns, "HALF": half},
        maxima=maxima,
        sums=sums[0] if sums else x,
        SUMS=bool(sums),
        COLUMNWISE=form.columnwise,
        **form.constants(),
        PROGRAMS=maxima.shape[0],
        BLOCK_M=block_m,
        BLOCK_K=block_k,
        num_warps=warps,
    )


def _pointers(
    held: list[dict[str, torch.Tensor]], names: tuple[str, ...], unused: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Those buffers of one tensor, or of two, as a kernel's arguments."""
    both = zip(("", "second_"), (*held, dict[str, torch.Tensor]()), strict=False)
    return {f"{prefix}{name}": each.get(name, unused) for prefix, each in both for name in names}


def rows_tile(columns: int, half: bool) -> tuple[bool, int, int, int]:
    """(whether it holds whole rows, rows, columns, warps) of a program's step: 16 values a thread, or 32."""
    whole = max(triton.next_power_of_2(columns), 16)
    block_k = min(whole, MOST_HELD // (1 + half))
    block_m = max(4096 // block_k, 1)
    return block_k == whole, block_m, block_k, 16 if block_k > 4096 else 8
