"""Weights that are codes already: those without scales are refused."""

from __future__ import annotations

from typing import Any

import torch

from te_dynamo.errors import InputError
from te_dynamo.passes.torch_ir.match.patterns.linears.products import without_casts
from te_dynamo.passes.torch_ir.match.values import dtype_name, tensor_of
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
