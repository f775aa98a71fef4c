"""load_checkpoint: the file's codes and scales become the model's weights, and are multiplied as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.weights.checkpoint_files import FILES, K, N, gpt_oss, net, scales, write
from torch import nn

import te_dynamo
from te_dynamo.errors import CheckpointError, InvalidOptionError
from te_dynamo.weights.checkpoint.files import Files
from te_dynamo.weights.checkpoint.record import stored_of

X = torch.randn(32, K, generator=torch.manual_seed(2)).bfloat16()


@pytest.mark.parametrize("name", FILES)
def test_values_are_those_of_the_file(name: str, tmp_path: Path) -> None:
    file = FILES[name]
    tensors, meant = file.tensors()
    model = te_dynamo.load_checkpoint(net(), write(tmp_path, file))
    for weight, values in meant.items():
        held = model.get_parameter(weight)
        assert isinstance(held, te_dynamo.QuantizedTensor) and not held.requires_grad
        if "nvfp4" in name:  # the amax is held, of which the factor is made again
            torch.testing.assert_close(held.dequantize().float(), values, rtol=2**-8, atol=0)
        else:
            assert torch.equal(held.dequantize(), values.bfloat16())
    for weight in ("norm.weight", "norm.bias", "mlp.0.bias"):
        assert torch.equal(model.get_parameter(weight), tensors[weight])


@pytest.mark.one_fast_case
@pytest.mark.parametrize("name", FILES)
def test_every_linear_is_in_the_files_recipe(name: str) -> None:
    file = FILES[name]
    tensors, meant = file.tensors()
    model = te_dynamo.load_quantized(net(), tensors, file.config)
    plain = net()
    plain.load_state_dict({name: tensors[name] for name in ("norm.weight", "norm.bias", "mlp.0.bias")}, strict=False)
    for weight, values in meant.items():
        plain.get_parameter(weight).data = values.bfloat16()
    with torch.no_grad(), te_dynamo.capture() as graphs:
        y = torch.compile(model, backend="te", options={"codegen": "eager"})(X)
        expected = plain(X)
    linears = [match for match in graphs.reports[0].matches if match.kind == "linear"]
    assert [match.recipe for match in linears] == [file.recipe] * 2
    bound = 0.25 if "nvfp4" in name else 0.06
    assert (y - expected).float().norm() <= bound * expected.float().norm()


def test_explain_names_the_form() -> None:
    file = FILES["fp8"]
    explained = te_dynamo.explain(te_dynamo.load_quantized(net(), file.tensors()[0], file.config), X)
    assert [row.stored for row in explained.linears] == ["fp8 (block)"] * 2
    assert "weight as stored: fp8 (block)" in str(explained)


def test_the_estimate_of_a_stored_weight_is_that_of_a_frozen_one(tmp_path: Path) -> None:
    options = {"recipe": "float8_rowwise"}
    models = [
        nn.Sequential(nn.Linear(2048, 2048, bias=False, dtype=torch.bfloat16)).eval().requires_grad_(False)
        for _ in "ab"
    ]
    te_dynamo.save_checkpoint(models[0], tmp_path, form="compressed-tensors", **options)
    te_dynamo.load_checkpoint(models[0], tmp_path)
    te_dynamo.freeze(models[1])
    x = torch.randn(64, 2048, dtype=torch.bfloat16)
    stored, frozen = (te_dynamo.explain(model, x, device="h200", options=options) for model in models)
    assert stored.linears[0].stored and stored.estimated_ms and stored.estimated_ms == frozen.estimated_ms


def test_static_scales_of_activations_are_said_not_to_be_used() -> None:
    file = FILES["ct tensor"]
    model = te_dynamo.load_quantized(net(), file.tensors()[0], file.config)
    stored = stored_of(model.mlp[0], "weight")
    assert stored.describe() == "compressed-tensors (tensor, static scales of activations not used)"


def test_a_rule_goes_before_the_file() -> None:
    file = FILES["fp8"]
    model = te_dynamo.load_quantized(net(), file.tensors()[0], file.config)
    rules = [("mlp.0", None), ("mlp.2", "mxfp8")]
    first, second = te_dynamo.explain(model, X, rules=rules).linears
    assert first.reason == "rule 'mlp.0' leaves it in the model's precision"
    there = "its weight is FP8 (e4m3) with a scale per block of 128x128, fp32 scales"
    assert second.reason == f"{there}; mxfp8 multiplies by MXFP8 with a scale per block of 1x32"
    # A GEMM reads scales that are no powers of two by a recipe that makes powers of two.
    assert te_dynamo.explain(model, X, rules=[("", "float8_block_scaling")]).coverage == 1.0


def test_dtype_and_a_model_on_meta(tmp_path: Path) -> None:
    file = FILES["fp8"]
    with torch.device("meta"):
        model = net(torch.float32)
    te_dynamo.load_checkpoint(model, write(tmp_path, file), dtype=torch.float16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert model(X.half()).isfinite().all()
    for wrong in (torch.int8, torch.float8_e4m3fn, "bf16"):
        model = net()
        with pytest.raises(InvalidOptionError, match="dtype is a floating one of 16 bits or more"):
            te_dynamo.load_checkpoint(model, tmp_path, dtype=wrong)  # type: ignore[arg-type]
        assert type(model.mlp[0].weight) is nn.Parameter


def test_a_buffer_that_no_file_has(tmp_path: Path) -> None:
    """transformers makes such a buffer anew; other models have to have it."""

    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("frequencies", torch.arange(4.0), persistent=False)

    folder = write(tmp_path, FILES["fp8"])
    with torch.device("meta"):
        model = net()
        model.rotary = Rotary()
        # Beside parameters, as in Gemma's embeddings.
        model.norm.register_buffer("scale", torch.ones(()), persistent=False)
    with pytest.raises(CheckpointError, match="buffers of 'norm' are on meta, and no file has them"):
        te_dynamo.load_checkpoint(model, folder)
    assert model.norm.weight.is_meta
    model._init_weights = lambda module: [
        getattr(module, name).copy_(torch.arange(4.0) if name == "frequencies" else torch.tensor(3.0))
        for name in ("weight", "bias", "scale", "frequencies")
        if hasattr(module, name)
    ]
    te_dynamo.load_checkpoint(model, folder)
    assert torch.equal(model.rotary.frequencies, torch.arange(4.0)) and model.norm.scale == 3
    assert torch.equal(model.norm.weight, te_dynamo.load_checkpoint(net(), folder).norm.weight)


@pytest.mark.parametrize("static", [False, True])
def test_equal_blocks_share_a_graph_unless_it_reads_their_static_scales(static: bool) -> None:
    torch._dynamo.reset()
    file = FILES["modelopt"]
    tensors, blocks = file.tensors()[0], [net() for _ in range(3)]
    for scale, block in enumerate(blocks, 1):
        given = {**tensors, f"mlp.0.{file.beside[0]}": torch.tensor(scale / 2048)}
        te_dynamo.load_quantized(block, given, file.config)
    options = {"recipe": te_dynamo.recipe.Float8CurrentScaling(static_inputs=static), "codegen": "eager"}
    results = []
    with te_dynamo.capture() as graphs, torch.no_grad():
        for block in blocks:
            block.compile(backend="te", options=options)
            results.append(block(X))
    assert len(graphs.reports) == (3 if static else 1)
    assert torch.equal(results[0], results[2]) is not static
    # What a graph returns has the static scale of what it was given.
    same = torch.compile(lambda weight: weight.clone(), backend="te", options=options)
    for block in blocks:
        assert same(block.mlp[0].weight).quantizer == block.mlp[0].weight.quantizer


def test_a_parameter_stays_who_it_is(tmp_path: Path) -> None:
    model = net()
    before = model.norm.weight
    te_dynamo.load_checkpoint(model, write(tmp_path, FILES["fp8"]))
    assert model.norm.weight is before and before.requires_grad


def test_plain_tensors_are_copied_and_codes_are_shared() -> None:
    """A write to what was given shows in no version counter of the model's, and one tensor may be given under two names."""
    file = FILES["ct row"]
    tensors, _ = file.tensors()
    tensors["norm.weight"] = tensors["norm.bias"]
    with torch.device("meta"):
        on_meta = net()
    for model in (net(), on_meta):
        te_dynamo.load_quantized(model, tensors, file.config)
        with torch.no_grad():
            before = tensors["norm.bias"].clone()
            tensors["norm.bias"].zero_()
            assert torch.equal(model.norm.weight, before) and torch.equal(model.norm.bias, before)
            model.norm.weight.fill_(3)
            assert torch.equal(model.norm.bias, before) and not tensors["norm.bias"].any()
            tensors["norm.bias"].copy_(before)
        assert model.mlp[0].weight._data.data_ptr() == tensors["mlp.0.weight"].data_ptr()


def test_a_frozen_weight_does_not_follow_what_it_was_loaded_from() -> None:
    model, tensors = nn.Linear(K, N, bias=False, dtype=torch.bfloat16), {"weight": torch.randn(N, K).bfloat16()}
    te_dynamo.freeze(te_dynamo.load_quantized(model, tensors, {}))
    with torch.no_grad():
        before = torch.compile(model, backend="te", options={"codegen": "eager"})(X)
        tensors["weight"].zero_()
        assert model(X).any() and torch.nn.functional.cosine_similarity(model(X).flatten(), before.flatten(), 0) > 0.99


def test_a_compiled_model_is_loaded_as_what_it_wraps(tmp_path: Path) -> None:
    model = net()
    te_dynamo.load_checkpoint(torch.compile(model, backend="te"), write(tmp_path, FILES["fp8"]))
    assert isinstance(model.mlp[0].weight, te_dynamo.QuantizedTensor)
    te_dynamo.save_checkpoint(torch.compile(model, backend="te"), tmp_path / "again")


def test_loaded_again(tmp_path: Path) -> None:
    """Another form in the place of the first, and then none."""
    model = te_dynamo.load_checkpoint(net(), write(tmp_path / "a", FILES["fp8"]))
    te_dynamo.load_checkpoint(model, write(tmp_path / "b", FILES["ct mxfp4"]))
    assert [stored_of(model.mlp[i], "weight").describe() for i in (0, 2)] == ["compressed-tensors (mxfp4)"] * 2
    plain = {name: tensor.detach().clone() for name, tensor in net().state_dict().items()}
    te_dynamo.load_quantized(model, plain, {})
    assert stored_of(model.mlp[0], "weight") is None
    assert type(model.mlp[0].weight) is nn.Parameter


def test_groups_of_modules() -> None:
    """Each weight has the scheme of the first group that names its module, by path, expression or class; those to ignore stay plain."""
    row, block = FILES["ct row"], FILES["ct block"]
    tensors, of_blocks = row.tensors()[0], block.tensors()[0]
    tensors |= {name: of_blocks[name] for name in of_blocks if name.startswith("mlp.2")}
    groups = {
        "a": {**block.config["config_groups"]["group_0"], "targets": ["re:.*[.]2$"]},
        "b": row.config["config_groups"]["group_0"],
    }
    config = {**row.config, "config_groups": groups, "format": "mixed-precision"}
    model = te_dynamo.load_quantized(net(), tensors, config)
    stored = [stored_of(model.mlp[i], "weight").describe() for i in (0, 2)]
    assert stored == ["compressed-tensors (row)", "compressed-tensors (block)"]
    del tensors["mlp.0.weight_scale"]
    tensors["mlp.0.weight"] = torch.randn(N, K).bfloat16()
    model = te_dynamo.load_quantized(net(), tensors, {**config, "ignore": ["mlp.0"]})
    assert type(model.mlp[0].weight) is nn.Parameter


class Experts(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16))


def test_experts() -> None:
    """[E, N, K], of one scale a matrix, of blocks, and of gpt-oss."""
    data = (torch.randn(3, 256, 128) * 40).to(torch.float8_e4m3fn)
    for scale in (scales(3), scales(3, 2, 1)):
        config = {"quant_method": "fp8", "weight_block_size": None if scale.dim() == 1 else [128, 128]}
        tensors = {"gate_up_proj": data, "gate_up_proj_scale_inv": scale}
        model = te_dynamo.load_quantized(Experts((3, 256, 128)), tensors, config)
        meant = data.float() * (scale.reshape(3, -1, 1).repeat_interleave(256 if scale.dim() == 1 else 128, 1))
        assert torch.equal(model.gate_up_proj.dequantize(), meant.bfloat16())


@pytest.mark.parametrize("experts", [1, 3])
@pytest.mark.parametrize(("n", "k"), [(64, 128), (128, 128), (32, 96)])
def test_experts_of_gpt_oss(n: int, k: int, experts: int, tmp_path: Path) -> None:
    """The model has [E, K, N] of what its file has as [E, N, K], square ones too. Written again, byte for byte."""
    tensors, meant = gpt_oss(experts, n, k)
    config = {"quant_method": "mxfp4"}
    model = te_dynamo.load_quantized(Experts((experts, k, n)), tensors, config)
    assert torch.equal(model.gate_up_proj.dequantize(), meant.mT)
    te_dynamo.save_checkpoint(model, tmp_path)
    again = Files(tmp_path)
    assert set(again) == set(tensors) and all(torch.equal(again[name], tensors[name]) for name in tensors)
    if n != k:  # a model that has it as the file does
        model = te_dynamo.load_quantized(Experts((experts, n, k)), tensors, config)
        assert torch.equal(model.gate_up_proj.dequantize(), meant)
    # Of two dimensions it is as any weight.
    model = te_dynamo.load_quantized(Experts((n, k)), {name: tensor[0] for name, tensor in tensors.items()}, config)
    assert torch.equal(model.gate_up_proj.dequantize(), meant[0])


def test_files_are_read_one_tensor_at_a_time(tmp_path: Path) -> None:
    tensors = FILES["ct tensor"].tensors()[0]
    files = Files(write(tmp_path, FILES["ct tensor"]))
    assert {name: (meta.dtype, meta.shape) for name, meta in files.metas.items()} == {
        n: (t.dtype, t.shape) for n, t in tensors.items()
    }
    assert all(torch.equal(files[name].view(torch.uint8), tensors[name].view(torch.uint8)) for name in tensors)


STATIC = ["ct tensor", "modelopt", "fp8 tensor"]


@pytest.mark.one_fast_case
@pytest.mark.parametrize("name", STATIC)
def test_static_scales_of_activations(name: str) -> None:
    """A recipe has them taken: inputs beyond them are clamped. In training they are an error."""
    file = FILES[name]
    tensors, meant = file.tensors()
    model = te_dynamo.load_quantized(net(), tensors, file.config).requires_grad_(False)
    recipe = te_dynamo.recipe.Float8CurrentScaling(static_inputs=True)
    compiled = torch.compile(model, backend="te", options={"recipe": recipe, "codegen": "eager"})
    with te_dynamo.capture() as graphs:
        y = compiled(X)
    assert graphs["inference"].count("te.quantize_with_amax") == 2
    scale = [tensors[f"mlp.{i}.{file.beside[0]}"].float() for i in (0, 2)]

    def held(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale

    first = held(model.norm(X), scale[0]) @ meant["mlp.0.weight"].T + model.mlp[0].bias
    expected = held(torch.nn.functional.gelu(first.bfloat16()), scale[1]) @ meant["mlp.2.weight"].T
    assert (y - expected).norm() <= 0.02 * expected.norm()
    used = [row.stored for row in te_dynamo.explain(model, X, recipe=recipe).linears]
    assert all(each.endswith("(tensor, static scales of activations used)") for each in used)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"the linear 'mlp.0' .* its input has a static scale, which is for inference"):
        compiled(X.clone().requires_grad_())
