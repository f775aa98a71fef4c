"""The values of both FP8 formats, made of their bit fields, and the codes nearest to others."""

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


def nearest_codes(values: np.ndarray, fp8_dtype: torch.dtype) -> np.ndarray:
    """Codes of float64 values: the nearest finite value by search, ties to the even code."""
    fmax, nan_code = FORMATS[fp8_dtype][2:]
    grid = values_of(fp8_dtype)
    magnitude = np.minimum(np.nan_to_num(np.abs(values), posinf=fmax), fmax)
    upper = np.clip(np.searchsorted(grid, magnitude), 1, len(grid) - 1)
    middle = (grid[upper - 1] + grid[upper]) / 2
    up = (magnitude > middle) | ((magnitude == middle) & (upper % 2 == 0))
    codes = np.where(up, upper, upper - 1) | np.where(np.signbit(values), 0x80, 0)
    return np.where(np.isnan(values), nan_code, codes).astype(np.uint8)
