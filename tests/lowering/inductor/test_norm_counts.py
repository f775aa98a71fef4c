"""What fused norms save under autocast: launches and their bytes, in Inductor's code for an H200."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from helpers.models.snapshot_models import kernels_everywhere
from torch import Tensor, nn

from te_dynamo._compat import torch_version
from te_dynamo.kernels.runtime._triton import INSTALLED
from te_dynamo.passes.torch_ir.match import bodies
from te_dynamo.passes.torch_ir.match.patterns.norm import match_norm
from te_dynamo.testing import capture_on_fake_cuda

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
import generated_code
import live_memory

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not INSTALLED or torch_version() != (2, 13), reason="Inductor's own kernels and allocations are torch 2.13's"
    ),
]

WIDTH, HEADS = 2048, 16


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class MLP(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU("tanh"), nn.Linear(4 * WIDTH, WIDTH))


class ViT(nn.Module):
    """Two blocks in fp32, under bf16 autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.layers = nn.ModuleList(layer() for layer in (Attention, MLP) * 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            for norm, layer in zip(self.norms, self.layers, strict=True):
                x = x + layer(norm(x))
        return x


def counted(model: type[nn.Module], dtype: torch.dtype, without: Any = None) -> str:
    """Of forward and backward, "12 launches by torch, ..., 130 MB"; `without` one matcher."""

    def make() -> nn.Module:
        with torch.device("meta"):
            return model().to(dtype)

    def inputs(device: str) -> tuple[Tensor, ...]:
        return (torch.empty(2, 4096, WIDTH, dtype=dtype, device=device, requires_grad=True),)

    matchers = tuple(matcher for matcher in bodies._AFTER_LINEARS if matcher is not without)
    with (
        kernels_everywhere(),
        generated_code.generated_code() as graphs,
        mock.patch.object(bodies, "_AFTER_LINEARS", matchers),
        mock.patch("torch.nn.functional.scaled_dot_product_attention", live_memory.attention),
    ):
        capture_on_fake_cuda(make, inputs, options={"rules": [("", "float8_current_scaling")]})
    found = generated_code.launches_and_allocations(graphs)
    launches = sum(number for what, number in found.items() if what.startswith("launches"))
    return f"{launches} launches, {generated_code.launch_bytes(graphs) / 1e6:.0f} MB"


def both(model: type[nn.Module], dtype: torch.dtype, matcher: Any) -> str:
    return f"Inductor's norms: {counted(model, dtype, matcher)}\nfused: {counted(model, dtype)}"


def test_vit_under_autocast() -> None:
    assert_expected_inline(
        both(ViT, torch.float32, match_norm),
        """\
Inductor's norms: 106 launches, 8210 MB
fused: 102 launches, 8076 MB""",
    )
