"""Quantized storages: the buffers of a tensor held in low precision, with the value that says how to read them.

A storage flattens to its buffers and metadata and is rebuilt from them by the class's qualified name, so that a graph needs
to carry only tensors and constants.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from te_dynamo.errors import QuantizationError
from te_dynamo.quantizers import Quantizer

__all__ = ["Float8TensorStorage", "QuantizedTensorStorage"]

_REGISTRY: dict[str, type[QuantizedTensorStorage]] = {}


class QuantizedTensorStorage:
    """Base of the storages.

    shape, dtype: of the values, in the user's precision.
    quantizer: how they are held.
    Buffers are attributes named in `_FLATTEN_TENSOR_BUFFERS`; one that its usage does not need is None.
    """

    _FLATTEN_TENSOR_BUFFERS: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        buffers: Mapping[str, torch.Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        quantizer: Quantizer,
    ):
        expected = list(quantizer._describe_buffers(tuple(shape)))
        missing = [name for name in expected if buffers.get(name) is None]
        if missing:
            raise QuantizationError(
                f"{type(self).__name__}: buffer {missing[0]!r} is missing for {quantizer.describe()} of shape {tuple(shape)}; "
                f"expected {expected}, got {[n for n, b in buffers.items() if b is not None]}"
            )
        self.shape, self.dtype, self.quantizer = tuple(shape), dtype, quantizer
        for name in self._FLATTEN_TENSOR_BUFFERS:
            setattr(self, name, buffers.get(name))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _REGISTRY[cls.__qualname__] = cls

    @staticmethod
    def from_metadata(buffers: Mapping[str, torch.Tensor], metadata: Mapping[str, Any]) -> QuantizedTensorStorage:
        """The storage that `metadata` (of a quantizer's `create_metadata`) names, over `buffers`."""
        return _REGISTRY[metadata["cls"]](buffers, **metadata["kwargs"])

    @property
    def device(self) -> torch.device:
        """Where the buffers are."""
        return next(b.device for b in self.buffers().values())

    def buffers(self) -> dict[str, torch.Tensor]:
        """Name -> buffer, of those that are there."""
        named = ((name, getattr(self, name)) for name in self._FLATTEN_TENSOR_BUFFERS)
        return {name: buffer for name, buffer in named if buffer is not None}

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return list(self.buffers()), self.quantizer.create_metadata(self.shape, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, torch.Tensor], metadata: Mapping[str, Any], *_: Any
    ) -> QuantizedTensorStorage:
        return QuantizedTensorStorage.from_metadata(inner, metadata)

    def dequantize(self) -> torch.Tensor:
        """The values in the user's precision, shape `self.shape`."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({tuple(self.shape)}, {self.dtype}, {self.quantizer.describe()})"


class Float8TensorStorage(QuantizedTensorStorage):
    """FP8 with one scale a tensor: data [M, K], transpose [K, M^16], scale_inv [1]."""

    _FLATTEN_TENSOR_BUFFERS = ("data", "transpose", "scale_inv")

    data: torch.Tensor | None
    transpose: torch.Tensor | None
    scale_inv: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        if self.data is not None:
            values = self.data.to(torch.float32)
        else:
            assert self.transpose is not None
            values = self.transpose[:, : math.prod(self.shape[:-1])].t().to(torch.float32)
        return (values * self.scale_inv).to(self.dtype).reshape(self.shape)
