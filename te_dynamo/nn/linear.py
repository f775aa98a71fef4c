"""y = x @ weight^T + bias."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from te_dynamo.nn.base import QuantizedModule
from te_dynamo.recipe import Recipe


def linear_parameters(
    out_features: int, in_features: int, bias: bool, device: torch.device | str | None, dtype: torch.dtype | None
) -> tuple[nn.Parameter, nn.Parameter | None]:
    """(weight [N, K], bias [N] or None), as torch.nn.Linear initialises them."""
    weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
    if not bias:
        return weight, None
    bound = in_features**-0.5
    return weight, nn.Parameter(torch.empty(out_features, device=device, dtype=dtype).uniform_(-bound, bound))


class Linear(QuantizedModule):
    """torch.nn.Linear in a recipe. State: weight [out_features, in_features], bias [out_features]."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        recipe: str | Recipe = "float8_current_scaling",
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(recipe)
        self.in_features, self.out_features = in_features, out_features
        self.weight, self.bias = linear_parameters(out_features, in_features, bias, device, params_dtype)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """inp [..., in_features] -> [..., out_features]. is_first_microbatch: as in te_dynamo.nn."""
        self._check_input(inp, self.in_features)
        return self._linear(inp, self.weight, self.bias, "weight", is_first_microbatch)
