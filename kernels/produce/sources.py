"""What is quantized before it is anywhere in memory: a part of a tile of it, made of its inputs (kernels/produce/kernels.py).

| SOURCE | a, b, c | the result |
| --- | --- | --- |
| activation | x | f(x) |
| activation_backward | dy, x | dy f'(x) |
| gated | gate, up | f(gate) up |
| gated_backward | dy, gate, up | both gradients |
| norm | x, weight, bias, and mean and rstd of x's rows | as kernels/norm/norm.py has it |
| stack | two or three tensors | as they are: KIND "rows", one below the other, or "columns", one beside the other |

By the device functions of the unfused kernels, in fp32 with one rounding: equal to these and then a quantization, bit for bit. A part of a
tile is some of its `rows` and all of its columns, as words of two bf16 or as elements. `inputs`: (a, b, c, mean, rstd). `strides`: values
from row to row of a, b and c, and rows of a sample; those of b and c are from sample to sample where a norm is MODULATED; of a stack the
rows, or columns, of each, whole tiles. `HOW`: (SOURCE, KIND, and the constants of a norm).
"""

from __future__ import annotations

from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.tiles.activations import activate, activate_backward, gradients
from te_dynamo.kernels.tiles.block_words import high_value, load_words, low_value, places_of_words
from te_dynamo.kernels.tiles.fp8 import widened
from te_dynamo.kernels.tiles.norms import load_affine, normalize


def has_second(k) -> bool:  # type: ignore[no-untyped-def]
    """Whether a launch writes two tensors, for `writes`."""
    return bool(k.SOURCE == "gated_backward" and k.HALF == -1)


@triton.jit
def computed(a, b, c, mean, rstd, HOW: tl.constexpr, X_DTYPE: tl.constexpr):
    """(the result in fp32, the second gradient, or the result again); a, b and c in fp32, of a norm the latter in any dtype."""
    SOURCE: tl.constexpr = HOW[0]
    KIND: tl.constexpr = HOW[1]
    if SOURCE == "gated_backward":
        first, second = gradients(a, b, c, KIND)
    else:
        if SOURCE == "activation":
            first = activate(a, KIND)
        elif SOURCE == "activation_backward":
            first = activate_backward(a, b, KIND)
        elif SOURCE == "gated":
            first = activate(a, KIND) * b
        else:
            first = normalize(a, mean, rstd, b, c, HOW[2], HOW[3], HOW[4], HOW[5], HOW[6], X_DTYPE, tl.float32)
        second = first
    return first, second


@triton.jit
def statistics(mean, rstd, rows, M, LAYER: tl.constexpr):
    """mean and rstd of rows, as columns."""
    row_mean = tl.load(mean + rows, mask=rows < M, other=0.0)[:, None] if LAYER else 0.0
    return row_mean, tl.load(rstd + rows, mask=rows < M, other=0.0)[:, None]


@triton.jit
def in_stack(inputs, strides, place, BY_COLUMNS: tl.constexpr):
    """(the tensor of a stack in which the tile at place lies, values from row to row of it, the tile's place in it)."""
    a, b, c, _, _ = inputs
    row, column, M, K = place
    at = column if BY_COLUMNS else row
    two = strides[0] + strides[1]
    first = tl.where(at >= two, two, tl.where(at >= strides[0], strides[0], 0))
    x = tl.where(at >= two, c, tl.where(at >= strides[0], b, a))
    if BY_COLUMNS:
        stride = tl.where(at >= two, strides[2], tl.where(at >= strides[0], strides[1], strides[0]))
        column -= first
    else:
        stride = K
        row -= first
    return x, stride, (row, column, M, K)


# --- words --------------------------------------------------------------------------------------------------


@triton.jit
def words_of(low, high):
    """Words of two fp32 values, each rounded to bf16."""
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def halves_of_columns(values, COUNT: tl.constexpr):
    """(even, odd) of values [2 COUNT], as rows."""
    even, odd = tl.split(tl.reshape(values, (COUNT, 2)))
    return even[None, :], odd[None, :]


@triton.jit
def made_words(inputs, strides, place, rows, HOW: tl.constexpr, COUNT: tl.constexpr, WHOLE: tl.constexpr):
    """(words of the result, words of the second gradient) in these rows of the tile at place (row, column, M, K), zero outside."""
    a, b, c, mean, rstd = inputs
    SOURCE: tl.constexpr = HOW[0]
    stride = strides[0]
    if SOURCE == "stack":
        a, stride, place = in_stack(inputs, strides, place, HOW[1] == "columns")
    row, column, M, K = place
    x = load_words(a, row, column, rows, M, K, COUNT, WHOLE, stride)
    if SOURCE == "stack":
        words, second = x, x
    elif SOURCE == "norm":
        row_mean, row_rstd = statistics(mean, rstd, row + rows, M, HOW[2])
        w, shift = load_affine(b, c, column, K, HOW[3], HOW[4], 2 * COUNT)
        w_low, w_high = halves_of_columns(w, COUNT) if HOW[3] else (w, w)
        c_low, c_high = halves_of_columns(shift, COUNT) if HOW[4] else (shift, shift)
        low, _ = computed(low_value(x), w_low, c_low, row_mean, row_rstd, HOW, tl.bfloat16)
        high, _ = computed(high_value(x), w_high, c_high, row_mean, row_rstd, HOW, tl.bfloat16)
        words = words_of(low, high)
        if not WHOLE:
            _, _, inside = places_of_words(row, column, rows, M, K, COUNT)
            words = tl.where(inside, words, 0)
        second = words
    else:
        y = x
        if SOURCE != "activation":
            y = load_words(b, row, column, rows, M, K, COUNT, WHOLE, strides[1])
        z = y
        if SOURCE == "gated_backward":
            z = load_words(c, row, column, rows, M, K, COUNT, WHOLE, strides[2])
        low, low_2 = computed(low_value(x), low_value(y), low_value(z), 0.0, 0.0, HOW, tl.bfloat16)
        high, high_2 = computed(high_value(x), high_value(y), high_value(z), 0.0, 0.0, HOW, tl.bfloat16)
        words = words_of(low, high)
        second = words_of(low_2, high_2) if SOURCE == "gated_backward" else words
    return words, second


@triton.jit
def store_words(y, words, place, rows, COUNT: tl.constexpr, WHOLE: tl.constexpr):
    """Writes words of these rows to y [M, K]."""
    row, column, M, K = place
    corner, offsets, mask = places_of_words(row, column, rows, M, K, COUNT)
    places = (y.to(tl.pointer_type(tl.int32)) + corner) + offsets
    if WHOLE:
        tl.store(places, words)
    else:
        tl.store(places, words, mask=mask)


# --- elements -----------------------------------------------------------------------------------------------


@triton.jit
def places_of_elements(place, rows, stride, COUNT: tl.constexpr):
    """Offsets of these rows' elements from a tensor's first, and which of them lie inside."""
    row, column, M, K = place
    columns = tl.arange(0, COUNT)
    offsets = tl.cast(row, tl.int64) * stride + column + (rows[:, None] * stride + columns[None, :])
    return offsets, (row + rows < M)[:, None] & (column + columns < K)[None, :]


@triton.jit
def load_elements(x, place, rows, stride, COUNT: tl.constexpr):
    """These rows' elements in fp32, zero outside."""
    offsets, inside = places_of_elements(place, rows, stride, COUNT)
    return widened(tl.load(x + offsets, mask=inside, other=0.0))


@triton.jit
def load_of_samples(x, place, rows, stride, rows_of_sample, COUNT: tl.constexpr):
    """The row [K] of each of these rows' samples, zero outside."""
    row, column, M, K = place
    columns = column + tl.arange(0, COUNT)[None, :]
    samples = tl.cast((row + rows) // rows_of_sample, tl.int64)[:, None]
    return tl.load(x + samples * stride + columns, mask=(row + rows < M)[:, None] & (columns < K), other=0.0)


@triton.jit
def made_elements(inputs, strides, place, rows, HOW: tl.constexpr, COUNT: tl.constexpr):
    """(elements of the result in fp32, of the second gradient) in these rows of the tile at place, zero outside."""
    a, b, c, mean, rstd = inputs
    SOURCE: tl.constexpr = HOW[0]
    stride = strides[0]
    if SOURCE == "stack":
        a, stride, place = in_stack(inputs, strides, place, HOW[1] == "columns")
    x = load_elements(a, place, rows, stride, COUNT)
    if SOURCE == "stack":
        value, second = x, x
    elif SOURCE == "norm":
        row, column, M, K = place
        row_mean, row_rstd = statistics(mean, rstd, row + rows, M, HOW[2])
        if HOW[7]:
            w = load_of_samples(b, place, rows, strides[1], strides[3], COUNT)
            shift = load_of_samples(c, place, rows, strides[2], strides[3], COUNT)
        else:
            w, shift = load_affine(b, c, column, K, HOW[3], HOW[4], COUNT)
            w, shift = w[None, :] if HOW[3] else w, shift[None, :] if HOW[4] else shift
        value, _ = computed(x, w, shift, row_mean, row_rstd, HOW, a.dtype.element_ty)
        _, inside = places_of_elements(place, rows, K, COUNT)
        value = tl.where(inside, value, 0.0)
        second = value
    else:
        y = x
        if SOURCE != "activation":
            y = load_elements(b, place, rows, strides[1], COUNT)
        z = y
        if SOURCE == "gated_backward":
            z = load_elements(c, place, rows, strides[2], COUNT)
        value, second = computed(x, y, z, 0.0, 0.0, HOW, a.dtype.element_ty)
    return value, second


@triton.jit
def store_elements(y, values, place, rows, COUNT: tl.constexpr):
    """Writes elements of these rows to y [M, K]."""
    offsets, inside = places_of_elements(place, rows, place[3], COUNT)
    tl.store(y + offsets, values, mask=inside)
