"""FSDP2 with weights in FP8 on the wire, replayed by CUDA graphs: the bits of calls, and no capture after the first.

pytest tests/gpu/test_gpu_replayed_fsdp.py     # one GPU is enough; NCCL's ranks are two where there are two
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from helpers.distributed import fp8_bodies
from helpers.distributed.ranks import SIZE, Ranks

from te_dynamo.recipe import MXFP8BlockScaling

pytestmark = pytest.mark.gpu

RECIPES = ["float8_current_scaling", "float8_block_scaling", MXFP8BlockScaling(scale_block=128, weight_block_dims=2)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(tmp_path_factory.mktemp("ranks"), "cuda", min(SIZE, torch.cuda.device_count())) as processes:
        yield processes


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_replays_follow_weights_and_tokens(ranks: Ranks, recipe: str | MXFP8BlockScaling, whole: bool) -> None:
    """A replay that missed a cast, an amax or a table of addresses would repeat the weights of the capture."""
    for one in ranks.run(fp8_bodies.replayed, recipe, whole, seconds=240):
        assert len({loss for loss, _ in one["called"]}) == len(one["called"])
        for (called, gradients), (replayed, others) in zip(one["called"], one["replayed"], strict=True):
            assert replayed == called
            for name, gradient in gradients.items():
                torch.testing.assert_close(others[name], gradient, rtol=0, atol=0, msg=name)
        assert sum(one["captures"][2:]) == 0
