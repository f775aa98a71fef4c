"""The storage of MXFP8Quantizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_dynamo.kernels.layouts.mxfp8 import BLOCK, MXFP8Form, powers_of_two
from te_dynamo.kernels.layouts.tiled_scales import plain_scales
from te_dynamo.quantized.storage import QuantizedTensorStorage
from te_dynamo.quantized.storages.blocks import spread

if TYPE_CHECKING:
    from te_dynamo.quantized.quantizers import MXFP8Quantizer


class MXFP8TensorStorage(QuantizedTensorStorage):
    """FP8 with an E8M0 scale for each 32 values: data [M, K], columnwise_data [M, K] or [K, M^16], and their scales. In
    blocks of 32x32 there is no columnwise_data: `data` is that of both usages."""

    _FLATTEN_TENSOR_BUFFERS = MXFP8Form.NAMES

    quantizer: MXFP8Quantizer
    data: torch.Tensor
    scale_inv: torch.Tensor
    columnwise_data: torch.Tensor
    columnwise_scale_inv: torch.Tensor

    def _rows(self) -> torch.Tensor:
        return _values(self.data, plain_scales(self.scale_inv), (1, BLOCK))

    def _columns(self) -> torch.Tensor:
        scales = plain_scales(self.columnwise_scale_inv)
        if self.quantizer.scale_block == BLOCK:
            data = self.data if self.quantizer.block_dims == 2 else self.columnwise_data
            return _values(data, scales.t() if self.quantizer.swizzled else scales, (BLOCK, 1))
        return _values(self.columnwise_data, scales, (1, BLOCK)).t()


def _values(data: torch.Tensor, codes: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """data in fp32, each value times 2^(code - 127) of its block, exactly; code 255 is NaN."""
    shape = (data.shape[0], data.shape[1])
    return data.to(torch.float32) * spread(powers_of_two(codes), block, shape)
