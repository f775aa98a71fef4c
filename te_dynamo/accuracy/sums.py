"""Sums over one tensor that say how far it is from what it stands for. They add up over steps; `rows.py` makes decibels of them.

    signal = sum exact^2        noise = sum (found - exact)^2        SNR = 10 log10(signal / noise) dB

Each function gives float64 numbers on the tensors' own device: nothing waits for a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from te_dynamo.quantized.quantizers import Quantizer
from te_dynamo.quantized.storage import QuantizedTensorStorage

ERROR = ("signal", "noise")
QUANTIZED = (*ERROR, "saturated", "flushed", "zero", "count", "amax")

_LARGEST_CODE = {torch.float8_e4m3fn: 0x7E, torch.float8_e5m2: 0x7B, torch.uint8: 0x77}
"""Of the data of a quantized tensor, as bytes: the largest finite value; of NVFP4 two of them in a byte."""


def error_sums(exact: Tensor, found: Tensor) -> Tensor:
    """ERROR of two tensors of as many values."""
    exact = exact.detach().flatten().float()
    found = found.detach().flatten().to(torch.float32, copy=True)
    return _error_sums(exact, found, _amax(exact), torch.empty_like(exact))


def _error_sums(exact: Tensor, found: Tensor, amax: Tensor, scratch: Tensor) -> Tensor:
    """The same of fp32 tensors; `found` and `scratch` are written over. Squares are of values over the amax: none leaves fp32's range."""
    unit = torch.where(amax == 0, 1.0, amax)
    scaled = torch.div(exact, unit, out=scratch), found.sub_(exact).div_(unit)
    return (torch.stack([torch.linalg.vector_norm(each) for each in scaled]).double() * unit.double()).square()


def quantized_sums(values: Tensor, quantizer: Quantizer, buffers: list[Tensor], columnwise: bool = False) -> Tensor:
    """QUANTIZED of `values` as a GEMM reads them from `buffers`, which the quantizer made: rowwise, or columnwise.

    saturated, flushed, zero: how many values are above the largest one that their scale can hold; are not zero but held as zero; are zero.
    """
    metadata = quantizer.create_metadata(tuple(values.shape), torch.float32)
    named = dict(zip(quantizer.buffer_names(), buffers, strict=True))
    held = QuantizedTensorStorage.from_metadata(named, metadata).with_usage(not columnwise, columnwise)
    values = values.detach().float()
    largest = _largest(held, columnwise).mul_(1 + 2**-20)  # a scale that was rounded is no saturation
    size = values.abs()
    saturated = torch.count_nonzero(torch.gt(size, largest, out=largest))
    del largest
    found, amax, count = held.dequantize(), _amax(values), torch.tensor(values.numel(), device=values.device)
    not_zero = torch.count_nonzero(values)
    numbers = saturated, not_zero - torch.count_nonzero(found), count - not_zero, count, amax
    return torch.cat(
        (_error_sums(values, found, amax, scratch=size), torch.stack([number.double() for number in numbers]))
    )


def _amax(values: Tensor) -> Tensor:
    """0 of no values."""
    return torch.stack(torch.aminmax(values)).abs().amax() if values.numel() else values.new_zeros(())


def _largest(held: QuantizedTensorStorage, columnwise: bool) -> Tensor:
    """For each value the largest that its scale can hold."""
    data = held.quantizer.operand(held.buffers(), columnwise)[0]
    largest = torch.full_like(data.view(torch.uint8), _LARGEST_CODE[data.dtype]).view(data.dtype)
    return held.map(lambda buffer: largest if buffer is data else buffer).dequantize()
