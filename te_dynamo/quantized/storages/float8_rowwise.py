"""The storage of Float8RowwiseQuantizer."""

from __future__ import annotations

import torch

from te_dynamo.kernels.layouts.row import RowForm
from te_dynamo.quantized.storage import QuantizedTensorStorage


class Float8RowwiseTensorStorage(QuantizedTensorStorage):
    """FP8 with an fp32 scale a row: data [M, K], scale_inv [M], and of x^T transpose [K, M^16], columnwise_scale_inv [K]."""

    _FLATTEN_TENSOR_BUFFERS = RowForm.NAMES

    data: torch.Tensor
    scale_inv: torch.Tensor
    transpose: torch.Tensor
    columnwise_scale_inv: torch.Tensor

    def _rows(self) -> torch.Tensor:
        return self.data.to(torch.float32) * self.scale_inv[:, None]

    def _columns(self) -> torch.Tensor:
        return self.transpose.t().to(torch.float32) * self.columnwise_scale_inv
