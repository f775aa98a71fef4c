"""lowering/inductor/launch_buffers.py: Inductor's code for a GPU needs no more memory than the graph that it is written from."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.models.snapshot_models import kernels_everywhere
from helpers.slow import slow_but
from torch import nn
from torch._inductor.scheduler import NopKernelSchedulerNode
from torch._inductor.utils import run_and_get_code

from te_dynamo.inspect.graphs.capture import Captured
from te_dynamo.lowering.inductor import install
from te_dynamo.lowering.inductor.launch_buffers import allocate_late
from te_dynamo.passes.dialect import live_memory
from te_dynamo.recipe import MXFP8BlockScaling
from te_dynamo.testing import capture_on_fake_cuda

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
import generated_code
import live_memory as llama_memory
import models

TOKENS, WIDTH, INNER = 1024, 512, 2048
WIDE = TOKENS * INNER * 2
"""The bytes of one tensor of the width between, in bf16."""


def code_of(
    mlp: type[nn.Module], recipe: Any, tokens: int = TOKENS, width: int = WIDTH, inner: int = INNER
) -> tuple[list[generated_code.Generated], list[int], Captured]:
    """(Inductor's code of forward and backward, its peaks, the graphs)."""

    def make() -> nn.Module:
        with torch.device("meta"):
            return mlp(width, inner).bfloat16()

    def inputs(device: str) -> tuple[Any, ...]:
        return (torch.empty(1, tokens, width, dtype=torch.bfloat16, device=device, requires_grad=True),)

    with kernels_everywhere(), generated_code.generated_code() as graphs:
        captured = capture_on_fake_cuda(make, inputs, options={"recipe": None, "rules": [("", recipe)]})
    return graphs, generated_code.peak_bytes(graphs), captured


class TanhMLP(models.GatedMLP):
    """With a gate that no kernel of ours writes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down_proj(self.gate_proj(h).tanh() * self.up_proj(h))


def peaks(recipe: str, mlp: type[nn.Module] = models.GatedMLP) -> tuple[list[int], list[int]]:
    """(of the graphs, of Inductor's code): forward's and backward's of a gated MLP."""
    _, of_code, captured = code_of(mlp, recipe)
    return [live_memory.peak_bytes(captured.graph(f"lower.{phase}")) for phase in ("forward", "backward")], of_code


@pytest.mark.parametrize(
    ("recipe", "mlp"),
    slow_but(
        1,
        [
            ("float8_rowwise", TanhMLP),
            ("float8_block_scaling", models.GatedMLP),
            ("float8_current_scaling", models.GatedMLP),
        ],
    ),
)
def test_the_code_needs_what_the_graph_needs(recipe: str, mlp: type[nn.Module]) -> None:
    of_graphs, of_code = peaks(recipe, mlp)
    for graph, code in zip(of_graphs, of_code, strict=True):
        assert abs(graph - code) < WIDE / 16, (of_graphs, of_code)


@pytest.mark.slow
def test_gelus_gradient_takes_less_than_in_bf16() -> None:
    """Its columns are made when what it was computed of is gone."""
    backward, bf16 = (code_of(models.GeluMLP, recipe)[1][1] for recipe in ("float8_current_scaling", None))
    assert backward <= bf16


@pytest.mark.slow
def test_an_mlp_of_llama_8b_takes_no_more_than_in_bf16() -> None:
    recipes = (
        None,
        "float8_block_scaling",
        MXFP8BlockScaling(scale_block=128),
        "float8_rowwise",
        "float8_current_scaling",
    )
    bf16, *others = (max(code_of(models.GatedMLP, recipe, 8192, 4096, 14336)[1]) for recipe in recipes)
    assert max(others) <= bf16, (others, bf16)


@pytest.mark.slow
def test_gelus_gradient_is_computed_once() -> None:
    """Where Inductor computes it, the sums for the bias are of what was quantized, which is in memory, not of what it was computed of."""
    text = code_of(models.GeluMLP, "nvfp4")[0][1].text
    launched = re.findall(r"triton_\w*gelu_backward\w*\.run", text)
    assert len(launched) == 1 and launched[0].startswith("triton_poi"), launched


def test_a_graph_with_nothing_in_fp8_is_inductors_own() -> None:
    """To the reuse of freed buffers."""

    def reused(backend: str) -> int:
        torch._dynamo.reset()
        model = torch.compile(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), backend=backend)
        with torch.no_grad():
            _, (code,) = run_and_get_code(model, torch.randn(2, 8))
        return code.count("# reuse")

    assert reused("te") == reused("inductor") > 0


def test_an_operand_is_computed_once() -> None:
    """Of a forward pass alone, of which rows are quantized: the operand stands in for the columns."""

    def inputs(device: str) -> tuple[Any, ...]:
        return (torch.empty(1, TOKENS, WIDTH, dtype=torch.bfloat16, device=device),)

    with kernels_everywhere(), generated_code.generated_code() as graphs:
        options = {"recipe": None, "rules": [("", "float8_block_scaling")]}
        mlp = nn.Sequential(
            nn.Linear(WIDTH, INNER), nn.Tanh(), nn.Linear(INNER, WIDTH)
        )  # no kernel of ours writes a tanh
        capture_on_fake_cuda(lambda: mlp.bfloat16(), inputs, backward=False, options=options)
    # x, its codes and scales, and x in the place of the groups' ends and of the columns' two
    launches = re.findall(r"quantize_block_kernel_\d+\.run\((\w+), (\w+), \w+, \w+, (\w+), (\w+),", graphs[0].text)
    assert len(launches) == 4  # of two activations and two weights
    assert all(len(set(operands)) == 1 for operands in launches), launches


def test_without_it_the_code_needs_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the test above is one."""
    install.install()
    own = torch._inductor.memory.reorder_for_peak_memory.__wrapped__
    monkeypatch.setattr("te_dynamo.torch_private.private.Private.wrap", lambda *_: None)
    with mock.patch.object(torch._inductor.memory, "reorder_for_peak_memory", own):
        (_, graph), (_, code) = peaks("float8_rowwise", TanhMLP)
    assert code - graph >= WIDE - WIDE / 16, (graph, code)


@pytest.mark.slow
def test_a_freed_buffer_is_not_kept_for_a_later_one() -> None:
    """Inductor kept two of a Llama-70B block, each of 448 MiB, for gradients of weights that are made after attention's."""
    te, bf16 = (llama_memory.counted("70B", "plain", 1, 8192, provider)[0] for provider in ("te block", "bf16"))
    assert te <= bf16


def test_only_buffers_without_operands_move() -> None:
    def node(kind: type, name: str, *reads: str) -> Any:
        made = mock.Mock(spec=kind) if kind is NopKernelSchedulerNode else SimpleNamespace()
        made.read_writes = SimpleNamespace(reads=[SimpleNamespace(name=read) for read in reads])
        made.get_buffer_names = lambda: [name]
        return made

    empty, unread = node(NopKernelSchedulerNode, "a"), node(NopKernelSchedulerNode, "z")
    parts = node(NopKernelSchedulerNode, "cat", "b")
    first, reader = node(object, "b"), node(object, "c", "b", "a", "cat")
    nodes = [unread, empty, parts, first, reader]
    assert allocate_late(lambda given: given, nodes) == [parts, first, empty, reader, unread]
    assert allocate_late in install.WRAPPERS.values()
