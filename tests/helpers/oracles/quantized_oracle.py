"""What training in a recipe is, written a second time: every linear rounds its operands and multiplies them in float64.

    with quantized_linears(MXFP8BlockScaling()):
        model(x).sum().backward()

Built from the quantizers' own round trip, quantize and dequantize, each usage by itself; shares nothing with the GEMMs, with
te.linear and what it saves, or with the compiler.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from te_dynamo.quantized.quantizers import Quantizer
from te_dynamo.recipe import Recipe


def rounded(x: Tensor, quantizer: Quantizer, columnwise: bool) -> Tensor:
    """x after a round trip through that usage of its quantizer, as [M, K] in float64.

    Of x in fp32, which holds the result of 16 bits too. Read columnwise it has rows of zeros up to a multiple of 16: a Hadamard transform spreads values over those too.
    """
    alone = quantizer.with_usage(rowwise=not columnwise, columnwise=columnwise)
    matrix = _rows(x.detach().float())
    if columnwise:
        matrix = F.pad(matrix, (0, 0, 0, -matrix.shape[0] % 16))
    return alone.quantize(matrix.contiguous()).dequantize().double()


def _rows(x: Tensor) -> Tensor:
    """x of any rank as [M, K]."""
    return x.reshape(-1, x.shape[-1])


def quantized_linear(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe) -> Tensor:
    """x @ weight^T + bias and its gradients in `recipe`, the results in x's dtype."""
    return _Linear.apply(x, weight, bias, recipe)


@dataclasses.dataclass
class quantized_linears(TorchFunctionMode):
    """Inside, F.linear computes its output and its gradients in `recipe`.

    recipes: recipe by weight (by identity), for those that have another; None leaves a linear as it is.
    """

    recipe: Recipe | None
    recipes: dict[Tensor, Recipe | None] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.linear or (recipe := self._recipe(args[1])) is None:
            return func(*args, **(kwargs or {}))
        x, weight, bias = (*args, None)[:3]
        return quantized_linear(x, weight, bias, recipe)

    def _recipe(self, weight: Tensor) -> Recipe | None:
        return next((recipe for other, recipe in self.recipes.items() if other is weight), self.recipe)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipe = recipe
        product = rounded(x, recipe.input_quantizer(), False) @ rounded(weight, recipe.weight_quantizer(), False).t()
        out = product if bias is None else product + bias.double()
        return out.to(x.dtype).reshape(*x.shape[:-1], out.shape[-1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        recipe = ctx.recipe
        if recipe.backward == "high_precision":
            dx = dy.double() @ weight.double()
            dw = _rows(dy.double()).t() @ _rows(x.double())
        else:
            grad = recipe.grad_output_quantizer()
            dx = rounded(dy, grad, False) @ rounded(weight, recipe.weight_quantizer(), True)[: weight.shape[0]]
            sides = (rounded(dy, grad, True), rounded(x, recipe.input_quantizer(), True))
            if not all(recipe.quantizes()):
                sides = (_rows(dy.double()), _rows(x.double()))
            dw = sides[0].t() @ sides[1]
        db = _rows(dy.double()).sum(0).to(weight.dtype) if ctx.needs_input_grad[2] else None
        return dx.to(x.dtype).reshape(x.shape), dw.to(weight.dtype), db, None
