"""Linears of DTensors: which layouts run as te.linear of the rank's shards, and why the others are left.

One process that takes itself for the first of two; tests/distributed/test_distributed.py has two and compares numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.models.small_models import SwiGLU
from helpers.models.training import EAGER
from torch import Tensor, nn

import te_dynamo

if not torch.distributed.is_available():
    pytest.skip("torch without distributed", allow_module_level=True)

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


def shared(mesh: DeviceMesh, local: Tensor, placement: Any) -> DTensor:
    return DTensor.from_local(local, mesh, [placement], run_check=False).detach().requires_grad_()


LAYOUTS = {
    "column": (Replicate(), Shard(0), Shard(2)),
    "row": (Shard(2), Shard(1), Partial()),
    "tokens": (Shard(1), Replicate(), Shard(1)),
    "batch": (Shard(0), Replicate(), Shard(0)),
    "everywhere": (Replicate(), Replicate(), Replicate()),
}


@pytest.mark.one_fast_case
@pytest.mark.parametrize("bias", [pytest.param(False, marks=pytest.mark.slow), True], ids=["", "bias"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(mesh: DeviceMesh, layout: str, bias: bool) -> None:
    """Placements of the output and the gradients are what torch gives them."""
    of_x, of_weight, of_output = LAYOUTS[layout]

    def run(options: dict[str, Any]) -> tuple[Any, ...]:
        torch._dynamo.reset()
        operands = [shared(mesh, torch.randn(4, 16, 32), of_x), shared(mesh, torch.randn(64, 32), of_weight)]
        if bias:
            operands.append(shared(mesh, torch.randn(64), Shard(0) if layout == "column" else Replicate()))
        try:
            F.linear(*operands)
        except RuntimeError as error:  # torch 2.11 multiplies no tokens that are shared out
            pytest.skip(str(error))
        with te_dynamo.capture() as graphs:
            y = torch.compile(F.linear, backend="te", fullgraph=True, options={**EAGER, **options})(*operands)
            gradients = torch.autograd.grad(y.to_local().sum(), operands)
        return y, gradients, graphs

    y, gradients, graphs = run({})
    plain_y, plain_gradients, _ = run({"recipe": None})
    (record,) = graphs.reports[0].matches
    assert record.matched and graphs["joint"].count("te.gemm(") == 3
    assert y.placements == plain_y.placements == (of_output,) and y.shape == plain_y.shape
    for gradient, plain in zip(gradients, plain_gradients, strict=True):
        assert (gradient.shape, gradient.stride()) == (plain.shape, plain.stride())
    for gradient, plain in zip(gradients[:2], plain_gradients[:2], strict=True):
        assert gradient.placements == plain.placements


@pytest.mark.parametrize(
    ("of_x", "of_weight", "columns", "reason"),
    [
        (Shard(2), Replicate(), 32, "no rank has its part of the product: input S(2), weight R"),
        (Partial(), Replicate(), 32, "no rank has its part of the product: input P(sum), weight R"),
        (
            Replicate(),
            Shard(0),
            8,
            "of its shards: N = 8, K = 32: FP8 GEMMs need N and K to be multiples of 16; padding N to 16 would add 100%, more than 1/16",
        ),
    ],
    ids=["features", "partial", "narrow"],
)
def test_what_is_left(mesh: DeviceMesh, of_x: Any, of_weight: Any, columns: int, reason: str) -> None:
    wide = 16 if of_x == Shard(2) else 32
    x, weight = shared(mesh, torch.randn(4, 16, wide), of_x), shared(mesh, torch.randn(columns, 32), of_weight)
    explanation = te_dynamo.explain(F.linear, x, weight, options=EAGER)
    (record,) = explanation.linears
    assert record.reason == reason and not record.matched


def test_fusions_see_through_shards(mesh: DeviceMesh) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"1.gate": ColwiseParallel(), "1.up": ColwiseParallel(), "1.down": RowwiseParallel()}
    model = parallelize_module(nn.Sequential(nn.RMSNorm(32), SwiGLU()), mesh, plan)
    explanation = te_dynamo.explain(model, torch.randn(4, 16, 32), options=EAGER)
    assert explanation.coverage == 1 and [row.module for row in explanation.linears] == ["1.gate", "1.up", "1.down"]
    assert {name for report in explanation.reports for _, name, _ in report.fusions} == {
        "fuse_norm_quantize",
        "fuse_activation_quantize",
        "fuse_gated_backward_quantize",
    }


def test_paths_in_a_wrapped_checkpoint() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = nn.Sequential(checkpoint_wrapper(SwiGLU()))
    explanation = te_dynamo.explain(model, torch.randn(4, 32), options=EAGER)
    assert explanation.coverage == 1
    assert [row.module for row in explanation.linears] == [f"0.{name}" for name in ("gate", "up", "down")]


def test_linears_of_one_dtensor_share_what_its_quantization_costs(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear, readers = "te_dynamo.passes.torch_ir.match.patterns.linears.linear", []
    monkeypatch.setattr(f"{linear}._has_times", lambda *_: True)  # as on a GPU
    monkeypatch.setattr(f"{linear}.linear_cost_reason", lambda **given: readers.append(given["x_readers"]) or "")
    weights = [shared(mesh, torch.randn(64, 32), Shard(0)) for _ in range(3)]
    x = shared(mesh, torch.randn(4, 16, 32), Replicate())

    @torch.compile(backend="te", fullgraph=True, options=EAGER)
    def of_one(x: Tensor, *weights: Tensor) -> list[Tensor]:
        return [F.linear(x, weight) for weight in weights]

    of_one(x, *weights)
    assert readers == [3, 3, 3]
