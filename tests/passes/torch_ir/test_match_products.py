"""Stage 1 on linears that are written as products: x @ weight, addmm, einsum, a transposed parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from helpers.graphs.matching import Matched
from torch import Tensor, nn

torch.manual_seed(0)


class Conv1DMLP(nn.Module):
    """GPT-2's, with transformers' Conv1D written out."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(32, 64)), nn.Parameter(torch.randn(64, 32))
        self.up_bias, self.down_bias = nn.Parameter(torch.randn(64)), nn.Parameter(torch.randn(32))

    def conv1d(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = torch.addmm(bias, x.view(-1, x.size(-1)), weight)
        return y.view(*x.shape[:-1], weight.shape[1])

    def forward(self, x: Tensor) -> Tensor:
        return self.conv1d(F.gelu(self.conv1d(x, self.up, self.up_bias)), self.down, self.down_bias)


def test_conv1d_snapshot_and_records() -> None:
    compiled, x = Matched(Conv1DMLP(), run="aot"), torch.randn(2, 8, 32)
    torch.testing.assert_close(compiled(x), compiled.module(x))
    assert_expected_inline(
        compiled.text(),
        """\
view: float32[16, 32] = x.view(-1, 32)
linear_default = te.linear(view, up, up_bias, dx=False dw=True [K, N])
getitem: float32[16, 64] = getitem(linear_default, 0)
view_1: float32[2, 8, 64] = getitem.view(2, 8, 64)
gelu_default: float32[2, 8, 64] = te.gelu(view_1, 'none')
view_2: float32[16, 64] = gelu_default.view(-1, 64)
linear_default_1 = te.linear(view_2, down, down_bias, dx=True dw=True [K, N])
getitem_1: float32[16, 32] = getitem(linear_default_1, 0)
view_3: float32[2, 8, 32] = getitem_1.view(2, 8, 32)
return (view_3)""",
    )
    up, gelu, down = compiled.records
    assert (up.shape, down.shape, up.flops) == (("16", "64", "32"), ("16", "32", "64"), 2 * 16 * 64 * 32)
    assert up.matched and gelu.matched and down.matched and up.source.startswith("torch_ir/test_match_products.py:")


class Weights(nn.Module):
    """One weight in both orders; `call` says how it is read."""

    def __init__(self, call: Callable[[Weights, Tensor], Any]) -> None:
        super().__init__()
        self.kn, self.nk, self.bias = (nn.Parameter(torch.randn(*s)) for s in ((32, 16), (16, 32), (16,)))
        self.both, self.wide = (nn.Parameter(torch.randn(*s)) for s in ((2, 32, 16), (32, 32)))
        self.register_buffer("mask", torch.ones(32, 16).tril())
        self.call = call

    def forward(self, x: Tensor) -> Any:
        return self.call(self, x)


def by_columns(m: Weights) -> Tensor:
    """nk as [8, 4, 16], the dimensions of x's heads the other way round."""
    return m.nk.view(16, 4, 8).permute(2, 1, 0)


MATCHED: dict[str, Callable[[Weights, Tensor], Tensor]] = {
    "matmul operator": lambda m, x: x @ m.kn,
    "matmul": lambda m, x: torch.matmul(x, m.kn),
    "matmul by name": lambda m, x: torch.matmul(other=m.kn, input=x),
    "mm": lambda m, x: torch.mm(x[0], m.kn),
    "mm method": lambda m, x: x[0].mm(m.kn),
    "matmul method": lambda m, x: x.matmul(m.kn),
    "vector": lambda m, x: x[0, 0] @ m.kn,
    "addmm": lambda m, x: torch.addmm(m.bias, x[0], m.kn),
    "addmm method": lambda m, x: m.bias.addmm(x[0], m.kn),
    "addmm by name": lambda m, x: torch.addmm(input=m.bias, mat1=x[0], mat2=m.kn, beta=1, alpha=1),
    "t": lambda m, x: x @ m.nk.t(),
    "T": lambda m, x: x @ m.nk.T,
    "mT": lambda m, x: x @ m.nk.mT,
    "transpose": lambda m, x: x @ m.nk.transpose(0, 1),
    "torch.transpose": lambda m, x: x @ torch.transpose(m.nk, -1, -2),
    "permute": lambda m, x: x @ m.nk.permute(1, 0),
    "twice": lambda m, x: x @ m.kn.t().t(),
    "F.linear of a transpose": lambda m, x: F.linear(x, m.kn.t(), m.bias),
    "einsum": lambda m, x: torch.einsum("btd,dn->btn", x, m.kn),
    "einsum nd": lambda m, x: torch.einsum("btd,nd->btn", x, m.nk),
    "einsum weight first": lambda m, x: torch.einsum("nd, ...d -> ...n", m.nk, x),
    "a cast": lambda m, x: x.bfloat16() @ m.kn.bfloat16(),
    "a cast transposed": lambda m, x: x.bfloat16() @ m.nk.to(torch.bfloat16).t(),
    "einsum without ->": lambda m, x: torch.einsum("btd,dn", x, m.kn),
    "einsum by columns": lambda m, x: torch.einsum("btd,dn->nbt", x, m.kn).permute(1, 2, 0),
    "einsum to heads": lambda m, x: torch.einsum("btd,dhk->bthk", x, m.kn.view(32, 2, 8)).flatten(2),
    "einsum of heads": lambda m, x: torch.einsum("bthk,nhk->btn", x.unflatten(-1, (4, 8)), m.nk.view(16, 4, 8)),
    "einsum of heads turned": lambda m, x: torch.einsum(
        "...hk,khn->n...", x.unflatten(-1, (4, 8)), by_columns(m)
    ).permute(1, 2, 0),
    "tensordot": lambda m, x: torch.tensordot(x, m.kn, dims=1),
    "tensordot of heads": lambda m, x: torch.tensordot(
        x.unflatten(-1, (4, 8)), m.nk.view(16, 4, 8), dims=([2, 3], [1, 2])
    ),
    "inner": lambda m, x: torch.inner(x, m.nk),
    "inner method": lambda m, x: x.inner(m.nk),
    "linalg": lambda m, x: torch.linalg.matmul(x, m.kn),
    "aten.mm": lambda m, x: torch.ops.aten.mm(x[0], m.kn),
    "aten.mm by names": lambda m, x: torch.ops.aten.mm.default(x[0], mat2=m.kn),
    "aten.linear": lambda m, x: torch.ops.aten.linear(x, m.nk, m.bias),
    "aten.addmm": lambda m, x: torch.ops.aten.addmm(m.bias, x[0], m.kn),
    "a part": lambda m, x: x @ m.both[1],
    "a part of several": lambda m, x: x @ m.both.unbind(0)[1],
    "columns": lambda m, x: x @ m.wide[:, 16:],
    "view": lambda m, x: x @ m.wide.view(32, 2, 16).select(1, 0),
    "reshape": lambda m, x: x @ m.nk.reshape(32, 16),
    "masked": lambda m, x: x @ (m.kn * m.mask),
    "scaled": lambda m, x: x @ (m.kn * 0.5),
    "contiguous": lambda m, x: x @ m.nk.t().contiguous(),
    "detached": lambda m, x: x @ m.kn.detach(),
    "added to itself": lambda m, x: x @ (m.both[0] + m.kn),
    "weight on the left": lambda m, x: (m.nk @ x.mT).mT,
    "weight on the left of a matrix": lambda m, x: (m.kn.t() @ x[0].t()).t(),
    "weight on the left, viewed": lambda m, x: torch.matmul(m.nk, x.mT).view(-1, 16, 4).mT,
    "addmm by the weight on the left": lambda m, x: torch.addmm(m.bias[:, None], m.nk, x[0].t()).t(),
    "addmm, a bias of the result's columns": lambda m, x: torch.addmm(x[0, :, 0], m.nk, x[0].t()).t(),
    "addmm method by the weight on the left": lambda m, x: m.wide[:16, :4].addmm(m.kn.t(), x[0].t()).t(),
    "baddbmm by one weight": lambda m, x: torch.baddbmm(m.bias[None, None], x[:1], m.kn[None])[0],
    "baddbmm by one weight on the left": lambda m, x: torch.baddbmm(m.bias[None, :, None], m.nk[None], x[:1].mT)[0].t(),
    "baddbmm, a row each": lambda m, x: torch.baddbmm(x[:1, :, :1], x[:1], m.kn[None])[0],
    "one more dimension": lambda m, x: x @ m.kn[None],
    "two more dimensions": lambda m, x: x[:, None] @ m.kn.unsqueeze(0)[None],
    "several weights of one x": lambda m, x: (x[0] @ m.kn.view(32, 2, 8).transpose(0, 1)).transpose(0, 1).flatten(1),
    "a transpose cast": lambda m, x: x.bfloat16() @ m.nk.t().to(torch.bfloat16),
}


def test_every_spelling_is_matched() -> None:
    torch.manual_seed(0)  # the gradients are sums of as many terms as there are spellings, added up in another order
    model, x = (
        Weights(lambda m, x: [call(m, x) for call in MATCHED.values()]),
        torch.randn(2, 4, 32, requires_grad=True),
    )
    compiled = Matched(model)
    results, expected = compiled(x), model(x)
    gradients = [
        torch.autograd.grad(sum(y.float().square().sum() for y in ys), [x, *model.parameters()])
        for ys in (results, expected)
    ]
    for name, record, one, other in zip(MATCHED, compiled.records, results, expected, strict=True):
        assert record.matched and record.shape[1:] == ("16", "32"), name
        torch.testing.assert_close(one, other, msg=lambda text, name=name: f"{name}: {text}")
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-4)


def test_an_input_that_learns_is_no_weight() -> None:
    """A matrix whose gradient is asked for, as the input of the first linear of a model."""
    calls: list[Callable[[Weights, Tensor], Tensor]] = [
        lambda m, x: x @ m.kn,
        lambda m, x: torch.addmm(m.bias, x, m.kn),
        lambda m, x: x @ m.nk.t(),
        lambda m, x: torch.einsum("bd,dn->bn", x, m.kn),
        lambda m, x: torch.einsum("nd,bd->bn", m.nk, x),
        lambda m, x: m.nk @ x.t(),
    ]
    compiled = Matched(Weights(lambda m, x: [call(m, x) for call in calls]))
    compiled(torch.randn(8, 32, requires_grad=True))
    assert [record.matched for record in compiled.records] == [True] * 6


def test_the_parameter_is_read_as_it_is_stored() -> None:
    """So a frozen or cached one is found; a transpose that something else reads stays."""
    compiled = Matched(Weights(lambda m, x: (x @ m.nk.t(), m.nk.t().sum(0))))
    compiled(torch.randn(2, 4, 32))
    assert_expected_inline(
        compiled.text(),
        """\
linear_default = te.linear(x, nk, None, dx=False dw=True)
getitem: float32[2, 4, 16] = getitem(linear_default, 0)
t_1: float32[32, 16] = nk.t()
sum_1: float32[16] = t_1.sum(0)
return (getitem, sum_1)""",
    )


LEFT: list[tuple[Callable[[Weights, Tensor], Tensor], str]] = [
    (lambda m, x: torch.addmm(m.bias, x[0], m.kn, alpha=2), "torch.addmm with alpha or beta"),
    (lambda m, x: torch.addmm(x[0, :, :16], x[0], m.kn), "its bias has shape [4, 16]; expected [16]"),
    (lambda m, x: torch.mm(x[0], m.kn, out=torch.empty(4, 16)), "it writes to out="),
    (lambda m, x: m.nk @ m.kn, "a product of two parameters"),
    (lambda m, x: torch.einsum("btd,dn->bt", x, m.kn), "einsum 'btd,dn->bt'; it is more than x @ weight"),
    (
        lambda m, x: torch.einsum("btd,td->btd", x, m.kn[:4].repeat(1, 2)),
        "einsum 'btd,td->btd'; it is more than x @ weight",
    ),
    (lambda m, x: torch.einsum("btd,dd->bt", x, m.kn.repeat(1, 2)), "einsum 'btd,dd->bt'; it is more than x @ weight"),
    (lambda m, x: x @ m.kn[:, 0], "its weight has 1 dimensions and its input 3"),
    (lambda m, x: x @ (m.nk.t() + m.kn @ m.nk @ m.kn), "its weight is a product of parameters"),
]


def test_left_with_the_reason() -> None:
    model, x = Weights(lambda m, x: [call(m, x) for call, _ in LEFT]), torch.randn(2, 4, 32)
    compiled = Matched(model)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    records = [record for record in compiled.records if record.shape != ("32", "32", "16")]  # kn @ nk of the last
    assert compiled.reasons().count(LEFT[3][1] + ", no linear of an input") == 3
    records = [*records[:-2], records[-1]]
    for record, (_, reason) in zip(records, LEFT, strict=True):
        assert not record.matched and record.reason.startswith(reason) and record.recipe == ""
    assert "te.linear" not in compiled.text()


class Experts(nn.Module):
    """Weights of three dimensions; `call` says how they are read."""

    def __init__(self, call: Callable[[Experts, Tensor], Tensor]) -> None:
        super().__init__()
        self.ekn, self.kn, self.nf, self.k, self.call = (
            *(nn.Parameter(torch.randn(*s)) for s in ((4, 32, 16), (32, 16), (16, 48), (32,))),
            call,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


ADVICE: list[tuple[Callable[[Experts, Tensor], Tensor], str]] = [
    (lambda m, x: torch.mv(m.kn.t(), x[0, 0]), "written as weight @ x, of one vector"),
    (lambda m, x: torch.addmv(m.nf[:, 0], m.kn.t(), x[0, 0]), "written as weight @ x, of one vector"),
    (lambda m, x: torch.addmv(x[0, :, 0], x[0], m.k), "its weight has 1 dimensions and its input 2: no product by a matrix"),
    (lambda m, x: m.nf[:, 0].addmv(m.kn.t(), x[0, 0]), "written as weight @ x, of one vector"),
]  # fmt: skip


def test_advice_is_possible() -> None:
    for call, reason in ADVICE:
        compiled, x = Matched(Experts(call)), torch.randn(4, 32, 32)
        torch.testing.assert_close(compiled(x), compiled.module(x))
        assert compiled.reasons() == [reason]


def test_an_einsum_by_sublists() -> None:
    compiled, x = (
        Matched(Experts(lambda m, x: torch.einsum(x, [0, 1, 2], m.kn, [2, 3], [0, 1, 3]))),
        torch.randn(4, 8, 32),
    )
    torch.testing.assert_close(compiled(x), compiled.module(x))
    assert [(record.matched, record.shape) for record in compiled.records] == [(True, ("32", "16", "32"))]
    compiled = Matched(Experts(lambda m, x: torch.einsum(x, [..., 2], m.kn, [2, 30])))
    torch.testing.assert_close(compiled(x), compiled.module(x))
    assert [record.matched for record in compiled.records] == [True]
    compiled = Matched(Experts(lambda m, x: torch.einsum(x, [4, 1, 2], m.ekn, [4, 2, 3], [4, 1, 3])))
    torch.testing.assert_close(compiled(x), compiled.module(x))
    assert [(record.matched, record.groups) for record in compiled.records] == [(True, 4)]


def test_an_einsum_of_several_weights_is_a_linear_of_each() -> None:
    for call, shapes in (
        (lambda m, x: torch.einsum("btd,df,fg->btg", x, m.kn, m.nf), [("32", "16", "32"), ("32", "48", "16")]),
        (lambda m, x: torch.einsum(x, [0, 1, 2], m.kn, [2, 3], m.nf, [3, 4], [0, 1, 4]), [("32", "16", "32"), ("32", "48", "16")]),
        (lambda m, x: torch.einsum("df,btd,fg->btg", m.kn, x, m.nf), [("32", "16", "32"), ("32", "48", "16")]),
    ):  # fmt: skip
        compiled, x = Matched(Experts(call)), torch.randn(4, 8, 32)
        torch.testing.assert_close(compiled(x), compiled.module(x))
        assert [(record.matched, record.shape) for record in compiled.records] == [(True, shape) for shape in shapes]


def test_an_einsum_of_several_weights_of_which_none_may_be_a_linear_stays_whole() -> None:
    compiled, x = (
        Matched(Experts(lambda m, x: torch.einsum("btd,df,fg->btg", x, m.kn[:, :8], m.nf[:8]))),
        torch.randn(4, 8, 32),
    )
    torch.testing.assert_close(compiled(x), compiled.module(x))
    reason = (
        "N = {}, K = {}: FP8 GEMMs need N and K to be multiples of 16; padding {} to 16 would add 100%, more than 1/16"
    )
    assert compiled.reasons() == [reason.format(8, 32, "N"), reason.format(48, 8, "K")]
    assert compiled.text().count("einsum(") == 1
    compiled = Matched(Experts(lambda m, x: torch.einsum("btd,bsd,df->btsf", x, x, m.kn)))
    torch.testing.assert_close(compiled(x), compiled.module(x))
    assert compiled.reasons() == [
        "inside torch.einsum, which te_dynamo does not take apart; write it as products of two"
    ]
    assert [record.shape for record in compiled.records] == [("256", "16", "32")]


def test_attention_is_no_linear() -> None:
    compiled = Matched(lambda x: (x @ x.transpose(-1, -2)) @ x)
    compiled(torch.randn(2, 4, 32))
    assert not compiled.records
    compiled = Matched(lambda q, k, v: (q @ k.t()).softmax(-1) @ v)
    compiled(*(torch.randn(16, 32, requires_grad=True) for _ in range(3)))
    assert [reason.partition(",")[0] for reason in compiled.reasons()] == ["its weight is an input that learns"] * 2


def test_autocast_casts_the_weight_as_it_is_stored() -> None:
    model, x = Weights(lambda m, x: x @ m.nk.t()), torch.randn(2, 4, 32)
    compiled = Matched(model, run="aot")
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(compiled(x), model(x))
    assert_expected_inline(
        compiled.text(),
        """\
to: bfloat16[2, 4, 32] = x.to(torch.bfloat16)
to_1: bfloat16[16, 32] = nk.to(torch.bfloat16)
linear_default = te.linear(to, to_1, None, dx=False dw=True)
getitem: bfloat16[2, 4, 16] = getitem(linear_default, 0)
return (getitem)""",
    )
