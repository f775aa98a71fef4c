"""Joint: a norm writes the quantized input of the linear that follows it.

    before   RMSNorm      y, rstd = te.rms_norm(x)             writes y in bf16
             BasicLinear  te.quantize(y)                       reads y, twice
                          z = y @ weight^T
             Bias         z + bias
    after    LayerNormLinear
                          rstd, buffers of y = te.rms_norm_quantize(x)
                          z = y @ weight^T + bias              the bias in the GEMM's epilogue

Backward is that of the basic operations. The fusion is joint because it saves what its own backward reads and no more: x, the norm's weight and
its statistics, only where the norm has a gradient to compute. The norm is a LayerNorm or an RMSNorm. The Bias may be missing. The recipe is
one whose buffers the norm kernels write (one scale a tensor) and whose backward is quantized.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch

from te_dynamo.dialect.linear import forward_product, saved_operands
from te_dynamo.operations import types
from te_dynamo.operations.basic.linear import BasicLinear, Bias
from te_dynamo.operations.context import OperationContext, RequiresGrad
from te_dynamo.operations.fused.backward_chain import backward_chain
from te_dynamo.operations.fused.quantized import NORMS, norm_quantized
from te_dynamo.operations.op import FusedOperation, FusibleOperation
from te_dynamo.operations.saves import FuserSavesAll
from te_dynamo.operations.window import sliding_window
from te_dynamo.quantized.quantize import quantize_tensor
from te_dynamo.quantized.tensor_proto import TensorProto
from te_dynamo.recipe import Recipe


class LayerNormLinear(FuserSavesAll, FusedOperation):
    """z [..., N] = norm(x [..., K]) @ weight [N, K]^T (+ bias [N])."""

    def fuser_forward_compute(
        self,
        input: torch.Tensor,
        params: Sequence[types.Params],
        extra_inputs: Any,
        *,
        requires_grad: Sequence[RequiresGrad],
        **_: Any,
    ) -> types.FuserForward:
        norm, linear = self.ops[:2]
        assert isinstance(linear, BasicLinear)
        config = linear.config(requires_grad[1])
        assert config is not None
        statistics, x_buffers = norm_quantized(norm, input, params[0], config.input_quantizer)
        weight_buffers = quantize_tensor(params[1][0].contiguous(), config.weight_quantizer)
        bias = params[2][0] if len(self.ops) == 3 else None
        output = forward_product(config, x_buffers, weight_buffers, input.dtype, bias)
        of_norm: types.Saved = [input, params[0][0], *statistics] if requires_grad[0].any() else []
        of_linear: types.Saved = [*saved_operands(config, x_buffers, weight_buffers)]
        output = output.reshape(*input.shape[:-1], linear.out_features)
        return output, [() for _ in self.ops], [of_norm, of_linear, *([] for _ in self.ops[2:])]

    def fuser_forward_fake(
        self, input: TensorProto, params: Any, extra_inputs: Any, *, requires_grad: Any, **keywords: Any
    ) -> types.FuserFake:
        output, extra_outputs, saved = super().fuser_forward_fake(
            input, params, extra_inputs, requires_grad=requires_grad, **keywords
        )
        return output, extra_outputs, [saved[0] if requires_grad[0].any() else [], *saved[1:]]

    def fuser_backward(
        self, ctxs: Sequence[OperationContext], grad_output: torch.Tensor, grad_extra_outputs: Any
    ) -> types.FuserBackward:
        return backward_chain(self.ops, ctxs, grad_output, grad_extra_outputs)


def fuse_layer_norm_linear(ops: Sequence[FusibleOperation], *, recipe: Optional[Recipe]) -> list[FusibleOperation]:
    """LayerNorm or RMSNorm, BasicLinear (, Bias) -> LayerNormLinear."""
    found = sliding_window(ops, (NORMS, BasicLinear, Bias), _fused)
    return sliding_window(found, (NORMS, BasicLinear), _fused)


def _fused(window: tuple[Any, ...]) -> Optional[FusedOperation]:
    linear = window[1]
    quantized = linear.grad_output_quantizer() is not None and linear.input_quantizer().fused_producers
    return LayerNormLinear(window) if quantized else None
