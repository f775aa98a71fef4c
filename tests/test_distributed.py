"""Training in two processes and in four: what a rank computes is what one process computes of the same tokens and the same shards."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import rank_bodies
import torch
import torch.nn.functional as F
from fp8_oracle import fp8_linears, relative_error
from rank_bodies import batch, loss_of, model, rows_of, sequential, step
from ranks import SIZE, Ranks
from small_models import GeluMLP
from torch.overrides import TorchFunctionMode
from training import SAME

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed"),
]

FP8 = 0.125
"""What FP8 may add to bf16's or fp32's numbers."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(tmp_path_factory.mktemp("ranks")) as processes:
        yield processes


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(tmp_path_factory.mktemp("four_ranks"), size=2 * SIZE) as processes:
        yield processes


def one_process(
    parts: int,
    steps: int = 1,
    skip: str = "",
    outside: Any = contextlib.nullcontext,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """The same training without ranks and without the package: FP8 by the oracle.

    parts: of the batch, each with amaxes of its own. skip: what the names of linears hold that stay in their precision.
    outside: a mode below which the oracle is. dtype: what the weights are rounded to; all else is fp32.
    """
    plain, losses, gradients = model(dtype).float(), [], {}
    left = tuple(p for name, p in plain.named_parameters() if skip in name) if skip else ()
    for number in range(steps):
        plain.zero_grad()
        total = 0.0
        for ids, wanted in zip(*(tensor.chunk(parts) for tensor in batch()), strict=True):
            with fp8_linears(skip=left), outside(plain) if outside is not contextlib.nullcontext else outside():
                loss = loss_of(plain, ids, wanted) / parts
                loss.backward()
            total += loss.item()
        losses.append(total)
        if number == 0:
            gradients = {name: p.grad.clone() for name, p in plain.named_parameters()}
        step(plain.parameters())
    return {"losses": losses, "gradients": gradients}


def assert_trained_as(
    both: list[dict[str, Any]], expected: dict[str, Any], bound: float, of_losses: float | None = None
) -> None:
    """bound: on the relative error of every gradient; of the losses' mean a tenth of it, if not given."""
    losses = [sum(each) / len(both) for each in zip(*(one["losses"] for one in both), strict=True)]
    assert losses == pytest.approx(expected["losses"], rel=bound / 10 if of_losses is None else of_losses)
    for one in both:
        assert one["gradients"].keys() == expected["gradients"].keys()
        for name, gradient in one["gradients"].items():
            error = relative_error(gradient, expected["gradients"][name])
            assert error <= bound, f"{name}: {error}"


def names(paths: Iterable[str], prefix: str = "") -> list[tuple[str, str]]:
    """Records of linears that all run in the recipe."""
    return [(f"{prefix}{path}", "") for path in paths]


BLOCK = [*(f"parts.0.{name}" for name in "qkvo"), *(f"parts.1.{name}" for name in ("gate", "up", "down"))]
LAYERS = [f"layers.{i}.{name}" for i in range(2) for name in BLOCK]


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


class shares(TorchFunctionMode):
    """Inside, the linears of these names are what the ranks compute, one after another: each of its half of the weight."""

    def __init__(self, plain: torch.nn.Module, column: str = "[qkv]|gate|up|head", row: str = "o|down") -> None:
        super().__init__()
        self._ways = {
            id(p): way
            for name, p in plain.named_parameters()
            for way, pattern in (("column", column), ("row", row))
            if re.fullmatch(rf"(.*\.)?({pattern})\.weight", name)
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.linear or id(args[1]) not in self._ways:
            return func(*args, **(kwargs or {}))
        x, weight, bias = (*args, None)[:3]
        if self._ways[id(weight)] == "column":
            biases = [None] * SIZE if bias is None else bias.chunk(SIZE)
            return torch.cat([F.linear(x, w, b) for w, b in zip(weight.chunk(SIZE), biases, strict=True)], -1)
        parts = zip(x.chunk(SIZE, -1), weight.chunk(SIZE, 1), strict=True)
        y = sum(F.linear(part, w.contiguous()) for part, w in parts)
        return y if bias is None else y + bias


shares_of_blocks = functools.partial(shares, column="[qkv]|gate|up")
"""The head is in its own precision, where shares give what the whole gives."""


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
            ("backward", "fuse_swiglu_backward_quantize"),
        }
        assert one["placements"]["layers.0.parts.0.q.weight"] == "(Shard(dim=0),)"
        assert one["placements"]["layers.0.parts.0.o.weight"] == "(Shard(dim=1),)"


def test_sequence_parallel(ranks: Ranks) -> None:
    """Norms between shards of the tokens; a gather before each column-parallel linear, a scatter after each row-parallel one."""
    both = ranks.run(rank_bodies.tensor_parallel, True)
    assert_trained_as(both, one_process(1, outside=shares), SAME)
    assert both[0]["linears"] == both[1]["linears"] == names([*LAYERS, "head"])
    assert both[0]["fusions"] == {
        ("forward", "fuse_activation_quantize"),
        ("backward", "fuse_swiglu_backward_quantize"),
    }


@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
@pytest.mark.parametrize("codegen", ["eager", "inductor"])
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


def assert_collectives(both: list[dict[str, Any]], bound: float) -> None:
    for case in both[0]:
        operation = case.partition(",")[0]
        first, _, last = sequential(operation).children()
        inputs = [rows_of(rank) for rank in range(SIZE)]
        hidden = [F.linear(x, first.weight) for x in inputs]
        whole = torch.cat(hidden) if operation == "AllGather" else hidden[0] + hidden[1]
        parts = whole.chunk(SIZE) if operation == "ReduceScatter" else [whole] * SIZE
        outputs = [F.linear(part, last.weight) for part in parts]
        # AllReduce's backward is for losses that are one: every process computes the same.
        loss = sum(y.square().sum() for y in (outputs[:1] if operation == "AllReduce" else outputs))
        gradients = torch.autograd.grad(loss, inputs)
        for rank, one in enumerate(both):
            for actual, wanted in zip(one[case], (outputs[rank], gradients[rank]), strict=True):
                error = relative_error(actual, wanted)
                assert error <= bound, (case, rank, error)
