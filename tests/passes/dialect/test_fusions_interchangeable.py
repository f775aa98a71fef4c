"""Forward and backward fusions stand for themselves: fused or unfused forward with fused or unfused backward, one result.

And the option that chooses fusions by name.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers.models.residual_models import NAMES, GeluResidual, SwigluResidual
from helpers.models.snapshot_models import FFN, HIDDEN, compiled_run
from helpers.oracles.same_bits import assert_same_bits
from torch import Tensor, nn

from te_dynamo import capture, register_graph_fusion
from te_dynamo.errors import InvalidOptionError
from te_dynamo.passes.dialect.fuser import check_choice, fuse


class LinearsInARow(nn.Module):
    """Of weights as large as those that few rows are multiplied with by a kernel of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(HIDDEN, 2048), nn.Linear(2048, 2048), nn.Linear(2048, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class SharedSwigluResidual(SwigluResidual):
    """With gate and up in one GEMM, in every combination."""


class GateUpResidual(nn.Module):
    """With one linear for gate and up."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(HIDDEN, HIDDEN, bias=False), nn.RMSNorm(HIDDEN, eps=1e-5)
        self.gate_up, self.down = nn.Linear(HIDDEN, 2 * FFN, bias=False), nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.first(x)
        gate, up = self.gate_up(self.norm(h)).chunk(2, -1)
        return h + self.down(F.silu(gate) * up)


FUSED = {
    LinearsInARow: ({"fuse_gemm_bias", "fuse_gemm_amax"}, {"fuse_quantize_bias_grad"}),
    GeluResidual: (
        {"fuse_gemm_bias", "fuse_norm_quantize", "fuse_norm_add_quantize", "fuse_activation_quantize", "fuse_gemm_add"},
        {"fuse_activation_backward_quantize", "fuse_quantize_bias_grad"},
    ),
    SwigluResidual: (
        {"fuse_norm_quantize", "fuse_norm_add_quantize", "fuse_activation_quantize", "fuse_gemm_add"},
        {"fuse_gated_backward_quantize"},
    ),
    SharedSwigluResidual: (
        {
            "fuse_norm_quantize",
            "fuse_norm_add_quantize",
            "fuse_activation_quantize",
            "fuse_gemm_gated",
            "fuse_gemm_add",
        },
        {"fuse_gated_backward_quantize"},
    ),
    GateUpResidual: (
        {"fuse_norm_quantize", "fuse_norm_add_quantize", "fuse_activation_quantize", "fuse_gemm_add"},
        {"fuse_gated_backward_quantize_halves"},
    ),
}
JOINT = {SharedSwigluResidual: {"fuse_shared_input"}}


def test_every_shipped_fusion_of_one_half_is_in_a_model() -> None:
    """But for what several processes are needed for (tests/distributed)."""
    for place, kind in enumerate(("forward", "backward")):
        assert set().union(*(halves[place] for halves in FUSED.values())) == set(NAMES[kind]) - {"fuse_gather_quantize"}


@pytest.mark.slow
@pytest.mark.parametrize("model", FUSED)
def test_all_four_combinations_give_the_same_bits(model: type[nn.Module]) -> None:
    torch.manual_seed(3)
    x = torch.randn(19, HIDDEN, dtype=torch.bfloat16)
    forward, backward = FUSED[model]
    joint = JOINT.get(model, set())
    results = {}
    for fused_forward in (False, True):
        for fused_backward in (False, True):
            chosen = [*joint, *NAMES["forward"] * fused_forward, *NAMES["backward"] * fused_backward]
            with capture() as graphs:
                run = compiled_run(model, {"codegen": "eager", "fusions": chosen})
                results[fused_forward, fused_backward] = run(x)
            fired = {name for _, name, _ in graphs.reports[0].fusions}
            assert fired == joint | (forward if fused_forward else set()) | (backward if fused_backward else set())
    for result in results.values():
        assert_same_bits(result, results[False, False])


# ---- options={"fusions": [...]}


def test_names_choose_and_a_minus_leaves_out() -> None:
    x = torch.randn(16, HIDDEN, dtype=torch.bfloat16)
    fired = {}
    for choice in (("fuse_norm_quantize",), ("-fuse_norm_add_quantize",), ()):
        with capture() as graphs:
            compiled_run(SwigluResidual, {"codegen": "eager", "fusions": list(choice)})(x, False)
        fired[choice] = {name for _, name, _ in graphs.reports[0].fusions}
    assert fired[("fuse_norm_quantize",)] == {"fuse_norm_quantize"}
    assert fired[("-fuse_norm_add_quantize",)] == {
        "fuse_shared_input",
        "fuse_norm_quantize",
        "fuse_activation_quantize",
        "fuse_gemm_gated",
        "fuse_gemm_add",
    }
    assert fired[()] == set()


def test_an_unknown_name_is_an_error_with_the_nearest() -> None:
    for name in ("fuse_gemm_bia", "-fuse_gemm_bia"):
        with pytest.raises(InvalidOptionError, match=r"unknown fusion 'fuse_gemm_bia'; did you mean 'fuse_gemm_bias'"):
            check_choice((name,))
    with pytest.raises(Exception, match=r"unknown fusion 'nothing'; valid: "):
        compiled_run(GeluResidual, {"fusions": ["nothing"]})(torch.randn(16, HIDDEN))


seen: list[torch.fx.Graph] = []


def noting(graph: torch.fx.Graph) -> int:
    seen.append(graph)
    return 0


def test_a_registered_fusion_has_a_name_too() -> None:
    graph = torch.fx.Graph()
    graph.output(graph.placeholder("x"))
    with register_graph_fusion(noting, phase="forward"):
        check_choice(("noting",))
        for choice, runs in ((("noting",), 1), (("-noting",), 0), (True, 1), (False, 0)):
            seen.clear()
            fuse(graph, "forward", choice)
            assert len(seen) == runs
    with pytest.raises(InvalidOptionError, match="unknown fusion 'noting'"):
        check_choice(("noting",))
