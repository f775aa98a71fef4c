"""Fusing changes no bit: outputs and every gradient, with and without the fusions, on the CPU's reference path.

But for the gradient of an input that linears share: its terms are rounded once together (fusions/shared_input.py), so what
lies below it in backward differs by a rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from helpers.models.snapshot_models import FFN, HIDDEN, MODELS, compiled_run, shape_for
from helpers.oracles.same_bits import assert_same_bits
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from te_dynamo import capture


def compare(model: type[nn.Module], shape: Sequence[int], dtype: torch.dtype) -> dict[str, str]:
    """Compares a run with fusions to one without; returns the fused graphs' texts."""
    torch.manual_seed(2)
    x = torch.randn(*shape).to(dtype)
    with capture() as graphs:
        fused = compiled_run(model, {"codegen": "eager"})(x)
    assert graphs.reports[0].fusions, "nothing was fused"
    assert all(match.matched for match in graphs.reports[0].matches)
    rounded_once = any(name == "fuse_shared_input" for _, name, _ in graphs.reports[0].fusions)
    assert_same_bits(fused, compiled_run(model, {"codegen": "eager", "fusions": False})(x), rounded_once)
    return {stage: graphs[stage] for stage in graphs.stages}


FAST = {(name, torch.bfloat16) for name in MODELS} | {("gelu", torch.float32), ("block", torch.float32)}
"""A block holds swiglu and qkv."""
ALL = [
    pytest.param(name, rows, dtype, marks=() if rows > 1 and (name, dtype) in FAST else pytest.mark.slow)
    for name in MODELS
    for rows in (1, 19)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
]


@pytest.mark.one_fast_case
@pytest.mark.parametrize(("name", "rows", "dtype"), ALL)
def test_fused_training_equals_unfused(name: str, rows: int, dtype: torch.dtype) -> None:
    compare(MODELS[name], shape_for(MODELS[name], rows), dtype)


@pytest.mark.one_fast_case
@pytest.mark.parametrize("name", MODELS)
def test_fused_inference_equals_unfused(name: str) -> None:
    x = torch.randn(*shape_for(MODELS[name], 19), dtype=torch.bfloat16)
    fused, plain = (compiled_run(MODELS[name], {"codegen": "eager", "fusions": on})(x, False) for on in (True, False))
    assert_same_bits(fused, plain)


# ---- a result that is written in FP8 and read in the model's precision too (keep_output)


class NormReadTwice(nn.Module):
    """The norm's result is also the residual, as in models that normalise the stream itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.RMSNorm(HIDDEN, eps=1e-5), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return h + self.fc(h)


class LayerNormReturned(nn.Module):
    """The LayerNorm's result is also an output."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.norm(x)
        return self.fc(h), h


class ActivationReadTwice(nn.Module):
    """Two linears and a sum read one GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.a, self.b = nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN), nn.Linear(FFN, FFN)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.gelu(self.up(x), approximate="tanh")
        return self.a(h), self.b(h) + h


class SwigluReadTwice(nn.Module):
    """SwiGLU's result is also an output."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(HIDDEN, FFN), nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.silu(self.gate(x)) * self.up(x)
        return self.down(h), h


class GradientReadTwice(nn.Module):
    """The gradient of the activation's input goes to the linear, in FP8, and to a parameter that was added, as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN)
        self.shift = nn.Parameter(torch.zeros(FFN))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x) + self.shift))


class SwigluGradientsReadTwice(nn.Module):
    """The same for both gradients of SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(HIDDEN, FFN, bias=False) for _ in range(2))
        self.down = nn.Linear(FFN, HIDDEN, bias=False)
        self.shift = nn.Parameter(torch.zeros(FFN))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x) + self.shift) * (self.up(x) + self.shift))


class GateUpWithBias(nn.Module):
    """Gate and up of one linear, whose bias gradient is a sum of both gradients as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(HIDDEN, 2 * FFN), nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


KEPT = {
    NormReadTwice: ("forward", "te.rms_norm_quantize"),
    LayerNormReturned: ("forward", "te.layer_norm_quantize"),
    ActivationReadTwice: ("forward", "te.activation_quantize"),
    SwigluReadTwice: ("forward", "te.gated_quantize"),
    GradientReadTwice: ("backward", "te.activation_backward_quantize"),
    SwigluGradientsReadTwice: ("backward", "te.gated_backward_quantize"),
    GateUpWithBias: ("backward", "te.gated_backward_quantize_halves"),
}


@pytest.mark.one_fast_case
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
@pytest.mark.parametrize("model", KEPT)
def test_a_result_read_in_both_precisions_is_kept(model: type[nn.Module], dtype: torch.dtype) -> None:
    """One operation writes both; the numbers are those of the two by themselves."""
    stage, operation = KEPT[model]
    text = compare(model, (19, HIDDEN), dtype)[stage]
    lines = [line for line in text.splitlines() if f"= {operation}(" in line]
    assert len(lines) == 1 and "keep_output=True" in lines[0]


# ---- a forward that is recomputed


class Checkpointed(nn.Module):
    """A SwiGLU MLP under torch.utils.checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.body = MODELS["swiglu"]()

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.body, x, use_reentrant=False)


def test_a_recomputed_forward_is_fused_in_the_backward_graph() -> None:
    """Forward saves the input only; backward makes the column copies that it needs, and those alone."""
    texts = compare(Checkpointed, (19, HIDDEN), torch.bfloat16)
    forward, backward = texts["forward"], texts["backward"]
    assert "te.rms_norm_quantize(" in forward and "te.gated_quantize(" in forward
    assert "row+column" not in forward, "forward made column copies that nobody saves"
    assert "te.rms_norm_quantize(" in backward and "te.gated_backward_quantize(" in backward
    (gated,) = [line for line in backward.splitlines() if "= te.gated_quantize(" in line]
    assert "e4m3[column]" in gated


def test_a_view_between_a_norm_and_a_linear_does_not_stop_their_fusion() -> None:
    class Viewed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.fc = torch.nn.RMSNorm(64, eps=1e-5), torch.nn.Linear(64, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(self.norm(x).view(-1, 64)).unflatten(0, x.shape[:2])

    torch.manual_seed(0)
    model, x = Viewed().bfloat16(), torch.randn(2, 16, 64, dtype=torch.bfloat16)
    with capture() as graphs:
        y = torch.compile(model, backend="te", options={"codegen": "eager"})(x)
        y.sum().backward()
    assert "te.rms_norm_quantize" in graphs["forward"] and "te.rms_norm(" not in graphs["forward"]
    torch._dynamo.reset()
    unfused = torch.compile(model, backend="te", options={"codegen": "eager", "fusions": False})(x)
    torch.testing.assert_close(y, unfused, rtol=0, atol=0)


@pytest.mark.slow
def test_a_linear_reads_through_the_view_of_a_single_head() -> None:
    """Inductor checks an operation's arguments against those it was traced with: here a view of another rank."""

    class OneHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, 1, 64)).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous()
            return self.out(mixed.reshape(*x.shape))

    torch.manual_seed(0)
    model, x = OneHead().bfloat16(), torch.randn(4, 32, 64, dtype=torch.bfloat16)
    torch.compile(model, backend="te")(x).sum().backward()
