"""Calls of torch's that multiply by weights in a form that te.linear does not have: recorded, so that none is silent.

    torch.gru_cell(x, (h), w_ih, w_hh, ..)     nn.GRUCell, nn.LSTMCell, nn.RNNCell: two products, a row each
    torch.bilinear(a, b, weight)               nn.Bilinear
    torch.baddbmm(bias, x, weight)             by a parameter of three dimensions

(nn.LSTM, nn.GRU and nn.RNN are not traced: Dynamo breaks the graph there, which `explain` lists.)
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from te_dynamo.inspect.report import MatchRecord
from te_dynamo.passes.torch_ir.match.patterns.linear import RecipeFor, linear_record
from te_dynamo.passes.torch_ir.match.patterns.products import Sizes, is_parameter
from te_dynamo.passes.torch_ir.match.values import calls, tensor_of

__all__ = ["match_compound"]

_CELLS = {torch.gru_cell, torch.lstm_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell}
_BILINEAR = {torch.bilinear, F.bilinear}


def match_compound(node: fx.Node, recipe_for: RecipeFor, outside: str = "") -> list[MatchRecord]:
    """A record for each weight that `node` multiplies by; none for any other node. Nothing is rewritten.

    recipe_for, outside: as for match_linear.
    """
    records = []
    for weight, sizes in _weights(node):
        record, recipe = linear_record(node, weight, sizes, recipe_for)
        if recipe is not None:
            name = getattr(node.target, "__name__", node.target)
            record.reason = outside or f"inside torch.{name}, which te_dynamo does not take apart"
        record.matched, record.recipe = False, ""
        records.append(record)
    return records


def _weights(node: fx.Node) -> list[tuple[Any, Sizes]]:
    """(weight, (M, N, K)) of each product."""
    if calls(node, _CELLS):
        return [(weight, _sizes(node.args[0], weight)) for weight in node.args[2:4]]
    if calls(node, _BILINEAR):
        return [(weight, _sizes(node.args[0], weight)) for weight in node.args[2:3]]
    if calls(node, {torch.baddbmm}, {"baddbmm"}) and len(node.args) == 3 and is_parameter(node.args[2], rank=3):
        x, weight = tensor_of(node.args[1]), tensor_of(node.args[2])
        return [
            (
                node.args[2],
                () if x is None or weight is None else (math.prod(x.shape[:-1]), weight.shape[2], weight.shape[1]),
            )
        ]
    return []


def _sizes(x: Any, weight: Any) -> Sizes:
    """(M, N, K) of the product of x [.., K] and a weight [N, K], or nn.Bilinear's [N, K1, K2]."""
    rows, value = tensor_of(x), tensor_of(weight)
    return (
        ()
        if rows is None or value is None
        else (math.prod(rows.shape[:-1]), value.shape[0], math.prod(value.shape[1:]))
    )
