"""Whether a linear's FP8 GEMMs repay what quantization costs: on a GPU, where a user would notice.

    time in bf16 = fixed + GEMMs: fprop and those of dgrad and wgrad that run
    time in FP8  = fixed + GEMMs + quantizing the weight + quantizing x and, in backward, dy

A weight that is quantized in each call is read and written whole, however few rows it multiplies; x and dy are quantized however few
columns they have; each quantization is a launch or two. So bf16 is faster below some number of rows, which is the larger the
narrower the linear is. A weight that is kept (te_dynamo.freeze, weight_cache="step") is not asked: its owner chose FP8.
For experts all is counted: each has a weight, and few rows.

Times are those of an H200: of linears fitted to benchmarks/few_rows.py, of experts from grouped.py and quantize.py. That a norm or an
activation writes x in FP8 for less is not known here: such linears are left in bf16 where FP8 would be up to a tenth faster.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from te_dynamo.passes.torch_ir.match.patterns.products import without_casts
from te_dynamo.passes.torch_ir.regions import regions
from te_dynamo.recipe import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, Recipe
from te_dynamo.weights.frozen import FROZEN

__all__ = [
    "LEFT_FOR_COST",
    "experts_cost_reason",
    "is_kept",
    "kept_weights_known",
    "linear_cost_reason",
    "linear_times",
]


@dataclasses.dataclass(frozen=True)
class _Times:
    """fixed:     us, whatever the sizes: launches, and how long GEMMs take to start and to end.
    weight:    us for a million elements of the weight.
    rows:      us for a million elements of x and dy.
    teraflops: of the GEMMs, a second.
    """

    fixed: float
    weight: float
    rows: float
    teraflops: float


# Of forward alone, and of forward and backward, as `benchmarks/fit_cost.py` prints them.
_BF16 = (_Times(1.2, 0, 0, 673), _Times(11.1, 0, 0, 704))
_CURRENT = (_Times(13.2, 1.31, 1.33, 1398), _Times(29.3, 2.35, 1.65, 1399))
_BLOCK = (_Times(16.4, 0.77, 0.97, 1309), _Times(38.0, 1.69, 1.26, 1134))
_E8M0 = (_Times(16.0, 0.87, 0.84, 949), _Times(52.8, 1.60, 0.63, 909))
# A GEMM of current scaling takes that much of its time with sums that are not in fp32 (benchmarks/gemm.py).
_FAST_SUMS = 0.9

_BYTES_PER_US = 4.2e6

# Of experts. In inference by how forward adds up; in training wgrad, whose groups begin at any token, is the slowest.
_BF16_FLOPS_PER_US = 700e6
_GROUPED_FLOPS_PER_US = {"fast": 1300e6, "slow": 1080e6, "training": 980e6}
_BY_RULE = "(estimated for an H200); a rule that names it has it in FP8 all the same"

LEFT_FOR_COST = "te_dynamo_left_for_cost"
"""In the meta of a linear that stays what it is for what quantization costs: the reason."""

_KEPT = "te_dynamo_kept"
_by_step: contextvars.ContextVar[bool] = contextvars.ContextVar("te_dynamo_by_step", default=False)


def linear_cost_reason(
    m: int, n: int, k: int, gemms: Sequence[str], recipe: Recipe, weight_readers: int = 1, x_readers: int = 1
) -> str:
    """Why a linear of x [M, K] and a weight [N, K] that is quantized in this call stays in 16 bits; "" where FP8 is faster, and for
    a recipe that a Hopper GPU emulates: it is slower at any size, and chosen for its numbers.

    gemms:          which of "fprop", "dgrad" and "wgrad" run. recipe: what quantizes.
    weight_readers: how many linears of M rows share the quantized weight. x_readers: how many share the quantized x.
    """
    times = linear_times(m, n, k, gemms, recipe, n * k / weight_readers, x_readers)
    if not times or times[1] <= times[0]:
        return ""
    bf16, fp8 = times
    weight = fp8 - linear_times(m, n, k, gemms, recipe, 0, x_readers)[1]
    keep = "te_dynamo.freeze keeps it quantized" if "wgrad" not in gemms else 'weight_cache="step" keeps it for a step'
    of_weight = f", {weight:.0f} of them to quantize its weight; {keep}" if round(weight) else ""
    return f"M = {m}, N = {n}, K = {k}: bf16 takes {bf16:.0f} us, FP8 {fp8:.0f} us{of_weight} {_BY_RULE}"


def linear_times(
    m: int, n: int, k: int, gemms: Sequence[str], recipe: Recipe, quantized: float, x_readers: int = 1
) -> tuple[float, ...]:
    """(us in bf16, us in FP8) of such a linear on an H200; () for a recipe that a Hopper GPU emulates.

    quantized: how many elements of the weight it quantizes in this call, 0 for a kept one; the rest as for `linear_cost_reason`.
    """
    times = _times(recipe)
    if times is None:
        return ()
    work = [
        _FAST_SUMS if is_fast else 1.0
        for gemm, is_fast in zip(("fprop", "dgrad", "wgrad"), recipe.fast_accum(), strict=True)
        if gemm in gemms
    ]
    activations = m * k / x_readers + (m * n if len(work) > 1 else 0)
    flops, read = 2 * m * n * k, n * k * len(work)
    bf16 = _microseconds(_BF16, len(work), flops * len(work), 2 * read)
    return bf16, _microseconds(times, len(work), flops * sum(work), read, quantized, activations)


def _times(recipe: Recipe) -> tuple[_Times, _Times] | None:
    """None for a recipe that is emulated."""
    if isinstance(recipe, Float8CurrentScaling):
        return _CURRENT
    if isinstance(recipe, MXFP8BlockScaling):
        return _E8M0 if recipe.scale_block == 128 else None
    return _BLOCK if isinstance(recipe, Float8BlockScaling) else None


def _microseconds(
    times: tuple[_Times, _Times], gemms: int, flops: float, read: float, weight: float = 0, activations: float = 0
) -> float:
    """Time of a linear. With two of its three GEMMs it lies half way between forward's time and that of all three.

    flops:  of all GEMMs, which take no less time than reading so many bytes of weights.
    weight, activations: how many of their elements are quantized.
    """
    forward, training = (
        t.fixed
        + t.weight * weight / 1e6
        + t.rows * activations / 1e6
        + max(flops / t.teraflops / 1e6, read / _BYTES_PER_US)
        for t in times
    )
    return forward + (training - forward) * (gemms - 1) / 2


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
