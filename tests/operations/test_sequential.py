"""Sequential: the same operations eagerly and whole under any compiler, one boundary to autograd, one set of parameters."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.models.operation_runs import ForwardPair

import te_dynamo
from te_dynamo import BasicOperation, Sequential, register_forward_fusion
from te_dynamo.errors import InputError, InvalidOptionError, UnsupportedError
from te_dynamo.operations.basic import (
    GELU,
    AddExtraInput,
    BasicLinear,
    Bias,
    ConstantScale,
    Dropout,
    Identity,
    LayerNorm,
    MakeExtraOutput,
    Reshape,
    RMSNorm,
    SwiGLU,
)
from te_dynamo.recipe import Float8CurrentScaling
from te_dynamo.testing import graph_text


def mlp(recipe: Any = None, **options: Any) -> Sequential:
    """A residual block: x + down(swiglu(up(norm(x))))."""
    torch.manual_seed(0)
    return Sequential(
        MakeExtraOutput(),
        RMSNorm(32),
        BasicLinear(32, 128),
        Bias(128),
        SwiGLU(),
        BasicLinear(64, 32),
        AddExtraInput(),
        recipe=recipe,
        **options,
    )


def results_of(run: Callable[..., Any], module: Sequential, rows: int = 6) -> list[torch.Tensor]:
    """Outputs and all gradients."""
    torch.manual_seed(1)
    x, residual = torch.randn(rows, 32, requires_grad=True), torch.randn(rows, 32, requires_grad=True)
    y, branch = run(x.sin(), residual)
    grads = torch.autograd.grad((y.square() + branch.cos()).mean(), [x, residual, *module.parameters()])
    return [y, branch, *grads]


@pytest.mark.parametrize(
    ("backend", "recipe"),
    [
        ("eager", None),
        ("aot_eager", None),
        pytest.param("inductor", None, marks=pytest.mark.slow),
        pytest.param("te", None, marks=pytest.mark.slow),
        ("eager", Float8CurrentScaling()),
        ("aot_eager", Float8CurrentScaling()),
        *[pytest.param(backend, Float8CurrentScaling(), marks=pytest.mark.slow) for backend in ("inductor", "te")],
    ],
)
def test_traces_whole_under_any_backend(backend: str, recipe: Any) -> None:
    module = mlp(recipe)
    expected = results_of(module, module)
    found = results_of(torch.compile(module, backend=backend, fullgraph=True), module)
    for a, b in zip(found, expected, strict=True):
        # Inductor may add up in another order, which can move an FP8 value to its neighbour.
        tolerance = {} if backend in ("eager", "aot_eager") else {"rtol": 1e-2, "atol": 1e-3}
        torch.testing.assert_close(a, b, **(tolerance or {"rtol": 0, "atol": 0}))


def test_the_parts_are_what_the_graph_holds() -> None:
    """Below autograd the compiler sees te.quantize and te.gemm, so that its own fusions apply inside."""
    module = mlp(Float8CurrentScaling())
    with te_dynamo.capture() as graphs:
        results_of(torch.compile(module, backend="te", options={"codegen": "eager"}, fullgraph=True), module)
    assert "te.sequence(" in graphs["match"] and "te.sequence(" not in graphs["joint"]
    assert graphs["joint"].count("te.gemm(") == 6
    assert "te.rms_norm_quantize(" in graphs["forward"] and "te.gated_quantize(" in graphs["forward"]


def test_dynamic_shapes() -> None:
    module = mlp(Float8CurrentScaling())
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (6, 10):
        for a, b in zip(results_of(compiled, module, rows), results_of(module, module, rows), strict=True):
            assert torch.equal(a, b)


@pytest.mark.one_fast_case
@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), None], ids=["fp8", "high precision"])
@pytest.mark.parametrize("backend", ["aot_eager", None])
def test_everything_runs_in_the_inputs_dtype(backend: str | None, recipe: Any) -> None:
    """With fp32 parameters, and under autocast, which would choose for each operation inside."""
    module = mlp(recipe)
    run = module if backend is None else torch.compile(module, backend=backend, fullgraph=True)
    x = torch.randn(4, 32, dtype=torch.bfloat16, requires_grad=True)
    for enabled in (False, True):
        with torch.autocast("cpu", torch.float16, enabled=enabled):
            y, branch = run(x, x)
        assert y.dtype == branch.dtype == torch.bfloat16
        grads = torch.autograd.grad(y.sum(), [x, *module.parameters()])
        assert [g.dtype for g in grads] == [torch.bfloat16, *[torch.float32] * 4]


# ---- autograd


@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
def test_backward_twice(backend: str | None) -> None:
    module = mlp(Float8CurrentScaling())
    run = module if backend is None else torch.compile(module, backend=backend, fullgraph=True)
    x, residual = torch.randn(4, 32, requires_grad=True), torch.randn(4, 32)
    loss = run(x, residual)[0].sum()
    first = torch.autograd.grad(loss, [x, *module.parameters()], retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, [x, *module.parameters()])))


@pytest.mark.parametrize("backend", [None, "eager"])
def test_double_backward_is_an_error_that_says_so(backend: str | None) -> None:
    module = Sequential(GELU(), ConstantScale(2.0))
    run = module if backend is None else torch.compile(module, backend=backend, fullgraph=True)
    x = torch.randn(4, requires_grad=True)
    (grad,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
    with pytest.raises(
        UnsupportedError, match=r"the backward of GELU, ConstantScale has no derivative: this is a double backward"
    ):
        grad.sum().backward()


def test_backward_stops_where_nothing_needs_a_gradient() -> None:
    module = Sequential(BasicLinear(8, 8), GELU(), BasicLinear(8, 8), GELU())
    module.get_submodule("0").requires_grad_(False)
    x = torch.randn(3, 8)
    y = module(x)
    program = y.grad_fn
    assert [group.first for group in program.groups] == [2, 3]  # type: ignore[union-attr]
    y.sum().backward()
    assert module.get_parameter("0.weight").grad is None and module.get_parameter("2.weight").grad is not None


def test_nothing_is_kept_without_a_gradient() -> None:
    kept: list[Any] = []

    class Watched(Identity):
        def op_forward_compute(self, input: torch.Tensor, params: Any, **_: Any) -> Any:
            output = input * 2
            kept.append(weakref.ref(output))
            return output, [output]

        def op_forward_save_ctx(self, ctx: Any, tensors_to_save: Any) -> None:
            raise AssertionError("nothing needs a gradient")

    y = Sequential(Watched(), GELU(), GELU())(torch.randn(3))
    gc.collect()
    assert kept[0]() is None and y.grad_fn is None


def test_requires_grad_is_read_when_it_is_called() -> None:
    module = Sequential(BasicLinear(8, 8), GELU())
    x = torch.randn(3, 8, requires_grad=True)
    y = module(x)
    module.requires_grad_(False)
    assert torch.autograd.grad(y.sum(), [x, *module.parameters()][:1])[0].shape == (3, 8)
    assert module(x.detach()).grad_fn is None
    with torch.no_grad():
        assert mlp()(torch.randn(2, 32, requires_grad=True), torch.zeros(2, 32))[0].grad_fn is None


def test_views_and_inputs_as_outputs() -> None:
    """A custom operation may return neither; a Sequential may."""
    module = Sequential(MakeExtraOutput(), Reshape((2, -1)), MakeExtraOutput(), Identity())
    x = torch.arange(12.0).view(4, 3).requires_grad_()  # whose sums are exact in any order

    def outputs(run: Any) -> list[torch.Tensor]:
        y, one, two = run(x)
        return [y, one, two, *torch.autograd.grad((y * y).sum() + (2 * one).sum() + two.sum(), x)]

    expected = outputs(module)
    assert torch.equal(expected[3], 2 * x + 3)
    for backend in ("eager", "aot_eager"):
        assert all(map(torch.equal, outputs(torch.compile(module, backend=backend, fullgraph=True)), expected))


class _Reversed(Identity):
    """y = x, dx = -dy."""

    def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> Any:
        return -grad_output, ()


class _NoExtra(BasicOperation):
    """An extra output that is None: of the legacy API."""

    num_extra_outputs = 1

    def fuser_forward(self, ctxs: Any, input: torch.Tensor, *_: Any, **__: Any) -> Any:
        return input, [(None,)]

    def fuser_backward(self, ctxs: Any, grad_output: torch.Tensor, *_: Any) -> Any:
        return grad_output, [()], [()]


def test_results_that_are_none_are_no_copies() -> None:
    x = torch.randn(4, requires_grad=True)
    y, *extra = Sequential(GELU(), _NoExtra(), _NoExtra())(x)
    assert extra == [None, None] and torch.autograd.grad(y.sum(), x)[0] is not None


@pytest.mark.parametrize("first", [(), (GELU(),)], ids=["input", "computed"])
def test_one_tensor_as_two_results_has_two_gradients(first: Any) -> None:
    module = Sequential(*first, MakeExtraOutput(), _Reversed())
    plain = Sequential(*first, Identity())
    x = torch.randn(4, requires_grad=True)
    (expected,) = torch.autograd.grad(plain(x).sum(), x)
    for run in (module, torch.compile(module, backend="aot_eager", fullgraph=True)):
        y, extra = run(x)
        assert torch.equal(torch.autograd.grad((2 * y).sum() + (3 * extra).sum(), x)[0], expected)


# ---- the module


def test_a_pickled_operation_is_hashed_where_it_is_read() -> None:
    op = GELU("tanh")
    vars(op)["_hash"] = hash(op) + 1  # as of a process with other hashes of strings
    assert pickle.loads(pickle.dumps(op)) in {GELU("tanh")}


def test_parameters_are_named_by_position() -> None:
    module = mlp(dtype=torch.bfloat16)
    assert list(module.state_dict()) == ["1.weight", "2.weight", "3.bias", "5.weight"]
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    other = mlp(dtype=torch.bfloat16)
    torch.nn.init.zeros_(other.get_parameter("5.weight"))
    other.load_state_dict(module.state_dict())
    x = torch.randn(2, 32).bfloat16()
    assert torch.equal(module(x, x)[0], other(x, x)[0])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies(copied: Any) -> None:
    module = mlp(Float8CurrentScaling())
    twin = copied(module)
    assert twin.sequence == module.sequence and twin.get_parameter("1.weight") is not module.get_parameter("1.weight")
    assert all(map(torch.equal, results_of(twin, twin), results_of(module, module)))


def test_number_of_extra_inputs() -> None:
    with pytest.raises(InputError, match=r"Sequential: expected 1 extra inputs \(AddExtraInput\), got 0"):
        mlp()(torch.randn(2, 32))
    with pytest.raises(TypeError, match=r"expected operations, got Linear"):
        Sequential(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


def test_training_mode() -> None:
    module = Sequential(Dropout(0.5))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    x = torch.ones(1000)
    assert (compiled(x) == 0).any()
    module.eval()
    assert torch.equal(compiled(x), x)


# ---- under the compiler


def test_a_registered_fusion_compiles_anew() -> None:
    calls: list[int] = []

    def watching(ops: Any, *, recipe: Any) -> Any:
        calls.append(len(ops))
        return ops

    module = Sequential(GELU(), LayerNorm(8))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 8)
    torch._dynamo.utils.counters.clear()
    compiled(x)
    with register_forward_fusion(watching):
        compiled(x)
    assert calls == [2] and torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


class Tripled(BasicOperation):
    def op_forward(self, ctx: Any, input: torch.Tensor, params: Any, **_: Any) -> torch.Tensor:
        ctx.factor = 3.0
        return input * 3

    def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> Any:
        return grad_output * ctx.factor, ()


def test_a_legacy_operation_breaks_the_graph_by_name() -> None:
    module = Sequential(GELU(), Tripled())
    x = torch.randn(4, requires_grad=True)
    compiled = torch.compile(lambda x: module(x.sin()).cos(), backend="aot_eager")
    assert torch.equal(compiled(x), module(x.sin()).cos())
    (grad,) = torch.autograd.grad(compiled(x).sum(), x)
    torch.testing.assert_close(grad, torch.autograd.grad(module(x.sin()).cos().sum(), x)[0])
    explained = te_dynamo.explain(lambda x: module(x.sin()).cos(), x, options={"codegen": "eager"})
    assert any(
        "1: Tripled has the legacy op_forward, which cannot be traced" in b.reason for b in explained.graph_breaks
    )
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"1: Tripled has the legacy op_forward"):
        torch.compile(module, backend="eager", fullgraph=True)(x)


class OpaqueGELU(GELU):
    opaque = True


def test_an_opaque_operation_stays_a_node() -> None:
    module = Sequential(OpaqueGELU("tanh"))
    x, dy = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)

    def run(f: Any) -> list[torch.Tensor]:
        y = f(x)
        return [y, *torch.autograd.grad(y, x, dy)]

    with te_dynamo.capture() as graphs:
        found = run(torch.compile(module, backend="te", fullgraph=True))
    for a, b in zip(found, run(module), strict=True):
        torch.testing.assert_close(a, b)
    assert "te.OpaqueGELU(" in graphs["lower.forward"] and "te.OpaqueGELU_backward(" in graphs["lower.backward"]


def test_opcheck() -> None:
    """torch's own test of a custom operation: schema, fake against real, autograd registration."""
    op, x = GELU(), torch.randn(3, 8, requires_grad=True)
    from te_dynamo.operations.run import Call

    torch.library.opcheck(
        GELU.forward_overload,
        (x, [], [], op, Call.of([op], [True], True)),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )
    module = mlp(Float8CurrentScaling())
    args = (x.new_zeros(4, 32), list(module.parameters()), [x.new_zeros(4, 32)], module.sequence, [True] * 6, True, "")
    torch.library.opcheck(torch.ops.te.sequence.default, args, test_utils=("test_schema", "test_faketensor"))


def test_the_graph_names_the_operations() -> None:
    module = Sequential(BasicLinear(8, 8), GELU("tanh"))
    with te_dynamo.capture() as graphs, torch.no_grad():
        torch.compile(module, backend="te", options={"codegen": "eager"})(torch.randn(2, 8))
    assert "OperationSequence((BasicLinear(8, 8), GELU(approximate='tanh')))" in graph_text(graphs.graph("match"))


def fuse_pair(ops: Any, *, recipe: Any) -> Any:
    return te_dynamo.operations.sliding_window(ops, (ConstantScale, Identity), ForwardPair)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Sequential(BasicLinear(32, 64), ConstantScale(2.0), Identity(), recipe=Float8CurrentScaling())
        self.head = Sequential(Bias(64), BasicLinear(64, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(x))


def test_explain_shows_the_operations_of_a_sequential() -> None:
    x = torch.randn(4, 32)
    with register_forward_fusion(fuse_pair):
        told = te_dynamo.explain(Model(), x, options={"codegen": "eager"}).to_dict()
        alone = te_dynamo.explain(Model(), x, options={"codegen": "eager", "fusions": False}).to_dict()
    rows = [(row["module"], row["matched"], row["recipe"], row["shape"], row["reason"]) for row in told["linears"]]
    assert rows == [
        ("block.0", True, "float8_current_scaling", ("4", "64", "32"), ""),
        ("head.1", False, "", ("4", "8", "64"), "its Sequential has no recipe"),
    ]
    assert {"phase": "forward", "fusion": "ForwardPair", "count": 1} in told["fusions"] and not alone["fusions"]


def wrong(ops: Any, *, recipe: Any) -> Any:
    return ops[1:]


@pytest.mark.parametrize("training", [True, False])
def test_a_wrong_fusion_can_be_left_out_under_the_compiler(training: bool) -> None:
    model, x = Model().requires_grad_(training), torch.randn(4, 32)

    def compiled(**options: Any) -> torch.Tensor:
        torch._dynamo.reset()
        return torch.compile(model, backend="te", fullgraph=True, options={"codegen": "eager", **options})(x)

    expected = model(x)
    with register_forward_fusion(wrong):
        with pytest.raises(Exception, match=r"fusion wrong \(.*\) returned 2 basic operations for 3.*fusions.: False"):
            compiled()
        assert torch.equal(compiled(fusions=False), expected)


@pytest.mark.parametrize("norm", [RMSNorm(32), LayerNorm(32)])
def test_a_norm_of_a_single_row(norm: Any) -> None:
    module = Sequential(norm, BasicLinear(32, 64))
    x = torch.randn(32, requires_grad=True)
    expected = torch.autograd.grad(module(x[None]).square().sum(), [x, *module.parameters()])
    actual = torch.autograd.grad(module(x).square().sum(), [x, *module.parameters()])
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_a_recipe_by_name() -> None:
    module = Sequential(BasicLinear(32, 64), recipe="float8_current_scaling")
    assert module.ops == (BasicLinear(32, 64, Float8CurrentScaling()),)
    assert repr(module) == "Sequential(\n  (0): BasicLinear(32, 64, recipe=float8_current_scaling)\n)"
    with pytest.raises(InvalidOptionError, match="float8_current_scaling"):
        Sequential(BasicLinear(32, 64), recipe="float8_current_scalin")
    with pytest.raises(TypeError, match=r"BasicLinear.recipe: expected a te_dynamo.recipe object or None, got 'mxfp8'"):
        BasicLinear(32, 64, "mxfp8")  # type: ignore[arg-type]


def test_on_meta() -> None:
    module = mlp(device="meta")
    x = torch.empty(4, 32, device="meta", requires_grad=True)
    y, _ = module(x, x)
    y.sum().backward()
    assert y.shape == x.shape == x.grad.shape  # type: ignore[union-attr]
