"""A weight that is codes, with no scale between it and the product: an error, since it would be another model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import te_dynamo

X = torch.ones(8, 64, dtype=torch.bfloat16)


class Cast(nn.Module):
    """What a loader leaves that knows nothing of scales."""

    def __init__(self, dtype: torch.dtype, scaled: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, 64).to(dtype), requires_grad=False)
        self.scale = torch.ones(()) if scaled else None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        return nn.functional.linear(x, weight if self.scale is None else weight * self.scale.to(x.dtype))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8])
def test_a_cast(dtype: torch.dtype) -> None:
    model = nn.Sequential(Cast(dtype))
    with pytest.raises(Exception, match=f"'0.weight' is {str(dtype)[6:]} and is multiplied without a scale .*:24"):
        te_dynamo.explain(model, X)
    assert te_dynamo.explain(model, X, rules=[("0", None)]).coverage == 0.0


def test_a_linear() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False, dtype=torch.bfloat16))
    model[0].weight = nn.Parameter(model[0].weight.data.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(Exception, match="is float8_e4m3fn and is multiplied without a scale"):
        te_dynamo.explain(model, X)


def test_codes_with_a_scale_are_none_of_these() -> None:
    assert te_dynamo.explain(Cast(torch.float8_e4m3fn, scaled=True), X).coverage == 1.0
