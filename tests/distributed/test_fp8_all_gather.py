"""FSDP2 gathers codes: the same bits as the gathered weight quantized, half the bytes, and training as it was."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from helpers.distributed import fp8_bodies, layouts, rank_bodies
from helpers.distributed.plans import BLOCK, assert_trained_as, names, one_process
from helpers.distributed.ranks import SIZE, Ranks
from helpers.models.training import SAME

from te_dynamo.recipe import MXFP8BlockScaling, as_recipe

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")

CURRENT, BLOCKS = "float8_current_scaling", "float8_block_scaling"
SQUARES = MXFP8BlockScaling(weight_block_dims=2)
SQUARES_128 = MXFP8BlockScaling(scale_block=128, weight_block_dims=2)


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_bits(ranks: Ranks, param_dtype: torch.dtype | None) -> None:
    for one in ranks.run(fp8_bodies.bits, CURRENT, torch.float32, param_dtype):
        assert {name for name, kind in one.items() if kind} == {"parts.5.weight"}


@pytest.mark.parametrize("trains", [True, False])
def test_a_scale_a_row_travels_where_nothing_trains(ranks: Ranks, trains: bool) -> None:
    """A row is one shard's, and its scale travels beside it; dgrad's columns would have to travel too."""
    for one in ranks.run(fp8_bodies.bits, "float8_rowwise", torch.float32, torch.bfloat16, trains):
        left = {name for name, kind in one.items() if kind}
        assert left == {f"parts.{i}.weight" for i in (range(6) if trains else [5])}


@pytest.mark.parametrize(
    ("recipe", "cut"), [(SQUARES, {96: 128, 192: 128}), (SQUARES_128, {96: 256, 128: 256, 192: 256})]
)
def test_bits_of_mxfp8_in_square_blocks(ranks: Ranks, recipe: MXFP8BlockScaling, cut: dict[int, int]) -> None:
    """Codes and scales of rows travel, of shards that cut no block and have no padding."""
    for one in ranks.run(fp8_bodies.bits, recipe, torch.float32, torch.bfloat16):
        assert {name for name, kind in one.items() if not kind} == {"parts.3.weight", "parts.4.weight"}
    block = recipe.scale_block
    padded = ", or of the 128 rows that scales are padded to" if block == 32 else ""
    for one in ranks.run(fp8_bodies.reasons, recipe, (96, 128, 192, 256)):
        assert {rows: reason for rows, reason in one.items() if reason} == {
            n: f"2 shards of its {n} rows end inside of blocks of {block}{padded}: N has to be a multiple of {of}"
            for n, of in cut.items()
        }


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_what_has_columns_of_its_own_travels_as_it_is(ranks: Ranks, recipe: str) -> None:
    for one in ranks.run(fp8_bodies.bits, recipe, torch.float32, torch.bfloat16):
        assert all(one.values())


@pytest.mark.parametrize(
    ("recipe", "inference_mode"), [("float8_rowwise", False), ("float8_rowwise", True), (CURRENT, True)]
)
def test_inference(ranks: Ranks, recipe: str, inference_mode: bool) -> None:
    """The first forward too, in which FSDP2 takes views of the shards."""
    for one in ranks.run(fp8_bodies.inference, recipe, 64, inference_mode):
        assert one["same"] and one["gathered"] < 0.6, one


@pytest.mark.slow
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", [CURRENT, BLOCKS])
def test_bits_of_four_shards(four_ranks: Ranks, recipe: str, param_dtype: torch.dtype | None) -> None:
    """Rows that four ranks do not share evenly, and one whose shards cut blocks."""
    for one in four_ranks.run(fp8_bodies.bits, recipe, torch.float32, param_dtype):
        left = {name for name, kind in one.items() if kind}
        assert left == {f"parts.{i}.weight" for i in ([5] if recipe == CURRENT else [0, 1, 2, 5])}


@pytest.mark.slow
def test_bits_of_three_shards_of_different_sizes(tmp_path: pathlib.Path) -> None:
    """FSDP2 refuses scales beside such shards, on the ranks that have fewer rows. 48 rows are three equal ones."""
    with Ranks(tmp_path, size=3) as three:
        for recipe, left in ((CURRENT, {5}), ("float8_rowwise", {0, 2, 3, 4, 5})):
            for one in three.run(fp8_bodies.bits, recipe, torch.float32, torch.bfloat16, False):
                assert {name for name, kind in one.items() if kind} == {f"parts.{i}.weight" for i in left}
        for one in three.run(fp8_bodies.reasons, as_recipe("float8_rowwise"), (48, 80), False):
            assert one == {48: "", 80: "3 shards of its 80 rows differ in size: N has to be a multiple of 3"}


def test_a_rank_without_tokens(ranks: Ranks) -> None:
    for codes, bf16 in ranks.run(fp8_bodies.no_tokens):
        assert torch.equal(codes, bf16) and codes.any()


LEFT = {
    "short": "N = 40, K = 32 of this rank: FP8 GEMMs need N and K to be multiples of 16",
    "narrow": "N = 64, K = 24 of this rank: FP8 GEMMs need N and K to be multiples of 16",
    "sums": "it is a DTensor of (Partial(sum),); te.linear takes shards and replicas",
}
"""Why a weight travels as it is where two ranks of tensor parallelism share it."""


def test_bits_of_tensor_parallel_parts(ranks: Ranks) -> None:
    assert ranks.run(fp8_bodies.tensor_bits, CURRENT) == [LEFT] * SIZE


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [CURRENT, BLOCKS])
def test_bits_of_shards_of_parts(four_ranks: Ranks, recipe: str) -> None:
    """Two by two."""
    left = LEFT | {"columns of FSDP": "it is not shared out by rows"}
    if recipe == BLOCKS:
        left["column"] = "2 shards of its 128 rows end inside of blocks of 128: N has to be a multiple of 256"
    assert four_ranks.run(fp8_bodies.tensor_bits, recipe) == [left] * 2 * SIZE


@pytest.mark.parametrize("recipe", [CURRENT, BLOCKS, pytest.param(SQUARES, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_bits_after_writes_and_gathers_in_any_order(ranks: Ranks, seed: int, recipe: str | MXFP8BlockScaling) -> None:
    first, second = ranks.run(fp8_bodies.in_any_order, seed, recipe)
    assert first == second and max(first) > 1


@pytest.mark.parametrize("gathers", [True, False])
@pytest.mark.parametrize("recipe", [CURRENT, BLOCKS])
def test_what_replays_of_cuda_graphs_write_is_seen(ranks: Ranks, recipe: str, gathers: bool) -> None:
    """A capture casts for itself, all at once. Behind it no codes are kept."""
    casts = [1, 1, *([2, 2] if gathers else []), 1, 1, 1, 1, 1, 1]
    assert ranks.run(fp8_bodies.written_by_replays, recipe, gathers) == [casts] * SIZE


@pytest.mark.parametrize("recipe", [CURRENT, BLOCKS])
def test_a_weight_beside_a_graph_casts_none_of_it(ranks: Ranks, recipe: str) -> None:
    """Its codes would be stale behind the next replay. The capture casts both, for it may gather both."""
    assert ranks.run(fp8_bodies.beside_a_graph, recipe) == [[1, 1, 2, 1, 1, 1, 1]] * SIZE


def test_ranks_that_have_the_whole_weight_send_no_scales(ranks: Ranks) -> None:
    """FSDP2 copies the first tensor alone there."""
    assert ranks.run(fp8_bodies.replicated, CURRENT) == [""] * SIZE
    reason = "each rank has all of it, and FSDP2 takes no scales beside the codes then"
    assert ranks.run(fp8_bodies.replicated, BLOCKS) == [reason] * SIZE


def test_a_shard_that_was_elsewhere_is_new(ranks: Ranks) -> None:
    assert ranks.run(fp8_bodies.moved) == [[pytest.approx(1)] * 4] * SIZE


def test_no_scale_is_stale(ranks: Ranks) -> None:
    for one in ranks.run(fp8_bodies.stale):
        by_scale, of_values = zip(*one, strict=True)
        assert by_scale == pytest.approx(of_values) and len(set(of_values)) == len(one)


@pytest.mark.parametrize("recipe", [CURRENT, BLOCKS, SQUARES, SQUARES_128])
def test_a_step_casts_all_weights_at_once(ranks: Ranks, recipe: str | MXFP8BlockScaling) -> None:
    """As their amaxes are found. Backward gathers forward's codes; no gather asks a subclass's Python dispatch anything."""
    scales = 3 if recipe == CURRENT else 0
    step = {"amaxes": [3] if scales else [], "casts": [3], "copied": scales, "dispatches": 0}
    backward = {"amaxes": [], "casts": [], "copied": 0, "dispatches": 0}
    assert ranks.run(fp8_bodies.work, recipe) == [[step, backward, step]] * SIZE


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [CURRENT, BLOCKS, SQUARES, SQUARES_128])
def test_wire_and_memory(ranks: Ranks, recipe: str | MXFP8BlockScaling) -> None:
    for one in ranks.run(fp8_bodies.wire, recipe, 256):
        fp8, bf16 = one["fp8"], one["bf16"]
        assert fp8["gathered"] <= 0.53 * bf16["gathered"]
        assert fp8["reductions"] == (3 if recipe == CURRENT else 0) and bf16["reductions"] == 0
        assert max(fp8["peaks"]) <= max(bf16["peaks"])
        assert fp8["compiled"] == [2, 2, 2], "the second block's input has a gradient"
        assert fp8["notes"] == [] and len(bf16["notes"]) == 2 and "recipe is None" in bf16["notes"][0]
        assert "te.quantize(primals" not in fp8["graphs"]["backward"] and "te.transpose" not in fp8["graphs"]["forward"]


def test_graph_of_a_rank(ranks: Ranks) -> None:
    """Half the bytes of bf16's all-gathers, one reduction; codes are multiplied as they come, and transposed in backward alone."""
    one = ranks.run(fp8_bodies.wire, CURRENT, 64, 1)[0]
    assert one["fp8"]["gathered"] <= 0.53 * one["bf16"]["gathered"] and one["fp8"]["reductions"] == 1
    texts = one["fp8"]["graphs"]
    codes = ("QuantizedTensor", "getattr(", "te.", "primals_4: ", "primals_7: ")
    shown = [
        f"{phase} {line}"
        for phase, text in texts.items()
        for line in text.splitlines()
        if any(c in line for c in codes)
    ]
    assert_expected_inline(
        "\n".join(shown),
        """\
match up.weight: GatheredQuantizedTensor(bf16[256, 64]) = input
match down.weight: GatheredQuantizedTensor(bf16[64, 256]) = input
match layer_norm: (bf16[128, 64], f32[128], f32[128]) = te.layer_norm(x, norm.weight, norm.bias, 1e-05)
match getattr: f8e4m3[256, 64] = getattr(up.weight, '_data')
match getattr_1: f32[1] = getattr(up.weight, '_scale_inv')
match linear_with_workspace: (bf16[128, 256], f8e4m3[64, 128], f32[1]) = te.linear_with_workspace(layer_norm[0], up.weight, up.bias, linear(x e4m3[row+column], w e4m3[row], dy e5m2[row+column]), [getattr, getattr_1])
match relu: bf16[128, 256] = te.relu(linear_with_workspace[0])
match getattr_2: f8e4m3[64, 256] = getattr(down.weight, '_data')
match getattr_3: f32[1] = getattr(down.weight, '_scale_inv')
match linear_with_workspace_1: (bf16[128, 64], f8e4m3[256, 128], f32[1]) = te.linear_with_workspace(relu, down.weight, down.bias, linear(x e4m3[row+column], w e4m3[row], dy e5m2[row+column]), [getattr_2, getattr_3])
forward primals_4: f8e4m3[256, 64] = input
forward primals_7: f8e4m3[64, 256] = input
forward layer_norm_quantize: (f32[128], f32[128], f8e4m3[128, 64], f8e4m3[64, 128], f32[1]) = te.layer_norm_quantize(primals_3, primals_1, primals_2, 1e-05, e4m3[row+column], keep_output=False)
forward gemm: bf16[128, 256] = te.gemm([layer_norm_quantize[2], layer_norm_quantize[4]], e4m3[row], [primals_4, primals_5], e4m3[row], bf16, fast_accum=False, bias=primals_6)
forward activation_quantize: (f8e4m3[128, 256], f8e4m3[256, 128], f32[1]) = te.activation_quantize(gemm, 'relu', e4m3[row+column], keep_output=False)
forward gemm_1: bf16[128, 64] = te.gemm([activation_quantize[0], activation_quantize[2]], e4m3[row], [primals_7, primals_8], e4m3[row], bf16, fast_accum=False, bias=primals_9, addend=primals_3)
backward primals_4: f8e4m3[256, 64] = input
backward primals_7: f8e4m3[64, 256] = input
backward quantize_bias_grad: (f32[64], f8e5m2[128, 64], f8e5m2[64, 128], f32[1]) = te.quantize_bias_grad(tangents_1, e5m2[row+column])
backward gemm_1: bf16[64, 256] = te.gemm([quantize_bias_grad[2], quantize_bias_grad[3]], e5m2[column], [activation_quantize[1], activation_quantize[2]], e4m3[column], bf16, fast_accum=False)
backward transpose: f8e4m3[256, 64] = te.transpose(primals_7)
backward gemm_2: bf16[128, 256] = te.gemm([quantize_bias_grad[1], quantize_bias_grad[3]], e5m2[row], [transpose, primals_8], e4m3[column], bf16, fast_accum=False)
backward activation_backward_quantize: (f32[256], f8e5m2[128, 256], f32[1]) = te.activation_backward_quantize(gemm_2, gemm, 'relu', e5m2[row], keep_output=False, bias_grad=True)
backward transpose_1: f8e4m3[64, 256] = te.transpose(primals_4)
backward gemm_3: bf16[128, 64] = te.gemm([activation_backward_quantize[1], activation_backward_quantize[2]], e5m2[row], [transpose_1, primals_5], e4m3[column], bf16, fast_accum=False)
backward transpose_2: f8e5m2[256, 128] = te.transpose(activation_backward_quantize[1])
backward gemm_4: bf16[256, 64] = te.gemm([transpose_2, activation_backward_quantize[2]], e5m2[column], [layer_norm_quantize[3], layer_norm_quantize[4]], e4m3[column], bf16, fast_accum=False)""",
    )


@pytest.mark.slow
def test_graph_of_tensor_parallel_parts(ranks: Ranks) -> None:
    """FSDP2's codes are this rank's part of a DTensor; those of activations are gathered in the graph."""
    shown = [
        re.sub(r"\((primals|view|cat).*", "", f"{phase} {line}")
        for phase, text in ranks.run(fp8_bodies.tensor_graphs)[0].items()
        for line in text.splitlines()
        if re.search(r"QuantizedTensor|_functional\.(all|reduce)|te\.transpose\(primals", line)
    ]
    assert_expected_inline(
        "\n".join(shown),
        """\
match local_1: GatheredQuantizedTensor(bf16[16, 32]) = local(parts.0.q.weight, ('S0',))
match local_3: GatheredQuantizedTensor(bf16[16, 32]) = local(parts.0.k.weight, ('S0',))
match local_5: GatheredQuantizedTensor(bf16[16, 32]) = local(parts.0.v.weight, ('S0',))
match local_7: GatheredQuantizedTensor(bf16[32, 16]) = local(parts.0.o.weight, ('S1',))
match local_9: GatheredQuantizedTensor(bf16[32, 32]) = local(parts.1.gate.weight, ('S0',))
match local_11: GatheredQuantizedTensor(bf16[32, 32]) = local(parts.1.up.weight, ('S0',))
match local_13: GatheredQuantizedTensor(bf16[32, 32]) = local(parts.1.down.weight, ('S1',))
forward all_reduce: i32[1] = _c10d_functional.all_reduce
forward all_gather_into_tensor: u8[8, 12, 32] = _c10d_functional.all_gather_into_tensor
forward reduce_scatter_tensor: bf16[4, 12, 32] = _c10d_functional.reduce_scatter_tensor
forward all_reduce_1: i32[1] = _c10d_functional.all_reduce
forward all_gather_into_tensor_1: u8[8, 12, 32] = _c10d_functional.all_gather_into_tensor
forward reduce_scatter_tensor_1: bf16[4, 12, 32] = _c10d_functional.reduce_scatter_tensor
backward all_reduce: i32[1] = _c10d_functional.all_reduce
backward all_gather_into_tensor: u8[8, 12, 32] = _c10d_functional.all_gather_into_tensor
backward transpose_6: f8e4m3[32, 32] = te.transpose
backward transpose_7: f8e4m3[32, 32] = te.transpose
backward transpose_8: f8e4m3[32, 32] = te.transpose
backward reduce_scatter_tensor: bf16[4, 12, 32] = _c10d_functional.reduce_scatter_tensor
backward all_reduce_1: i32[1] = _c10d_functional.all_reduce
backward all_gather_into_tensor_1: u8[8, 12, 32] = _c10d_functional.all_gather_into_tensor
backward transpose_10: f8e4m3[16, 32] = te.transpose
backward transpose_13: f8e4m3[32, 16] = te.transpose
backward transpose_15: f8e4m3[32, 16] = te.transpose
backward transpose_17: f8e4m3[32, 16] = te.transpose
backward reduce_scatter_tensor_1: bf16[4, 12, 32] = _c10d_functional.reduce_scatter_tensor""",
    )


WIRE = {
    "tensor": {
        ("all_gather", torch.bfloat16): 19_712,
        ("all_gather", torch.uint8): 657_408,
        ("all_reduce", torch.bfloat16): 393_216,
        ("all_reduce", torch.float32): 56,
        ("reduce_scatter", torch.bfloat16): 673_024,
    },
    "sequence": {
        ("all_gather", torch.bfloat16): 44_288,
        ("all_gather", torch.uint8): 706_560,
        ("all_reduce", torch.bfloat16): 2_560,
        ("all_reduce", torch.float32): 56,
        ("all_reduce", torch.int32): 32,
        ("reduce_scatter", torch.bfloat16): 795_904,
    },
}
"""(operation, dtype) -> bytes of a step."""


@pytest.mark.slow
@pytest.mark.parametrize("layout", [pytest.param("tensor", marks=pytest.mark.exhaustive), "sequence"])
def test_wire_of_two_by_two(four_ranks: Ranks, layout: str) -> None:
    """All of a step's all-gathers, those of activations, the embedding and the head too."""
    fp8, bf16 = (
        four_ranks.run(
            layouts.train, f"fsdp2{way} x {layout}", False, 2, {"recipe": recipe}, 2, 256, True, seconds=240
        )[0]["wire"]
        for way, recipe in ((" in fp8", CURRENT), ("", None))
    )
    assert fp8 == WIRE[layout]
    gathered, expected = (sum(n for (kind, _), n in each.items() if kind == "all_gather") for each in (fp8, bf16))
    assert gathered <= 0.53 * expected


@pytest.mark.slow
def test_what_is_refused(ranks: Ranks) -> None:
    """On every rank, before a step ends."""
    for said in ranks.run(fp8_bodies.refused):
        assert (
            "'the model' is sharded already: call fp8_all_gather(model) before fully_shard" in said["after fully_shard"]
        )
        assert "is gathered in FP8" in said["without fully_shard"]
        assert "call fully_shard before it is compiled" in said["without fully_shard"]
        assert "'layers.0.parts.0.q' was given to it before" in said["twice"]
        assert "'layers.0.parts.0.q.weight' is a ShardedWeight" in said["freeze"]
        assert "embedding.weight is frozen: te_dynamo.unfreeze(model) before" in said["frozen"]
        assert "layers.0.parts.0.q.weight travels in FP8" in said["another recipe"]
        assert (
            "its weight is FP8 (e4m3) with a scale per tensor; float8_block_scaling multiplies by"
            in said["another recipe"]
        )
        assert "layers.0.parts.1.up.weight travels in FP8" in said["a rule"]
        assert "rule 'up' leaves it in the model's precision" in said["a rule"]
        assert "layers.0.parts.1.up.weight travels in FP8" in said["a rule for parts"]
        for name in ("not compiled", "not compiled parts", "another backend", "a wrapped linear"):
            assert "travels in FP8 (fp8_all_gather), and its linear is not compiled" in said[name], said[name]
        assert "layers.0.parts.1.up.weight of [" in said["a wrapped linear"]
        assert "did you mean 'recipe'" in said["option"]


# ---- training


@pytest.mark.slow
@pytest.mark.parametrize("count", [SIZE, 2 * SIZE])
@pytest.mark.parametrize("compiled", ["blocks", "whole"])
def test_twenty_steps(ranks: Ranks, four_ranks: Ranks, count: int, compiled: str) -> None:
    """What one process trains in the same recipe; every gradient of the first step."""
    options = {"weight_cache": "step", "weight_cache_check": True}
    each = (ranks if count == SIZE else four_ranks).run(
        rank_bodies.data_parallel, "fsdp2_fp8", compiled, False, 20, 1, options, seconds=400
    )
    assert_trained_as(each, one_process(count, steps=20, skip="head"), SAME)
    for one in each:
        assert one["linears"] == (names(BLOCK) if compiled == "blocks" else names(BLOCK, "layers.0."))
        assert one["kept"] == []


@pytest.mark.slow
@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_with_checkpoints_and_microbatches(ranks: Ranks, codegen: str) -> None:
    options = {"codegen": codegen}
    each = ranks.run(rank_bodies.data_parallel, "fsdp2_fp8", "whole", True, 2, 2, options, seconds=240)
    assert_trained_as(each, one_process(2 * SIZE, steps=2, skip="head"), SAME)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reshard", "policy"),
    [(True, False), (False, True), *(pytest.param(both, both, marks=pytest.mark.exhaustive) for both in (False, True))],
)
def test_steps_are_those_of_weights_that_are_quantized_afterwards(ranks: Ranks, reshard: bool, policy: bool) -> None:
    """Bit by bit: losses, norms of clipped gradients, weights."""
    _assert_same_steps(ranks.run(fp8_bodies.steps, reshard, policy, seconds=240))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reshard", "policy"), [(True, False), pytest.param(False, True, marks=pytest.mark.exhaustive)]
)
def test_steps_of_two_by_two(four_ranks: Ranks, reshard: bool, policy: bool) -> None:
    """The same of sequence-parallel blocks, whose weights are DTensors."""
    _assert_same_steps(four_ranks.run(fp8_bodies.steps, reshard, policy, 2, seconds=240))


def _assert_same_steps(each: list[dict[str, Any]]) -> None:
    for one in each:
        (losses, norms, weights), expected = one["fp8"], one["bf16"]
        assert (losses, norms) == expected[:2]
        assert weights.keys() == expected[2].keys()
        for name, weight in weights.items():
            assert torch.equal(weight, expected[2][name]), name


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_checkpoint_of_four_ranks(ranks: Ranks, four_ranks: Ranks, tmp_path: pathlib.Path, tensor: int) -> None:
    """Two ranks, one process, and another recipe go on from it; it holds the names and dtypes of the plain model."""
    import torch.distributed.checkpoint as dcp

    folder = str(tmp_path / "checkpoint")
    saved = four_ranks.run(fp8_bodies.save, folder, CURRENT, tensor, seconds=240)[0]
    for one in ranks.run(fp8_bodies.load, folder, CURRENT, tensor, seconds=240):
        assert one["loss"] == pytest.approx(saved["loss"], rel=1e-3)
        assert one["assigned"] == pytest.approx(saved["loss"], rel=0.05)
        for name, weight in saved["weights"].items():
            assert torch.equal(one["weights"][name], weight), name
    for one in ranks.run(fp8_bodies.load, folder, BLOCKS, 1, seconds=240):
        assert one["loss"] == pytest.approx(saved["loss"], rel=1e-2)
    plain = rank_bodies.model()
    state = {"model": {name: torch.zeros_like(p) for name, p in plain.state_dict().items()}}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    plain.load_state_dict(state["model"])
    for name, weight in saved["weights"].items():
        assert torch.equal(plain.state_dict()[name], weight), name
