"""A tensor in a quantizer's format, by `te.quantize`: the random bits are drawn beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import te_dynamo

if TYPE_CHECKING:
    from te_dynamo.quantized.quantizers.base import Quantizer


def quantize_tensor(
    x: torch.Tensor, quantizer: Quantizer, generator: torch.Generator | None = None
) -> list[torch.Tensor]:
    """te.quantize, with random bits drawn from `generator` (None: torch's own) where the quantizer rounds stochastically.

    In a graph the drawing is an operation of its own: torch's random state decides, and equal bits give equal buffers.
    """
    te_dynamo.dialect  # type: ignore[attr-defined]  # noqa: B018  # its first use registers the operation
    if not quantizer.needs_random():
        return torch.ops.te.quantize.default(x, quantizer)  # type: ignore[no-any-return]
    return torch.ops.te.quantize.default(x, quantizer, random_key(x.device, generator))  # type: ignore[no-any-return]


def random_key(device: torch.device | None = None, generator: torch.Generator | None = None) -> torch.Tensor:
    """64 random bits, int32 [2], for one stochastic rounding; from torch's default generator where none is given."""
    return torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32, device=device, generator=generator)
