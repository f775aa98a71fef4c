"""te.gemm_gated: its reference, its bound, its machine code, its call by Inductor, and on a GPU its bits."""

from __future__ import annotations

import operator
import re

import pytest
import torch
from helpers.kernels.compiled_cases import SHARED_BYTES
from helpers.kernels.gemm_operands import E4M3, E5M2, operands
from helpers.kernels.gemms import ROWS, gemm_gated, gemm_gated_reference, gemm_stacked, gemm_stacked_reference
from helpers.kernels.kernel_cases import assert_same_bits
from helpers.models.snapshot_models import SwigluMLP, calls_to_gemms_everywhere, compiled_run, kernels_everywhere
from torch import fx

from te_dynamo.kernels.activation.activation import value_reference
from te_dynamo.kernels.activation.gated import (
    BOUNDED_KINDS,
    gated_partial_amaxes,
    gated_quantize,
    gated_quantize_reference,
    gated_reference,
)
from te_dynamo.kernels.gemm.specialized.gated import (
    BOUND,
    BOUND_OF_SIGMOID,
    gemm_gated_kernel,
    gemm_gated_options,
    gemm_gated_specialized,
)
from te_dynamo.kernels.gemm.specialized.product import gemm_specialized_out
from te_dynamo.kernels.layouts.tensor import TensorForm
from te_dynamo.kernels.runtime.compiled_code import compile_for
from te_dynamo.lowering.lower import lower
from te_dynamo.testing import fake_cuda

te = torch.ops.te


def stacked(m: int, width: int, k: int, a_dtype=E4M3, b_dtype=E4M3, device: str = "cpu", seed: int = 0):
    """fp8 operands of a product of two segments, each with its scale."""
    a, a_scale, one, one_scale, _ = operands(m, width, k, a_dtype, b_dtype, device, seed)
    _, _, two, two_scale, _ = operands(m, width, k, a_dtype, b_dtype, device, seed + 1)
    # torch puts no float8 together on every device.
    b = torch.cat([one.view(torch.uint8), two.view(torch.uint8)]).view(b_dtype)
    return a, a_scale, b, torch.cat([one_scale, 1.7 * two_scale])


def operation(a, a_scale, b, b_scale):
    """The operands as operations take them."""
    return [a, a_scale], ROWS, [b, b_scale], ROWS


def halves(c: torch.Tensor, gate: int) -> tuple[torch.Tensor, torch.Tensor]:
    parts = c.chunk(2, 1)
    return parts[gate], parts[1 - gate]


# ---- numbers on any machine


@pytest.mark.parametrize("kind", BOUNDED_KINDS)
@pytest.mark.parametrize("gate", [0, 1])
def test_the_reference_is_what_it_is_made_of(gate: int, kind: str) -> None:
    a, a_scale, b, b_scale = stacked(37, 128, 64)
    given = (a, a_scale, b, 0.02 * b_scale)
    c, partials = te.gemm_gated(*operation(*given), True, gate, kind)
    expected = gemm_stacked_reference(*given, None, torch.bfloat16, True, "N", (128, 128))
    assert torch.equal(c, expected)
    assert partials.max() == gated_reference(*halves(c, gate), kind).abs().max()
    if kind != "relu":  # whose largest product is often that of two positive factors
        assert partials.max() != gated_reference(*halves(c, 1 - gate), kind).abs().max()
    options = (kind, TensorForm(E4M3, True, True), True)
    with_amax = gated_quantize_reference(*halves(c, gate), *options, partials)
    assert_same_bits(with_amax, gated_quantize_reference(*halves(c, gate), *options))


def test_no_rows_have_amax_zero() -> None:
    c, partials = te.gemm_gated(
        *operation(*(t[:0] if i == 0 else t for i, t in enumerate(stacked(1, 128, 64)))), True, 0, "gelu"
    )
    assert c.shape == (0, 256) and partials.count_nonzero() == 0


def test_what_it_does_not_take() -> None:
    given = stacked(16, 128, 64)
    with pytest.raises(ValueError, match="gate must be the gate's half of b, 0 or 1, got 2"):
        gemm_gated_reference(*given, True, 2, "silu")
    with pytest.raises(ValueError, match="expected b of two halves, got 255 rows"):
        gemm_gated_reference(given[0], given[1], given[2][:255], given[3], True, 0, "silu")
    with pytest.raises(ValueError, match=r"expected a kind of gelu, .*, got 'tanh'"):
        gemm_gated_reference(*given, True, 0, "tanh")
    with pytest.raises(ValueError, match=r"expected a kind of gelu, .*, got 'identity'"):
        gemm_gated_reference(*given, True, 0, "identity")


BF16X2 = {
    "fma.rn.bf16x2": lambda a, b, c: a * b + c,
    "mul.rn.bf16x2": lambda a, b: a * b,
    "max.NaN.bf16x2": torch.maximum,
}


def bound_of(gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
    """The bound's result, fp64, of bf16 values: each of its instructions rounds once."""
    values = {"$1": gate.double(), "$2": up.double()}
    for name, target, rest in re.findall(r"([\w.]+) (\S+), ([^;]+);", BOUND_OF_SIGMOID if kind == "sigmoid" else BOUND):
        if name == "mov.b32":  # the same bf16 twice
            pattern = torch.tensor(int(rest, 16) & 0xFFFF)
            values[target] = pattern.to(torch.int16).view(torch.bfloat16).double()
        elif name != ".b32":  # which declares registers
            result = BF16X2[name](*(values[source] for source in rest.split(", ")))
            values[target] = result.float().bfloat16().double()
    return values["$0"]


def value_of(gate: torch.Tensor, kind: str) -> torch.Tensor:
    """f(gate) in fp32 as the kernels find it: an activation of -inf is NaN, for it is -inf times zero."""
    value = value_reference(gate.double(), kind).float()  # torch's gelu of fp32 doubles x on the way, and overflows
    return value if kind in ("relu", "sigmoid") else torch.where(gate == -torch.inf, torch.nan, value)


@pytest.mark.parametrize("kind", BOUNDED_KINDS)
def test_the_bound_is_one_for_every_gate(kind: str) -> None:
    """Not below the product as it is rounded, whatever the gate; close to it where it decides; NaN or infinite where it is."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    gate = patterns.view(torch.bfloat16)
    for factor in (1.0, -1.0, 3.140625, -1e-3, 1e30, 0.0, torch.inf, torch.nan):
        up = torch.full_like(gate, factor)
        bound = bound_of(gate, up, kind).abs()
        value = (value_of(gate, kind) * up.float()).bfloat16().double().abs()
        wild = ~value.isfinite()
        assert not (bound[wild].isfinite()).any()
        assert (bound[~wild] >= value[~wild]).logical_or(bound[~wild].isnan()).all()
        large = (gate > 6.0) & ~wild
        if kind != "sigmoid":
            assert (bound[large] <= value[large] * (1 + 2**-6)).all(), "where f(x) is x, the bound is the product"


def test_it_is_bit_equal_in_a_model() -> None:
    torch.manual_seed(0)
    x = torch.randn(24, 64, dtype=torch.bfloat16)
    fused, apart = (
        compiled_run(SwigluMLP, {"codegen": "eager", "fusions": fusions})(x) for fusions in (True, ["-fuse_gemm_gated"])
    )
    for one, other in zip(fused.outputs, apart.outputs, strict=True):
        assert torch.equal(one, other) and one.count_nonzero() > 0
    assert all(torch.equal(gradient, apart.gradients[name]) for name, gradient in fused.gradients.items())


# ---- the compiler


@pytest.mark.slow
@pytest.mark.parametrize("kind", BOUNDED_KINDS)
@pytest.mark.parametrize("fast", [True, False])
def test_machine_code(fast: bool, kind: str) -> None:
    """No spill, and no product waits for another's registers; the exponential is in a branch of its own."""
    options = gemm_gated_options(fast, 14336, 0, kind)
    warps = options.pop("num_warps")
    pointers = {"a": "*fp8e4nv", "a_scale_inv": "*fp32", "b": "*fp8e4nv", "b_scale_inv": "*fp32"}
    report = compile_for(
        gemm_gated_kernel,
        {**pointers, "c": "*bf16", "partials": "*fp32", "M": "i32", "N": "i32", "K": "i32"},
        options,
        aligned=(*pointers, "c", "partials", "N", "K"),
        num_warps=warps,
    )
    assert report.warnings == () and report.spills == 0, report.log
    assert report.shared <= SHARED_BYTES
    assert f".m64n{256 if fast else 128}k32.f32.e4m3.e4m3" in report.ptx
    # Of each of 64 x 256 elements in a thread's share of either group: two a word, and f once a pair.
    assert report.ptx.count("mul.rn.bf16x2") == 2 * 32 and report.ptx.count("ex2.approx.ftz.f32") == (
        0 if kind == "relu" else 2 * 64
    )


def graph_of(m: int, width: int, k: int) -> fx.Graph:
    graph = fx.Graph()
    shapes = {
        "a": ((m, k), E4M3),
        "sa": ((1,), torch.float32),
        "b": ((2 * width, k), E4M3),
        "sb": ((2,), torch.float32),
    }
    nodes = [graph.placeholder(name) for name in shapes]
    for node, (shape, dtype) in zip(nodes, shapes.values(), strict=True):
        node.meta["val"] = torch.empty(shape, dtype=dtype, device="cuda")
    both = graph.call_function(te.gemm_gated.default, (*operation(*nodes), True, 0, "gelu"))
    both.meta["val"] = te.gemm_gated(*operation(*(node.meta["val"] for node in nodes)), True, 0, "gelu")
    items = [graph.call_function(operator.getitem, (both, i)) for i in range(2)]
    for i, item in enumerate(items):
        item.meta["val"] = both.meta["val"][i]
    graph.output(tuple(items))
    return graph


def test_lowering_leaves_a_large_one_to_be_called() -> None:
    with fake_cuda(), kernels_everywhere():
        assert lower(graph_of(8192, 14336, 4096)) == [("te.gemm_gated", "Gluon")]
        assert lower(graph_of(256, 512, 128)) == [("te.gemm_gated", "Triton")]
        with torch._inductor.config.patch(cpp_wrapper=True):
            assert lower(graph_of(8192, 14336, 4096)) == [("te.gemm_gated", "Triton")]


def test_inductors_code_calls_it_and_takes_both_results(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.select_algorithm import extern_kernels
    from torch._inductor.utils import run_and_get_code

    calls_to_gemms_everywhere(monkeypatch)
    called = lambda a, sa, b, sb, *, fast, gate, kind, name: gemm_gated_reference(a, sa, b, sb, fast, gate, kind)  # noqa: E731
    monkeypatch.setattr(extern_kernels, "te_gemm_gated", called)
    given = stacked(48, 128, 64)
    torch._dynamo.reset()
    torch._dynamo.mark_dynamic(given[0], 0)
    compiled = torch.compile(lambda *tensors: te.gemm_gated(*operation(*tensors), False, 1, "gelu"))
    with torch._inductor.config.patch(force_disable_caches=True):
        results, (code,) = run_and_get_code(compiled, *given)
    assert (
        "extern_kernels.te_gemm_gated(" in code
        and "fast=False, gate=1, kind='gelu'" in code
        and "torch.ops.te" not in code
    )
    assert_same_bits(list(results), list(gemm_gated_reference(*given, False, 1, "gelu")))
    given = (given[0][:19], *given[1:])
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_same_bits(list(compiled(*given)), list(gemm_gated_reference(*given, False, 1, "gelu")))


# ---- on a GPU


def unfused(given: tuple[torch.Tensor, ...], fast: bool, gate: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    c = gemm_stacked(*given, None, torch.bfloat16, fast, "N", (given[2].shape[0] // 2,) * 2)
    return c, gated_partial_amaxes(*halves(c, gate), kind).max()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", BOUNDED_KINDS)
@pytest.mark.parametrize("gate", [0, 1])
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(
    "shape", [(1, 128, 256), (300, 128, 1040), (1000, 384, 4112), (257, 1024, 2064), (8192, 640, 512)]
)
def test_its_bits_are_those_of_two_kernels(shape, fast: bool, gate: int, kind: str) -> None:
    for a_dtype, b_dtype in ((E4M3, E4M3), (E5M2, E4M3)):
        for factors in ((1.0, 1.0), (1e-3, 1.0), (30.0, 0.01), (-1.0, 1.0), (0.0, 1.0)):
            a, a_scale, b, b_scale = stacked(*shape, a_dtype, b_dtype, "cuda")
            given = (a, a_scale, b, b_scale * torch.tensor(factors, device="cuda"))
            c, amax = unfused(given, fast, gate, kind)
            got, partials = gemm_gated_specialized(*given, fast, gate, kind)
            assert torch.equal(got, c) and torch.equal(partials.max(), amax)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", BOUNDED_KINDS)
@pytest.mark.parametrize("gate", [0, 1])
@pytest.mark.parametrize(
    "scales", [(torch.inf, 1.0), (1.0, torch.inf), (1e38, 1e38), (torch.nan, 1.0), (1.0, torch.nan)]
)
def test_what_is_not_finite_is_seen(scales, gate: int, kind: str) -> None:
    a, a_scale, b, _ = stacked(300, 256, 128, device="cuda")
    given = (a, a_scale, b, torch.tensor(scales, device="cuda"))
    c, amax = unfused(given, True, gate, kind)
    got, partials = gemm_gated_specialized(*given, True, gate, kind)
    assert_same_bits([got], [c])
    assert torch.equal(partials.max(), amax) or bool(partials.max().isnan() & amax.isnan())


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [True, False])
def test_gemm_takes_it_and_repeats_itself(fast: bool) -> None:
    given = stacked(8192, 4096, 1024, device="cuda")
    width = given[2].shape[0] // 2
    c = torch.empty(8192, 2 * width, dtype=torch.bfloat16, device="cuda")
    gemm_specialized_out(*given, fast=fast, along="N", segments=(width, width), out=c)
    options = ("silu", TensorForm(E4M3, True, True), False)
    expected = gated_quantize(*halves(c, 0), *options)
    for _ in range(10):
        got, amax = gemm_gated(*given, fast, 0, "silu")
        assert torch.equal(got, c)
        assert_same_bits(gated_quantize(*halves(got, 0), *options, amax), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductors_code_calls_it_without_the_dispatcher(mode: str) -> None:
    from torch._inductor.utils import run_and_get_code

    class Gated(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = (torch.nn.Linear(2048, 4096, bias=False) for _ in range(2))
            self.down = torch.nn.Linear(4096, 2048, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))

    torch.manual_seed(0)
    model = Gated().to("cuda", torch.bfloat16)
    x = torch.randn(8192, 2048, device="cuda", dtype=torch.bfloat16)

    def train(model, x: torch.Tensor) -> list[torch.Tensor]:
        model.zero_grad()
        y = model(x)
        y.square().mean().backward()
        return [y.detach().clone(), *(p.grad.clone() for p in model.parameters())]

    torch._dynamo.reset()
    expected = train(torch.compile(model, backend="te", options={"fusions": ["-fuse_gemm_gated"]}), x)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="te", mode=mode)
    with torch._inductor.config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(train, compiled, x)
    assert "extern_kernels.te_gemm_gated(" in "\n".join(codes)
    for _ in range(3):  # CUDA graphs are recorded on the second call and replayed on the third
        assert_same_bits(train(compiled, x), expected)
