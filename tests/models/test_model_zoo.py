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

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED = {**COMMON, "num_key_value_heads": 2}

MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    **COMMON,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}

# Family -> (model class, configuration, share of linear FLOPs in FP8).
FAMILIES: dict[str, tuple[str, dict[str, Any], float]] = {
    "Llama": ("LlamaForCausalLM", GROUPED, 1.0),
    "Mistral": ("MistralForCausalLM", GROUPED, 1.0),
    "Qwen2": ("Qwen2ForCausalLM", GROUPED, 1.0),
    "Qwen3": ("Qwen3ForCausalLM", {**GROUPED, "head_dim": 16}, 1.0),
    "Gemma": ("GemmaForCausalLM", {**GROUPED, "head_dim": 16}, 1.0),
    "Gemma2": ("Gemma2ForCausalLM", {**GROUPED, "head_dim": 16, "query_pre_attn_scalar": 16}, 1.0),
    "Phi3": ("Phi3ForCausalLM", {**GROUPED, "pad_token_id": 0}, 1.0),
    "GPTNeoX": ("GPTNeoXForCausalLM", COMMON, 1.0),
    "Bert": ("BertForMaskedLM", COMMON, 1.0),
    # gelu written out by tanh.
    "Phi": ("PhiForCausalLM", COMMON, 1.0),
    "Albert": ("AlbertForMaskedLM", {**COMMON, "embedding_size": 64}, 1.0),
    # LayerNorm written out in fp32; of what was cast to fp32; with a weight around zero.
    "Cohere": ("CohereForCausalLM", {**COMMON, "pad_token_id": 0}, 1.0),
    "Olmo": ("OlmoForCausalLM", {**COMMON, "pad_token_id": 0}, 1.0),
    # Its activation is relu squared.
    "Nemotron": ("NemotronForCausalLM", GROUPED, 1.0),
    # Its layers are Conv1D, written as addmm.
    "GPT2": ("GPT2LMHeadModel", {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}, 1.0),
    # The router is four columns wide: left, with that reason.
    "Mixtral": ("MixtralForCausalLM", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}, 0.99),
    # Queries and keys through low ranks, a shared expert, a router four columns wide.
    "DeepseekV3": ("DeepseekV3ForCausalLM", LATENT, 0.99),
    # Experts with biases and gate and up interleaved.
    "GptOss": ("GptOssForCausalLM", {**GROUPED, **MIXTURE, "head_dim": 16, "sliding_window": 16}, 0.99),
    # Experts by torch.bmm.
    "Llama4Text": (
        "Llama4ForCausalLM",
        {**GROUPED, "head_dim": 16, "intermediate_size_mlp": 128, "num_local_experts": 4, "attention_chunk_size": 16},
        0.99,
    ),
    # LayerNorm behind the embedding, a GELU of its own, q, k and v in one.
    "Bloom": ("BloomForCausalLM", {"vocab_size": 128, "hidden_size": 64, "n_layer": 2, "n_head": 4}, 1.0),
    # A short convolution between two linears.
    "Lfm2": ("Lfm2ForCausalLM", {**GROUPED, "layer_types": ["conv", "full_attention"], "block_multiple_of": 16}, 0.99),
    # Projections by einsums with weights of three dimensions. Scores by positions, which parameters alone make, are left.
    "XLNet": (
        "XLNetLMHeadModel",
        {"vocab_size": 128, "d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 128},
        0.9,
    ),
}


WRITTEN: dict[str, dict[str, int]] = {
    "GPT2": {"layer_norm": 5, "gelu": 2},
    "Phi": {"layer_norm": 3, "gelu": 2},
    "Albert": {"layer_norm": 6, "gelu": 3},
    "Cohere": {"layer_norm": 3, "gated silu": 2},
    "Olmo": {"layer_norm": 5, "gated silu": 2},
    "Nemotron": {"layer_norm": 5, "relu2": 2},
}
"""Of families that write their norms and activations as formulas: how many of each are te operations, that is all."""


def build(family: str) -> torch.nn.Module:
    name, fields, _ = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**fields, use_cache=False)
    return getattr(transformers, name)(config).bfloat16().eval()


def loss_and_gradient(model: Any, run: Any, tokens: torch.Tensor) -> tuple[float, torch.Tensor]:
    model.zero_grad()
    loss = run(input_ids=tokens, labels=tokens).loss
    loss.backward()
    gradients = [p.grad.double().flatten() for p in model.parameters() if p.grad is not None]
    return loss.item(), torch.cat(gradients)


@pytest.mark.parametrize("family", FAMILIES)
def test_trains_unmodified(family: str) -> None:
    model = build(family)
    tokens = torch.randint(0, 128, (2, 33), generator=torch.Generator().manual_seed(1))
    compiled = torch.compile(model, backend="te", options={"codegen": "eager"})
    expected_loss, expected = loss_and_gradient(model, model, tokens)
    actual_loss, actual = loss_and_gradient(model, compiled, tokens)
    assert actual_loss == pytest.approx(expected_loss, rel=0.01)
    assert 0 < (actual - expected).norm() / expected.norm() < 0.2

    explanation = te_dynamo.explain(model, options={"codegen": "eager"}, input_ids=tokens, labels=tokens)
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
