"""Stage 1 on norms: torch's own, the hand-written RMSNorms of published models, and the ones that must be
left."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from helpers.graphs.matching import Matched
from helpers.slow import slow_but
from torch import nn
from torch.utils.checkpoint import checkpoint

from te_dynamo.testing import capture_on_fake_cuda

torch.manual_seed(0)

EPS = 1e-06
WEIGHT = torch.randn(16, 32)


def llama(x, w):
    f = x.to(torch.float32)
    f = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + EPS)
    return w * f.to(x.dtype)


def llama_meta(x, w):
    f = x.float()
    return (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + EPS)).type_as(x) * w


def t5(x, w):
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    h = x * torch.rsqrt(variance + EPS)
    return w * h.to(w.dtype)


def olmo2(x, w):
    f = x.to(torch.float32)
    f = torch.rsqrt(EPS + torch.mean(torch.mul(f, f), dim=(-1,), keepdim=True)).mul(f)
    return (w * f).to(x.dtype)


def gemma(x, w):
    f = x.float()
    f = f * torch.rsqrt(f.square().mean(-1, True) + EPS)
    return (f * (1.0 + w.float())).type_as(x)


def gemma_power(x, w):
    f = x.float()
    f = f * torch.pow((f**2).mean(x.dim() - 1, keepdim=True) + EPS, -0.5)
    return ((w.float() + 1) * f).to(dtype=x.dtype)


def no_weight(x, w):
    f = x.float()
    return (f * (f * f).mean(-1, keepdim=True).add(EPS).rsqrt()).to(x.dtype)


def divided(x, w):
    f = x.float()
    return (f / torch.sqrt(f.pow(2).mean(-1, keepdim=True) + EPS) * w).to(x.dtype)


def weight_first(x, w):
    f = x.float()
    return (w * f / ((f * f).mean(-1, keepdim=True) + EPS) ** 0.5).to(x.dtype)


def reciprocal(x, w):
    f = x.float()
    return (f * (1 / (f.square().mean(-1, keepdim=True) + EPS).sqrt())).to(x.dtype) * w


def cohere(x, w):
    f = x.to(torch.float32)
    mean = f.mean(-1, keepdim=True)
    variance = (f - mean).pow(2).mean(-1, keepdim=True)
    f = (f - mean) * torch.rsqrt(variance + EPS)
    return (w.to(torch.float32) * f).to(x.dtype)


def one_difference(x, w):
    f = x.float()
    f = f - torch.mean(f, -1, keepdim=True)
    return (f * ((f * f).mean(-1, keepdim=True) + EPS).rsqrt() * w + w).type_as(x)


def by_hand(x, w):
    f = x.float()
    mean, variance = f.mean(-1, keepdim=True), f.var(-1, unbiased=False, keepdim=True)
    return (w * (f - mean) / torch.sqrt(variance + EPS) + w).to(x.dtype)


def by_hand_twice(x, w):
    f = x.float()
    variance = torch.var(f, dim=-1, keepdim=True, correction=0)
    f = (f - f.mean(dim=-1, keepdim=True)) * torch.rsqrt(variance + EPS)
    return (f * w + w).to(x.dtype)


def layer_norm_in_fp32(x, w):
    return F.layer_norm(x.float(), x.shape[-1:], w.float(), w.float(), EPS).type_as(x)


def olmo(x, w):
    return F.layer_norm(x.to(dtype=torch.float32), x.shape[-1:], None, None, eps=EPS).to(x.dtype)


def compile_before_linear(norm, dtype=torch.bfloat16, **kwargs):
    weight = WEIGHT.to(dtype)
    return Matched(lambda x, w: F.linear(norm(x, w), weight), **kwargs)


RMS_NORMS = [
    (llama, True, False, True),
    (llama_meta, True, False, True),
    (t5, True, False, True),
    (olmo2, False, False, True),
    (gemma, False, True, True),
    (gemma_power, False, True, True),
    (no_weight, False, False, False),
    (divided, False, False, True),
    (weight_first, False, False, True),
    (reciprocal, True, False, True),
]


@pytest.mark.parametrize(
    ("norm", "cast_before_weight", "zero_centered", "weighted", "dtype"),
    [
        *((*norm, torch.bfloat16) for norm in RMS_NORMS),
        *slow_but(3, [(*norm, torch.float32) for norm in RMS_NORMS]),
    ],
)
def test_written_rms_norms(norm, cast_before_weight, zero_centered, weighted, dtype):
    """The slow ones find a spelling that has other casts in fp32."""
    x = torch.randn(2, 4, 32, dtype=dtype, requires_grad=True)
    w = torch.randn(32, dtype=dtype, requires_grad=True)
    compiled = compile_before_linear(norm, dtype, run="aot")
    y = compiled(x, w)
    torch.testing.assert_close(y, F.linear(norm(x, w), WEIGHT.to(dtype)))
    y.sum().backward()
    operand = "w" if weighted else "None"
    cast_before_weight = cast_before_weight and dtype != torch.float32
    assert f"te.rms_norm(x, {operand}, {EPS}, {cast_before_weight}, {zero_centered})" in compiled.text()
    assert compiled.text().count("\n") == 4 and compiled.records[0].kind == "rms_norm"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    ("norm", "parameters"),
    [
        (cohere, "w, None"),
        (one_difference, "w, w"),
        (by_hand, "w, w"),
        (by_hand_twice, "w, w"),
        (layer_norm_in_fp32, "w, w"),
        (olmo, "None, None"),
    ],
)
def test_written_layer_norms(norm, parameters, dtype):
    x = torch.randn(2, 4, 32, dtype=dtype, requires_grad=True)
    w = torch.randn(32, dtype=dtype, requires_grad=True)
    compiled = compile_before_linear(norm, dtype, run="aot")
    y = compiled(x, w)
    torch.testing.assert_close(y, F.linear(norm(x, w), WEIGHT.to(dtype)))
    y.sum().backward()
    assert f"te.layer_norm(x, {parameters}, {EPS})" in compiled.text()
    assert compiled.text().count("\n") == 4 and compiled.records[0].kind == "layer_norm"


@pytest.mark.one_fast_case
@pytest.mark.parametrize("norm", [cohere, layer_norm_in_fp32, olmo])
def test_a_written_layer_norm_is_fused_as_a_called_one_is(norm):
    called = {
        cohere: lambda x, w: F.layer_norm(x, (256,), w, None, EPS),
        layer_norm_in_fp32: lambda x, w: F.layer_norm(x, (256,), w, w, EPS),
        olmo: lambda x, w: F.layer_norm(x, (256,), None, None, EPS),
    }[norm]
    written, expected = (_graphs_on_fake_cuda(function) for function in (norm, called))
    assert "te.layer_norm_quantize(" in written["forward"]
    assert written["forward"] == expected["forward"] and written["backward"] == expected["backward"]


def _graphs_on_fake_cuda(norm):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.linear = nn.Parameter(torch.ones(256)), nn.Linear(256, 256)

        def forward(self, x):
            return self.linear(norm(x, self.weight))

    return capture_on_fake_cuda(
        lambda: Block().bfloat16(),
        lambda device: (torch.empty(8192, 256, dtype=torch.bfloat16, device=device, requires_grad=True),),
        options={"codegen": "eager"},
    )


def test_a_mean_that_is_read_elsewhere_leaves_an_rms_norm():
    def norm(x):
        f = x - x.mean(-1, keepdim=True)
        return f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + EPS), f

    def forward(x):
        y, f = norm(x)
        return F.linear(y, WEIGHT) + f.sum()

    compiled, x = Matched(forward), torch.randn(4, 32)
    torch.testing.assert_close(compiled(x), forward(x))
    assert f"te.rms_norm(f, None, {EPS}, False, False)" in compiled.text()


def test_snapshot():
    compiled = compile_before_linear(gemma)
    compiled(torch.randn(4, 32, dtype=torch.bfloat16), torch.randn(32, dtype=torch.bfloat16))
    assert_expected_inline(
        compiled.text(),
        """\
rms_norm_default = te.rms_norm(x, w, 1e-06, False, True)
getitem_1: bfloat16[4, 32] = getitem(rms_norm_default, 0)
linear_default = te.linear(getitem_1, weight, None, dx=False dw=False)
getitem: bfloat16[4, 16] = getitem(linear_default, 0)
return (getitem)""",
    )


def test_all_fp32_after_the_cast_takes_the_cast_tensor():
    def norm(x, w):
        f = x.float()
        return f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + EPS) * w

    compiled = Matched(lambda x, w: F.linear(norm(x, w), WEIGHT))
    x, w = torch.randn(4, 32, dtype=torch.bfloat16), torch.randn(32)
    torch.testing.assert_close(compiled(x, w), F.linear(norm(x, w), WEIGHT))
    assert f"te.rms_norm(f, w, {EPS}, False, False)" in compiled.text()


def on_the_sphere(x, w):
    return (F.normalize(x.float(), dim=-1) * 32**0.5 * w).type_as(x)


def on_the_sphere_plus_one(x, w):
    return (math.sqrt(32) * F.normalize(x.float(), p=2, dim=2, eps=1e-12) * (1 + w.float())).type_as(x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("norm", [on_the_sphere, on_the_sphere_plus_one])
def test_a_row_of_length_one_times_the_root_of_its_length_is_an_rms_norm(norm, dtype):
    """x-transformers'. A row of zeros stays one."""
    x, w = torch.randn(2, 4, 32, dtype=dtype), torch.randn(32, dtype=dtype)
    x[0, 0] = 0
    compiled = compile_before_linear(norm, dtype)
    torch.testing.assert_close(compiled(x, w), F.linear(norm(x, w), WEIGHT.to(dtype)))
    assert f"te.rms_norm(x, w, {1e-12**2 / 32}, False, {norm is on_the_sphere_plus_one})" in compiled.text()
    assert compiled.reasons("rms_norm") == [""] and "normalize" not in compiled.text()


@pytest.mark.parametrize("eps", [1e-6, 1, 20.0, -1.0])
def test_a_row_as_short_as_its_least_length_is_no_rms_norms(eps):
    """F.normalize divides by the length or by eps, a norm by the root of the sum of both."""
    x = F.normalize(torch.randn(4, 32), dim=-1) * abs(eps) * torch.tensor([[0.1], [1.0], [2.0], [100.0]])
    compiled = Matched(lambda x: F.linear(F.normalize(x, dim=-1, eps=eps) * 32**0.5, WEIGHT))
    torch.testing.assert_close(compiled(x), F.linear(F.normalize(x, dim=-1, eps=eps) * 32**0.5, WEIGHT))


def test_torch_norms():
    def forward(x, w, b):
        h = F.linear(F.layer_norm(x, (32,), w, b), weight)
        h = F.linear(F.rms_norm(x, [32], w, 1e-5), weight) + h
        return F.linear(torch.rms_norm(x, (32,)).view(-1, 32), weight) + h

    weight = WEIGHT.bfloat16()
    x, w, b = (torch.randn(*shape, dtype=torch.bfloat16) for shape in ((4, 32), (32,), (32,)))
    compiled = Matched(forward, run="aot")
    torch.testing.assert_close(compiled(x * 1e-4, w, b), forward(x * 1e-4, w, b))
    assert "te.layer_norm(x, w, b, 1e-05)" in compiled.text()
    assert "te.rms_norm(x, w, 1e-05, False, False)" in compiled.text()
    assert f"te.rms_norm(x, None, {torch.finfo(torch.float32).eps}, False, False)" in compiled.text()
    assert [r.matched for r in compiled.records if r.kind != "linear"] == [True] * 3


def test_a_norm_that_no_fp8_linear_reads_is_left():
    compiled = Matched(lambda x, w: F.linear(llama(x, w), WEIGHT[:10]) + F.layer_norm(x, (32,)).sum())
    compiled(torch.randn(4, 32), torch.randn(32))
    assert compiled.reasons("rms_norm") == ["no FP8 linear reads its output; left to Inductor"]
    assert compiled.reasons("layer_norm") == ["no FP8 linear reads its output; left to Inductor"]
    assert "te." not in compiled.text()


def test_dropout_between_stops_and_views_do_not():
    def forward(x, p):
        return F.linear(F.layer_norm(x, (32,)).reshape(4, 32)[:, 0:].contiguous(), WEIGHT) + F.linear(
            F.dropout(F.rms_norm(x, (32,)), p, training=p > 0), WEIGHT
        )

    compiled = Matched(forward)
    compiled(torch.randn(4, 1, 32), 0.5)
    assert compiled.reasons("layer_norm") == [""] and "no FP8 linear" in compiled.reasons("rms_norm")[0]
    compiled = Matched(forward)
    compiled(torch.randn(4, 1, 32), 0.0)
    assert compiled.reasons("rms_norm") == [""]


def windows(x):
    """Swin's: shifted, cut into windows of 2 x 2."""
    x = torch.roll(F.pad(x.view(2, 4, 4, 32), (0, 0, 0, 0)), shifts=(-1, -1), dims=(1, 2))
    return x.view(2, 2, 2, 2, 2, 32).permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, 4, 32)


@pytest.mark.parametrize("move", [windows, lambda x: torch.permute(x, (1, 0, 2)).flatten(0, 1)])
def test_a_norm_whose_rows_are_moved_is_left_with_that_reason(move):
    compiled, x = Matched(lambda x: F.linear(move(F.layer_norm(x, (32,))), WEIGHT)), torch.randn(2, 16, 32)
    torch.testing.assert_close(compiled(x), compiled.module(x))
    assert compiled.reasons("layer_norm")[0].startswith("the FP8 linear reads it permuted or padded, and fused kernels")


def reads_in_bf16(norm, linear):
    return lambda x: linear(norm(x))


def reads_twice(norm, linear):
    return lambda x: linear(y := norm(x)) + linear(y)


def reads_in_fp32_too(norm, linear):
    return lambda x: (linear(y := norm(x)), y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("norm", [nn.LayerNorm(32), nn.RMSNorm(32)], ids=["layer", "rms"])
@pytest.mark.parametrize("reads", [reads_in_bf16, reads_twice, reads_in_fp32_too])
def test_autocasts_norm_gives_what_the_linear_reads(reads, norm, dtype):
    forward = reads(norm, nn.Linear(32, 16))
    compiled = Matched(forward, run="aot")
    x = torch.randn(4, 32, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        actual, expected = compiled(x), forward(x)
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)
    fp32_elsewhere = reads is reads_in_fp32_too
    for y in (actual, expected):
        first = y[0] if fp32_elsewhere else y
        y = torch.autograd.grad(first.float().sum(), x)[0]
    (record,) = (record for record in compiled.records if record.kind != "linear")
    assert record.matched and record.dtype == ("fp32" if fp32_elsewhere and dtype == torch.float32 else "bf16")
    gives_another = ", torch.bfloat16)" in next(line for line in compiled.text().splitlines() if "te." in line)
    assert gives_another == (dtype == torch.float32 and not fp32_elsewhere)


class Autocast(nn.Module):
    """Two sublayers under autocast, each with its norm before it or behind its sum."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        self.norm_first = norm_first
        self.norms = nn.ModuleList([nn.LayerNorm(256), nn.RMSNorm(256)])
        self.linears = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))

    def forward(self, x):
        with torch.autocast(x.device.type, torch.bfloat16):
            for norm, up, down in zip(self.norms, self.linears[::2], self.linears[1::2], strict=True):
                h = down(F.gelu(up(norm(x) if self.norm_first else x)))
                x = x + h if self.norm_first else norm(x + h)
            return self.linears[0](x)


@pytest.mark.one_fast_case
@pytest.mark.parametrize("norm_first", [True, False])
def test_autocasts_norms_write_fp8(norm_first):
    graphs = capture_on_fake_cuda(
        lambda: Autocast(norm_first),
        lambda device: (torch.empty(8192, 256, device=device, requires_grad=True),),
        options={"codegen": "eager"},
    )
    lines = [
        line.partition(" = ")[2]
        for line in graphs["forward"].splitlines()
        if "norm_quantize(" in line or "norm(" in line
    ]
    if norm_first:
        assert_expected_inline(
            "\n".join(lines),
            """\
te.layer_norm_quantize(x, norms.0.weight, norms.0.bias, 1e-05, e4m3[row+column], keep_output=False, dtype=bf16)
te.add_rms_norm_quantize(x, gemm_1, norms.1.weight, 1.1920928955078125e-07, cast_before_weight=False, zero_centered=False, quantizer=e4m3[row+column], keep_output=False, dtype=bf16)""",
        )
    else:
        assert_expected_inline(
            "\n".join(lines),
            """\
te.add_layer_norm_quantize(x, gemm_1, norms.0.weight, norms.0.bias, 1e-05, e4m3[row+column], keep_output=True, quantized_dtype=bf16)
te.add_rms_norm_quantize(add_layer_norm_quantize[1], gemm_3, norms.1.weight, 1.1920928955078125e-07, cast_before_weight=False, zero_centered=False, quantizer=e4m3[row+column], keep_output=False, dtype=bf16)""",
        )


@pytest.mark.one_fast_case
@pytest.mark.parametrize("norm_first", [True, False])
def test_autocasts_fused_norms_have_the_bits_of_unfused(norm_first):
    model, x = Autocast(norm_first), torch.randn(64, 256)

    def run(fusions: bool) -> list[torch.Tensor]:
        torch._dynamo.reset()
        model.zero_grad()
        torch.compile(model, backend="te", options={"codegen": "eager", "fusions": fusions})(
            x
        ).float().square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    for fused, unfused in zip(run(True), run(False), strict=True):
        assert torch.equal(fused, unfused)


def test_autocasts_norm_is_left_where_a_write_or_a_mode_lies_before_its_cast():
    linear, norm = nn.Linear(32, 16), nn.LayerNorm(32)

    def forward(x):
        y = norm(x)
        with torch.no_grad():
            return linear(y)

    compiled = Matched(forward)
    with torch.autocast("cpu", torch.bfloat16):
        compiled(torch.randn(4, 32, requires_grad=True))
    assert compiled.reasons("layer_norm") == ["_set_grad_enabled changes the mode inside the pattern"]


def keeps_variance(x, w):
    f = x.float()
    variance = f.pow(2).mean(-1, keepdim=True)
    return w * (f * torch.rsqrt(variance + EPS)).to(x.dtype) + variance.to(x.dtype)


def computes_in_bf16(x, w):
    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS))


def by_deviation(x, w):
    f = x.float()
    return (w * (f - f.mean(-1, keepdim=True)) / (f.std(-1, keepdim=True) + EPS) + w).to(x.dtype)


def keeps_mean(x, w):
    f = x.float()
    mean = f.mean(-1, keepdim=True)
    f = (f - mean) / torch.sqrt(f.var(-1, unbiased=False, keepdim=True) + EPS)
    return (f + mean).to(x.dtype)


def on_the_sphere_in_bf16(x, w):
    return F.normalize(x, dim=-1) * 32**0.5 * w


def tensor_eps(x, w):
    f = x.float()
    return w * (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + w.float().abs().min())).to(x.dtype)


def rounded_one_plus_weight(x, w):
    f = x.float()
    return (1 + w) * (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def layer_norm_rounded_before_its_weight(x, w):
    f = x.float()
    f = f - f.mean(-1, keepdim=True)
    return w * (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        (layer_norm_rounded_before_its_weight, "it rounds to bf16 before its weight or bias too"),
        (by_deviation, "it divides by the standard deviation plus eps, te.layer_norm by the root of"),
        (keeps_mean, "its mean or what it subtracts it from is read elsewhere too"),
        (on_the_sphere_in_bf16, "it computes in bf16, te.rms_norm in fp32"),
        (keeps_variance, "its intermediate value variance is used elsewhere too"),
        (computes_in_bf16, "it computes in bf16, te.rms_norm in fp32"),
        (tensor_eps, "its eps is not a Python number"),
        (lambda x, w: F.layer_norm(x, (4, 32)), "it normalizes 2 dimensions"),
    ],
)
def test_left_with_the_reason(norm, reason):
    x, w = torch.randn(4, 32, dtype=torch.bfloat16), torch.randn(32, dtype=torch.bfloat16)
    compiled = compile_before_linear(norm)
    torch.testing.assert_close(compiled(x, w), F.linear(norm(x, w), WEIGHT.bfloat16()))
    (record,) = [r for r in compiled.records if r.kind != "linear"]
    assert not record.matched and record.reason.startswith(reason)
    assert "norm(" not in compiled.text().replace("layer_norm(x", "")


def test_a_weight_that_was_rounded_before_is_taken_as_it_is():
    compiled = compile_before_linear(rounded_one_plus_weight)
    compiled(torch.randn(4, 32, dtype=torch.bfloat16), torch.randn(32, dtype=torch.bfloat16))
    assert f"te.rms_norm(x, add, {EPS}, True, False)" in compiled.text()


@pytest.mark.parametrize("name", ["rsqrt_alone", "other_dim", "no_keepdim", "mean_of_another"])
def test_not_a_norm_at_all(name):
    def forward(x):
        f = x.float()
        if name == "rsqrt_alone":
            return f * torch.rsqrt(f.abs() + EPS)
        if name == "other_dim":
            return f * torch.rsqrt(f.pow(2).mean(0, keepdim=True) + EPS)
        if name == "no_keepdim":
            return f * torch.rsqrt(f.pow(2).mean(-1) + EPS)
        return f * torch.rsqrt((f + 1).pow(2).mean(-1, keepdim=True) + EPS)

    compiled = Matched(lambda x: F.linear(forward(x), WEIGHT))
    compiled(torch.randn(32, 32))
    assert [record.kind for record in compiled.records] == ["linear"]


def test_a_norm_that_a_checkpoint_reads_says_so() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.RMSNorm(32), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.linear, self.norm(x), use_reentrant=False)

    compiled = Matched(Model())
    compiled(torch.randn(4, 32))
    assert compiled.reasons("rms_norm") == [
        "it is read across the border of a region (a checkpoint), where nothing is fused; left to Inductor"
    ]


def test_a_gated_norm_in_fp32_says_so() -> None:
    """Mamba2's: the weight comes after the cast, and what is normed is fp32 itself."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.linear = nn.Parameter(torch.ones(32)), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
            h = x.float() * F.silu(gate.float())
            h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)
            return self.linear(self.weight * h.to(x.dtype))

    compiled = Matched(Model().bfloat16())
    compiled(*(torch.randn(4, 32).bfloat16() for _ in range(2)))
    assert compiled.reasons("rms_norm") == [
        "it is fp32 and goes on as bf16, and is not what an FP8 linear reads; left to Inductor"
    ]
