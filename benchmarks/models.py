"""The blocks that are measured: plain PyTorch, as a model's author would write them, with no FP8 in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn


class GatedMLP(nn.Module):
    """x + down(silu(gate(h)) * up(h)), h = rms_norm(x)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


class GateUpMLP(nn.Module):
    """The same with one linear for gate and up, as Phi-3 and GLM have it."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.gate_up_proj = nn.Linear(width, 2 * inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(self.norm(x)).chunk(2, dim=-1)
        return x + self.down_proj(F.silu(gate) * up)


class GeluMLP(nn.Module):
    """x + fc2(gelu(fc1(layer_norm(x)))), with biases and the tanh form of GELU."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, inner)
        self.fc2 = nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(F.gelu(self.fc1(self.norm(x)), approximate="tanh"))


class QuickGeluMLP(GeluMLP):
    """The same with GELU by a sigmoid, as OpenAI's CLIP has it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.fc1(self.norm(x))
        return x + self.fc2(h * torch.sigmoid(1.702 * h))


class GegluMLP(GatedMLP):
    """The gated MLP with the tanh form of GELU, as Gemma has it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down_proj(F.gelu(self.gate_proj(h), approximate="tanh") * self.up_proj(h))


class Experts(nn.Module):
    """The gated MLPs of a mixture's experts, on tokens that are sorted by expert: as transformers writes them."""

    def __init__(self, width: int, inner: int, experts: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * inner, width) / width**0.5)
        self.down_proj = nn.Parameter(torch.randn(experts, width, inner) / inner**0.5)

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """x [tokens, width]; ends int32 [experts]: where each expert's tokens end."""
        gate, up = F.grouped_mm(x, self.gate_up_proj.transpose(-2, -1), offs=ends).chunk(2, dim=-1)
        return F.grouped_mm(F.silu(gate) * up, self.down_proj.transpose(-2, -1), offs=ends)


class GroupedQueryAttention(nn.Module):
    """x + o(attention(q(h), k(h), v(h))), h = rms_norm(x), causal; `kv_heads` shared among `heads`."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q, k, v = (
            projection(h).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.o_proj(mixed.transpose(1, 2).flatten(-2))


class BiasedAttention(nn.Module):
    """x + o(attention(q(h), k(h), v(h))), h = layer_norm(x), with biases: an encoder's, as BERT, ViT, CLIP and Whisper have it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm = nn.LayerNorm(width)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q, k, v = (
            projection(h).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        return x + self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


class Conv1D(nn.Module):
    """transformers' linear of GPT-2: the weight is [K, N], and a call is torch.addmm."""

    def __init__(self, n: int, k: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(k, n) / k**0.5), nn.Parameter(torch.zeros(n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


class GPT2Block(nn.Module):
    """A block of GPT-2: q, k and v in one Conv1D, causal attention, and an MLP with the tanh form of GELU."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = (nn.LayerNorm(width) for _ in range(2))
        self.attn_in, self.attn_out = Conv1D(3 * width, width), Conv1D(width, width)
        self.mlp_in, self.mlp_out = Conv1D(4 * width, width), Conv1D(width, 4 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.attn_in(self.ln_1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_out(mixed.transpose(1, 2).flatten(-2))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.ln_2(x)), approximate="tanh"))


class Head(nn.Module):
    """A language model's last norm and head. The log of the softmax's sum stands for its loss, added to x."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.head(self.norm(x)).logsumexp(-1, keepdim=True)


class DiTBlock(nn.Module):
    """A block of DiT (Peebles and Xie): adaLN-Zero around attention and around an MLP, conditioned here on the mean of the tokens."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.LayerNorm(width, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.ada, self.qkv = nn.Linear(width, 6 * width), nn.Linear(width, 3 * width)
        self.out, self.up = nn.Linear(width, width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        nn.init.normal_(self.ada.bias)  # gates as of a trained model: by those of a new one the output is x, rounded

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        condition = self.ada(F.silu(x.mean(1))).chunk(6, dim=1)
        shift1, scale1, gate1, shift2, scale2, gate2 = (part.unsqueeze(1) for part in condition)
        h = self.norm1(x) * (1 + scale1) + shift1
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(h).chunk(3, -1))
        x = x + gate1 * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        h = self.norm2(x) * (1 + scale2) + shift2
        return x + gate2 * self.down(F.gelu(self.up(h), approximate="tanh"))


def encoder_block(width: int, heads: int, mlp: type[nn.Module] = GeluMLP) -> nn.Module:
    """Attention and an MLP of an encoder."""
    return nn.Sequential(BiasedAttention(width, heads), mlp(width, 4 * width))


def llama_block(width: int, inner: int, heads: int, kv_heads: int) -> nn.Module:
    """Attention and a gated MLP. Rotary embeddings are left out: they cost every provider the same."""
    return nn.Sequential(GroupedQueryAttention(width, heads, kv_heads), GatedMLP(width, inner))


@dataclasses.dataclass(frozen=True)
class Block:
    """One measured block.

    make:  builds the module, in fp32 on the CPU.
    shape: of its input, (batch, tokens, width); the output has the same.
    """

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, int, int]

    @property
    def title(self) -> str:
        """The name and how many tokens the input has."""
        return f"{self.name}, {self.shape[0] * self.shape[1]} tokens"


BLOCKS = {
    "swiglu": Block("SwiGLU MLP 4096/14336", lambda: GatedMLP(4096, 14336), (1, 8192, 4096)),
    "gate_up": Block("SwiGLU MLP 4096/14336, gate and up one linear", lambda: GateUpMLP(4096, 14336), (1, 8192, 4096)),
    "gelu": Block("GELU MLP 4096/16384", lambda: GeluMLP(4096, 16384), (1, 8192, 4096)),
    "llama8b": Block("Llama-8B block", lambda: llama_block(4096, 14336, 32, 8), (2, 4096, 4096)),
    "llama70b": Block("Llama-70B block", lambda: llama_block(8192, 28672, 64, 8), (2, 4096, 8192)),
    "geglu": Block("GEGLU MLP 3072/24576 (Gemma)", lambda: GegluMLP(3072, 24576), (1, 8192, 3072)),
    "whisper": Block("Whisper-large encoder block", lambda: encoder_block(1280, 20), (8, 1500, 1280)),
    "dit": Block("DiT block 3072", lambda: DiTBlock(3072, 24), (8, 1024, 3072)),
    "clip": Block(
        "CLIP ViT-L encoder block (quick GELU)", lambda: encoder_block(1024, 16, QuickGeluMLP), (64, 257, 1024)
    ),
    "gpt2": Block("GPT-2 XL block", lambda: GPT2Block(1600, 25), (8, 1024, 1600)),
    "head": Block("head 1600 to 50257 (GPT-2 XL)", lambda: Head(1600, 50257), (4, 1024, 1600)),
    "small": Block("small MLP 1024/4096", lambda: GeluMLP(1024, 4096), (1, 4096, 1024)),
}
