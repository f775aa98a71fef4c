"""What the CPU pays for in a step, held: launches by who makes them, calls and allocations of Inductor's code for an H200."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from expecttest import assert_expected_inline
from helpers.models.snapshot_models import kernels_everywhere
from torch import nn

from te_dynamo._compat import torch_version
from te_dynamo.kernels.runtime._triton import INSTALLED
from te_dynamo.testing import capture_on_fake_cuda

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
import generated_code
import live_memory
import models

pytestmark = pytest.mark.skipif(
    not INSTALLED or torch_version() != (2, 13), reason="Inductor's own kernels and allocations are torch 2.13's"
)


def counted(block: models.Block, recipe: str | None) -> str:
    """ "28 launches by torch, ...": of forward and backward, all linears in the recipe, or as torch's own Inductor has it."""

    def make() -> nn.Module:
        with torch.device("meta"):
            return block.make().bfloat16()

    def inputs(device: str) -> tuple[Any, ...]:
        return (torch.empty(block.shape, dtype=torch.bfloat16, device=device, requires_grad=True),)

    with (
        kernels_everywhere(),
        generated_code.generated_code() as graphs,
        mock.patch("torch.nn.functional.scaled_dot_product_attention", live_memory.attention),
    ):
        options = {"recipe": None, "rules": [("", recipe)], **({} if recipe else {"allow_buffer_reuse": True})}
        capture_on_fake_cuda(make, inputs, options=options)
    found = generated_code.launches_and_allocations(graphs)
    return ", ".join(f"{number} {what}" for what, number in sorted(found.items()))


def both(block: models.Block) -> str:
    return "\n".join(f"{name}: {counted(block, recipe)}" for name, recipe in RECIPES.items())


RECIPES = {"bf16": None, "te": "float8_current_scaling"}


@pytest.mark.slow
def test_small_mlp() -> None:
    assert_expected_inline(
        both(models.BLOCKS["small"]),
        """\
bf16: 19 allocations, 6 calls of torch, 12 launches by torch
te: 41 allocations, 6 launches by Triton, 18 launches by torch""",
    )


@pytest.mark.slow
def test_llama_1b() -> None:
    block = models.Block("Llama-1B block", lambda: models.llama_block(2048, 8192, 32, 8), (1, 4096, 2048))
    assert_expected_inline(
        both(block),
        """\
bf16: 31 allocations, 23 calls of torch, 10 launches by torch
te: 72 allocations, 7 calls of ours, 3 calls of torch, 5 launches by Triton, 33 launches by torch""",
    )


@pytest.mark.slow
def test_llama_8b() -> None:
    assert_expected_inline(
        both(models.BLOCKS["llama8b"]),
        """\
bf16: 31 allocations, 23 calls of torch, 10 launches by torch
te: 74 allocations, 12 calls of ours, 3 calls of torch, 35 launches by torch""",
    )
