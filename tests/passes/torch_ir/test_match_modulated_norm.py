"""Stage 1 on adaLN: a LayerNorm scaled and shifted by what the model computed for each sample."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from helpers.graphs.matching import Matched
from torch import nn

from te_dynamo.testing import capture_on_fake_cuda

torch.manual_seed(0)

WEIGHT = torch.randn(16, 32)
EPS = 1e-06


def norm(x):
    return F.layer_norm(x, x.shape[-1:], eps=EPS)


def dit(x, scale, shift):
    return norm(x) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def pixart(x, scale, shift):
    scale, shift = scale[:, None], shift[:, None]
    return norm(x) * (1 + scale) + shift


def continuous(x, scale, shift):
    return shift[:, None, :] + (1 + scale)[:, None, :] * norm(x)


def in_fp32(x, scale, shift):
    return F.layer_norm(x.float(), x.shape[-1:], eps=EPS).to(x.dtype) * (scale.unsqueeze(1) + 1) + shift.unsqueeze(1)


def wan(x, scale, shift):
    """Of diffusers: the norm of x in fp32, times and plus fp32, one cast at the end."""
    normed = F.layer_norm(x.float().float(), x.shape[-1:], eps=EPS).to(torch.float32)
    return (normed * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)).type_as(x)


def test_all_in_fp32_with_one_cast():
    compiled = Matched(
        lambda x, scale, shift: F.linear(wan(x, scale, shift), WEIGHT.float()), run="te", codegen="eager"
    )
    x, scale, shift = torch.randn(3, 5, 32), torch.randn(3, 32), torch.randn(3, 32)
    compiled(x, scale, shift)
    assert f"te.layer_norm_modulate(x, unsqueeze, unsqueeze_1, {EPS}, True)" in compiled.text()
    assert compiled.reasons("layer_norm_modulate") == [""]


def test_of_16_bits_all_in_fp32_is_left():
    compiled = Matched(lambda x, scale, shift: F.linear(wan(x, scale, shift), WEIGHT.bfloat16()))
    compiled(torch.randn(3, 5, 32, dtype=torch.bfloat16), torch.randn(3, 32), torch.randn(3, 32))
    reason = "it is fp32 of a bf16 input, of which backward would save a copy; left to Inductor"
    assert [(r.kind, r.reason) for r in compiled.records] == [("layer_norm_modulate", reason), ("linear", "")]
    assert "te.layer_norm" not in compiled.text()


@pytest.mark.parametrize(
    ("modulated", "call"),
    [
        (dit, f"te.layer_norm_modulate(x, unsqueeze, unsqueeze_1, {EPS}, True)"),
        (pixart, f"te.layer_norm_modulate(x, scale, shift, {EPS}, True)"),
        (continuous, f"te.layer_norm_modulate(x, getitem_1, getitem, {EPS}, False)"),
        (in_fp32, f"te.layer_norm_modulate(x, unsqueeze, unsqueeze_1, {EPS}, True)"),
    ],
)
def test_spellings(modulated, call):
    compiled = Matched(lambda x, scale, shift: F.linear(modulated(x, scale, shift), WEIGHT), run="aot")
    args = [torch.randn(shape, requires_grad=True) for shape in ((3, 5, 32), (3, 32), (3, 32))]
    y, expected = compiled(*args), F.linear(modulated(*args), WEIGHT)
    torch.testing.assert_close(y, expected)
    for actual, wanted in zip(*(torch.autograd.grad(t.square().sum(), args) for t in (y, expected)), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)
    assert call in compiled.text() and " = layer_norm(" not in compiled.text()
    assert [(record.kind, record.reason) for record in compiled.records] == [
        ("layer_norm_modulate", ""),
        ("linear", ""),
    ]


@pytest.mark.parametrize(
    ("forward", "kind", "reason"),
    [
        (
            lambda x, s: F.linear(norm(x) * (1 + s) + s, WEIGHT).sum() + (norm(x) * s + s).sum(),
            "layer_norm_modulate",
            "no FP8",
        ),
        (lambda x, s: F.linear((n := norm(x)) * (1 + s) + s, WEIGHT).sum() + n.sum(), "layer_norm", "no FP8"),
        (lambda x, s: F.linear(norm(x) * (1 + s[:1]) + s, WEIGHT), "layer_norm", "no FP8"),
        (lambda x, s: F.linear(norm(x) * (1 + x) + s, WEIGHT), "layer_norm", "no FP8"),
    ],
    ids=["nobody reads it", "the norm is read too", "one row for all samples", "a row for each row"],
)
def test_left(forward, kind, reason):
    compiled, (x, s) = Matched(forward), (torch.randn(3, 5, 32), torch.randn(3, 1, 32))
    torch.testing.assert_close(compiled(x, s), forward(x, s))
    assert any(r.kind == kind and r.reason.startswith(reason) for r in compiled.records)


class Block(nn.Module):
    """The MLP of a DiT block."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=EPS)
        self.ada, self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, c):
        shift, scale, gate = self.ada(F.silu(c)).chunk(3, dim=1)
        h = self.norm(x) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)
        return x + gate.unsqueeze(1) * self.down(F.gelu(self.up(h), approximate="tanh"))


def test_it_writes_fp8():
    graphs = capture_on_fake_cuda(
        lambda: Block().bfloat16(),
        lambda device: tuple(
            torch.empty(*shape, dtype=torch.bfloat16, device=device, requires_grad=True)
            for shape in ((8, 1024, 256), (8, 256))
        ),
        options={"codegen": "eager"},
    )
    lines = [line for line in graphs["forward"].splitlines() if "layer_norm" in line or " = te.quantize(" in line]
    assert_expected_inline(
        "\n".join(lines),
        """\
quantize: (f8e4m3[768, 256], f8e4m3[256, 768], f32[1]) = te.quantize(ada.weight, e4m3[row+column])
layer_norm_modulate_quantize: (f32[8192], f32[8192], f8e4m3[8192, 256], f8e4m3[256, 8192], f32[1]) = te.layer_norm_modulate_quantize(x, unsqueeze, unsqueeze_1, 1e-06, zero_centered=True, quantizer=e4m3[row+column], keep_output=False)
quantize_1: (f8e4m3[256, 256], f8e4m3[256, 256], f32[1]) = te.quantize(up.weight, e4m3[row+column])
gemm_1: bf16[8192, 256] = te.gemm([layer_norm_modulate_quantize[2], layer_norm_modulate_quantize[4]], e4m3[row], [quantize_1[0], quantize_1[2]], e4m3[row], bf16, fast_accum=False, bias=up.bias)
quantize_2: (f8e4m3[256, 256], f8e4m3[256, 256], f32[1]) = te.quantize(down.weight, e4m3[row+column])
view_2: f32[8, 1024, 1] = aten.view(layer_norm_modulate_quantize[1], [8, 1024, 1])
view_3: f32[8, 1024, 1] = aten.view(layer_norm_modulate_quantize[0], [8, 1024, 1])
return add, c, x, activation_quantize[1], activation_quantize[2], quantize[1], quantize[2], unsqueeze, unsqueeze_2, layer_norm_modulate_quantize[3], layer_norm_modulate_quantize[4], quantize_1[1], quantize_1[2], view, activation_quantize_1[1], activation_quantize_1[2], quantize_2[1], quantize_2[2], gemm_2, view_2, view_3""",
    )


@pytest.mark.slow
def test_fused_has_the_bits_of_unfused():
    model = Block(64).bfloat16()
    args = [torch.randn(shape).bfloat16().requires_grad_() for shape in ((3, 32, 64), (3, 64))]
    results = []
    for fusions in (True, False):
        torch._dynamo.reset()
        y = torch.compile(model, backend="te", options={"codegen": "eager", "fusions": fusions})(*args)
        results.append([y, *torch.autograd.grad(y.square().sum(), [*args, *model.parameters()])])
    for fused, unfused in zip(*results, strict=True):
        assert torch.equal(fused, unfused)
