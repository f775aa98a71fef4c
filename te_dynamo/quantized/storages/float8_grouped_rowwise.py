"""The storage of Float8GroupedRowwiseQuantizer."""

from __future__ import annotations

import torch

from te_dynamo.kernels.layouts.row import RowForm
from te_dynamo.quantized.storage import QuantizedTensorStorage


class Float8GroupedRowwiseTensorStorage(QuantizedTensorStorage):
    """FP8 with a scale a row of each group: data [G, N, K], scale_inv [G, N], transpose [G, K, N^16], columnwise_scale_inv [G, K]."""

    _FLATTEN_TENSOR_BUFFERS = RowForm.NAMES

    data: torch.Tensor
    scale_inv: torch.Tensor
    transpose: torch.Tensor
    columnwise_scale_inv: torch.Tensor

    def _rows(self) -> torch.Tensor:
        return (self.data.to(torch.float32) * self.scale_inv[:, :, None]).flatten(0, 1)

    def _columns(self) -> torch.Tensor:
        transpose = self.transpose[:, :, : self.shape[1]].transpose(1, 2)
        return (transpose.to(torch.float32) * self.columnwise_scale_inv[:, None, :]).flatten(0, 1)
