"""The three products of a linear, in the model's own precision and in its recipe, and the sums of what lies between.

    forward    out = x @ weight^T + bias        third: the bias, or None
    experts    out[m] = x[m] @ weight[g]^T      third: offs, the end of each group

What the recipe gives is computed by the operations that a compiled model runs, one linear at a time.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from te_dynamo.accuracy.sums import error_sums, quantized_sums
from te_dynamo.dialect.grouped_linear import (
    GroupedLinearBwdArgs,
    GroupedLinearConfig,
    GroupedLinearFwdArgs,
    grouped_backward_products,
    grouped_linear_forward,
    quantize_groups,
)
from te_dynamo.dialect.linear import (
    LinearBwdArgs,
    LinearConfig,
    LinearFwdArgs,
    backward_products,
    linear_forward,
)
from te_dynamo.quantized.quantize import quantize_tensor
from te_dynamo.quantized.quantizers import Quantizer

Gradients = tuple[Tensor | None, Tensor | None]
"""(dx, dweight), None for what nobody asked for."""


@dataclasses.dataclass(frozen=True)
class LinearProduct:
    """te.linear's."""

    config: LinearConfig

    def flops(self, x: Tensor, weight: Tensor) -> int:
        """Of forward."""
        return 2 * x.numel() * weight.shape[1 if self.config.weight_transposed else 0]

    def exact(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """out in the precision of x."""
        return F.linear(x, weight.t() if self.config.weight_transposed else weight, bias)

    def exact_gradients(self, x: Tensor | None, weight: Tensor | None, bias: Tensor | None, dy: Tensor) -> Gradients:
        """(dx, dweight) in the precision of dy, None without the operand that it is of: dx without weight, dweight without x."""
        config, rows = self.config, dy.reshape(-1, dy.shape[-1])
        dx = dweight = None
        if weight is not None:
            n_by_k = weight.t() if config.weight_transposed else weight
            dx = torch.mm(rows, n_by_k).reshape(*dy.shape[:-1], n_by_k.shape[1])
        if x is not None:
            x = x.reshape(-1, x.shape[-1])
            dweight = torch.mm(x.t(), rows) if config.weight_transposed else torch.mm(rows.t(), x)
        return dx, dweight

    def quantized(self, x: Tensor, weight: list[Tensor], bias: Tensor | None) -> Tensor:
        """out in the recipe; weight: its buffers, of `forward_config`."""
        return linear_forward(LinearFwdArgs(x, None, bias, self.forward_config(), tuple(weight)))[0]

    def quantized_gradients(self, args: dict[str, Any], third: Tensor | None, dy: list[Tensor]) -> Gradients:
        """Those that the config asks for, in the recipe; args: of LinearBwdArgs, dy: buffers for the gradients asked for."""
        config = self.config
        asked = LinearBwdArgs(**args, config=config)
        asked.requires_dgrad, asked.requires_wgrad = config.input_requires_grad, config.weight_requires_grad
        return backward_products(asked, dy)

    def quantized_operand(self, values: Tensor, quantizer: Quantizer, third: Tensor | None) -> list[Tensor]:
        """x or dy in the recipe, as its products read it. By random bits of its own: the model's random numbers stay what they are."""
        return _quantized(values, quantizer)

    def forward_config(self) -> Any:
        """The config less what only backward reads."""
        of_columns = self.config.weight_transposed
        return dataclasses.replace(
            self.config,
            input_quantizer=self.config.input_quantizer.with_usage(True, False),
            weight_quantizer=self.config.weight_quantizer.with_usage(not of_columns, of_columns),
            input_requires_grad=False,
            weight_requires_grad=False,
        )


@dataclasses.dataclass(frozen=True)
class ExpertsProduct(LinearProduct):
    """te.grouped_linear's."""

    config: GroupedLinearConfig

    def flops(self, x: Tensor, weight: Tensor) -> int:
        return 2 * x.numel() * weight.shape[2 if self.config.weight_transposed else 1]

    def exact(self, x: Tensor, weight: Tensor, offs: Tensor | None) -> Tensor:
        n_by_k = weight.transpose(1, 2) if self.config.weight_transposed else weight
        return _by_groups(x, n_by_k.transpose(1, 2), offs)

    def exact_gradients(self, x: Tensor | None, weight: Tensor | None, offs: Tensor | None, dy: Tensor) -> Gradients:
        config = self.config
        dx = dweight = None
        if weight is not None:
            dx = _by_groups(dy, weight.transpose(1, 2) if config.weight_transposed else weight, offs)
        if x is not None:
            left, right = (x, dy) if config.weight_transposed else (dy, x)
            dweight = torch.stack([left[rows].t() @ right[rows] for rows in _groups(offs)])
        return dx, dweight

    def quantized(self, x: Tensor, weight: list[Tensor], offs: Tensor | None) -> Tensor:
        assert offs is not None
        return grouped_linear_forward(GroupedLinearFwdArgs(x, None, offs, self.forward_config(), tuple(weight)))[0]

    def quantized_operand(self, values: Tensor, quantizer: Quantizer, third: Tensor | None) -> list[Tensor]:
        assert third is not None
        return quantize_groups(values, third, quantizer)

    def quantized_gradients(self, args: dict[str, Any], third: Tensor | None, dy: list[Tensor]) -> Gradients:
        return grouped_backward_products(GroupedLinearBwdArgs(**args, offs=third, config=self.config), dy)


def _groups(offs: Tensor | None) -> list[slice]:
    assert offs is not None
    ends = offs.tolist()
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _by_groups(rows: Tensor, matrices: Tensor, offs: Tensor | None) -> Tensor:
    """rows[m] @ matrices[g] for the m of group g; zeros behind the last group."""
    out = rows.new_zeros(rows.shape[0], matrices.shape[2])
    for matrix, group in zip(matrices, _groups(offs), strict=True):
        out[group] = rows[group] @ matrix
    return out


def forward_sums(
    product: LinearProduct, x: Tensor, weight: Tensor, third: Tensor | None, out: Tensor
) -> dict[str, Tensor]:
    """Of x, weight and output; out: what the model's own precision gives."""
    config = product.forward_config()
    x, weight = x.detach().contiguous(), weight.detach().contiguous()
    held = _quantized(weight, config.weight_quantizer)
    return {
        "x": quantized_sums(x, config.input_quantizer, _quantized(x, config.input_quantizer)),
        "weight": quantized_sums(weight, config.weight_quantizer, held, columnwise=config.weight_transposed),
        "output": error_sums(out, product.quantized(x, held, third)),
    }


def backward_sums(
    product: LinearProduct, x: Tensor | None, weight: Tensor | None, third: Tensor | None, dy: Tensor, exact: Gradients
) -> dict[str, Tensor]:
    """Of dy, dx and dweight; x, weight, exact: as in `exact_gradients`. {} where the recipe quantizes nothing in backward."""
    config = product.config
    wgrad = x is not None and not config.wgrad_in_high_precision
    if config.grad_output_quantizer is None or not (config.input_requires_grad or wgrad):
        return {}
    dy, quantizer = dy.contiguous(), config.grad_output_quantizer
    args: dict[str, Any] = {"x_dtype": dy.dtype, "weight_dtype": dy.dtype}
    if x is not None and wgrad:
        of_x = config.input_quantizer.with_usage(False, True)
        args["x_saved"] = of_x.operand(product.quantized_operand(x.contiguous(), of_x, third), columnwise=True)
    if weight is not None:
        of_weight = config.weight_quantizer.with_usage(config.weight_transposed, not config.weight_transposed)
        held = _quantized(weight.contiguous(), of_weight)
        args["weight_saved"] = of_weight.operand(held, columnwise=not config.weight_transposed)
    dy_quantizer = quantizer.with_usage(config.input_requires_grad, wgrad)
    found = product.quantized_gradients(args, third, product.quantized_operand(dy, dy_quantizer, third))
    of_rows = quantizer.with_usage(
        True, False
    )  # columns may be rotated or in another order, where no value can be told
    sums = {"dy": quantized_sums(dy, of_rows, _quantized(dy, of_rows))}
    for name, gradient, wanted in zip(("dx", "dw"), found, exact, strict=True):
        if gradient is not None and wanted is not None:
            sums[name] = error_sums(wanted, gradient)
    return sums


def _quantized(values: Tensor, quantizer: Quantizer) -> list[Tensor]:
    """By random bits of its own: the model's random numbers stay what they are."""
    generator = torch.Generator(values.device).manual_seed(0) if quantizer.needs_random() else None
    return quantize_tensor(values, quantizer, generator)
