"""What the user's lines keep apart stays apart: results, casts and gradients that are equal have memory of their own, and what a later line
writes is not read in their place. Each model runs beside the same one without this backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")

N, BF16 = 128, torch.bfloat16
CODEGEN = ["eager", pytest.param("inductor", marks=pytest.mark.slow)]


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter((torch.randn(*shape) / 8).to(BF16))


def compiled(function: Callable[..., Any], codegen: str = "eager", **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    rules = [("", "float8_current_scaling")]
    return torch.compile(function, backend="te", options={"codegen": codegen, "rules": rules, **options})


def near(actual: Tensor, expected: Tensor) -> bool:
    return bool((actual.float() - expected.float()).norm() <= 0.15 * expected.float().norm())


@pytest.mark.parametrize("codegen", CODEGEN)
def test_equal_gradients_are_accumulated_apart(codegen: str) -> None:
    """A first gradient is the parameter's own; a second backward adds to it."""
    torch.manual_seed(0)
    q, k, x = weight(N, 4, 32), weight(N, N), torch.randn(64, N, dtype=BF16)

    def both(x: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.einsum("td,dhe->the", x, q).flatten(1) + x @ k

    gradients = []
    for run in (both, compiled(both, codegen)):
        q.grad = k.grad = None
        for _ in range(3):
            run(x, q, k).float().square().sum().backward()
        assert q.grad is not None and k.grad is not None
        gradients.append((q.grad, k.grad))
    assert gradients[1][0].data_ptr() != gradients[1][1].data_ptr()
    for expected, actual in zip(*gradients, strict=True):
        assert near(actual, expected)


@pytest.mark.parametrize("codegen", CODEGEN)
@pytest.mark.parametrize("kind", ["linear", "rms_norm", "gelu"])
@pytest.mark.parametrize("trains", [False, True])
def test_equal_results_are_two_tensors(kind: str, trains: bool, codegen: str) -> None:
    w = weight(N, N)
    line = {
        "linear": lambda x: F.linear(x, w),
        "rms_norm": lambda x: F.linear(F.rms_norm(x, (N,)), w),
        "gelu": lambda x: F.gelu(F.linear(x, w)),
    }[kind]
    run = compiled(lambda x: (line(x), line(x).view(4, 16, N)), codegen)
    with torch.set_grad_enabled(trains):
        one, two = run(torch.randn(64, N, dtype=BF16))
    kept = one.detach().clone()
    with torch.no_grad():
        two.mul_(-1)
    assert torch.equal(one, kept)


@pytest.mark.parametrize("codegen", CODEGEN)
def test_a_result_is_not_what_backward_saves_of_its_equal(codegen: str) -> None:
    w = weight(N, N)

    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        one, two = F.linear(x, w), F.linear(x, w)
        return one, F.silu(two).float().square().sum()

    x, gradients = torch.randn(64, N, dtype=BF16), []
    for run in (model, compiled(model, codegen)):
        one, loss = run(x)
        with torch.no_grad():
            one.mul_(-1)
        gradients += torch.autograd.grad(loss, w)
    assert near(gradients[1], gradients[0])


@pytest.mark.parametrize(
    "write",
    [lambda p, q: p.add_(1), lambda p, q: q.relu_(), lambda p, q: p.view(-1).mul_(2), lambda p, q: None],
    ids=["first", "second", "view", "returned"],
)
def test_casts_of_a_norm_are_tensors_of_their_own(write: Callable[[Tensor, Tensor], Any]) -> None:
    torch.manual_seed(0)
    w1, w2, x = weight(N, N), weight(N, N), torch.randn(64, N, requires_grad=True)

    def of_casts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = F.layer_norm(x, (N,))
        p, q = y.to(BF16), y.to(BF16)
        write(p, q)
        return F.linear(p, w1) + F.linear(q, w2), p, q

    (expected, *_), (actual, p, q) = of_casts(x), compiled(of_casts)(x)
    assert near(actual, expected) and p.data_ptr() != q.data_ptr()
    inputs = [x, w1, w2]
    gradients = (torch.autograd.grad(y.float().square().sum(), inputs) for y in (actual, expected))
    assert all(near(*pair) for pair in zip(*gradients, strict=True))


class WritesItsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(N, N, bias=False), nn.Linear(N, N, bias=False)
        self.register_buffer("kept", torch.randn(N, N) / 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=BF16):
            y = F.linear(self.b(self.a(x)), self.kept)
        with torch.no_grad():
            self.b.weight.mul_(-1)
            self.kept.mul_(-1)
        return y


@pytest.mark.parametrize("codegen", CODEGEN)
@pytest.mark.parametrize("save_weights", ["original", "quantized"])
def test_backward_has_the_weight_that_forward_read(save_weights: str, codegen: str) -> None:
    torch.manual_seed(0)
    model, x = WritesItsWeight(), torch.randn(64, N, requires_grad=True)
    states = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = []
    for run in (model, compiled(model, codegen, save_weights=save_weights)):
        model.load_state_dict(states)
        y = run(x)
        gradients.append(torch.autograd.grad(y.float().square().sum(), [x, model.a.weight, model.b.weight]))
    for expected, actual in zip(*gradients, strict=True):
        assert near(actual, expected)


def test_a_copy_of_a_view_is_read_when_the_input_is_written() -> None:
    torch.manual_seed(0)
    w, w2, x = weight(N, N), weight(N, N), torch.randn(4, 16, N, dtype=BF16)

    def model(x: Tensor) -> Tensor:
        copied = x.view(64, N).clone()
        y = checkpoint(lambda a: F.linear(F.linear(a, w), w2), copied, use_reentrant=False)
        x.mul_(-1)
        return y

    gradients = [
        torch.autograd.grad(run(x.clone()).float().square().sum(), [w, w2]) for run in (model, compiled(model))
    ]
    for expected, actual in zip(*gradients, strict=True):
        assert near(actual, expected)


@pytest.mark.parametrize("codegen", CODEGEN)
@pytest.mark.parametrize("product", [torch.bmm, torch.matmul])
def test_a_product_of_batches_writes_its_out(product: Any, codegen: str) -> None:
    experts, out = weight(4, N, N).requires_grad_(False), torch.zeros(4, 16, N, dtype=BF16)
    x = torch.randn(4, 16, N, dtype=BF16)

    def model(x: Tensor, out: Tensor) -> Tensor:
        product(x, experts, out=out)
        return out * 2

    expected = model(x, out.clone())
    assert near(compiled(model, codegen)(x, out), expected) and near(out, expected / 2)


def test_pieces_that_overlap_are_no_experts() -> None:
    torch.manual_seed(0)
    weights, x = [weight(N, N) for _ in range(4)], torch.randn(N, N, dtype=BF16)

    def model(x: Tensor) -> Tensor:
        return torch.cat([F.linear(p, w) for p, w in zip(x.tensor_split([96, 32, 120]), weights, strict=True)])

    expected, actual = model(x), compiled(model)(x)
    assert actual.shape == expected.shape and near(actual, expected)
