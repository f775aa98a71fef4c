"""Files by the libraries that own the forms, ours read by them, and adapters on each: a tiny Llama."""

from __future__ import annotations

import functools
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.weights.tiny_llama import IDS, linears, llama
from torch import Tensor, nn

import te_dynamo
from te_dynamo.weights.checkpoint.files import Files
from te_dynamo.weights.checkpoint.record import stored_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]
transformers = pytest.importorskip("transformers")

TESTS = Path(__file__).parents[2]


def assert_holds(model: nn.Module, meant: dict[str, Tensor], kind: str, rtol: float = 0) -> None:
    """Every linear is stored, with these values."""
    assert set(meant) == set(linears(model))
    for path, values in meant.items():
        module = model.get_submodule(path)
        stored = stored_of(module, "weight")
        assert stored is not None and stored.kind == kind
        torch.testing.assert_close(module.weight.dequantize().float(), values.float(), rtol=rtol, atol=0)


# ---- compressed-tensors


def _scale(weight: Tensor, scheme: Any, global_scale: Tensor | None) -> Tensor:
    strategy, top = scheme.strategy, 448.0 if scheme.num_bits == 8 else 6.0
    if strategy == "tensor":
        return weight.abs().max() / top
    if strategy == "channel":
        return weight.abs().amax(1, keepdim=True) / top
    if strategy == "block":
        return weight.unflatten(0, (-1, min(128, len(weight)))).unflatten(2, (-1, 128)).abs().amax((1, 3)) / top
    amax = weight.unflatten(1, (-1, scheme.group_size)).abs().amax(2)
    if global_scale is not None:
        return (amax / top * global_scale).to(torch.float8_e4m3fn).float()
    return torch.exp2(torch.ceil(torch.log2(amax / top)))


def compress(preset: str, folder: Path) -> None:
    """A folder as llm-compressor writes it, with scales from the weights' amaxes."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    model = llama()
    apply_quantization_config(model, QuantizationConfig(config_groups={preset: ["Linear"]}, ignore=["lm_head"]))
    for module in linears(model).values():
        weight, divisor = module.weight.data.float(), getattr(module, "weight_global_scale", None)
        if divisor is not None:
            divisor.data.fill_(448 * 6 / weight.abs().max())
        for name in ("input_scale", "input_global_scale"):
            if hasattr(module, name):
                getattr(module, name).data.fill_(0.5)
        scale = _scale(weight, module.quantization_scheme.weights, divisor)
        module.weight_scale.data = scale.to(module.weight_scale.dtype).reshape(module.weight_scale.shape)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)


PRESETS = {
    "FP8": "tensor",
    "FP8_DYNAMIC": "row",
    "FP8_BLOCK": "block",
    "MXFP8": "mxfp8",
    "MXFP4": "mxfp4",
    "NVFP4": "nvfp4",
}


@pytest.mark.parametrize("preset", PRESETS)
def test_compressed_tensors_wrote_it(preset: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    compress(preset, tmp_path)
    model = te_dynamo.load_checkpoint(llama(), tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        theirs(IDS)  # decompresses
    assert_holds(model, {path: module.weight for path, module in linears(theirs).items()}, PRESETS[preset])
    with torch.no_grad():
        assert te_dynamo.explain(model, IDS, rules=[("lm_head", None)]).coverage > 0.9


def test_explain_leaves_compressed_tensors_compressed(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    compress("FP8_DYNAMIC", tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        te_dynamo.explain(model, IDS)
        assert {module.weight.dtype for module in linears(model).values()} == {torch.float8_e4m3fn}
        assert model(IDS).logits.isfinite().all()


# ---- Model Optimizer

MODEL_OPTIMIZER = {
    "FP8_DEFAULT_CFG": "tensor",
    "FP8_PER_CHANNEL_PER_TOKEN_CFG": "row",
    "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG": "block",
}
"""Those that it computes on a CPU."""

WRITE = """
import sys
import modelopt.torch.quantization as quantization, torch
from helpers.weights.tiny_llama import IDS, linears, llama
from modelopt.torch.export import export_hf_checkpoint

for preset in sys.argv[2:]:
    folder, model = f"{sys.argv[1]}/{preset}", llama()
    model.config.architectures = ["LlamaForCausalLM"]
    quantization.quantize(model, getattr(quantization, preset), lambda model: model(IDS))
    weights = {path: each.weight.detach().clone() for path, each in linears(model).items()}
    export_hf_checkpoint(model, export_dir=folder)  # gives q, k and v one scale
    meant = {path: model.get_submodule(path).weight_quantizer(weight).detach() for path, weight in weights.items()}
    torch.save(meant, folder + "/meant.pt")
"""
"""In a process of its own: its import changes other libraries."""


@pytest.fixture(scope="module")
def of_model_optimizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("modelopt") is None:
        pytest.skip("needs nvidia-modelopt")
    folder = tmp_path_factory.mktemp("modelopt")
    subprocess.run([sys.executable, "-c", WRITE, str(folder), *MODEL_OPTIMIZER], check=True, cwd=TESTS)
    return folder


@pytest.mark.parametrize("preset", MODEL_OPTIMIZER)
def test_model_optimizer_wrote_it(preset: str, of_model_optimizer: Path) -> None:
    folder = of_model_optimizer / preset
    model, files = te_dynamo.load_checkpoint(llama(), folder), Files(folder)
    # What it computes with before it writes is rounded otherwise: here and there by one code.
    assert_holds(model, torch.load(folder / "meant.pt"), MODEL_OPTIMIZER[preset], rtol=2**-3)
    for path, module in linears(model).items():
        assert torch.equal(module.weight._data.view(torch.uint8), files[f"{path}.weight"].view(torch.uint8))


# ---- transformers


def test_transformers_wrote_it() -> None:
    """Its own operation, on a machine whose devices from_pretrained refuses."""
    from transformers.integrations.finegrained_fp8 import Fp8Quantize, _dequantize_fp8_weight

    for scale_fmt in ("float", "ue8m0"):
        config = transformers.FineGrainedFP8Config(scale_fmt=scale_fmt)
        quantize = Fp8Quantize(SimpleNamespace(quantization_config=config))
        model, tensors, meant = llama(), {}, {}
        for path, module in linears(model).items():
            made = quantize._quantize_one(f"{path}.weight", module.weight.data)
            if len(made) == 2:  # not of rows that are no whole blocks
                data, scale = made.values()
                meant[path] = _dequantize_fp8_weight(data, scale.float(), [128, 128], torch.float32).bfloat16()
            tensors |= made
        tensors = {**model.state_dict(), **tensors}
        te_dynamo.load_quantized(model, tensors, config.to_dict())
        for path, values in meant.items():
            assert torch.equal(model.get_submodule(path).weight.dequantize(), values)
        assert {stored_of(model.get_submodule(path), "weight").powers_of_two for path in meant} == {
            scale_fmt == "ue8m0"
        }  # type: ignore[union-attr]


WRITTEN = [
    ("fp8", "float8_block_scaling"),
    *(("compressed-tensors", recipe) for recipe in te_dynamo.recipe.names()),
]


@pytest.mark.parametrize(("form", "recipe"), WRITTEN)
def test_transformers_reads_ours(form: str, recipe: str, tmp_path: Path) -> None:
    """Its weights are ours, rounded to bf16 as it rounds scales."""
    if form != "fp8":
        pytest.importorskip("compressed_tensors")
    te_dynamo.save_checkpoint(llama(), tmp_path, form, recipe=recipe, rules=[("lm_head", None)])
    ours = te_dynamo.load_checkpoint(llama(), tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    with torch.device("meta"):
        bare = llama()
    te_dynamo.load_checkpoint(bare, tmp_path)
    with torch.no_grad():
        expected, logits = ours(IDS).logits, theirs(IDS).logits
        assert torch.equal(bare(IDS).logits, expected)
    for path, module in linears(ours).items():
        torch.testing.assert_close(theirs.get_submodule(path).weight, module.weight.dequantize(), rtol=2**-6, atol=1e-6)
    assert (logits - expected).norm() <= (0.3 if recipe == "nvfp4" else 0.06) * expected.norm()


@pytest.mark.parametrize("recipe", te_dynamo.recipe.names())
def test_compressed_tensors_reads_ours(recipe: str, tmp_path: Path) -> None:
    """By itself: its modules have exactly our tensors, and decompress to our values, whose scales have its dtype."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    te_dynamo.save_checkpoint(llama(), tmp_path, "compressed-tensors", recipe=recipe, rules=[("lm_head", None)])
    ours, theirs = te_dynamo.load_checkpoint(llama(), tmp_path), llama()
    written = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(written)
    apply_quantization_config(theirs, config)
    compressor = ModelCompressor(quantization_config=config)
    compressor.compress_model(theirs)
    theirs.load_state_dict(dict(Files(tmp_path)))
    compressor.decompress_model(theirs)
    for path, module in linears(ours).items():
        values = theirs.get_submodule(path).weight
        torch.testing.assert_close(values, module.weight.dequantize(), rtol=2**-6, atol=1e-6)


# ---- torchao


def _mx(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    return lambda weight: MXTensor.to_mx(weight, dtype, 32)


def _float8(granularity: str) -> Callable[[Tensor], Tensor]:
    from torchao import quantization

    return lambda weight: quantization.Float8Tensor.from_hp(weight, granularity=getattr(quantization, granularity)())


def _nvfp4() -> Callable[[Tensor], Tensor]:
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    return lambda weight: NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=weight.float().abs().max() / (448 * 6))


TORCHAO = {
    "tensor": lambda: _float8("PerTensor"),
    "row": lambda: _float8("PerRow"),
    "mxfp8": lambda: _mx(torch.float8_e4m3fn),
    "mxfp4": lambda: _mx(torch.float4_e2m1fn_x2),
    "nvfp4": _nvfp4,
}


@pytest.mark.parametrize("kind", TORCHAO)
def test_torchao_wrote_it(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    from safetensors.torch import save_file
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict, unflatten_tensor_state_dict

    model, make = llama(), TORCHAO[kind]()
    made = {path: make(module.weight.data) for path, module in linears(model).items()}
    state = {**model.state_dict(), **{f"{path}.weight": tensor for path, tensor in made.items()}}
    tensors, metadata = flatten_tensor_state_dict({name: tensor.detach() for name, tensor in state.items()})
    save_file(tensors, tmp_path / "model.safetensors", metadata=metadata)
    te_dynamo.load_checkpoint(model, tmp_path)
    assert_holds(
        model, {path: tensor.dequantize() for path, tensor in made.items()}, kind, 2**-7 if kind == "nvfp4" else 0
    )
    again = tmp_path / "again"
    te_dynamo.save_checkpoint(model, again)
    files = Files(again)
    theirs, left = unflatten_tensor_state_dict(dict(files), files.metadata)
    assert not left
    for path, tensor in made.items():
        assert torch.equal(theirs[f"{path}.weight"].qdata.view(torch.uint8), tensor.qdata.view(torch.uint8))


# ---- adapters


def _losses(model: nn.Module, compiled: Callable[..., Any]) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    losses = []
    for _ in range(20):
        loss = compiled(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _adapted(model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    torch.manual_seed(5)
    names = sorted({path.rpartition(".")[2] for path in linears(model)})
    return peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=16, target_modules=names))  # type: ignore[no-any-return]


def _written(form: str, recipe: str, folder: Path) -> nn.Module:
    te_dynamo.save_checkpoint(llama(), folder / "base", form, recipe=recipe, rules=[("lm_head", None)])
    return te_dynamo.load_checkpoint(llama(), folder / "base")


def _of_torchao(kind: str) -> nn.Module:
    model, make = llama().requires_grad_(False), TORCHAO[kind]()
    for module in linears(model).values():
        module.weight = nn.Parameter(make(module.weight.data), requires_grad=False)
    return model


def _of_compressed_tensors(preset: str, folder: Path) -> nn.Module:
    compress(preset, folder / "base")
    return te_dynamo.load_checkpoint(llama(), folder / "base")


BASES: dict[str, tuple[str, Callable[[Path], nn.Module]]] = {
    **{
        f"{form} {recipe}": (recipe, functools.partial(_written, form, recipe))
        for form, recipe in (*WRITTEN, *(("modelopt", name) for name in te_dynamo.recipe.names()))
    },
    "compressed-tensors mxfp4": ("mxfp8", functools.partial(_of_compressed_tensors, "MXFP4")),
    "torchao tensor": ("float8_current_scaling", lambda _: _of_torchao("tensor")),
    "torchao row": ("float8_rowwise", lambda _: _of_torchao("row")),
}


@pytest.mark.parametrize("base", BASES)
def test_adapters(base: str, tmp_path: Path) -> None:
    """Losses as on the bf16 base; every linear of the base multiplies the file's codes. Merged, it goes out again."""
    recipe, make = BASES[base]
    plain = _adapted(llama())
    expected = _losses(plain, plain)
    model = _adapted(make(tmp_path))
    compiled = torch.compile(model, backend="te", options={"codegen": "eager"})
    with te_dynamo.capture() as graphs:
        compiled(input_ids=IDS, labels=IDS).loss.backward()
    matches = [match for report in graphs.reports for match in report.matches if match.module.endswith("base_layer")]
    assert len(matches) == 7 and all(match.matched and match.recipe.startswith(recipe) for match in matches)
    model.zero_grad()
    loose = 0.1 if "mxfp4" in base else 0.03
    torch.testing.assert_close(torch.tensor(_losses(model, compiled)), torch.tensor(expected), rtol=loose, atol=loose)
    if "torchao" in base or "mxfp4" in base:
        return
    with pytest.raises(te_dynamo.errors.UnsupportedError, match=r"a quantized tensor is not written in place"):
        model.merge_and_unload()  # type: ignore[operator]
    for module in model.modules():
        if isinstance(module, nn.Linear) and isinstance(module.weight, te_dynamo.QuantizedTensor):
            module.weight = nn.Parameter(module.weight.dequantize(), requires_grad=False)
    merged = model.merge_and_unload()  # type: ignore[operator]
    form = base.split()[0]
    te_dynamo.save_checkpoint(merged, tmp_path / "merged", form, recipe=recipe, rules=[("lm_head", None)])
    again = te_dynamo.load_checkpoint(llama(), tmp_path / "merged")
    with torch.no_grad():
        wanted = merged(IDS).logits
        assert (again(IDS).logits - wanted).norm() <= (0.3 if recipe == "nvfp4" else 0.1) * wanted.norm()
