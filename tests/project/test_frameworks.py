"""docs/frameworks.md quotes what accelerate says to the backend's name, and its way around that compiles the model."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


class Backend(Enum):
    TE = "te"


def test_accelerate_refuses_the_name_as_the_page_says() -> None:
    utils = pytest.importorskip("accelerate.utils")
    with pytest.raises(ValueError) as raised:
        utils.TorchDynamoPlugin(backend="te")
    assert f"`ValueError: {raised.value}`" in (ROOT / "docs" / "frameworks.md").read_text()


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
    accelerate = pytest.importorskip("accelerate")
    model, x = Blocks().bfloat16(), torch.randn(32, 64, dtype=torch.bfloat16)
    in_bf16 = model(x)
    plugin = accelerate.utils.TorchDynamoPlugin(backend="inductor", use_regional_compilation=regional)
    plugin.backend, plugin.options = Backend.TE, {"codegen": "eager"}
    prepared = accelerate.Accelerator(dynamo_plugin=plugin, cpu=True).prepare(model)
    assert not torch.equal(prepared(x), in_bf16), "nothing is in FP8"
