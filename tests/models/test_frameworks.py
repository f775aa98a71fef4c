"""Trainer and Accelerate with a model that te compiled, and what they say to the backend's name."""

from __future__ import annotations

import enum
import pathlib
from typing import Any

import pytest
import torch
from torch import nn

import te_dynamo

pytestmark = pytest.mark.slow
accelerate, transformers = pytest.importorskip("accelerate"), pytest.importorskip("transformers")
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "frameworks.md"
TOKENS = torch.randint(64, (4, 16))
DATA = [{"input_ids": row, "labels": row} for row in TOKENS]


@pytest.fixture(autouse=True)
def no_state_of_another_test() -> None:
    """A process's first Accelerator decides for the later ones."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def small_llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
    )
    return transformers.LlamaForCausalLM(config).bfloat16()


def arguments(folder: pathlib.Path, **more: Any) -> Any:
    return transformers.TrainingArguments(str(folder), max_steps=2, report_to="none", save_strategy="no", **more)


def with_trainer(model: nn.Module, folder: pathlib.Path) -> None:
    transformers.Trainer(model, arguments(folder), train_dataset=DATA).train()


def with_accelerate(model: nn.Module, folder: pathlib.Path) -> None:
    accelerator = accelerate.Accelerator()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    ids = TOKENS.to(accelerator.device)
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()


@pytest.mark.parametrize("train", [with_trainer, with_accelerate])
def test_a_compiled_model_trains_in_the_recipe(train: Any, tmp_path: pathlib.Path) -> None:
    model = small_llama()
    model.compile(backend="te", options={"codegen": "eager"})
    with te_dynamo.capture() as captured:
        train(model, tmp_path)
    for stage in ("forward", "backward"):
        assert "te.gemm" in captured[stage]


@pytest.mark.parametrize("how", ["Trainer", "Accelerator", "plugin"])
def test_the_backends_name_is_refused_as_the_page_says(how: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="not a valid DynamoBackend") as refused:
        if how == "Trainer":
            transformers.Trainer(small_llama(), arguments(tmp_path, torch_compile_backend="te"), train_dataset=DATA)
        elif how == "Accelerator":
            accelerate.Accelerator(dynamo_backend="te")
        else:
            accelerate.utils.TorchDynamoPlugin(backend="te")
    assert f"ValueError: {refused.value}" in PAGE.read_text()


class Backend(enum.Enum):
    TE = "te"


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.parametrize("regional", [False, True])
def test_a_plugin_with_another_backend_compiles_the_model(regional: bool) -> None:
    model, x = Blocks().bfloat16(), torch.randn(32, 64, dtype=torch.bfloat16)
    in_bf16 = model(x)
    plugin = accelerate.utils.TorchDynamoPlugin(backend="inductor", use_regional_compilation=regional)
    plugin.backend, plugin.options = Backend.TE, {"codegen": "eager"}
    prepared = accelerate.Accelerator(dynamo_plugin=plugin).prepare(model)
    assert not torch.equal(prepared(x), in_bf16), "nothing is in FP8"
