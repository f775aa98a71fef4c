"""`TensorProto`: a plain or quantized tensor without its data, from which every fake and every allocation is made.

(Seed 003: shapes and dtypes flow through proto arithmetic, so that the fake of an operation and its kernel cannot disagree.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from te_dynamo.errors import QuantizationError, UnsupportedError
from te_dynamo.quantized.quantizers import Quantizer
from te_dynamo.quantized.storage import QuantizedTensorStorage, check_buffers
from te_dynamo.quantized.tensor import QuantizedTensor, from_buffers


@dataclasses.dataclass
class TensorProto:
    """shape, dtype (of the values, the user's precision), quantizer (None: a plain tensor), requires_grad, device.

    The proto has its own quantizer: `update_usage` never touches the one it was made with (a quantizer is a frozen value).

    Raises TypeError for a field of another type, InputError for a shape or dtype that the quantizer cannot hold.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    quantizer: Quantizer | None = None
    requires_grad: bool = False
    device: torch.device | None = None

    def __post_init__(self) -> None:
        self.shape = tuple(self.shape)
        if not all(isinstance(size, (int, torch.SymInt)) and size >= 0 for size in self.shape):
            raise TypeError(f"TensorProto.shape: expected sizes, integers from 0, got {self.shape}")
        if not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"TensorProto.dtype: expected a torch.dtype, got {self.dtype!r}")
        if isinstance(self.device, str):
            self.device = torch.device(self.device)
        if self.quantizer is not None and not isinstance(self.quantizer, Quantizer):
            raise TypeError(f"TensorProto.quantizer: expected a Quantizer or None, got {type(self.quantizer).__name__}")
        if self.quantizer is not None:
            self.quantizer.check_shape(self.shape)
            self.quantizer.check_dtype(self.dtype)

    @property
    def is_quantized(self) -> bool:
        """Whether the tensor is held in low precision."""
        return self.quantizer is not None

    def inner_names(self) -> tuple[str, ...]:
        """Names of the buffers of a quantized tensor, in the order in which `te.quantize` returns them."""
        return tuple(self._buffers()) if self.is_quantized else ()

    def create_metadata(self) -> dict[str, Any]:
        """What `__tensor_unflatten__` needs beside the buffers."""
        return self._quantizer().create_metadata(self.shape, self.dtype)

    def create_buffers(self) -> list[torch.Tensor]:
        """The uninitialised buffers of a quantized tensor, in the order of `inner_names`."""
        return list(self._quantizer().alloc_tensors(self.shape, self.device).values())

    def create_tensor(self) -> torch.Tensor:
        """An uninitialised tensor of this description: plain, or a QuantizedTensor.

        Raises UnsupportedError inside a compiled function for one that requires grad: no graph makes a leaf of autograd's.
        """
        if self.requires_grad and torch.compiler.is_dynamo_compiling():
            raise UnsupportedError(
                f"TensorProto.create_tensor: a compiled function cannot make a tensor of shape {self.shape} that requires grad; "
                "describe one that does not (requires_grad=False, or the proto of a detached tensor)"
            )
        if self.quantizer is None:
            return torch.empty(self.shape, dtype=self.dtype, device=self.device, requires_grad=self.requires_grad)
        return from_buffers(self.create_buffers(), self.shape, self.dtype, self.quantizer, self.requires_grad)

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Keeps or drops the rowwise or columnwise buffers of the described tensor; None leaves a usage as it is."""
        self.quantizer = self._quantizer().with_usage(rowwise_usage, columnwise_usage)

    def check_layout(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Raises QuantizationError, naming the slot, unless `buffers` are what this describes.

        Names and their order, and what `check_buffers` compares.
        """
        quantizer, described = self._quantizer(), self._buffers()
        if list(buffers) != list(described):
            raise QuantizationError(
                f"{quantizer.describe()} of shape {self.shape}: expected the buffers {list(described)}, got {list(buffers)}"
            )
        check_buffers(quantizer, self.shape, described, buffers, self.device)

    def _buffers(self) -> dict[str, Any]:
        return self._quantizer()._describe_buffers(self.shape)

    def _quantizer(self) -> Quantizer:
        if self.quantizer is None:
            raise QuantizationError("this TensorProto describes a plain tensor: it has no quantizer")
        return self.quantizer


def to_tensor_proto(tensor: torch.Tensor | QuantizedTensorStorage) -> TensorProto:
    """The proto of a plain tensor, a quantized tensor or a quantized storage. No data is read."""
    if isinstance(tensor, QuantizedTensorStorage):
        return TensorProto(tensor.shape, tensor.dtype, tensor.quantizer, device=tensor.device)
    quantizer = tensor.quantizer if isinstance(tensor, QuantizedTensor) else None
    return TensorProto(tuple(tensor.shape), tensor.dtype, quantizer, tensor.requires_grad, tensor.device)


def buffer_protos(proto: TensorProto) -> list[TensorProto]:
    """A plain proto for each buffer of a quantized tensor, in the order of `inner_names`."""
    return [TensorProto(shape, dtype, device=proto.device) for shape, dtype in proto._buffers().values()]
