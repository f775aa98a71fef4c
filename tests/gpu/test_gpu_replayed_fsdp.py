"""FSDP2 with weights in FP8 on the wire, replayed by CUDA graphs: the bits of calls.

pytest tests/gpu/test_gpu_replayed_fsdp.py     # one GPU is enough; NCCL's ranks are two where there are two
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
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
    """A replay that missed a cast, an amax or a table of addresses would repeat the weights of the capture.

    Inductor's graphs of a block are recorded anew where FSDP2 has gathered the weights at another address.
    """
    for one in ranks.run(fp8_bodies.replayed, recipe, whole, seconds=240):
        assert len({loss for loss, _ in one["called"]}) == len(one["called"])
        for (called, gradients), (replayed, others) in zip(one["called"], one["replayed"], strict=True):
            assert replayed == called
            for name, gradient in gradients.items():
                torch.testing.assert_close(others[name], gradient, rtol=0, atol=0, msg=name)
        assert (sum(one["captures"]) > 0) is not whole


@pytest.mark.parametrize("tensor", [1, 2])
def test_the_example_trains_alike_as_a_graph(tensor: int, tmp_path: pathlib.Path) -> None:
    """The optimizer writes the weights between replays. With tensor parallelism the graph has its collectives too."""
    if tensor > torch.cuda.device_count():
        pytest.skip("needs 2 GPUs")
    example = pathlib.Path(__file__).parents[2] / "examples" / "train_parallel.py"
    processes = str(min(SIZE, torch.cuda.device_count()))
    sizes = ["--steps", "30", "--layers", "2", "--width", "512", "--seq", "256", "--batch", "8"]
    losses = []
    for graph in ([], ["--graph"]):
        launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes]
        command = [*launched, example, "--tensor", str(tensor), *sizes, *graph, "--out", tmp_path / f"{len(graph)}"]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, done.stderr[-4000:]
        losses.append(float(re.search(r"step 30: loss ([\d.]+)", done.stdout)[1]))
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
