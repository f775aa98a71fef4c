"""Stand-in until the real operation lands: the value class that `te.linear` nodes carry."""

from __future__ import annotations

import dataclasses

from te_dynamo._compat import OpaqueMeta, register_value_class
from te_dynamo.quantizers import Quantizer
from te_dynamo.recipe import Recipe

__all__ = ["LinearConfig"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearConfig(metaclass=OpaqueMeta):
    """How one linear quantizes its operands and which gradients it owes."""

    input_quantizer: Quantizer
    weight_quantizer: Quantizer
    grad_output_quantizer: Quantizer
    input_requires_grad: bool
    weight_requires_grad: bool
    fprop_fast_accum: bool
    dgrad_fast_accum: bool
    wgrad_fast_accum: bool

    @classmethod
    def from_recipe(
        cls, recipe: Recipe, *, input_requires_grad: bool, weight_requires_grad: bool
    ) -> LinearConfig:
        """The configuration of a linear under `recipe`."""
        return cls(
            input_quantizer=recipe.input_quantizer(),
            weight_quantizer=recipe.weight_quantizer(),
            grad_output_quantizer=recipe.grad_output_quantizer(),
            input_requires_grad=input_requires_grad,
            weight_requires_grad=weight_requires_grad,
            fprop_fast_accum=recipe.fprop_fast_accum,
            dgrad_fast_accum=recipe.dgrad_fast_accum,
            wgrad_fast_accum=recipe.wgrad_fast_accum,
        )

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        names = {type(self).__name__: type(self)}
        fields = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            text = repr(value)
            if isinstance(value, Quantizer):
                text, more = value.__fx_repr__()
                names |= more
            fields.append(f"{field.name}={text}")
        return f"{type(self).__name__}({', '.join(fields)})", names


register_value_class(LinearConfig)
