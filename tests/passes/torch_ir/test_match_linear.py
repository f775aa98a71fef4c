"""Stage 1 on linears: what becomes te.linear, what is left and why, and that the rewritten graph computes the
same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from helpers.graphs.matching import FP8, Matched
from torch import nn
from torch.autograd import forward_ad

from te_dynamo._compat import torch_version

torch.manual_seed(0)


class MLP(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64, bias=bias)
        self.down = nn.Linear(64, 32, bias=bias)

    def forward(self, x):
        return self.down(self.up(x).sin())


def test_snapshot_and_records():
    model = Matched(MLP(), rules=[("down", FP8)])
    x = torch.randn(2, 8, 32)
    torch.testing.assert_close(model(x), MLP.forward(model.module, x))
    assert_expected_inline(
        model.text(),
        """\
linear_default = te.linear(x, up_weight, up_bias, dx=False dw=True)
getitem: float32[2, 8, 64] = getitem(linear_default, 0)
sin: float32[2, 8, 64] = getitem.sin()
linear_default_1 = te.linear(sin, down_weight, down_bias, dx=True dw=True)
getitem_1: float32[2, 8, 32] = getitem(linear_default_1, 0)
return (getitem_1)""",
    )
    up, down = model.records
    assert (up.module, down.module) == ("up", "down")
    assert up.source.startswith("torch_ir/test_match_linear.py:") and up.matched and up.reason == ""
    assert (up.recipe, up.shape, up.flops, up.dtype) == (FP8, ("16", "64", "32"), 2 * 16 * 64 * 32, "fp32")


@pytest.mark.parametrize("run", ["te", pytest.param("inductor", marks=pytest.mark.slow)])
def test_rewritten_graph_compiles_and_trains_in_fp8(run):
    model, x = MLP(), torch.randn(8, 32, requires_grad=True)
    compiled = Matched(model, run=run)
    compiled(x).square().sum().backward()
    grads = [x.grad, *(p.grad for p in model.parameters())]
    expected = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    for grad, reference in zip(grads, expected, strict=True):
        assert 0 < (grad - reference).norm() < 0.2 * reference.norm()
    assert all(record.matched for record in compiled.records)


def test_keyword_arguments_and_rank_one():
    w, b = torch.randn(16, 32), torch.randn(16)
    compiled = Matched(lambda x: F.linear(bias=b, weight=w, input=x))
    x = torch.randn(32)
    torch.testing.assert_close(compiled(x), F.linear(x, w, b))
    assert compiled.records[0].matched and compiled.records[0].shape == ("1", "16", "32")


def test_weight_shared_by_two_linears():
    linear = nn.Linear(32, 32)
    compiled = Matched(lambda x: linear(linear(x)))
    compiled(torch.randn(4, 32))
    assert [record.matched for record in compiled.records] == [True, True]


def test_requires_grad_flags():
    model, x = MLP(), torch.randn(4, 32)
    model.up.weight.requires_grad_(False)
    compiled = Matched(model)
    compiled(x)
    assert "up_bias, dx=False dw=False" in compiled.text() and "down_bias, dx=True dw=True" in compiled.text()


def test_no_grad_around_and_inside():
    model, x = MLP(), torch.randn(4, 32, requires_grad=True)
    compiled = Matched(model)
    with torch.no_grad():
        compiled(x)
    assert compiled.text().count("dx=False dw=False") == 2

    def half_frozen(x):
        with torch.no_grad():
            h = model.up(x)
        return model.down(h)

    compiled = Matched(half_frozen)
    compiled(x)
    assert "dx=False dw=False" in compiled.text() and "dx=False dw=True" in compiled.text()


def test_ambient_autocast_becomes_casts():
    model, x = MLP(), torch.randn(4, 32)
    compiled = Matched(model, run="aot")
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(compiled(x), model(x))
    assert_expected_inline(
        compiled.text(),
        """\
to: bfloat16[4, 32] = x.to(torch.bfloat16)
to_1: bfloat16[64, 32] = up_weight.to(torch.bfloat16)
to_2: bfloat16[64] = up_bias.to(torch.bfloat16)
linear_default = te.linear(to, to_1, to_2, dx=False dw=True)
getitem: bfloat16[4, 64] = getitem(linear_default, 0)
sin: bfloat16[4, 64] = getitem.sin()
to_3: bfloat16[32, 64] = down_weight.to(torch.bfloat16)
to_4: bfloat16[32] = down_bias.to(torch.bfloat16)
linear_default_1 = te.linear(sin, to_3, to_4, dx=True dw=True)
getitem_1: bfloat16[4, 32] = getitem(linear_default_1, 0)
return (getitem_1)""",
    )
    assert compiled.records[0].dtype == "bf16"


def test_autocast_region_inside():
    model, x = MLP(), torch.randn(4, 32)

    def forward(x):
        with torch.autocast("cpu", torch.bfloat16):
            h = model.up(x)
            with torch.autocast("cpu", enabled=False):
                return model.down(h.float())

    compiled = Matched(forward, run="aot")
    y = compiled(x)
    torch.testing.assert_close(y, forward(x))
    y.sum().backward()
    assert [record.dtype for record in compiled.records] == ["bf16", "fp32"]
    assert compiled.text().count(".to(torch.bfloat16)") == 3


def test_dynamic_rows_match_and_stay_dynamic():
    compiled = Matched(MLP(), run="aot", dynamic=True)
    for rows in (4, 7):
        x = torch.randn(rows, 32)
        torch.testing.assert_close(compiled(x), compiled.module(x))
    assert len(compiled.graphs) == 1 and compiled.records[0].matched
    assert compiled.records[0].shape[0].startswith("s") and compiled.records[0].flops == 2 * 4 * 64 * 32


@pytest.mark.parametrize(
    ("operands", "reason"),
    [
        (lambda: (torch.randn(4, 32).double(), torch.randn(16, 32).double()), "its input is fp64"),
        (lambda: (torch.ones(4, 32).long(), torch.ones(16, 32).long()), "its input is int64"),
        (lambda: (torch.randn(4, 32) + 0j, torch.randn(16, 32) + 0j), "its input is complex64"),
        (lambda: (torch.randn(4, 24), torch.randn(16, 24)), "N = 16, K = 24: FP8 GEMMs need N and K to be"),
        (lambda: (torch.randn(4, 0), torch.randn(16, 0)), "N = 16, K = 0: its weight is empty"),
        (lambda: (torch.randn(4, 32), torch.randn(10, 32)), "N = 10, K = 32"),
        (lambda: (torch.randn(0, 32), torch.randn(16, 32)), "its input has no rows"),
        (lambda: (torch.randn(4, 32), torch.randn(32)), "its weight has 1 dimensions and its input 2: no product by a matrix"),
        (lambda: (torch.randn(4, 32), torch.randn(16, 32), torch.randn(1, 16)), "its bias has shape [1, 16]"),
    ],
)  # fmt: skip
def test_left_with_the_reason(operands, reason):
    operands = operands()
    compiled = Matched(lambda *operands: F.linear(*operands))
    torch.testing.assert_close(compiled(*operands), F.linear(*operands))
    (record,) = compiled.records
    assert not record.matched and record.reason.startswith(reason) and record.recipe == ""
    assert "te.linear" not in compiled.text()


def test_tensor_subclass_is_left():
    from torch.testing._internal.two_tensor import TwoTensor

    weight = TwoTensor(torch.randn(16, 32), torch.randn(16, 32))
    compiled = Matched(lambda x, w: F.linear(x, w))
    compiled(torch.randn(4, 32), weight)
    assert compiled.reasons() == ["an operand is a TwoTensor, not a plain tensor"]


def test_dynamic_weight_shape_is_left():
    compiled = Matched(lambda x, w: F.linear(x, w), dynamic=True)
    compiled(torch.randn(4, 32), torch.randn(16, 32))
    assert "te.linear needs N and K fixed" in compiled.reasons()[0]


def test_torch_func_transform_is_left():
    weight, x = torch.randn(16, 32), torch.randn(4, 32)
    compiled = Matched(lambda x: torch.func.grad(lambda x: F.linear(x, weight).sum())(x))
    torch.testing.assert_close(compiled(x), weight.sum(0).expand(4, 32))
    assert compiled.reasons() == ["inside a torch.func transform"]


def test_forward_mode_is_left_also_after_a_call_without():
    linear, x = nn.Linear(32, 16).requires_grad_(False), torch.randn(4, 32)
    compiled = Matched(linear)
    compiled(x)
    with forward_ad.dual_level():
        y, tangent = forward_ad.unpack_dual(compiled(forward_ad.make_dual(x, x)))
    assert torch.equal(y, linear(x)) and torch.equal(tangent, x @ linear.weight.t())
    compiled(x)
    within = (
        ["inside torch.autograd.forward_ad.dual_level"] if torch_version() < (2, 15) else []
    )  # which traces no duals
    assert compiled.reasons() == ["", *within]


def test_forward_mode_inside_of_the_model_is_left():
    linear, x = nn.Linear(32, 16).requires_grad_(False), torch.randn(4, 32)

    def tangent_of(x):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(linear(forward_ad.make_dual(x, x)))[1]

    compiled = Matched(tangent_of)
    assert torch.equal(compiled(x), tangent_of(x))
    assert compiled.reasons() == ["inside torch.autograd.forward_ad.dual_level"]


def test_rules_and_no_recipe():
    compiled = Matched(MLP(), rules=[("down", None)])
    compiled(torch.randn(4, 32))
    assert compiled.reasons() == ["", "rule 'down' leaves it in the model's precision"]
    compiled = Matched(MLP(), recipe=None)
    compiled(torch.randn(4, 32))
    assert compiled.reasons() == ["recipe is None"] * 2 and "te." not in compiled.text()


def test_fake_cuda_tensors_match():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x, up, down = (
            torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in ((4, 32), (64, 32), (32, 64))
        )
        compiled = Matched(lambda x: F.linear(F.gelu(F.linear(x, up)), down))
        y = compiled(x)
    assert y.device.type == "cuda" and [record.matched for record in compiled.records] == [True] * 3


def test_new_nodes_carry_the_users_meta():
    compiled = Matched(MLP(), run="te")
    compiled(torch.randn(4, 32))
    (gm,) = compiled.graphs
    te = [n for n in gm.graph.nodes if n.target is torch.ops.te.linear.default]
    assert all("test_match_linear.py" in n.meta["stack_trace"] and n.meta["nn_module_stack"] for n in te)
    assert all(isinstance(n.meta["example_value"], (list, tuple)) for n in te)
    assert all("example_value" in n.meta for n in gm.graph.nodes if n.op == "call_function")
    gm.graph.lint()
