"""te_dynamo/inspect/flops.py: whose forward a product ran in."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from te_dynamo.inspect.flops import count_matrix_flops


class _Calls(nn.Module):
    """Hands its input to modules that it does not own, as PEFT's DoRA does."""

    def forward(self, x: torch.Tensor, others: list[nn.Module]) -> torch.Tensor:
        return others[0](x, others[1:]) if len(others) > 1 else others[0](x)


class _Siblings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.names = [f"calls_{i}" for i in range(6)]
        for name in self.names:
            self.add_module(name, _Calls())
        self.linear = nn.Linear(8, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = (self.get_submodule(name) for name in self.names)
        return first(x, [*others, self.linear])


def test_a_product_is_of_the_innermost_module_that_runs() -> None:
    """All that run have paths of one length."""
    model = _Siblings()
    assert count_matrix_flops(model, (torch.randn(2, 8),), {}).by_weight == {"linear": 2 * 2 * 8 * 4}
    assert count_matrix_flops(lambda x: model(x), (torch.randn(2, 8),), {}).by_weight == {"linear": 2 * 2 * 8 * 4}


def test_a_weight_of_torchao_is_a_weight() -> None:
    """torchao multiplies by what it dequantizes from the tensors inside."""
    ao = pytest.importorskip("torchao.quantization")
    model = nn.Linear(128, 64, bias=False).requires_grad_(False)
    model.weight = nn.Parameter(ao.Float8Tensor.from_hp(model.weight), requires_grad=False)
    found = count_matrix_flops(model, (torch.randn(2, 128),), {})
    assert (found.by_weight, found.activations) == ({"": 2 * 2 * 64 * 128}, 0)
