"""Training in two processes and in four: what a rank computes is what one process computes of the same tokens and the same shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.distributed import rank_bodies
from helpers.distributed.plans import (
    BLOCK,
    LAYERS,
    assert_collectives,
    assert_trained_as,
    names,
    one_process,
    shares,
    shares_of_blocks,
)
from helpers.distributed.ranks import SIZE, Ranks
from helpers.models.small_models import GeluMLP
from helpers.models.training import SAME
from helpers.oracles.fp8_oracle import fp8_linears, relative_error

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed"),
]

TOKENS = 48
"""Of a rank's half of the batch."""

FP8 = 0.125
"""What FP8 may add to bf16's or fp32's numbers."""


# ---- data parallelism


@pytest.mark.parametrize(
    ("wrap", "compiled"), [("fsdp2", "blocks"), ("fsdp2", "whole"), ("fsdp1", "whole"), ("replicate", "blocks")]
)
def test_fsdp(ranks: Ranks, wrap: str, compiled: str) -> None:
    """A rank's step is one microbatch's. Nothing is kept of FSDP's weights, which change below one version counter."""
    options = {"weight_cache": "step", "weight_cache_check": True}
    both = ranks.run(rank_bodies.data_parallel, wrap, compiled, False, 2, 1, options)
    # FSDP's hooks break the graph in front of each block, and a loop with a break in it runs without the compiler: not the
    # embedding, the last norm and the head. All blocks share one graph.
    assert_trained_as(both, one_process(SIZE, steps=2, skip="head"), SAME)
    first = [one | {"losses": one["losses"][:1]} for one in both]
    for other in (one_process(1, skip="head"), one_process(1, skip=".")):  # the whole batch at once, and fp32
        assert_trained_as(first, other, FP8)
    for one in both:
        assert one["linears"] == (names(BLOCK) if compiled == "blocks" else names(BLOCK, "layers.0."))
        assert one["kept"] == []
        assert one["saved_shapes"] == {(32, TOKENS), (64, TOKENS)}, "columns of activations, and of no weight"


def test_fsdp_with_checkpoints_and_microbatches(ranks: Ranks) -> None:
    both = ranks.run(rank_bodies.data_parallel, "fsdp2", "whole", True, 2, 2)
    assert_trained_as(both, one_process(2 * SIZE, steps=2, skip="head"), SAME)
    assert both[0]["linears"] == both[1]["linears"] == names(BLOCK, "layers.0.")


@pytest.mark.parametrize("optimize_ddp", [True, "python_reducer"])
def test_ddp(ranks: Ranks, optimize_ddp: Any) -> None:
    """Dynamo splits the graph where DDP's buckets end, or compiles the reduction too; weights are kept for a step."""
    options = {"weight_cache": "step", "weight_cache_check": True}
    both = ranks.run(rank_bodies.data_parallel, "ddp", "whole", False, 2, 1, options, optimize_ddp)
    assert_trained_as(both, one_process(SIZE, steps=2), SAME)
    for one in both:
        assert sorted(one["linears"]) == sorted(names([*LAYERS, "head"], "module."))
        assert (one["graphs"] > 1) == (optimize_ddp is True)
        assert len(one["kept"]) > 10


def test_ddp_with_checkpoints_and_microbatches(ranks: Ranks) -> None:
    """Gradients meet in the last microbatch (no_sync); weights are kept in checkpoints too."""
    both = ranks.run(rank_bodies.data_parallel, "ddp", "whole", True, 2, 2, {"weight_cache": "step"}, False)
    assert_trained_as(both, one_process(2 * SIZE, steps=2), SAME)
    for one in both:
        assert one["linears"] == names([*LAYERS, "head"], "module.") and one["graphs"] == 1
        assert len(one["kept"]) > 10 and "head.weight" in one["kept"]


def test_mixed_precision_of_fsdp(ranks: Ranks) -> None:
    both = ranks.run(rank_bodies.mixed_precision, seconds=240)
    assert_trained_as(both, one_process(1, skip="head"), 0.15)  # and bf16's own rounding
    assert both[0]["linears"] == [("bf16", "")] * len(BLOCK)


# ---- tensor parallelism


def test_tensor_parallel(ranks: Ranks) -> None:
    """Every linear in FP8, of the shards; fused with the norms and activations between them."""
    both = ranks.run(rank_bodies.tensor_parallel)
    assert_trained_as(both, one_process(1, outside=shares), SAME)
    for one in both:
        assert one["linears"] == names([*LAYERS, "head"])
        assert {reason for _, reason in one["others"]} == {""}
        assert one["fusions"] == {
            ("forward", "fuse_norm_quantize"),
            ("forward", "fuse_activation_quantize"),
            ("backward", "fuse_gated_backward_quantize"),
        }
        assert one["placements"]["layers.0.parts.0.q.weight"] == "(Shard(dim=0),)"
        assert one["placements"]["layers.0.parts.0.o.weight"] == "(Shard(dim=1),)"


def test_sequence_parallel(ranks: Ranks) -> None:
    """Norms between shards of the tokens; a gather before each column-parallel linear, a scatter after each row-parallel one."""
    both = ranks.run(rank_bodies.tensor_parallel, True)
    assert_trained_as(both, one_process(1, outside=shares), SAME)
    assert both[0]["linears"] == both[1]["linears"] == names([*LAYERS, "head"])
    assert both[0]["fusions"] == {
        ("forward", "fuse_gather_quantize"),
        ("backward", "fuse_gather_quantize"),
        ("forward", "fuse_activation_quantize"),
        ("backward", "fuse_gated_backward_quantize"),
    }


@pytest.mark.parametrize(
    ("sequence", "codegen"),
    [
        (False, "eager"),
        (True, "eager"),
        (False, "inductor"),
        pytest.param(True, "inductor", marks=pytest.mark.exhaustive),
    ],
    ids=["tensor", "sequence", "tensor through Inductor", "sequence through Inductor"],
)
def test_blocks(ranks: Ranks, codegen: str, sequence: bool) -> None:
    """The first block's input is what the parallel embedding's collective will give: gradients reach the embedding through it."""
    both = ranks.run(rank_bodies.tensor_parallel, sequence, False, "blocks", {"codegen": codegen}, seconds=240)
    assert_trained_as(both, one_process(1, skip="head", outside=shares_of_blocks), SAME)
    # The first block's graph, and that of the blocks whose input is a plain tensor.
    assert both[0]["linears"] == both[1]["linears"] == names([*BLOCK, *BLOCK])


@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
def test_blocks_under_fsdp(four_ranks: Ranks, sequence: bool) -> None:
    """Two by two: FSDP shares out each tensor-parallel shard, and the batch."""
    each = four_ranks.run(rank_bodies.tensor_parallel, sequence, True, "blocks", seconds=240)
    assert_trained_as(each, one_process(SIZE, skip="head", outside=shares_of_blocks), SAME)
    assert_trained_as(each, one_process(1, skip="."), FP8)  # the whole batch at once, in fp32
    for one in each:
        assert one["linears"] == names([*BLOCK, *BLOCK])


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_biases_of_shards(ranks: Ranks, codegen: str) -> None:
    both = ranks.run(rank_bodies.biased, {"codegen": codegen}, seconds=240)
    torch.manual_seed(0)
    plain, x = GeluMLP(), both[0]["x"].clone().requires_grad_()
    with fp8_linears(), shares(plain, "up", "down"):
        y = plain(x)
        y.square().sum().backward()
    expected = {"x": x.grad, **{name: p.grad for name, p in plain.named_parameters()}}
    for one in both:
        assert one["linears"] == names(["up", "down"])
        assert relative_error(one["y"], y) <= SAME
        for name, gradient in one["gradients"].items():
            assert relative_error(gradient, expected[name]) <= SAME, name
        assert one["placements"] == {
            "up.weight": "(Shard(dim=0),)",
            "up.bias": "(Shard(dim=0),)",
            "down.weight": "(Shard(dim=1),)",
            "down.bias": "(Replicate(),)",
        }


# ---- the rest


def test_what_cannot_be_frozen(ranks: Ranks) -> None:
    said, _ = ranks.run(rank_bodies.frozen)
    assert said.pop("ddp") == ""
    for name, text in said.items():
        assert (
            "te_dynamo.freeze: " in text and "distributed or wrapped module" in text and "freeze the plain" in text
        ), name


@pytest.mark.parametrize("recipe", [None, "float8_current_scaling"])
def test_collectives(ranks: Ranks, recipe: str | None) -> None:
    """Eagerly and compiled: outputs, and the gradient of the sum of all processes' losses."""
    assert_collectives(ranks.run(rank_bodies.collectives, recipe), FP8 if recipe else 1e-5)
