"""te_dynamo.distributed.check_ranks: ranks that differ stop, all of them, and say in what."""

from __future__ import annotations

import pytest
import torch
from helpers.distributed import check_bodies
from helpers.distributed.ranks import SIZE, Ranks

from te_dynamo.distributed.check_ranks import differences

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")

FP8 = {"recipe": "float8_current_scaling"}


def lines(error: str) -> list[str]:
    return [line.strip() for line in error.splitlines()[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("alone", ["", "explain", "inference"])
def test_ranks_that_are_alike(ranks: Ranks, alone: str) -> None:
    """Whatever the sizes of their batches, and what one compiles alone that is not trained."""
    assert ranks.run(check_bodies.step, FP8, FP8, alone, (32, 48)) == [""] * SIZE


def test_fp8_beside_bf16(ranks: Ranks) -> None:
    first, second = ranks.run(check_bodies.step, FP8, {"recipe": None})
    assert first == second
    assert first.startswith("te_dynamo: ranks that train together differ.")
    told = lines(first)
    assert told[0].startswith("options: ") and "on rank 0 |" in told[0] and told[0].endswith("on rank 1")
    assert told[1] == (
        "linear 0.up: float8_current_scaling of bf16 on rank 0 | left in bf16 on rank 1 (recipe is None)"
    )
    assert [line.partition(":")[0] for line in told[1:] if line.startswith("linear")] == [
        "linear 0.up", "linear 0.down", "linear 1.up", "linear 1.down",
    ]  # fmt: skip


def test_a_rank_that_is_not_compiled(ranks: Ranks) -> None:
    first, second = ranks.run(check_bodies.step, FP8, None)
    assert first == second
    assert lines(first)[1] == "linear 0.up: float8_current_scaling of bf16 on rank 0 | not compiled on rank 1"


def test_options_alone(ranks: Ranks) -> None:
    first, second = ranks.run(check_bodies.step, FP8, {"save_weights": "original"})
    assert first == second
    (line,) = lines(first)
    assert "save_weights='original'" in line.partition("|")[2] and "save_weights" not in line.partition("|")[0]


def test_weights_that_travel(ranks: Ranks) -> None:
    name = "float8_current_scaling"
    assert ranks.run(check_bodies.gathered, name, name) == [""] * SIZE
    first, second = ranks.run(check_bodies.gathered, name, None)
    assert first == second
    up, down = lines(first)
    assert up.startswith("fp8_all_gather of up.weight: e4m3[row] on rank 0 | left in torch.bfloat16 on rank 1")
    assert down.startswith("fp8_all_gather of down.weight")


@pytest.mark.parametrize("fusion", [False, True], ids=["versions", "fusion"])
def test_at_the_call(ranks: Ranks, fusion: bool) -> None:
    first, second = ranks.run(check_bodies.environment, fusion)
    assert first == second
    told = lines(first)
    if fusion:
        name = "environment.<locals>.fuses_nothing (forward)"
        assert told == [f"registered fusions: none on rank 0 | {name} on rank 1"]
    else:
        assert len(told) == 2 and "te_dynamo 9.9" in told[0].replace("te_dynamo: ", "").partition("|")[2].replace(
            " 9.9", "te_dynamo 9.9"
        )
        assert told[1] == "environment variable TORCHDYNAMO_DISABLE: not set on rank 0 | 1 on rank 1"


def test_a_second_call_compares_inference(ranks: Ranks) -> None:
    first, second = ranks.run(check_bodies.inference, "mxfp8", "float8_block_scaling")
    assert first == second
    assert "linear up (not for training): mxfp8 of bf16 on rank 0 | float8_block_scaling of bf16 on rank 1" in first
    assert ranks.run(check_bodies.inference, "mxfp8", "mxfp8") == [""] * SIZE


def test_a_group_of_others(ranks: Ranks) -> None:
    first, second = ranks.run(check_bodies.other_group)
    assert first == ""
    assert second.startswith("te_dynamo.distributed.check_ranks: rank 1 is not in the group")


@pytest.mark.slow
def test_stages_of_a_pipeline(four_ranks: Ranks) -> None:
    errors = four_ranks.run(check_bodies.groups)
    assert errors[:2] == ["", ""] and errors[2] == errors[3]
    assert "float8_block_scaling of bf16 on rank 3" in errors[2] and "rank 0" not in errors[2]


def test_lines_of_differences() -> None:
    """What most ranks have comes first; many differences are counted."""
    most = ({"torch": "2.13", "linear up": "mxfp8"}, {})
    odd = ({"torch": "2.12", "linear up": "left in bf16"}, {"linear up": "K is no multiple of 32"})
    assert differences({0: odd, 1: most, 2: most, 3: most, 5: most}) == [
        "torch: 2.13 on rank 1-3, 5 | 2.12 on rank 0",
        "linear up: mxfp8 on rank 1-3, 5 | left in bf16 on rank 0 (K is no multiple of 32)",
    ]
    many = [({f"linear {i}": value for i in range(30)}, {}) for value in ("a", "b")]
    assert len(differences(dict(enumerate(many)))) == 21
    assert differences(dict(enumerate(many)))[-1] == "and 10 more"
