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

The norm is a LayerNorm or an RMSNorm. The activation is any that has one input, gated or not. Either Bias may be missing. Both layers have a
recipe whose backward is quantized. Where no kernel writes a recipe's buffers, or there is none for an activation, te.quantize reads the
unquantized result. Without recompute, such recipes are left to the smaller fusions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, Optional

import torch

from te_dynamo.errors import InvalidOptionError
from te_dynamo.fusion_registry import Fusion
from te_dynamo.operations import types
from te_dynamo.operations.basic.activation import Activation
from te_dynamo.operations.basic.gated import Gated
from te_dynamo.operations.basic.linear import BasicLinear, Bias
from te_dynamo.operations.context import OperationContext, RequiresGrad
from te_dynamo.operations.fused.joined import JoinedBackward, JoinedForward, recomputes, without_wgrad
from te_dynamo.operations.fused.quantized import NORMS, output_quantized
from te_dynamo.operations.op import FusedOperation
from te_dynamo.operations.window import Window, fusion_of_windows
from te_dynamo.quantized.quantize import quantize_tensor


class LayerNormMLP(JoinedForward, JoinedBackward):
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

    def _recomputes(self, requires_grad: Sequence[RequiresGrad]) -> bool:
        """Whether the second linear's input is computed again: where wgrad reads it, and the activation's input is kept anyway."""
        return self.recompute == "activation" and recomputes(requires_grad[self._second()])

    def needs_in_forward(self, requires_grad: Sequence[RequiresGrad]) -> Sequence[RequiresGrad]:
        if not self._recomputes(requires_grad):
            return requires_grad
        return without_wgrad(requires_grad, self._second())

    def fuser_backward(
        self, ctxs: Sequence[OperationContext], grad_output: torch.Tensor, grad_extra_outputs: Any
    ) -> types.FuserBackward:
        if self._recomputes([ctx.requires_grad for ctx in ctxs]):
            fc2 = self._second()
            saved = [*self._second_input(ctxs[fc2 - 1], ctxs[fc2].requires_grad), *ctxs[fc2].saved_tensors]
            ctxs = [*ctxs[:fc2], ctxs[fc2].with_saved(saved), *ctxs[fc2 + 1 :]]
        return super().fuser_backward(ctxs, grad_output, grad_extra_outputs)

    def _second_input(self, ctx: OperationContext, requires_grad: RequiresGrad) -> Sequence[torch.Tensor]:
        """What the second linear's own forward saves of its input. ctx: the activation's."""
        fc2 = self._second()
        activation, linear = self.ops[fc2 - 1 : fc2 + 1]
        assert isinstance(activation, (Activation, Gated)) and isinstance(linear, BasicLinear)
        (z,), config = ctx.saved_tensors, linear.config(requires_grad)
        assert z is not None and config is not None
        quantizer = config.input_quantizer.with_usage(rowwise=False, columnwise=True)
        quantized = output_quantized(activation, z, (), quantizer)
        buffers = quantized[0] if quantized else quantize_tensor(activation.forward(z).contiguous(), quantizer)
        return quantizer.operand(buffers, columnwise=True)


def layer_norm_mlp(recompute: Optional[str] = None) -> Fusion:
    """The fusion of norm, BasicLinear (, Bias), activation, BasicLinear (, Bias) to LayerNormMLP(recompute).

    Registered, one with recompute="activation" comes before the shipped one, which has none:
    te_dynamo.register_forward_backward_fusion(layer_norm_mlp(recompute="activation")).
    """

    @fusion_of_windows(
        *(
            (NORMS, BasicLinear, *first, (Activation, Gated), BasicLinear, *second)
            for first, second in product(((Bias,), ()), repeat=2)
        )
    )
    def fuse(window: Window) -> Optional[FusedOperation]:
        """Norm, BasicLinear (, Bias), activation, BasicLinear (, Bias) -> LayerNormMLP."""
        linears: list[Any] = [op for op in window if isinstance(op, BasicLinear)]
        if any(linear.grad_output_quantizer() is None for linear in linears):
            return None
        has_kernels = all(linear.input_quantizer().fused_producers for linear in linears)
        return LayerNormMLP(window, recompute) if has_kernels or recompute else None

    fuse.__qualname__ = f"layer_norm_mlp(recompute={recompute!r})"
    return fuse
