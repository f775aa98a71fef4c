"""What fakes return: tensors without data, every one made from a TensorProto; and the mode that tensors are fakes of."""

import contextlib
import dataclasses
import math
from typing import Any

import torch
from torch._guards import detect_fake_mode

from te_dynamo.quantized.quantizers import Quantizer
from te_dynamo.quantized.tensor_proto import TensorProto


def fake_mode_of(values: Any) -> contextlib.AbstractContextManager[Any]:
    """The fake mode of the tensors among `values`, or nothing where none is a fake."""
    return detect_fake_mode(values) or contextlib.nullcontext()


def of_proto(proto: TensorProto) -> torch.Tensor:
    """The plain tensor that `proto` describes; whether a result requires grad is autograd's to say."""
    assert not proto.is_quantized, "a quantized proto gives buffers: use `quantized`"
    return dataclasses.replace(proto, requires_grad=False).create_tensor()


def plain(shape: tuple[int, ...], dtype: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    """A tensor of that shape and dtype on x's device."""
    return of_proto(TensorProto(shape, dtype, device=x.device))


def like(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A contiguous tensor of x's shape, device and, by default, dtype."""
    return plain(tuple(x.shape), dtype or x.dtype, x)


def row_statistic(x: torch.Tensor) -> torch.Tensor:
    """One fp32 number a row of x read as [M, K]: shape (M,)."""
    return plain((math.prod(x.shape[:-1]),), torch.float32, x)


def column_sums(x: torch.Tensor) -> torch.Tensor:
    """One fp32 number a column of x read as [M, K]: shape (K,)."""
    return plain((x.shape[-1],), torch.float32, x)


def quantized(x: torch.Tensor, quantizer: Quantizer) -> list[torch.Tensor]:
    """The buffers of x quantized, in the order of `TensorProto.inner_names`."""
    return TensorProto(tuple(x.shape), x.dtype, quantizer, device=x.device).create_buffers()


def quantized_stack(x: torch.Tensor, shape: tuple[int, int], scales: int, quantizer: Quantizer) -> list[torch.Tensor]:
    """The buffers of a stack of that shape, of tensors like x: of one scale each that many, else those of a tensor of that shape."""
    buffers = TensorProto(shape, x.dtype, quantizer, device=x.device).create_buffers()
    return [*buffers[:-1], plain((scales,), torch.float32, x)] if quantizer.one_scale else buffers
