"""Weights that are codes already: those with scales, QuantizedTensors, decide the recipe; those without are refused.
Those of torchao's classes are read as QuantizedTensors."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from te_dynamo import recipe as recipes
from te_dynamo.errors import CheckpointError, InputError
from te_dynamo.passes.torch_ir.match.patterns.linears.products import without_casts
from te_dynamo.passes.torch_ir.match.values import dtype_name, emit, quantized_of, tensor_of
from te_dynamo.quantized.quantizers import Quantizer
from te_dynamo.recipe import Recipe
from te_dynamo.report import MatchRecord
from te_dynamo.weights.checkpoint.torchao import as_quantized, is_torchao, live_kind

_CODES = (torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def check_scaled(weight: Any, record: MatchRecord) -> None:
    """Raises InputError for an input of the graph that is codes and is multiplied as it is, or cast: its scales are nowhere in between."""
    stored = without_casts(weight)
    value = tensor_of(stored)
    if stored is None or stored.op != "placeholder" or value is None or value.dtype not in _CODES:
        return
    name = record.module if record.parameter else f"{record.module}.weight".removeprefix(".")
    at = f" ({record.source})" if record.source else ""
    raise InputError(
        f"te_dynamo: {name!r} is {dtype_name(value.dtype)} and is multiplied without a scale{at}: the scale that its file has for it "
        "(weight_scale, weight_scale_inv, ...) was not loaded. te_dynamo.load_checkpoint(model, path) loads both. If the codes are the values, "
        f"a rule leaves the linear as it is: rules=[({record.module!r}, None)]"
    )


def static_amax(weight: Any, recipe: Recipe) -> float:
    """The amax for which a linear's input is scaled: that of its weight's file where the recipe wants it, else 0."""
    held = quantized_of(weight)
    wanted = held is not None and getattr(recipe, "static_inputs", False)
    return held.quantizer.read_input_amax() if wanted else 0.0  # type: ignore[union-attr]


def check_inference(node: fx.Node, weight: Any, recipe: Recipe, record: MatchRecord) -> None:
    """Raises InputError for a linear that scales its input by a static scale and has a backward."""
    if static_amax(weight, recipe) and tensor_of(node).requires_grad:  # type: ignore[union-attr]
        at = f" ({record.source})" if record.source else ""
        raise InputError(
            f"te_dynamo: the linear {record.module!r}{at} learns, or what is before it, and its input has a static scale, which is for inference: "
            "call the model under torch.no_grad(), or leave out static_inputs=True"
        )


def read_torchao(node: fx.Node, weight: Any) -> tuple[Any, str, str]:
    """(what a linear reads in place of its weight, in which form that is stored, why a tensor of torchao's is not read): a tensor of torchao's is
    the QuantizedTensor of its codes and scales."""
    value = tensor_of(weight)
    if value is None or not is_torchao(value):
        return weight, "", ""
    try:
        stored = f"torchao ({live_kind(value)})"
    except CheckpointError as error:
        return weight, "", f"its weight is a {type(value).__name__} of torchao: {error}"
    with node.graph.inserting_before(node):
        read = emit(node.graph, as_quantized, (weight,), node)
    node.replace_input_with(weight, read)
    return read, stored, ""


def give_back(node: fx.Node, weight: Any, stored: str) -> None:
    """Undoes `read_torchao` of a linear that stays what it is."""
    if stored:
        node.replace_input_with(weight, weight.args[0])
        node.graph.erase_node(weight)


def recipe_of_stored(held: Quantizer, recipe: Recipe, named: bool, learns: bool) -> Recipe:
    """The recipe of a linear whose weight is held so: the given one if its GEMMs read the weight, or a rule names it.

    learns: whether backward runs. Where there are not both rows and columns, nor can these be made, it multiplies by the dequantized weight.
    """
    if not named and not reads(recipe.weight_quantizer(), held):
        recipe = recipes.of_weight(held)
    both = held.rowwise and (held.columnwise or held.columns_are_rows())
    return dataclasses.replace(recipe, backward="high_precision") if learns and not both else recipe


def reads(quantizer: Quantizer, held: Quantizer) -> bool:
    """Whether a GEMM for a weight of `quantizer` multiplies by one that is held so: the same elements, granularity and layout, however the
    scales were made."""
    return _read(quantizer) == _read(held)


def _read(quantizer: Quantizer) -> tuple[Any, ...]:
    layout = (getattr(quantizer, field, None) for field in ("fp8_format", "scale_block", "swizzled"))
    return type(quantizer), quantizer.scaling(), *layout
