"""The model that libraries write files of."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

IDS = torch.arange(64)[None] * 5 % 64


def llama() -> Any:
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=64)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {path: each for path, each in model.named_modules() if isinstance(each, nn.Linear) and path != "lm_head"}
