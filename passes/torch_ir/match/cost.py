"""Whether a linear's FP8 GEMMs repay what quantization costs: on a GPU, where a user would notice.

    time in bf16 = fixed + GEMMs: fprop and those of dgrad and wgrad that run
    time in FP8  = fixed + GEMMs + quantizing the weight + quantizing x and, in backward, dy

A weight that is quantized in each call is read and written whole, however few rows it multiplies; x and dy are quantized however few
columns they have; each quantization is a launch or two. So bf16 is faster below some number of rows, which is the larger the
narrower the linear is. A weight that is kept (te_dynamo.freeze, weight_cache="step") costs nothing to quantize: FP8 is slower where few
tiles of the product leave multiprocessors idle. For experts all is counted: each has a weight, and few rows.

Times are those of an H200: of linears fitted to benchmarks/few_rows.py, of experts from grouped.py and quantize.py, estimated where scales are those of blocks. For another GPU
te_dynamo/rates.py says how its memory and its tensor cores compare; fixed times stay. A linear of fp32 has half bf16's rate in TF32, and in
fp32 that of the cores beside the tensor cores; what quantizes it has twice the bytes. That a norm or an activation writes x in FP8 for less is not
known here: such linears are left in bf16 where FP8 would be up to a tenth faster.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from te_dynamo.kernels.gemm.block_scales import multiplies_codes
from te_dynamo.kernels.gemm.choose import Product, product_us
from te_dynamo.kernels.runtime.target import Target
from te_dynamo.passes.torch_ir.match.patterns.linears.products import without_casts
from te_dynamo.passes.torch_ir.match.values import dtype_name
from te_dynamo.passes.torch_ir.regions import regions
from te_dynamo.rates import Rates
from te_dynamo.recipe import Float8BlockScaling, MXFP8BlockScaling, Recipe
from te_dynamo.weights import frozen
from te_dynamo.weights.frozen import FROZEN


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
# Blocks of 32 whose scales the tensor core applies: passes as for blocks of 128, products at FP8's rate.
_E8M0_NATIVE = (_Times(16.0, 0.87, 0.84, 1553), _Times(52.8, 1.60, 0.63, 1554))
_MEASURED = {
    ("float8_current_scaling", "tensor"): _CURRENT,
    ("float8_rowwise", "row"): _BLOCK,  # an estimate: one launch a copy too
    ("float8_block_scaling", "1x128"): _BLOCK,
    ("float8_block_scaling", "128x128"): _BLOCK,
    ("mxfp8", "1x128"): _E8M0,
    ("mxfp8", "1x32"): _E8M0_NATIVE,
}
"""By recipe and by what has one scale of x."""

# A GEMM of current scaling takes that much of its time with sums that are not in fp32 (benchmarks/gemm.py), and where fp32 costs nothing.
_FAST_SUMS = 0.9
# Of a multiprocessor in fp32: 128 multiply-adds in a clock of 2 GHz.
_FP32_TFLOPS = 0.512
# us less of `fixed` without the launches for the weight (benchmarks/inference.py at one token).
_WEIGHT_LAUNCHES = 8.0

BYTES_PER_US = 4.2e6

# Of experts. In inference by how forward adds up; in training wgrad, whose groups begin at any token, is the slowest.
BF16_FLOPS_PER_US = 700e6
_GROUPED_FLOPS_PER_US = {"fast": 1300e6, "slow": 1080e6, "training": 980e6}
# Estimates, from the tiles that products by groups have: of an operand in 128x128 blocks, of two with a scale for each row (wgrad, and
# E8M0), and where tensor cores apply the scales.
_GROUPED_BLOCKS, _GROUPED_ROWS, _GROUPED_NATIVE = 980e6, 700e6, 1200e6
BY_RULE = "add a rule for this module to force FP8"

LEFT_FOR_COST = "te_dynamo_left_for_cost"
"""In the meta of a linear that stays what it is for what quantization costs: the reason."""

waiting_for_cpu: contextvars.ContextVar[str] = contextvars.ContextVar("te_dynamo_waiting_for_cpu", default="")
"""Why FP8 gains nothing in the graph being matched, whatever a linear's sizes (cpu_bound.py)."""

_KEPT = "te_dynamo_kept"
_by_step: contextvars.ContextVar[bool] = contextvars.ContextVar("te_dynamo_by_step", default=False)


def linear_cost_reason(
    m: int,
    n: int,
    k: int,
    gemms: Sequence[str],
    recipe: Recipe,
    rates: Rates,
    weight_readers: float = 1,
    x_readers: int = 1,
    kept: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> str:
    """Why a linear of x [M, K] and a weight [N, K] stays in the model's precision; "" where FP8 is faster, and for a recipe that the GPU emulates: it
    is slower at any size, and chosen for its numbers.

    gemms:          which of "fprop", "dgrad" and "wgrad" run. recipe: what quantizes. rates: of the GPU.
    weight_readers: how many linears of M rows share the quantized weight. x_readers: how many share the quantized x.
    kept:           whether the quantized weight outlives the call. dtype: the model's precision.
    """
    times = linear_times(m, n, k, gemms, recipe, rates, weight_readers, x_readers, kept, dtype)
    if not times or times[1] <= times[0]:
        return ""
    plain, fp8 = times
    weight = fp8 - linear_times(m, n, k, gemms, recipe, rates, math.inf, x_readers, kept, dtype)[1]
    keep = "te_dynamo.freeze keeps it quantized" if "wgrad" not in gemms else 'weight_cache="step" keeps it for a step'
    of_weight = f", of which quantizing its weight takes {weight:.0f} us; {keep}" if round(weight) else ""
    of_weight = ", though its weight is kept quantized" if kept else of_weight
    return f"M = {m}, N = {n}, K = {k}: {dtype_name(dtype)} takes {plain:.0f} us, FP8 {fp8:.0f} us{of_weight} ({rates}); {BY_RULE}"


def linear_times(
    m: int,
    n: int,
    k: int,
    gemms: Sequence[str],
    recipe: Recipe,
    rates: Rates,
    weight_readers: float = 1,
    x_readers: int = 1,
    kept: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[float, ...]:
    """(us in the model's precision, us in FP8) of such a linear; () for a recipe that the GPU emulates. Arguments as for `linear_cost_reason`."""
    fp32_is_free = recipe.input_quantizer().one_scale and not rates.target.has_wgmma
    fast = [
        is_fast or fp32_is_free
        for gemm, is_fast in zip(("fprop", "dgrad", "wgrad"), recipe.fast_accum(), strict=True)
        if gemm in gemms
    ]
    count, flops, read = len(fast), 2 * m * n * k, n * k * len(fast) / BYTES_PER_US / rates.reading
    ours, bf16 = _times(recipe, rates, count), _between(_BF16, count)
    if ours is None:
        return ()
    products = flops * sum(_FAST_SUMS if is_fast else 1.0 for is_fast in fast) / ours.teraflops / 1e6 / rates.fp8
    activations = m * k / x_readers + (m * n if count > 1 else 0)
    quantizing = rates.quantizing * 2 / dtype.itemsize
    passes = ours.rows * activations / 1e6 / quantizing
    if kept:
        fixed = (ours.fixed - _WEIGHT_LAUNCHES) / (
            x_readers if count == 1 else 1
        )  # linears of one x become one product
        products += _idle_us(m, n, k, recipe, rates, fast[0])
    else:
        # Linears of one x become one product in a format that stacks in all GEMMs. They seldom do, so that a half is counted.
        x = recipe.input_quantizer()
        stacks = x_readers > 1 and x.stacks in ("tensors", "blocks")
        fixed = ours.fixed / 2 if stacks else ours.fixed
        passes += ours.weight * n * k / weight_readers / 1e6 / quantizing
    return (
        bf16.fixed * rates.launch
        + max(
            flops * count / bf16.teraflops / 1e6 / rates.bf16 * _beside_bf16(dtype, rates.target), dtype.itemsize * read
        ),
        fixed * rates.launch + max(products, read) + passes,
    )


def _beside_bf16(dtype: torch.dtype, target: Target) -> float:
    """How many times as long as in bf16 a large product takes, as torch is set to multiply fp32."""
    if dtype.itemsize == 2:
        return 1.0
    in_tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return 2.0 if in_tf32 else target.bf16_tflops / (target.multiprocessors * _FP32_TFLOPS)


def _times(recipe: Recipe, rates: Rates, gemms: int) -> _Times | None:
    """Of a linear with that many GEMMs on an H200; None for a recipe that is emulated."""
    scaling = recipe.input_quantizer().scaling()
    backward = gemms > 1  # its products read columns
    if scaling == "1x32" and not multiplies_codes(rates.target, b_columnwise=backward):
        return None
    times = _MEASURED.get((recipe.name, scaling))
    return None if times is None else _between(times, gemms)


def _between(times: tuple[_Times, _Times], gemms: int) -> _Times:
    """With two of its three GEMMs a linear lies half way between forward alone and all three."""
    forward, training = map(dataclasses.astuple, times)
    return _Times(*(f + (t - f) * (gemms - 1) / 2 for f, t in zip(forward, training, strict=True)))


def _idle_us(m: int, n: int, k: int, recipe: Recipe, rates: Rates, is_fast: bool) -> float:
    """How much longer fprop takes than at its full rate, by the tiles that its kernel runs on Hopper: few of them leave multiprocessors
    idle. A linear whose weight is quantized in each call has more rows, or is left for the weight."""
    ours = _times(recipe, rates, 1)
    if not rates.target.has_wgmma or ours is None:
        return 0.0
    whole, scaling = recipe.input_quantizer().one_scale, recipe.input_quantizer().scaling()
    of_rows: Any = scaling if scaling in ("tensor", "row") else "1x128"
    product = Product(m, n, k, is_fast and whole, 2, scaling=of_rows)
    full = 2 * m * n * k / 1e6 * (_FAST_SUMS if is_fast else 1.0)
    tiles = product_us(product, rates.target) * (_CURRENT if whole else _BLOCK)[0].teraflops
    return max(0.0, tiles - full) / ours.teraflops / rates.fp8


def experts_cost_reason(
    m: int,
    n: int,
    k: int,
    groups: int,
    recipe: Recipe,
    training: bool,
    rates: Rates,
    kept: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    copied: int = 0,
) -> str:
    """Why G experts of [N, K] on M tokens in all stay in the model's precision, "" where FP8 is faster.

    recipe:   what quantizes. One that the GPU emulates is slower at any size, and chosen for its numbers.
    training: whether gradients are computed: then a copy for wgrad or dgrad is written beside each forward's, dy is quantized too.
    rates:    of the GPU. kept: whether the quantized weights outlive the call. dtype: the model's precision.
    copied:   the elements of weights and tokens that padding copies.
    """
    gain = 2 * m * n * k * (3 if training else 1)
    flops_per_us = _grouped_flops_per_us(recipe, training, rates)
    if flops_per_us is None:
        return ""
    plain_us = gain / BF16_FLOPS_PER_US / rates.bf16 * _beside_bf16(dtype, rates.target)
    gain_us = plain_us - gain / flops_per_us / rates.fp8
    elements = (0 if kept else groups * n * k) + m * k + (m * n if training else 0)
    nbytes = elements * (2 * dtype.itemsize + (2 if training else 1)) + copied * 2 * dtype.itemsize
    cost_us = nbytes / BYTES_PER_US / rates.quantizing
    if cost_us <= gain_us:
        return ""
    what = "padding and quantizing take" if copied else "quantizing takes"
    return (
        f"{m // groups} tokens for each of {groups} experts are too few: {what} {cost_us:.0f} us, FP8 GEMMs save "
        f"{gain_us:.0f} us ({rates}); {BY_RULE}"
    )


def _grouped_flops_per_us(recipe: Recipe, training: bool, rates: Rates) -> float | None:
    """Of products with experts on an H200, or as many times it as the GPU's FP8 is faster; None where the GPU emulates them."""
    if isinstance(recipe, MXFP8BlockScaling):
        if rates.target.has_block_scales:
            return _GROUPED_NATIVE
        return _GROUPED_ROWS if recipe.scale_block == 128 else None
    if isinstance(recipe, Float8BlockScaling):
        forward = _GROUPED_BLOCKS if recipe.weight_block_dims == 2 else _GROUPED_ROWS
        return 3 / (2 / forward + 1 / _GROUPED_ROWS) if training else forward
    return _GROUPED_FLOPS_PER_US["training" if training else "fast" if recipe.fast_accum()[0] else "slow"]


@contextlib.contextmanager
def kept_weights_known(gm: fx.GraphModule, example_inputs: Sequence[Any], by_step: bool) -> Iterator[None]:
    """Inside, `is_kept` and `is_dropped` tell of the weights of the graph and of its bodies; with the option weight_cache="step" all are
    kept but parts of larger memory."""
    for region in regions(gm) if example_inputs else []:
        for placeholder, positions in region.inputs.items():
            given = [example_inputs[position] for position in positions]
            if any(map(frozen.is_part, given)):
                placeholder.meta[_KEPT] = "never"
            elif given and all(value in FROZEN for value in given):
                placeholder.meta[_KEPT] = "dropped" if any(map(frozen.is_dropped, given)) else "frozen"
    token = _by_step.set(by_step)
    try:
        yield
    finally:
        _by_step.reset(token)


def is_kept(weight: fx.Node) -> bool:
    """Whether the quantized copy of a weight, or of its cast or transposition, outlives the call."""
    kept = _kept(weight)
    return kept != "never" and (_by_step.get() or kept != "")


def is_dropped(weight: fx.Node) -> bool:
    """Whether the quantized copy is all there is of it, so that nothing but FP8 can multiply by it."""
    return _kept(weight) == "dropped"


def _kept(weight: fx.Node) -> str:
    stored = without_casts(weight)
    return "" if stored is None else stored.meta.get(_KEPT, "")
