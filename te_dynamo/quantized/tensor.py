"""`QuantizedTensor`: a torch.Tensor over the buffers of a quantized storage.

It has the shape, dtype and device of the values and moves, clones, saves and compiles as one tensor. What computes with it
computes with the dequantized values and gives a plain tensor, views too; what would write to it raises. A write to such a view
goes to a copy of the values: torch counts it as one of the tensor, and the next use of that raises.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

import te_dynamo.quantized.storages  # noqa: F401  # registers them
from te_dynamo.cache_key import sources_digest
from te_dynamo.errors import UnsupportedError
from te_dynamo.quantized.saved import load, storable
from te_dynamo.quantized.storage import QuantizedTensorStorage

if TYPE_CHECKING:
    from te_dynamo.quantized.quantizers import Quantizer

aten = torch.ops.aten


class QuantizedTensor(torch.Tensor):
    """x of `shape` and `dtype`, held as `quantizer` says. Made by `quantizer.quantize(x)`.

    Copies and moves keep the format (`clone`, `detach`, `.to(device)`, `copy.deepcopy`, `torch.save`); `dequantize()` gives
    the values. No gradient flows into the tensor it was made from.

    Each buffer is an attribute, its name with an underscore before it: `data` means another thing on a tensor.
    """

    quantizer: Quantizer
    _flat: tuple[list[str], dict[str, Any]]

    @staticmethod
    def __new__(
        cls,
        buffers: Mapping[str, torch.Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        quantizer: Quantizer,
        requires_grad: bool = False,
    ) -> QuantizedTensor:
        storage = QuantizedTensorStorage.from_metadata(buffers, quantizer.create_metadata(shape, dtype))
        self = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=storage.device, requires_grad=requires_grad
        )
        self.quantizer = quantizer
        # A call of a compiled function asks each weight twice for this; to make it took 6 us each time.
        self._flat = [f"_{name}" for name in quantizer.buffer_names()], {"dtype": dtype, "quantizer": quantizer}
        for name, buffer in storage.named_buffers().items():
            setattr(self, f"_{name}", buffer)
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def dequantize(self) -> torch.Tensor:
        """The values, a plain tensor. A gradient flows into this tensor as it is."""
        return aten.alias_copy(self)

    def share_memory_(self) -> QuantizedTensor:
        """Moves the buffers to memory that processes share. torch's own would read a storage that is not there."""
        for buffer in self.buffers():
            buffer.share_memory_()
        return self

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(f"{self!r} has no memory of its own to share: take dequantize() or a buffer")

    def buffers(self) -> list[torch.Tensor]:
        """The buffers, in the order in which `te.quantize` returns them."""
        return list(self.named_buffers().values())

    def named_buffers(self) -> dict[str, torch.Tensor]:
        """Name -> buffer, in the same order. Not inside a compiled function: `buffers` is.

        Raises UnsupportedError if a view of the tensor was written. Every use asks, so every compilation too.
        """
        self._check_version()
        return {name.removeprefix("_"): getattr(self, name) for name in self._flat[0]}

    def _check_version(self) -> None:
        try:
            written = self._version
        except RuntimeError:  # made in inference mode, and so without a counter: to ask before takes twice the time
            return
        if written:
            raise UnsupportedError(
                f"a view of {self!r} was written, as in q[0].add_(1): views hold a copy of the values, and the write is lost. "
                "Compute with dequantize() and quantize the result"
            )

    def to_storage(self) -> QuantizedTensorStorage:
        """The storage over the same buffers."""
        metadata = self.quantizer.create_metadata(tuple(self.shape), self.dtype)
        return QuantizedTensorStorage.from_metadata(self.named_buffers(), metadata)

    def with_usage(self, rowwise: bool | None = None, columnwise: bool | None = None) -> QuantizedTensor:
        """Over the same buffers, less those that only a dropped usage needs; see `QuantizedTensorStorage.with_usage`."""
        return from_storage(self.to_storage().with_usage(rowwise, columnwise), self.requires_grad)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise UnsupportedError(_no_write("item assignment", self))

    @property
    def data(self) -> torch.Tensor:
        """The tensor without its gradient history, as on every tensor."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise UnsupportedError(_no_write("assignment to data", self))

    # What the compiler asks of a tensor made of tensors.

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        self._check_version()
        return self._flat

    @classmethod
    def __metadata_guard__(cls, compiled: dict[str, Any], given: dict[str, Any]) -> bool:
        """What Dynamo guards instead of equality: layers whose files differ in what the graph does not read share it."""
        mine, its = compiled["quantizer"], given["quantizer"]
        return compiled["dtype"] == given["dtype"] and (mine is its or mine.compiles_as(its))  # each call asks

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, torch.Tensor], metadata: Mapping[str, Any], shape: tuple[int, ...], _: Any
    ) -> QuantizedTensor:
        buffers = {name[1:]: buffer for name, buffer in inner.items()}
        return QuantizedTensor(buffers, tuple(shape), metadata["dtype"], metadata["quantizer"])

    def _stable_hash_for_caching(self) -> str:
        """The key in torch's compile caches. torch's own has the quantizer's type only, and nothing of our sources."""
        layout = [(name, str(tuple(b.shape)), b.dtype, str(b.stride())) for name, b in self.named_buffers().items()]
        parts = (
            type(self).__qualname__,
            str(tuple(self.shape)),
            self.dtype,
            self.device,
            self.requires_grad,
            self.quantizer,
            layout,
        )
        return f"{sources_digest()} {parts!r}"

    @classmethod
    @torch.compiler.disable  # else Dynamo compiles this where it has left the caller, in graphs of its own
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and _is_view_of_ordinary(func, args):
            with torch.inference_mode(False):  # or torch refuses it: a view has its base's version counter
                return cls.__torch_dispatch__(func, types, args, kwargs)
        if func in _KEEPS_FORMAT:
            result = _KEEPS_FORMAT[func](*args, **kwargs)
            if result is not None:
                return return_and_correct_aliasing(func, args, kwargs, result)
        if func in (aten.dequantize.self, aten.alias_copy.default):
            return args[0].to_storage().dequantize()
        _refuse_writes(func, args, kwargs)
        args, kwargs = tree_map_only(QuantizedTensor, lambda q: q._read_by(func), (args, kwargs))
        return func(*args, **kwargs)

    def _read_by(self, func: Any) -> torch.Tensor:
        return self.to_storage().dequantize()

    def _over(self, buffers: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> QuantizedTensor:
        if any(isinstance(buffer, FakeTensor) for buffer in buffers.values()):
            self.quantizer.read_input_amax()  # the graph may return it
        return type(self)(buffers, tuple(self.shape), dtype or self.dtype, self.quantizer)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        fields = {field.name: getattr(self.quantizer, field.name) for field in dataclasses.fields(self.quantizer)}
        is_parameter = getattr(self, "_is_param", False)
        values = (tuple(self.shape), self.dtype, type(self.quantizer).__qualname__, fields)
        buffers = {name: storable(buffer) for name, buffer in self.named_buffers().items()}
        return load, (buffers, *values, self.requires_grad, is_parameter)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        flags = ", requires_grad=True" if self.requires_grad else ""
        return f"QuantizedTensor({tuple(self.shape)}, {self.dtype}, {self.quantizer.describe()}, device='{self.device}'{flags})"


# A graph holds a call of this function: the compiler cannot look into the making of a tensor subclass, and need not.
@torch.compiler.allow_in_graph
def from_buffers(
    buffers: list[torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype, quantizer: Quantizer, requires_grad: bool
) -> QuantizedTensor:
    """The tensor over `buffers`, in the order in which `te.quantize` returns them."""
    names = quantizer._describe_buffers(tuple(shape))
    return QuantizedTensor(dict(zip(names, buffers, strict=True)), tuple(shape), dtype, quantizer, requires_grad)


def from_storage(storage: QuantizedTensorStorage, requires_grad: bool = False) -> QuantizedTensor:
    """The tensor over the buffers of `storage`."""
    buffers = storage.buffers()
    return from_buffers(buffers, storage.shape, storage.dtype, storage.quantizer, requires_grad)


# What keeps the format. Each returns None where it cannot: then the values are dequantized.


def _alias(q: QuantizedTensor) -> QuantizedTensor:
    return q._over(q.named_buffers())


def _same_geometry(q: QuantizedTensor, size: Any, stride: Any, offset: Any = None) -> QuantizedTensor | None:
    """as_strided as the compiler uses it to make an output that is an input."""
    same = tuple(size) == tuple(q.shape) and tuple(stride) == q.stride() and not offset
    return _alias(q) if same else None


def _same_shape(q: QuantizedTensor, size: Any) -> QuantizedTensor | None:
    return _alias(q) if tuple(size) == tuple(q.shape) else None


def _clone(q: QuantizedTensor, memory_format: Any = None) -> QuantizedTensor:
    return q._over({name: buffer.clone() for name, buffer in q.named_buffers().items()})


def _moved(
    q: QuantizedTensor,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: torch.device | None = None,
    pin_memory: Any = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> QuantizedTensor | None:
    """A copy on `device`. Another floating dtype is that of the values from now on: `module.bfloat16()` keeps the format."""
    dtype = dtype or q.dtype
    if not dtype.is_floating_point:
        return None
    named = q.named_buffers().items()
    return q._over({n: b.to(device or b.device, non_blocking=non_blocking, copy=True) for n, b in named}, dtype)


_KEEPS_FORMAT: dict[Any, Callable[..., QuantizedTensor | None]] = {
    aten.alias.default: _alias,
    aten.detach.default: _alias,
    aten.as_strided.default: _same_geometry,
    aten.view.default: _same_shape,
    aten.clone.default: _clone,
    aten._to_copy.default: _moved,
    torch.ops.prims.convert_element_type.default: _moved,  # what Inductor makes of it
}


def _is_view_of_ordinary(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether `func` makes a view of a quantized tensor that was made outside of inference mode."""
    views = any(result.alias_info is not None for result in func._schema.returns)
    return views and isinstance(args[0], QuantizedTensor) and not args[0].is_inference()


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """What an operation writes to, of its arguments and the lists among them."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from written if isinstance(written, (list, tuple)) else (written,)


def _refuse_writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises UnsupportedError if `func` writes to an argument that is quantized."""
    for tensor in written_by(func, args, kwargs):
        if isinstance(tensor, QuantizedTensor):
            raise UnsupportedError(_no_write(str(func), tensor))


def _no_write(what: str, tensor: QuantizedTensor) -> str:
    return (
        f"{what} would write to {tensor!r}: a quantized tensor is not written in place, as its scales belong to its values. "
        "Compute with dequantize() and quantize the result; load a state dict with assign=True"
    )
