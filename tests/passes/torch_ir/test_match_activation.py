"""Stage 1 on activations: gelu, silu, relu, quick_gelu, relu2 and swiglu in their spellings, and where they are left."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from helpers.graphs.matching import Matched
from helpers.models.small_models import QuickGeluMLP, SquaredReluMLP
from torch import nn

import te_dynamo
from te_dynamo.testing import capture_on_fake_cuda

torch.manual_seed(0)

WEIGHT = torch.randn(32, 32)
ROOT = math.sqrt(2 / math.pi)


@pytest.mark.parametrize(
    ("activation", "call"),
    [
        (F.gelu, "te.gelu(x, 'none')"),
        (nn.GELU("tanh"), "te.gelu(x, 'tanh')"),
        (lambda x: F.gelu(x, approximate="tanh"), "te.gelu(x, 'tanh')"),
        (F.silu, "te.silu(x)"),
        (nn.SiLU(), "te.silu(x)"),
        (lambda x: x * torch.sigmoid(x), "te.silu(x)"),
        (lambda x: x.sigmoid().mul(x), "te.silu(x)"),
        (F.relu, "te.relu(x)"),
        (torch.relu, "te.relu(x)"),
        (lambda x: x.relu(), "te.relu(x)"),
        (lambda x: x * torch.sigmoid(1.702 * x), "te.quick_gelu(x)"),
        (lambda x: x * torch.sigmoid(x * 1.702), "te.quick_gelu(x)"),
        (lambda x: torch.sigmoid(1.702 * x) * x, "te.quick_gelu(x)"),
        (lambda x: torch.sigmoid(x * 1.702) * x, "te.quick_gelu(x)"),
        (lambda x: x.mul(x.mul(1.702).sigmoid()), "te.quick_gelu(x)"),
        (lambda x: 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0)))), "te.gelu(x, 'tanh')"),
        (lambda x: x * 0.5 * (1 + (ROOT * (x + 0.044715 * x**3)).tanh()), "te.gelu(x, 'tanh')"),
        (lambda x: 0.5 * x * (1 + torch.tanh(x * 0.7978845608 * (1 + 0.044715 * x * x))), "te.gelu(x, 'tanh')"),
        (lambda x: x * (1 + F.tanh(0.79788456 * x * (1 + x.square() * 0.044715))) / 2, "te.gelu(x, 'tanh')"),
        (lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))), "te.gelu(x, 'none')"),
        (lambda x: (x / 2).mul(x.mul(0.5**0.5).erf().add(1)), "te.gelu(x, 'none')"),
        (lambda x: F.relu(x).square(), "te.relu2(x)"),
        (lambda x: torch.square(x.relu()), "te.relu2(x)"),
        (lambda x: torch.pow(F.relu(x), 2), "te.relu2(x)"),
        (lambda x: F.relu(x + x.cos()) ** 2, "te.relu2(add)"),
        (lambda x: (h := torch.relu(x)) * h, "te.relu2(x)"),
        (lambda x: x.clamp(min=0).square(), "te.relu2(x)"),
        (lambda x: torch.clamp(x, 0) ** 2, "te.relu2(x)"),
        (lambda x: torch.square(x.clamp_min(0.0)), "te.relu2(x)"),
        (lambda x: F.silu(x) * x.cos(), "te.gated(x, cos, 'silu')"),
        (lambda x: F.gelu(x) * x.cos(), "te.gated(x, cos, 'gelu')"),
        (lambda x: x.cos() * F.gelu(x, approximate="tanh"), "te.gated(x, cos, 'gelu_tanh')"),
        (lambda x: nn.GELU("tanh")(x) * x.cos(), "te.gated(x, cos, 'gelu_tanh')"),
        (lambda x: x.relu() * x.cos(), "te.gated(x, cos, 'relu')"),
        (lambda x: x * torch.sigmoid(1.702 * x) * x.cos(), "te.gated(x, cos, 'quick_gelu')"),
        (lambda x: x.cos() * F.silu(x), "te.gated(x, cos, 'silu')"),
        (lambda x: x * torch.sigmoid(x) * x.cos(), "te.gated(x, cos, 'silu')"),
        (lambda x: x.cos() * (torch.sigmoid(x) * x), "te.gated(x, cos, 'silu')"),
    ],
)
def test_spellings(activation, call):
    compiled = Matched(lambda x: F.linear(activation(x), WEIGHT), run="aot")
    x = torch.randn(4, 32, requires_grad=True)
    y = compiled(x)
    torch.testing.assert_close(y, F.linear(activation(x), WEIGHT))
    y.sum().backward()
    assert call in compiled.text()
    assert [record.matched for record in compiled.records] == [True, True]
    assert not any(function in compiled.text() for function in ("sigmoid", "tanh(", "erf(", "= relu(", "= silu("))


def gpt_oss(h):
    """Its experts' gate."""
    gate, up = h[..., ::2].clamp(min=None, max=7.0), h[..., 1::2].clamp(min=-7.0, max=7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def quick_gelu(x):
    return x * torch.sigmoid(1.702 * x)


@pytest.mark.parametrize(
    "formula",
    [
        lambda x: x * torch.sigmoid(1.7 * x),
        lambda x: x * torch.sigmoid(1.702 * x.cos()),
        lambda x: x * (s := torch.sigmoid(1.702 * x)) + s,
        lambda x: x * torch.sigmoid(s := 1.702 * x) + s,
    ],
    ids=["another factor", "another tensor", "the sigmoid is read", "the multiple is read"],
)
def test_what_is_no_quick_gelu(formula):
    compiled, x = Matched(lambda x: F.linear(formula(x), WEIGHT)), torch.randn(4, 32)
    torch.testing.assert_close(compiled(x), F.linear(formula(x), WEIGHT))
    assert {record.kind for record in compiled.records} == {"linear"} and "te.quick_gelu" not in compiled.text()


@pytest.mark.parametrize(
    "formula",
    [
        lambda x: 0.5 * x * (1 + torch.tanh(ROOT * (x + 0.04 * x**3))),
        lambda x: 0.5 * x * (1 + torch.erf(x)),
        lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))) * x,
        lambda x: 0.5 * x.cos() * (1 + torch.erf(x / math.sqrt(2))),
        lambda x: 0.5 * x * torch.add(1 + 0 * x, torch.erf(x / math.sqrt(2)), alpha=2),
        lambda x: 0.5 * x * (1 + (t := torch.erf(x / math.sqrt(2)))) + t,
        lambda x: torch.relu(x) ** 2.5,
        lambda x: torch.relu(x) * x.cos(),
        lambda x: x.clone().relu_().square(),
        lambda x: x.clamp(min=0, max=1).square(),
        lambda x: x.clamp(min=0.1).square(),
        lambda x: x.clamp(max=0).square(),
    ],
)
def test_what_is_no_formula(formula):
    compiled, x = Matched(lambda x: F.linear(formula(x), WEIGHT)), torch.randn(4, 32)
    torch.testing.assert_close(compiled(x), F.linear(formula(x), WEIGHT))
    assert "te.gelu" not in compiled.text() and "te.relu2" not in compiled.text()


@pytest.mark.parametrize(("mlp", "kind"), [(QuickGeluMLP, "quick_gelu"), (SquaredReluMLP, "relu2")])
def test_the_activation_writes_fp8_forward_and_backward(mlp, kind):
    graphs = capture_on_fake_cuda(
        lambda: mlp(256).bfloat16(),
        lambda device: (torch.empty(8192, 256, dtype=torch.bfloat16, device=device, requires_grad=True),),
        options={"codegen": "eager"},
    )
    forward, backward = graphs["forward"], graphs["backward"]
    assert "te.activation_quantize(" in forward and forward.count(f"'{kind}'") == 1
    assert "te.activation_backward_quantize(" in backward and backward.count(f"'{kind}'") == 1


class Exportable(nn.Module):
    """A norm and an activation of each kind, each next to a linear; nothing else reads their results."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_norm, self.rms_norm = nn.LayerNorm(32), nn.RMSNorm(32, eps=1e-5)
        self.linears = nn.ModuleList(nn.Linear(32, 32) for _ in range(9))

    def forward(self, x):
        a, b, c, d, e, f, g, h, i = self.linears
        x = d(F.relu(c(F.silu(b(F.gelu(a(self.layer_norm(x)), approximate="tanh"))))))
        x = e(F.silu(x) * x.cos())
        x = g(0.5 * (y := f(x)) * (1 + torch.tanh(ROOT * (y + 0.044715 * y**3))))
        x = h(quick_gelu(x).view(-1, 32)) + h(x.relu().square().flatten(0, 1))
        return i(cohere(self.rms_norm(x)))


def cohere(x):
    f = x.float()
    mean = f.mean(-1, keepdim=True)
    return ((f - mean) * torch.rsqrt((f - mean).pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def test_an_exported_module_is_matched_as_the_module_is():
    model, x = Exportable().bfloat16(), torch.randn(2, 8, 32, dtype=torch.bfloat16)
    plain, exported = Matched(model), Matched(torch.export.export(model, (x,)).module())
    torch.testing.assert_close(exported(x), plain(x))
    kinds = [(record.kind, record.matched, record.reason) for record in plain.records]
    assert [(record.kind, record.matched, record.reason) for record in exported.records] == kinds
    assert sum(matched for _, matched, _ in kinds) == 10 + 9, (
        "linears; activations and norms, but the norm that no linear reads"
    )


class GLU(nn.Module):
    """Phi-3's MLP: gate and up in one linear."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(32, 128, bias=False), nn.Linear(64, 32, bias=False)
        self.act = nn.SiLU()

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(up * self.act(gate))


def test_packed_gate_and_up_snapshot():
    compiled, x = Matched(GLU(), run="aot"), torch.randn(4, 32)
    torch.testing.assert_close(compiled(x), compiled.module(x))
    assert_expected_inline(
        compiled.text(),
        """\
linear_default = te.linear(x, gate_up_weight, None, dx=False dw=True)
getitem_2: float32[4, 128] = getitem(linear_default, 0)
chunk = getitem_2.chunk(2, dim=-1)
gate: float32[4, 64] = getitem(chunk, 0)
up: float32[4, 64] = getitem(chunk, 1)
gated_default: float32[4, 64] = te.gated(gate, up, 'silu')
linear_default_1 = te.linear(gated_default, down_weight, None, dx=True dw=True)
getitem_3: float32[4, 32] = getitem(linear_default_1, 0)
return (getitem_3)""",
    )


def test_reads_a_linear_is_enough():
    compiled = Matched(lambda x: F.gelu(F.linear(x, WEIGHT).view(2, 2, 32)).sum())
    compiled(torch.randn(4, 32))
    assert compiled.reasons("gelu") == [""]


@pytest.mark.parametrize(
    ("forward", "kind", "reason"),
    [
        (lambda x: F.gelu(x), "gelu", "no FP8 linear reads its output; left to Inductor"),
        (lambda x: F.linear(F.relu(x.clone(), inplace=True), WEIGHT), "relu", "its relu works in place"),
        (lambda x: F.linear(F.silu(x.clone(), True), WEIGHT), "silu", "its silu works in place"),
        (lambda x: F.linear(x.clone().relu_(), WEIGHT), "relu", "its relu_ works in place"),
        (lambda x: F.linear((s := F.silu(x)) * x.cos() + s, WEIGHT), "gated silu", "its intermediate value"),
        (lambda x: quick_gelu(x), "quick_gelu", "no FP8 linear reads its output; left to Inductor"),
        (lambda x: F.linear(F.mish(x), WEIGHT), "mish", "te_dynamo has no kernel of mish; left to Inductor"),
        (lambda x: nn.Hardswish()(F.linear(x, WEIGHT)), "hardswish", "te_dynamo has no kernel of hardswish; left to"),
        (
            lambda x: F.linear(gpt_oss(F.linear(x, WEIGHT)), WEIGHT[:, :16]),
            "gated quick_gelu",
            "it clamps its gate first",
        ),
        (lambda x: F.linear(quick_gelu(x.double()), WEIGHT.double()), "quick_gelu", "its input is fp64"),
        (lambda x: F.linear(F.relu(x.double()), WEIGHT.double()), "relu", "its input is fp64"),
    ],
)
def test_left_with_the_reason(forward, kind, reason):
    compiled, x = Matched(forward), torch.randn(4, 32)
    torch.testing.assert_close(compiled(x), forward(x))
    assert compiled.reasons(kind)[0].startswith(reason) and f"te.{kind}" not in compiled.text()


def linear_then(gate) -> Matched:
    """gate(F.linear(x)), which a linear reads; trained once, and its numbers are the formula's."""
    forward = lambda x: F.linear(gate(F.linear(x, WEIGHT)), WEIGHT)  # noqa: E731
    compiled, x = Matched(forward, run="aot"), torch.randn(4, 32, requires_grad=True)
    y = compiled(x)
    torch.testing.assert_close(y, forward(x))
    y.sum().backward()
    return compiled


@pytest.mark.parametrize(
    "gate",
    [lambda h: h.cos() * torch.sigmoid(h), lambda h: h.sigmoid() * h.cos(), lambda h: nn.Sigmoid()(h) * h.cos()],
)
def test_a_sigmoid_gates_where_a_linear_makes_what_it_reads(gate):
    compiled = linear_then(gate)
    assert compiled.reasons("gated sigmoid") == [""] and ", cos, 'sigmoid')" in compiled.text()


def bilinear(h):
    return h.chunk(2, -1)[0] * h.chunk(2, -1)[1]


def test_the_product_of_two_linears_is_a_gated_identity():
    both = torch.cat((WEIGHT, WEIGHT.cos()))
    for read in (True, False):
        forward = lambda x, read=read: (  # noqa: E731
            F.linear(bilinear(F.linear(x, both)), WEIGHT) if read else bilinear(F.linear(x, both))
        )
        compiled, x = Matched(forward, run="aot"), torch.randn(4, 32, requires_grad=True)
        y = compiled(x)
        torch.testing.assert_close(y, forward(x))
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x), torch.autograd.grad(forward(x).sum(), x))
        assert compiled.reasons("gated identity") == ([""] if read else []) and ("te.gated(" in compiled.text()) == read


def test_a_bilinear_unit_writes_fp8():
    class Unit(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up, self.down = (nn.Linear(256, 256, bias=False) for _ in range(3))

        def forward(self, x):
            return self.down(self.gate(x) * self.up(x))

    graphs = capture_on_fake_cuda(
        lambda: Unit().bfloat16(),
        lambda device: (torch.empty(8192, 256, dtype=torch.bfloat16, device=device, requires_grad=True),),
        options={"codegen": "eager"},
    )
    assert "te.gated_quantize(" in graphs["forward"] and "te.gemm_gated(" not in graphs["forward"]
    assert "te.gated_backward_quantize(" in graphs["backward"]


def test_glu_is_a_gated_sigmoid():
    both = torch.cat((WEIGHT, WEIGHT.cos()))
    for glu in (F.glu, nn.GLU()):
        forward = lambda x, glu=glu: F.linear(glu(F.linear(x, both)), WEIGHT)  # noqa: E731
        compiled, x = Matched(forward), torch.randn(4, 32)
        torch.testing.assert_close(compiled(x), forward(x))
        assert compiled.reasons("gated sigmoid") == [""] and "te.gated(" in compiled.text()


def test_an_activation_that_only_a_product_reads_stays():
    compiled = linear_then(lambda h: F.gelu(h) * WEIGHT[0])
    assert compiled.reasons("gelu") == ["only a product reads it, which no kernel takes; left to Inductor"]
    assert "te.gelu" not in compiled.text()


def test_broadcast_and_promoted_products_are_no_swiglu():
    forward = lambda x: F.linear(F.silu(x) * x[:1], WEIGHT) + F.linear(F.silu(x.bfloat16()) * x, WEIGHT)  # noqa: E731
    compiled, x = Matched(forward), torch.randn(4, 32)
    torch.testing.assert_close(compiled(x), forward(x))
    assert {record.kind for record in compiled.records} == {"linear", "silu"}


@pytest.mark.parametrize(
    "function",
    [
        F.silu,
        lambda x: x * torch.sigmoid(x),
        lambda x: x * torch.sigmoid(1.702 * x),
        lambda x: F.relu(x).square(),
        lambda x: F.silu(x) * x.exp(),
        lambda x: x * torch.sigmoid(x) * x.exp(),
        lambda x: F.relu(x.clamp(max=7)) * x.exp(),
        lambda x: F.relu(x).square() * x[0],
    ],
)
def test_an_activation_that_is_left_has_one_row(function) -> None:
    """However it is written: what is inside of it has none of its own."""
    explanation = te_dynamo.explain(lambda x: function(x).cos(), torch.randn(32, 64), options={"codegen": "eager"})
    assert [row.matched for row in explanation.norms_activations] == [False]
