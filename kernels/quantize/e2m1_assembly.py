"""PTX of kernels/quantize/nvfp4.py: codes, block scales and the transform, on registers of one thread.

Arithmetic of whole codes in fp32 keeps off the integer unit, which has half the rate. To the nearest, with v = |x * enc|:

    code = bits(2^23 - 2 + min(v, 4) + sat(v / 2 - 2)) - bits(2^23 - 2)

fp32 counts halves below 2^23 and ones above, so that the first sum is rounded as e2m1 is up to 4, and to the even code in
a tie; above 4 it is an even number, to which the last term adds 0 or 1, a tie giving 0. min(v, 4) is 4 sat(v / 4), and
saturation (to 0..1) costs nothing. The difference of the bits is taken of all eight codes of a word at once.

Below 7, where a block's largest value nearly always is, one operation less does, with z = v / 4 + sat(v / 4) rounded up:

    code = bits(2^23 - 2 + 2 z) - bits(2^23 - 2)

2 z is v up to 4, exactly, and v / 2 + 2 from there, where the one tie is 4.5, v = 5. It goes down, as what rounding up makes of
the number below it does, while the number above it stays above. Blocks of the smallest scales, whose rounding is coarse, and those
of tensors that are not finite or whose amax is beyond 2^71 or below 2^-48, are clamped in a branch that is hardly ever taken.

Values of bf16 take one operation less again, v is not computed: with q = enc / 4, z = |x| q + sat(|x| q), rounded to the nearest
from the exact product. Up to 4 that is twice the rounded product, which the exact one is too near to for another sum. Above, z is
1 + |x| q, and rises above 9/4, v = 5, where |x| q is above 5/4 by more than 2^-23, half a step of z; v does where it is by 2^-24. An
x of bf16 lies between with few enc only: `e2m1.least_of_bf16` finds the tensors that have one of these (of the amaxes of bf16 one in
18), and they take the branch for every block. There values become v, 6 where v is above 5, and q 1/4.

Stochastically, fp16 holds v 2^-14 with the exponents of e2m1, its subnormals too, and with nine bits below each code. To these nine
random bits are added, of two values at once, and what is carried into the code is the rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

__all__ = [
    "HIGH_ROTATIONS",
    "LOW_ROTATIONS",
    "block_of_a_row",
    "blocks_of_two_columns",
    "word_of_values",
]

LOW_ROTATIONS, HIGH_ROTATIONS = (0, 4, 13, 23), (0, 7)
"""By how much the two words of a block's hash are rotated to the left: the xor of one of each holds nine random bits in either half.
Of 64 independent bits, these are sixteen numbers of which any three are independent."""

HADAMARD_NEGATIVE = 0xD7E8  # bit i: the i-th of HADAMARD_SIGNS is -1

_FP16_STEPS = "0f38800000"  # 2^-14
_QUARTER_FP16_STEPS = "0f37800000"  # 2^-16
_QUARTER = "0f3E800000"
_NEAREST_ZERO = 0x4AFFFFFC  # the bits of 2^23 - 2


def one_line(lines: list[str]) -> str:
    """Inductor writes the constant into source text of its own, where an escape would not survive."""
    return "{ " + " ".join(line.strip() for line in lines) + " }"


def declare(kind: str, *names: str) -> str:
    return f".reg .{kind} {', '.join(names)};"


# --- codes --------------------------------------------------------------------------------------------------


def nearest(value: str, nibble: int, word: str, scale: str) -> list[str]:
    """Adds the code of |value| * scale to the word."""
    return [
        f"abs.f32 v, {value}; mul.rn.f32 v, v, {scale};",
        "mul.rn.sat.f32 t, v, 0f3E800000; fma.rn.f32 t, t, 0f40800000, 0f4AFFFFFC;",
        "fma.rn.sat.f32 v, v, 0f3F000000, 0fC0000000; add.rn.f32 t, t, v; mov.b32 b, t;",
        f"mad.lo.u32 {word}, b, {16**nibble}, {word};",
    ]


def nearest_below_seven(value: str, nibble: int, word: str, scale: str) -> list[str]:
    """`nearest` of a quarter of |value| * scale, which is below 7, by one instruction less."""
    return [
        f"abs.f32 v, {value}; mul.rn.f32 v, v, {scale}; mul.rn.sat.f32 t, v, 0f3D800000; fma.rp.f32 t, v, 0f3D800000, t;",
        *halves_to_code(nibble, word),
    ]


def nearest_of_bf16(value: str, nibble: int, word: str, quarter: str) -> list[str]:
    """The same of four times |value| * quarter, value being of bf16 in a block that `nearest_word` may round so, by two less."""
    return [
        f"abs.f32 v, {value}; mul.rn.sat.f32 t, v, {quarter}; fma.rn.f32 t, v, {quarter}, t;",
        *halves_to_code(nibble, word),
    ]


def halves_to_code(nibble: int, word: str) -> list[str]:
    """Adds the code of t to the word."""
    return [
        "fma.rn.f32 t, t, 0f40000000, 0f4AFFFFFC; mov.b32 b, t;",
        f"mad.lo.u32 {word}, b, {16**nibble}, {word};",
    ]


def nearest_word(
    values: list[str],
    word: str,
    signs: str,
    scale: str,
    code: Callable[[str, int, str, str], list[str]] = nearest,
) -> list[str]:
    """word = the codes of eight values under the sign bits in `signs`; code: one of the functions above."""
    surplus = sum(_NEAREST_ZERO << 4 * nibble for nibble in range(8)) % 2**32
    lines = [f"sub.u32 {word}, {signs}, {surplus};"]
    for nibble, value in enumerate(values):
        lines += code(value, nibble, word, scale)
    return lines


def rotations(low: str, high: str, prefix: str) -> tuple[list[str], list[str], list[str]]:
    """(registers of the low word of a hash by LOW_ROTATIONS, of the high one by HIGH_ROTATIONS, the lines that fill them)."""
    lines, results = [], []
    for word, half, by in ((low, "l", LOW_ROTATIONS), (high, "h", HIGH_ROTATIONS)):
        names = [f"{prefix}{half}{index}" for index in range(len(by))]
        lines += [declare("b32", *names)]
        lines += [f"shf.l.wrap.b32 {name}, {word}, {word}, {n};" for name, n in zip(names, by, strict=True)]
        results += [names]
    return results[0], results[1], lines


def stochastic_word(
    values: list[str], word: str, signs: str, multiplier: str, low: list[str], high: str, steps: str = ""
) -> list[str]:
    """word = the codes of eight values times multiplier (and steps), rounded stochastically, under the highest bit of each nibble of
    `signs`.

    That product is v 2^-14. low, high: `rotations` of the block's hash, all of the low word, one of the high word.
    """
    lines = ["mov.b32 largest_code, 0x0FFF0FFF;"]
    for index in range(4):
        pair = f"q{index}"
        for value, target in ((values[index], "v"), (values[index + 4], "t")):
            lines += [f"abs.f32 {target}, {value}; mul.rn.f32 {target}, {target}, {multiplier};"]
            lines += [f"mul.rn.f32 {target}, {target}, {steps};"] if steps else []
        # The random bits are (low ^ high) & mask; codes, from bits 9 and 25 on, do not go beyond 7.
        lines += [f"cvt.rn.f16x2.f32 {pair}, t, v; lop3.b32 r, {low[index]}, {high}, 0x01FF01FF, 0x28;"]
        lines += [f"add.u16x2 {pair}, {pair}, r; min.u16x2 {pair}, {pair}, largest_code;"]
    # The halves' upper bytes, a code and a random bit each, of the even and of the odd values.
    lines += ["prmt.b32 q0, q0, q2, 0x7351; prmt.b32 q1, q1, q3, 0x7351;"]
    lines += [f"mad.lo.u32 {word}, q1, 16, q0; shr.u32 {word}, {word}, 1;"]
    return [*lines, f"lop3.b32 {word}, {word}, {signs}, 0x77777777, 0xE4;"]


CODE_REGISTERS = declare("f32", "v", "t") + declare("b32", "b", "r", "q0", "q1", "q2", "q3", "largest_code")


def signs_of_values(values: list[str], signs: str) -> list[str]:
    """signs = the signs of eight values, each the highest bit of its nibble, whose others are undefined."""
    lines = [f"mov.b32 {signs}, 0;"]
    for value in reversed(values):
        lines += [f"mov.b32 b, {value}; shf.l.wrap.b32 {signs}, b, {signs}, 4;"]
    return lines


def cast_signs_of_values(values: list[str], signs: str) -> list[str]:
    """The same by two instructions less, for values of which the compiler knows no two to be equal: ptxas 12.8 and 12.9 leave half of a
    register unwritten where two words end in the same pair of casts."""
    lines = []
    for part in (0, 1):  # bytes with the signs of the even values, and of the odd ones
        a, b, c, d = values[part::2]
        lines += [f"cvt.rn.satfinite.e5m2x2.f32 h0, {b}, {a}; cvt.rn.satfinite.e5m2x2.f32 h1, {d}, {c};"]
        lines += [f"mov.b32 {'eo'[part]}, {{h0, h1}};"]
    return [*lines, f"shr.u32 e, e, 4; lop3.b32 {signs}, o, e, 0x80808080, 0xE4;"]


def word_of_values(stochastically: bool, half: int) -> str:
    """$0 = the codes of the fp32 values $1 to $8, the first or the second half of a block. $9: what they are multiplied by;
    $10: the sign bits that are kept, none where all codes become 0; stochastically, $11, $12: the block's hash."""
    values = [f"${1 + index}" for index in range(8)]
    lines = [CODE_REGISTERS, declare("b32", "word", "signs"), *signs_of_values(values, "signs")]
    lines += ["and.b32 signs, signs, $10;"]
    if stochastically:
        low, high, more = rotations("$11", "$12", "r")
        lines += [*more, *stochastic_word(values, "word", "signs", "$9", low, high[half], _FP16_STEPS)]
        lines += [declare("pred", "none"), "setp.eq.s32 none, $10, 0; selp.b32 word, 0, word, none;"]
    else:
        lines += nearest_word(values, "word", "signs", "$9")
    return one_line([*lines, "mov.b32 $0, word;"])


# --- blocks of packed bf16 ----------------------------------------------------------------------------------


def widen(word: str, low: str, high: str) -> str:
    """The halves of a word in fp32."""
    return f"shl.b32 b, {word}, 16; mov.b32 {low}, b; and.b32 b, {word}, 0xFFFF0000; mov.b32 {high}, b;"


def in_a_tree(values: list[str], instruction: str) -> list[str]:
    """values[0] = all of them, two at a time; a power of two many registers, which are overwritten. A chain would wait longer."""
    lines, count = [], len(values)
    while count := count // 2:
        lines += [f"{instruction} {values[i]}, {values[i]}, {values[i + count]};" for i in range(count)]
    return lines


def three_at_a_time(values: list[str]) -> list[str]:
    """values[0] = the largest of nine fp32 without signs, as integers, of which one instruction compares three: NaN prevails."""
    lines = [f"max.s32 {a}, {a}, {b}; max.s32 {a}, {a}, {c};" for a, b, c in zip(*[iter(values)] * 3, strict=True)]
    return [*lines, f"max.s32 {values[0]}, {values[0]}, {values[3]}; max.s32 {values[0]}, {values[0]}, {values[6]};"]


def largest(words: list[str], target: str) -> list[str]:
    """target = words' largest magnitude, half by half; NaN is dropped. words: four or more, a power of two."""
    instruction, pairs = "max.xorsign.abs.bf16x2", list(zip(words[::2], words[1::2], strict=True))
    pair_results = [target, *(f"{target}_{index}" for index in range(1, len(pairs)))]
    lines = [declare("b32", *pair_results[1:])]
    lines += [f"{instruction} {r}, {a}, {b};" for r, (a, b) in zip(pair_results, pairs, strict=True)]
    return [*lines, *in_a_tree(pair_results, instruction), f"and.b32 {target}, {target}, 0x7FFF7FFF;"]


def clamp_transformed(values: list[str], enc: str, below: str) -> list[str]:
    """Unless `below`, values become magnitudes that are at most 26 / enc, none where enc is 0."""
    lines = [f"mul.rn.f32 v, {enc}, 0f3A800000; rcp.approx.ftz.f32 v, v;"]  # enc / 1024, whose inverse is normal
    lines += ["mul.rn.f32 v, v, 0f3CD00000;"]
    lines += [f"setp.eq.f32 zero, {enc}, 0f00000000; selp.f32 v, 0f00000000, v, zero;"]
    return [*lines, *(f"abs.f32 t, {value}; @!{below} min.f32 {value}, t, v;" for value in values)]


def multiply(values: list[str], enc: str, below: str) -> list[str]:
    """Unless `below`, values become |values| * enc, 6 where that is above 5 and 0 where it is NaN, and enc 1."""
    lines = []
    for value in values:
        lines += [f"abs.f32 t, {value}; mul.rn.f32 t, t, {enc}; max.f32 t, t, 0f00000000;"]
        lines += [f"setp.gt.f32 above, t, 0f40A00000; selp.f32 t, 0f40C00000, t, above; @!{below} mov.f32 {value}, t;"]
    return [*lines, f"@!{below} mov.f32 {enc}, 0f3F800000;"]


def lift_small(values: list[str], enc: str, below: str) -> list[str]:
    """Unless `below`, values become finite, 0 of NaN, and where enc * 2^-14 may be subnormal 2^-64 of them, and enc as much more."""
    lines = [f"setp.lt.f32 above, {enc}, 0f0D800000; selp.f32 v, 0f1F800000, 0f3F800000, above;"]  # 2^-100, 2^-64
    for value in values:
        lines += [f"abs.f32 t, {value}; max.f32 t, t, 0f00000000; min.f32 t, t, 0f7F7FFFFF; mul.rn.f32 t, t, v;"]
        lines += [f"@!{below} mov.f32 {value}, t;"]
    return [*lines, f"selp.f32 v, 0f5F800000, 0f3F800000, above; mul.rn.f32 v, {enc}, v; @!{below} mov.f32 {enc}, v;"]


class Side(NamedTuple):
    """A block: registers of its values, of what they are multiplied by, of whether that is all there is to do, and of what
    `scales` divides 1 by."""

    values: list[str]
    enc: str
    below: str
    divisor: str = ""


def rarely(
    sides: list[Side],
    signs: list[str],
    tensor: list[str],
    kept: str,
    stochastically: bool,
    nearest_work: Callable[[list[str], str, str], list[str]],
) -> list[str]:
    """What is left to do before the codes of one or two blocks are found, skipped where all are below: nearly everywhere.

    Unless it was given, enc is found again, where the divisor may be 0 or subnormal, and values are made fit for it. Of `signs` those
    `kept` stay: always, where codes are added to them; stochastic codes take them out of words that hold more, so that only a tensor
    with a NaN need remove any. tensor: as `scales` takes it.
    """
    removal = [f"and.b32 {word}, {word}, {kept};" for word in signs]
    always, lines, work = ([], removal, lift_small) if stochastically else (removal, [], nearest_work)
    for values, enc, below, divisor in sides:
        if divisor:
            lift, most = tensor[2:4]
            lines += [f"mul.rn.f32 v, {divisor}, {lift};", *reciprocal("v", "t")]
            lines += [f"mul.rn.f32 t, t, {lift}; min.f32 t, t, {most}; @!{below} mov.f32 {enc}, t;"]
        lines += work(values, enc, below)
    both = f"and.pred below, {sides[0].below}, {sides[-1].below};"
    return [*always, both, "@below bra COMMON;", *lines, "COMMON:"]


def given_multiplier(multiplier: str, sides: list[Side], stochastically: bool) -> list[str]:
    """The sides' enc = |multiplier|, and below = whether no more is to be done: unless it is negative (`e2m1.marked`)."""
    if stochastically:  # what `lift_small` is not for
        lines = [f"setp.ge.f32 {side.below}, {multiplier}, 0f0D800000;" for side in sides]
    else:
        lines = [f"mov.b32 b, {multiplier};", *(f"setp.ge.s32 {side.below}, b, 0;" for side in sides)]
    return [*lines, *(f"abs.f32 {side.enc}, {multiplier};" for side in sides)]


def reciprocal(divisor: str, target: str) -> list[str]:
    """target = 1 / divisor, rounded correctly where neither is subnormal: `e2m1.block_scale` says why."""
    return [
        f"neg.f32 negative, {divisor}; rcp.approx.ftz.f32 guess, {divisor};",
        f"fma.rn.f32 negative, negative, guess, 0f3F800000; fma.rn.f32 {target}, negative, guess, guess;",
    ]


def scales(amaxes: list[str], tensor: list[str], code: str, sides: list[Side]) -> list[str]:
    """code = the e4m3 scales of one or two blocks, the first lowest; the sides' enc = what their values are multiplied by, and below =
    whether that is so, and leaves them below 7: otherwise `rarely` goes on.

    tensor: sixth, inverse, lift, most and the least scale for which that can be said, of e2m1.tensor_scale. In a tensor that has
    lift to do it is infinite.
    """
    sixth, inverse, least = tensor[0], tensor[1], tensor[4]
    low, high = amaxes[0], amaxes[-1]
    lines = [f"mul.rn.f32 v, {low}, {sixth}; mul.rn.f32 t, {high}, {sixth};"]
    lines += [f"setp.gt.f32 {side.below}, {scale}, {least};" for side, scale in zip(sides, "vt", strict=False)]
    lines += [
        f"cvt.rn.satfinite.e4m3x2.f32 c8, t, v; cvt.rn.f16x2.e4m3x2 b, c8; mov.b32 {{h0, h1}}, b; cvt.u32.u16 {code}, c8;"
    ]
    for half, side in zip(("h0", "h1"), sides, strict=False):
        lines += [
            f"cvt.f32.f16 v, {half}; mul.rn.f32 {side.divisor}, v, {inverse};",
            *reciprocal(side.divisor, side.enc),
        ]
    return lines


SCALE_REGISTERS = (
    declare("b16", "c8", "h0", "h1")
    + declare("f32", "negative", "guess")
    + declare("pred", "below", "below0", "below1", "zero", "above")
)


def block_of_a_row(stochastically: bool, scaled: bool) -> str:
    """$0 (64 bits) = the codes of a row's block of 16 bf16 values, and unless `scaled` $1 = its scale, in the lowest byte.

    Inputs, in this order: the block's eight words; `scaled`: what values are multiplied by, or else sixth, inverse, lift, most and
    the least scale; the sign bits that are kept; stochastically the two words of the block's hash.
    """
    inputs = iter(f"${index}" for index in range(1 if scaled else 2, 32))
    words = [next(inputs) for _ in range(8)]
    tensor = [next(inputs) for _ in range(1 if scaled else 5)]
    kept = next(inputs)
    values = [f"x{index}" for index in range(16)]
    side = Side(values, "enc", "below0", "" if scaled else "divisor")
    lines = [
        CODE_REGISTERS,
        SCALE_REGISTERS,
        declare("f32", *values, "enc", "divisor"),
        declare("b32", "most", "scale"),
    ]
    lines += [declare("b32", "e", "o", "s0", "s1", "word0", "word1")]
    if scaled:
        lines += given_multiplier(tensor[0], [side], stochastically)
    else:
        lines += [*largest(words, "most"), widen("most", "x0", "x1"), "max.f32 x0, x0, x1;"]
        lines += scales(["x0"], tensor, "scale", [side])
    lines += [widen(word, values[2 * i], values[2 * i + 1]) for i, word in enumerate(words)]
    for half in range(2):
        a, b, c, d = words[4 * half : 4 * half + 4]
        lines += [
            # Bytes with the signs of elements 0 2 1 3 and 4 6 5 7, then of the even and of the odd ones.
            f"prmt.b32 e, {a}, {b}, 0x7351; prmt.b32 o, {c}, {d}, 0x7351;",
            f"prmt.b32 s{half}, e, o, 0x5410; prmt.b32 o, e, o, 0x7632; shr.u32 s{half}, s{half}, 4;",
            f"lop3.b32 s{half}, o, s{half}, 0x80808080, 0xE4;",
        ]
    lines += rarely([side], ["s0", "s1"], tensor, kept, stochastically, multiply)
    if stochastically:
        low, high, more = rotations(next(inputs), next(inputs), "r")
        lines += [*more, f"mul.rn.f32 enc, enc, {_FP16_STEPS};"]
        for half in range(2):
            lines += stochastic_word(values[8 * half : 8 * half + 8], f"word{half}", f"s{half}", "enc", low, high[half])
    else:
        lines += [f"mul.rn.f32 enc, enc, {_QUARTER};"]
        for half in range(2):
            lines += nearest_word(values[8 * half : 8 * half + 8], f"word{half}", f"s{half}", "enc", nearest_of_bf16)
    return one_line([*lines, "mov.b64 $0, {word0, word1};", *([] if scaled else ["mov.b32 $1, scale;"])])


def blocks_of_two_columns(hadamard: bool, stochastically: bool, scaled: bool, whole: bool = False) -> str:
    """$0, $1 = the codes of the left column's block of 16 bf16 values, $2, $3 = the right one's, unless `scaled` $4 = their scales,
    the left one's lowest.

    Inputs, in this order: the sixteen rows' words; `scaled`: what values are multiplied by, or else sixth, inverse, lift, most and
    the least scale; the sign bits that are kept; stochastically the hashes of the left and the right block, two words each.
    whole: none of them is known when compiling, as padding is, and signs may be cast.
    """
    inputs = iter(f"${index}" for index in range(4 if scaled else 5, 40))
    words = [next(inputs) for _ in range(16)]
    tensor = [next(inputs) for _ in range(1 if scaled else 5)]
    kept = next(inputs)
    left, right = ([f"{side}{index}" for index in range(16)] for side in "xy")
    lines = [CODE_REGISTERS, SCALE_REGISTERS, declare("f32", *left, *right, "enc0", "enc1", "divisor0", "divisor1")]
    lines += [declare("b32", "most", "scale", "e", "o", "s0", "s1", *(f"word{index}" for index in range(4)))]
    lines += [declare("f32", "amax0", "amax1")]
    lines += [widen(word, left[i], right[i]) for i, word in enumerate(words)]
    if hadamard:
        transformed = []
        for values, prefix, amax in ((left, "p", "amax0"), (right, "q", "amax1")):
            turned, more = butterflies(values, prefix)
            lines += [*more, "mov.b32 most, 0;", *transformed_amax(turned, f"{prefix}m")]
            lines += [f"mov.b32 {amax}, most; mul.rn.f32 {amax}, {amax}, {_QUARTER};"]
            turned, more = butterfly_stage(turned, f"{prefix}3_")
            lines += more
            transformed += [turned]
        left, right = transformed
    elif not scaled:
        lines += [*largest(words, "most"), widen("most", "amax0", "amax1")]
    divisors = ("", "") if scaled else ("divisor0", "divisor1")
    sides = [Side(left, "enc0", "below0", divisors[0]), Side(right, "enc1", "below1", divisors[1])]
    if scaled:
        lines += given_multiplier(tensor[0], sides, stochastically)
    else:
        lines += scales(["amax0", "amax1"], tensor, "scale", sides)
    signs = [f"s{side}_{half}" for half in range(2) for side in range(2)]
    lines += [declare("b32", *signs)]
    for half in range(2):
        names = signs[2 * half : 2 * half + 2]
        if hadamard:
            signs_of = cast_signs_of_values if whole else signs_of_values
            lines += signs_of(left[8 * half : 8 * half + 8], names[0])
            lines += signs_of(right[8 * half : 8 * half + 8], names[1])
        else:
            lines += signs_of_two_columns(words[8 * half : 8 * half + 8], names)
    lines += rarely(sides, signs, tensor, kept, stochastically, clamp_transformed if hadamard else multiply)
    for index, side in enumerate(sides):
        # Transformed values are four times too large, which clamp_transformed and nearest_below_seven know.
        if stochastically:
            lines += [f"mul.rn.f32 {side.enc}, {side.enc}, {_QUARTER_FP16_STEPS if hadamard else _FP16_STEPS};"]
        elif not hadamard:
            lines += [f"mul.rn.f32 {side.enc}, {side.enc}, {_QUARTER};"]
        if stochastically:
            low, high, more = rotations(next(inputs), next(inputs), f"r{index}")
            lines += more
        for half in range(2):
            eight = side.values[8 * half : 8 * half + 8], f"word{2 * index + half}", f"s{index}_{half}", side.enc
            if stochastically:
                lines += stochastic_word(*eight, low, high[half])
            else:
                lines += nearest_word(*eight, nearest_below_seven if hadamard else nearest_of_bf16)
    lines += [f"mov.b32 ${index}, word{index};" for index in range(4)]
    return one_line([*lines, *([] if scaled else ["mov.b32 $4, scale;"])])


def signs_of_two_columns(words: list[str], names: list[str]) -> list[str]:
    """names = the signs of the left and the right halves of eight words, as `signs_of_values`."""
    lines = []
    for part, (a, b, c, d) in zip(("s0", "s1"), (words[:4], words[4:]), strict=True):
        # Bytes with the signs of the left and the right column's rows 0 2, and 1 3; then each in its nibble.
        lines += [f"prmt.b32 e, {a}, {c}, 0x7351; prmt.b32 o, {b}, {d}, 0x7351; shr.u32 e, e, 4;"]
        lines += [f"lop3.b32 {part}, o, e, 0x80808080, 0xE4;"]
    return [*lines, f"prmt.b32 {names[0]}, s0, s1, 0x5410; prmt.b32 {names[1]}, s0, s1, 0x7632;"]


# --- Hadamard transform -------------------------------------------------------------------------------------


def butterflies(values: list[str], prefix: str) -> tuple[list[str], list[str]]:
    """(registers, lines that declare and fill them) of the first three stages of diag(signs) H16 times 16 values, four times the
    transform, in the order of additions of `hadamard_reference`. The fourth is `butterfly_stage`."""
    lines = []
    for index, value in enumerate(values):
        if HADAMARD_NEGATIVE >> index & 1:
            lines += [f"neg.f32 {value}, {value};"]
    for stage in range(3):
        values, more = butterfly_stage(values, f"{prefix}{stage}_")
        lines += more
    return values, lines


def butterfly_stage(values: list[str], prefix: str) -> tuple[list[str], list[str]]:
    """(registers, lines that declare and fill them) of one of the four stages."""
    results = [f"{prefix}{index}" for index in range(16)]
    lines = [declare("f32", *results)]
    for index in range(8):
        a, b = values[2 * index : 2 * index + 2]
        lines += [f"add.rn.f32 {results[index]}, {a}, {b}; sub.rn.f32 {results[8 + index]}, {a}, {b};"]
    return results, lines


def transformed_amax(values: list[str], prefix: str) -> list[str]:
    """`most` (b32) = the larger of it and of the magnitudes that the last stage makes of `values`: of a pair max(|a + b|, |a - b|) is
    |a| + |b|, rounded too. NaN prevails, but where a and b are infinite it is not made."""
    sums = [f"{prefix}{index}" for index in range(8)]
    lines = [declare("b32", *sums)]
    for total, a, b in zip(sums, values[::2], values[1::2], strict=True):
        lines += [f"abs.f32 v, {a}; abs.f32 t, {b}; add.rn.f32 v, v, t; mov.b32 {total}, v;"]
    return [*lines, *three_at_a_time(["most", *sums])]
