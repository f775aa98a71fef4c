"""Stage 1 around the graph: bodies of higher-order ops, in-place writes, whole models."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from helpers.graphs.matching import Matched
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from te_dynamo.passes.torch_ir.match.mutation import written_by
from te_dynamo.passes.torch_ir.match.where import module_path, source_line

torch.manual_seed(0)

WEIGHT = torch.randn(32, 32)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.RMSNorm(32), nn.Linear(32, 32, bias=False)

    def forward(self, x):
        return F.silu(self.fc(self.norm(x)))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def test_checkpoint_body_is_rewritten():
    compiled, x = Matched(Checkpointed(), run="aot"), torch.randn(4, 32, requires_grad=True)
    y = compiled(x)
    torch.testing.assert_close(y, compiled.module(x))
    y.sum().backward()
    assert_expected_inline(
        compiled.text(),
        """\
wrap_body_0:
    rms_norm_default = te.rms_norm(x, layers_0_norm_weight, 1.1920928955078125e-07, False, False)
    getitem_1: float32[4, 32] = getitem(rms_norm_default, 0)
    linear_default = te.linear(getitem_1, layers_0_fc_weight, None, dx=True dw=True)
    getitem: float32[4, 32] = getitem(linear_default, 0)
    silu_default: float32[4, 32] = te.silu(getitem)
    return (silu_default)
tag_activation_checkpoint = tag_activation_checkpoint(wrap_body_0, x, layers_0_norm_weight, layers_0_fc_weight, use_reentrant=False)
x: float32[4, 32] = getitem(tag_activation_checkpoint, 0)
wrap_body_1:
    rms_norm_default = te.rms_norm(x, layers_1_norm_weight, 1.1920928955078125e-07, False, False)
    getitem_1: float32[4, 32] = getitem(rms_norm_default, 0)
    linear_default = te.linear(getitem_1, layers_1_fc_weight, None, dx=True dw=True)
    getitem: float32[4, 32] = getitem(linear_default, 0)
    silu_default: float32[4, 32] = te.silu(getitem)
    return (silu_default)
tag_activation_checkpoint_1 = tag_activation_checkpoint(wrap_body_1, x, layers_1_norm_weight, layers_1_fc_weight, use_reentrant=False)
x_1: float32[4, 32] = getitem(tag_activation_checkpoint_1, 0)
return (x_1)""",
    )
    assert [(r.kind, r.module) for r in compiled.records if r.kind != "silu"] == [
        ("rms_norm", "layers.0.norm"),
        ("linear", "layers.0.fc"),
        ("rms_norm", "layers.1.norm"),
        ("linear", "layers.1.fc"),
    ]
    assert all(record.matched for record in compiled.records)


def test_checkpoint_under_autocast():
    compiled, x = Matched(Checkpointed(), run="aot"), torch.randn(4, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = compiled(x)
        torch.testing.assert_close(y, compiled.module(x))
    y.float().sum().backward()
    assert all(r.matched and r.dtype == "bf16" for r in compiled.records if r.kind == "linear")


def test_compile_region_is_rewritten_once_and_recorded_for_each_use():
    from torch.compiler import nested_compile_region

    layers = nn.ModuleList([Block(), Block()])
    run = nested_compile_region(lambda layer, x: layer(x))

    def forward(x):
        for layer in layers:
            x = run(layer, x)
        return x

    compiled, x = Matched(forward, run="aot"), torch.randn(4, 32, requires_grad=True)
    y = compiled(x)
    torch.testing.assert_close(y, layers[1](layers[0](x)))
    y.sum().backward()
    assert compiled.reasons() == ["", ""]


class Region(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(32, 32, bias=False)

    @torch.compiler.nested_compile_region
    def forward(self, x):
        return self.fc(x)


def test_a_shared_region_has_every_path_and_refuses_rules_that_differ():
    model, x = nn.Sequential(Region(), Region()), torch.randn(4, 32, requires_grad=True)
    compiled = Matched(model)
    compiled(x)
    assert [record.module for record in compiled.records] == ["0.fc", "1.fc"]
    compiled = Matched(model, rules=[(r"1\.fc", None)])
    compiled(x)
    reason = "2 modules share this compiled region, and the rules treat them differently"
    assert compiled.reasons() == [reason, reason]


def test_cond_branches_are_rewritten():
    a, b = nn.Linear(32, 32), nn.Linear(32, 32)
    compiled = Matched(lambda x: torch.cond(x.sum() > 0, lambda x: a(x), lambda x: b(x), (x,)), run="aot")
    for x in (torch.ones(4, 32), -torch.ones(4, 32)):
        torch.testing.assert_close(compiled(x), (a if x.sum() > 0 else b)(x))
    assert [record.matched for record in compiled.records] == [True, True]


def test_linears_in_other_bodies_are_recorded_as_left():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return F.linear(x, WEIGHT) * 2

        @staticmethod
        def backward(ctx, grad):
            return F.linear(grad, WEIGHT.t()) * 2

    compiled, x = Matched(lambda x: Twice.apply(x)), torch.randn(4, 32, requires_grad=True)
    torch.testing.assert_close(compiled(x), F.linear(x, WEIGHT) * 2)
    assert compiled.records and "whose body te_dynamo does not rewrite" in compiled.reasons()[0]
    assert "te." not in compiled.text()


def written_input(x):
    x = x.clone()
    s = F.silu(x)
    x.add_(1)
    return F.linear(s * x.cos(), WEIGHT)


def written_through_a_view(x):
    x = x.clone()
    s = F.silu(x)
    x.view(-1)[0:4] = 1.0
    return F.linear(s * x.cos(), WEIGHT)


def written_by_out(x):
    x = x.clone()
    s = F.silu(x)
    torch.cos(x, out=x)
    return F.linear(s * x.cos(), WEIGHT)


def augmented(x):
    x = x.clone()
    s = F.silu(x)
    x += 1
    return F.linear(s * x.cos(), WEIGHT)


def between_two_casts(x):
    x = x.clone()
    f = x.float()
    x.mul_(2)
    f2 = x.float()
    return F.linear((f * torch.rsqrt(f2.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype), WEIGHT.to(x.dtype))


@pytest.mark.parametrize(
    ("forward", "kind", "dtype"),
    [
        (written_input, "gated silu", torch.float32),
        (written_through_a_view, "gated silu", torch.float32),
        (written_by_out, "gated silu", torch.float32),
        (augmented, "gated silu", torch.float32),
        (between_two_casts, "rms_norm", torch.bfloat16),
    ],
)
def test_write_inside_a_pattern_refuses_it(forward, kind, dtype):
    compiled, x = Matched(forward), torch.randn(4, 32, dtype=dtype)
    torch.testing.assert_close(compiled(x), forward(x))
    assert "writes an input in place inside the pattern" in compiled.reasons(kind)[0]


def test_write_after_a_pattern_refuses_it_only_when_backward_needs_the_input():
    def forward(x):
        h = x.clone()
        f = h.float()
        y = (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + 1e-6)).to(h.dtype)
        h += F.linear(y, weight)
        return h

    weight = WEIGHT.bfloat16()
    x = torch.randn(4, 32, dtype=torch.bfloat16, requires_grad=True)
    compiled = Matched(forward, run="aot")
    y = compiled(x)
    torch.testing.assert_close(y, forward(x))
    y.sum().backward()
    assert "after it, and backward needs its value" in compiled.reasons("rms_norm")[0]
    compiled = Matched(forward)
    compiled(x.detach())
    assert compiled.reasons("rms_norm") == [""]


def test_write_elsewhere_does_not_refuse():
    def forward(x, counter):
        s = F.silu(x)
        counter.add_(1)
        return F.linear(s * x.cos(), WEIGHT)

    compiled = Matched(forward)
    compiled(torch.randn(4, 32), torch.zeros(1))
    assert compiled.reasons("gated silu") == [""]


def test_mode_change_inside_a_pattern_refuses_it():
    def forward(x):
        s = F.silu(x)
        with torch.no_grad():
            c = x.cos()
        return F.linear(s * c, WEIGHT)

    compiled = Matched(forward)
    compiled(torch.randn(4, 32, requires_grad=True))
    assert compiled.reasons("gated silu") == ["_set_grad_enabled changes the mode inside the pattern"]


def test_written_by():
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    calls = {
        graph.call_method("add_", (x, y)): [x],
        graph.call_method("__setitem__", (x, 0, y)): [x],
        graph.call_method("__class__", (x,)): [],
        graph.call_method("add", (x, y)): [],
        graph.call_function(torch.add, (x, y), {"out": y}): [y],
        graph.call_function(torch._foreach_add_, ([x, y], 1)): [x, y],
        graph.call_function(F.dropout, (x, 0.1, True, True)): [x],
        graph.call_function(F.dropout, (x, 0.1, True)): [],
        graph.call_function(torch.ops.aten.copy_.default, (x, y)): [x],
        graph.call_function(torch.ops.aten.mul.out, (x, y), {"out": x}): [x],
    }
    for node, written in calls.items():
        assert set(written_by(node)) == set(written), node.format_node()


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("L['self'].layers.0.mlp", "layers.0.mlp"),
        ("L['self']._modules['layers']._modules['0']", "layers.0"),
        ("L['self']._orig_mod.layers[3].fc@1", "layers.3.fc"),
        ("""L['self']._modules['a]b']._modules["c'd"]._modules['e"f\\'g']""", "a]b.c'd.e\"f'g"),
        ("L['fn'].__closure__[0].cell_contents.block", "block"),
        ("G['model'].lm_head", "lm_head"),
        ("L['self']", ""),
    ],
)
def test_module_path(raw, clean):
    node = fx.Graph().placeholder("x")
    node.meta["nn_module_stack"] = {"a": ("L['self']", nn.Module), "b": (raw, nn.Module)}
    assert module_path(node) == clean


def test_source_line_skips_torch():
    node = fx.Graph().placeholder("x")
    inside = nn.modules.linear.__file__
    node.meta["stack_trace"] = f'  File "/a/b/model.py", line 7, in f\n    y\n  File "{inside}", line 9, in g\n    z'
    assert source_line(node) == "b/model.py:7"


def test_a_rule_for_the_owner_of_a_parameter_that_the_root_reads():
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Module()
            self.inner.w = nn.Parameter(torch.randn(16, 32))

        def forward(self, x):
            return F.linear(x, self.inner.w)

    compiled = Matched(Holder(), rules=[(r"^inner$", None)])
    compiled(torch.randn(4, 32))
    assert compiled.records[0].module == "inner.w" and not compiled.records[0].matched


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Qwen3"])
def test_hugging_face_models_match_whole(family):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, vocab_size=64, use_cache=False,
    )  # fmt: skip
    model = getattr(transformers, f"{family}ForCausalLM")(config).bfloat16()
    tokens = torch.randint(0, 64, (1, 8))
    compiled = Matched(model)
    torch.testing.assert_close(compiled(tokens).logits, model(tokens).logits)
    linears = [r for r in compiled.records if r.kind == "linear"]
    assert [r.module for r in linears] == [
        *(f"model.layers.0.self_attn.{n}_proj" for n in "qkvo"),
        *(f"model.layers.0.mlp.{n}_proj" for n in ("gate", "up", "down")),
        "lm_head",
    ]
    assert all(r.matched for r in linears)
    norms = {r.module.rpartition(".")[2]: r.matched for r in compiled.records if r.kind == "rms_norm"}
    assert norms["input_layernorm"] and norms["norm"]
    assert [r.kind for r in compiled.records if r.kind.startswith("gated") and r.matched] == [
        "gated gelu_tanh" if family == "Gemma2" else "gated silu"
    ]
