"""Quantizations keep only what is read: a rowwise or columnwise copy that nobody reads is not made.

Needed where part of a forward is recomputed in backward (checkpointing), or where a fusion left a copy without readers.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from te_dynamo.dialect.gated import gated_backward_quantize_halves
from te_dynamo.dialect.norm import add_layer_norm_quantize, add_rms_norm_quantize
from te_dynamo.dialect.producers import ACTIVATIONS, NORMS
from te_dynamo.dialect.quantize import quantize, quantize_bias_grad, quantize_with_amax
from te_dynamo.dialect.stacked import quantize_stacked
from te_dynamo.errors import QuantizationError
from te_dynamo.passes.dialect.graph import call_like, calls, getitem_after, item_users, replace_items
from te_dynamo.quantized.quantizers import Quantizer

_ONE_RESULT_QUANTIZED = (
    quantize,
    quantize_with_amax,
    quantize_stacked,
    quantize_bias_grad,
    *NORMS.values(),
    add_rms_norm_quantize,
    add_layer_norm_quantize,
    *ACTIVATIONS.values(),
    gated_backward_quantize_halves,
)
"""Operations whose last results are the buffers of their one quantizer."""


def drop_unread_usages(graph: Graph) -> int:
    """Narrows in place; returns how many operations make less than before."""
    narrowed = 0
    for node in calls(graph, *_ONE_RESULT_QUANTIZED):
        position, quantizer = quantizer_of(node)
        names = quantizer.buffer_names()
        before = len(node.meta["val"]) - len(names)
        narrower = narrowest(quantizer, {names[i - before] for i in item_users(node) if i >= before})
        if narrower == quantizer:
            continue
        args = (*node.args[:position], narrower, *node.args[position + 1 :])
        replacement = call_like(graph, node.target, args, node)
        kept = narrower.buffer_names()
        index_map = {i: i for i in range(before)}
        index_map |= {before + i: before + kept.index(name) for i, name in enumerate(names) if name in kept}
        replace_items(node, replacement, index_map)
        graph.erase_node(node)
        narrowed += 1
    return narrowed


def quantize_again(node: Node, read_by: set[Node]) -> Node:
    """Has `read_by` read the results of a quantization of their own, which makes what they read; it stands right before the first of them.

    The same bits. Returns it.
    """
    position, quantizer = quantizer_of(node)
    names = quantizer.buffer_names()
    before = len(node.meta["val"]) - len(names)
    items = {
        i: items
        for i, items in item_users(node).items()
        if any(user in read_by for item in items for user in item.users)
    }
    narrower = narrowest(quantizer, {names[i - before] for i in items})
    target = quantize if node.target is quantize_bias_grad else node.target
    assert isinstance(target, torch._ops.OpOverload)
    args = (*node.args[:position], narrower, *node.args[position + 1 :])
    again = call_like(node.graph, target, args, min(read_by))
    for i, readers in items.items():
        item = getitem_after(again, narrower.buffer_names().index(names[i - before]))
        for reader in readers:
            reader.replace_all_uses_with(item, delete_user_cb=lambda user: user in read_by)
            if not reader.users:
                node.graph.erase_node(reader)
    return again


def quantizer_of(node: Node) -> tuple[int, Quantizer]:
    """(its position among the arguments, the quantizer) of an operation that has one."""
    position = next(i for i, argument in enumerate(node.args) if isinstance(argument, Quantizer))
    quantizer = node.args[position]
    assert isinstance(quantizer, Quantizer)
    return position, quantizer


def narrowest(quantizer: Quantizer, read: set[str]) -> Quantizer:
    """The quantizer with one usage less whose buffers still hold all that is read; itself if there is none."""
    if not read:
        return quantizer
    for usage in ({"columnwise": False}, {"rowwise": False}):
        try:
            narrower = quantizer.with_usage(**usage)
        except QuantizationError:  # its only usage
            continue
        if narrower != quantizer and read <= set(narrower.buffer_names()):
            return narrower
    return quantizer
