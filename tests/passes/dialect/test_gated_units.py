"""Gated units beside SwiGLU: what runs for each kind, and its bits fused and unfused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from helpers.models.snapshot_models import FFN, HIDDEN, capture_training, compiled_run
from helpers.oracles.same_bits import assert_same_bits
from torch import Tensor, nn
from torch.fx import Graph
from torch.utils._pytree import tree_leaves

import te_dynamo
from te_dynamo.dialect.define import is_te
from te_dynamo.inspect.graphs.capture import Captured

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


def mlp(kind: str, hidden: int = HIDDEN, inner: int = FFN, packed: bool = False) -> type[nn.Module]:
    """f(gate(x)) * up(x) between linears; packed: gate and up are one linear, the gate behind."""

    class MLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up = nn.ModuleList(
                nn.Linear(hidden, inner * (1 + packed), bias=packed) for _ in range(2 - packed)
            )
            self.down = nn.Linear(inner, hidden, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            up, gate = self.gate_up[0](x).chunk(2, -1) if packed else [linear(x) for linear in self.gate_up]
            return self.down(up * ACTIVATIONS[kind](gate))

    return MLP


class GLU(nn.Module):
    """F.glu of one linear."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(HIDDEN, 2 * FFN), nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.glu(self.gate_up(x)))


def operations(graph: Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if is_te(node.target)]


def traffic(graph: Graph) -> int:
    """Bytes that the graph's te operations read and write."""
    values = [
        value
        for node in graph.nodes
        if is_te(node.target)
        for value in (*(read.meta["val"] for read in node.all_input_nodes), *tree_leaves(node.meta["val"]))
    ]
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, Tensor))


def large(kind: str, packed: bool) -> Captured:
    return capture_training(mlp(kind, 4096, 14336, packed), (8192, 4096), "cuda")


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["gelu_tanh", "gelu"])
def test_a_geglu_runs_what_a_swiglu_runs(kind: str, packed: bool) -> None:
    """As many operations and bytes, forward and backward; six GEMMs where gate and up are two linears or one."""
    graphs, expected = large(kind, packed), large("silu", packed)
    products = 0
    for stage in ("forward", "backward"):
        ours, swiglus = graphs.graph(stage), expected.graph(stage)
        assert operations(ours) == operations(swiglus)
        assert traffic(ours) == traffic(swiglus)
        assert graphs[stage].replace(f"'{kind}'", "'silu'") == expected[stage]
        products += sum("te.gemm" in name for name in operations(ours))
    assert products == 6
    assert "te.activation" not in graphs["forward"] + graphs["backward"]


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [k if k == "gelu" else pytest.param(k, marks=pytest.mark.slow) for k in ACTIVATIONS])
def test_fused_and_unfused_have_the_same_bits(kind: str, packed: bool) -> None:
    x = torch.randn(24, HIDDEN, dtype=torch.bfloat16)
    fused, apart = (
        compiled_run(mlp(kind, packed=packed), {"codegen": "eager", "fusions": on})(x) for on in (True, False)
    )
    if packed:
        assert_same_bits(fused, apart)
        return
    # One dgrad of gate and up rounds its sum once, which the gradient of x alone shows (fusions/shared_input.py).
    for one, other in zip(fused.outputs, apart.outputs, strict=True):
        assert torch.equal(one, other)
    assert all(torch.equal(fused.gradients[name], apart.gradients[name]) for name in fused.gradients if name != "x")


def test_glu_is_fused() -> None:
    graphs = capture_training(GLU, (32, HIDDEN), "cuda")
    assert "te.gated_quantize(" in graphs["forward"] and "'sigmoid'" in graphs["forward"]
    assert "te.gated_backward_quantize_halves(" in graphs["backward"] and "gate_first=False" in graphs["backward"]
    x = torch.randn(24, HIDDEN, dtype=torch.bfloat16)
    fused, apart = (compiled_run(GLU, {"codegen": "eager", "fusions": on})(x) for on in (True, False))
    assert_same_bits(fused, apart)


def test_the_product_that_finds_the_amax_is_of_bf16() -> None:
    for dtype, fused in ((torch.bfloat16, True), (torch.float16, False)):
        graphs = capture_training(mlp("silu"), (32, HIDDEN), "cuda", dtype)
        assert ("te.gemm_gated(" in graphs["forward"], "along='N'" in graphs["forward"]) == (fused, not fused)


ROWS = te_dynamo.recipe.Float8RowwiseScaling()


@pytest.mark.parametrize(
    "recipes", [(ROWS, ROWS), ("float8_rowwise", "float8_current_scaling"), ("float8_current_scaling", ROWS)]
)
def test_no_amax_is_found_of_rows_or_for_them(recipes: tuple[Any, Any]) -> None:
    """Of gate and up, and of down: a product in rows finds no amax, and who quantizes by rows asks for none."""
    rules = {"rules": [("gate_up", recipes[0]), ("down", recipes[1])]}
    graphs = capture_training(mlp("silu"), (256, HIDDEN), "cuda", **rules)
    assert "te.gated_quantize(" in graphs["forward"] and "te.gemm_gated(" not in graphs["forward"]
    if recipes[0] is ROWS:
        backward = operations(graphs.graph("backward"))
        assert "te.gated_backward_quantize.default" in backward and "te.quantize_stacked.default" not in backward
        assert "along='N'" in graphs["forward"] and "keep_output=True" not in graphs["backward"]
    x = torch.randn(24, HIDDEN, dtype=torch.bfloat16)
    fused, apart = (compiled_run(mlp("silu"), {"codegen": "eager", "fusions": on, **rules})(x) for on in (True, False))
    assert all(map(torch.equal, fused.outputs, apart.outputs))
    assert all(torch.equal(fused.gradients[name], apart.gradients[name]) for name in fused.gradients if name != "x")


def test_geglu_snapshot() -> None:
    """Gate and up as one GEMM, forward and backward, as in test_snapshots_swiglu.py."""
    graphs = capture_training(mlp("gelu_tanh"), (32, HIDDEN), "cpu")
    assert_expected_inline(
        graphs["forward"] + "\n\n" + graphs["backward"],
        """\
x: bf16[32, 64] = input
gate_up.0.weight: bf16[128, 64] = input
gate_up.1.weight: bf16[128, 64] = input
down.weight: bf16[64, 128] = input
quantize: (f8e4m3[32, 64], f8e4m3[64, 32], f32[1]) = te.quantize(x, e4m3[row+column])
quantize_stacked: (f8e4m3[256, 64], f8e4m3[64, 256], f32[2]) = te.quantize_stacked([gate_up.1.weight, gate_up.0.weight], e4m3[row+column], by_columns=False)
gemm_gated: (bf16[32, 256], f32[512]) = te.gemm_gated([quantize[0], quantize[2]], e4m3[row], [quantize_stacked[0], quantize_stacked[2]], e4m3[row], fast_accum=False, gate=0, kind='gelu_tanh')
slice: bf16[32, 128] = aten.slice(gemm_gated[0], 1, 128, 256)
slice_1: bf16[32, 128] = aten.slice(gemm_gated[0], 1, 0, 128)
gated_quantize: (f8e4m3[32, 128], f8e4m3[128, 32], f32[1]) = te.gated_quantize(slice_1, slice, 'gelu_tanh', e4m3[row+column], keep_output=False, amax=gemm_gated[1])
quantize_1: (f8e4m3[64, 128], f8e4m3[128, 64], f32[1]) = te.quantize(down.weight, e4m3[row+column])
gemm: bf16[32, 64] = te.gemm([gated_quantize[0], gated_quantize[2]], e4m3[row], [quantize_1[0], quantize_1[2]], e4m3[row], bf16, fast_accum=False)
return gemm, quantize[1], quantize[2], quantize_stacked[1], quantize_stacked[2], slice, slice_1, gated_quantize[1], gated_quantize[2], quantize_1[1], quantize_1[2]

quantize[1]: f8e4m3[64, 32] = input
quantize[2]: f32[1] = input
quantize_stacked[1]: f8e4m3[64, 256] = input
quantize_stacked[2]: f32[2] = input
slice: bf16[32, 128] = input
slice_1: bf16[32, 128] = input
gated_quantize[1]: f8e4m3[128, 32] = input
gated_quantize[2]: f32[1] = input
quantize_1[1]: f8e4m3[128, 64] = input
quantize_1[2]: f32[1] = input
tangents_1: bf16[32, 64] = input
quantize_2: (f8e5m2[32, 64], f8e5m2[64, 32], f32[1]) = te.quantize(tangents_1, e5m2[row+column])
gemm: bf16[32, 128] = te.gemm([quantize_2[0], quantize_2[2]], e5m2[row], [quantize_1[1], quantize_1[2]], e4m3[column], bf16, fast_accum=False)
gated_backward_quantize: (f8e5m2[32, 256], f32[2]) = te.gated_backward_quantize(gemm, slice_1, slice, 'gelu_tanh', e5m2[row], keep_output=False, stacked=True)
gemm_1: bf16[32, 64] = te.gemm([gated_backward_quantize[0], gated_backward_quantize[1]], e5m2[row], [quantize_stacked[1], quantize_stacked[2]], e4m3[column], bf16, fast_accum=False, along='K', segments=[128, 128])
transpose: f8e5m2[256, 32] = te.transpose(gated_backward_quantize[0])
gemm_2: bf16[256, 64] = te.gemm([transpose, gated_backward_quantize[1]], e5m2[column], [quantize[1], quantize[2]], e4m3[column], bf16, fast_accum=False, along='M', segments=[128, 128])
slice_2: bf16[128, 64] = aten.slice(gemm_2, start=0, end=128)
slice_3: bf16[128, 64] = aten.slice(gemm_2, start=128, end=256)
gemm_3: bf16[64, 128] = te.gemm([quantize_2[1], quantize_2[2]], e5m2[column], [gated_quantize[1], gated_quantize[2]], e4m3[column], bf16, fast_accum=False)
return gemm_1, slice_3, slice_2, gemm_3""",
    )
