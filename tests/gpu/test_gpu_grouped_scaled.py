"""The products and columns of groups with scales of blocks on a GPU, in every tile: near the references."""

from __future__ import annotations

import pytest
import torch
from helpers.kernels import grouped_scaled_checks

from te_dynamo.kernels.gemm.tiles import candidates, grouped_block_tiles
from te_dynamo.kernels.runtime.margin import gemm_target

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("part", ["block", "mxfp8", "columns"])
def test_kernels_are_the_references(part: str) -> None:
    target = gemm_target(torch.device("cuda"))
    grouped_scaled_checks.check(
        part, lambda two_d: candidates(grouped_block_tiles(two_d, target), grouped_scaled_checks.N, target, 4), "cuda"
    )
