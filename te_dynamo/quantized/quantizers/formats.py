"""The element formats of the quantizers, and the lower bound of their amaxes."""

from __future__ import annotations

import torch

from te_dynamo.errors import QuantizationError

FP8_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def check_amax_epsilon(amax_epsilon: float) -> None:
    """Raises QuantizationError for a lower bound of an amax, which is fp32, that is none."""
    if not 0 <= amax_epsilon <= torch.finfo(torch.float32).max:
        raise QuantizationError(f"amax_epsilon: expected a finite number >= 0, got {amax_epsilon} (an amax is fp32)")


def epsilon_setting(amax_epsilon: float) -> tuple[str, ...]:
    """What a quantizer's description says of it, where it is not the default."""
    return (f"eps {amax_epsilon:g}",) if amax_epsilon else ()
