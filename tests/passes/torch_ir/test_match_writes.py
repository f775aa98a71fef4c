"""Stage 1 beside writes: whatever alias a model writes through, and whatever function writes, a match computes what the user's line did.

Each model runs matched, with plain functions for the te operations, and must give what it gives alone, gradients too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.graphs.matching import Matched
from helpers.slow import slow_but
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)

UP, GATE, DOWN = (torch.randn(shape).div(8).requires_grad_() for shape in ((64, 32), (64, 32), (32, 64)))
SCALE = torch.rand(64).requires_grad_()
PAD = torch.arange(8) % 3 == 0
BATCH = torch.randn(4, 512)
SQUARE = nn.Parameter(torch.randn(32, 32))


def up(x: Tensor) -> Tensor:
    return F.linear(x, UP)


def down(x: Tensor) -> Tensor:
    return F.linear(x, DOWN)


# ---- writers that torch cannot tell from their names

_library = torch.library.Library("te_dynamo_writes", "DEF")
_library.define("first(Tensor(a!) out, Tensor x) -> ()")
_library.define("second(Tensor x, Tensor(a!) residual) -> Tensor")


def _copy(out: Tensor, x: Tensor) -> None:
    out.copy_(x)


_library.impl("first", _copy, "CompositeExplicitAutograd")
_library.impl("second", lambda x, residual: residual.add_(x).clone(), "CompositeExplicitAutograd")
_ops = torch.ops.te_dynamo_writes


@torch._dynamo.allow_in_graph
def opaque(x: Tensor) -> Tensor:
    return x.mul_(-3)


@torch._dynamo.nonstrict_trace
def untraced(x: Tensor) -> Tensor:
    return x.mul_(-3)


@torch._dynamo.allow_in_graph
def itself(x: Tensor) -> Tensor:
    return x


Write = Callable[[Tensor], Any]

WRITES: dict[str, Write] = {
    "the tensor": lambda g: g.add_(5),
    "a view": lambda g: g.view(-1, g.shape[-1]).masked_fill_(PAD[: g.shape[0], None], 3),
    "an item of a view": lambda g: g.view(-1, g.shape[-1]).__setitem__(0, 3),
    "detach": lambda g: g.detach().add_(5),
    "data": lambda g: g.data.add_(5),
    "a slice": lambda g: g[:, 0:9].add_(5),
    "a chunk": lambda g: g.chunk(2, -1)[1].mul_(-3),
    "a transposed view": lambda g: g.T.add_(5),
    "what an unknown function gives back": lambda g: itself(g).add_(5),
    "a packet": lambda g: _ops.first(g, torch.ones_like(g)),
    "an overload": lambda g: _ops.first.default(g, torch.ones_like(g)),
    "an aten packet": lambda g: torch.ops.aten.add_(g, 5),
    "a second argument": lambda g: _ops.second(torch.ones_like(g), g),
    "allow_in_graph": opaque,
    "nonstrict_trace": untraced,
    "foreach": lambda g: torch._foreach_mul_([g], -3.0),
    "out": lambda g: torch.neg(torch.ones_like(g), out=g),
    "numpy": lambda g: g.numpy().__setitem__(slice(0, 4), 3.0),
    "inplace": lambda g: F.hardtanh(g, -0.1, 0.1, True),
    "by name": lambda g: nn.init.constant_(tensor=g, val=1.0),
    "running statistics": lambda g: F.batch_norm(BATCH[:, : g.numel()], g.view(-1), g.view(-1), training=True),
    "embedding": lambda g: F.embedding(torch.arange(4), g, max_norm=0.1),
}
"""How a tensor is written. torch cannot tell from the name of the last ones that they write."""

FORMULAS: dict[str, Callable[[Tensor, Write], Tensor]] = {}


def formula(function: Callable[[Tensor, Write], Tensor]) -> Callable[[Tensor, Write], Tensor]:
    FORMULAS[function.__name__] = function
    return function


@formula
def gated(g, write):
    a = F.silu(g)
    write(g)
    return a * g


@formula
def squared_relu(g, write):
    a = torch.relu(g)
    write(a)
    return a * a


@formula
def quick_gelu(g, write):
    s = torch.sigmoid(1.702 * g)
    write(g)
    return g * s


@formula
def tanh_gelu(g, write):
    t = torch.tanh(0.7978845608028654 * (g + 0.044715 * g**3))
    write(g)
    return 0.5 * g * (1 + t)


@formula
def rms_norm(g, write):
    r = torch.rsqrt(g.pow(2).mean(-1, keepdim=True) + 1e-6)
    write(g)
    return SCALE * (g * r)


@formula
def layer_norm(g, write):
    c = g - g.mean(-1, keepdim=True)
    v = (c * c).mean(-1, keepdim=True)
    write(c)
    return c * torch.rsqrt(v + 1e-5) * SCALE


@formula
def modulated_norm(g, write):
    scale = 1 + g
    write(scale)
    return F.layer_norm(g[:, None], (64,)) * scale[:, None] + g[:, None]


@formula
def behind_a_norm(g, write):
    n = F.rms_norm(g, (64,), SCALE)
    a = torch.relu(n)
    write(n)
    return down(n).sum() + a * n


@pytest.mark.parametrize(("name", "write"), slow_but(45, [(name, write) for write in WRITES for name in FORMULAS]))
def test_a_write_inside_a_formula(name: str, write: str) -> None:
    """The fast ones have each formula and each write; the others find a write that one formula alone overlooks."""

    def forward(x):
        return down(FORMULAS[name](up(x), WRITES[write]))

    x = torch.randn(8, 32)
    with torch.no_grad():
        torch.testing.assert_close(Matched(forward)(x), forward(x))


@pytest.mark.parametrize("name", FORMULAS)
def test_without_a_write_it_is_matched(name: str) -> None:
    compiled = Matched(lambda x: down(FORMULAS[name](up(x), lambda g: None)))
    with torch.no_grad():
        compiled(torch.randn(8, 32))
    assert sum(
        f"te.{kind}(" in compiled.text()
        for kind in ("gated", "relu2", "quick_gelu", "gelu", "rms_norm", "layer_norm", "layer_norm_modulate")
    )


# ---- writes that autograd allows: gradients too


def cast_before_a_norm(x):
    """A residual in fp32, of a model in bf16."""
    h = up(x).bfloat16().float()
    h.add_(F.linear(x, GATE))
    y = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return F.linear(SCALE.bfloat16() * y.bfloat16(), DOWN.bfloat16()).float()


def weight_of_gemma(x):
    w = 1 + SCALE
    w.clamp_(max=1.6)
    h = up(x)
    return down(h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * w)


def scale_of_each_sample(x):
    h = up(x)[:, None]
    scale = 1 + F.linear(x, GATE)[:, None]
    scale[:2] = 1.0
    return down(F.layer_norm(h, (64,)) * scale + h)


def view_of_what_a_linear_gives(x):
    h = up(x)
    a = torch.relu(h + 0)
    h.view(-1, 64)[PAD] = 0
    return down(a * F.linear(x, GATE)) + h.sum()


def in_a_checkpoint(x):
    def body(x):
        scale = 1 + F.linear(x, GATE)[:, None]
        scale[:2] = 1.0
        return down(F.layer_norm(up(x)[:, None], (64,)) * scale + scale)

    return checkpoint(body, x, use_reentrant=False)


def after_the_region(x):
    h = up(x) * 1
    y = checkpoint(lambda h: down(h + 1), h, use_reentrant=False)
    return y + h.sum()


TRAINED = (
    cast_before_a_norm,
    weight_of_gemma,
    scale_of_each_sample,
    view_of_what_a_linear_gives,
    in_a_checkpoint,
    after_the_region,
)


@pytest.mark.one_fast_case
@pytest.mark.parametrize("forward", TRAINED, ids=lambda f: f.__name__)
def test_a_write_that_autograd_allows(forward: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(8, 32)
    parameters = (UP, GATE, DOWN, SCALE)
    results = []
    for run in (forward, Matched(forward, run="aot")):
        given = x.clone().requires_grad_()
        y = run(given)
        results.append((y, *torch.autograd.grad(y.square().sum(), (given, *parameters), allow_unused=True)))
    torch.testing.assert_close(*results, rtol=1e-2, atol=1e-2)


# ---- what is read through: views, casts and stacks


def transposed_twice(x):
    w = SQUARE.t()
    w.t_()
    return x @ w


def swapped_twice(x):
    h = up(x).view(2, 4, 64).transpose(0, 1)
    h.transpose_(0, 1)
    return down(h)


def transposed_experts(x):
    w = torch.stack([DOWN.detach(), DOWN.detach() * 2]).transpose(1, 2)
    w.transpose_(1, 2)
    return torch.bmm(up(x).view(2, 4, 64), w.transpose(1, 2))


def unsqueezed(x):
    h = up(x)
    y = down(h)
    h.unsqueeze_(0)
    return y + h.sum()


def a_norms_product(x):
    h = up(x)
    o = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    w = 1 + SCALE
    o.unsqueeze_(0)
    return down(o * w)


def other_storage(x):
    w = DOWN.detach().clone().t()
    y = x.new_ones(64, 32)
    w.set_(y)
    return up(x) @ w


@pytest.mark.parametrize(
    "forward",
    [transposed_twice, swapped_twice, transposed_experts, unsqueezed, a_norms_product, other_storage],
    ids=lambda f: f.__name__,
)
def test_a_view_whose_form_changes(forward: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(8, 32)
    with torch.no_grad():
        torch.testing.assert_close(Matched(forward)(x), forward(x), rtol=1e-4, atol=1e-4)


# ---- what is said


def test_the_reason_names_the_writer() -> None:
    compiled = Matched(lambda x: down(FORMULAS["gated"](up(x), WRITES["allow_in_graph"])))
    with torch.no_grad():
        compiled(torch.randn(8, 32))
    assert compiled.reasons("gated silu") == ["opaque writes an input in place inside the pattern"]


def test_a_result_whose_form_changes_has_a_reason() -> None:
    compiled = Matched(unsqueezed)
    with torch.no_grad():
        compiled(torch.randn(8, 32))
    assert compiled.reasons() == ["unsqueeze_ changes the size, the strides or the storage of h in place"] + [
        "unsqueeze_ changes the size, the strides or the storage of h in place"
    ]


def test_an_unknown_function_that_is_given_something_else_refuses_nothing() -> None:
    def forward(x):
        s = F.silu(h := up(x))
        opaque(x)
        return down(s * h)

    compiled = Matched(forward)
    with torch.no_grad():
        compiled(torch.randn(8, 32))
    assert compiled.reasons("gated silu") == [""]


class _Scattered(torch.autograd.Function):
    """Its backward writes a tensor of its own, as a router's does."""

    @staticmethod
    def forward(ctx, g):
        return g * 2

    @staticmethod
    def backward(ctx, grad):
        return torch.zeros_like(grad).add_(grad).mul_(2)


class _Written(torch.autograd.Function):
    @staticmethod
    def forward(ctx, g):
        return g.detach().mul_(-3) * 1

    @staticmethod
    def backward(ctx, grad):
        return grad


@pytest.mark.parametrize(
    ("function", "reason"),
    [(_Scattered, ""), (_Written, "autograd_function_apply writes an input in place inside the pattern")],
)
def test_what_a_body_writes_of_its_own_is_no_input(function: type[torch.autograd.Function], reason: str) -> None:
    def forward(x):
        s = F.silu(h := up(x))
        y = function.apply(h)
        return down(s * h) + y.sum()

    compiled = Matched(forward)
    compiled(torch.randn(8, 32).requires_grad_())
    assert compiled.reasons("gated silu") == [reason]
