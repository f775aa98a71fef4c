"""y = act(norm(x) @ fc1_weight^T + fc1_bias) @ fc2_weight^T + fc2_bias."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from te_dynamo.errors import InvalidOptionError
from te_dynamo.nn.layer_norm_linear import NormedModule
from te_dynamo.nn.linear import linear_parameters
from te_dynamo.recipe import Recipe


def _swiglu(x: Tensor) -> Tensor:
    """silu of the first half times the second, as Transformer Engine has it."""
    gate, up = x.chunk(2, dim=-1)
    return torch.ops.te.gated(gate, up, "silu")


_ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "gelu": (lambda x: torch.ops.te.gelu(x, "tanh"), 1),
    "relu": (lambda x: torch.ops.te.relu(x), 1),
    "silu": (lambda x: torch.ops.te.silu(x), 1),
    "swiglu": (_swiglu, 2),
}
"""(function, rows of fc1_weight for each of its results)"""


class LayerNormMLP(NormedModule):
    """A norm and two linears with an activation between them.

    State: that of the norm, fc1_weight [F, K] with F = ffn_hidden_size, twice that for "swiglu", fc1_bias [F], fc2_weight
    [K, ffn_hidden_size], fc2_bias [K].
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        bias: bool = True,
        *,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        activation: str = "gelu",
        recipe: str | Recipe = "float8_current_scaling",
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, normalization, zero_centered_gamma, recipe, params_dtype, device)
        if activation not in _ACTIVATIONS:
            raise InvalidOptionError.unknown("activation", activation, _ACTIVATIONS)
        self.activation = activation
        rows = ffn_hidden_size * _ACTIVATIONS[activation][1]
        self.fc1_weight, self.fc1_bias = linear_parameters(rows, hidden_size, bias, device, params_dtype)
        self.fc2_weight, self.fc2_bias = linear_parameters(hidden_size, ffn_hidden_size, bias, device, params_dtype)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """inp [..., hidden_size] -> the same shape. is_first_microbatch: as in te_dynamo.nn."""
        function, _ = _ACTIVATIONS[self.activation]
        hidden = self._linear(self._norm(inp), self.fc1_weight, self.fc1_bias, "fc1_weight", is_first_microbatch)
        return self._linear(function(hidden), self.fc2_weight, self.fc2_bias, "fc2_weight", is_first_microbatch)
