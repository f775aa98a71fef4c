"""Sequence parallelism: codes travel in place of activations, and every rank computes the same bits."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from helpers.distributed import sequence_bodies
from helpers.distributed.ranks import SIZE, Ranks
from torch.fx import Graph

from te_dynamo.inspect.graphs.capture import Captured
from te_dynamo.passes.dialect.live_memory import peak_bytes, saved_bytes

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")

UNFUSED = {"fusions": ["-fuse_gather_quantize"]}
ALIKE = {"float8": {}, "unfused": UNFUSED, "regather": {"regather": True}, "bf16": {"recipe": None}}


def assert_same_bits(one: dict[str, Any], other: dict[str, Any], but: str = "") -> None:
    assert one["tensors"].keys() == other["tensors"].keys()
    for name, tensor in one["tensors"].items():
        if name == but:  # a sum in another order
            torch.testing.assert_close(tensor, other["tensors"][name])
        else:
            assert torch.equal(tensor, other["tensors"][name]), name
        assert tensor.count_nonzero(), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
def test_bits_and_bytes(ranks: Ranks, kind: str) -> None:
    """A shard of 24 tokens, no multiple of 16."""
    for results in ranks.run(sequence_bodies.steps, kind, list(ALIKE.values())):
        float8, unfused, regather, bf16 = results
        assert_same_bits(float8, unfused, but="parts.0.down.bias")
        assert_same_bits(regather, float8)
        assert all(reason == "" for _, reason in float8["linears"]) and float8["linears"]
        assert unfused["gathered"] == bf16["gathered"] == {"bfloat16": bf16["bytes"]}
        assert set(float8["gathered"]) == {"uint8"}
        assert float8["bytes"] <= 0.51 * bf16["bytes"]
        assert regather["gathered"] == {"uint8": float8["bytes"], "int8": float8["bytes"] // 2}
        assert float8["notes"] == regather["notes"] == []


# ---- one rank's graphs, in a process alone


@pytest.fixture
def rank_of_two() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=SIZE)
    yield
    torch.distributed.destroy_process_group()


def graphs_of(
    options: dict[str, Any], kind: str = "swiglu", batch: int = 2, tokens: int = 16, width: int = 32
) -> Captured:
    torch._dynamo.reset()
    x = torch.randn(batch, tokens, width).bfloat16().requires_grad_()
    return sequence_bodies.capture_step(sequence_bodies.block(kind, width), x, options)[1]


def notes(graphs: Captured) -> list[str]:
    return [note for report in graphs.reports for note in report.notes]


def calls(graphs: Captured, of: str) -> str:
    """The calls of forward and of backward whose namespaces match `of`, one a line with its result."""
    texts = []
    for stage in ("forward", "backward"):
        found = re.findall(rf"^\w+: (.*?) = (?:{of})\.(\w+)\(", graphs[stage], re.MULTILINE)
        texts += [stage, *(f"  {name} {result}" for result, name in found if name != "wait_tensor")]
    return "\n".join(texts)


@pytest.mark.one_fast_case
@pytest.mark.parametrize(("batch", "tokens"), [(2, 16), (1, 17), (3, 200)])
def test_which_collectives_carry_codes(rank_of_two: None, batch: int, tokens: int) -> None:
    """Whatever a rank's part of the tokens; one of more than 128 has other operations behind the gather."""
    found = calls(graphs_of({"regather": True}, batch=batch, tokens=tokens), "_c10d_functional")
    of_both, of_one = f"[{2 * batch}, {tokens}, 32]", f"[{batch}, {tokens}, 32]"
    assert found.replace(of_both, "[both]").replace(of_one, "[one]") == COLLECTIVES


COLLECTIVES = """\
forward
  all_reduce i32[1]
  all_gather_into_tensor u8[both]
  reduce_scatter_tensor bf16[one]
backward
  all_reduce i32[1]
  all_gather_into_tensor u8[both]
  all_gather_into_tensor i8[both]
  reduce_scatter_tensor bf16[one]"""


def test_operations_of_a_rank(rank_of_two: None) -> None:
    """Backward's own all-gather of x starts before a product that does not read it."""
    assert_expected_inline(
        calls(graphs_of({"regather": True}, "gelu"), "te|_c10d_functional"),
        """\
forward
  amax f32[1]
  all_reduce i32[1]
  quantize_with_amax (f8e4m3[32, 32], f32[1])
  all_gather_into_tensor u8[4, 16, 32]
  quantize (f8e4m3[64, 32], f8e4m3[32, 64], f32[1])
  gemm bf16[64, 64]
  activation_quantize (f8e4m3[64, 64], f8e4m3[64, 64], f32[1])
  quantize (f8e4m3[32, 64], f8e4m3[64, 32], f32[1])
  gemm bf16[64, 32]
  reduce_scatter_tensor bf16[2, 16, 32]
backward
  amax f32[1]
  all_reduce i32[1]
  quantize_with_amax (f8e5m2[32, 32], f32[1])
  all_gather_into_tensor u8[4, 16, 32]
  transpose f8e5m2[32, 64]
  bias_grad f32[32]
  all_reduce f32[32]
  gemm bf16[64, 64]
  gemm bf16[32, 64]
  activation_backward_quantize (f32[64], f8e5m2[64, 64], f32[1])
  all_gather_into_tensor i8[4, 16, 32]
  gemm bf16[64, 32]
  transpose f8e4m3[32, 64]
  transpose f8e5m2[64, 64]
  gemm bf16[64, 32]
  reduce_scatter_tensor bf16[2, 16, 32]""",
    )


def bytes_of_transposed_weights(graph: Graph) -> int:
    """Of saved tensors that are views of weights and take no memory: torch 2.13 saves such views in bf16, torch 2.11 the weights."""
    saved = graph.find_nodes(op="placeholder")
    return sum(node.meta["val"].nbytes for node in saved if re.fullmatch(r"t(_\d+)?", node.name))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "width"), [("gelu", 64), ("swiglu", 256)])
def test_memory(rank_of_two: None, kind: str, width: int) -> None:
    """A block keeps no more than in bf16; gathering again saves half of what one gathered tensor of codes takes, of two ranks. Its peak may be
    higher by one weight's codes."""
    of = {
        name: graphs_of(options, kind, batch=4, tokens=256, width=width)
        for name, options in ALIKE.items()
        if name != "unfused"
    }
    for bytes_of in (saved_bytes, peak_bytes):
        counted = {name: bytes_of(graphs.graph("backward")) for name, graphs in of.items()}
        bf16 = counted["bf16"] - bytes_of_transposed_weights(of["bf16"].graph("backward"))
        assert counted["float8"] <= bf16 + (bytes_of is peak_bytes) * 1.01 * width**2
        assert counted["float8"] - counted["regather"] == 4 * 256 * width
    assert peak_bytes(of["float8"].graph("forward")) <= peak_bytes(of["bf16"].graph("forward"))


# ---- what does not travel in FP8, and who is told


@pytest.mark.one_fast_case
@pytest.mark.parametrize("recipe", ["float8_block_scaling", "mxfp8"])
def test_blocks(rank_of_two: None, recipe: str) -> None:
    with pytest.warns(UserWarning, match="regather=True gathers nothing again for the 3 linears of this graph"):
        graphs = graphs_of({"recipe": recipe, "regather": True}, width=128, tokens=64)
    assert "all_gather_into_tensor bf16[4, 64, 128]" in calls(graphs, "_c10d_functional")
    assert any(
        re.search("small_models.py.*is in bfloat16: .* with a scale per block of", note) for note in notes(graphs)
    )


def test_a_linear_in_another_precision(rank_of_two: None) -> None:
    graphs = graphs_of({"rules": [("up", None)]})
    assert [note.partition("bfloat16: ")[2] for note in notes(graphs)] == [
        "aten.mm reads it too, beside te.quantize to e4m3[row+column]"
    ]
    assert calls(graphs, "_c10d_functional").splitlines()[:2] == ["forward", "  all_gather_into_tensor bf16[4, 16, 32]"]


def test_nothing_to_gather_again() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)).bfloat16()
    with pytest.warns(UserWarning, match="regather=True gathers nothing again for the 2 linears"):
        torch.compile(model, backend="te", options={"regather": True, "codegen": "eager"})(
            torch.randn(16, 32).bfloat16()
        )


# ---- four ranks, and Inductor's code


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "batch", "tokens"), [("gelu", 1, 24), ("swiglu", 3, 136)])
def test_four_ranks(four_ranks: Ranks, kind: str, batch: int, tokens: int) -> None:
    cases = list(ALIKE.values())
    for float8, unfused, regather, bf16 in four_ranks.run(
        sequence_bodies.steps, kind, cases, batch, tokens, seconds=400
    ):
        assert_same_bits(float8, unfused, but="parts.0.down.bias")
        assert_same_bits(regather, float8)
        assert float8["bytes"] <= 0.51 * bf16["bytes"]
        assert float8["notes"] == regather["notes"] == []
        for name, tensor in float8["tensors"].items():
            cosine = torch.nn.functional.cosine_similarity(
                tensor.flatten().float(), bf16["tensors"][name].flatten().float(), 0
            )
            assert cosine > 0.98, name


@pytest.mark.slow
def test_inductor(ranks: Ranks) -> None:
    """What was saved and gathered again, in code that Inductor writes."""
    cases = [{"codegen": "inductor", **UNFUSED}, {"codegen": "inductor", "regather": True}]
    for unfused, regather in ranks.run(sequence_bodies.steps, "gelu", cases, seconds=400):
        assert_same_bits(regather, unfused, but="parts.0.down.bias")
        assert set(regather["gathered"]) == {"uint8", "int8"}
