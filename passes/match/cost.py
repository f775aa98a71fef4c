"""Whether a linear's FP8 GEMMs repay what quantizing its weight costs: on a GPU, where a user would notice.

    gain = 2 M N K (1 / speed in bf16 - 1 / speed in FP8)        for each of fprop, dgrad and wgrad that runs
    cost = bytes that quantization reads and writes / bandwidth

A weight that is quantized in each call is read and written whole, however few rows it multiplies: below some hundred rows bf16 is
faster whatever N and K, below those of one token several times as fast. A weight that is kept (te_dynamo.freeze,
weight_cache="step") costs nothing here. x's and dy's quantization is not counted for a linear: other linears may share it, a
norm or an activation may write it. For experts all is counted: each has a weight, and few rows.

Speeds are those of an H200 (benchmarks/gemm.py, grouped.py, quantize.py); only their ratios decide.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from te_dynamo.frozen import FROZEN
from te_dynamo.passes.match.products import without_casts
from te_dynamo.passes.regions import regions
from te_dynamo.recipe import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, Recipe

__all__ = ["LEFT_FOR_COST", "experts_cost_reason", "is_kept", "kept_weights_known", "linear_cost_reason"]

_BF16_FLOPS_PER_US = 700e6
_FAST_FLOPS_PER_US, _SLOW_FLOPS_PER_US = 1300e6, 1170e6  # of current scaling, by how a GEMM adds up
# bf16's times how much faster a block GEMM was in the same run (benchmarks/results/gemm_block-nvidia-h200.md, the median of twelve large
# shapes): 1.50 with a weight's 128x128 blocks, 1.18 without, 1.14 with E8M0 scales.
_BLOCK_FLOPS_PER_US = {"fprop": 1050e6, "dgrad": 1050e6, "wgrad": 825e6}
_E8M0_FLOPS_PER_US = dict.fromkeys(_BLOCK_FLOPS_PER_US, 800e6)
# In inference by how forward adds up; in training wgrad, whose groups begin at any token, is the slowest.
_GROUPED_FLOPS_PER_US = {"fast": 1300e6, "slow": 1080e6, "training": 980e6}
_BYTES_PER_US = 4.2e6
_BY_RULE = "(estimated for an H200); a rule that names it has it in FP8 all the same"

LEFT_FOR_COST = "te_dynamo_left_for_cost"
"""In the meta of a linear that stays what it is for what quantization costs: the reason."""

_KEPT = "te_dynamo_kept"
_by_step: contextvars.ContextVar[bool] = contextvars.ContextVar("te_dynamo_by_step", default=False)


def linear_cost_reason(m: int, n: int, k: int, gemms: Sequence[str], recipe: Recipe, readers: int = 1) -> str:
    """Why a linear of a weight [N, K] that is quantized in this call, multiplying M rows, stays in 16 bits; "" where FP8 is faster.

    gemms:   which of "fprop", "dgrad" and "wgrad" run. recipe: what quantizes.
    readers: how many linears of M rows share the quantized weight.
    """
    read = _bytes_read(recipe)
    if not read:
        return ""
    written = 2 if "dgrad" in gemms else 1
    cost_us = n * k * (read + written) / _BYTES_PER_US
    flops_per_us = _flops_per_us(recipe)
    gain_us = sum(2 * m * readers * n * k * (1 / _BF16_FLOPS_PER_US - 1 / flops_per_us[gemm]) for gemm in gemms)
    if cost_us <= gain_us:
        return ""
    keep = "te_dynamo.freeze keeps it quantized" if "wgrad" not in gemms else 'weight_cache="step" keeps it for a step'
    return f"{m} rows are too few: quantizing its weight takes {cost_us:.0f} us, FP8 GEMMs save {gain_us:.0f} us; {keep} {_BY_RULE}"


def _flops_per_us(recipe: Recipe) -> dict[str, float]:
    """Of each of the three GEMMs."""
    if not isinstance(recipe, Float8CurrentScaling):
        return _E8M0_FLOPS_PER_US if isinstance(recipe, MXFP8BlockScaling) else _BLOCK_FLOPS_PER_US
    speeds = [_FAST_FLOPS_PER_US if fast else _SLOW_FLOPS_PER_US for fast in recipe.fast_accum()]
    return dict(zip(("fprop", "dgrad", "wgrad"), speeds, strict=True))


def _bytes_read(recipe: Recipe) -> int:
    """Bytes read of a 16-bit element, once for the tensor's amax and once to cast; 0 for a recipe that a Hopper GPU emulates:
    it is slower at any size, and chosen for its numbers."""
    if isinstance(recipe, Float8CurrentScaling):
        return 2 + 2
    native = isinstance(recipe, Float8BlockScaling) or (
        isinstance(recipe, MXFP8BlockScaling) and recipe.scale_block == 128
    )
    return 2 if native else 0


def experts_cost_reason(m: int, n: int, k: int, groups: int, recipe: Recipe, training: bool, kept: bool = False) -> str:
    """Why G experts of [N, K] on M tokens in all stay in 16 bits, "" where FP8 is faster.

    recipe:   what quantizes, current scaling.
    training: whether gradients are computed: then a copy for wgrad or dgrad is written beside each forward's, dy is quantized too.
    kept:     whether the quantized weights outlive the call.
    """
    gain = 2 * m * n * k * (3 if training else 1)
    kind = "training" if training else "fast" if recipe.fast_accum()[0] else "slow"
    gain_us = gain / _BF16_FLOPS_PER_US - gain / _GROUPED_FLOPS_PER_US[kind]
    elements = (0 if kept else groups * n * k) + m * k + (m * n if training else 0)
    cost_us = elements * (2 + 2 + (2 if training else 1)) / _BYTES_PER_US
    if cost_us <= gain_us:
        return ""
    return (
        f"{m // groups} tokens for each of {groups} experts are too few: quantizing takes {cost_us:.0f} us, FP8 GEMMs save "
        f"{gain_us:.0f} us {_BY_RULE}"
    )


@contextlib.contextmanager
def kept_weights_known(gm: fx.GraphModule, example_inputs: Sequence[Any], by_step: bool) -> Iterator[None]:
    """Inside, `is_kept` tells of the weights of the graph and of its bodies and, with the option weight_cache="step", of all."""
    for region in regions(gm) if example_inputs else []:
        for placeholder, positions in region.inputs.items():
            if positions and all(example_inputs[position] in FROZEN for position in positions):
                placeholder.meta[_KEPT] = True
    token = _by_step.set(by_step)
    try:
        yield
    finally:
        _by_step.reset(token)


def is_kept(weight: fx.Node) -> bool:
    """Whether the quantized copy of a weight, or of its cast or transposition, outlives the call."""
    stored = without_casts(weight)
    return _by_step.get() or (stored is not None and _KEPT in stored.meta)
