"""y_g = x_g @ weight_g^T for the pieces x_g of one tensor."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from te_dynamo.dialect.grouped_linear import GroupedLinearConfig
from te_dynamo.errors import InputError, InvalidOptionError
from te_dynamo.nn.base import QuantizedModule
from te_dynamo.nn.linear import linear_parameters
from te_dynamo.recipe import Recipe


class GroupedLinear(QuantizedModule):
    """num_gemms linears without bias, each of its own rows. State: weight0, weight1, ... [out_features, in_features].

    A recipe without grouped GEMMs (`Recipe.no_groups_reason`) is an InvalidOptionError, and so are out_features that are no
    multiple of the blocks in a recipe with scales of blocks.
    """

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        recipe: str | Recipe = "float8_current_scaling",
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(recipe)
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        if out_features % (multiple := self.recipe.weight_quantizer().experts_begin_at()):
            raise InvalidOptionError(
                f"te_dynamo.nn.GroupedLinear: out_features = {out_features}: {self.recipe.describe()} needs a multiple of {multiple}"
            )
        for group in range(num_gemms):
            weight, _ = linear_parameters(out_features, in_features, False, device, params_dtype)
            self.register_parameter(f"weight{group}", weight)

    def _config(self, input_requires_grad: bool, weight_requires_grad: bool) -> GroupedLinearConfig:
        if reason := self.recipe.no_groups_reason():
            raise InvalidOptionError(
                f"te_dynamo.nn.GroupedLinear: {self.recipe.describe()}: {reason}; float8_current_scaling, float8_rowwise, "
                "float8_block_scaling and mxfp8 by their defaults have grouped GEMMs"
            )
        return GroupedLinearConfig.from_recipe(
            self.recipe,
            input_requires_grad=input_requires_grad,
            weight_requires_grad=weight_requires_grad,
        )

    def forward(self, inp: Tensor, m_splits: Sequence[int], is_first_microbatch: bool | None = None) -> Tensor:
        """inp [M, in_features] -> [M, out_features]; m_splits: the rows of each group. is_first_microbatch: as in te_dynamo.nn.

        The weights are put into one tensor in each call. Raises InputError for splits that are not inp's rows.
        """
        self._check_input(inp, self.in_features)
        if len(m_splits) != self.num_gemms or sum(m_splits) != inp.shape[0] or min(m_splits, default=0) < 0:
            raise InputError(
                f"te_dynamo.nn.GroupedLinear: m_splits {list(m_splits)} are not the {inp.shape[0]} rows in {self.num_gemms} groups"
            )
        weights: list[Tensor] = [getattr(self, f"weight{group}") for group in range(self.num_gemms)]
        weight = torch.stack(weights)
        config = self._config_for(inp, weight)
        offs = torch.tensor(list(itertools.accumulate(m_splits)), dtype=torch.int32, device=inp.device)
        if is_first_microbatch is None:
            return torch.ops.te.grouped_linear(inp, weight, offs, config)[0]
        buffers = self._workspace("weight", weight, config.weight_quantizer, is_first_microbatch)
        return torch.ops.te.grouped_linear_with_workspace(inp, weight, offs, config, buffers)[0]
