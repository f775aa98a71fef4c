"""What the modules share: the recipe, parameters made where and how the user says, workspaces of weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from te_dynamo.dialect.linear import LinearConfig
from te_dynamo.errors import InputError, InvalidOptionError
from te_dynamo.quantized.quantizers import Quantizer
from te_dynamo.quantized.storage import QuantizedTensorStorage
from te_dynamo.recipe import Recipe, by_name
from te_dynamo.weights.quantize_weight import quantize_weight


class QuantizedModule(nn.Module):
    """Base of the modules.

    recipe: a name or a te_dynamo.recipe object.

    Workspaces are no part of the state: they are in no state dict, copy or pickle, and gone after load_state_dict. Raises
    InvalidOptionError for a recipe that does not exist.
    """

    def __init__(self, recipe: str | Recipe) -> None:
        super().__init__()
        if not isinstance(recipe, (str, Recipe)):
            raise InvalidOptionError(f"te_dynamo.nn: a recipe is a name or a te_dynamo.recipe object, got {recipe!r}")
        self.recipe = by_name(recipe) if isinstance(recipe, str) else recipe
        # Made here: while tracing, torch 2.11 calls no class method of a value.
        self._configs = [[self._config(x, weight) for weight in (False, True)] for x in (False, True)]
        self._workspaces: dict[str, QuantizedTensorStorage] = {}

    def extra_repr(self) -> str:
        return f"recipe={self.recipe.describe()}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_workspaces": {}}

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *others: Any) -> None:
        self._workspaces.clear()  # here, as some loaders run no hooks after it
        # Transformer Engine's state dicts have an entry for the history of its scales, which no recipe here has.
        given = {name: value for name, value in state_dict.items() if name != f"{prefix}_extra_state"}
        super()._load_from_state_dict(given, prefix, *others)
        unexpected = others[3]
        if f"{prefix}_extra_state" in unexpected:
            unexpected.remove(f"{prefix}_extra_state")

    def _config(self, input_requires_grad: bool, weight_requires_grad: bool) -> LinearConfig:
        """How the module's linears run."""
        return LinearConfig.from_recipe(
            self.recipe, input_requires_grad=input_requires_grad, weight_requires_grad=weight_requires_grad
        )

    def _config_for(self, x: Tensor, weight: Tensor) -> LinearConfig:
        grad = torch.is_grad_enabled()
        return self._configs[int(grad and x.requires_grad)][int(grad and weight.requires_grad)]

    def _check_input(self, x: Tensor, width: int) -> None:
        """Raises InputError unless x is [..., width]: a norm broadcasts what is narrower."""
        if not isinstance(x, Tensor) or x.dim() == 0 or x.shape[-1] != width:
            there = list(x.shape) if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise InputError(f"te_dynamo.nn.{type(self).__name__}: expected an input [..., {width}], got {there}")

    def _linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, name: str, is_first_microbatch: bool | None
    ) -> Tensor:
        """x @ weight^T + bias, with the workspace of that name."""
        config = self._config_for(x, weight)
        if is_first_microbatch is None:
            return torch.ops.te.linear(x, weight, bias, config)[0]
        buffers = self._workspace(name, weight, config.weight_quantizer, is_first_microbatch)
        return torch.ops.te.linear_with_workspace(x, weight, bias, config, buffers)[0]

    def _workspace(self, name: str, weight: Tensor, quantizer: Quantizer, update: bool) -> list[Tensor]:
        """The weight's buffers, quantized where nothing is kept of it or `update` is set."""
        held, new = quantize_weight(weight, quantizer, self._workspaces.get(name), update=update, cache=True)
        if new is not None:
            self._workspaces[name] = new
        return held.with_usage(quantizer.rowwise, quantizer.columnwise).buffers()
