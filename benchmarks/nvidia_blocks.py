"""The measured blocks of Transformer Engine's modules: norms, linears and MLPs are its own; attention is torch's, as in the blocks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from models import GatedMLP, GeluMLP, GroupedQueryAttention
from torch import nn

RMS_NORM = {"eps": 1e-5, "bias": False, "normalization": "RMSNorm"}
"""Of a module that begins with one and has no biases."""


class Residual(nn.Module):
    """x + module(x)."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.module(x)


class Attention(nn.Module):
    """models.GroupedQueryAttention without its residual: the norm with q, k and v is one module, o another."""

    def __init__(self, block: GroupedQueryAttention, library: Any, **made: Any) -> None:
        super().__init__()
        width, self.head_width = block.o_proj.in_features, block.head_width
        self.widths = [projection.out_features for projection in (block.q_proj, block.k_proj, block.v_proj)]
        self.qkv = library.LayerNormLinear(width, sum(self.widths), **RMS_NORM, **made)
        self.o = library.Linear(width, width, bias=False, **made)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in self.qkv(x).split(self.widths, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(mixed.transpose(1, 2).flatten(-2))


class Inside(nn.Module):
    """A module that runs in a context."""

    def __init__(self, module: nn.Module, context: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.module, self.context = module, context

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.context():
            return self.module(x)


def converted(block: nn.Module, library: Any) -> nn.Module:
    """The block of the library's modules, with its values. Parameters come in the same order, where those of a fused linear are one.

    library: transformer_engine.pytorch, or what has modules of these names. Raises TypeError for a block that has no such modules.
    """
    if isinstance(block, nn.Sequential):
        return nn.Sequential(*(converted(part, library) for part in block))
    values = list(block.parameters())
    made = {"params_dtype": values[0].dtype, "device": values[0].device}
    module: nn.Module
    if type(block) is GatedMLP:
        sizes = block.down_proj.out_features, block.down_proj.in_features
        module = library.LayerNormMLP(*sizes, activation="swiglu", **RMS_NORM, **made)
    elif type(block) is GeluMLP:
        module = library.LayerNormMLP(block.fc1.in_features, block.fc1.out_features, activation="gelu", **made)
    elif type(block) is GroupedQueryAttention:
        module = Attention(block, library, **made)
    else:
        raise TypeError(f"{type(block).__name__} has no module in Transformer Engine")
    fill(list(module.parameters()), values)
    return Residual(module)


def fill(parameters: list[nn.Parameter], values: list[nn.Parameter]) -> None:
    """Copies the values in order; a parameter of several values takes them below one another."""
    remaining = iter(values)
    with torch.no_grad():
        for parameter in parameters:
            rows = next(remaining)
            while rows.shape != parameter.shape:
                rows = torch.cat([rows, next(remaining)])
            parameter.copy_(rows)
