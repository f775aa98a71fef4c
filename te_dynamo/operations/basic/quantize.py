"""Quantize: a tensor, or its gradient, rounded to what a low precision format holds."""

from __future__ import annotations

from typing import Any, Optional

import torch

from te_dynamo.operations import types
from te_dynamo.operations.context import OperationContext
from te_dynamo.operations.saves import SavesAll
from te_dynamo.quantized.quantize import quantize_tensor
from te_dynamo.quantized.quantizers import Quantizer
from te_dynamo.quantized.storage import QuantizedTensorStorage
from te_dynamo.quantized.tensor_proto import TensorProto


class Quantize(SavesAll):
    """y = the values of x in `forward`'s format, in x's dtype; dx = those of dy in `backward`'s. None leaves them as they are.

    The rounding is taken for the identity in backward (straight through).
    """

    forward: Optional[Quantizer] = None
    backward: Optional[Quantizer] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for quantizer in (self.forward, self.backward):
            if not (quantizer is None or isinstance(quantizer, Quantizer)):
                raise TypeError(f"Quantize: expected a quantizer or None, got {quantizer!r}")

    def op_forward_compute(self, input: torch.Tensor, params: types.Params, **_: Any) -> types.Forward:
        return _rounded(input, self.forward), []

    def op_forward_fake(self, input: TensorProto, params: types.Protos, **_: Any) -> types.Fake:
        if self.forward is None:
            return input, []
        self.forward.check_shape(input.shape)
        return TensorProto(input.shape, input.dtype, device=input.device), []

    def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> types.Backward:
        return _rounded(grad_output, self.backward), ()


def _rounded(x: torch.Tensor, quantizer: Optional[Quantizer]) -> torch.Tensor:
    if quantizer is None:
        return x
    shape = tuple(x.shape)
    quantizer.check_shape(shape)
    buffers = dict(zip(quantizer._describe_buffers(shape), quantize_tensor(x.contiguous(), quantizer), strict=True))
    return QuantizedTensorStorage.from_metadata(buffers, quantizer.create_metadata(shape, x.dtype)).dequantize()
