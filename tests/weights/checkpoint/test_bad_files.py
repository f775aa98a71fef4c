"""Files that are wrong, or do not fit: an error that names the tensor, before anything of the model is changed."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.weights.checkpoint_files import FILES, K, N, net, write
from torch import Tensor, nn

import te_dynamo
from te_dynamo.errors import CheckpointError

Tensors = dict[str, Tensor]


def without(name: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(name)


def having(**more: Any) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name.replace("__", "."): value for name, value in more.items()})


def first_is(name: str, value: float) -> Callable[[Tensors], Any]:
    def change(tensors: Tensors) -> None:
        tensors[name].view(-1)[0] = value

    return change


CASES: dict[str, tuple[str, Callable[[Tensors], Any], str]] = {
    "no scale": ("fp8", without("mlp.0.weight_scale_inv"), "'mlp.0.weight' is codes without a scale: 'mlp.0.weight_scale_inv' or"),
    "no packed scale": ("ct nvfp4", without("mlp.0.weight_scale"), "'mlp.0.weight_packed' is codes without a scale"),
    "no scale of the tensor": ("ct nvfp4", without("mlp.2.weight_global_scale"), "'mlp.2.weight_packed' has no tensor scale, which nvfp4 needs"),
    "a scale too much": ("fp8", having(mlp__0__k_scale=torch.ones(1)), "in the file and have no place in the model: 'mlp.0.k_scale'"),
    "a scale of nothing": ("ct row", without("mlp.0.weight"), "in the model and not in the file: 'mlp.0.weight'"),
    "a norm is missing": ("fp8", without("norm.bias"), "in the model and not in the file: 'norm.bias'"),
    "zero": ("fp8", first_is("mlp.2.weight_scale_inv", 0), "'mlp.2.weight_scale_inv': 1 of its 6 scales are zero, negative or no numbers"),
    "nan": ("ct row", first_is("mlp.0.weight_scale", float("nan")), f"'mlp.0.weight_scale': 1 of its {N} scales"),
    "nan of 8 bits": ("ct mxfp8", first_is("mlp.0.weight_scale", 255), "'mlp.0.weight_scale': 1 of its"),
    "a static scale of zero": ("modelopt", first_is("mlp.0.input_scale", 0), "'mlp.0.input_scale': 1 of its 1 scales are zero"),
    "static scales of channels": ("modelopt", having(mlp__2__input_scale=torch.ones(3)), r"'mlp.2.input_scale' is torch.float32 \[3\]; a static scale of activations is one number"),
    "an empty static scale": ("modelopt", having(mlp__2__input_scale=torch.ones(0)), r"'mlp.2.input_scale' is torch.float32 \[0\]; a static"),
    "a static scale of bytes": ("modelopt", having(mlp__2__input_scale=torch.ones(1, dtype=torch.uint8)), r"'mlp.2.input_scale' is torch.uint8 \[1\]; a static"),
    "a scale of the tensor that is no number": ("modelopt nvfp4", having(mlp__0__weight_scale_2=torch.tensor(float("inf"))), "'mlp.0.weight_scale_2': 1 of its 1"),
    "blocks": ("fp8", having(mlp__0__weight_scale_inv=torch.ones(2, 2)), r"'mlp.0.weight_scale_inv' is \[2, 2\], and block of a weight \[384, 256\] has \[3, 2\]"),
    "two scales": ("modelopt", having(mlp__0__weight_scale=torch.ones(2)), r"'mlp.0.weight_scale' is \[2\], .* fused of several has to have one scale"),
    "other sizes": ("ct row", having(mlp__0__weight=torch.ones(N, 128).to(torch.float8_e4m3fn)), r"'mlp.0.weight' has codes \[384, 128\], and the model's \[384, 256\]"),
    "half-converted": ("ct row", lambda tensors: (tensors.pop("mlp.0.weight_scale"), tensors.update({"mlp.0.weight": torch.ones(N, K)})), r"'mlp.0.weight' is torch.float32 in the file, whose configuration says that it is quantized \(row\)"),
    "a bias of another size": ("fp8", having(mlp__0__bias=torch.ones(4)), r"'mlp.0.bias' is \[4\] in the file and \[384\] in the model"),
    "a bias of codes": ("fp8", having(mlp__0__bias=torch.ones(N).to(torch.float8_e4m3fn)), "'mlp.0.bias' is torch.float8_e4m3fn in the file: codes are read of two dimensions or more"),
    "a scale of another dtype": ("ct mxfp8", having(mlp__0__weight_scale=torch.ones(N, K // 32)), "'mlp.0.weight_scale' is torch.float32; mxfp8 has torch.uint8 there"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_tensors(case: str) -> None:
    name, change, message = CASES[case]
    tensors, _ = FILES[name].tensors()
    change(tensors)
    _refused(tensors, FILES[name].config, message)


def _refused(tensors: Tensors, config: dict[str, Any], message: str, model: nn.Module | None = None) -> None:
    model = net() if model is None else model
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with pytest.raises(CheckpointError, match=message):
        te_dynamo.load_quantized(model, tensors, config)
    for name, parameter in model.named_parameters():
        assert type(parameter) is nn.Parameter and torch.equal(parameter, before[name])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("fp8", {"quant_method": "gptq"}, "quant_method 'gptq' is not known; known are 'fp8', 'compressed-tensors', 'modelopt'"),
        ("fp8", {"weight_block_size": [64, 64]}, r"weight_block_size \(64, 64\) is not known; known are"),
        ("fp8", {"modules_to_not_convert": ["mlp.0"]}, "'mlp.0.weight_scale_inv' is in the file, whose configuration says"),
        ("modelopt", {"quant_algo": "INT4_AWQ"}, "quant_algo 'INT4_AWQ' is not known; known are 'FP8'"),
        ("modelopt", {"exclude_modules": ["*.0"]}, "'mlp.0.weight_scale' is in the file, whose configuration says"),
        ("modelopt", {"quant_algo": "MIXED_PRECISION"}, "'mlp.0.weight_scale' is in the file, whose configuration says"),
        ("modelopt", {"quant_method": ""}, None),
        ("ct row", {"config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"}}}}, r"\(4, 'int', None, None\) is not known"),
    ],
)  # fmt: skip
def test_configurations(name: str, change: dict[str, Any], message: str | None) -> None:
    tensors, _ = FILES[name].tensors()
    config = {**FILES[name].config, **change}
    if message is None:  # told by its algorithm
        te_dynamo.load_quantized(net(), tensors, config)
    else:
        _refused(tensors, config, message)


def test_no_configuration() -> None:
    _refused(FILES["fp8"].tensors()[0], {}, "'mlp.0.weight' is codes without a scale: a quantization_config that says")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(N, K, dtype=torch.bfloat16)
        self.head = nn.Linear(K, N, bias=False)
        self.head.weight = self.embedding.weight


def test_tied_weights() -> None:
    file = FILES["fp8"]
    quantized = {f"head.{name}": tensor for name, tensor in file.make(N, K)[0].items()}
    plain = torch.randn(N, K).bfloat16()
    config = {**file.config, "modules_to_not_convert": []}
    _refused(
        quantized,
        config,
        "'embedding.weight' and 'head.weight' are one tensor, which is quantized in the file: untie",
        Tied(),
    )
    _refused(
        {**quantized, "embedding.weight": plain}, config, "are one tensor in the model and two in the file", Tied()
    )
    _refused(
        {"head.weight": plain, "embedding.weight": plain + 1},
        config,
        "one tensor in the model and two in the file",
        Tied(),
    )
    model = te_dynamo.load_quantized(Tied(), {"embedding.weight": plain, "head.weight": plain}, config)
    assert model.head.weight is model.embedding.weight and torch.equal(model.head.weight, plain)


def test_shards_that_cut_a_block() -> None:
    """Half of 384 rows are one block of 128 and a half."""
    tensors = {
        name.removeprefix("mlp.0."): tensor
        for name, tensor in FILES["fp8"].tensors()[0].items()
        if "mlp.0.weight" in name
    }
    message = r"'weight' has codes \[384, 256\], and the model's \[192, 256\] .* a shard of one has to end at a border of its blocks of 128"
    _refused(tensors, FILES["fp8"].config, message, nn.Linear(K, N // 2, bias=False))


def test_sizes_that_are_no_blocks() -> None:
    tensors = {"weight": torch.ones(4, 250).to(torch.float8_e4m3fn), "weight_scale": torch.full((4, 8), 120).byte()}
    _refused(
        tensors, FILES["ct mxfp8"].config, "'weight': rows of 250 values are no blocks of 32", nn.Linear(250, 4, False)
    )
    experts = nn.Module()
    experts.down_proj = nn.Parameter(torch.zeros(2, 192, 128))
    tensors = {"down_proj": torch.ones(2, 192, 128).to(torch.float8_e4m3fn), "down_proj_scale_inv": torch.ones(2, 2, 1)}
    _refused(tensors, FILES["fp8"].config, "'down_proj': experts of 192 rows would share blocks of 128", experts)


def test_files(tmp_path: Path) -> None:
    folder = write(tmp_path, FILES["fp8"])
    file = folder / "model.safetensors"
    whole = file.read_bytes()

    def refused(message: str) -> None:
        model = net()
        before = model.mlp[0].weight
        with pytest.raises(CheckpointError, match=message):
            te_dynamo.load_checkpoint(model, folder)
        assert model.mlp[0].weight is before and type(before) is nn.Parameter

    file.write_bytes(whole[:-5])
    refused(rf"' has \d+ bytes, to byte {len(whole)} of model.safetensors, which is cut short at {len(whole) - 5}")
    file.write_bytes(whole[:20])
    refused("cut short, or no file of safetensors")
    file.write_bytes(whole.replace(b'"F8_E4M3"', b'"F6_E2M3"', 1))
    refused("'mlp.0.weight' of model.safetensors has the dtype F6_E2M3; known are BOOL, U8,")
    file.write_bytes(whole.replace(b'"dtype":', b'"dtype"!', 1))
    refused("model.safetensors: its header is no JSON: ")
    file.write_bytes(whole)
    config = (folder / "config.json").read_bytes()
    (folder / "config.json").write_bytes(config[:-5])
    refused("config.json is cut short, or no JSON: ")
    (folder / "config.json").write_bytes(config)
    index = folder / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"weight_map": {"norm.bias": "model.safetensors", "mlp.4.weight": "model.safetensors"}})
    )
    refused("'mlp.4.weight' is not in model.safetensors, where model.safetensors.index.json has it")
    index.write_text(index.read_text()[:-5])
    refused("model.safetensors.index.json is cut short, or no JSON: ")
    index.write_text(json.dumps({"weight_map": {"norm.bias": "model-2.safetensors"}}))
    refused("names model-2.safetensors, which is not there")
    index.unlink()
    (folder / "more.safetensors").write_bytes(whole)
    refused("is in model.safetensors and in more.safetensors")
    file.unlink()
    (folder / "more.safetensors").unlink()
    refused("no file of safetensors is there")


def changes(tree: Any) -> Iterator[Any]:
    """JSON with one part in another's place, each once."""
    yield from ([], {}, "x", 3, None)
    for key in tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        whole = dict(tree) if isinstance(tree, dict) else list(tree)
        for part in changes(tree[key]):
            whole[key] = part
            yield copy.deepcopy(whole)


@pytest.mark.parametrize("name", ["fp8", "ct row", "modelopt"])
def test_json_of_another_form(name: str, tmp_path: Path) -> None:
    """Whatever stands where, it is refused with the model as it was, or means the same values."""
    folder = write(tmp_path, FILES[name])
    file, config, index = (
        folder / each for each in ("model.safetensors", "config.json", "model.safetensors.index.json")
    )
    raw, said = file.read_bytes(), config.read_text()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    wanted = te_dynamo.load_checkpoint(net(), folder).state_dict()

    def load() -> None:
        model = net()
        before = dict(model.named_parameters())
        try:
            te_dynamo.load_checkpoint(model, folder)
        except CheckpointError:
            assert all(before[path] is parameter for path, parameter in model.named_parameters())
            assert all(type(parameter) is nn.Parameter for parameter in before.values())
        else:
            assert all(torch.equal(t.float(), wanted[path].float()) for path, t in model.state_dict().items())

    for changed in changes(json.loads(said)):
        config.write_text(json.dumps(changed))
        load()
    config.write_text(said)
    for changed in changes({key: header[key] for key in ("mlp.0.weight", "norm.bias")}):
        text = json.dumps({**header, **changed} if isinstance(changed, dict) else changed).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
        load()
    file.write_bytes(raw)
    for changed in changes({"weight_map": {key: file.name for key in ("mlp.0.weight", "norm.bias")}}):
        index.write_text(json.dumps(changed))
        load()


def test_a_sharded_model() -> None:
    class Shard(nn.Parameter):
        pass

    model = net()
    model.mlp[0].weight = Shard(model.mlp[0].weight.data)
    with pytest.raises(
        CheckpointError, match=r"'mlp.0.weight' is a Shard: load the file before the model is wrapped or sharded"
    ):
        te_dynamo.load_quantized(model, FILES["fp8"].tensors()[0], FILES["fp8"].config)


def test_a_state_dict_with_what_is_no_tensor() -> None:
    """As Transformer Engine's, whose modules have an `_extra_state`."""
    with pytest.raises(CheckpointError, match=r"'mlp.0._extra_state' is a bytes, no tensor: leave it out"):
        te_dynamo.load_quantized(net(), {**FILES["fp8"].tensors()[0], "mlp.0._extra_state": b""}, FILES["fp8"].config)  # type: ignore[dict-item]
