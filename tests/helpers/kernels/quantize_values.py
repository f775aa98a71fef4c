"""The values of both FP8 formats, made of their bit fields."""

from __future__ import annotations

import numpy as np
import torch

FORMATS = {torch.float8_e4m3fn: (3, 7, 448.0, 0x7F), torch.float8_e5m2: (2, 15, 57344.0, 0x7F)}


def values_of(fp8_dtype: torch.dtype) -> np.ndarray:
    """The finite non-negative values of the format in the order of their codes, from its bit fields."""
    mantissa_bits, bias, fmax, _ = FORMATS[fp8_dtype]
    codes = np.arange(128)
    exponent, mantissa = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    fraction = mantissa / 2.0**mantissa_bits
    values = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
    return values[values <= fmax]
