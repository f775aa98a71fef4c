"""Fixtures of the tests of kept weights."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from te_dynamo.weights import quantize_together


@pytest.fixture
def quantized(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shape of each weight that was quantized to be kept, or for a call that keeps nothing."""
    shapes: list[tuple[int, ...]] = []
    quantize, stacked = quantize_together.quantize_tensor, quantize_together.quantize_stacked

    def one(x: Tensor, quantizer: Any) -> list[Tensor]:
        shapes.append(tuple(x.shape))
        return quantize(x, quantizer)

    def several(xs: list[Tensor], *others: Any) -> list[Tensor]:
        shapes.extend(tuple(x.shape) for x in xs)
        return stacked(xs, *others)

    monkeypatch.setattr(quantize_together, "quantize_tensor", one)
    monkeypatch.setattr(quantize_together, "quantize_stacked", several)
    return shapes
