"""Calls of torch's that multiply by weights in a form that te.linear does not have: recorded, so that none is silent. An einsum that
multiplies by a weight in each step is taken apart.

torch.gru_cell(x, (h), w_ih, w_hh, ..)     nn.GRUCell, nn.LSTMCell, nn.RNNCell: two products, a row each
torch.lstm(x, (h), [w_ih, w_hh, ..], ..)   nn.LSTM, nn.GRU, nn.RNN, which Dynamo traces with allow_rnn alone: a row for each matrix
torch.bilinear(a, b, weight)               nn.Bilinear
torch.baddbmm(bias, x, weight), addbmm     by a weight of three dimensions
torch.linalg.multi_dot([x, a, b])          a row for each weight, as if multiplied from the left
torch.einsum("btd,bsd,df->bsf", x, y, w)   the same, unless each step multiplies by a weight
torch.conv2d(x, weight, ..)                a convolution that is no linear (convolutions.py), as the matrix product of its windows
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from te_dynamo.passes.torch_ir.match.autocast import autocast_around
from te_dynamo.passes.torch_ir.match.cost import LEFT_FOR_COST
from te_dynamo.passes.torch_ir.match.patterns.grouped import match_grouped
from te_dynamo.passes.torch_ir.match.patterns.linears.letters import einsum_steps, emit_steps
from te_dynamo.passes.torch_ir.match.patterns.linears.linear import RecipeFor, linear_record, match_linear
from te_dynamo.passes.torch_ir.match.patterns.linears.products import Sizes, contraction_by_weight, is_parameter
from te_dynamo.passes.torch_ir.match.values import calls, erase_unused, name_of, put_back, replace, tensor_of
from te_dynamo.report import RECORD, MatchRecord

_CELLS = {torch.gru_cell, torch.lstm_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell}
_LAYERS = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}
_BILINEAR = {torch.bilinear, F.bilinear}
_BATCHED = {torch.baddbmm, torch.addbmm}
_CHAINS = {torch.linalg.multi_dot, torch.chain_matmul}
_aten = torch.ops.aten
_CONVOLUTIONS = {
    torch.conv1d, torch.conv2d, torch.conv3d, _aten.conv1d.default, _aten.conv2d.default, _aten.conv3d.default,
    _aten.convolution.default,
}  # fmt: skip
_TRANSPOSED = {torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d}
_OF_CONVOLUTIONS = "a convolution; te_dynamo has linears in recipes, no convolutions"
_OF_ONES = "; one of 1x1 is a linear where its input lies in torch.channels_last"


def match_compound(node: fx.Node, recipe_for: RecipeFor, outside: str = "") -> list[MatchRecord]:
    """A record for each weight that `node` multiplies by; none for any other node.

    recipe_for, outside: as for match_linear.
    """
    weights, steps = _weights(node), einsum_steps(node)
    if steps and len(steps) == len(weights):  # else an order of torch's choice may be the better one
        return _match_steps(node, recipe_for, outside)
    records = []
    for weight, sizes in weights:
        record, recipe = linear_record(node, weight, sizes, recipe_for)
        if recipe is not None:
            name = name_of(node)
            apart = f"inside torch.{name}, which te_dynamo does not take apart"
            apart += "; write it as products of two" if steps else ""
            apart += "; write it as torch.bmm and a sum" if name in ("addbmm", "baddbmm") else ""
            record.reason = outside or _reason_of_convolution(node, weight) or apart
        record.matched, record.recipe = False, ""
        records.append(record)
    return records


def _match_steps(node: fx.Node, recipe_for: RecipeFor, outside: str) -> list[MatchRecord]:
    """The records of an einsum as products of two, multiplied from the left, in its place where one of them becomes a linear."""
    before, records = node.prev, []
    with node.graph.inserting_before(node), autocast_around(node):
        steps = emit_steps(node)
    replace(node, steps[-1])  # now, for its readers decide which strides it may have
    for step in steps:
        records += match_grouped(step, recipe_for, outside) or match_linear(step, recipe_for, outside)
    if any(record.matched for record in records):
        erase_unused(node.graph, [node])
        return records
    reasons = [step.meta.get(LEFT_FOR_COST, "") for step in steps]
    node.meta[RECORD], node.meta[LEFT_FOR_COST] = records[0], max(reasons)
    put_back(node, steps[-1], before)
    return records


def _reason_of_convolution(node: fx.Node, weight: Any) -> str:
    if not calls(node, _CONVOLUTIONS | _TRANSPOSED):
        return ""
    kernel = tensor_of(weight)
    ones = calls(node, _CONVOLUTIONS) and kernel is not None and all(size == 1 for size in kernel.shape[2:])
    return _OF_CONVOLUTIONS + (_OF_ONES if ones else "")


def _weights(node: fx.Node) -> list[tuple[Any, Sizes]]:
    """(weight, (M, N, K)) of each product that no other matcher records."""
    if contraction_by_weight(node) is not None:
        return []
    if calls(node, _CELLS):
        return [(weight, _sizes(node.args[0], weight)) for weight in node.args[2:4]]
    if calls(node, _BILINEAR):
        return [(weight, _sizes(node.args[0], weight)) for weight in node.args[2:3]]
    if calls(node, _LAYERS):  # its list of tensors: the matrices, and biases
        lists = (argument for argument in node.args if isinstance(argument, (tuple, list)))
        weights = [w for given in lists for w in given if is_parameter(w, rank=2)]
        return [(weight, _sizes(node.args[0], weight)) for weight in weights]
    if calls(node, _BATCHED, {"baddbmm", "addbmm"}) and len(node.args) == 3 and is_parameter(node.args[2], rank=3):
        return [(node.args[2], _by_columns(node.args[1], node.args[2]))]
    if calls(node, _CHAINS):
        first, *others = node.args[0] if isinstance(node.args[0], (tuple, list)) else node.args  # type: ignore[misc]
        return [(weight, _by_columns(first, weight)) for weight in others if is_parameter(weight)]
    weights = [next((pair for pair in added if is_parameter(pair[0])), None) for added in einsum_steps(node)]
    return list(filter(None, weights)) or _of_convolution(node)


def _of_convolution(node: fx.Node) -> list[tuple[Any, Sizes]]:
    transposed = calls(node, _TRANSPOSED) or (calls(node, {_aten.convolution.default}) and bool(node.args[6]))
    if not transposed and not calls(node, _CONVOLUTIONS):
        return []
    operand, weight = (node.kwargs.get(name, node.args[i : i + 1]) for i, name in enumerate(("input", "weight")))
    operand, weight = (found[0] if isinstance(found, tuple) else found for found in (operand, weight))
    windows, kernel = tensor_of(operand if transposed else node), tensor_of(weight)  # a product for each place of these
    if windows is None or kernel is None:
        return [(weight, ())]
    places, inner = math.prod(windows.shape) // kernel.shape[0], math.prod(kernel.shape[1:])
    n, k = (inner, kernel.shape[0]) if transposed else (kernel.shape[0], inner)
    return [(weight, (places, n, k))]


def _by_columns(x: Any, weight: Any) -> Sizes:
    """(M, N, K) of the product of x [.., K] and a weight [.., K, N]."""
    rows, value = tensor_of(x), tensor_of(weight)
    if rows is None or value is None or value.dim() < 2:
        return ()
    return (math.prod(rows.shape[:-1]), value.shape[-1], value.shape[-2])


def _sizes(x: Any, weight: Any) -> Sizes:
    """(M, N, K) of the product of x [.., K] and a weight [N, K], or nn.Bilinear's [N, K1, K2]."""
    rows, value = tensor_of(x), tensor_of(weight)
    return (
        ()
        if rows is None or value is None
        else (math.prod(rows.shape[:-1]), value.shape[0], math.prod(value.shape[1:]))
    )
