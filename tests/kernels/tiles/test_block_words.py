"""Which tensors are read as words of two values."""

from __future__ import annotations

import pytest
import torch

from te_dynamo.kernels.runtime.target import TARGETS, acting_as
from te_dynamo.kernels.tiles.block_words import packs


@pytest.mark.parametrize(
    ("dtype", "columns", "first", "expected"),
    [
        (torch.bfloat16, 64, 0, True),
        (torch.bfloat16, 64, 8, True),
        (torch.bfloat16, 64, 1, False),  # behind one value in a flat parameter
        (torch.bfloat16, 60, 0, False),
        (torch.float16, 64, 0, False),
    ],
)
def test_words_begin_at_words(dtype: torch.dtype, columns: int, first: int, expected: bool) -> None:
    flat = torch.empty(first + 4 * columns, dtype=dtype)
    with acting_as(TARGETS["h200"]):
        assert packs(flat[first:].view(4, columns)) is expected
