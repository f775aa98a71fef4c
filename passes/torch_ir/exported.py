"""A graph of torch.export in the form in which Dynamo gives a backend one, and back with weights as codes: for te_dynamo.export.

torch.export   w = get_attr[0.weight];  x = placeholder;  y = aten.linear(x, w)
Dynamo's form  w = placeholder;  x = placeholder;  y = aten.linear(x, w)            meta: example_value, the module's path, the source
back           data = get_attr[quantized_0_data];  x = placeholder;  y = te.linear_with_workspace(x, None, None, config, [data, ..])[0]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx, nn

from te_dynamo.passes.torch_ir.match.values import quantized_of
from te_dynamo.passes.torch_ir.match.where import SOURCE

_ATTRIBUTE = "te_dynamo_attribute"
"""In the meta of a placeholder: the attribute of the module that it stands for."""


def in_dynamos_form(gm: fx.GraphModule, values: Mapping[str, Any]) -> list[Any]:
    """Rewrites in place what `ExportedProgram.module()` gave; returns a value for each placeholder.

    values: the model's parameters and buffers by name. Those that the graph reads become its first placeholders.
    """
    for body in gm.modules():
        for node in body.graph.nodes if isinstance(body, fx.GraphModule) else ():
            node.meta["example_value"] = node.meta.get("val")
    for node in gm.graph.find_nodes(op="call_module", target="_guards_fn"):
        gm.graph.erase_node(node)  # the next export writes them again
    of_user = gm.graph.find_nodes(op="placeholder")
    read = [
        node for node in gm.graph.find_nodes(op="get_attr") if node.target in values
    ]  # others are bodies and constants
    for node in reversed(read):
        kind = "parameters" if isinstance(values[node.target], nn.Parameter) else "buffers"
        with gm.graph.inserting_before(None):
            placeholder = gm.graph.placeholder(f"_{kind}_{node.name}")  # Dynamo's name says what a value is made of
        placeholder.meta = node.meta | {_ATTRIBUTE: node.target, SOURCE: SimpleNamespace(name=node.target)}
        node.replace_all_uses_with(placeholder)
        gm.graph.erase_node(node)
    return [*(values[node.target] for node in read), *(node.meta["val"] for node in of_user)]


def in_exports_form(gm: fx.GraphModule, stored: Mapping[str, Any], buffers: Sequence[torch.Tensor]) -> None:
    """The graph reads attributes again, and takes the user's inputs alone; what it does not read is no part of `gm` any more.

    stored:  the model's parameters by name: of a QuantizedTensor the graph reads its codes and scales.
    buffers: the values of the last placeholders.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    for node, buffer in zip(placeholders[len(placeholders) - len(buffers) :], buffers, strict=True):
        # What is called a workspace, Inductor takes for memory of its own.
        _become_attribute(gm, node, node.name.replace("workspace", "quantized"), buffer)
    for node in placeholders[: len(placeholders) - len(buffers)]:
        name = node.meta.get(_ATTRIBUTE)
        if name is None:
            continue
        if quantized_of(node) is not None:
            _read_parts(gm, node, stored[name])
        _become_attribute(gm, node, name)
    read = {node.target for each in gm.modules() if isinstance(each, fx.GraphModule) for node in each.graph.nodes}
    for holder, name, path in [
        (m, n, f"{p}.{n}".removeprefix(".")) for p, m in gm.named_modules() for n in _tensors(m)
    ]:
        if path not in read:
            delattr(holder, name)
    gm.graph.lint()
    gm.recompile()


def _become_attribute(gm: fx.GraphModule, node: fx.Node, name: str, value: torch.Tensor | None = None) -> None:
    if value is not None:
        gm.register_buffer(name, value)
    if node.users:
        with gm.graph.inserting_after(node):
            attribute = gm.graph.get_attr(name)
        node.replace_all_uses_with(attribute)
    gm.graph.erase_node(node)


def _read_parts(gm: fx.GraphModule, weight: fx.Node, stored: Any) -> None:
    """Reads of a QuantizedTensor's buffers read attributes; a linear that is given them does not take the tensor itself."""
    for user in list(weight.users):
        if user.target is getattr:
            _become_attribute(gm, user, f"{weight.name}{user.args[1]}", getattr(stored, user.args[1]).detach())
        elif user.target is torch.ops.te.linear_with_workspace.default:
            user.update_arg(1, None)


def _tensors(module: nn.Module) -> list[str]:
    return [name for name, _ in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]]
