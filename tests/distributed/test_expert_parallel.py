"""Expert parallelism: tokens travel to their experts as codes, every rank computes the same bits, and the mixture trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.distributed import expert_bodies
from helpers.distributed.ranks import Ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")

UNFUSED = {"fusions": ["-fuse_all_to_all_quantize"]}
RECIPES: list[dict[str, Any]] = [{}, UNFUSED, {"recipe": "float8_block_scaling"}, {"recipe": "mxfp8"}, {"recipe": None}]


def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(one.float().flatten(), other.float().flatten(), dim=0))


def check(results: list[list[dict[str, Any]]]) -> None:
    """results: of each rank and each of RECIPES."""
    expected = expert_bodies.whole(len(results))
    for of_options in zip(*results, strict=True):
        together = [result["tensors"] for result in of_options]
        for name, gradient in expected.items():
            found = torch.cat([tensors[name] for tensors in together])
            assert cosine(found, gradient) > 0.98 and found.count_nonzero(), name
    for codes, unfused, blocks, mxfp8, plain in results:
        assert not any(reason for run in (codes, unfused, blocks, mxfp8) for _, reason in run["linears"])
        for name, tensor in codes["tensors"].items():
            assert torch.equal(tensor, unfused["tensors"][name]), name
        half = plain["bytes"]["all_to_all", "torch.bfloat16"]
        assert unfused["bytes"]["all_to_all", "torch.bfloat16"] == half
        # Of four ways two carry codes: half of their bytes.
        assert codes["bytes"]["all_to_all", "torch.bfloat16"] == half // 2
        assert codes["bytes"]["all_to_all", "torch.uint8"] == half // 4
        assert codes["notes"] == [] and any("the all-to-all for" in note for note in blocks["notes"])


def test_trains_and_codes_travel(ranks: Ranks) -> None:
    check(ranks.run(expert_bodies.steps, RECIPES))


@pytest.mark.slow
def test_four_ranks(four_ranks: Ranks) -> None:
    check(four_ranks.run(expert_bodies.steps, RECIPES))
