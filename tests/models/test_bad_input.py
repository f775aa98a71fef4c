"""What users get wrong, and models that FP8 cannot take: each works, stays in its own precision with a reason in
`explain`, or raises an error that says what to do. Never a wrong number, never a crash inside torch."""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
import textwrap
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.oracles.fp8_oracle import fp8_linears, relative_error
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import te_dynamo
from te_dynamo.inspect import advice

EAGER = {"codegen": "eager"}


def te(model: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(model, backend="te", options={**EAGER, **options})


def linear(n: int = 32, k: int = 32, **kwargs: Any) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(k, n, **kwargs)


def reasons(model: Callable[..., Any], *args: Any, **options: Any) -> list[str]:
    """The reason of every linear in `explain`, "" for one that runs in FP8."""
    return [row.reason for row in te_dynamo.explain(model, *args, options={**EAGER, **options}).linears]


# ---- dtypes and shapes


@pytest.mark.one_fast_case
@pytest.mark.parametrize(
    ("model", "x", "reason"),
    [
        (lambda: linear().double(), lambda: torch.randn(4, 32).double(), "its input is fp64; te.linear takes bf16, f"),
        (lambda: linear(dtype=torch.cfloat), lambda: torch.randn(4, 32) + 1j, "its input is complex64"),
        (lambda: linear(k=24), lambda: torch.randn(4, 24), "N = 32, K = 24: FP8 GEMMs need N and K to be multiples"),
        (lambda: linear(n=10), lambda: torch.randn(4, 32), "N = 10, K = 32"),
        (lambda: linear(n=1, k=1), lambda: torch.randn(4, 1), "N = 1, K = 1"),
        (lambda: linear(), lambda: torch.randn(0, 32), "its input has no rows"),
        (lambda: linear(), lambda: torch.randn(3, 0, 32), "its input has no rows"),
    ],
)  # fmt: skip
def test_stays_in_its_precision_to_the_last_bit(model, x, reason: str) -> None:
    model, x = model(), x()
    x.requires_grad_()
    expected = model(x)
    actual = te(model)(x)
    assert torch.equal(actual, expected) and actual.dtype == expected.dtype
    grads = [torch.autograd.grad(y.abs().sum(), [x, model.weight]) for y in (actual, expected)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert [r[: len(reason)] for r in reasons(model, x)] == [reason]


def test_integer_input_fails_as_it_does_without_us() -> None:
    x = torch.ones(4, 32, dtype=torch.long)
    with pytest.raises(RuntimeError, match="must have the same dtype"):
        te(linear())(x)
    assert torch.equal(te(lambda x, w: F.linear(x, w))(x, x), F.linear(x, x))


@pytest.mark.parametrize("bias", [True, False])
def test_bf16_input_and_fp32_weight_without_autocast(bias: bool) -> None:
    """torch refuses it, and so it stays what the user wrote."""
    model, x = linear(bias=bias), torch.randn(64, 32).bfloat16()
    with pytest.raises(RuntimeError, match="same dtype"):
        te(model)(x)


@pytest.mark.parametrize("codegen", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_zero_rows_of_a_dynamic_batch(codegen: str) -> None:
    model = nn.Sequential(nn.LayerNorm(32), linear(64), nn.GELU(), linear(k=64))
    compiled = torch.compile(model, backend="te", options={"codegen": codegen}, dynamic=True)
    for rows in (4, 0, 7, 1, 0):
        model.zero_grad()
        x = torch.randn(rows, 32, requires_grad=True)
        y = compiled(x)
        y.sum().backward()
        assert y.shape == (rows, 32) and x.grad is not None and x.grad.shape == x.shape
        if rows:
            assert relative_error(y, model(x)) < 0.1
        else:
            assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_one_dimensional_input() -> None:
    model, x = linear(), torch.randn(32, requires_grad=True)
    y = te(model)(x)
    y.sum().backward()
    assert y.shape == (32,) and x.grad is not None and x.grad.shape == (32,)
    assert relative_error(y, model(x)) < 0.1
    assert reasons(model, x) == [""]


def test_operands_that_are_not_contiguous() -> None:
    model = linear(64)
    model.weight = nn.Parameter(torch.randn(32, 64).t())
    x = torch.randn(32, 3, 8).permute(1, 2, 0).requires_grad_()
    actual, expected = (result_and_gradients(call, x, model) for call in (te(model), model))
    assert all(relative_error(a, e) < 0.1 for a, e in zip(actual, expected, strict=True))
    assert reasons(model, x) == [""]


def result_and_gradients(call: Callable[..., Any], x: Tensor, model: nn.Linear) -> list[Tensor]:
    y = call(x)
    dy = torch.linspace(-1, 1, y.numel()).reshape(*reversed(y.shape)).permute(*reversed(range(y.dim())))
    return [y, *torch.autograd.grad(y, [x, model.weight, model.bias], dy)]


def test_a_function_without_any_module() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(6, 32), torch.randn(16, 32)
    with fp8_linears():
        expected = F.linear(x, weight)
    assert relative_error(te(lambda x, w: F.linear(x, w))(x, weight), expected) < 1e-5


# ---- tensors that are not plain


@pytest.mark.one_fast_case
@pytest.mark.parametrize("which", ["weight", "input"])
def test_a_tensor_subclass_stays_and_says_so(which: str) -> None:
    model, x = linear(), torch.randn(4, 32)
    if which == "weight":
        model.weight = nn.Parameter(TwoTensor(model.weight.detach(), model.weight.detach().clone()))
    else:
        x = TwoTensor(x, x.clone())
    actual, expected = te(model)(x), model(x)
    assert isinstance(actual, TwoTensor) and torch.equal(actual.a, expected.a)
    assert reasons(model, x) == ["an operand is a TwoTensor, not a plain tensor"]


@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_weight_runs_as_it_is_behind_a_graph_break(layout: str) -> None:
    x, weight = torch.randn(4, 32), getattr(linear().weight.detach(), layout)()

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    assert torch.equal(te(forward)(x, weight), forward(x, weight))
    torch._dynamo.reset()  # or Dynamo remembers that it has nothing to compile here
    explanation = te_dynamo.explain(forward, x, weight, options=EAGER)
    assert explanation.coverage == 0 and "sparse" in str(explanation.graph_breaks)


@pytest.mark.filterwarnings("ignore")
def test_a_quantized_linear_runs_as_it_is() -> None:
    try:
        model = torch.ao.quantization.quantize_dynamic(nn.Sequential(linear()), {nn.Linear})
        expected = model(torch.ones(4, 32))
    except RuntimeError as error:
        pytest.skip(f"this build of torch has no quantized engine: {error}")
    assert torch.equal(te(model)(torch.ones(4, 32)), expected)


def test_a_weight_of_two_linears_gets_the_sum_of_both_gradients() -> None:
    shared, x = linear(bias=False), torch.randn(8, 32)

    def forward(x: Tensor) -> Tensor:
        return shared(torch.sin(shared(x)))

    (actual,) = torch.autograd.grad(te(forward)(x).square().sum(), shared.weight)
    with fp8_linears():
        (expected,) = torch.autograd.grad(forward(x).square().sum(), shared.weight)
    assert relative_error(actual, expected) < 1e-3


# ---- modes


def test_no_grad_and_inference_mode_compute_what_training_does() -> None:
    model, x = nn.Sequential(nn.LayerNorm(32), linear(64), nn.GELU(), linear(k=64)), torch.randn(6, 32)
    compiled = te(model)
    trained = compiled(x)
    with torch.no_grad():
        no_grad = compiled(x)
    with torch.inference_mode():
        inference = compiled(x)
    assert torch.equal(no_grad, trained) and torch.equal(inference, trained)
    assert trained.requires_grad and not no_grad.requires_grad and inference.is_inference()


@pytest.mark.parametrize("recipe", ["float8_current_scaling", None])
def test_double_backward_is_refused_by_name(recipe: str | None) -> None:
    """By torch itself, for everything it compiles: recipe None is no way around."""
    x = torch.randn(4, 32, requires_grad=True)
    (gradient,) = torch.autograd.grad(te(linear(), recipe=recipe)(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        gradient.square().sum().backward()


# ---- values


@pytest.mark.parametrize("codegen", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_nan_stays_in_its_row(codegen: str) -> None:
    model, x = linear(64), torch.randn(6, 32)
    x[2, 5] = math.nan
    actual, expected = te(model, codegen=codegen)(x), model(x)
    assert torch.equal(actual.isnan(), expected.isnan()) and actual.isnan().sum() == 64
    rows = [0, 1, 3, 4, 5]
    assert relative_error(actual[rows], expected[rows]) < 0.1


def test_nan_reaches_the_gradients_that_it_reaches_uncompiled() -> None:
    model, x = linear(), torch.randn(6, 32, requires_grad=True)
    dy = torch.randn(6, 32)
    dy[1, 3] = math.nan
    grads = [torch.autograd.grad(call(x), [x, model.weight, model.bias], dy) for call in (te(model), model)]
    assert all(torch.equal(a.isnan(), b.isnan()) for a, b in zip(*grads, strict=True))


def test_infinity_saturates_as_the_scale_rule_says() -> None:
    """amax inf gives scale 1 and a saturating cast: inf reads back as 448 (docs/training.md, "Overflow"), and so do the
    finite values beyond it; the model's own precision would give inf."""
    model, x = linear(bias=False), torch.randn(6, 32)
    x[2, 5] = math.inf
    weight = model.weight.detach()
    eight_bits = x.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    quantized = te_dynamo.Float8CurrentScalingQuantizer().quantize(weight).dequantize().float()
    torch.testing.assert_close(te(model)(x), (eight_bits @ quantized.t()).to(x.dtype), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30])
def test_magnitudes_at_the_ends_of_fp32(scale: float) -> None:
    model, x = linear(bias=False), torch.randn(6, 32) * scale
    actual, expected = te(model)(x), model(x)
    assert actual.isfinite().all()
    if scale:
        assert relative_error(actual, expected) < 0.1
    else:
        assert not actual.any()


# ---- machines that lack something


def test_one_warning_for_many_compilations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "_told_once", set())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for model in (linear(), linear(48), nn.Sequential(linear(), nn.ReLU(), linear())):
            te(model)(torch.randn(4, 32))
    ours = [str(warning.message) for warning in seen if "te_dynamo" in str(warning.message)]
    assert ours == [
        "te_dynamo: device cpu has no FP8 kernels: the reference path runs, with the same results, much slower than bf16"
    ]


def test_no_warning_where_nothing_is_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "_told_once", set())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        te(linear(), recipe=None)(torch.randn(4, 32))
    assert not [warning for warning in seen if "te_dynamo" in str(warning.message)]


WITHOUT_TRITON = """
    import sys, warnings
    sys.modules["triton"] = None  # what `import triton` finds where it is not installed
    import torch
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for width in (32, 48):
            model = torch.nn.Linear(width, 32)
            x = torch.randn(8, width, requires_grad=True)
            y = torch.compile(model, backend="te", options={"codegen": "eager"})(x)
            y.sum().backward()
            assert (y - model(x)).norm() < 0.1 * y.norm()
    print(sum("te_dynamo" in str(w.message) for w in seen), "warning")
"""


@pytest.mark.slow
def test_without_triton_the_reference_runs() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-c", textwrap.dedent(WITHOUT_TRITON)]
    result = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert result.returncode == 0 and result.stdout == "1 warning\n", result.stderr[-2000:]


def test_tokens_that_data_counts_are_not_in_coverage() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.expert = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            chosen = self.router(x)[:, 0].nonzero()[:, 0]
            return self.expert(x[chosen])

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found = te_dynamo.explain(Routed(), torch.randn(4, 16), options=EAGER)
    assert found.coverage == 1.0
    assert (
        "2 of 2 linears; the rows are 100.0% of the model's matrix FLOPs; 1 graph, 0 graph breaks; " in found.headline
    )
    assert "; 1 linear of a length that data decides not counted" in found.headline


@pytest.mark.one_fast_case
@pytest.mark.parametrize("how", ["a function", "torch.compile", "Module.compile"])
def test_a_caller_may_free_what_it_has_compiled(how: str) -> None:
    """Matching looks for the compiled model on the Python stack."""
    model, x = nn.Linear(32, 32), torch.randn(4, 32)
    options: dict[str, Any] = {"backend": "te", "options": EAGER}
    if how == "a function":
        torch.compile(lambda model, x: model(x), **options)(model, x)
    elif how == "torch.compile":
        torch.compile(model, **options)(x)
    else:
        model.compile(**options)
        model(x)
    alive = weakref.ref(model), weakref.ref(x)
    del model, x
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


@pytest.mark.one_fast_case
@pytest.mark.parametrize(
    ("call", "left"),
    [
        (lambda m, x: m(x), 1),
        (lambda m, x: F.gelu(m(x)), 1),
        (lambda m, x: F.silu(m(x)) * m(x), 2),
        (lambda m, x: m(F.rms_norm(x, (64,))), 1),
        (lambda m, x: torch.chunk(m(x), 2, -1)[0], 1),
    ],
    ids=["linear", "gelu", "swiglu", "norm", "chunk"],
)
def test_a_jagged_tensor_is_left_with_a_reason(call: Callable[..., Any], left: int) -> None:
    x = torch.nested.nested_tensor_from_jagged(torch.randn(48, 64), torch.tensor([0, 16, 20, 48]))
    model = nn.Linear(64, 64, bias=False)
    found = te_dynamo.explain(lambda x: call(model, x).values(), x, options=EAGER)
    assert [row.reason for row in found.linears] == ["an operand is a nested tensor"] * left
    assert {row.flops for row in found.linears} == {2 * 48 * 64 * 64}
    expected = call(model, x).values()
    torch.testing.assert_close(torch.compile(call, backend="te", options=EAGER)(model, x).values(), expected)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        lambda: te_dynamo.nn.Linear(32, 32),
        lambda: te_dynamo.nn.LayerNormMLP(32, 64),
        lambda: te_dynamo.Sequential(te_dynamo.ops.BasicLinear(32, 32)),
    ],
    ids=["Linear", "LayerNormMLP", "Sequential"],
)
def test_export_refuses_what_no_file_can_hold(make: Callable[[], nn.Module], strict: bool) -> None:
    """torch.export.save would write a file that cannot be read, AOTInductor fails on its arguments."""
    with pytest.raises(Exception, match=r"te::\w+ cannot be exported: .* compile what is loaded: ") as caught:
        torch.export.export(make(), (torch.randn(16, 32),), strict=strict)
    assert "torch.export.load(path).module()" in str(caught.value)


def test_what_is_loaded_is_compiled(tmp_path: Path) -> None:
    model, x = nn.Sequential(linear(), nn.GELU(), linear()), torch.randn(16, 32)
    torch.export.save(torch.export.export(model, (x,)), tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    assert te_dynamo.explain(loaded, x, options=EAGER).coverage == 1.0
    torch.testing.assert_close(te(loaded)(x), te(model)(x), rtol=0, atol=0)


def test_a_wrapper_in_c_plus_plus_calls_no_reference() -> None:
    model, x = linear(), torch.randn(16, 32)
    options = {"cpp_wrapper": True, "codegen": "inductor"}
    with pytest.raises(
        Exception, match=r"cpp_wrapper needs kernels for every te operation, and device cpu has no .*te\.linear"
    ):
        te(model, **options)(x)


@pytest.mark.slow
def test_a_wrapper_in_c_plus_plus_runs_a_model_in_its_own_precision() -> None:
    model, x = linear(), torch.randn(16, 32)
    torch.testing.assert_close(te(model, cpp_wrapper=True, codegen="inductor", recipe=None)(x), model(x))


def test_paths_in_a_model_that_a_function_closes_over() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Sequential(nn.Linear(32, 32)))
    found = te_dynamo.explain(lambda x: model(x), torch.randn(4, 32), options=EAGER)
    assert [row.module for row in found.linears] == ["0", "1.0"]
