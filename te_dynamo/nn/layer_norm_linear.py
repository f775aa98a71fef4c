"""y = norm(x) @ weight^T + bias."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from te_dynamo.errors import InvalidOptionError
from te_dynamo.nn.base import QuantizedModule
from te_dynamo.nn.linear import linear_parameters
from te_dynamo.recipe import Recipe

_NORMS = ("LayerNorm", "RMSNorm")


class NormedModule(QuantizedModule):
    """Base of the modules that begin with a norm. State: layer_norm_weight [K], and of LayerNorm layer_norm_bias [K].

    normalization: "LayerNorm" or "RMSNorm". zero_centered_gamma: the weight is stored less one.
    """

    def __init__(
        self,
        width: int,
        eps: float,
        normalization: str,
        zero_centered_gamma: bool,
        recipe: str | Recipe,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ) -> None:
        super().__init__(recipe)
        if normalization not in _NORMS:
            raise InvalidOptionError.unknown("normalization", normalization, _NORMS)
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        gamma = torch.zeros if zero_centered_gamma else torch.ones
        self.layer_norm_weight = nn.Parameter(gamma(width, device=device, dtype=dtype))
        has_bias = normalization == "LayerNorm"
        self.layer_norm_bias = nn.Parameter(torch.zeros(width, device=device, dtype=dtype)) if has_bias else None

    def _norm(self, x: Tensor) -> Tensor:
        self._check_input(x, self.layer_norm_weight.shape[0])
        weight, zero_centered = self.layer_norm_weight, self.zero_centered_gamma
        if self.normalization == "RMSNorm":
            return torch.ops.te.rms_norm(x, weight, self.eps, False, zero_centered)[0]
        return torch.ops.te.layer_norm(
            x, weight.float() + 1 if zero_centered else weight, self.layer_norm_bias, self.eps
        )[0]


class LayerNormLinear(NormedModule):
    """A norm, then a linear. State: that of the norm, weight [out_features, in_features], bias [out_features].

    return_layernorm_output: give (y, norm(x)).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        bias: bool = True,
        *,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        recipe: str | Recipe = "float8_current_scaling",
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(in_features, eps, normalization, zero_centered_gamma, recipe, params_dtype, device)
        self.in_features, self.out_features = in_features, out_features
        self.return_layernorm_output = return_layernorm_output
        self.weight, self.bias = linear_parameters(out_features, in_features, bias, device, params_dtype)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """inp [..., in_features] -> [..., out_features]. is_first_microbatch: as in te_dynamo.nn."""
        normed = self._norm(inp)
        y = self._linear(normed, self.weight, self.bias, "weight", is_first_microbatch)
        return (y, normed) if self.return_layernorm_output else y
