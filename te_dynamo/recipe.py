"""Recipes: how the three GEMMs of a linear hold their operands. A recipe is a value; it makes quantizers.

    fprop   out = x @ weight^T     x rowwise,     weight rowwise
    dgrad   dx = dy @ weight       dy rowwise,    weight columnwise
    wgrad   dw = dy^T @ x          dy columnwise, x columnwise

The numbers of each format: docs/numerics.md.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from te_dynamo.errors import InvalidOptionError, QuantizationError
from te_dynamo.quantized.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8RowwiseQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
    check_linear,
)

if TYPE_CHECKING:
    from te_dynamo.kernels.runtime.target import Target

__all__ = [
    "as_recipe",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8RowwiseScaling",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "Recipe",
    "by_name",
    "names",
    "of_weight",
]


def _one_of(default: Any, *others: Any) -> Any:
    """A field that takes `default` or one of `others`."""
    return dataclasses.field(default=default, metadata={"valid": (default, *others)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Base of the recipes. A bad field is an InvalidOptionError where the recipe is written, not at the first linear.

    name:      what `options={"recipe": name}` calls the recipe with its defaults.
    alignment: K and N of a linear must be multiples of it; M, the number of tokens, may be anything.
    gemms:     what the reason of a linear of other sizes calls the recipe's GEMMs.

    backward: "quantized", or "high_precision" to compute dgrad and wgrad in the model's precision: forward then saves x and
        weight as they are.
    """

    name: ClassVar[str]
    alignment: ClassVar[int] = 16
    gemms: ClassVar[str] = "FP8 GEMMs"

    backward: str = _one_of("quantized", "high_precision")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            valid, value = field.metadata.get("valid"), getattr(self, field.name)
            if valid is not None and not any(type(value) is type(v) and value == v for v in valid):
                raise InvalidOptionError.unknown(field.name, value, valid)
        try:
            check_linear(self.input_quantizer(), self.weight_quantizer(), self.grad_output_quantizer())
        except (QuantizationError, TypeError) as error:
            raise InvalidOptionError(f"te_dynamo: {type(self).__name__}: {error}") from None

    def input_quantizer(self) -> Quantizer:
        """The quantizer of the activations that a linear reads."""
        raise NotImplementedError

    def weight_quantizer(self) -> Quantizer:
        """The quantizer of the weight."""
        raise NotImplementedError

    def grad_output_quantizer(self) -> Quantizer:
        """For the gradient that arrives at a linear's output; unused under backward="high_precision"."""
        raise NotImplementedError

    def quantizes(self) -> tuple[bool, bool, bool]:
        """Whether fprop, dgrad and wgrad read quantized operands; the others compute in the model's precision."""
        return True, self.backward == "quantized", self.backward == "quantized"

    def fast_accum(self) -> tuple[bool, bool, bool]:
        """Whether fprop, dgrad and wgrad may keep their sums in the tensor core's own reduced-precision accumulator."""
        return False, False, False

    def is_emulated(self, target: Target) -> bool:
        """Whether, in forward, a GPU's tensor cores do not multiply the operands: their values are multiplied in bf16, exactly, and slower than bf16."""
        return self.input_quantizer().scaling() in ("1x16", "1x32") and not target.has_block_scales

    def no_groups_reason(self, learns: bool = True) -> str:
        """Why a grouped linear does not follow it, "" where it does. learns: whether its weights do."""
        for quantizer in (self.input_quantizer(), self.grad_output_quantizer()):
            if reason := quantizer.no_groups_reason():
                return reason
        missing = [
            gemm for gemm, quantized in zip(("fprop", "dgrad", "wgrad"), self.quantizes(), strict=True) if not quantized
        ]
        return f"te.grouped_linear has no {' and '.join(missing)} in high precision" if learns and missing else ""

    def describe(self) -> str:
        """The name, and the fields that are not at their default: "mxfp8(scale_block=128)"."""
        changed = [f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        fields = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in changed)
        return f"{self.name}({fields})" if fields else self.name


class _OneQuantizer(Recipe):
    """A recipe that holds all tensors alike, gradients in a format of their own."""

    backward_format: str  # a field of each subclass, in its own place

    def _quantizer(self, fp8_format: str) -> Quantizer:
        raise NotImplementedError

    def input_quantizer(self) -> Quantizer:
        return self._quantizer("e4m3")

    def weight_quantizer(self) -> Quantizer:
        return self._quantizer("e4m3")

    def grad_output_quantizer(self) -> Quantizer:
        return self._quantizer(self.backward_format)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8CurrentScaling(_OneQuantizer):
    """One fp32 scale a tensor, from the tensor's present amax.

    fprop_fast_accum, dgrad_fast_accum, wgrad_fast_accum: whether that GEMM may keep its sum in the tensor core's own
        reduced-precision accumulator (fast) or adds up in fp32 after every 128 products (slow). Hopper's keeps fewer bits than
        fp32 and truncates: all three GEMMs are slow by default, for 4 to 8% of a step (forward alone: 1 to 3%). Transformer Engine and torchao
        are fast in forward: fprop_fast_accum=True gives their numbers (docs/accuracy.md has losses of both).
    backward_format: of gradients, "e5m2" or "e4m3". Inputs and weights are e4m3: FP8 tensor cores do not multiply e5m2 by e5m2.
    power_of_two_scales: round each scale down to a power of two.
    amax_epsilon: lower bound of amax before the scale is computed.
    one_pass: read a tensor once: guess its scale, cast with it while its amax is found, and cast again where the guess was wrong. The bits
        of power_of_two_scales=True, which it needs. A step takes 2 to 4% less time, and a gated unit up to 9% more memory.
    static_inputs: where a weight's file has a scale of its input, that one is taken in place of the present amax's. For inference.
    """

    name: ClassVar[str] = "float8_current_scaling"

    fprop_fast_accum: bool = _one_of(False, True)
    dgrad_fast_accum: bool = _one_of(False, True)
    wgrad_fast_accum: bool = _one_of(False, True)
    backward_format: str = _one_of("e5m2", "e4m3")
    power_of_two_scales: bool = _one_of(False, True)
    amax_epsilon: float = 0.0
    one_pass: bool = _one_of(False, True)
    static_inputs: bool = _one_of(False, True)

    def _quantizer(self, fp8_format: str) -> Quantizer:
        return Float8CurrentScalingQuantizer(
            fp8_format=fp8_format,
            power_of_two_scale=self.power_of_two_scales,
            amax_epsilon=self.amax_epsilon,
            one_pass=self.one_pass,
        )

    def fast_accum(self) -> tuple[bool, bool, bool]:
        return self.fprop_fast_accum, self.dgrad_fast_accum, self.wgrad_fast_accum


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8RowwiseScaling(_OneQuantizer):
    """One fp32 scale for each row that a GEMM reads: of x a token, of the weight an output.

    wgrad: "fp8", or "bf16" to compute wgrad in the model's precision: forward then saves x as it is, and x and dy have no columnwise copy.
    backward_format: of gradients, "e5m2" or "e4m3". Inputs and weights are e4m3.
    power_of_two_scales: round each scale down to a power of two.
    amax_epsilon: lower bound of a row's amax before the scale is computed.
    """

    name: ClassVar[str] = "float8_rowwise"

    wgrad: str = _one_of("fp8", "bf16")
    backward_format: str = _one_of("e5m2", "e4m3")
    power_of_two_scales: bool = _one_of(False, True)
    amax_epsilon: float = 0.0

    def _quantizer(self, fp8_format: str) -> Quantizer:
        return Float8RowwiseQuantizer(
            fp8_format=fp8_format,
            power_of_two_scale=self.power_of_two_scales,
            amax_epsilon=self.amax_epsilon,
        )

    def quantizes(self) -> tuple[bool, bool, bool]:
        fprop, dgrad, wgrad = super().quantizes()
        return fprop, dgrad, wgrad and self.wgrad == "fp8"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8BlockScaling(Recipe):
    """One fp32 scale for 128 values in a row (1x128 blocks), or for 128 rows of them (128x128).

    input_block_dims, weight_block_dims, grad_block_dims: 1 or 2. No GEMM multiplies two operands in 128x128 blocks.
    backward_format: of gradients, "e4m3" or "e5m2". Inputs and weights are e4m3.
    power_of_two_scales: round each scale down to a power of two.
    amax_epsilon: lower bound of a block's amax before the scale is computed.
    """

    name: ClassVar[str] = "float8_block_scaling"

    input_block_dims: int = _one_of(1, 2)
    weight_block_dims: int = _one_of(2, 1)
    grad_block_dims: int = _one_of(1, 2)
    backward_format: str = _one_of("e4m3", "e5m2")
    power_of_two_scales: bool = _one_of(True, False)
    amax_epsilon: float = 0.0

    def _quantizer(self, fp8_format: str, block_dims: int) -> Quantizer:
        return Float8BlockQuantizer(
            fp8_format=fp8_format,
            block_dims=block_dims,
            power_of_two_scale=self.power_of_two_scales,
            amax_epsilon=self.amax_epsilon,
        )

    def input_quantizer(self) -> Quantizer:
        return self._quantizer("e4m3", self.input_block_dims)

    def weight_quantizer(self) -> Quantizer:
        return self._quantizer("e4m3", self.weight_block_dims)

    def grad_output_quantizer(self) -> Quantizer:
        return self._quantizer(self.backward_format, self.grad_block_dims)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MXFP8BlockScaling(_OneQuantizer):
    """Blocks of 32 values with one E8M0 scale (OCP MX), along the dimension that a GEMM contracts.

    scale_block: 32, or 128 for one scale every 128 values, written four times: still valid MXFP8 for Blackwell's tensor
        cores, and on Hopper it runs on the block-scaling kernels at full speed, with the same numbers.
    weight_block_dims: 1, or 2 for one scale for as many rows of a weight, written once for each: still valid MXFP8. Forward and backward then
        multiply by the same weight, which is quantized once, and travels in FP8 under FSDP2 (docs/distributed.md).
    backward_format: of gradients, "e4m3" or "e5m2". Inputs and weights are e4m3.
    """

    name: ClassVar[str] = "mxfp8"
    alignment: ClassVar[int] = 32
    gemms: ClassVar[str] = "MXFP8 GEMMs"

    scale_block: int = _one_of(32, 128)
    weight_block_dims: int = _one_of(1, 2)
    backward_format: str = _one_of("e4m3", "e5m2")

    def _quantizer(self, fp8_format: str, block_dims: int = 1) -> Quantizer:
        return MXFP8Quantizer(
            fp8_format=fp8_format,
            scale_block=self.scale_block,
            block_dims=block_dims,
        )

    def weight_quantizer(self) -> Quantizer:
        return self._quantizer("e4m3", self.weight_block_dims)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NVFP4BlockScaling(Recipe):
    """e2m1 values, an e4m3 scale for 16 of them and one fp32 scale a tensor.

    hadamard: rotate both operands of wgrad by a random Hadamard transform, which spreads their outliers.
    stochastic_rounding: round gradients up or down at random, so that their sums stay unbiased.
    weight_block_dims: 2 for one scale for 16x16 weights, so that forward and backward see the same weight, or 1.
    """

    name: ClassVar[str] = "nvfp4"
    gemms: ClassVar[str] = "NVFP4 GEMMs"

    hadamard: bool = _one_of(True, False)
    stochastic_rounding: bool = _one_of(True, False)
    weight_block_dims: int = _one_of(2, 1)

    def input_quantizer(self) -> Quantizer:
        return NVFP4Quantizer(hadamard=self.hadamard)

    def weight_quantizer(self) -> Quantizer:
        return NVFP4Quantizer(block_dims=self.weight_block_dims)

    def grad_output_quantizer(self) -> Quantizer:
        return NVFP4Quantizer(hadamard=self.hadamard, stochastic_rounding=self.stochastic_rounding)


_RECIPES: dict[str, type[Recipe]] = {
    cls.name: cls
    for cls in (Float8CurrentScaling, Float8RowwiseScaling, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling)
}


_ALIASES = {
    **dict.fromkeys(("fp8", "float8", "tensorwise"), Float8CurrentScaling.name),
    "rowwise": Float8RowwiseScaling.name,
}
"""Names of other libraries for a recipe of ours."""


def of_weight(quantizer: Quantizer) -> Recipe:
    """The recipe whose GEMMs multiply by a weight that is held so: activations are scaled as the weight is."""
    name, options = quantizer.recipe()
    return _RECIPES[name](**options)


def names() -> list[str]:
    """The names `options={"recipe": ...}` takes."""
    return sorted(_RECIPES)


def as_recipe(value: Any) -> Recipe | None:
    """A recipe as users give it: a name, an object, or None. Raises InvalidOptionError for anything else."""
    if value is None or isinstance(value, Recipe):
        return value
    if isinstance(value, str):
        return by_name(value)
    raise InvalidOptionError(
        f"te_dynamo: a recipe is a name ({', '.join(names())}), a te_dynamo.recipe object or None, got {value!r}"
    )


def by_name(name: str) -> Recipe:
    """The recipe of that name, or alias, in letters of any case, with its defaults. Raises InvalidOptionError naming the nearest valid one."""
    own = _ALIASES.get(name.lower(), name.lower())
    if own not in _RECIPES:
        raise InvalidOptionError.unknown("recipe", name, names(), others=_ALIASES)
    return _RECIPES[own]()
