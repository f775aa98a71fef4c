"""The storage of Float8CurrentScalingQuantizer."""

from __future__ import annotations

import torch

from te_dynamo.kernels.layouts.tensor import TensorForm
from te_dynamo.quantized.storage import QuantizedTensorStorage


class Float8TensorStorage(QuantizedTensorStorage):
    """FP8 with one scale a tensor: data [M, K], transpose [K, M^16], scale_inv [1]."""

    _FLATTEN_TENSOR_BUFFERS = TensorForm.NAMES

    data: torch.Tensor
    transpose: torch.Tensor
    scale_inv: torch.Tensor

    def _rows(self) -> torch.Tensor:
        return self.data.to(torch.float32) * self.scale_inv

    def _columns(self) -> torch.Tensor:
        return self.transpose.t().to(torch.float32) * self.scale_inv
