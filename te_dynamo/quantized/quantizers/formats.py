"""The element formats of the quantizers, and the arithmetic of their buffers' shapes."""

from __future__ import annotations

import math

import torch

from te_dynamo.errors import QuantizationError

FP8_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}

TRANSPOSE_ALIGNMENT = 16
"""The row stride of transposed 8-bit data is a multiple of this many bytes, as the GEMM's tensor copies need."""


def check_amax_epsilon(amax_epsilon: float) -> None:
    """Raises QuantizationError for a lower bound of an amax, which is fp32, that is none."""
    if not 0 <= amax_epsilon <= torch.finfo(torch.float32).max:
        raise QuantizationError(f"amax_epsilon: expected a finite number >= 0, got {amax_epsilon} (an amax is fp32)")


def epsilon_text(amax_epsilon: float) -> str:
    """What a quantizer's description says of it, where it is not the default."""
    return f", eps {amax_epsilon:g}" if amax_epsilon else ""


def rows_and_columns(shape: tuple[int, ...]) -> tuple[int, int]:
    """(M, K) of a tensor read as a matrix: K is the last dimension, M the product of the others."""
    return math.prod(shape[:-1]), shape[-1]


def tiles(size: int, block: int) -> int:
    """Blocks that cover `size` values: rounded up."""
    return (size + block - 1) // block


def rounded_up(size: int, multiple: int) -> int:
    """`size` rounded up to a multiple (size^multiple in the tables of shapes)."""
    return (size + multiple - 1) // multiple * multiple


def scale_shape(outer: int, blocks: int, swizzled: bool) -> tuple[int, ...]:
    """Shape of the scales of `blocks` blocks in each of `outer` rows, padded to the tiles that tensor cores read, or in such tiles.

    Swizzled, its memory is that of (outer / 128, blocks / 4, 32, 4, 4) with scale (i, j) at [i / 128, j / 4, i % 32, i % 128 / 32, j % 4].
    """
    if swizzled:
        return rounded_up(outer, 128) // 4, rounded_up(blocks, 4), 4
    return rounded_up(outer, 128), rounded_up(blocks, 4)
