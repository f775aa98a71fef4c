"""passes/torch_ir/operation_chains.py: which stretches of an unmodified model are lists of operations, and what takes their place."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from helpers.models.operation_chain_models import (
    EAGER,
    WIDTH,
    Block,
    Gated,
    Halves,
    LlamaNorm,
    NormLinear,
    Whole,
    WholeBackward,
    check,
    fusing,
    matched,
    run,
)
from torch import nn

import te_dynamo
from te_dynamo.operations import (
    GEGLU,
    GELU,
    QGELU,
    AddExtraInput,
    BasicLinear,
    Bias,
    FusedOperation,
    LayerNorm,
    MakeExtraOutput,
    RMSNorm,
    SwiGLU,
    sliding_window,
)
from te_dynamo.testing import capture_on_fake_cuda

# ---- norms before a linear

NORMS = {
    "nn.RMSNorm": lambda: nn.RMSNorm(WIDTH, eps=1e-5),
    "default eps": lambda: nn.RMSNorm(WIDTH),
    "written": LlamaNorm,
}


@pytest.mark.one_fast_case
@pytest.mark.parametrize(
    ("norm", "recipe"),
    [
        ("nn.RMSNorm", EAGER["recipe"]),
        ("written", EAGER["recipe"]),
        pytest.param("written", "mxfp8", marks=pytest.mark.slow),
        pytest.param("default eps", "mxfp8", marks=pytest.mark.slow),
    ],
    ids=["nn", "written", "written, mxfp8", "nn, mxfp8"],
)
def test_an_rms_norm_before_a_linear(norm, recipe):
    """Also where the matcher leaves the norm to Inductor, for no kernel of ours writes the recipe's format."""
    with fusing(RMSNorm, BasicLinear):
        graphs = check(NormLinear(NORMS[norm]()).bfloat16(), {**EAGER, "recipe": recipe})
    assert "= te.Whole(x, [norm.weight, fc.weight], []" in graphs["match"]
    assert ("cast_before_weight=True" in graphs["match"]) == (norm == "written")
    assert "norm(" not in matched(graphs).lower().replace("rmsnorm(", "")
    assert graphs.reports[0].fusions[0] == ("joint", "Whole", 1)


def test_a_norm_and_an_mlp_before_and_after():
    """The list of the issue: LayerNorm, linear, GELU, linear."""
    types = (LayerNorm, BasicLinear, Bias, GELU, BasicLinear, Bias)
    before = matched(run(Block().bfloat16())[0])
    with fusing(*types):
        after = matched(check(Block().bfloat16()))
    assert_expected_inline(
        before,
        """\
layer_norm: (bf16[2, 16, 32], f32[32], f32[32]) = te.layer_norm(x, norm.weight, norm.bias, 1e-05)
linear: (bf16[2, 16, 64], f8e4m3[32, 32], f32[1], f8e4m3[32, 64], f32[1]) = te.linear(layer_norm[0], up.weight, up.bias, linear(x e4m3[row+column, pow2], w e4m3[row+column, pow2], dy e5m2[row+column, pow2]))
gelu: bf16[2, 16, 64] = te.gelu(linear[0], 'none')
linear_1: (bf16[2, 16, 32], f8e4m3[64, 32], f32[1], f8e4m3[64, 32], f32[1]) = te.linear(gelu, down.weight, down.bias, linear(x e4m3[row+column, pow2], w e4m3[row+column, pow2], dy e5m2[row+column, pow2]))
add: bf16[2, 16, 32] = x + linear_1[0]
return add""",
    )
    assert_expected_inline(
        after,
        """\
Whole: (bf16[2, 16, 32], f32[32], f32[32], f8e4m3[32, 32], f32[1], f8e4m3[32, 64], f32[1], bf16[2, 16, 64], f8e4m3[64, 32], f32[1], f8e4m3[64, 32], f32[1]) = te.Whole(x, [norm.weight, norm.bias, up.weight, up.bias, down.weight, down.bias], [], Whole((LayerNorm(32), BasicLinear(32, 64, recipe=float8_current_scaling(power_of_two_scales=True)), Bias(64), GELU(), BasicLinear(64, 32, recipe=float8_current_scaling(power_of_two_scales=True)), Bias(32))), Call(requires_grad=[True, True, True, True, True, True, True], training=True))
add: bf16[2, 16, 32] = x + Whole[0]
return add""",
    )


@pytest.mark.slow
def test_a_backward_fusion_of_a_norm_and_a_linear():
    """te.sequence runs it: no shipped fusion takes the operations before."""
    with fusing(RMSNorm, BasicLinear, cls=WholeBackward):
        graphs = check(NormLinear(nn.RMSNorm(WIDTH)).bfloat16())
        (node,) = (node for node in graphs.graph("match").nodes if "te.sequence" in str(node.target))
        program = node.args[3].program(node.args[4], True)
    assert [type(group.op).__name__ for group in program.forward] == ["RMSNorm", "BasicLinear"]
    assert [type(group.op).__name__ for group in program.backward] == ["WholeBackward"]
    assert graphs.reports[0].fusions[0] == ("backward", "WholeBackward", 1)


class QuickGelu(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        h = self.up(x)
        return self.down(h * torch.sigmoid(1.702 * h))


@pytest.mark.parametrize("recipe", [EAGER["recipe"], pytest.param("mxfp8", marks=pytest.mark.slow)], ids=["te", "left"])
def test_a_quick_gelu_that_is_written_out(recipe):
    """As te.quick_gelu; and as the user's nodes, where no kernel of ours writes the recipe's format."""
    with fusing(BasicLinear, Bias, QGELU, BasicLinear, Bias):
        graphs = check(QuickGelu().bfloat16(), {**EAGER, "recipe": recipe})
    assert "= te.Whole(x, [up.weight, up.bias, down.weight, down.bias], []" in graphs["match"]


class Shared(nn.Module):
    """q, k and v of one norm; the norm is read by others too."""

    def __init__(self, linears=3, returned=False):
        super().__init__()
        self.norm, self.returned = nn.RMSNorm(WIDTH, eps=1e-5), returned
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(linears))

    def forward(self, x):
        h = self.norm(x)
        y = sum(linear(h) for linear in self.linears)
        return torch.cat((y, h)) if self.returned else y


@pytest.mark.parametrize(
    "model", [Shared(3), pytest.param(Shared(1, True), marks=pytest.mark.slow)], ids=["qkv", "returned"]
)
def test_a_norm_that_others_read_is_left(model):
    with fusing(RMSNorm, BasicLinear):
        graphs = run(model.bfloat16())[0]
    with_none = run(model)[0]
    assert graphs["match"] == with_none["match"]


class Without(nn.Module):
    """Norms that the operations do not have."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.fc = norm, nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.fc(self.norm(x))


@pytest.mark.parametrize(
    "norm",
    [nn.LayerNorm(WIDTH, bias=False), nn.RMSNorm(WIDTH, elementwise_affine=False), nn.LayerNorm((16, WIDTH))],
    ids=["no bias", "no weight", "two dimensions"],
)
@pytest.mark.slow
def test_a_norm_that_the_operations_do_not_have_is_left(norm):
    model = Without(norm).bfloat16()
    with fusing((RMSNorm, LayerNorm), BasicLinear):
        graphs = run(model)[0]
    assert graphs["match"] == run(model)[0]["match"]


# ---- residual sums


def test_a_residual_sum_behind_a_linear():
    with fusing(BasicLinear, Bias, AddExtraInput):
        graphs = check(Block().bfloat16())
    assert_expected_inline(
        matched(graphs),
        """\
layer_norm: (bf16[2, 16, 32], f32[32], f32[32]) = te.layer_norm(x, norm.weight, norm.bias, 1e-05)
linear: (bf16[2, 16, 64], f8e4m3[32, 32], f32[1], f8e4m3[32, 64], f32[1]) = te.linear(layer_norm[0], up.weight, up.bias, linear(x e4m3[row+column, pow2], w e4m3[row+column, pow2], dy e5m2[row+column, pow2]))
gelu: bf16[2, 16, 64] = te.gelu(linear[0], 'none')
Whole: (bf16[2, 16, 32], f8e4m3[64, 32], f32[1], f8e4m3[64, 32], f32[1]) = te.Whole(gelu, [down.weight, down.bias], [x], Whole((BasicLinear(64, 32, recipe=float8_current_scaling(power_of_two_scales=True)), Bias(32), AddExtraInput())), Call(requires_grad=[True, True, True, True], training=True))
return Whole[0]""",
    )


def test_a_residual_stream_through_two_blocks():
    """The sum of the first block is what the second one normalizes, and adds to."""
    with fusing(AddExtraInput, MakeExtraOutput, RMSNorm, BasicLinear, SwiGLU):
        graphs = check(nn.Sequential(Gated(), Gated()).bfloat16())
    assert_expected_inline(
        matched(graphs),
        """\
rms_norm: (bf16[2, 16, 32], f32[32]) = te.rms_norm(args_0, 0.norm.weight, 1e-05, cast_before_weight=False, zero_centered=False)
linear: (bf16[2, 16, 64], f8e4m3[32, 32], f32[1], f8e4m3[32, 64], f32[1]) = te.linear(rms_norm[0], 0.gate.weight, None, linear(x e4m3[row+column, pow2], w e4m3[row+column, pow2], dy e5m2[row+column, pow2]))
linear_1: (bf16[2, 16, 64], f8e4m3[32, 32], f32[1], f8e4m3[32, 64], f32[1]) = te.linear(rms_norm[0], 0.up.weight, None, linear(x e4m3[row+column, pow2], w e4m3[row+column, pow2], dy e5m2[row+column, pow2]))
gated: bf16[2, 16, 64] = te.gated(linear[0], linear_1[0], 'silu')
linear_2: (bf16[2, 16, 32], f8e4m3[64, 32], f32[1], f8e4m3[64, 32], f32[1]) = te.linear(gated, 0.down.weight, None, linear(x e4m3[row+column, pow2], w e4m3[row+column, pow2], dy e5m2[row+column, pow2]))
cat: bf16[128, 32] = torch.cat([1.gate.weight, 1.up.weight], 0)
Whole: (bf16[2, 16, 64], bf16[2, 16, 32], f32[32], f8e4m3[32, 32], f32[1], f8e4m3[32, 128], f32[1], bf16[2, 16, 128]) = te.Whole(linear_2[0], [1.norm.weight, cat], [args_0], Whole((AddExtraInput(), MakeExtraOutput(), RMSNorm(32), BasicLinear(32, 128, recipe=float8_current_scaling(power_of_two_scales=True)), SwiGLU())), Call(requires_grad=[True, True, True, True], training=True))
linear_3: (bf16[2, 16, 32], f8e4m3[64, 32], f32[1], f8e4m3[64, 32], f32[1]) = te.linear(Whole[0], 1.down.weight, None, linear(x e4m3[row+column, pow2], w e4m3[row+column, pow2], dy e5m2[row+column, pow2]))
add: bf16[2, 16, 32] = linear_3[0] + Whole[1]
return add""",
    )


@pytest.mark.slow
def test_a_whole_block_is_one_operation():
    """Its input is its extra input too."""
    with fusing(RMSNorm, BasicLinear, SwiGLU, BasicLinear, AddExtraInput):
        graphs = check(nn.Sequential(Gated(), Gated()).bfloat16())
    assert graphs["match"].count("= te.Whole(") == 2 and "te.linear(" not in graphs["match"]


@pytest.mark.slow
def test_what_needs_its_own_extra_output_is_left():
    """The second sum of the block reads what would be an extra output of the same operation."""
    types = (AddExtraInput, MakeExtraOutput, RMSNorm, BasicLinear, SwiGLU, BasicLinear, AddExtraInput)
    model = nn.Sequential(Gated(), Gated()).bfloat16()
    with fusing(*types):
        graphs = check(model)
    assert graphs["match"] == run(model)[0]["match"]


@pytest.mark.slow
def test_the_first_operation_may_be_a_make_extra_output():
    with fusing(MakeExtraOutput, LayerNorm, BasicLinear, Bias, cls=WholeBackward):
        graphs = check(Block().bfloat16())
    assert "add: bf16[2, 16, 32] = sequence[1] + linear[0]" in graphs["match"]


def augmented(x, y):
    y += x
    return y


SUMS = {
    "in place": lambda x, y: y.add_(x),
    "augmented": augmented,
    "broadcast": lambda x, y: y + x[:1],
    "promoted": lambda x, y: y + x.float(),
    "scaled": lambda x, y: torch.add(y, x, alpha=2),
    "number": lambda x, y: y + 1.0,
    "itself": lambda x, y: y + y,
}


class Sum(nn.Module):
    def __init__(self, add):
        super().__init__()
        self.fc, self.add = nn.Linear(WIDTH, WIDTH), add

    def forward(self, x):
        return self.add(x, self.fc(x))


@pytest.mark.parametrize("add", SUMS)
@pytest.mark.slow
def test_other_sums_are_left(add):
    model = Sum(SUMS[add]).bfloat16()
    with fusing(BasicLinear, Bias, AddExtraInput):
        graphs = check(model)
    assert "te.Whole" not in graphs["match"]


# ---- gated activations

PRODUCTS = {
    "silu": (lambda g, u: F.silu(g) * u, SwiGLU, False),
    "silu, bias": (lambda g, u: F.silu(g) * u, SwiGLU, True),
    "the other way round": (lambda g, u: u * F.gelu(g, approximate="tanh"), GEGLU, False),
}


@pytest.mark.parametrize(
    "product", ["silu", *(pytest.param(p, marks=pytest.mark.slow) for p in PRODUCTS if p != "silu")]
)
def test_gate_and_up_are_one_linear(product):
    formula, op, bias = PRODUCTS[product]
    with fusing(RMSNorm, BasicLinear, *[Bias] * bias, op):
        graphs = check(Gated(formula, bias).bfloat16())
    assert "cat: bf16[128, 32] = torch.cat([gate.weight, up.weight], 0)" in graphs["match"]
    assert "BasicLinear(32, 128" in graphs["match"] and graphs["match"].count("te.linear(") == 1


@pytest.mark.slow
def test_a_fusion_of_the_activation_alone_does_not_take_the_gate_of_a_gated_unit():
    """te.gated has its place already, whatever gates."""
    formula, _, _ = PRODUCTS["the other way round"]
    with fusing(BasicLinear, GELU):
        graphs = check(Gated(formula).bfloat16())
    assert "te.Whole" not in graphs["match"] and "te.gated(linear[0], linear_1[0], 'gelu_tanh')" in graphs["match"]


@pytest.mark.slow
def test_gate_and_up_in_one_linear():
    with fusing(BasicLinear, SwiGLU, BasicLinear):
        graphs = check(Halves().bfloat16())
    assert "= te.Whole(x, [gate_up.weight, down.weight], []" in graphs["match"]


@pytest.mark.parametrize(
    "product",
    [lambda g, u: F.silu(g) * u + g, lambda g, u: F.silu(g) * g + u, lambda g, u: F.silu(g) * u[..., :1]],
    ids=["gate is read again", "of itself", "broadcast"],
)
@pytest.mark.slow
def test_other_products_are_left(product):
    with fusing(RMSNorm, BasicLinear, SwiGLU):
        graphs = check(Gated(product).bfloat16())
    assert "te.Whole" not in graphs["match"]


# ---- what must not change


def test_a_fusion_that_finds_nothing_leaves_the_graph():
    model = nn.Sequential(Gated(), Gated()).bfloat16()
    with fusing(GELU, RMSNorm):
        graphs = run(model)[0]
    assert graphs["match"] == run(model)[0]["match"]


class WritesItsInput(Block):
    def forward(self, x):
        x = x * 1.0
        y = self.down(F.gelu(self.up(self.norm(x))))
        x.mul_(2)
        return x + y


@pytest.mark.slow
def test_an_input_that_is_written_before_the_sum():
    """The sum reads what was written, not the extra output."""
    with torch.no_grad(), fusing(MakeExtraOutput, LayerNorm, BasicLinear, Bias):
        graphs = check(WritesItsInput().bfloat16())
    assert "te.Whole" in graphs["match"] and "add: bf16[2, 16, 32] = mul + linear[0]" in graphs["match"]


@pytest.mark.slow
def test_autocast_keeps_its_dtypes():
    """The norm is fp32 there and the linear bf16: no list of operations holds both. The linear and its sum are apart for the same reason."""
    with torch.autocast("cpu", torch.bfloat16), fusing((LayerNorm, AddExtraInput), BasicLinear, Bias):
        graphs = check(Block())
    assert "te.Whole" not in graphs["match"]
    with torch.autocast("cpu", torch.bfloat16), fusing(BasicLinear, Bias, GELU):
        graphs = check(Block())
    assert "te.Whole" in graphs["match"]
    with torch.autocast("cpu", torch.bfloat16), fusing(BasicLinear, SwiGLU, BasicLinear):
        graphs = check(Gated())  # gate and up read the norm, which gives bf16
    assert "te.Whole(rms_norm[0], [cat, " in graphs["match"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.slow
def test_other_dtypes(dtype):
    with fusing(RMSNorm, BasicLinear, SwiGLU, BasicLinear, AddExtraInput):
        assert "te.Whole" in check(Gated().to(dtype))["match"]


@pytest.mark.slow
def test_what_needs_no_gradient():
    """Frozen norms and an input without a gradient: the fused operation is told."""
    model = Block().bfloat16()
    model.norm.requires_grad_(False)
    torch.manual_seed(0)
    x = torch.randn(4, WIDTH, dtype=torch.bfloat16)
    with fusing(LayerNorm, BasicLinear, Bias, GELU):
        torch._dynamo.reset()
        with te_dynamo.capture() as graphs:
            torch.compile(model, backend="te", options=EAGER)(x).sum().backward()
        assert "Call(requires_grad=[False, False, False, True, True], training=True)" in graphs["match"]
        torch._dynamo.reset()
        with te_dynamo.capture() as graphs, torch.no_grad():
            torch.compile(model, backend="te", options=EAGER)(x)
        assert "Call(requires_grad=[False, False, False, False, False], training=True)" in graphs["match"]


@pytest.mark.slow
def test_dynamic_shapes_stay_dynamic():
    model = nn.Sequential(Gated(), Gated()).bfloat16()
    with fusing(AddExtraInput, MakeExtraOutput, RMSNorm, BasicLinear, SwiGLU):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="te", dynamic=True, options=EAGER)
        with te_dynamo.capture() as graphs:
            for rows in (16, 32, 48):
                y = compiled(torch.randn(rows, WIDTH, dtype=torch.bfloat16, requires_grad=True))
                assert y.shape == (rows, WIDTH)
                y.sum().backward()
        assert len(graphs.reports) == 1 and "te.Whole" in graphs["match"]


@pytest.mark.slow
def test_inside_a_checkpoint():
    class Checkpointed(Block):
        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)

    with fusing(LayerNorm, BasicLinear, Bias, GELU, BasicLinear, Bias, AddExtraInput):
        graphs = check(Checkpointed().bfloat16())
    assert graphs.reports[0].fusions[0] == ("joint", "Whole", 1)


@pytest.mark.slow
def test_fused_operations_of_which_one_lies_inside_the_other():
    """A forward one over four links, a backward one over the two in the middle: one te.sequence."""

    class WholeForward(FusedOperation):
        fuser_forward_compute = Whole.fuser_forward_compute
        fuser_forward_save_ctx = Whole.fuser_forward_save_ctx

    def forward(ops, *, recipe):
        return sliding_window(ops, (LayerNorm, BasicLinear, Bias, GELU, BasicLinear, Bias), WholeForward)

    with te_dynamo.register_forward_fusion(forward), fusing(GELU, BasicLinear, cls=WholeBackward):
        graphs = check(Block().bfloat16())
    assert graphs["match"].count("= te.sequence(") == 1 and "te.linear" not in graphs["match"]


# ---- on CUDA


def test_on_fake_cuda():
    with fusing(RMSNorm, BasicLinear, SwiGLU, BasicLinear, AddExtraInput):
        graphs = capture_on_fake_cuda(
            lambda: Gated().bfloat16(),
            lambda device: (torch.empty(2, 16, WIDTH, dtype=torch.bfloat16, device=device, requires_grad=True),),
        )
    assert_expected_inline(
        matched(graphs),
        """\
cat: bf16[128, 32] = torch.cat([gate.weight, up.weight], 0)
Whole: (bf16[2, 16, 32], f32[32], f8e4m3[32, 32], f32[1], f8e4m3[32, 128], f32[1], bf16[2, 16, 128], f8e4m3[64, 32], f32[1], f8e4m3[64, 32], f32[1]) = te.Whole(x, [norm.weight, cat, down.weight], [x], Whole((RMSNorm(32), BasicLinear(32, 128, recipe=float8_current_scaling), SwiGLU(), BasicLinear(64, 32, recipe=float8_current_scaling), AddExtraInput())), Call(requires_grad=[True, True, True, True, True], training=True))
return Whole[0]""",
    )
    assert_expected_inline(
        "\n".join(line for line in graphs["forward"].splitlines() if not line.endswith(" = input")),
        """\
cat: bf16[128, 32] = aten.cat([gate.weight, up.weight])
rms_norm_quantize: (f32[32], f8e4m3[32, 32], f8e4m3[32, 32], f32[1]) = te.rms_norm_quantize(x, norm.weight, 1e-05, cast_before_weight=False, zero_centered=False, quantizer=e4m3[row+column], keep_output=False)
quantize: (f8e4m3[128, 32], f8e4m3[32, 128], f32[1]) = te.quantize(cat, e4m3[row+column])
gemm: bf16[32, 128] = te.gemm([rms_norm_quantize[1], rms_norm_quantize[3]], e4m3[row], [quantize[0], quantize[2]], e4m3[row], bf16, fast_accum=False)
reshape: bf16[2, 16, 128] = aten.reshape(gemm, [2, 16, 128])
split: (bf16[2, 16, 64], bf16[2, 16, 64]) = aten.split(reshape, 64, -1)
gated_quantize: (f8e4m3[32, 64], f8e4m3[64, 32], f32[1]) = te.gated_quantize(split[0], split[1], 'silu', e4m3[row+column], keep_output=False)
quantize_1: (f8e4m3[32, 64], f8e4m3[64, 32], f32[1]) = te.quantize(down.weight, e4m3[row+column])
view: bf16[32, 32] = aten.view(x, [32, 32])
gemm_1: bf16[32, 32] = te.gemm([gated_quantize[0], gated_quantize[2]], e4m3[row], [quantize_1[0], quantize_1[2]], e4m3[row], bf16, fast_accum=False, addend=view)
reshape_1: bf16[2, 16, 32] = aten.reshape(gemm_1, [2, 16, 32])
reshape_2: f32[2, 16, 1] = aten.reshape(rms_norm_quantize[0], [2, 16, 1])
return reshape_1, norm.weight, x, rms_norm_quantize[2], rms_norm_quantize[3], quantize[1], quantize[2], split[0], split[1], gated_quantize[1], gated_quantize[2], quantize_1[1], quantize_1[2], reshape_2""",
    )
