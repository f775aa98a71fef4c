"""Models as users write them, of the smallest sizes that FP8 GEMMs take. Nothing here knows of the package."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 32


class WrittenRMSNorm(nn.Module):
    """Llama's, as Hugging Face writes it."""

    def __init__(self, width: int = WIDTH, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x32.to(x.dtype)


class GemmaRMSNorm(nn.Module):
    """Gemma's: the weight is stored less one."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width) / 8)

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (x32 * (1.0 + self.weight.float())).to(x.dtype)


class SwiGLU(nn.Module):
    def __init__(self, width: int = WIDTH, activation: Callable[[Tensor], Tensor] = F.silu) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down, self.activation = nn.Linear(2 * width, width, bias=False), activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate(x)) * self.up(x))


class GeluMLP(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class QuickGeluMLP(GeluMLP):
    """CLIP's."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(h * torch.sigmoid(1.702 * h))


class SquaredReluMLP(GeluMLP):
    """Nemotron's."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)).square())


class Attention(nn.Module):
    def __init__(self, width: int = WIDTH, heads: int = 2) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Residual(nn.Module):
    """x + part(norm(x)) for each part."""

    def __init__(self, *parts: nn.Module, norm: Callable[[], nn.Module] = WrittenRMSNorm) -> None:
        super().__init__()
        self.norms, self.parts = nn.ModuleList(norm() for _ in parts), nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for norm, part in zip(self.norms, self.parts, strict=True):
            x = x + part(norm(x))
        return x


class Llama(nn.Module):
    """Token numbers to logits."""

    def __init__(self, layers: int = 2, words: int = 64, width: int = WIDTH, heads: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList(
            Residual(Attention(width, heads), SwiGLU(width), norm=lambda: WrittenRMSNorm(width)) for _ in range(layers)
        )
        self.norm, self.head = WrittenRMSNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "swiglu": lambda: SwiGLU(),
    "gelu_bias": lambda: GeluMLP(),
    "attention": lambda: Attention(),
    "llama_block": lambda: Residual(Attention(), SwiGLU()),
    "gpt_block": lambda: Residual(Attention(), GeluMLP(), norm=lambda: nn.LayerNorm(WIDTH)),
    "gemma_block": lambda: Residual(
        Attention(), SwiGLU(activation=lambda x: F.gelu(x, approximate="tanh")), norm=GemmaRMSNorm
    ),
}
"""By name; each maps [batch, tokens, 32] to the same shape."""


def another_form() -> None:
    """torch 2.11 has no guard that sees another shape of `.data`, whatever the backend."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        torch._dynamo.reset()
