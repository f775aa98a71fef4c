"""The kernel of kernels/produce/produce.py: a tile of what sources.py makes, quantized by blocks of 128 or of 32, without a pass between."""

from __future__ import annotations

from te_dynamo.kernels.produce.sources import has_second, made_elements, made_words, store_elements, store_words
from te_dynamo.kernels.quantize.block_kernels import quantize_block_tile
from te_dynamo.kernels.quantize.mxfp8_kernels import half_rows, quantize_mxfp8_tile
from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.runtime.writes import writes
from te_dynamo.kernels.tiles.block_words import high_value, low_value, quarter_rows
from te_dynamo.kernels.tiles.blocks import grouped_tile, widened_again
from te_dynamo.kernels.tiles.fp8 import rounded


@triton.jit
def made_part(given, rows, MADE: tl.constexpr, AGAIN: tl.constexpr = False):
    """(these rows of the tile, of the second gradient), rounded, as COUNT words or elements a row; written to y if they are kept.

    MADE: (HOW of sources.py, ROUNDED_TO, KEEP_OUTPUT, COUNT, PACKED, WHOLE). Elements of both are more than a thread's registers: they are
    made for the first, and AGAIN for the second.
    """
    HOW: tl.constexpr = MADE[0]
    ROUNDED_TO: tl.constexpr = MADE[1]
    KEEP_OUTPUT: tl.constexpr = MADE[2]
    COUNT: tl.constexpr = MADE[3]
    PACKED: tl.constexpr = MADE[4]
    WHOLE: tl.constexpr = MADE[5]
    inputs, strides, place, y, second_y, first_place, second_place = given
    DTYPE: tl.constexpr = tl.bfloat16 if ROUNDED_TO == "bf16" else tl.float16 if ROUNDED_TO == "fp16" else tl.float32
    KEPT: tl.constexpr = y.dtype.element_ty if KEEP_OUTPUT else DTYPE
    if PACKED:
        first, second = made_words(inputs, strides, place, rows, HOW, COUNT, WHOLE)
        if KEEP_OUTPUT:
            store_words(y, first, first_place, rows, COUNT, WHOLE)
            if HOW[0] == "gated_backward":
                store_words(second_y, second, second_place, rows, COUNT, WHOLE)
    else:
        first, second = made_elements(inputs, strides, place, rows, HOW, COUNT)
        first, second = rounded(first, KEPT), rounded(second, KEPT)
        if KEEP_OUTPUT and not AGAIN:
            store_elements(y, first, first_place, rows, COUNT)
        if KEEP_OUTPUT and AGAIN:
            store_elements(second_y, second, second_place, rows, COUNT)
        if KEPT != DTYPE:
            first = rounded(first.to(tl.float32), DTYPE)  # of a norm
    return first, second


@triton.jit
def column_pairs(part, PACKED: tl.constexpr):
    """(even columns, odd ones) in fp32 of words, (all, all) of elements."""
    if PACKED:
        return low_value(part), high_value(part)
    else:
        values = widened_again(part)
        return values, values


@triton.jit
def store_sums(sums, pairs, row, column, K, HEIGHT: tl.constexpr, PACKED: tl.constexpr, COUNT: tl.constexpr):
    """Sums of columns, `column_pairs` that are one part by now, to a row of sums [tiles of a column, K]."""
    total = tl.sum(pairs[0], axis=0)
    if PACKED:
        total = tl.reshape(tl.join(total, tl.sum(pairs[1], axis=0)), (2 * COUNT,))
    columns = column + tl.arange(0, total.shape[0])
    tl.store(sums + tl.cast(row // HEIGHT, tl.int64) * K + columns, total, mask=columns < K)


@triton.jit
def produce_block_tile(given, sums, first, second, MADE: tl.constexpr, FORM: tl.constexpr, SUMS: tl.constexpr):
    """A tile in blocks of 128 (block_kernels.py), in quarters. first, second: (buffers, place) of the result, of the second gradient."""
    HOW: tl.constexpr = MADE[0]
    COUNT: tl.constexpr = MADE[3]
    PACKED: tl.constexpr = MADE[4]
    WHOLE: tl.constexpr = MADE[5]
    ROWS: tl.constexpr = FORM[7]
    row, column, _, K = given[2]
    x0, z0 = made_part(given, quarter_rows(0, ROWS), MADE)
    x1, z1 = made_part(given, quarter_rows(1, ROWS), MADE)
    x2, z2 = made_part(given, quarter_rows(2, ROWS), MADE)
    x3, z3 = made_part(given, quarter_rows(3, ROWS), MADE)
    if SUMS:
        a0, b0 = column_pairs(x0, PACKED)
        a1, b1 = column_pairs(x1, PACKED)
        a2, b2 = column_pairs(x2, PACKED)
        a3, b3 = column_pairs(x3, PACKED)
        pairs = (a0 + a1) + (a2 + a3), (b0 + b1) + (b2 + b3)
        store_sums(sums, pairs, row, column, K, ROWS, PACKED, COUNT)
    quantize_block_tile((x0, x1, x2, x3), first[0], first[1], FORM, PACKED, WHOLE)
    if HOW[0] == "gated_backward":
        if not PACKED:
            _, z0 = made_part(given, quarter_rows(0, ROWS), MADE, True)
            _, z1 = made_part(given, quarter_rows(1, ROWS), MADE, True)
            _, z2 = made_part(given, quarter_rows(2, ROWS), MADE, True)
            _, z3 = made_part(given, quarter_rows(3, ROWS), MADE, True)
        quantize_block_tile((z0, z1, z2, z3), second[0], second[1], FORM, PACKED, WHOLE)


@triton.jit
def produce_mxfp8_tile(given, sums, first, second, MADE: tl.constexpr, FORM: tl.constexpr, SUMS: tl.constexpr):
    """The same in blocks of 32, or of 128 along rows alone (mxfp8_kernels.py), in halves of words; `transpose` is in the order of the result."""
    HOW: tl.constexpr = MADE[0]
    COUNT: tl.constexpr = MADE[3]
    PACKED: tl.constexpr = MADE[4]
    WHOLE: tl.constexpr = MADE[5]
    BLOCK_M: tl.constexpr = FORM[6]
    row, column, _, K = given[2]
    if PACKED:
        x0, z0 = made_part(given, half_rows(0, BLOCK_M), MADE)
        x1, z1 = made_part(given, half_rows(1, BLOCK_M), MADE)
        values, others = (x0, x1), (z0, z1)
        a0, b0 = column_pairs(x0, True)
        a1, b1 = column_pairs(x1, True)
        pairs = a0 + a1, b0 + b1
    else:
        values, others = made_part(given, tl.arange(0, BLOCK_M), MADE)
        pairs = column_pairs(values, False)
    if SUMS:
        store_sums(sums, pairs, row, column, K, BLOCK_M, PACKED, COUNT)
    quantize_mxfp8_tile(values, first[0], first[1], FORM, PACKED, WHOLE)
    if HOW[0] == "gated_backward":
        if not PACKED:
            _, others = made_part(given, tl.arange(0, BLOCK_M), MADE, True)
        quantize_mxfp8_tile(others, second[0], second[1], FORM, PACKED, WHOLE)


@writes(
    y="KEEP_OUTPUT",
    sums="SUMS",
    data=lambda k: k.ROWWISE or k.TWO_D,
    scale_inv="ROWWISE",
    transpose=lambda k: k.COLUMNWISE and not k.TWO_D,
    columnwise_scale_inv="COLUMNWISE",
    second_y=lambda k: k.KEEP_OUTPUT and has_second(k),
    second_data=lambda k: (k.ROWWISE or k.TWO_D) and has_second(k),
    second_scale_inv=lambda k: k.ROWWISE and has_second(k),
    second_transpose=lambda k: k.COLUMNWISE and not k.TWO_D and has_second(k),
    second_columnwise_scale_inv=lambda k: k.COLUMNWISE and has_second(k),
)
@triton.jit
def produce_kernel(
    a,
    b,
    c,
    mean,
    rstd,
    y,
    second_y,
    sums,
    data,
    scale_inv,
    transpose,
    columnwise_scale_inv,
    second_data,
    second_scale_inv,
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
    KEEP_OUTPUT: tl.constexpr,
    SUMS: tl.constexpr,
    HALF: tl.constexpr,
    FMAX: tl.constexpr,
    EPS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    LARGEST: tl.constexpr,
    SCALING: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    TWO_D: tl.constexpr,
    SWIZZLED: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PACKED: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """One tile a program of the result [M, K]: ROWS by 128, or BLOCK_M by BLOCK_K where SCALE_BLOCK is not 0, in blocks of that.

    HALF: 0 or 1 where both gradients are halves of one tensor [M, 2K], the first this one, and K is whole tiles; -1 elsewhere.
    """
    if SCALE_BLOCK == 0:
        row, column = grouped_tile(ROWS, GROUP_M)
        if row >= M:
            return
    else:
        row = tl.program_id(2) * (128 * GROUP_M) + tl.program_id(1) * BLOCK_M
        column = tl.program_id(0) * BLOCK_K
        if GROUP_M > 1:  # noqa: SIM102 (a branch of the compiler's, and one of the GPU's)
            if row >= tl.cdiv(M, 128) * 128:
                return
    HOW: tl.constexpr = (SOURCE, KIND, LAYER, HAS_WEIGHT, HAS_BIAS, CAST_BEFORE_WEIGHT, ZERO_CENTERED, MODULATED)
    MADE: tl.constexpr = (HOW, ROUNDED_TO, KEEP_OUTPUT, BLOCK_K // 2 if PACKED else BLOCK_K, PACKED, WHOLE)
    width = K if HALF == -1 else 2 * K
    buffers = data, scale_inv, transpose, columnwise_scale_inv
    first = buffers, (row, column + (K if HALF == 1 else 0), M, width)
    if HALF == -1:
        buffers = second_data, second_scale_inv, second_transpose, second_columnwise_scale_inv
    second = buffers, (row, column + (K if HALF == 0 else 0), M, width)
    inputs, strides = (a, b, c, mean, rstd), (a_stride, b_stride, c_stride, rows_of_sample)
    given = inputs, strides, (row, column, M, K), y, y if HALF != -1 else second_y, first[1], second[1]
    if SCALE_BLOCK == 0:
        BLOCKS: tl.constexpr = (SCALING, FMAX, EPS, POWER_OF_TWO, LARGEST, ROWWISE, COLUMNWISE, ROWS)
        produce_block_tile(given, sums, first, second, MADE, BLOCKS, SUMS)
    else:
        FORM: tl.constexpr = (FMAX, ROWWISE, COLUMNWISE, SWIZZLED, SCALE_BLOCK, TWO_D, BLOCK_M, BLOCK_K)
        produce_mxfp8_tile(given, sums, first, second, MADE, FORM, SUMS)
