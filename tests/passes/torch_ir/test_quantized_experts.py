"""Experts whose weights are one QuantizedTensor: te.grouped_linear multiplies its codes and scales as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_dynamo
from te_dynamo.weights.checkpoint.kinds import KINDS


class Experts(nn.Module):
    """transposed: the weight is [E, K, N], as gpt-oss has it, and not [E, N, K]."""

    def __init__(self, transposed: bool, n: int = 128) -> None:
        super().__init__()
        shape = (3, 288, n) if transposed else (3, n, 288)
        self.weight = nn.Parameter(torch.randn(shape).bfloat16() / 16, requires_grad=False)
        self.transposed = transposed

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        return F.grouped_mm(x, self.weight if self.transposed else self.weight.transpose(-2, -1), offs=offs)


OFFS = torch.tensor([16, 16, 48], dtype=torch.int32)


def _run(model: nn.Module, x: Tensor, **options: Any) -> tuple[Tensor, Any]:
    torch._dynamo.reset()
    with te_dynamo.capture() as graphs:
        y = torch.compile(model, backend="te", fullgraph=True, options={"codegen": "eager", **options})(x, OFFS)
        if y.requires_grad:
            y.float().square().sum().backward()
    return y.detach(), graphs


def _stored(model: Experts, kind: str, powers_of_two: bool) -> None:
    quantizer = KINDS[kind].quantizer(3, powers_of_two, model.transposed)
    model.weight = nn.Parameter(quantizer.quantize(model.weight.data), requires_grad=False)


CASES = {
    "tensor": ("float8_current_scaling", False),
    "row": ("float8_rowwise", False),
    "block": ("float8_block_scaling", False),
    "mxfp8": ("mxfp8", False),
    "mxfp8 transposed": ("mxfp8", True),
}


@pytest.mark.one_fast_case
@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_the_weight_quantized_in_the_call(case: str) -> None:
    recipe, transposed = CASES[case]
    model, x = Experts(transposed), torch.randn(48, 288).bfloat16()
    expected, _ = _run(model, x, recipe=recipe)
    _stored(model, case.split()[0], recipe == "float8_block_scaling")
    for given in (recipe, "float8_current_scaling"):  # the weight decides
        y, graphs = _run(model, x, recipe=given)
        (match,) = graphs.reports[0].matches
        assert match.matched and match.recipe == recipe and match.groups == 3
        assert "te.grouped_gemm" in graphs["inference"] and torch.equal(y, expected)


def test_snapshot_of_what_is_read() -> None:
    model = Experts(False)
    _stored(model, "block", True)
    _, graphs = _run(model, torch.randn(48, 288).bfloat16())
    assert "dequantize" not in graphs["inference"] and graphs["inference"].count("te.quantize") == 1  # of x


@pytest.mark.one_fast_case
@pytest.mark.parametrize("case", CASES)
def test_gradient_of_tokens(case: str) -> None:
    """In the recipe by columns that are made of the rows, where they are the same codes; else by the dequantized weight."""
    recipe, transposed = CASES[case]
    model, values = Experts(transposed), torch.randn(56, 288).bfloat16()
    x, given = (values.clone().requires_grad_() for _ in range(2))
    quantized = "tensor" in case or "block" in case
    expected, _ = _run(model, x, recipe=recipe)
    _stored(model, case.split()[0], recipe == "float8_block_scaling")
    y, graphs = _run(model, given, recipe=recipe)
    (match,) = graphs.reports[0].matches
    assert match.matched and match.recipe == recipe + "(backward='high_precision')" * (not quantized)
    assert torch.equal(y, expected) and ("te.grouped_gemm" in graphs["backward"]) == quantized
    if not quantized:
        weight = model.weight.dequantize()
        dx = F.grouped_mm((2 * y.float()).bfloat16(), weight.mT if transposed else weight, offs=OFFS)
        x.grad = torch.cat((dx[:48], torch.zeros(8, 288).bfloat16()))
    assert torch.equal(given.grad, x.grad) and given.grad.any()


def test_what_stays_has_a_reason() -> None:
    def reason(model: Experts, x: Tensor, **options: Any) -> str:
        y, graphs = _run(model, x, **options)
        expected = F.grouped_mm(x.detach(), model.weight.dequantize().mT, offs=OFFS)
        torch.testing.assert_close(y, expected, rtol=0.02, atol=0.02)
        return graphs.reports[0].matches[0].reason

    x = torch.randn(48, 288).bfloat16()
    model = Experts(False)
    _stored(model, "block", True)
    there = "its weight is FP8 (e4m3) with a scale per block of 128x128"
    assert (
        reason(model, x, rules=[("", "mxfp8")]) == f"{there}; mxfp8 multiplies by MXFP8 with a scale per block of 1x32"
    )
    packed = Experts(False)
    _stored(packed, "nvfp4", False)
    without = "a grouped GEMM of a mixture's experts; nvfp4(weight_block_dims=1): there is no grouped GEMM for it"
    assert reason(packed, x) == without
    assert reason(model, x, rules=[("", None)]) == "rule '' leaves it in the model's precision"
    model.weight.requires_grad_()
    assert reason(model, x) == "its weight is quantized already, and learns"
    ragged = Experts(False, n=2000)
    _stored(ragged, "mxfp8", False)
    assert reason(ragged, x) == "its weight [3, 2000, 288] is quantized already, and has to be padded"


@pytest.mark.slow
def test_fp32_tokens_that_learn() -> None:
    """What transformers calls there. torch's grouped_mm takes bf16, so that experts whose dgrad would be one stay what they are."""
    pytest.importorskip("transformers.integrations.moe")
    fallback = torch.ops.transformers.grouped_mm_fallback
    for kind, reason in (
        ("tensor", ""),
        ("row", "backward multiplies by the values of its quantized weight, in fp32; torch's grouped_mm takes bf16"),
    ):
        model, x = Experts(False), torch.randn(48, 288, requires_grad=True)
        model.weight.data = model.weight.data.float()
        _stored(model, kind, False)
        model.forward = lambda x, offs, weight=model.weight: fallback(x, weight.mT, offs)
        _, graphs = _run(model, x)
        assert graphs.reports[0].matches[0].reason == reason and x.grad.isfinite().all()
