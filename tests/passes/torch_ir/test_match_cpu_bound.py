"""CPU-bound graphs: FP8 would shorten what nobody waits for, and they stay what they are."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from helpers.graphs.matching import Matched
from helpers.slow import slow_but
from torch import nn

import te_dynamo
from te_dynamo.kernels.runtime.target import TARGETS
from te_dynamo.rates import H200 as FOUND_ON_AN_H200
from te_dynamo.rates import calibrated
from te_dynamo.recipe import Float8CurrentScaling
from te_dynamo.testing.fake_cuda import fake_cuda

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
import cpu_time
import models

pytestmark = pytest.mark.cost_rule

BF16 = torch.bfloat16
FP8 = "float8_current_scaling"
CUDA_GRAPHS = {"triton.cudagraphs": True}  # what mode="reduce-overhead" stands for


class GeluMLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Linear(*sizes, bias=False, dtype=BF16, device="cuda") for sizes in ((width, inner), (inner, width))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


def reasons(
    width: int = 1024,
    rows: int = 4096,
    learns: bool = True,
    frozen: bool = False,
    device: str = "h200",
    inner: int | None = None,
    **options,
) -> list[str]:
    """Of the two linears of a GELU MLP, on fake CUDA tensors."""
    with fake_cuda(device), torch.set_grad_enabled(learns):
        model = GeluMLP(width, inner or 4 * width)
        compiled = Matched(te_dynamo.freeze(model) if frozen else model, **options)
        compiled(torch.empty(rows, width, dtype=BF16, device="cuda", requires_grad=learns))
    return compiled.reasons()


@pytest.mark.parametrize("options", [{}, CUDA_GRAPHS, {"recipe": "float8_block_scaling"}], ids=str)
@pytest.mark.parametrize("device", ["h100", "h200"])
def test_the_small_mlp_stays_in_bf16(device: str, options: dict) -> None:
    assert all(reasons(device=device, **options))


@pytest.mark.parametrize("recipe", [FP8, "float8_block_scaling"])
def test_a_replayed_step_is_never_cpu_bound(recipe: str) -> None:
    """The GPU's own time is asked still: 512 tokens are too few."""
    assert reasons(rows=6144, recipe=recipe, replayed=True) == ["", ""]
    assert all("CPU" not in reason and reason for reason in reasons(rows=512, recipe=recipe, replayed=True))


def test_the_reason_says_what_the_graph_waits_for() -> None:
    assert (
        reasons()
        == [
            "the graph is CPU-bound: to call the graph and launch its kernels it takes 1056 to 1240 us, 1216 to 1515 us with FP8, and without it the kernels "
            "take 363 us "
            "(estimated for an NVIDIA H200); one CUDA graph of the step, with replayed=True, takes it out of the way; add a rule for this module to force FP8"
        ]
        * 2
    )


@pytest.mark.parametrize(("width", "rows"), [(1024, 32768), (4096, 8192)])
def test_long_kernels_hide_the_cpu(width: int, rows: int) -> None:
    assert reasons(width, rows) == ["", ""]


def test_what_pays_on_a_fast_cpu_alone_is_left_until_this_one_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    helps = '; FP8 pays on a fast CPU alone, te-dynamo calibrate measures this one; mode="reduce-overhead" or one CUDA graph of the step, with replayed=True, takes it out of the way; add a rule'
    assert [helps in reason for reason in reasons(rows=16384)] == [True, True]
    for cpu_step_us, left in ((1400, False), (2400, True)):
        measured = calibrated(TARGETS["h200"], {**FOUND_ON_AN_H200, "cpu_step_us": cpu_step_us})
        monkeypatch.setattr(
            "te_dynamo.passes.torch_ir.match.cpu_bound.rates_of", lambda device, measured=measured: measured
        )
        found = reasons(rows=16384)
        assert [reason.startswith("the graph is CPU-bound") for reason in found] == [left] * 2
        assert not any(" to " in reason.partition("it takes")[2].partition(" us")[0] for reason in found), "one host"


BLOCKS = {
    **{name: False for name in ("small", "clip", "gpt2", "whisper", "llama1b_2048", "llama1b_4096")},
    **{name: True for name in ("llama1b_8192", "llama3b_4096", "llama1b_x4", "llama8b", "geglu", "gelu")},
}
"""Whether FP8 is chosen. In one run of benchmarks/cpu_time.py on an H200 with a slow host FP8 was 0.74 to 0.97 times as fast as bf16 in the first, and
0.99 in llama1b_4096 on a faster one."""


@pytest.mark.parametrize("name", slow_but(4, BLOCKS))
def test_blocks_that_were_measured(name: str) -> None:
    """Two blocks of each kind are fast; the others find a rule that a block near the edge contradicts."""
    block = {**models.BLOCKS, **cpu_time.BLOCKS}[name]
    torch.set_default_dtype(BF16)
    try:
        with fake_cuda("h200"):
            with torch.device("cuda"):
                model, x = block.make(), torch.empty(block.shape, requires_grad=True)
            compiled = Matched(model)
            compiled(x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert any(not reason for reason in compiled.reasons()) == BLOCKS[name]
    assert any(reason.startswith("the graph is CPU-bound") for reason in compiled.reasons()) != BLOCKS[name]


def test_a_step_in_cuda_graphs_has_no_launches() -> None:
    """Measured: 1.23 times as fast as bf16 in them."""
    assert all(reasons(2048, 4096)) and reasons(2048, 4096, **CUDA_GRAPHS) == ["", ""]


def test_cuda_graphs_take_the_cpu_out_of_inference() -> None:
    for options in ({}, CUDA_GRAPHS):
        compiled = Matched(F.linear, **options)
        with fake_cuda():
            compiled(*(torch.empty(rows, 4096, dtype=BF16, device="cuda") for rows in (1800, 4096)))
        (reason,) = compiled.reasons()
        assert (
            reason.startswith("the graph is CPU-bound")
            == ('mode="reduce-overhead" takes it out of the way' in reason)
            == (not options)
        )


@pytest.mark.parametrize("options", [{"rules": [("", FP8)]}, {"weight_cache": "step"}], ids=str)
def test_what_was_chosen_is_not_asked(options: dict) -> None:
    assert reasons(**options) == ["", ""]


def test_frozen_weights_are_not_asked() -> None:
    assert reasons(learns=False, rows=64, width=4096, frozen=True) == ["", ""]


def attention(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = F.linear(x, w)
    return F.scaled_dot_product_attention(y, y, y)


def convolution(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.conv1d(F.linear(x, w)[0].mT, w[:, :, None])


@pytest.mark.parametrize(
    ("function", "shape", "left"),
    [(attention, (1, 1, 2048), True), (attention, (8, 32, 2048), False), (convolution, (1, 1, 2048), False)],
)
def test_what_else_is_in_the_graph(function, shape: tuple[int, ...], left: bool) -> None:
    """Attention is counted; a convolution may take any time."""
    compiled = Matched(function)
    with fake_cuda():
        x = torch.empty(*shape, 4096, dtype=BF16, device="cuda")
        compiled(x, torch.empty(4096, 4096, dtype=BF16, device="cuda"))
    assert [reason.startswith("the graph is CPU-bound") for reason in compiled.reasons()[:1]] == [left]


@pytest.mark.parametrize(("rows", "left"), [(4096, True), (8192, False)])
def test_what_fsdp_takes_the_cpu_is_counted(rows: int, left: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reasons(4096, rows) == ["", ""]
    monkeypatch.setattr("te_dynamo.passes.torch_ir.match.cpu_bound.managed_by_fsdp", lambda gm, inputs: {1})
    found = reasons(4096, rows)
    assert [
        reason.startswith("the graph is CPU-bound: to call the graph, gather its weights and") for reason in found
    ] == [left] * 2
    assert reasons(4096, rows, learns=False) == ["", ""]


@pytest.mark.parametrize(("rows", "told"), [(2048, True), (8192, False)])
def test_weights_that_travel_in_fp8_are_multiplied_in_it_and_the_report_says_so(
    rows: int, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("te_dynamo.passes.torch_ir.match.cpu_bound.managed_by_fsdp", lambda gm, inputs: {0, 1, 2})
    quantizer = Float8CurrentScaling().weight_quantizer().with_usage(True, False)
    with fake_cuda("h200"):
        model = GeluMLP(4096, 16384)
        for linear in (model.up, model.down):
            linear.weight = nn.Parameter(quantizer.quantize(linear.weight.detach()))
        compiled = Matched(model)
        compiled(torch.empty(rows, 4096, dtype=BF16, device="cuda", requires_grad=True))
    assert compiled.reasons() == ["", ""]
    note = " 2 of its weights travel in FP8, and their linear layers run in FP8: without fp8_all_gather they would stay in 16 bits"
    times = "it takes 4656 to 6640 us, 4816 to 7435 us with FP8"  # 260 us of the slow host for each weight that travels
    assert (note in compiled.report.slow_gather and times in compiled.report.slow_gather) == told


@pytest.fixture
def two_gpus() -> Iterator[Any]:
    """A mesh of two GPUs of which none is there."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    there = {"is_available": True, "device_count": 2, "current_device": 0, "set_device": None}
    with contextlib.ExitStack() as patches:
        for name, value in there.items():
            patches.enter_context(mock.patch(f"torch.cuda.{name}", lambda *_, value=value: value))
        mesh = init_device_mesh("cuda", (2,))
    yield mesh
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
@pytest.mark.parametrize(("rows", "options", "left"), [(2048, {}, True), (2048, CUDA_GRAPHS, False), (4096, {}, False)])
def test_what_tensor_parallelism_takes_the_cpu_is_counted(
    two_gpus: Any, rows: int, options: dict[str, Any], left: bool
) -> None:
    """And the GPU's time is that of a rank's shards: of half of each weight. CUDA graphs replay the collectives too."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    with fake_cuda("h100"):
        model = GeluMLP(4096, 14336)
        parallelize_module(model, two_gpus, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        compiled = Matched(model, **options)
        compiled(torch.empty(rows, 4096, dtype=BF16, device="cuda", requires_grad=True))
    beginning = "of its shards: the graph is CPU-bound: to call the graph, share its DTensors and launch its kernels it takes 1620 to "
    assert [reason.startswith(beginning) for reason in compiled.reasons()] == [left] * 2
    assert [record.shape for record in compiled.records if record.kind == "linear"] == [
        (str(rows), "7168", "4096"),
        (str(rows), "4096", "7168"),
    ]
    assert reasons(4096, 4096, inner=7168, device="h100") == ["", ""], "on one GPU"
