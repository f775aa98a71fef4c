"""The storage of Float8BlockQuantizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_dynamo.kernels.layouts.block import BLOCK, BlockForm
from te_dynamo.quantized.storage import QuantizedTensorStorage
from te_dynamo.quantized.storages.blocks import spread

if TYPE_CHECKING:
    from te_dynamo.quantized.quantizers import Float8BlockQuantizer


class Float8BlockTensorStorage(QuantizedTensorStorage):
    """FP8 with an fp32 scale for each 1x128 or 128x128 values: data [M, K], transpose [K, M^16] and their scales."""

    _FLATTEN_TENSOR_BUFFERS = BlockForm.NAMES

    quantizer: Float8BlockQuantizer
    data: torch.Tensor
    scale_inv: torch.Tensor
    transpose: torch.Tensor
    columnwise_scale_inv: torch.Tensor

    def _rows(self) -> torch.Tensor:
        return self._values(self.data, self.scale_inv)

    def _columns(self) -> torch.Tensor:
        return self._values(self.transpose, self.columnwise_scale_inv).t()

    def _values(self, data: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
        """data [outer, contracted] in fp32; 1D scales lie with the contracted blocks first."""
        shape = (data.shape[0], data.shape[1])
        if self.quantizer.block_dims == 1:
            return data.to(torch.float32) * spread(scale_inv.t(), (1, BLOCK), shape)
        return data.to(torch.float32) * spread(scale_inv, (BLOCK, BLOCK), shape)
