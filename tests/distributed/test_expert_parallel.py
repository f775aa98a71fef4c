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
        assert unfused["bytes"]["all_to_all", "torch.bfloat16"] == plain["bytes"]["all_to_all", "torch.bfloat16"]
        assert codes["notes"] == [] and any("the all-to-all for" in note for note in blocks["notes"])

    # Of four ways two carry codes: of as many tokens in all, half of the bytes.
    exchanged = [
        sum(of_rank[index]["bytes"].get(("all_to_all", f"torch.{dtype}"), 0) for of_rank in results)
        for index, dtype in ((0, "uint8"), (0, "bfloat16"), (4, "bfloat16"))
    ]
    assert exchanged == [exchanged[2] // 4, exchanged[2] // 2, exchanged[2]] and exchanged[2]


def test_trains_and_codes_travel(ranks: Ranks) -> None:
    check(ranks.run(expert_bodies.steps, RECIPES))


@pytest.mark.slow
def test_four_ranks(four_ranks: Ranks) -> None:
    check(four_ranks.run(expert_bodies.steps, RECIPES))
