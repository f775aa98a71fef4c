"""Linears whose N is no multiple of 16: padded where that wastes little, with the numbers and gradients of the unpadded."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers.graphs.matching import Matched
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import te_dynamo
from te_dynamo.passes.torch_ir.match.patterns.linears.padding import padding

EAGER = {"codegen": "eager"}


class Head(nn.Module):
    """A head of 1009 columns behind a linear."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(64, 64), nn.Linear(64, 1009, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.up(x)))


class Transposed(Head):
    """The same, the weight stored as [K, N]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 1009) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x) @ self.weight


class Flat(Head):
    """A view across the rows, which the longer rows do not have."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(-1) * 2.0


class Inner(nn.Module):
    """K = 106 and then, as [K, N], 196: TabTransformer's and Mixer's."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(106, 196), nn.Parameter(torch.randn(196, 64) / 14)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.up(F.pad(x, (0, 42)))) @ self.down


class Inside(Head):
    """A product that leaves a checkpointed region."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False).view(-1)


def test_what_is_padded() -> None:
    assert [padding(n, 16) for n in (50257, 30522, 51865, 3352, 1024)] == [15, 6, 7, 8, 0]
    assert [padding(k, 16) for k in (479, 424, 196, 106)] == [1, 8, 12, 6]
    assert padding(8, 16) == padding(100, 16) == 0, "more than a sixteenth"


@pytest.mark.parametrize("model", [Head, Transposed, Flat, lambda: Head(bias=False), Inner, Inside])
def test_numbers_are_those_of_a_padded_model(model) -> None:
    torch.manual_seed(0)
    module = model().bfloat16()
    x = torch.randn(4, 32, 64, dtype=torch.bfloat16, requires_grad=True)
    expected = module(x)
    grad = torch.randn_like(expected)
    expected.backward(grad)
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    with te_dynamo.capture() as graphs:
        actual = torch.compile(module, backend="te", options=EAGER)(x)
        actual.backward(grad)
    assert graphs["match"].count("te.linear(") == 2 and "torch.cat(" in graphs["match"]
    assert actual.shape == expected.shape and (actual - expected).norm() < 0.1 * expected.norm()
    for name, gradient in gradients.items():
        other = module.get_parameter(name).grad
        assert other is not None and other.shape == gradient.shape and other.is_contiguous()
        assert (other - gradient).norm() < 0.15 * gradient.norm(), name


def test_the_rows_say_the_users_sizes_and_few_columns_are_left() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.router = nn.Linear(64, 1009), nn.Linear(64, 24)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x).sum() + self.router(x).sum()

    rows = te_dynamo.explain(Router(), torch.randn(32, 64), options=EAGER).linears
    assert [(row.module, row.matched, row.shape[1]) for row in rows] == [
        ("head", True, "1009"),
        ("router", False, "24"),
    ]
    assert rows[1].reason == (
        "N = 24, K = 64: FP8 GEMMs need N and K to be multiples of 16; padding N to 32 would add 33%, more than 1/16"
    )


def test_a_frozen_head_is_quantized_in_each_call() -> None:
    module = Head().bfloat16()
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    run = torch.compile(module, backend="te", options=EAGER)
    with torch.no_grad():
        expected = run(x)
        te_dynamo.freeze(module, drop_weights=True)
        assert torch.equal(run(x), expected)


PRODUCTS = {
    "padded": lambda x, w: F.linear(x, w),
    "weight on the left": lambda x, w: w @ x.mT,
    "einsum": lambda x, w: torch.einsum("btk,nk->nbt", x, w),
    "einsum in order": lambda x, w: torch.einsum("btk,nk->btn", x, w),
    "einsum of three": lambda x, w: torch.einsum("btk,mk,nm->btn", x, w[:64], w.view(250, 64)),
    "experts": lambda x, w: torch.einsum("btk,bkn->btn", x, w.view(2, 125, 64).mT.repeat(1, 1, 2)),
    "einsum, permuted": lambda x, w: torch.einsum("btk,nk->btn", x, w).permute(1, 0, 2),
    "patches": lambda x, w: F.conv2d(x.view(2, 4, 16, 8), w.view(-1, 4, 4, 4), stride=4),
}
VIEWS = {
    "view": lambda h: h.view(-1),
    "aten": lambda h: torch.ops.aten.view.default(h, [-1]),
    "reshape": lambda h: h.reshape(-1),
    "flatten": lambda h: h.flatten(1),
    "contiguous": lambda h: h.contiguous(),
    "of a part": lambda h: h[0].view(-1),
    "of one more": lambda h: h[None].view(-1),
    "of parts": lambda h: h.split(1)[1].view(-1),
    "detached": lambda h: h.detach().view(-1),
    "twice transposed": lambda h: h.mT.mT.view(-1),
    "in place": lambda h: h.add_(1).view(-1),
    "augmented": lambda h: operator.iadd(h, 1).reshape(-1),
    "swapped": lambda h: h.transpose(0, 1).contiguous(),
    "strided": lambda h: h.as_strided((5, 3), (7, 2)),
    "of a sum": lambda h: (h + 1).view(-1),
    "of an activation, written": lambda h: (r := h.relu(), r.reshape(-1)[:9].mul_(7))[0],
    "of what has its form": lambda h: torch.zeros_like(h).view(-1),
    "by a checkpoint": lambda h: checkpoint(lambda y: y.view(-1) * 2, h, use_reentrant=False),
}


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("write", [False, True], ids=["read", "written"])
def test_views_of_a_product_are_those_of_its_own_strides(product: str, view: str, write: bool) -> None:
    """What eager can view is viewed, and a write is seen where it is in eager: some views are copies of other strides."""

    def forward(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = PRODUCTS[product](x, w)
        v = VIEWS[view](h)
        if write:
            v[:1].mul_(3)
            h[:1].mul_(5)
        return v * 1, h * 1

    x, w = torch.randn(2, 8, 64), nn.Parameter(torch.randn(250, 64))
    with torch.no_grad():
        try:
            expected = forward(x, w)
        except RuntimeError:  # eager cannot view it
            return
        compiled = Matched(forward)
        torch.testing.assert_close(compiled(x, w), expected, rtol=1e-3, atol=1e-3)
    assert set(compiled.reasons()) == {""}


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize(
    "part", [lambda h: h, lambda h: h[1:], lambda h: h.relu()], ids=["whole", "part", "of an activation"]
)
def test_behind_the_graph_dimensions_lie_in_the_order_that_eager_has(
    product: str, part: Callable[[Tensor], Tensor]
) -> None:
    """A caller, and the code behind a graph break, view the result."""

    def order(h: Tensor) -> list[int]:
        return sorted((d for d in range(h.dim()) if h.shape[d] > 1), key=h.stride)

    x, w = torch.randn(2, 8, 64), nn.Parameter(torch.randn(250, 64))
    compiled = Matched(lambda x, w: part(PRODUCTS[product](x, w)))
    assert order(compiled(x, w)) == order(part(PRODUCTS[product](x, w)))
    assert set(compiled.reasons()) == {""}


def test_a_users_operation_gets_the_strides_that_it_gets_in_eager() -> None:
    @torch.library.custom_op("te_test::row_length", mutates_args=())
    def row_length(x: Tensor) -> Tensor:
        return x.new_full((1,), x.stride(0))

    row_length.register_fake(lambda x: x.new_empty(1))
    w = nn.Parameter(torch.randn(250, 64))
    compiled = Matched(lambda x: row_length(F.linear(x, w)))
    assert compiled(torch.randn(8, 64)) == 250 and compiled.reasons() == [""]
