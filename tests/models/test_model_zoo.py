"""Model families of transformers, unmodified and tiny: what share of their linears runs in FP8, and that they train.

Random weights of the library's own initialisation; no file is fetched.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import te_dynamo
from te_dynamo.inspect.dynamo import Seen
from te_dynamo.inspect.explain import Explanation
from te_dynamo.inspect.flops import count_matrix_flops
from te_dynamo.inspect.left_out import rows_left_out
from te_dynamo.report import Report

transformers = pytest.importorskip("transformers")

from helpers.models.families import FAMILIES, build, inputs  # noqa: E402  needs transformers

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

WRITTEN: dict[str, dict[str, int]] = {
    "GPT2": {"layer_norm": 5, "gelu": 2},
    "Phi": {"layer_norm": 3, "gelu": 2},
    "Albert": {"layer_norm": 6, "gelu": 3},
    "Cohere": {"layer_norm": 3, "gated silu": 2},
    "Olmo": {"layer_norm": 5, "gated silu": 2},
    "Nemotron": {"layer_norm": 5, "relu2": 2},
    "OPT": {"layer_norm": 5, "relu": 2},
    "GPTJ": {"layer_norm": 3, "gelu": 2},
    "ModernBert": {"layer_norm": 6, "gated gelu": 2, "gelu": 1},
}
"""Of families that write their norms and activations as formulas, or gate them: how many of each are te operations, that is all."""

EACH_CHANGE = {
    *WRITTEN,
    *("Llama", "Qwen3", "Gemma2", "Phi3", "Bloom", "GPTNeoX", "Mixtral", "DeepseekV3", "GptOss", "Llama4Text"),
    *("Bert", "XLNet", "T5", "Mamba2", "CLIP", "Whisper", "ViT"),
}
"""Each is written in a way of its own. The others are like one of these."""

LARGEST_ERROR = {"Gemma3nText": 0.4}
"""Of all gradients together, beside bf16's; it multiplies by predictions of its own gradient's size."""


def explanation_of(model: Any, kwargs: dict[str, Any], reports: list[Report]) -> Explanation:
    """What te_dynamo.explain says of the model, from a compilation that there was already: its own takes as long again."""
    flops = count_matrix_flops(model, (), kwargs)
    linears = [match for report in reports for match in report.matches if match.kind == "linear"]
    return Explanation(reports, [], flops, list(rows_left_out(model, flops, linears, Seen())))


def loss_and_gradient(model: Any, run: Any, kwargs: dict[str, Any]) -> tuple[float, torch.Tensor]:
    model.zero_grad()
    loss = run(**kwargs).loss
    loss.backward()
    gradients = [p.grad.double().flatten() for p in model.parameters() if p.grad is not None]
    return loss.item(), torch.cat(gradients)


@pytest.mark.parametrize(
    "family", [name if name in EACH_CHANGE else pytest.param(name, marks=pytest.mark.exhaustive) for name in FAMILIES]
)
def test_trains_unmodified(family: str) -> None:
    model, kwargs = build(family), inputs(family)
    compiled = torch.compile(model, backend="te", options={"codegen": "eager"})
    expected_loss, expected = loss_and_gradient(model, model, kwargs)
    with te_dynamo.capture() as graphs:
        actual_loss, actual = loss_and_gradient(model, compiled, kwargs)
    assert actual_loss == pytest.approx(expected_loss, rel=0.02)
    assert 0 < (actual - expected).norm() / expected.norm() < LARGEST_ERROR.get(family, 0.2)

    explanation = explanation_of(model, kwargs, graphs.reports)
    assert explanation.coverage >= FAMILIES[family][2]
    assert all(row.matched or row.reason for row in explanation.linears)
    if family in WRITTEN:
        assert Counter(row.kind for row in explanation.norms_activations if row.matched) == WRITTEN[family]
        assert all(row.matched for row in explanation.norms_activations)
    flops = explanation.to_dict()["matrix_flops"]
    assert flops["has_a_row"] >= 0.99
    assert sum(row.flops for report in explanation.reports for row in report.matches) == pytest.approx(
        flops["by_weight"], rel=0.01
    )


def test_experts_that_are_not_bf16() -> None:
    """transformers then calls an operation of its own in a compiled model, since torch's takes bf16 alone."""
    model = build("Mixtral").float()
    tokens = torch.randint(0, 128, (2, 33), generator=torch.Generator().manual_seed(1))
    explanation = te_dynamo.explain(model, options={"codegen": "eager"}, input_ids=tokens, labels=tokens)
    assert explanation.coverage >= FAMILIES["Mixtral"][2] and {row.groups for row in explanation.linears} == {0, 4}


def test_swin() -> None:
    """All but the convolution that cuts patches. The norm before attention is cut into windows, each with its reason; the one before the MLP is fused."""
    fields = {
        "image_size": 32,
        "patch_size": 2,
        "embed_dim": 32,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 4,
    }
    torch.manual_seed(0)
    model = transformers.SwinModel(transformers.SwinConfig(**fields)).bfloat16().eval()
    pixels = torch.randn(2, 3, 32, 32, dtype=torch.bfloat16)
    compiled = torch.compile(model, backend="te", options={"codegen": "eager"})
    expected, actual = (run(pixel_values=pixels).last_hidden_state.float() for run in (model, compiled))
    assert (actual - expected).norm() / expected.norm() < 0.2
    explanation = te_dynamo.explain(model, options={"codegen": "eager"}, pixel_values=pixels)
    assert [row.module for row in explanation.linears if not row.matched] == ["embeddings.patch_embeddings.projection"]
    before_mlp = [row for row in explanation.norms_activations if row.module.endswith("layernorm_after")]
    before_windows = [row for row in explanation.norms_activations if row.module.endswith("layernorm_before")]
    assert len(before_mlp) == len(before_windows) == 4 and all(row.matched for row in before_mlp)
    assert all(row.reason.startswith("the FP8 linear reads it permuted or padded") for row in before_windows)


class DiTBlock(torch.nn.Module):
    """A block of DiT (Peebles and Xie): adaLN-Zero around attention and around an MLP."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (torch.nn.LayerNorm(width, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.ada, self.qkv = torch.nn.Linear(width, 6 * width), torch.nn.Linear(width, 3 * width)
        self.out, self.up = torch.nn.Linear(width, width), torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.ada(F.silu(c)).chunk(6, dim=1)
        h = self.norm1(x) * (1 + scale1.unsqueeze(1)) + shift1.unsqueeze(1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(h).chunk(3, -1))
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        x = x + gate1.unsqueeze(1) * self.out(h)
        h = self.norm2(x) * (1 + scale2.unsqueeze(1)) + shift2.unsqueeze(1)
        return x + gate2.unsqueeze(1) * self.down(F.gelu(self.up(h), approximate="tanh"))


def test_dit_block() -> None:
    torch.manual_seed(0)
    model = DiTBlock().bfloat16()
    args = [torch.randn(shape).bfloat16().requires_grad_() for shape in ((4, 32, 64), (4, 64))]
    inputs = [*args, *model.parameters()]
    compiled = torch.compile(model, backend="te", options={"codegen": "eager"})
    expected, actual = (torch.autograd.grad(run(*args).float().square().mean(), inputs) for run in (model, compiled))
    for ours, eager in zip(actual, expected, strict=True):
        assert (ours - eager).float().norm() / eager.float().norm() < 0.3
    explanation = te_dynamo.explain(model, *args, options={"codegen": "eager"})
    assert explanation.coverage == 1.0
    matched = Counter(row.kind for row in explanation.norms_activations if row.matched)
    assert matched == {"silu": 1, "layer_norm_modulate": 2, "gelu": 1} and len(explanation.norms_activations) == 4
