"""Inputs whose collective has not been waited for (passes/torch_ir/async_inputs.py): what is computed of them is what is computed of plain ones.

One process, whose collectives give garbage until they are waited for; tests/distributed/test_distributed.py has real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from helpers.models.small_models import GeluMLP, SwiGLU
from helpers.models.training import EAGER
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import te_dynamo
from te_dynamo.errors import UnsupportedError
from te_dynamo.passes.torch_ir import async_inputs

if not torch.distributed.is_available():
    pytest.skip("torch without distributed", allow_module_level=True)

from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module

CODEGENS = [EAGER, pytest.param({"codegen": "inductor"}, marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


class Pending(torch.autograd.Function):
    """The identity as a collective: its values come when somebody waits. grad_too: in backward as well."""

    values: ClassVar[dict[int, tuple[Tensor, Tensor]]] = {}

    @staticmethod
    def forward(ctx: Any, x: Tensor, grad_too: bool = False) -> Tensor:
        ctx.grad_too = grad_too
        return x.view_as(x) if grad_too else Pending.of(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return Pending.of(grad) if ctx.grad_too else grad, None

    @classmethod
    def of(cls, x: Any) -> Any:
        if isinstance(x, DTensor):
            return DTensor(cls.of(x.to_local()), x._spec, requires_grad=x.requires_grad)
        buffer = torch.full_like(x, 1e3)
        cls.values[buffer.data_ptr()] = buffer, x.detach().clone()
        return collectives.AsyncCollectiveTensor(buffer)


@pytest.fixture(autouse=True)
def values_come_late(monkeypatch: pytest.MonkeyPatch, mesh: DeviceMesh) -> None:
    wait = collectives.wait_tensor

    def arrive(tensor: Tensor) -> Tensor:
        if type(tensor) is Tensor and tensor.data_ptr() in Pending.values:
            buffer, arrived = Pending.values.pop(tensor.data_ptr())
            buffer.copy_(arrived)
        return wait(tensor)

    monkeypatch.setattr(collectives, "wait_tensor", arrive)


Wrap = Callable[[Tensor], Any]


def plain(x: Tensor) -> Tensor:
    return x


def pending(x: Tensor) -> Tensor:
    return Pending.apply(x)


def trained(call: Callable[..., Any], wrap: Wrap, tokens: int = 24, after: Wrap = plain) -> list[Tensor]:
    """[output, gradient of what is before the block]"""
    torch.manual_seed(tokens)
    x = torch.randn(2, tokens, 32, requires_grad=True)
    y = after(call(wrap(x)))
    y = y.full_tensor() if isinstance(y, DTensor) else y
    y.square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad]


def compiled(module: nn.Module, options: dict[str, Any], backend: Any = "te") -> Any:
    return torch.compile(module, backend=backend, options=options)


def assert_same(one: list[Tensor], other: list[Tensor]) -> None:
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)


def test_the_collective_gives_garbage_at_first() -> None:
    x = torch.ones(4)
    assert pending(x).elem.eq(1e3).all() and pending(x).add(0).eq(1).all()


@pytest.mark.slow
@pytest.mark.parametrize("options", CODEGENS)
def test_one_graph_after_another(options: dict[str, Any]) -> None:
    """A plain input after a collective's and the other way round, with sizes that change."""
    call, expected = compiled(nn.Linear(32, 32), options), []
    for wraps in ([plain] * 4, [pending, plain, pending, pending], [plain, pending, plain, pending]):
        torch._dynamo.reset()
        results = [trained(call, wrap, 24 + 8 * i) for i, wrap in enumerate(wraps)]
        expected = expected or results
        for one, other in zip(results, expected, strict=True):
            assert_same(one, other)


def test_sizes_that_change_need_two_graphs() -> None:
    with te_dynamo.capture() as graphs:
        call = compiled(nn.Linear(32, 32), EAGER)
        for tokens in (16, 24, 32, 40):
            trained(call, pending, tokens)
    assert len(graphs.reports) == 2


@pytest.mark.slow
@pytest.mark.parametrize("options", CODEGENS)
def test_inside_dtensors(mesh: DeviceMesh, options: dict[str, Any]) -> None:
    call = compiled(distribute_module(nn.Linear(32, 32), mesh), options)

    def shared(x: Tensor) -> DTensor:
        return DTensor.from_local(x, mesh, [Replicate()])

    expected = [trained(call, shared, tokens) for tokens in (24, 32)]
    for wraps in ([lambda x: shared(pending(x))] * 2, [shared, lambda x: shared(pending(x))]):
        torch._dynamo.reset()
        for wrap, tokens, wanted in zip(wraps, (24, 32), expected, strict=True):
            assert_same(trained(call, wrap, tokens), wanted)


@pytest.mark.parametrize("options", CODEGENS)
def test_gradients_whose_collective_may_still_run(mesh: DeviceMesh, options: dict[str, Any]) -> None:
    for model, wrap in (
        (SwiGLU(), plain),
        (distribute_module(GeluMLP(), mesh), lambda x: DTensor.from_local(x, mesh, [Replicate()])),
    ):
        call = compiled(model, options)
        late = trained(call, wrap, after=lambda y: Pending.apply(y, True))
        assert_same(late, trained(call, wrap))


@pytest.mark.one_fast_case
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_checkpoints(inside: bool, reentrant: bool) -> None:
    block = SwiGLU()
    if not inside:
        block.compile(backend="te", options=EAGER)

    def recomputed(x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=reentrant)

    call = torch.compile(recomputed, backend="te", options=EAGER) if inside else recomputed
    assert_same(trained(call, pending), trained(call, plain))


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("options", CODEGENS)
def test_inference(options: dict[str, Any], without: Any) -> None:
    call, x = compiled(SwiGLU(), options), torch.randn(2, 24, 32)
    with without():
        assert torch.equal(call(Pending.of(x)), call(x))


def test_kept_weights() -> None:
    """Weights are found by the positions of inputs."""
    call = compiled(SwiGLU(), {**EAGER, "weight_cache": "step", "weight_cache_check": True})
    expected = trained(call, plain)
    for _ in range(2):
        assert_same(trained(call, pending), expected)


class Flat(nn.Module):
    """A block that begins with a view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = x.flatten(0, 1)
        return self.linear(rows), rows


def test_views_are_plain_too() -> None:
    """The linear that reads one runs in the recipe; one that is returned has its gradient."""
    with te_dynamo.capture() as graphs:
        call = compiled(Flat(), EAGER)
        late = [trained(lambda x, part=part: call(x)[part], pending) for part in (0, 1)]
    assert [(r.module, r.reason) for report in graphs.reports for r in report.matches] == [("linear", "")]
    for part in (0, 1):
        assert_same(late[part], trained(lambda x, part=part: call(x)[part], plain))


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden.mul_(2)
        return self.linear(hidden)


@pytest.mark.parametrize("options", CODEGENS)
def test_a_write_to_one_with_a_gradient_is_an_error(options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=r"writes to its input L\['hidden'\].*x\.clone\(\)"):
        trained(compiled(Writes(), options), lambda x: pending(x * 1))


@pytest.mark.parametrize("options", CODEGENS)
def test_a_write_in_inference_is_seen(options: dict[str, Any]) -> None:
    x = torch.randn(2, 24, 32)
    with torch.no_grad():
        written = Pending.of(x)
        compiled(Writes(), options)(written)
        assert torch.equal(written.add(0), 2 * x)


def test_plain_inputs_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_inputs.WaitsForInputs, "__call__", None)
    trained(compiled(SwiGLU(), EAGER), plain)
    with pytest.raises(TypeError):
        trained(compiled(SwiGLU(), EAGER), pending)
