"""The option "save_weights": what backward has of a weight, and that no bit depends on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from helpers.models.gated_models import INNER, TOKENS, WIDTH, WideMLP
from helpers.models.recipe_cases import RECIPES
from helpers.models.snapshot_models import Block, SwigluMLP, capture_training, compiled_run
from helpers.slow import slow_but
from torch import Tensor, nn
from torch.fx import Graph
from torch.utils.checkpoint import checkpoint

from te_dynamo.errors import InvalidOptionError
from te_dynamo.options import Options
from te_dynamo.recipe import MXFP8BlockScaling
from te_dynamo.testing import capture_on_fake_cuda


@pytest.fixture(autouse=True)
def no_caches() -> Iterator[None]:
    with torch._inductor.config.patch(force_disable_caches=True):
        yield


class Checkpointed(SwigluMLP):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Transposed(nn.Module):
    """Weights stored as [K, N], and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(64, 128)), nn.Parameter(torch.randn(128, 64))
        self.bias = nn.Parameter(torch.randn(128))

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(torch.addmm(self.bias, x, self.up)) @ self.down


class Mixed(SwigluMLP):
    """Weights in fp32, products in bf16."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


def saved(graph: Graph) -> list[Tensor]:
    """What the forward graph returns for backward."""
    values = [node.meta["val"] for node in graph.output_node().args[0][1:]]
    return [value for value in values if isinstance(value, Tensor)]


def test_graphs() -> None:
    graphs = capture_training(SwigluMLP, (128, 64), "cpu", save_weights="original")
    of_weights = {
        phase: "\n".join(line for line in graphs[phase].splitlines() if "te.quantize" in line and ".weight" in line)
        for phase in ("forward", "backward")
    }
    assert_expected_inline(
        of_weights["forward"],
        """\
quantize_stacked: (f8e4m3[256, 64], f32[2]) = te.quantize_stacked([gate.weight, up.weight], e4m3[row], by_columns=False)
quantize: (f8e4m3[64, 128], f32[1]) = te.quantize(down.weight, e4m3[row])""",
    )
    assert_expected_inline(
        of_weights["backward"],
        """\
quantize_1: (f8e4m3[128, 64], f32[1]) = te.quantize(down.weight, e4m3[column])
quantize_stacked: (f8e4m3[64, 256], f32[2]) = te.quantize_stacked([gate.weight, up.weight], e4m3[column], by_columns=False)""",
    )
    assert {tuple(t.shape) for t in saved(graphs.graph("forward")) if t.element_size() == 1} == {(64, 128), (128, 128)}


@pytest.mark.one_fast_case
@pytest.mark.parametrize("recipe", ["float8_current_scaling", "float8_block_scaling", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("model", slow_but(2, [SwigluMLP, Checkpointed, Mixed, Transposed]))
def test_every_bit_is_the_same(model: type[nn.Module], recipe: str) -> None:
    x = torch.randn(32, 64, dtype=torch.float32 if model is Mixed else torch.bfloat16)
    options = {"codegen": "eager", "recipe": next(r for name, r in RECIPES.items() if name.startswith(recipe))}
    expected, actual = (compiled_run(model, {**options, "save_weights": how})(x) for how in ("quantized", "original"))
    assert all(map(torch.equal, actual.outputs, expected.outputs))
    for name, gradient in expected.gradients.items():
        assert torch.equal(actual.gradients[name], gradient), name


@pytest.mark.slow
def test_inductors_code_computes_the_same_bits() -> None:
    x = torch.randn(2, 16, 64, dtype=torch.bfloat16)
    expected, actual = (compiled_run(Block, {"save_weights": how})(x) for how in ("quantized", "original"))
    for name, gradient in expected.gradients.items():
        assert torch.equal(actual.gradients[name], gradient), name


@pytest.mark.one_fast_case
@pytest.mark.parametrize("model", [Checkpointed, Mixed])
def test_of_a_weight_forward_saves_an_input(model: type[nn.Module]) -> None:
    graphs = capture_training(
        model, (512, 64), "cpu", torch.float32 if model is Mixed else torch.bfloat16, save_weights="original"
    )
    weights = {(64, 128), (128, 64), (64, 256), (256, 64)}
    returned = [node for node in graphs.graph("forward").output_node().args[0] if node.op != "placeholder"]
    assert not [node for node in returned if tuple(node.meta["val"].shape) in weights]
    assert graphs["backward"].count("[column]") >= 2


def columns_remade(tokens: int, **options: Any) -> int:
    torch._dynamo.reset()
    graphs = capture_on_fake_cuda(
        lambda: WideMLP().bfloat16(),
        lambda device: (torch.empty(tokens, WIDTH, dtype=torch.bfloat16, device=device, requires_grad=True),),
        options={"codegen": "eager", "rules": [("", "float8_current_scaling")], **options},
    )
    return sum(
        "= te.quantize" in line and "weight" in line and "[column" in line for line in graphs["backward"].splitlines()
    )


@pytest.mark.slow
def test_the_bytes_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight's columns are saved where the activations' columns have saved as many bytes before."""
    # gate and up [2 INNER, WIDTH] against h [tokens, WIDTH], then down [WIDTH, INNER] against its input [tokens, INNER]
    assert columns_remade(WIDTH - 128) == 1, "those of down are too small to be worth a launch"
    monkeypatch.setattr("te_dynamo.passes.dialect.saved_weights.FEWEST_BYTES", 0)
    assert columns_remade(WIDTH // 2) == 2
    assert columns_remade(WIDTH) == 1
    assert columns_remade(2 * INNER + 128) == 0
    assert columns_remade(WIDTH, save_weights="quantized") == 0
    assert columns_remade(TOKENS, save_weights="original") == 2


@pytest.mark.slow
def test_codes_of_both_usages_are_kept_for_backward_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of blocks of 32x32 forward reads what backward does, and that is bytes all the same. No linears of one input are stacked."""
    squares = {"rules": [("", MXFP8BlockScaling(weight_block_dims=2))]}
    monkeypatch.setattr("te_dynamo.passes.dialect.saved_weights.FEWEST_BYTES", 0)
    assert columns_remade(WIDTH // 2, **squares) == 3
    assert columns_remade(4 * TOKENS, **squares) == 0


def test_option() -> None:
    with pytest.raises(InvalidOptionError, match="unknown save_weights 'column'; valid: None, 'original', 'quantized'"):
        Options.parse({"save_weights": "column"})
