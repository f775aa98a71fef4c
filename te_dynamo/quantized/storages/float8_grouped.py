"""The storage of Float8GroupedQuantizer."""

from __future__ import annotations

import torch

from te_dynamo.kernels.layouts.tensor import GroupedForm
from te_dynamo.quantized.storage import QuantizedTensorStorage


class Float8GroupedTensorStorage(QuantizedTensorStorage):
    """FP8 with one scale a group: data [G, N, K], transpose [G, K, N^16], scale_inv [G]."""

    _FLATTEN_TENSOR_BUFFERS = GroupedForm.NAMES

    data: torch.Tensor
    transpose: torch.Tensor
    scale_inv: torch.Tensor

    def _rows(self) -> torch.Tensor:
        return (self.data.to(torch.float32) * self.scale_inv[:, None, None]).flatten(0, 1)

    def _columns(self) -> torch.Tensor:
        transpose = self.transpose[:, :, : self.shape[1]]
        return (transpose.transpose(1, 2).to(torch.float32) * self.scale_inv[:, None, None]).flatten(0, 1)
