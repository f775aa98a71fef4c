"""Weights that are codes already: those with scales, QuantizedTensors, decide the recipe; those without are refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from te_dynamo import recipe as recipes
from te_dynamo.errors import InputError
from te_dynamo.passes.torch_ir.match.patterns.linears.products import without_casts
from te_dynamo.passes.torch_ir.match.values import dtype_name, tensor_of
from te_dynamo.quantized.quantizers import Quantizer
from te_dynamo.recipe import Recipe
from te_dynamo.report import MatchRecord

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


def recipe_of_stored(held: Quantizer, recipe: Recipe, named: bool, learns: bool) -> Recipe:
    """The recipe of a linear whose weight is held so: the given one if its GEMMs read the weight, or a rule names it.

    learns: whether backward runs. Where no columns are there, nor can be made of the rows, it multiplies by the dequantized weight.
    """
    if not named and not reads(recipe.weight_quantizer(), held):
        recipe = recipes.of_weight(held)
    columns = held.columnwise or (held.rowwise and held.columns_are_rows())
    return dataclasses.replace(recipe, backward="high_precision") if learns and not columns else recipe


def reads(quantizer: Quantizer, held: Quantizer) -> bool:
    """Whether a GEMM for a weight of `quantizer` multiplies by one that is held so: the same elements, granularity and layout, however the
    scales were made."""
    return _read(quantizer) == _read(held)


def _read(quantizer: Quantizer) -> tuple[Any, ...]:
    layout = (getattr(quantizer, field, None) for field in ("fp8_format", "scale_block", "swizzled"))
    return type(quantizer), quantizer.scaling(), *layout
