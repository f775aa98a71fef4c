"""Whether the products of a mixture's experts repay what quantizing them costs.

    gain = 2 M N K (1 / speed in bf16 - 1 / speed in FP8)        for each of fprop, dgrad and wgrad that runs
    cost = bytes that quantization reads and writes / bandwidth

Every expert's weight is quantized, however few tokens chose it: a linear of one weight repays that with its thousands of rows,
experts with a few hundred each do not. Speeds are those of an H200 (benchmarks/grouped.py); only their ratios decide.
"""

from __future__ import annotations

__all__ = ["cost_reason"]

_BF16_FLOPS_PER_US = 700e6
_FP8_FLOPS_PER_US = {"forward": 1300e6, "training": 980e6}  # wgrad, whose groups begin at any token, is the slowest
_BYTES_PER_US = 4.2e6
_READ_BYTES = 2 + 2  # of bf16 and fp16: once for the amax, once to cast


def cost_reason(m: int, n: int, k: int, groups: int, training: bool) -> str:
    """Why G experts of [N, K] on M tokens in all stay in 16 bits, "" where FP8 is faster.

    training: whether gradients are computed: then a copy for wgrad or dgrad is written beside each forward's, dy is quantized too.
    """
    gain = 2 * m * n * k * (3 if training else 1)
    gain_us = gain / _BF16_FLOPS_PER_US - gain / _FP8_FLOPS_PER_US["training" if training else "forward"]
    elements = groups * n * k + m * k + (m * n if training else 0)
    cost_us = elements * (_READ_BYTES + (2 if training else 1)) / _BYTES_PER_US
    if cost_us <= gain_us:
        return ""
    return (
        f"{m // groups} tokens for each of {groups} experts are too few: quantizing takes {cost_us:.0f} us, FP8 GEMMs save "
        f"{gain_us:.0f} us (estimated for an H200); a rule that names it has it in FP8 all the same"
    )
