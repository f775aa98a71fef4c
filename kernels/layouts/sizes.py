"""The arithmetic of buffers' shapes, and buffers of described shapes. Sizes may be symbolic."""

from __future__ import annotations

import math
from typing import Any

import torch

Size = Any  # int or torch.SymInt

Buffers = dict[str, tuple[tuple[Size, ...], torch.dtype]]
"""Buffer name -> (shape, dtype), in the order in which `te.quantize` returns them."""


def rows_and_columns(shape: tuple[Size, ...]) -> tuple[Size, Size]:
    """(M, K) of a tensor of rank >= 1 read as a matrix: K the last dimension, M the product of the others."""
    return math.prod(shape[:-1]), shape[-1]


def blocks_of(size: Size, block: int) -> Size:
    """Blocks that cover `size` values: rounded up."""
    return (size + block - 1) // block


def round_up(size: Size, multiple: int) -> Size:
    """`size` rounded up to a multiple (size^multiple in the tables of shapes)."""
    return blocks_of(size, multiple) * multiple


def transposed(rows: Size, columns: Size) -> tuple[Size, Size]:
    """The shape of transposed 8-bit data: whole 16 bytes a row, as the GEMM's tensor copies need."""
    return columns, round_up(rows, 16)


def allocate(buffers: Buffers, device: torch.device | None) -> dict[str, torch.Tensor]:
    """Uninitialised buffers by name; plain torch.empty calls, so it traces and runs under a fake mode."""
    return {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in buffers.items()}
