"""PTX of kernels/quantize/nvfp4.py's amax launch: the largest magnitudes of two columns' blocks before and after the Hadamard transform."""

from __future__ import annotations

from te_dynamo.kernels.quantize.e2m1_assembly import (
    butterflies,
    butterfly_stage,
    declare,
    one_line,
    transformed_amax,
    widen,
)

__all__ = ["amax_of_column_words"]


def amax_of_column_words(rowwise: bool) -> str:
    """$0 = the largest of $A and of four times the transformed magnitudes of two columns' blocks of 16 bf16 values; if `rowwise`
    $1 = the largest magnitudes of $B and of the values, half by half, signs undefined. NaN prevails.

    Inputs, in this order: the sixteen rows' words, A, not negative, if `rowwise` B.
    """
    inputs = iter(f"${index}" for index in range(2 if rowwise else 1, 32))
    words = [next(inputs) for _ in range(16)]
    left, right = ([f"{side}{index}" for index in range(16)] for side in "xy")
    lines = [declare("f32", *left, *right, "v", "t"), declare("b32", "b", "largest", "most"), declare("pred", "finite")]
    lines += [f"mov.b32 most, {next(inputs)};"]
    if rowwise:
        lines += [f"mov.b32 largest, {next(inputs)};"]
        lines += [f"max.NaN.xorsign.abs.bf16x2 largest, largest, {word};" for word in words]
    lines += [widen(word, left[i], right[i]) for i, word in enumerate(words)]
    before_last = []
    for values, prefix in ((left, "p"), (right, "q")):
        turned, more = butterflies(values, prefix)
        lines += [*more, *transformed_amax(turned, f"{prefix}m")]
        before_last += [turned]
    lines += ["setp.ne.s32 finite, most, 0x7F800000;", "@finite bra FINITE;"]
    for values, prefix in zip(before_last, ("p3_", "q3_"), strict=True):
        results, more = butterfly_stage(values, prefix)
        lines += more
        for result in results:  # no larger than infinity, but NaN
            lines += [f"abs.f32 t, {result}; mov.b32 b, t; @!finite max.s32 most, most, b;"]
    lines += ["FINITE:"]
    return one_line([*lines, "mov.b32 $0, most;", *(["mov.b32 $1, largest;"] if rowwise else [])])
