"""Linears whose weight is a QuantizedTensor: multiplied as it is, with the bits of the weight quantized in each call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import te_dynamo

CURRENT, BLOCKS = "float8_current_scaling", "float8_block_scaling"


class Conv1D(nn.Module):
    """GPT-2's: the weight is [K, N]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(160, 144) / 8), nn.Parameter(torch.randn(144))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


def _quantized(module: nn.Module, recipe: str, columnwise: bool = False) -> nn.Module:
    quantizer = te_dynamo.recipe.by_name(recipe).weight_quantizer().with_usage(True, columnwise)
    for each in module.modules():
        if isinstance(each, (nn.Linear, Conv1D)):
            each.weight = nn.Parameter(quantizer.quantize(each.weight.data))
    return module


def _run(module: nn.Module, autocast: bool = False, **options: Any) -> tuple[list[Tensor], Any]:
    torch._dynamo.reset()
    torch.manual_seed(1)
    x = torch.randn(48, 160, dtype=torch.float32 if autocast else torch.bfloat16, requires_grad=True)
    compiled = torch.compile(module, backend="te", fullgraph=True, options={"codegen": "eager", **options})
    with te_dynamo.capture() as graphs, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = compiled(x)
        y.float().square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())], graphs


def _model(kind: str, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return (Conv1D() if kind == "conv1d" else nn.Linear(160, 144)).to(dtype)


@pytest.mark.one_fast_case
@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("kind", ["linear", "conv1d"])
@pytest.mark.parametrize("recipe", [CURRENT, BLOCKS])
def test_bits(recipe: str, kind: str, columnwise: bool) -> None:
    plain, _ = _run(_model(kind), recipe=recipe)
    given, graphs = _run(_quantized(_model(kind), recipe, columnwise), recipe=recipe)
    assert graphs.reports[0].matches[0].matched
    assert all(torch.equal(one, other) for one, other in zip(given, plain, strict=True))
    assert "te.transpose" in graphs["forward" if kind == "conv1d" else "backward"] or columnwise


def test_snapshot() -> None:
    _, graphs = _run(_quantized(nn.Sequential(nn.Linear(160, 32), nn.GELU(), nn.Linear(32, 16)).bfloat16(), CURRENT))
    wanted = ("te.", "QuantizedTensor")
    shown = [
        line for stage in ("match", "backward") for line in graphs[stage].splitlines() if any(w in line for w in wanted)
    ]
    assert_expected_inline(
        "\n".join(shown),
        """\
0.weight: QuantizedTensor(bf16[32, 160]) = input
2.weight: QuantizedTensor(bf16[16, 32]) = input
linear_with_workspace: (bf16[48, 32], f8e4m3[160, 48], f32[1]) = te.linear_with_workspace(args_0, 0.weight, 0.bias, linear(x e4m3[row+column], w e4m3[row], dy e5m2[row+column]), [getattr, getattr_1])
gelu: bf16[48, 32] = te.gelu(linear_with_workspace[0], 'none')
linear_with_workspace_1: (bf16[48, 16], f8e4m3[32, 48], f32[1]) = te.linear_with_workspace(gelu, 2.weight, 2.bias, linear(x e4m3[row+column], w e4m3[row], dy e5m2[row+column]), [getattr_2, getattr_3])
quantize_bias_grad: (f32[16], f8e5m2[48, 16], f8e5m2[16, 48], f32[1]) = te.quantize_bias_grad(tangents_1, e5m2[row+column])
gemm_1: bf16[16, 32] = te.gemm([quantize_bias_grad[2], quantize_bias_grad[3]], e5m2[column], [activation_quantize[1], activation_quantize[2]], e4m3[column], bf16, fast_accum=False)
transpose: f8e4m3[32, 16] = te.transpose(primals_5)
gemm_2: bf16[48, 32] = te.gemm([quantize_bias_grad[1], quantize_bias_grad[3]], e5m2[row], [transpose, primals_6], e4m3[column], bf16, fast_accum=False)
activation_backward_quantize: (f32[32], f8e5m2[48, 32], f32[1]) = te.activation_backward_quantize(gemm_2, gemm, 'gelu', e5m2[row], keep_output=False, bias_grad=True)
transpose_1: f8e5m2[32, 48] = te.transpose(activation_backward_quantize[1])
gemm_3: bf16[32, 160] = te.gemm([transpose_1, activation_backward_quantize[2]], e5m2[column], [quantize[1], quantize[2]], e4m3[column], bf16, fast_accum=False)
transpose_2: f8e4m3[160, 32] = te.transpose(primals_1)
gemm_4: bf16[48, 160] = te.gemm([activation_backward_quantize[1], activation_backward_quantize[2]], e5m2[row], [transpose_2, primals_2], e4m3[column], bf16, fast_accum=False)""",
    )


def test_under_autocast() -> None:
    """Codes of fp32 values are multiplied by bf16's; the weight's gradient is in its own dtype."""
    given, graphs = _run(_quantized(_model("linear", torch.float32), CURRENT), autocast=True)
    assert graphs.reports[0].matches[0].matched
    assert given[0].dtype == torch.bfloat16 and given[2].dtype == torch.float32
    exact = _model("linear", torch.float32)
    plain, _ = _run(exact, autocast=True)
    for one, other in zip(given, plain, strict=True):
        assert (one.float() - other.float()).norm() <= 0.05 * other.float().norm()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"rules": [("", BLOCKS)]},
            "its weight is FP8 (e4m3) with a scale per tensor; float8_block_scaling multiplies by FP8 (e4m3) with a scale per block of "
            "128x128",
        ),
        ({"recipe": None}, "recipe is None"),
    ],
)
def test_another_recipe(options: dict[str, Any], reason: str) -> None:
    """The values are dequantized, as the user's line says."""
    module = _quantized(_model("linear"), CURRENT)
    given, graphs = _run(module, **options)
    assert graphs.reports[0].matches[0].reason == reason
    x = torch.randn(48, 160, dtype=torch.bfloat16, generator=torch.manual_seed(1))
    expected = nn.functional.linear(x, module.weight.dequantize(), module.bias)
    torch.testing.assert_close(given[0], expected, rtol=0.02, atol=0.02)


@pytest.mark.one_fast_case
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "float8_rowwise"])
@pytest.mark.parametrize("given", [CURRENT, "the weight's"])
def test_rows_whose_codes_are_not_the_columns(recipe: str, given: str) -> None:
    """Forward multiplies the codes, backward the dequantized weight."""
    module = _quantized(nn.Linear(160, 160, bias=False).bfloat16(), recipe).requires_grad_(False)
    (y, dx, *_), graphs = _run(module, recipe=recipe if given != CURRENT else CURRENT)
    (match,) = graphs.reports[0].matches
    assert match.matched and match.recipe == f"{recipe}(backward='high_precision')"
    assert "te.gemm" in graphs["forward"] and "te." not in graphs["backward"]
    torch.testing.assert_close(dx, (2 * y.float()).bfloat16() @ module.weight.dequantize())
