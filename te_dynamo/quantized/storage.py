"""Quantized storages: the buffers of a tensor held in low precision, with the value that says how to read them.

A storage flattens to its buffers and metadata and is rebuilt from them by the class's qualified name, so that a graph needs
to carry only tensors and constants. One file a format in `te_dynamo/quantized/storages`; a format's buffers: its quantizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from te_dynamo.errors import QuantizationError
from te_dynamo.kernels.layouts.sizes import Buffers, rows_and_columns

if TYPE_CHECKING:
    from te_dynamo.quantized.quantizers import Quantizer

_REGISTRY: dict[str, type[QuantizedTensorStorage]] = {}


class QuantizedTensorStorage:
    """Base of the storages.

    shape, dtype: of the values, in the user's precision.
    quantizer: how they are held.
    Buffers are attributes named in `_FLATTEN_TENSOR_BUFFERS`; one that its usage does not need is None.

    Raises QuantizationError for a quantizer of another format, and for a buffer that its usages need and that is not given or
    has another layout than it describes.
    """

    _FLATTEN_TENSOR_BUFFERS: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        buffers: Mapping[str, torch.Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        quantizer: Quantizer,
    ):
        described = quantizer._describe_buffers(tuple(shape))
        expected = list(described)
        named = quantizer.create_metadata(tuple(shape), dtype)["cls"]
        if named != type(self).__qualname__:
            raise QuantizationError(f"{type(self).__name__}: {quantizer.describe()} is held by {named}")
        missing = [name for name in expected if buffers.get(name) is None]
        if missing:
            raise QuantizationError(
                f"{type(self).__name__}: buffer {missing[0]!r} is missing for {quantizer.describe()} of shape {tuple(shape)}; "
                f"expected {expected}, got {[n for n, b in buffers.items() if b is not None]}"
            )
        if not torch.compiler.is_dynamo_compiling():
            check_buffers(quantizer, tuple(shape), described, buffers, buffers[expected[0]].device)
        self.shape, self.dtype, self.quantizer = tuple(shape), dtype, quantizer
        for name in self._FLATTEN_TENSOR_BUFFERS:
            setattr(self, name, buffers[name] if name in expected else None)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        known = _REGISTRY.get(cls.__qualname__, cls)
        if known.__module__ != cls.__module__:
            raise TypeError(
                f"a quantized storage is found by its class's name, and {known.__module__} has a {cls.__qualname__}: "
                "give this one another name"
            )
        _REGISTRY[cls.__qualname__] = cls

    @staticmethod
    def from_metadata(buffers: Mapping[str, torch.Tensor], metadata: Mapping[str, Any]) -> QuantizedTensorStorage:
        """The storage that `metadata` (of a quantizer's `create_metadata`) names, over `buffers`."""
        if metadata["cls"] not in _REGISTRY:
            raise QuantizationError(
                f"no quantized storage is named {metadata['cls']!r}; there is {', '.join(sorted(_REGISTRY))}"
            )
        return _REGISTRY[metadata["cls"]](buffers, **metadata["kwargs"])

    @property
    def device(self) -> torch.device:
        """Where the buffers are."""
        return self.buffers()[0].device

    def buffers(self) -> list[torch.Tensor]:
        """The buffers that are there, in the order in which `te.quantize` returns them."""
        return list(self.named_buffers().values())

    def named_buffers(self) -> dict[str, torch.Tensor]:
        """Name -> buffer, of those that are there."""
        named = ((name, getattr(self, name)) for name in self._FLATTEN_TENSOR_BUFFERS)
        return {name: buffer for name, buffer in named if buffer is not None}

    def with_usage(self, rowwise: bool | None = None, columnwise: bool | None = None) -> QuantizedTensorStorage:
        """The same buffers, less those that only a dropped usage needs; None keeps what is there.

        Raises QuantizationError for a usage that was never allocated: it takes the values to make one.
        """
        for name, wanted, there in (
            ("rowwise", rowwise, self.quantizer.rowwise),
            ("columnwise", columnwise, self.quantizer.columnwise),
        ):
            if wanted and not there:
                raise QuantizationError(
                    f"{name} usage of {self.quantizer.describe()} of shape {self.shape} was never allocated; "
                    "quantize the tensor with that usage on"
                )
        quantizer = self.quantizer.with_usage(rowwise, columnwise)
        return type(self)(self.named_buffers(), self.shape, self.dtype, quantizer)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> QuantizedTensorStorage:
        """A storage of `function(buffer)` for each buffer."""
        buffers = {name: function(buffer) for name, buffer in self.named_buffers().items()}
        return type(self)(buffers, self.shape, self.dtype, self.quantizer)

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return list(self.named_buffers()), self.quantizer.create_metadata(self.shape, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, torch.Tensor], metadata: Mapping[str, Any], *_: Any
    ) -> QuantizedTensorStorage:
        return QuantizedTensorStorage.from_metadata(inner, metadata)

    def dequantize(self) -> torch.Tensor:
        """The values in the user's precision, shape `self.shape`: computed in fp32 and rounded once.

        Rows where there are any, otherwise columns. Plain PyTorch, so that a compiler fuses it with its reader.
        """
        rows, columns = rows_and_columns(self.shape)
        values = self._rows() if self.quantizer.rowwise else self._columns()
        return values[:rows, :columns].to(self.dtype).reshape(self.shape)

    def _rows(self) -> torch.Tensor:
        """The fp32 values [M, K] (or more, to be cut off) of the rowwise buffers."""
        raise NotImplementedError

    def _columns(self) -> torch.Tensor:
        """The fp32 values [M, K] (or more, to be cut off) of the columnwise buffers."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({tuple(self.shape)}, {self.dtype}, {self.quantizer.describe()})"


def check_buffers(
    quantizer: Quantizer,
    shape: tuple[int, ...],
    described: Buffers,
    buffers: Mapping[str, torch.Tensor],
    device: torch.device | None = None,
) -> None:
    """Raises QuantizationError, naming the slot, unless `buffers` has what `quantizer` describes for a tensor of that shape.

    Shapes, dtypes, strides (every buffer is contiguous; a dimension of size 1 may have any stride) and the device, if one is
    given. Symbolic sizes are not compared: that would be a guard of a graph.
    """
    for name, (sizes, dtype) in described.items():
        buffer = buffers[name]
        known = all(type(size) is int for size in (*sizes, *buffer.shape))
        if known and buffer.shape != sizes:
            wrong = f"shape {tuple(buffer.shape)}, expected {tuple(sizes)}"
        elif buffer.dtype != dtype:
            wrong = f"dtype {buffer.dtype}, expected {dtype}"
        elif device is not None and not _is_on(buffer, device):
            wrong = f"device {buffer.device}, expected {device}"
        elif known and not buffer.is_contiguous():
            wrong = f"stride {buffer.stride()}, expected the contiguous one of {tuple(sizes)}"
        else:
            continue
        raise QuantizationError(f"{quantizer.describe()} of shape {shape}: buffer {name!r} has {wrong}")


def _is_on(buffer: torch.Tensor, device: torch.device) -> bool:
    """Whether the buffer is there; a device without an index is any of its type."""
    return buffer.device == device or (device.index is None and buffer.device.type == device.type)
