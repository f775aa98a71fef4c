"""The storage of NVFP4Quantizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_dynamo.kernels.layouts.nvfp4 import BLOCK, HADAMARD_SIGNS, NVFP4Form
from te_dynamo.kernels.layouts.tiled_scales import plain_scales
from te_dynamo.quantized.storage import QuantizedTensorStorage
from te_dynamo.quantized.storages.blocks import spread

if TYPE_CHECKING:
    from te_dynamo.quantized.quantizers import NVFP4Quantizer


class NVFP4TensorStorage(QuantizedTensorStorage):
    """4-bit values, two a byte, with an e4m3 scale for each 16 and an fp32 amax: rows and columns each with their own."""

    _FLATTEN_TENSOR_BUFFERS = NVFP4Form.NAMES

    quantizer: NVFP4Quantizer
    data: torch.Tensor
    scale_inv: torch.Tensor
    amax: torch.Tensor
    columnwise_data: torch.Tensor
    columnwise_scale_inv: torch.Tensor
    columnwise_amax: torch.Tensor

    def _rows(self) -> torch.Tensor:
        return _values(self.data, self.scale_inv, self.amax)

    def _columns(self) -> torch.Tensor:
        values = _values(self.columnwise_data, self.columnwise_scale_inv, self.columnwise_amax)
        return (_rotated_back(values) if self.quantizer.hadamard else values).t()


def _values(data: torch.Tensor, scale_inv: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """The fp32 values [outer, 2 * bytes] of packed data [outer, bytes]."""
    elements = _e2m1(torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2))
    scales = plain_scales(scale_inv).view(torch.float8_e4m3fn).to(torch.float32)
    values = elements * spread(scales, (1, BLOCK), (elements.shape[0], elements.shape[1]))
    return values * (amax / torch.full_like(amax, 2688.0))


def _e2m1(codes: torch.Tensor) -> torch.Tensor:
    """The fp32 values of four-bit codes: 0, .5, 1, 1.5, 2, 3, 4, 6, and from code 8 on the same negative."""
    count = (codes & 7).to(torch.float32)
    magnitude = torch.where(count < 4, count * 0.5, torch.where(count < 6, count - 2, count * 2 - 8))
    return torch.where(codes > 7, -magnitude, magnitude)


def _rotated_back(values: torch.Tensor) -> torch.Tensor:
    """values [R, 16 * n] times the inverse of diag(HADAMARD_SIGNS) H16 / 4, 16 columns at a time, by four butterflies."""
    blocks = values.unflatten(1, (-1, 16))
    for _ in range(4):
        even, odd = blocks[..., 0::2], blocks[..., 1::2]
        blocks = torch.cat((even + odd, even - odd), dim=-1)
    signs = torch.tensor(HADAMARD_SIGNS, dtype=torch.float32, device=values.device)
    return (blocks * 0.25 * signs).flatten(1)
