"""Every basic operation against plain PyTorch: forward, all gradients, and the fake's layout against the real one's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

import te_dynamo
from te_dynamo import Float8CurrentScalingQuantizer, Sequential
from te_dynamo.errors import InputError, InvalidOptionError
from te_dynamo.operations import basic
from te_dynamo.operations.basic import *  # noqa: F403
from te_dynamo.operations.basic import AddExtraInput, BasicLinear, Dropout, MakeExtraOutput, Quantize, Reshape
from te_dynamo.operations.fuser import grouped
from te_dynamo.operations.op import BasicOperation
from te_dynamo.operations.program import Program
from te_dynamo.operations.run import Call
from te_dynamo.recipe import Float8CurrentScaling, MXFP8BlockScaling

Torch = Callable[..., Any]


class Case(NamedTuple):
    """op; the same in torch, of (x, *params, *extra inputs); shapes of x and of the extra inputs."""

    op: BasicOperation
    torch: Torch
    shape: tuple[int, ...] = (3, 5, 16)
    extra: tuple[tuple[int, ...], ...] = ()


def _gated(f: Torch) -> Torch:
    return lambda x: f(x[..., : x.shape[-1] // 2]) * x[..., x.shape[-1] // 2 :]


def _clamped(x: torch.Tensor) -> torch.Tensor:
    a, b = x[..., :8].clamp(max=0.7), x[..., 8:].clamp(-0.7, 0.7)
    return a * torch.sigmoid(1.5 * a) * (b + 1)


def _rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (16,), weight, 1e-5)


B = basic
CASES = [
    Case(B.BasicLinear(16, 24), F.linear),
    Case(B.BasicLinear(16, 24), F.linear, (16,)),
    Case(B.Bias(16), lambda x, bias: x + bias),
    Case(B.LayerNorm(16), lambda x, w, b: F.layer_norm(x, (16,), w, b, 1e-5)),
    Case(B.RMSNorm(16), _rms),
    Case(B.RMSNorm(16, zero_centered=True), lambda x, w: _rms(x, 1 + w)),
    Case(B.L2Normalization(eps=1e-3), lambda x: x * (x.square().sum(-1, keepdim=True) + 1e-3).rsqrt()),
    Case(B.GELU(), F.gelu),
    Case(B.GELU("tanh"), lambda x: F.gelu(x, approximate="tanh")),
    Case(B.QGELU(), lambda x: x * torch.sigmoid(1.702 * x)),
    Case(B.ReLU(), F.relu),
    Case(B.SReLU(), lambda x: F.relu(x) ** 2),
    Case(B.SiLU(), F.silu),
    Case(B.GLU(), _gated(torch.sigmoid)),
    Case(B.GEGLU(), _gated(F.gelu)),
    Case(B.GEGLU("tanh"), _gated(lambda a: F.gelu(a, approximate="tanh"))),
    Case(B.QGEGLU(), _gated(lambda a: a * torch.sigmoid(1.702 * a))),
    Case(B.ReGLU(), _gated(F.relu)),
    Case(B.SReGLU(), _gated(lambda a: F.relu(a) ** 2)),
    Case(B.SwiGLU(), _gated(F.silu)),
    Case(B.ClampedSwiGLU(limit=0.7, alpha=1.5), _clamped),
    Case(B.ScaledSwiGLU(), lambda x, s: _gated(F.silu)(x) * s.unsqueeze(-1), extra=((3, 5),)),
    Case(B.ScaledSReLU(), lambda x, s: F.relu(x) ** 2 * s.unsqueeze(-1), extra=((3, 5),)),
    Case(B.Dropout(0.0), lambda x: x),
    Case(B.Dropout(1.0), lambda x: x * 0),
    Case(B.AddExtraInput(), lambda x, e: x + e, extra=((3, 5, 16),)),
    Case(B.MakeExtraOutput(), lambda x: (x * 1, x * 1)),
    Case(B.Quantize(), lambda x: x),
    Case(B.Reshape((5, -1)), lambda x: x.reshape(5, -1)),
    Case(B.ConstantScale(-2.5), lambda x: x * -2.5),
    Case(B.Identity(), lambda x: x),
    Case(B.AllGather(), lambda x: x),
    Case(B.AllReduce(), lambda x: x),
    Case(B.ReduceScatter(), lambda x: x),
]
NAMES = [f"{case.op.describe()}{list(case.shape)}" for case in CASES]


def tensors_of(case: Case, dtype: torch.dtype = torch.float32) -> tuple[Sequential, list[torch.Tensor]]:
    """(the operation as a module, x and the extra inputs)."""
    torch.manual_seed(0)
    module = Sequential(case.op, dtype=dtype)
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return module, [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in (case.shape, *case.extra)]


def outputs_and_grads(run: Torch, inputs: list[torch.Tensor], params: list[torch.Tensor]) -> list[torch.Tensor]:
    """All outputs, and the gradients of everything for a fixed cotangent."""
    outputs = run(*inputs)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    generator = torch.Generator().manual_seed(1)
    loss = sum((o * torch.randn(o.shape, generator=generator, dtype=torch.float32)).sum() for o in outputs)
    grads = torch.autograd.grad(loss, [*inputs, *params], retain_graph=True)
    again = torch.autograd.grad(loss, [*inputs, *params])
    assert all(map(torch.equal, grads, again)), "a second backward gives other gradients"
    return [*outputs, *grads]


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_equals_torch(case: Case) -> None:
    module, inputs = tensors_of(case)
    params = list(module.parameters())
    ours = outputs_and_grads(module, inputs, params)
    theirs = outputs_and_grads(lambda x, *extra: case.torch(x, *params, *extra), inputs, params)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_every_basic_operation_has_a_case() -> None:
    """But for GroupedLinear, whose extra input is no floating point tensor: test_operations_grouped.py."""
    assert {type(case.op).__name__ for case in CASES} == set(basic.__all__) - {"GroupedLinear"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", [*CASES, Case(B.Dropout(0.5), F.dropout)], ids=[*NAMES, "Dropout(0.5)"])
def test_fake_has_the_real_layout(case: Case, dtype: torch.dtype) -> None:
    """Slot for slot, for every combination of gradients: also which saved tensors are inputs."""
    module, (x, *extra) = tensors_of(case, dtype)
    params = [p.detach() for p in module.parameters()]
    check_layout(case.op, x.detach(), params, [e.detach() for e in extra])


@pytest.mark.parametrize("backward", ["quantized", "high_precision"])
@pytest.mark.parametrize("recipe", [Float8CurrentScaling, MXFP8BlockScaling])
def test_fake_of_a_quantized_linear_has_the_real_layout(recipe: Any, backward: str) -> None:
    op = BasicLinear(32, 64, recipe(backward=backward))
    check_layout(op, torch.randn(3, 5, 32), [torch.randn(64, 32)], [])


def check_layout(op: BasicOperation, x: torch.Tensor, params: list[Any], extra: list[Any]) -> None:
    for training in (True, False):
        for flags in itertools.product((True, False), repeat=1 + len(params) + len(extra)):
            groups = grouped([op])
            program = Program(Call.of([op], flags, training), groups, groups)
            real, fake = program.run(x, params, extra), program.fake(x, params, extra)
            assert [(t.shape, t.dtype, t.stride()) for t in real] == [(t.shape, t.dtype, t.stride()) for t in fake]
            if not any(flags):
                assert len(real) == 1 + op.num_extra_outputs, "something is saved that nothing reads"


# ---- what one operation alone promises


def test_bfloat16_is_rounded_once() -> None:
    """Twice would change one value in four. Torch 2.11's gelu of strided halves differs in the last bit of fp32, which changes one in a thousand."""
    x = torch.randn(64, 64).bfloat16()
    for op, f in ((B.QGELU(), lambda x: x * torch.sigmoid(1.702 * x)), (B.GEGLU(), _gated(F.gelu))):
        once = f(x.float()).bfloat16()
        assert (Sequential(op)(x) != once).float().mean() < 0.005


def test_the_first_half_is_gated() -> None:
    """As in Transformer Engine; torch's own glu gates with the second."""
    x = torch.randn(4, 8)
    assert torch.allclose(Sequential(B.GLU())(x), F.glu(x.roll(4, -1)))


@pytest.mark.parametrize("op", [B.GLU(), B.ScaledSwiGLU()])
def test_an_odd_width_has_no_halves(op: BasicOperation) -> None:
    extra = [torch.ones(2)] * op.num_extra_inputs
    with pytest.raises((InputError, RuntimeError), match=rf"{type(op).__name__}.*2N|size|halves"):
        Sequential(op)(torch.randn(2, 7), *extra)


def test_dropout_keeps_the_mask() -> None:
    x = torch.ones(1000, requires_grad=True)
    module = Sequential(Dropout(0.25))
    y = module(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, y.detach())
    torch.testing.assert_close(y.unique(), torch.tensor([0.0, 4 / 3]))
    assert 0.15 < (y == 0).float().mean() < 0.35
    assert torch.equal(module.eval()(x), x)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_dropout_under_recomputation(backend: str | None) -> None:
    """Checkpointing computes forward again, with the same mask."""
    module = Sequential(B.GELU(), Dropout(0.5), B.ConstantScale(2.0))

    def checkpointed(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)

    run = checkpointed if backend is None else torch.compile(checkpointed, backend=backend, fullgraph=True)
    x = torch.full((4096,), 0.7, requires_grad=True)
    y = run(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    dropped = y == 0
    assert torch.equal(dropped, grad == 0) and len(grad.unique()) == 2
    assert 0.4 < (y == 0).float().mean() < 0.6


def test_a_missing_grad_of_an_extra_output_is_zero() -> None:
    x = torch.randn(4, requires_grad=True)
    y, extra = Sequential(MakeExtraOutput(), B.ConstantScale(3.0))(x)
    assert torch.equal(extra, x)
    assert torch.equal(torch.autograd.grad(y.sum(), x, retain_graph=True)[0], torch.full((4,), 3.0))
    assert torch.equal(torch.autograd.grad(extra.sum(), x, retain_graph=True)[0], torch.ones(4))
    assert torch.equal(torch.autograd.grad((y + extra).sum(), x)[0], torch.full((4,), 4.0))


def test_quantize_rounds_values_and_gradients() -> None:
    quantizer = Float8CurrentScalingQuantizer()
    x, dy = torch.randn(16, 32, requires_grad=True), torch.randn(16, 32)
    y = Sequential(Quantize(quantizer, quantizer))(x)
    assert torch.equal(y, quantizer.quantize(x).dequantize()) and not torch.equal(y, x)
    assert torch.equal(torch.autograd.grad(y, x, dy)[0], quantizer.quantize(dy).dequantize())


def test_bad_arguments() -> None:
    x = torch.randn(2, 8)
    with pytest.raises(InvalidOptionError, match=r"unknown GELU.approximate 'erf'; valid: 'none', 'tanh'"):
        B.GELU("erf")
    with pytest.raises(InvalidOptionError, match=r"Dropout: p is a probability, got 1.5"):
        Dropout(1.5)
    with pytest.raises(InvalidOptionError, match=r"BasicLinear\(24, 16\): FP8 GEMMs need multiples of 16"):
        Sequential(BasicLinear(24, 16), recipe=Float8CurrentScaling())
    with pytest.raises(InputError, match=r"AddExtraInput: the extra input has the shape \[8\], the input \[2, 8\]"):
        Sequential(AddExtraInput())(x, torch.ones(8))
    with pytest.raises(RuntimeError, match=r"shape '\[3, -1\]' is invalid"):
        Sequential(Reshape((3, -1)))(x)
    with pytest.raises(TypeError, match=r"Bias.features: expected a value .* got Tensor"):
        B.Bias(torch.ones(3))  # type: ignore[arg-type]


def test_operations_are_values() -> None:
    assert B.GELU() == B.GELU() and hash(B.GELU()) == hash(B.GELU()) and B.GELU() != B.GELU("tanh")
    assert B.GELU() != B.GEGLU()
    op = BasicLinear(16, 32, Float8CurrentScaling(backward="high_precision"))
    text, names = op.__fx_repr__()
    assert eval(text, dict(names)) == op
    with pytest.raises(AttributeError):
        op.in_features = 3  # type: ignore[misc]
    assert te_dynamo.ops.BasicLinear is BasicLinear


@pytest.fixture
def two_processes() -> Iterator[None]:
    """One process that takes itself for the first of two: collectives give the right shapes and no sums."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("op", "rows"),
    [(B.AllGather(), 8), (B.AllReduce(), 4), (B.ReduceScatter(), 2)],
    ids=["gather", "reduce", "scatter"],
)
def test_collectives_of_two_processes(two_processes: None, op: BasicOperation, rows: int) -> None:
    x = torch.randn(4, 3, requires_grad=True)
    y = Sequential(op)(x)
    assert y.shape == (rows, 3)
    assert torch.autograd.grad(y.sum(), x)[0].shape == (4, 3)
    check_layout(op, x.detach(), [], [])
    compiled = torch.compile(Sequential(op), backend="aot_eager", fullgraph=True)(x)
    assert compiled.shape == (rows, 3) and torch.autograd.grad(compiled.sum(), x)[0].shape == (4, 3)


def test_collectives_are_of_the_group_they_name(two_processes: None) -> None:
    alone = torch.distributed.new_group([0]).group_name
    for op in (B.AllGather(group=alone), B.AllReduce(group=alone), B.ReduceScatter(group=alone)):
        assert Sequential(op)(torch.ones(3, 2)).shape == (3, 2), "no other process shares it"


def test_processes_cannot_share_an_odd_dimension(two_processes: None) -> None:
    with pytest.raises(InputError, match=r"ReduceScatter: 2 processes cannot share a leading dimension of 3"):
        Sequential(B.ReduceScatter())(torch.randn(3, 2))
