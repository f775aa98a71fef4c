"""FSDP2 gathers codes: the same bits as the gathered weight quantized, half the bytes, and training as it was."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from helpers.distributed import fp8_bodies, rank_bodies
from helpers.distributed.plans import BLOCK, assert_trained_as, names, one_process
from helpers.distributed.ranks import SIZE, Ranks
from helpers.models.training import SAME

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")

CURRENT, BLOCKS = "float8_current_scaling", "float8_block_scaling"
RECIPES = [CURRENT, pytest.param(BLOCKS, marks=pytest.mark.slow)]


def test_bits(ranks: Ranks) -> None:
    for one in ranks.run(fp8_bodies.bits, CURRENT, torch.float32, torch.bfloat16):
        assert set(one.values()) == {""}


@pytest.mark.slow
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", [CURRENT, BLOCKS])
def test_bits_of_four_shards(four_ranks: Ranks, recipe: str, param_dtype: torch.dtype | None) -> None:
    """Rows that four ranks do not share evenly, and one whose shards cut blocks."""
    for one in four_ranks.run(fp8_bodies.bits, recipe, torch.float32, param_dtype):
        left = {name for name, kind in one.items() if kind}
        assert left == (set() if recipe == CURRENT else {f"parts.{i}.weight" for i in range(3)})
