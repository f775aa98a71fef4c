"""LayerNormLinear and LayerNormMLP: joint fusions against the operations that they stand for."""

import pytest
import torch
from helpers.models.operation_runs import TOLERANCE, Case, assert_agree, assert_same_bits, is_quantized

import te_dynamo
from te_dynamo.errors import InvalidOptionError
from te_dynamo.operations import GELU, QGELU, BasicLinear, Bias, LayerNorm, OperationFuser, RMSNorm, SwiGLU
from te_dynamo.operations.fused import LayerNormMLP, layer_norm_mlp
from te_dynamo.operations.fused.quantized import activation_gradient_quantized

FP8 = te_dynamo.recipe.Float8CurrentScaling(power_of_two_scales=True)
MXFP8 = te_dynamo.recipe.MXFP8BlockScaling()
NORMS = [LayerNorm(64), RMSNorm(64, zero_centered=True)]
DY = FP8.grad_output_quantizer()


def compare(case, tolerance=TOLERANCE["fp8"]):
    """(unfused, fused), outputs and gradients in agreement."""
    unfused, fused = (case.run(fused_forward=on, fused_backward=on) for on in (False, True))
    assert_agree(fused, unfused, tolerance)
    return unfused, fused


def assert_saves_the_same_bits(one, other):
    """What backward reads of quantized tensors."""
    for mine, theirs in zip(one.saved, other.saved, strict=True):
        a, b = ([t for t in saved if is_quantized(t)] for saved in (mine, theirs))
        assert_same_bits(a, b)


@pytest.mark.parametrize("norm", NORMS, ids=["layer_norm", "rms_norm"])
@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm_linear(norm, bias):
    case = Case([norm, BasicLinear(64, 96), *[Bias(96)] * bias], FP8, (3, 32, 64))
    unfused, fused = compare(case)
    assert fused.forward == fused.backward == ["LayerNormLinear"]
    assert_saves_the_same_bits(fused, unfused)


def test_a_norm_without_gradients_saves_nothing():
    case = Case([RMSNorm(64), BasicLinear(64, 96)], FP8, (32, 64), needs=(False, True, True))
    call = case.call()
    case.call = lambda: type(call).of(case.basics, [False, False, True], training=True)
    _, fused = compare(case)
    assert [len(saved) for saved in fused.saved] == [0, 2]


@pytest.mark.parametrize("activation", [GELU("tanh"), QGELU(), SwiGLU()], ids=["gelu", "qgelu", "swiglu"])
@pytest.mark.parametrize("biases", [(True, True), (False, False), (True, False)], ids=str)
def test_layer_norm_mlp(activation, biases):
    unfused, fused = compare(Case(mlp(RMSNorm(64), activation, biases), FP8, (3, 32, 64)))
    assert fused.forward == fused.backward == ["LayerNormMLP"]
    assert_saves_the_same_bits(fused, unfused)


@pytest.mark.parametrize("needs_sums", [False, True])
def test_a_gated_gradient_is_that_of_the_steps(needs_sums):
    h, dy = torch.randn(19, 96).bfloat16(), torch.randn(19, 48).bfloat16()
    dh = SwiGLU().backward(dy, h)
    sums, buffers = activation_gradient_quantized(SwiGLU(), dy, h, DY, needs_sums)
    assert_same_bits(buffers, torch.ops.te.quantize(dh, DY))
    assert torch.equal(sums, torch.ops.te.bias_grad(dh)) if needs_sums else sums is None


@pytest.mark.parametrize("recipe", [FP8, MXFP8, te_dynamo.recipe.NVFP4BlockScaling()], ids=["fp8", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("activation", [GELU(), SwiGLU()], ids=["gelu", "swiglu"])
def test_recomputing_saves_less_and_gives_the_same_bits(recipe, activation):
    case = Case(mlp(LayerNorm(64), activation, (True, True)), recipe, (3, 32, 64))
    with te_dynamo.register_forward_backward_fusion(layer_norm_mlp()):
        saving = case.run(fused_forward=True, fused_backward=True)
    with te_dynamo.register_forward_backward_fusion(layer_norm_mlp(recompute="activation")):
        recomputing = case.run(fused_forward=True, fused_backward=True)
    assert recomputing.forward == recomputing.backward == ["LayerNormMLP"]
    kept = [[t.shape for t in run.saved[4]] for run in (saving, recomputing)]
    assert kept[0][len(kept[0]) // 2 :] == kept[1]
    if recipe is FP8:
        assert_agree(recomputing, saving, dict(rtol=0.0, atol=0.0))


@pytest.mark.parametrize("recompute", [None, "activation"])
@pytest.mark.parametrize("frozen", [(0, 1), (0, 1, 2), (4,), (1, 3), (0, 1, 2, 4)], ids=str)
def test_frozen_parameters(recompute, frozen):
    """Every tensor's gradient exists exactly if it is asked for, and nothing is saved for the others."""
    case = Case(mlp(RMSNorm(64), GELU(), (True, True)), FP8, (32, 64))
    call = case.call()
    flags = [False, *(i not in frozen for i in range(5))]
    case.call = lambda: type(call).of(case.basics, flags, training=True)
    with te_dynamo.register_forward_backward_fusion(layer_norm_mlp(recompute)):
        _, fused = compare(case)
    assert fused.forward == ["LayerNormMLP"]
    assert [g is not None for g in fused.grads] == flags


def test_it_is_one_object_in_both_lists():
    fused = OperationFuser([*mlp(RMSNorm(64), GELU(), (True, True))], recipe=FP8).fuse()
    assert isinstance(fused.forward[0].op, LayerNormMLP)
    assert fused.forward[0].op is fused.backward[0].op


@pytest.mark.parametrize(
    "recipe",
    [None, te_dynamo.recipe.NVFP4BlockScaling(), te_dynamo.recipe.Float8CurrentScaling(backward="high_precision")],
)
def test_recipes_without_the_kernels_are_left_alone(recipe):
    fused = OperationFuser([*mlp(RMSNorm(64), GELU(), (False, False))], recipe=recipe).fuse()
    assert [type(group.op) for group in fused.forward] == [RMSNorm, BasicLinear, GELU, BasicLinear]


def test_an_unknown_recompute_is_an_error():
    with pytest.raises(InvalidOptionError, match="unknown recompute 'all'; valid: None, 'activation'"):
        LayerNormMLP((RMSNorm(64),), "all")


@pytest.mark.parametrize("backend", ["aot_eager", "te"])
@pytest.mark.parametrize("recompute", [None, "activation"])
def test_compiled(backend, recompute):
    torch._dynamo.reset()
    with te_dynamo.register_forward_backward_fusion(layer_norm_mlp(recompute)):
        model = te_dynamo.Sequential(*mlp(RMSNorm(64), SwiGLU(), (True, False)), recipe=FP8, dtype=torch.bfloat16)
        x = torch.randn(2, 16, 64, dtype=torch.bfloat16)
        results = []
        options = {"codegen": "eager"} if backend == "te" else None
        for run in (model, torch.compile(model, backend=backend, fullgraph=True, options=options)):
            run(x).float().square().mean().backward()
            results.append([p.grad.clone() for p in model.parameters()])
            model.zero_grad()
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=0.02, atol=1e-4)


def mlp(norm, activation, biases):
    width = 192 if isinstance(activation, SwiGLU) else 96
    first, second = ([Bias(n)] * on for n, on in zip((width, 32), biases, strict=True))
    return [norm, BasicLinear(64, width), *first, activation, BasicLinear(96, 32), *second]
