"""What was explained, where and when: the line at the top of the page."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING

import torch
from torch.utils._pytree import tree_leaves

import te_dynamo
from te_dynamo.inspect.explanation_text import gpu_name

if TYPE_CHECKING:
    from te_dynamo.inspect.explain import Explanation


def head(explanation: Explanation) -> dict[str, str]:
    """{"model", "recipe", "device", "date", "versions"}"""
    return {
        "model": explanation.model or "a model",
        "recipe": explanation.recipes,
        "device": _device(explanation),
        "date": datetime.date.today().isoformat(),
        "versions": f"te_dynamo {te_dynamo.__version__}, torch {torch.__version__}",
    }


def _device(explanation: Explanation) -> str:
    if explanation.device:
        return f"as {gpu_name(explanation.device)} would run it"
    return torch.cuda.get_device_name() if _ran_on_gpu(explanation) else "CPU"


def _ran_on_gpu(explanation: Explanation) -> bool:
    graphs = explanation.graphs
    stage = graphs.stages[0] if graphs is not None and graphs.stages else None
    if graphs is None or stage is None:
        return False
    values = [node.meta.get("val", node.meta.get("example_value")) for node in graphs.graph(stage).nodes]
    return any(isinstance(value, torch.Tensor) and value.is_cuda for value in tree_leaves(values))
