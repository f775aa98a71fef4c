"""Fused against unfused runs of one model, bit for bit."""

from __future__ import annotations

import torch
from helpers.models.snapshot_models import Result

_ABOVE_SHARED_INPUT = ("gate.weight", "up.weight", "down.weight", "shift")

"""Parameters of these models whose gradients do not depend on that of gate's and up's input."""


def assert_same_bits(fused: Result, plain: Result, rounded_once: bool = False) -> None:
    """Equal in every bit, but for the sign of zero. rounded_once: what gate and up read has a gradient that is rounded once."""
    pairs = {f"output {i}": pair for i, pair in enumerate(zip(fused.outputs, plain.outputs, strict=True))}
    pairs |= {name: (gradient, plain.gradients[name]) for name, gradient in fused.gradients.items()}
    negligible = 1e-3 * max((float(gradient.double().norm()) for gradient in plain.gradients.values()), default=0.0)
    for name, (a, b) in pairs.items():
        assert a.dtype == b.dtype and a.isfinite().all(), name
        if rounded_once and not name.startswith("output") and not name.endswith(_ABOVE_SHARED_INPUT):
            # Steps of e5m2, where a gradient is quantized below. One token attends to itself alone: q's gradient is rounding.
            error = (a.double() - b.double()).norm() / max(float(b.double().norm()), negligible)
            assert error < 0.05, f"{name} differs by {error}"
        else:
            assert torch.equal(a, b), f"{name} differs by {(a - b).abs().max()}"
        assert a.count_nonzero() > 0 or b.double().norm() <= negligible, f"{name} is all zero: nothing was compared"
