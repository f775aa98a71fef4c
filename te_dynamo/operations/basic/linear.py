"""BasicLinear and Bias: a linear in its two parts, so that fusions can put other operations between them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Optional

import torch

from te_dynamo.dialect.gemm import bias_grad
from te_dynamo.dialect.linear import (
    LinearBwdArgs,
    LinearConfig,
    backward_products,
    forward_product,
    linear_backward,
    linear_forward_fake,
    saved_of,
    saved_operands,
)
from te_dynamo.errors import InputError, InvalidOptionError
from te_dynamo.operations import types
from te_dynamo.operations.checks import check_settings, check_width
from te_dynamo.operations.context import OperationContext, RequiresGrad
from te_dynamo.operations.op import BasicOperation, Parameter
from te_dynamo.operations.saves import SavesAll
from te_dynamo.quantized.quantize import quantize_tensor
from te_dynamo.quantized.quantizers import Quantizer
from te_dynamo.quantized.tensor_proto import TensorProto, buffer_protos
from te_dynamo.recipe import Recipe


class BasicLinear(SavesAll):
    """y [..., N] = x [..., K] @ weight [N, K]^T, without a bias.

    recipe: how the GEMMs hold their operands; None takes that of the Sequential, and without one high precision.

    Saves what te.linear saves: the columnwise x if the weight needs a gradient, the columnwise weight if x does; in high precision,
    and for a recipe with backward="high_precision", x and the weight themselves. Raises InvalidOptionError for sizes that the
    recipe's GEMMs cannot take.
    """

    in_features: int
    out_features: int
    recipe: Optional[Recipe] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self, "in_features", "out_features")
        align = 1 if self.recipe is None else self.recipe.alignment
        if self.recipe is not None and (self.in_features % align or self.out_features % align):
            raise InvalidOptionError(
                f"BasicLinear({self.in_features}, {self.out_features}): {self.recipe.gemms} need multiples of {align}"
            )

    def parameters(self) -> tuple[Parameter, ...]:
        shape = (self.out_features, self.in_features)
        return (Parameter("weight", shape, lambda w: torch.nn.init.kaiming_uniform_(w, a=math.sqrt(5))),)

    def with_recipe(self, recipe: Optional[Recipe]) -> BasicOperation:
        if self.recipe is not None or recipe is None:
            return self
        return dataclasses.replace(self, recipe=recipe)  # type: ignore[type-var]

    def check_input(self, input: TensorProto) -> None:
        check_width(self, input.shape, self.in_features)
        if self.recipe is not None and input.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise InputError(f"{self.describe()}: expected an input in bf16, fp16 or fp32, got {input.dtype}")

    def config(self, requires_grad: RequiresGrad) -> Optional[LinearConfig]:
        """How te.linear's helpers run it; None in high precision."""
        if self.recipe is None:
            return None
        (weight,) = requires_grad.params
        return LinearConfig.from_recipe(
            self.recipe, input_requires_grad=requires_grad.input, weight_requires_grad=weight
        )

    def input_quantizer(self) -> Optional[Quantizer]:
        return None if self.recipe is None else self.recipe.input_quantizer()

    def grad_output_quantizer(self) -> Optional[Quantizer]:
        return None if self.recipe is None or not self._quantized_backward() else self.recipe.grad_output_quantizer()

    def _quantized_backward(self) -> bool:
        """Whether both gradients read dy in FP8 alone."""
        return self.recipe is not None and all(self.recipe.quantizes())

    def op_forward_compute(
        self, input: torch.Tensor, params: types.Params, *, requires_grad: RequiresGrad, **_: Any
    ) -> types.Forward:
        return self.forward(input, params[0], None, requires_grad)

    def forward(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: Optional[torch.Tensor],
        requires_grad: RequiresGrad,
        addend: Optional[torch.Tensor] = None,
        x_buffers: Optional[list[torch.Tensor]] = None,
    ) -> types.Forward:
        """(output, tensors to save), a bias in the GEMM's epilogue, and then an addend of the output's shape.

        x_buffers: those of the input, where it is quantized already; of `input` the dtype and the leading sizes are then read alone.
        """
        config = self.config(requires_grad)
        if config is None:
            bias = None if bias is None else bias.to(input.dtype)
            output = torch.nn.functional.linear(input, weight.to(input.dtype), bias)
            output = output if addend is None else output.add_(addend)
            return output, self._unquantized(input, weight, requires_grad)
        x_buffers = x_buffers or quantize_tensor(input.contiguous(), config.input_quantizer)
        operands = x_buffers, quantize_tensor(weight.contiguous(), config.weight_quantizer)
        if addend is not None and addend.dim() != 2:
            addend = addend.reshape(-1, self.out_features)
        output = forward_product(config, *operands, input.dtype, bias, addend)
        output = output if input.dim() == 2 else output.reshape(*input.shape[:-1], self.out_features)
        if config.grad_output_quantizer is None:
            return output, self._unquantized(input, weight, requires_grad)
        return output, [*saved_operands(config, *operands), *self._of_wgrad(config, input)]

    def op_forward_fake(
        self, input: TensorProto, params: types.Protos, *, requires_grad: RequiresGrad, **_: Any
    ) -> types.Fake:
        (weight,) = params
        config = self.config(requires_grad)
        if config is None:
            output = TensorProto((*input.shape[:-1], self.out_features), input.dtype, device=input.device)
            return output, self._unquantized(input, weight, requires_grad)
        output, saved = linear_forward_fake(input, weight, None, config)
        if config.grad_output_quantizer is None:
            return output, self._unquantized(input, weight, requires_grad)
        buffers = [buffer for proto in saved for buffer in buffer_protos(proto)]
        return output, [*buffers, *self._of_wgrad(config, input)]

    def _of_wgrad(self, config: LinearConfig, input: Any) -> list[Any]:
        """x, where wgrad alone reads it in high precision."""
        return [input] * (config.weight_requires_grad and config.wgrad_in_high_precision)

    def _unquantized(self, input: Any, weight: Any, requires_grad: RequiresGrad) -> list[Any]:
        """What the products of backward read in high precision: x if wgrad is needed, the weight if dgrad is."""
        return [input] * requires_grad.params[0] + [weight] * requires_grad.input

    def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> types.Backward:
        return self.backward(ctx, grad_output, None)

    def backward(
        self, ctx: OperationContext, grad_output: torch.Tensor, addend: Optional[torch.Tensor]
    ) -> types.Backward:
        """(dx, (dweight,)), each None where nobody asked for it; an addend of dx's shape in dgrad's GEMM."""
        args = self.backward_args(ctx)
        if args.config is None:
            dx, dweights = self._backward(args.x_saved, args.weight_saved, grad_output, ctx.params[0].dtype)
            return dx if dx is None or addend is None else dx.add_(addend), dweights
        dx, dweight, _ = linear_backward(args, grad_output, addend)
        return dx, (dweight,)

    def products(self, ctx: OperationContext, dy_buffers: list[torch.Tensor]) -> types.Backward:
        """`backward` of a dy that is quantized, as both of its products need it."""
        dx, dweight = backward_products(self.backward_args(ctx), dy_buffers)
        return dx if dx is None or len(ctx.input.shape) == 2 else dx.reshape(ctx.input.shape), (dweight,)

    def backward_args(self, ctx: OperationContext) -> LinearBwdArgs:
        """What te.linear's helpers read in backward; `config` is None in high precision."""
        (needs_weight,), needs_input = ctx.requires_grad.params, ctx.requires_grad.input
        saved: tuple[Any, ...] = ctx.saved_tensors
        config = self.config(ctx.requires_grad)
        of_x, of_weight = saved_of(saved, needs_weight, needs_input, config)
        return LinearBwdArgs(
            x_saved=of_x,
            weight_saved=of_weight,
            requires_dgrad=needs_input,
            requires_wgrad=needs_weight,
            x_dtype=ctx.input.dtype,
            weight_dtype=ctx.params[0].dtype,
            config=config,
        )

    def _backward(
        self, x: tuple[torch.Tensor, ...], weight: tuple[torch.Tensor, ...], dy: torch.Tensor, dtype: torch.dtype
    ) -> types.Backward:
        """Both gradients in dy's precision, of those operands that were saved; dtype: of the weight."""
        dx = dy @ weight[0].to(dy.dtype) if weight else None
        if not x:
            return dx, (None,)
        return dx, ((dy.reshape(-1, dy.shape[-1]).t() @ x[0].reshape(-1, x[0].shape[-1])).to(dtype),)


class Bias(SavesAll):
    """y [..., N] = x [..., N] + bias [N]. Saves nothing; db is the sum of dy over the leading dimensions, in fp32."""

    features: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self, "features")

    def parameters(self) -> tuple[Parameter, ...]:
        return (Parameter("bias", (self.features,), torch.nn.init.zeros_),)

    def check_input(self, input: TensorProto) -> None:
        check_width(self, input.shape, self.features)

    def op_forward_compute(self, input: torch.Tensor, params: types.Params, **_: Any) -> types.Forward:
        return (input + params[0]).to(input.dtype), []

    def op_forward_fake(self, input: TensorProto, params: types.Protos, **_: Any) -> types.Fake:
        return TensorProto(input.shape, input.dtype, device=input.device), []

    def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> types.Backward:
        dbias = bias_grad(grad_output).to(ctx.params[0].dtype) if ctx.requires_grad.params[0] else None
        return grad_output, (dbias,)
