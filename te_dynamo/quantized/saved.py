"""A `QuantizedTensor` in a file: what is written, and the function that torch.load calls.

`import te_dynamo` imports this file, so that `torch.load(path, weights_only=True)` reads such a file from then on. The
rest of the package is imported, by its public names, when a tensor is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import te_dynamo
from te_dynamo.errors import QuantizationError

if TYPE_CHECKING:
    from te_dynamo.quantized.tensor import QuantizedTensor


def storable(buffer: torch.Tensor) -> torch.Tensor:
    """Bytes in place of float8, which pickle.loads does not read back (torch 2.11 to 2.15; torch.load does)."""
    return buffer.view(torch.uint8) if buffer.dtype.itemsize == 1 else buffer


def _stored(buffer: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """The buffer that `storable` took: bytes as the 8-bit dtype they were."""
    return buffer.view(dtype) if dtype is not None and dtype.itemsize == buffer.dtype.itemsize == 1 else buffer


def load(
    buffers: dict[str, torch.Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    quantizer: str,
    fields: dict[str, Any],
    requires_grad: bool,
    is_parameter: bool,
) -> QuantizedTensor:
    """What a pickle calls; it names the quantizer, so that a file may be read with weights_only=True."""
    cls = getattr(te_dynamo, quantizer) if quantizer in dir(te_dynamo) else None
    if not (isinstance(cls, type) and issubclass(cls, te_dynamo.Quantizer)):
        raise QuantizationError(
            f"QuantizedTensor: a file names the quantizer {quantizer!r}, which te_dynamo does not have"
        )
    made = cls(**fields)
    dtypes = {name: dtype for name, (_, dtype) in made._describe_buffers(shape).items()}
    buffers = {name: _stored(buffer, dtypes.get(name)) for name, buffer in buffers.items()}
    te_dynamo.TensorProto(shape, dtype, made).check_layout(buffers)
    tensor = te_dynamo.QuantizedTensor(buffers, shape, dtype, made, requires_grad)
    return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor  # type: ignore[return-value]


torch.serialization.add_safe_globals([load])
