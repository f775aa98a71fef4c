"""Recipes: how the three GEMMs of a linear hold their operands. A recipe is a value; it makes quantizers."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from te_dynamo.errors import InvalidOptionError
from te_dynamo.quantizers import Float8CurrentScalingQuantizer, Quantizer

__all__ = ["Float8CurrentScaling", "Recipe", "by_name", "names"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Base of the recipes.

    fprop_fast_accum, dgrad_fast_accum, wgrad_fast_accum: whether that GEMM may keep its sum in the tensor core's own
    reduced-precision accumulator (fast) or adds up in fp32 after every 128 products (slow). The defaults are those of
    Transformer Engine and torchao: fast forward, slow backward.
    """

    name: ClassVar[str]

    fprop_fast_accum: bool = True
    dgrad_fast_accum: bool = False
    wgrad_fast_accum: bool = False

    def input_quantizer(self) -> Quantizer:
        """For the activations a linear reads."""
        raise NotImplementedError

    def weight_quantizer(self) -> Quantizer:
        """For the weight."""
        raise NotImplementedError

    def grad_output_quantizer(self) -> Quantizer:
        """For the gradient that arrives at a linear's output."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8CurrentScaling(Recipe):
    """One fp32 scale a tensor, from the tensor's present amax.

    forward_format: "e4m3". backward_format: "e4m3" or "e5m2". FP8 tensor cores do not multiply e5m2 by e5m2, and an input
        and a weight have one format. Raises InvalidOptionError for another.
    power_of_two_scales: round each scale down to a power of two.
    amax_epsilon: lower bound of amax before the scale is computed.
    """

    name: ClassVar[str] = "float8_current_scaling"

    forward_format: str = "e4m3"
    backward_format: str = "e5m2"
    power_of_two_scales: bool = False
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:  # a bad field is an error here, not at the first linear
        for field, formats in (("forward_format", ("e4m3",)), ("backward_format", ("e4m3", "e5m2"))):
            if getattr(self, field) not in formats:
                raise InvalidOptionError.unknown(field, getattr(self, field), formats)
        self.input_quantizer()

    def _quantizer(self, fp8_format: str) -> Float8CurrentScalingQuantizer:
        return Float8CurrentScalingQuantizer(
            fp8_format=fp8_format, power_of_two_scale=self.power_of_two_scales, amax_epsilon=self.amax_epsilon
        )

    def input_quantizer(self) -> Quantizer:
        return self._quantizer(self.forward_format)

    def weight_quantizer(self) -> Quantizer:
        return self._quantizer(self.forward_format)

    def grad_output_quantizer(self) -> Quantizer:
        return self._quantizer(self.backward_format)


_RECIPES: dict[str, type[Recipe]] = {cls.name: cls for cls in (Float8CurrentScaling,)}


def names() -> list[str]:
    """The names `options={"recipe": ...}` takes."""
    return sorted(_RECIPES)


def by_name(name: str) -> Recipe:
    """The recipe of that name with its defaults. Raises InvalidOptionError naming the nearest valid one."""
    if name not in _RECIPES:
        raise InvalidOptionError.unknown("recipe", name, names())
    return _RECIPES[name]()
