"""The activations as formulas in fp32: f and f', which Inductor compiles into what stands around them."""

from __future__ import annotations

import math

import torch

_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
_QUICK = 1.702


def value(x: torch.Tensor, kind: str) -> torch.Tensor:
    """f(x) in fp32: "sigmoid", "gelu" (erf), "gelu_tanh", "qgelu", "relu", "srelu" or "silu"."""
    if kind == "sigmoid":
        return torch.sigmoid(x)
    if kind in ("gelu", "gelu_tanh"):
        return torch.nn.functional.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")
    if kind == "qgelu":
        return x * torch.sigmoid(_QUICK * x)
    if kind == "relu":
        return torch.relu(x)
    if kind == "srelu":
        return torch.relu(x).square()
    assert kind == "silu", kind
    return x * torch.sigmoid(x)


def derivative(x: torch.Tensor, kind: str) -> torch.Tensor:
    """f'(x) in fp32."""
    if kind == "sigmoid":
        s = torch.sigmoid(x)
        return s * (1 - s)
    if kind == "gelu":
        return 0.5 * (1 + torch.erf(x * math.sqrt(0.5))) + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    if kind == "gelu_tanh":
        t = torch.tanh(_SQRT_2_OVER_PI * (x + 0.044715 * x * x * x))
        return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * _SQRT_2_OVER_PI * (1 + 3 * 0.044715 * x * x)
    if kind == "qgelu":
        s = torch.sigmoid(_QUICK * x)
        return s + _QUICK * x * s * (1 - s)
    if kind == "relu":
        return (x > 0).to(x.dtype)
    if kind == "srelu":
        return 2 * torch.relu(x)
    assert kind == "silu", kind
    s = torch.sigmoid(x)
    return s + x * s * (1 - s)
