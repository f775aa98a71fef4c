"""Expert parallelism: tokens travel to their experts as codes, every rank computes the same bits, and the mixture trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.distributed import expert_code_bodies
from helpers.distributed.ranks import Ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")

UNFUSED = {"fusions": ["-fuse_all_to_all_quantize"]}
ALIKE: list[dict[str, Any]] = [{}, UNFUSED, {"recipe": None}]
OTHERS: list[dict[str, Any]] = [{"recipe": "float8_block_scaling"}, {"recipe": "mxfp8"}]


def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(one.float().flatten(), other.float().flatten(), dim=0))


def check_gradients(results: list[list[dict[str, Any]]], step: int = 0) -> None:
    """Those of all ranks together are those of one process in the model's precision."""
    expected = expert_code_bodies.whole(len(results), step)
    for of_options in zip(*results, strict=True):
        for name, gradient in expected.items():
            found = torch.cat([result["tensors"][name] for result in of_options])
            assert cosine(found, gradient) > 0.98 and found.count_nonzero(), name


def check_codes(results: list[list[dict[str, Any]]]) -> None:
    """Of ALIKE: the same bits, and of four ways two carry codes."""
    sent = {"codes": 0, "values": 0, "all": 0}
    for codes, unfused, plain in results:
        assert codes["reasons"] and not any(codes["reasons"]) and codes["notes"] == []
        for name, tensor in codes["tensors"].items():
            assert torch.equal(tensor, unfused["tensors"][name]), name
        in_bf16 = ("all_to_all", "torch.bfloat16")
        assert unfused["bytes"][in_bf16] == plain["bytes"][in_bf16]
        sent["codes"] += codes["bytes"]["all_to_all", "torch.uint8"]
        sent["values"] += codes["bytes"][in_bf16]
        sent["all"] += plain["bytes"][in_bf16]
    assert sent["all"] == 4 * sent["codes"] == 2 * sent["values"]


@pytest.mark.slow
def test_codes_travel_and_the_mixture_trains(ranks: Ranks) -> None:
    results = ranks.run(expert_code_bodies.steps, ALIKE)
    check_gradients(results), check_codes(results)


@pytest.mark.slow
def test_inductors_code(ranks: Ranks) -> None:
    *fp8, plain = ALIKE
    results = ranks.run(
        expert_code_bodies.steps, [*({**options, "codegen": "inductor"} for options in fp8), plain], seconds=500
    )
    check_gradients(results), check_codes(results)


@pytest.mark.parametrize("counts", [[[0, 0]], pytest.param([[0, 0], [3, 5], [0, 7]], marks=pytest.mark.slow)])
def test_a_rank_that_gets_no_tokens_takes_part(ranks: Ranks, counts: list[list[int]]) -> None:
    """It calls the collectives that the others do, or all would wait."""
    for tensors in ranks.run(expert_code_bodies.unlike, counts, seconds=100):
        half = len(tensors) // 2
        for codes, unfused in zip(tensors[:half], tensors[half:], strict=True):
            assert torch.equal(codes, unfused)


@pytest.mark.slow
def test_four_ranks_and_other_sizes_in_each_step(four_ranks: Ranks) -> None:
    """The second step makes sizes symbols, a third graph those that were equal to others by chance; then none compiles."""
    results = four_ranks.run(expert_code_bodies.steps, ALIKE, 5, seconds=500)
    check_gradients(results, 4), check_codes(results)
    assert {result["graphs"] for of_rank in results for result in of_rank} <= {2, 3}


@pytest.mark.slow
def test_recipes_with_scales_of_blocks(ranks: Ranks) -> None:
    """Experts are quantized as on one process, and tokens travel in the model's precision."""
    results = ranks.run(expert_code_bodies.steps, OTHERS)
    check_gradients(results)
    for result in results[0]:
        assert not any(result["reasons"]) and ("all_to_all", "torch.uint8") not in result["bytes"]
        assert any("the all-to-all for" in note and "where a tensor has one scale" in note for note in result["notes"])
