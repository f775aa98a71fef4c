"""The option async_tp: collectives and products as torch's operations over symmetric memory, here as their compositions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from helpers.distributed import sequence_bodies
from helpers.distributed.ranks import SIZE, Ranks

import te_dynamo
from te_dynamo.errors import InvalidOptionError
from te_dynamo.inspect.graphs.capture import Captured

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")

ASYNC = {"async_tp": True}


def notes(graphs: Captured) -> list[str]:
    return [note for report in graphs.reports for note in report.notes]


def assert_close_to(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Equal but for sums in another order, which move a few values over an edge of FP8."""
    for name, tensor in one["tensors"].items():
        expected = other["tensors"][name].float()
        error = (tensor.float() - expected).norm() / expected.norm()
        assert error < 0.02, (name, error)
        assert tensor.count_nonzero(), name


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "batch"), [("gelu", 2), ("swiglu", 1)])
def test_values(ranks: Ranks, kind: str, batch: int) -> None:
    for plain, overlapped in ranks.run(sequence_bodies.steps_with_operations, kind, [{}, ASYNC], batch):
        assert_close_to(overlapped, plain)
        assert (overlapped["overlapped"], plain["overlapped"]) == (4 if kind == "gelu" else 3, 0)
        assert overlapped["bytes"] == plain["bytes"]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_inductor(ranks: Ranks) -> None:
    """What torch's operations return has the strides that Inductor's code asserts."""
    cases = [{}, {"codegen": "inductor", "regather": True, **ASYNC}]
    for plain, overlapped in ranks.run(sequence_bodies.steps_with_operations, "gelu", cases, seconds=400):
        assert_close_to(overlapped, plain)


@pytest.fixture
def rank_of_two() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=SIZE)
    yield
    torch.distributed.destroy_process_group()


def graphs_of(kind: str, batch: int, options: dict[str, Any], tokens: int = 16, width: int = 32) -> Captured:
    torch._dynamo.reset()
    x = torch.randn(batch, tokens, width).bfloat16().requires_grad_()
    with sequence_bodies.operations_on_cpu():
        return sequence_bodies.capture_step(sequence_bodies.block(kind, width), x, options)[1]


def overlapped(graphs: Captured) -> str:
    found = [
        re.sub(r"\bview_\d+", "view", line.partition(": ")[2])  # torch's releases number them otherwise
        for stage in ("forward", "backward")
        for line in (stage, *graphs[stage].splitlines())
        if re.search(r"symm_mem\.|_tensor\(.*, '0'\)", line)
    ]
    return "\n".join(found)


def test_operations_of_two_sequences(rank_of_two: None) -> None:
    graphs = graphs_of("gelu", 2, ASYNC)
    assert_expected_inline(
        overlapped(graphs),
        """\
(f8e4m3[2, 32, 32], (bf16[2, 32, 64],)) = symm_mem.fused_all_gather_scaled_matmul(view, [permute], quantize_with_amax[1], [quantize[2]], 1, '0', [view], [None], [bf16], [False])
bf16[2, 16, 32] = symm_mem.fused_scaled_matmul_reduce_scatter(view, permute_1, activation_quantize[2], quantize_1[2], 'sum', 1, 1, '0', [2, 32, 32], div, out_dtype=bf16)
(f8e5m2[2, 32, 32], (bf16[2, 32, 64],)) = symm_mem.fused_all_gather_scaled_matmul(view, [permute], quantize_with_amax_1[1], [quantize_1[2]], 1, '0', [None], [None], [bf16], [False])
bf16[2, 16, 32] = symm_mem.fused_scaled_matmul_reduce_scatter(view, permute_1, activation_backward_quantize[2], quantize[2], 'sum', 1, 1, '0', [2, 32, 32], out_dtype=bf16)""",
    )
    assert notes(graphs) == []


def test_operations_of_one_sequence(rank_of_two: None) -> None:
    """Two products of one gather; backward's sum of two products is scattered by itself."""
    graphs = graphs_of("swiglu", 1, ASYNC)
    assert_expected_inline(
        overlapped(graphs),
        """\
(f8e4m3[32, 32], (bf16[32, 32], bf16[32, 32])) = symm_mem.fused_all_gather_scaled_matmul(view, [permute, permute_1], quantize_with_amax[1], [quantize[2], quantize_1[2]], 0, '0', [None, None], [None, None], [bf16, bf16], [False, False])
bf16[16, 32] = symm_mem.fused_scaled_matmul_reduce_scatter(view, permute_2, gated_quantize[2], quantize_2[2], 'sum', 0, 0, '0', [32, 32], out_dtype=bf16)
(f8e5m2[32, 32], (bf16[32, 32],)) = symm_mem.fused_all_gather_scaled_matmul(view, [permute], quantize_with_amax_1[1], [quantize_2[2]], 0, '0', [None], [None], [bf16], [False])
bf16[1, 16, 32] = _c10d_functional.reduce_scatter_tensor(cat, 'sum', 2, '0')""",
    )
    assert [note.partition("by itself: ")[2] for note in notes(graphs)] == [
        "aten.add.Tensor stands beside it, not one te.gemm"
    ]


@pytest.mark.one_fast_case
@pytest.mark.parametrize(
    ("options", "reasons"),
    [
        ({}, ["te.gemm_gated stands beside it, not one te.gemm", "te.gemm_stacked stands beside it, not one te.gemm"]),
        ({"fusions": ["-fuse_shared_input"]}, ["aten.add.Tensor stands beside it, not one te.gemm"]),
    ],
)
def test_weights_of_one_input(rank_of_two: None, options: dict[str, Any], reasons: list[str]) -> None:
    """Stacked they have several scales, which torch's product does not take."""
    graphs = graphs_of("swiglu", 2, {**ASYNC, **options}, tokens=256, width=256)
    assert [note.partition("by itself: ")[2] for note in notes(graphs)] == reasons


def test_a_device_without_operations(rank_of_two: None) -> None:
    shared = sequence_bodies.block("gelu")
    with (
        sequence_bodies.without_multicast(),
        pytest.warns(UserWarning, match="async_tp=True overlaps nothing for the 2"),
    ):
        graphs = sequence_bodies.capture_step(shared, torch.randn(2, 16, 32).bfloat16().requires_grad_(), ASYNC)[1]
    assert "symm_mem" not in graphs["forward"] + graphs["backward"]
    assert sum("torch has no fused_" in note for note in notes(graphs)) == 4


def test_multicast_stays_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", raising=False)
    with pytest.raises(InvalidOptionError, match="needs TORCH_SYMM_MEM_DISABLE_MULTICAST=1 in the environment"):
        te_dynamo.compile(torch.nn.Linear(32, 32), async_tp=True)
