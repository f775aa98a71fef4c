"""Joint: a whole MLP, norm, linear, activation, linear, with nothing between the operations that need not be written.

    before   RMSNorm            writes y in bf16
             BasicLinear, Bias  quantize y; h = y @ w1^T; writes z = h + b1
             GELU               writes a = gelu(z) in bf16
             BasicLinear, Bias  quantize a; writes a @ w2^T; adds b2
    after    LayerNormMLP
                                buffers of y = te.rms_norm_quantize(x)
                                z = y @ w1^T + b1                         one GEMM
                                buffers of a = te.activation_quantize(z)
                                a @ w2^T + b2                             one GEMM

    backward                    da = dy @ w2
                                db1, buffers of dz = te.activation_backward_quantize(da, z),
                                    or te.gated_backward_quantize_halves(da, z's halves)
                                dz @ w1, and the norm's own

Forward saves x and the norm's statistics, y and a quantized by columns, both weights by columns, and z. With recompute="activation" it does
not save a, the larger half of what an MLP keeps: backward computes a again by one pass over z. The fusion is joint for this reason.

The norm is a LayerNorm or an RMSNorm. The activation is any that has one input, gated or not. Either Bias may be missing. Both linears have a
recipe whose backward is quantized. Where no kernel writes a recipe's buffers, or there is none for an activation, te.quantize reads the
unquantized result. Without recompute, such recipes are left to the smaller fusions.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from itertools import product
from typing import Any, Optional

import torch

from te_dynamo.dialect.linear import backward_products, forward_product, grad_output_quantizer, saved_operands
from te_dynamo.errors import InvalidOptionError
from te_dynamo.fusion_registry import Fusion
from te_dynamo.operations import types
from te_dynamo.operations.basic.activation import Activation
from te_dynamo.operations.basic.gated import Gated
from te_dynamo.operations.basic.linear import BasicLinear, Bias
from te_dynamo.operations.context import OperationContext, RequiresGrad
from te_dynamo.operations.fused.backward_chain import backward_chain
from te_dynamo.operations.fused.quantized import (
    NORMS,
    activation_gradient_quantized,
    activation_quantized,
    norm_quantized,
)
from te_dynamo.operations.op import FusedOperation, FusibleOperation
from te_dynamo.operations.saves import FuserSavesAll
from te_dynamo.operations.window import sliding_window
from te_dynamo.quantized.quantize import quantize_tensor
from te_dynamo.quantized.tensor_proto import TensorProto
from te_dynamo.recipe import Recipe


class LayerNormMLP(FuserSavesAll, FusedOperation):
    """y [..., N] = f(norm(x [..., K]) @ w1^T + b1) @ w2^T + b2.

    recompute: None saves the second linear's input, "activation" computes it again in backward; InvalidOptionError for another.
    """

    recompute: Optional[str] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recompute not in (None, "activation"):
            raise InvalidOptionError.unknown("recompute", self.recompute, (None, "activation"))

    def _second(self) -> int:
        """Position of the second linear: the activation is before it, the first linear at 1."""
        return 4 if isinstance(self.ops[2], Bias) else 3

    def fuser_forward_compute(
        self,
        input: torch.Tensor,
        params: Sequence[types.Params],
        extra_inputs: Any,
        *,
        requires_grad: Sequence[RequiresGrad],
        **_: Any,
    ) -> types.FuserForward:
        fc2 = self._second()
        saved: list[types.Saved] = [[] for _ in self.ops]
        config = _config(self.ops[1], requires_grad[1])
        statistics, x_buffers = norm_quantized(self.ops[0], input, params[0], config.input_quantizer)
        if requires_grad[0].any():
            saved[0] = [input, params[0][0], *statistics]
        z, saved[1] = _product(config, x_buffers, params[1][0], _bias(self.ops, params, 2), input.dtype)
        if requires_grad[fc2 - 1].input:
            saved[fc2 - 1] = [z]
        config = _config(self.ops[fc2], requires_grad[fc2])
        if self._recomputes(requires_grad):
            config = dataclasses.replace(
                config, input_quantizer=config.input_quantizer.with_usage(columnwise=False), weight_requires_grad=False
            )
        a_buffers = activation_quantized(self.ops[fc2 - 1], z, config.input_quantizer)
        bias = _bias(self.ops, params, fc2 + 1)
        output, saved[fc2] = _product(config, a_buffers, params[fc2][0], bias, input.dtype)
        return output.reshape(*input.shape[:-1], output.shape[-1]), [() for _ in self.ops], saved

    def _recomputes(self, requires_grad: Sequence[RequiresGrad]) -> bool:
        """Whether the second linear's input is computed again: where it is needed, and z is kept anyway."""
        needs = requires_grad[self._second()]
        return self.recompute == "activation" and needs.input and needs.params[0]

    def fuser_forward_fake(
        self, input: TensorProto, params: Any, extra_inputs: Any, *, requires_grad: Any, **keywords: Any
    ) -> types.FuserFake:
        """What the basic operations save, without what this one leaves out. z is saved as [M, N]."""
        fc2 = self._second()
        output, extra_outputs, saved = super().fuser_forward_fake(
            input, params, extra_inputs, requires_grad=requires_grad, **keywords
        )
        if not requires_grad[0].any():
            saved[0] = []
        (z,) = saved[fc2 - 1]
        assert z is not None
        rows = TensorProto((math.prod(z.shape[:-1]), z.shape[-1]), z.dtype, device=z.device)
        saved[fc2 - 1] = [rows] if requires_grad[fc2 - 1].input else []
        if self._recomputes(requires_grad):
            saved[fc2] = saved[fc2][len(saved[fc2]) // 2 :]  # the input's tensors are the first half
        return output, extra_outputs, saved

    def fuser_backward(
        self, ctxs: Sequence[OperationContext], grad_output: torch.Tensor, grad_extra_outputs: Any
    ) -> types.FuserBackward:
        fc2 = self._second()
        needs = [ctx.requires_grad for ctx in ctxs]
        second = [ctxs[fc2].with_saved(self._saved_of_second(ctxs, needs)), *ctxs[fc2 + 1 :]]
        da, of_second, _ = backward_chain(self.ops[fc2:], second, grad_output, grad_extra_outputs[fc2:])
        grads: list[types.Grads] = [*((None,) * len(op.parameters()) for op in self.ops[:fc2]), *of_second]
        extras: list[types.Grads] = [() for _ in self.ops]
        if da is None:
            return None, grads, extras
        z = ctxs[fc2 - 1].saved_tensors[0]
        assert z is not None
        da = da.reshape(-1, da.shape[-1])
        dy, grads[1:fc2] = self._first_backward(ctxs[1:fc2], da, z)
        if dy is None:
            return None, grads, extras
        dx, grads[0] = self.ops[0].op_backward(ctxs[0], dy.reshape(ctxs[0].input.shape))
        return dx, grads, extras

    def _saved_of_second(self, ctxs: Sequence[OperationContext], needs: Sequence[RequiresGrad]) -> list[Any]:
        """What the second linear's own forward saves."""
        fc2 = self._second()
        saved = list(ctxs[fc2].saved_tensors)
        if not self._recomputes(needs):
            return saved
        z = ctxs[fc2 - 1].saved_tensors[0]
        quantizer = _config(self.ops[fc2], needs[fc2]).input_quantizer.with_usage(rowwise=False, columnwise=True)
        assert z is not None
        buffers = activation_quantized(self.ops[fc2 - 1], z, quantizer)
        return [*quantizer.operand(buffers, columnwise=True), *saved]

    def _first_backward(
        self, ctxs: Sequence[OperationContext], da: torch.Tensor, z: torch.Tensor
    ) -> tuple[Optional[torch.Tensor], list[types.Grads]]:
        """(gradient of the first linear's input, gradients of it, of its bias if it has one, and of the activation)."""
        linear, activation = self.ops[1], self.ops[self._second() - 1]
        assert isinstance(linear, BasicLinear)
        grads: list[types.Grads] = [(None,) * len(ctx.params) for ctx in ctxs]
        needs_bias = len(ctxs) == 3 and ctxs[1].requires_grad.params[0]
        if not ctxs[0].requires_grad.any():  # only the bias has a gradient
            between = [ctx.with_saved([z]) for ctx in ctxs[1:]]
            _, grads[1:], _ = backward_chain(self.ops[2 : self._second()], between, da, [() for _ in between])
            return None, grads
        args = linear.backward_args(ctxs[0])
        sums, buffers = activation_gradient_quantized(activation, da, z, grad_output_quantizer(args), needs_bias)
        dy, dweight = backward_products(args, buffers)
        grads[0] = (dweight,)
        if sums is not None:
            grads[1] = (sums.to(ctxs[1].params[0].dtype),)
        return dy, grads


def layer_norm_mlp(recompute: Optional[str] = None) -> Fusion:
    """The fusion of norm, BasicLinear (, Bias), activation, BasicLinear (, Bias) to LayerNormMLP(recompute).

    Registered, one with recompute="activation" comes before the shipped one, which has none:
    te_dynamo.register_forward_backward_fusion(layer_norm_mlp(recompute="activation")).
    """

    def fuse(ops: Sequence[FusibleOperation], *, recipe: Optional[Recipe]) -> list[FusibleOperation]:
        """Norm, BasicLinear (, Bias), activation, BasicLinear (, Bias) -> LayerNormMLP."""
        found = list(ops)
        for first, second in product(((Bias,), ()), repeat=2):  # the longer first
            types: Any = (NORMS, BasicLinear, *first, (Activation, Gated), BasicLinear, *second)
            found = sliding_window(found, types, functools.partial(_fused, recompute))
        return found

    fuse.__qualname__ = f"layer_norm_mlp(recompute={recompute!r})"
    return fuse


def _fused(recompute: Optional[str], window: tuple[Any, ...]) -> Optional[FusedOperation]:
    linears: list[Any] = [op for op in window if isinstance(op, BasicLinear)]
    if any(linear.grad_output_quantizer() is None for linear in linears):
        return None
    has_kernels = all(linear.input_quantizer().fused_producers for linear in linears)
    return LayerNormMLP(window, recompute) if has_kernels or recompute else None


def _config(linear: Any, requires_grad: RequiresGrad) -> Any:
    config = linear.config(requires_grad)
    assert config is not None and config.grad_output_quantizer is not None
    return config


def _bias(ops: Sequence[Any], params: Sequence[types.Params], index: int) -> Optional[torch.Tensor]:
    return params[index][0] if index < len(ops) and isinstance(ops[index], Bias) else None


def _product(
    config: Any, x_buffers: list[torch.Tensor], weight: torch.Tensor, bias: Optional[torch.Tensor], dtype: torch.dtype
) -> types.Forward:
    """(x @ weight^T + bias as [M, N], what backward reads of the operands)."""
    weight_buffers = quantize_tensor(weight.contiguous(), config.weight_quantizer)
    output = forward_product(config, x_buffers, weight_buffers, dtype, bias)
    return output, [*saved_operands(config, x_buffers, weight_buffers)]
