"""from_pretrained of transformers gives a model whose weights are those of load_checkpoint: a tiny Llama, and experts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.weights.checkpoint_files import blocks, gpt_oss
from torch import Tensor, nn

import te_dynamo
from te_dynamo.errors import CheckpointError
from te_dynamo.weights.checkpoint.files import Files
from te_dynamo.weights.checkpoint.record import stored_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
transformers = pytest.importorskip("transformers")

IDS = torch.arange(64)[None] * 5 % 64
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
FORMS = [
    *(("modelopt", name) for name in te_dynamo.recipe.names()),
    ("fp8", "float8_block_scaling"),
    *(("compressed-tensors", name) for name in te_dynamo.recipe.names()),
]


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    from transformers.quantizers import auto

    tables = auto.AUTO_QUANTIZATION_CONFIG_MAPPING, auto.AUTO_QUANTIZER_MAPPING
    before = [dict(table) for table in tables]
    te_dynamo.register_in_transformers("modelopt", "fp8", "compressed-tensors")
    yield
    for table, content in zip(tables, before, strict=True):
        table.clear()
        table.update(content)


def llama(**more: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_hidden_layers=1, vocab_size=64, **more)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def same_bytes(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize(("form", "recipe"), FORMS)
def test_weights_are_the_files(form: str, recipe: str, tmp_path: Path) -> None:
    """Bytes and logits as of load_checkpoint, every linear in the recipe; saved again, byte for byte."""
    te_dynamo.save_checkpoint(llama(), tmp_path / "a", form, recipe=recipe, rules=[("lm_head", None)])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    ours = te_dynamo.load_checkpoint(llama(), tmp_path / "a")
    for (name, held), wanted in zip(
        theirs.named_parameters(), map(ours.get_parameter, dict(theirs.named_parameters())), strict=True
    ):
        assert held.dtype == wanted.dtype == torch.bfloat16, name
        assert isinstance(held, te_dynamo.QuantizedTensor) == isinstance(wanted, te_dynamo.QuantizedTensor), name
        pairs = (
            zip(held.buffers(), wanted.buffers(), strict=True)
            if isinstance(held, te_dynamo.QuantizedTensor)
            else [(held, wanted)]
        )
        assert all(same_bytes(a, b) for a, b in pairs), name
    with torch.no_grad():
        assert te_dynamo.explain(theirs, IDS, rules=[("lm_head", None)]).coverage > 0.9
        assert torch.equal(theirs(IDS).logits, ours(IDS).logits)
    te_dynamo.save_checkpoint(theirs, tmp_path / "b")
    a, b = Files(tmp_path / "a"), Files(tmp_path / "b")
    assert set(a) == set(b) and all(same_bytes(a[name], b[name]) for name in a)


def test_which_tokens_end_a_text(tmp_path: Path) -> None:
    model = llama()
    model.generation_config.eos_token_id = [7, 9]
    te_dynamo.save_checkpoint(model, tmp_path, "compressed-tensors")
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path).generation_config.eos_token_id == [7, 9]


def test_a_headless_model(tmp_path: Path) -> None:
    """The names have another prefix, and the head no place."""
    te_dynamo.save_checkpoint(llama(), tmp_path, "modelopt", rules=[("lm_head", None)])
    model = transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.float16)
    held = model.layers[0].mlp.up_proj.weight
    assert isinstance(held, te_dynamo.QuantizedTensor) and held.dtype == torch.float16


def test_experts_that_transformers_merges(tmp_path: Path) -> None:
    """An fp8 file has a matrix an expert, the model one tensor of gate and up of all: their scales are merged as the codes are."""
    from safetensors.torch import save_file

    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 32}
    config = transformers.Qwen3MoeConfig(**SIZES, **sizes, num_hidden_layers=1, vocab_size=64)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if "experts" not in name}
    meant: dict[str, list[Tensor]] = {"gate_proj": [], "up_proj": [], "down_proj": []}
    for expert in range(4):
        for name, values in meant.items():
            made, value = blocks("weight_scale_inv")(128, 128)
            values.append(value)
            tensors |= {f"model.layers.0.mlp.experts.{expert}.{name}.{part}": each for part, each in made.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    linears = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    left = [*linears, "model.layers.0.mlp.gate"]
    config.quantization_config = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": left,
    }
    config.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    experts = loaded.model.layers[0].mlp.experts
    assert stored_of(experts, "gate_up_proj").describe() == "fp8 (block)"
    gate_up = torch.cat([torch.stack(meant["gate_proj"]), torch.stack(meant["up_proj"])], 1)
    assert torch.equal(experts.gate_up_proj.dequantize(), gate_up.bfloat16())
    assert torch.equal(experts.down_proj.dequantize(), torch.stack(meant["down_proj"]).bfloat16())
    scalars = {name: torch.ones(()) if name.endswith("_scale_inv") else tensor for name, tensor in tensors.items()}
    save_file(scalars, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config.quantization_config["weight_block_size"] = None
    config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"transformers makes one tensor of it .*which would need one scale"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_gpt_oss(tmp_path: Path) -> None:
    """The experts of a gpt-oss file are what transformers dequantizes them to, and are multiplied as they are; what is before them learns."""
    from safetensors.torch import save_file

    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "intermediate_size": 96}
    config = transformers.GptOssConfig(**{**SIZES, **sizes}, num_hidden_layers=1, vocab_size=64)
    tensors = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).state_dict()
    experts = "model.layers.0.mlp.experts"
    for name, n, k in (("gate_up_proj", 192, 128), ("down_proj", 128, 96)):
        del tensors[f"{experts}.{name}"]
        tensors |= {f"{experts}.{part}": tensor for part, tensor in gpt_oss(4, n, k, name)[0].items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    config.save_pretrained(tmp_path)

    def loaded(**more: Any) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, **more).eval()

    theirs = loaded(experts_implementation="grouped_mm")
    te_dynamo.register_in_transformers("mxfp4")
    ours = loaded(experts_implementation="grouped_mm")
    for name in ("gate_up_proj", "down_proj"):
        held = ours.get_submodule(experts)._parameters[name]
        assert isinstance(held, te_dynamo.QuantizedTensor)
        assert torch.equal(held.dequantize(), theirs.get_submodule(experts)._parameters[name])
    with torch.no_grad():
        explained = te_dynamo.explain(ours, IDS)
        rows = [row for row in explained.linears if row.groups]
        assert [(row.matched, row.recipe, row.stored) for row in rows] == [(True, "mxfp8", "mxfp4 (mxfp4)")] * 2
        rules = [("experts", "mxfp8"), ("", None)]  # a router in FP8 would choose other experts
        y = torch.compile(ours, backend="te", options={"codegen": "eager", "rules": rules})(IDS).logits
        expected = theirs(IDS).logits
        assert torch.equal(ours(IDS).logits, expected)
    assert (y - expected).norm() <= 0.06 * expected.norm()
    peft, gradients = pytest.importorskip("peft"), []
    for model in (theirs, ours):
        torch.manual_seed(5)
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["v_proj"]))
        run = torch.compile(adapted, backend="te", options={"codegen": "eager", "rules": rules})
        with te_dynamo.capture() as graphs:
            (adapted if model is theirs else run)(input_ids=IDS, labels=IDS).loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in adapted.parameters() if p.grad is not None]))
    rows = [match for report in graphs.reports for match in report.matches if match.groups]
    assert [(row.matched, row.recipe) for row in rows] == [(True, "mxfp8(backward='high_precision')")] * 2
    assert 0 < (gradients[1] - gradients[0]).norm() <= 0.2 * gradients[0].norm()


def test_bad_files(tmp_path: Path) -> None:
    """Found before anything is loaded."""
    from safetensors.torch import load_file, save_file

    te_dynamo.save_checkpoint(llama(), tmp_path, "modelopt", rules=[("lm_head", None)])
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight_scale"

    def refused(tensors: dict[str, Tensor], message: str) -> None:
        save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=message):
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path)

    refused(
        {key: value for key, value in tensors.items() if key != name},
        "'model.layers.0.mlp.up_proj.weight' is codes without a scale",
    )
    refused({**tensors, name: torch.zeros(())}, f"'{name}': 1 of its 1 scales are zero")
    refused({**tensors, f"{name}_2": torch.ones(())}, f"have no place in the model: '{name}_2'")
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match="cut short"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_tensor_parallel_plan_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers fills this rank's shards, which may end within a block: its part is played by DTensors put in a weight's place."""
    from torch.distributed.tensor import DTensor, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from te_dynamo.weights.checkpoint.from_pretrained import StoredQuantizer

    te_dynamo.save_checkpoint(llama(), tmp_path, "fp8", recipe="float8_block_scaling", rules=[("lm_head", None)])
    finish = StoredQuantizer._process_model_after_weight_loading

    def shard_and_finish(self: Any, model: Any, **kwargs: Any) -> Any:
        module = model.get_submodule("model.layers.0.mlp.up_proj")
        for name, part in module.named_parameters():
            shard = DTensor.from_local(part.detach(), init_device_mesh("cpu", (2,)))
            setattr(module, name, nn.Parameter(shard, requires_grad=False))
        return finish(self, model, **kwargs)

    monkeypatch.setattr(StoredQuantizer, "_process_model_after_weight_loading", shard_and_finish)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        message = r"'model\.layers\.0\.mlp\.up_proj\.weight' was sharded by transformers: load a quantized file without a tp_plan"
        with pytest.raises(CheckpointError, match=message):
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    finally:
        torch.distributed.destroy_process_group()


def test_names_that_transformers_owns_are_taken_when_asked_for() -> None:
    for method, message in (("gptq", "is not known"), ("torchao", "transformers loads such models itself")):
        with pytest.raises(CheckpointError, match=message):
            te_dynamo.register_in_transformers(method)
    code = (
        "import te_dynamo, transformers.quantizers.auto as auto\n"
        "before = dict(auto.AUTO_QUANTIZER_MAPPING)\n"
        "te_dynamo.register_in_transformers()\n"
        "te_dynamo.register_in_transformers()\n"
        "new = auto.AUTO_QUANTIZER_MAPPING\n"
        "assert new.pop('modelopt') and new == before"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
