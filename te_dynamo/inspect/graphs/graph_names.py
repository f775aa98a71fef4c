"""Names for the inputs of AOTAutograd's graphs, which calls them primals_3 and getitem_17.

    match      fc1.weight: bf16[128, 64] = input               the user's name
    forward    fc1.weight: bf16[128, 64] = input               torch: primals_2
               quantize_1: (f8e4m3[128, 64], f8e4m3[64, 128], f32[1]) = te.quantize(fc1.weight, e4m3[row+column])
    backward   quantize_1[1]: f8e4m3[64, 128] = input          torch: getitem_4

Only names, for people: where the graphs do not pair up one to one with equal shapes and dtypes (tensor subclasses that
were taken apart, inputs that share memory), torch's own stay.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from te_dynamo._compat import source_name
from te_dynamo.inspect.graphs.graph_text import NAME, input_name, output_names
from te_dynamo.user_code import OWNERS, clean_path

_FORWARD_OF = {"backward": "forward", "lower.backward": "lower.forward"}


def name_inputs(graph: fx.Graph, stage: str, earlier: Mapping[str, fx.Graph]) -> None:
    """Sets `meta[NAME]` of the placeholders of `graph`, which has reached `stage`, from the stages before it."""
    inputs = graph.find_nodes(op="placeholder")
    if stage == "match":
        for node in _tensors_only(inputs):
            node.meta[NAME] = _users_name(node)
        return
    if stage in _FORWARD_OF:
        inputs = [node for node in inputs if not node.name.startswith("tangents")]
        forward = earlier.get(_FORWARD_OF[stage])
        names = output_names(forward)[-len(inputs) :] if forward is not None and inputs else []
        # Sizes stand last among what forward returns, and first among what backward takes.
        inputs, names = _tensors_only(inputs), [(name, value) for name, value in names if _is_tensor(value)]
    else:
        inputs = [node for node in inputs if re.fullmatch(r"primals_\d+|arg\d+_1", node.name)]
        users = earlier["match"].find_nodes(op="placeholder") if "match" in earlier else []
        names = [(_users_name(node), node.meta.get("example_value")) for node in users]
    if len(inputs) != len(names) or any(
        _kind(node.meta.get("val")) != _kind(value) for node, (_, value) in zip(inputs, names, strict=True)
    ):
        return
    for node, (name, value) in zip(inputs, names, strict=True):
        if _is_tensor(value):
            node.meta[NAME] = name


def _users_name(node: fx.Node) -> str:
    """Of an input of Dynamo's graph: a parameter's or buffer's path in the whole model, as `explain` spells it, or the variable's name."""
    source = getattr(node, "_dynamo_source", None)
    spelt = "" if source is None else source_name(source)
    if "._parameters[" not in spelt and "._buffers[" not in spelt:
        return input_name(str(node.target))
    owner, _, leaf = clean_path(spelt).rpartition(".")
    owners = node.meta.get(OWNERS, ())
    path = next((whole for whole in owners if f".{whole}".endswith(f".{owner}") or not owner), owner)
    return f"{path}.{leaf}".removeprefix(".")


def _tensors_only(nodes: list[fx.Node]) -> list[fx.Node]:
    return [node for node in nodes if _is_tensor(node.meta.get("val", node.meta.get("example_value")))]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _kind(value: Any) -> Any:
    """What must be equal for two values to be taken for the same: sizes and dtype."""
    return (value.dtype, tuple(map(str, value.shape))) if isinstance(value, torch.Tensor) else type(value)
