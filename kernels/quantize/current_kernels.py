"""The kernels of kernels/quantize/current.py: the amax and the cast of a tensor, of each group of [G, M, K], and of the parts of a stack."""

from __future__ import annotations

from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.runtime.dependent_launch import wait_for_predecessor
from te_dynamo.kernels.runtime.writes import updates, writes
from te_dynamo.kernels.tiles.fp8 import (
    FLOAT32_MAX,
    abs_bits,
    load_amax,
    load_tile,
    saturating_cast,
    scale_from_amax,
    store_partial_amax,
    store_quantized_tile,
    store_tile,
    tile_from_the_end,
    tile_origin,
    tile_total,
)
from te_dynamo.kernels.tiles.one_pass import (
    begin_pass,
    end_pass,
    guessed,
    mended,
    no_amaxes,
    scaled,
    tiles_to_mend,
    with_amaxes,
)


@triton.jit
def stripe(K, BLOCK_K: tl.constexpr):
    """(part, first column) of this program, one of those that share a stripe of BLOCK_K columns.

    Programs side by side read tiles side by side, from the first row on: the last rows are in the cache at the end, where
    the cast begins. Programs beyond the last stripe's have no tile: their part is past the last.
    """
    stripes = tl.cdiv(K, BLOCK_K)
    return tl.program_id(0) // stripes, (tl.program_id(0) % stripes) * BLOCK_K


@writes("partials", sums="PARTS")
@triton.jit
def quantize_amax_kernel(
    x, partials, sums, M, K, GROUP: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr
):
    """partials[p] = amax of every tile of x [M, K] that is as many behind tile p as there are programs.

    GROUP: so many programs share a group of x [G, M, K]; 0 where all share x. PARTS: programs of a stripe of columns, which
    also write sums [PARTS, K], those of every PARTS-th row of tiles; 0 where no sums are asked for.
    """
    bits = tl.zeros((BLOCK_M, BLOCK_K), tl.int32)
    if PARTS > 0:
        part, column = stripe(K, BLOCK_K)
        total = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
        for row in range(tl.where(part < PARTS, part * BLOCK_M, M), M, PARTS * BLOCK_M):
            value = load_tile(x, row, column, K, M, K, BLOCK_M, BLOCK_K)
            bits = tl.maximum(bits, abs_bits(value))
            total += value
    else:
        if GROUP > 0:
            x += (tl.program_id(0) // GROUP).to(tl.int64) * M * K
        tiles = tile_total(M, K, BLOCK_M, BLOCK_K)
        if GROUP > 0:
            first, step = tl.program_id(0) % GROUP, GROUP
        else:
            first, step = tl.program_id(0), tl.num_programs(0)
        for tile in range(first, tiles, step):
            row, column = tile_origin(tile, K, BLOCK_M, BLOCK_K)
            bits = tl.maximum(bits, abs_bits(load_tile(x, row, column, K, M, K, BLOCK_M, BLOCK_K)))
    store_partial_amax(partials, bits)
    if PARTS > 0:
        store_tile(sums, tl.sum(total, axis=0)[None, :], part, column, PARTS, K, 1, BLOCK_K)


@writes("partials")
@triton.jit
def quantize_amaxes_kernel(
    x0, x1, x2, x3, x4, x5, x6, x7, partials, SIZE_0, SIZE_1, SIZE_2, SIZE_3, SIZE_4, SIZE_5, SIZE_6, SIZE_7, BLOCK: tl.constexpr
):  # fmt: skip
    """partials[i, p] = amax of every BLOCK of x_i, SIZE_i values, from the p-th on, as many apart as there are programs p."""
    which = tl.program_id(1)
    x, size = select_tensor(which, 4, x4, x5, x6, x7, SIZE_4, SIZE_5, SIZE_6, SIZE_7)
    first, first_size = select_tensor(which, 0, x0, x1, x2, x3, SIZE_0, SIZE_1, SIZE_2, SIZE_3)
    x, size = tl.where(which < 4, first, x), tl.where(which < 4, first_size, size)
    bits = tl.zeros((BLOCK,), tl.int32)
    for block in range(tl.program_id(0), tl.cdiv(size, BLOCK), tl.num_programs(0)):
        offsets = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        bits = tl.maximum(bits, abs_bits(tl.load(x + offsets, mask=offsets < size, other=0.0)))
    amax = tl.max(bits, axis=0).to(tl.float32, bitcast=True)
    tl.store(partials + which * tl.num_programs(0) + tl.program_id(0), amax)


@triton.jit
def select_tensor(which, FIRST: tl.constexpr, x0, x1, x2, x3, size_0, size_1, size_2, size_3):
    """The tensor with number `which`, and its size, of four that begin with number FIRST."""
    x, size = tl.where(which == FIRST + 1, x1, x0), tl.where(which == FIRST + 1, size_1, size_0)
    x, size = tl.where(which == FIRST + 2, x2, x), tl.where(which == FIRST + 2, size_2, size)
    return tl.where(which == FIRST + 3, x3, x), tl.where(which == FIRST + 3, size_3, size)


@triton.jit
def cast_tiles(
    x,
    scale,
    tiles,
    data,
    transpose,
    M,
    K,
    PASS: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    data_stride=None,
    transpose_stride=None,
):
    """This program's tiles of x [M, K], of so many, cast and stored; strides as `store_quantized_tile` takes them. Returns their amaxes."""
    bits = no_amaxes(BLOCK_M, BLOCK_K)
    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=1):
        row, column = tile_from_the_end(index, tiles, K, BLOCK_M, BLOCK_K)
        value = load_tile(x, row, column, K, M, K, BLOCK_M, BLOCK_K)
        bits = with_amaxes(bits, value, PASS, BLOCK_M, BLOCK_K)
        store_quantized_tile(
            *(value, scale, row, column, M, K, data, transpose, ROWWISE, COLUMNWISE),
            *(BLOCK_M, BLOCK_K, data_stride, transpose_stride),
        )
    return bits


@updates(**mended("data", "transpose"))
@writes(**guessed("partials"), **scaled("scale_inv"), data="ROWWISE", transpose="COLUMNWISE")
@triton.jit
def quantize_cast_kernel(
    x,
    partials,
    hint,
    data,
    transpose,
    scale_inv,
    G,
    M,
    K,
    GROUPED: tl.constexpr,
    PASS: tl.constexpr,
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
    """Every tile of x [M, K], or GROUPED of x [G, M, K] in the scale of its group: scale, cast, store."""
    wait_for_predecessor(EARLY)
    if GROUPED:
        tiles = tile_total(M, K, BLOCK_M, BLOCK_K)
        for index in tl.range(tl.program_id(0), G * tiles, tl.num_programs(0), num_stages=1):
            group = index // tiles
            amax = load_amax(partials + group * PARTIALS, PARTIALS)
            scale = scale_from_amax(amax, FMAX, EPS, POWER_OF_TWO, FLOAT32_MAX)
            if index % tiles == 0:
                tl.store(scale_inv + group, tl.div_rn(tl.full((), 1.0, tl.float32), scale))
            row, column = tile_origin(index % tiles, K, BLOCK_M, BLOCK_K)
            before = group.to(tl.int64) * K
            value = load_tile(x + before * M, row, column, K, M, K, BLOCK_M, BLOCK_K)
            rows, columns = data + before * M, transpose + before * ((M + 15) // 16 * 16)
            store_quantized_tile(value, scale, row, column, M, K, rows, columns, ROWWISE, COLUMNWISE, BLOCK_M, BLOCK_K)
    else:
        tiles = tile_total(M, K, BLOCK_M, BLOCK_K)
        scale = begin_pass(partials, hint, scale_inv, PARTIALS, FMAX, EPS, POWER_OF_TWO, PASS)
        if PASS == "mend":
            tiles = tiles_to_mend(tiles, hint, scale)
        bits = cast_tiles(x, scale, tiles, data, transpose, M, K, PASS, ROWWISE, COLUMNWISE, BLOCK_M, BLOCK_K)
        end_pass(partials, bits, PARTIALS, PASS)


@updates(**mended("data", "transpose"))
@writes(**guessed("partials0"), **scaled("scale_inv"), data="ROWWISE", transpose="COLUMNWISE")
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
    hint,
    data,
    transpose,
    scale_inv,
    SIDE_0,
    SIDE_1,
    SIDE_2,
    other,
    BY_COLUMNS: tl.constexpr,
    PASS: tl.constexpr,
    FMAX: tl.constexpr,
    EPS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    PARTIALS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """`quantize_cast_kernel` of each x_i, to its place in the stack: SIDE_i is what is stacked, `other` what all have in common.

    The last tensor comes first, as its amaxes were found last. COUNT_i of PARTIALS partial amaxes are there; those that a guess finds lie one
    after the other in partials0. (A kernel of its own:
    with all of its arguments a launch of one tensor would take the CPU longer.)
    """
    slot = tl.num_programs(1) - 1 - tl.program_id(1)
    x = tl.where(slot == 0, x0, tl.where(slot == 1, x1, x2))
    partials = tl.where(slot == 0, partials0, tl.where(slot == 1, partials1, partials2))
    count = tl.where(slot == 0, COUNT_0, tl.where(slot == 1, COUNT_1, COUNT_2))
    side = tl.where(slot == 0, SIDE_0, tl.where(slot == 1, SIDE_1, SIDE_2))
    first = tl.where(slot == 0, 0, tl.where(slot == 1, SIDE_0, SIDE_0 + SIDE_1))
    length = SIDE_0 + SIDE_1 + SIDE_2
    if BY_COLUMNS:
        padded = (other + 15) // 16 * 16
        rows, columns = data + first, transpose + tl.cast(first, tl.int64) * padded
        M, K, data_stride, transpose_stride = other, side, length, padded
    else:
        rows, columns = data + tl.cast(first, tl.int64) * other, transpose + first
        M, K, data_stride, transpose_stride = side, other, other, length
    if PASS != "known":
        partials = partials0 + slot * PARTIALS
    tiles = tile_total(M, K, BLOCK_M, BLOCK_K)
    hint += 2 * slot
    scale = begin_pass(partials, hint, scale_inv + slot, PARTIALS, FMAX, EPS, POWER_OF_TWO, PASS, count)
    if PASS == "mend":
        tiles = tiles_to_mend(tiles, hint, scale)
    bits = cast_tiles(
        *(x, scale, tiles, rows, columns, M, K, PASS, ROWWISE, COLUMNWISE, BLOCK_M, BLOCK_K),
        *(data_stride, transpose_stride),
    )
    end_pass(partials, bits, PARTIALS, PASS)


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
