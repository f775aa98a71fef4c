"""save_checkpoint: what came from a file goes back byte for byte; trained and frozen models go out with the codes that they multiply."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.weights.checkpoint_files import FILES, K, N, net, write
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import te_dynamo
from te_dynamo.errors import CheckpointError, InvalidOptionError
from te_dynamo.weights.checkpoint.files import Files

X = torch.randn(32, K, generator=torch.manual_seed(2)).bfloat16()


def tensors_of(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same_files(one: Path, other: Path) -> None:
    a, b = tensors_of(one), tensors_of(other)
    assert {name: (t.dtype, t.shape) for name, t in a.items()} == {name: (t.dtype, t.shape) for name, t in b.items()}
    assert [
        name
        for name in a
        if not torch.equal(a[name].reshape(-1).view(torch.uint8), b[name].reshape(-1).view(torch.uint8))
    ] == []
    for file in one.glob("*.json"):
        assert json.loads(file.read_text()) == json.loads((other / file.name).read_text())


@pytest.mark.parametrize("name", FILES)
def test_a_round_trip_is_byte_for_byte(name: str, tmp_path: Path) -> None:
    """In another dtype too, and of a copy."""
    write(tmp_path / "file", FILES[name])
    model = te_dynamo.load_checkpoint(net(), tmp_path / "file", dtype=torch.float32)
    te_dynamo.save_checkpoint(copy.deepcopy(model), tmp_path / "again")
    assert_same_files(tmp_path / "file", tmp_path / "again")


@pytest.mark.parametrize(
    ("name", "cache"),
    [("ct row", {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}), ("modelopt", {"kv_cache_quant_algo": "FP8"})],
)
def test_scales_of_a_cache_are_kept(name: str, cache: dict[str, Any], tmp_path: Path) -> None:
    """Of modules that the model has, where the configuration speaks of a cache."""
    file = FILES[name]
    tensors, config = file.tensors()[0], {**file.config, **cache}
    tensors |= {"mlp.k_scale": torch.tensor(0.5), "mlp.0.v_scale": torch.tensor([0.25])}
    with pytest.raises(CheckpointError, match=r"have no place in the model: 'mlp.0.v_scale', 'mlp.k_scale'"):
        te_dynamo.load_quantized(net(), tensors, file.config)
    with pytest.raises(CheckpointError, match=r"have no place in the model: 'attn.k_scale'"):
        te_dynamo.load_quantized(net(), {**tensors, "attn.k_scale": torch.tensor(1.0)}, config)
    model = te_dynamo.load_quantized(net(), tensors, config)
    te_dynamo.save_checkpoint(copy.deepcopy(model), tmp_path)
    again = Files(tmp_path)
    assert set(again) == set(tensors) and all(
        torch.equal(again[each], tensors[each]) for each in tensors if "_scale" in each
    )


@pytest.mark.parametrize("wrap", [checkpoint_wrapper, torch.compile])
def test_wrapped_parts_have_the_names_that_they_have_without(wrap: Any, tmp_path: Path) -> None:
    """In the file, in its configuration and for rules, so that the file has the codes that the compiled model multiplies."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), nn.Linear(64, 64))

    for name, part in ("plain", lambda m: m), ("wrapped", wrap):
        made = model()
        made[0] = part(made[0])
        te_dynamo.save_checkpoint(made, tmp_path / name, form="modelopt", rules=[(r"^0\.1$", None)])
    assert_same_files(tmp_path / "plain", tmp_path / "wrapped")
    again = model()
    again[0] = wrap(again[0])
    te_dynamo.save_checkpoint(te_dynamo.load_checkpoint(again, tmp_path / "plain"), tmp_path / "again")
    assert_same_files(tmp_path / "plain", tmp_path / "again")
    stored = {row.module: row.stored for row in te_dynamo.explain(again, torch.randn(16, 64)).linears}
    assert stored == {"0.0": "modelopt (tensor)", "0.1": "", "1": "modelopt (tensor)"}


def test_a_buffer_that_was_not_in_the_file(tmp_path: Path) -> None:
    write(tmp_path / "file", FILES["fp8"])
    model = net()
    model.register_buffer("steps", torch.zeros(1))
    te_dynamo.save_checkpoint(te_dynamo.load_checkpoint(model, tmp_path / "file"), tmp_path / "again")
    assert_same_files(tmp_path / "file", tmp_path / "again")


def test_shards(tmp_path: Path) -> None:
    write(tmp_path / "file", FILES["fp8"])
    model = te_dynamo.load_checkpoint(net(), tmp_path / "file")
    te_dynamo.save_checkpoint(model, tmp_path / "again", shard_bytes=100_000)
    assert sorted(file.name for file in (tmp_path / "again").iterdir()) == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    assert_same_files(tmp_path / "file", tmp_path / "again")
    te_dynamo.save_checkpoint(te_dynamo.load_checkpoint(net(), tmp_path / "again"), tmp_path / "third")
    assert_same_files(tmp_path / "file", tmp_path / "third")


WRITTEN = [
    ("fp8", "float8_block_scaling"),
    ("fp8", te_dynamo.recipe.Float8BlockScaling(power_of_two_scales=False)),
    *(
        ("compressed-tensors", name)
        for name in ("float8_current_scaling", "float8_rowwise", "float8_block_scaling", "mxfp8", "nvfp4")
    ),
    *(
        ("modelopt", name)
        for name in ("float8_current_scaling", "float8_rowwise", "float8_block_scaling", "mxfp8", "nvfp4")
    ),
]


def _name(case: object) -> str:
    return case if isinstance(case, str) else case.describe() if hasattr(case, "describe") else ""


@pytest.mark.one_fast_case
@pytest.mark.parametrize("how", ["trained", "frozen", "dropped"])
@pytest.mark.parametrize(("form", "recipe"), WRITTEN, ids=_name)
def test_a_model_goes_out_with_the_codes_of_its_forward(form: str, recipe: object, how: str, tmp_path: Path) -> None:
    """Loaded again, it computes the same bits."""
    model = net().requires_grad_(how == "trained")
    compiled = torch.compile(model, backend="te", options={"recipe": recipe, "codegen": "eager"})
    if how != "trained":
        te_dynamo.freeze(model, drop_weights=how == "dropped")
    with torch.no_grad():
        expected = compiled(X)
    te_dynamo.save_checkpoint(compiled, tmp_path / "a", form, recipe=recipe)
    loaded = te_dynamo.load_checkpoint(net(torch.float32), tmp_path / "a", dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(torch.compile(loaded, backend="te", options={"codegen": "eager"})(X), expected)
    te_dynamo.save_checkpoint(loaded, tmp_path / "b")
    assert_same_files(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize(("form", "recipe"), WRITTEN, ids=_name)
def test_what_forward_leaves_for_its_sizes_or_dtype_stays(form: str, recipe: object, tmp_path: Path) -> None:
    """A router's 8 columns, a score's one, what is padded to a multiple: nothing multiplies by such codes of a file."""
    sizes = ((64, 64), (64, 8), (8, 64), (64, 1), (64, 250))
    model = nn.Sequential(*(nn.Linear(*size) for size in sizes))
    model.add_module("fp64", nn.Linear(64, 64, dtype=torch.float64))
    te_dynamo.save_checkpoint(model, tmp_path / "a", form, recipe=recipe)
    loaded = te_dynamo.load_checkpoint(copy.deepcopy(model), tmp_path / "a")
    held = {
        path
        for path, module in loaded.named_modules()
        if isinstance(getattr(module, "weight", None), te_dynamo.QuantizedTensor)
    }
    assert held == {"0"}
    for path in ("1", "2", "3", "4", "fp64"):
        assert torch.equal(loaded.get_parameter(f"{path}.weight"), model.get_parameter(f"{path}.weight"))


@pytest.mark.parametrize(("form", "recipe"), WRITTEN, ids=_name)
def test_a_weight_of_zeros(form: str, recipe: object, tmp_path: Path) -> None:
    model = net()
    nn.init.zeros_(model.mlp[0].weight)
    te_dynamo.save_checkpoint(model, tmp_path / "a", form, recipe=recipe)
    loaded = te_dynamo.load_checkpoint(net(), tmp_path / "a")
    assert not loaded.mlp[0].weight.dequantize().any()
    te_dynamo.save_checkpoint(loaded, tmp_path / "b")
    assert_same_files(tmp_path / "a", tmp_path / "b")


def test_another_form_has_the_same_values(tmp_path: Path) -> None:
    for name, form in (("fp8", "compressed-tensors"), ("ct nvfp4", "modelopt"), ("modelopt row", "compressed-tensors")):
        tensors, meant = FILES[name].tensors()
        model = te_dynamo.load_quantized(net(), tensors, FILES[name].config)
        te_dynamo.save_checkpoint(model, tmp_path / name, form)
        again = te_dynamo.load_checkpoint(net(), tmp_path / name)
        for weight in meant:
            one, other = (each.get_parameter(weight).dequantize().float() for each in (model, again))
            torch.testing.assert_close(one, other, rtol=0 if "nvfp4" not in name else 2**-8, atol=0)


EXCHANGED = {
    "ct nvfp4": te_dynamo.NVFP4Quantizer(),
    "modelopt nvfp4": te_dynamo.NVFP4Quantizer(columnwise=False),
    "ct row": te_dynamo.Float8RowwiseQuantizer(columnwise=False),  # scales of bf16 in the file
    "modelopt row": te_dynamo.MXFP8Quantizer(columnwise=False),
    "modelopt": te_dynamo.Float8RowwiseQuantizer(columnwise=False),
    "ct mxfp4": te_dynamo.MXFP8Quantizer(columnwise=False),
    "fp8": te_dynamo.Float8BlockQuantizer(columnwise=False, block_dims=2),
}


@pytest.mark.parametrize("name", EXCHANGED)
def test_a_weight_that_was_exchanged(name: str, tmp_path: Path) -> None:
    """It is refused without a form, and goes out in its own format and scales with one."""
    tensors, _ = FILES[name].tensors()
    model = te_dynamo.load_quantized(net(), tensors, FILES[name].config)
    new = EXCHANGED[name].quantize(torch.randn(N, K).bfloat16() * 100)
    model.mlp[0].weight = nn.Parameter(new, requires_grad=False)
    with pytest.raises(
        CheckpointError, match=r"'mlp.0.weight' is quantized, and was exchanged or moved since: form= names one"
    ):
        te_dynamo.save_checkpoint(model, tmp_path / "a")
    assert not (tmp_path / "a").exists()
    form = FILES[name].config["quant_method"]
    te_dynamo.save_checkpoint(model, tmp_path / "b", form)
    again = te_dynamo.load_checkpoint(net(), tmp_path / "b").mlp[0].weight.dequantize()
    torch.testing.assert_close(again, new.dequantize(), rtol=2**-7 if "nvfp4" in name else 0, atol=0)


def test_weights_of_another_file_in_the_place_of_the_first(tmp_path: Path) -> None:
    for name in ("modelopt row", "modelopt nvfp4"):
        tensors, _ = FILES[name].tensors()
        one, other = (te_dynamo.load_quantized(net(), tensors, FILES[name].config) for _ in range(2))
        one.load_state_dict(other.state_dict(), assign=True)
        te_dynamo.save_checkpoint(one, tmp_path / name)
        assert_same_files(tmp_path / name, write(tmp_path / f"{name} file", FILES[name], tensors))
        tensors |= {key: t * 2 for key, t in tensors.items() if key.endswith("weight_scale_2")}
        if name == "modelopt nvfp4":
            other = te_dynamo.load_quantized(net(), tensors, FILES[name].config)
            one.load_state_dict(other.state_dict(), assign=True)
            with pytest.raises(CheckpointError, match=r"'mlp.0.weight' is quantized, and was exchanged or moved since"):
                te_dynamo.save_checkpoint(one, tmp_path / "other")


def _layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64, bias=False)) for _ in "ab"))


@pytest.mark.parametrize("change", ["exchanged", "copied", "wrapped"])
def test_layers_that_were_moved(change: str, tmp_path: Path) -> None:
    """Names are those of where a weight is now."""
    te_dynamo.save_checkpoint(_layers(), tmp_path / "a", "modelopt")
    one, other = te_dynamo.load_checkpoint(_layers(), tmp_path / "a")
    wanted = {
        "exchanged": lambda: nn.Sequential(other, one),
        "copied": lambda: nn.Sequential(one, copy.deepcopy(one)),
        "wrapped": lambda: nn.Sequential(nn.Sequential(one), other),
    }[change]()
    te_dynamo.save_checkpoint(wanted, tmp_path / "b", "modelopt")
    loaded = _layers() if change != "wrapped" else nn.Sequential(nn.Sequential(_layers()[0]), _layers()[1])
    te_dynamo.load_checkpoint(loaded, tmp_path / "b")
    for name, tensor in wanted.named_parameters():
        assert torch.equal(loaded.get_parameter(name).dequantize(), tensor.dequantize()), name
    model = te_dynamo.load_checkpoint(_layers(), tmp_path / "a")
    model[0], model[1] = model[1], model[0]
    with pytest.raises(CheckpointError, match=r"'0.1.weight' is quantized, and was exchanged or moved since"):
        te_dynamo.save_checkpoint(model, tmp_path / "c")


def test_two_tensors_of_one_name(tmp_path: Path) -> None:
    model = net()
    model.mlp[0].weight_scale = nn.Parameter(torch.ones(1))
    with pytest.raises(CheckpointError, match=r"'mlp.0.weight_scale' is of two tensors in this form"):
        te_dynamo.save_checkpoint(model, tmp_path / "a", "modelopt")
    te_dynamo.save_checkpoint(model, tmp_path / "a", "fp8")


class Wrapped(nn.Parameter):
    pass


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (Wrapped(torch.ones(2)), "'more' is a Wrapped of torch.float32, which no file has: gather or convert it first"),
        (torch.ones(2, dtype=torch.complex64), "'more' is a Tensor of torch.complex64, which no file has"),
        (torch.ones(2).to_sparse(), "'more' is a Tensor of torch.float32, which no file has"),
    ],
)
def test_tensors_that_no_file_has(tensor: Tensor, message: str, tmp_path: Path) -> None:
    """A DTensor is a class of its own: its values lie nowhere that the file could be written from."""
    model = net()
    model.register_parameter("more", tensor) if isinstance(tensor, Wrapped) else model.register_buffer("more", tensor)
    with pytest.raises(CheckpointError, match=message):
        te_dynamo.save_checkpoint(model, tmp_path / "a", "fp8")
    assert not (tmp_path / "a").exists()


def test_a_file_that_was_not_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it stays, and the next attempt has the folder."""
    from te_dynamo.weights.checkpoint import save

    def full(tensor: Tensor) -> Tensor:
        raise OSError("no space left")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space left"):
        patch.setattr(save, "values_of", full)
        te_dynamo.save_checkpoint(net(), tmp_path, "fp8", shard_bytes=1000)
    assert list(tmp_path.iterdir()) == []
    te_dynamo.save_checkpoint(net(), tmp_path, "fp8")
    te_dynamo.load_checkpoint(net(), tmp_path)


def test_rules_leave_linears_and_the_configuration_says_so(tmp_path: Path) -> None:
    for form, key in (("fp8", "modules_to_not_convert"), ("compressed-tensors", "ignore"), ("modelopt", "ignore")):
        te_dynamo.save_checkpoint(net(), tmp_path / form, form, rules=[("mlp.0", None)])
        config = json.loads((tmp_path / form / "config.json").read_text())["quantization_config"]
        assert config[key] == ["mlp.0"]
        loaded = te_dynamo.load_checkpoint(net(), tmp_path / form)
        assert [type(loaded.mlp[i].weight) is nn.Parameter for i in (0, 2)] == [True, False]


def test_two_recipes_are_two_groups(tmp_path: Path) -> None:
    for form in ("compressed-tensors", "modelopt"):
        te_dynamo.save_checkpoint(net(), tmp_path / form, form, recipe="float8_rowwise", rules=[("mlp.0", "mxfp8")])
        loaded = te_dynamo.load_checkpoint(net(), tmp_path / form)
        assert [type(loaded.mlp[i].weight.quantizer).__name__ for i in (0, 2)] == [
            "MXFP8Quantizer",
            "Float8RowwiseQuantizer",
        ]


def test_what_is_refused(tmp_path: Path) -> None:
    def refused(model: nn.Module, message: str, *args: object, **options: object) -> None:
        with pytest.raises(CheckpointError, match=message):
            te_dynamo.save_checkpoint(model, tmp_path / "new", *args, **options)  # type: ignore[arg-type]
        assert not (tmp_path / "new").exists()

    refused(net(), "the model came from no file: form= names the one to write")
    refused(net().to("meta"), "'norm.weight' is on meta and has no values", "fp8")
    for wrong in (0, "5GB"):
        with pytest.raises(InvalidOptionError, match="shard_bytes is a number of bytes, got "):
            te_dynamo.save_checkpoint(net(), tmp_path / "new", "fp8", shard_bytes=wrong)  # type: ignore[arg-type]
    refused(net(), "quant_method 'awq' is not known", "awq")
    refused(
        net(),
        r"mlp.0.weight is FP8 \(e4m3\) with a scale per tensor; 'fp8' is written with block: recipe='float8_block_scaling'",
        "fp8",
        recipe="float8_current_scaling",
    )
    refused(net(), "'torchao' is written with no format", "torchao")
    refused(net(), "no linear of the model has a recipe", "fp8", recipe=None)
    model = te_dynamo.load_checkpoint(net(), write(tmp_path / "file", FILES["fp8"]))
    model.more = nn.Parameter(torch.ones(1))
    refused(model, "'more' was not in the file: form= names one to write")
    del model.more
    refused(nn.Sequential(model), "'0.mlp.0.weight' is quantized, and was exchanged or moved since")
    model.mlp[0].weight = nn.Parameter(model.mlp[0].weight.dequantize())
    refused(model, "'mlp.0.weight' was quantized in the file, and is not any more")
    with pytest.raises(CheckpointError, match="has a checkpoint already"):
        te_dynamo.save_checkpoint(model, tmp_path / "file", "fp8")
