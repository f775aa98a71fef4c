"""What every quantizer promises: a value that says how a tensor is held in low precision.

A quantizer is configuration only. Equal configuration is an equal object, so that a graph can carry it as a constant and
a guard can compare it; there is no tensor, module or process group in it.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from te_dynamo._compat import OpaqueMeta, register_value_class
from te_dynamo.errors import InputError, QuantizationError
from te_dynamo.kernels.layouts.form import Form, Scaling
from te_dynamo.kernels.layouts.sizes import Buffers, allocate

if TYPE_CHECKING:
    from te_dynamo.quantized.storage import QuantizedTensorStorage
    from te_dynamo.quantized.tensor import QuantizedTensor

_VALUE_TYPES = (bool, int, float, str, enum.Enum)


@dataclasses.dataclass(frozen=True, eq=False)
class Quantizer(metaclass=OpaqueMeta):
    """Base of the quantizers.

    rowwise:    hold the data in the tensor's own order, read by the GEMMs that contract the last dimension.
    columnwise: hold what the GEMMs that contract the leading dimension read.

    Raises TypeError for a field that is not an int, bool, float, str or enum, or not of its default's kind ("no" would be a
    switch that is on), and QuantizationError when neither usage is on.
    """

    rowwise: bool = True
    columnwise: bool = True

    storage: ClassVar[str]
    """The qualified name of the class that holds its tensors."""

    reads_as_matrix: ClassVar[bool] = True
    """Whether a tensor of any rank is read as [M, K], so that its views of the same K have the same buffers."""

    # What kernels can do for a format beside te.quantize and its GEMM. Whoever fuses or matches asks here.

    one_scale: ClassVar[bool] = False
    """Whether a tensor has one scale, of the amax of all its values: their order does not matter, the amax may be known before
    (te.quantize_with_amax), and a factor of the values may join the scale."""

    fused_producers: ClassVar[bool] = False
    """Whether norms, activations and their gradients write the buffers themselves (te.rms_norm_quantize and its like), and its GEMM is asked to
    add another tensor to its result (the addend of te.gemm)."""

    one_pass = False  # not annotated: some formats have it as a field
    """Whether a compiled graph guesses the scale of what it quantizes, and casts again where the guess was wrong (lowering/one_pass.py)."""

    stacks: ClassVar[Literal["", "tensors", "rows", "blocks"]] = ""
    """What has scales of its own where tensors of several linears are one operand (te.quantize_stacked), "" where none may be: weights in
    forward and gradients in wgrad; of "tensors", and of "blocks", both in dgrad too, where segments with scales of "rows" each would have to
    be scaled apart before they are added. Of "blocks" the stack is a tensor as any other."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, _VALUE_TYPES):
                raise TypeError(
                    f"{type(self).__name__}.{field.name}: expected int, bool, float, str or enum, got {type(value).__name__}; "
                    "a quantizer is a value and must compare equal by its configuration"
                )
            if field.default is not dataclasses.MISSING and not _is_like(value, field.default):
                raise TypeError(
                    f"{type(self).__name__}.{field.name}: expected {type(field.default).__name__}, got {value!r}"
                )
        if not (self.rowwise or self.columnwise):
            raise QuantizationError(f"{type(self).__name__}: neither rowwise nor columnwise usage is on")
        self.__dict__["_made_with"] = self._fields()

    def _fields(self) -> tuple[Any, ...]:
        return _reads_fields(type(self))(self)

    def value(self) -> tuple[Any, ...]:
        """What equality compares. Raises QuantizationError if it was changed since it was made, past the frozen class.

        Every comparison asks, so every guard, and `te.quantize`.
        """
        fields = self._fields()
        if fields != self.__dict__["_made_with"]:
            raise QuantizationError(
                f"{type(self).__name__} was changed: made with {self.__dict__['_made_with']}, now {fields}. Graphs and caches "
                "hold it as a value; make another with dataclasses.replace or with_usage"
            )
        return fields

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self.value() == other.value()  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((type(self).__qualname__, self.value()))

    def __deepcopy__(self, memo: Any) -> Quantizer:
        """Itself, as of any value: guards hold a deep copy of each weight's quantizer, and compare the same object at once."""
        return self

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        register_value_class(cls)

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        """The constructor call, for graph code: part of torch's contract for value classes."""
        name = type(self).__name__
        fields = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self))
        return f"{name}({fields})", {name: type(self)}

    def compiles_as(self, other: Quantizer) -> bool:
        """Whether a graph that was compiled for a weight held as this one fits a weight held as `other`."""
        return self == other

    def read_input_amax(self) -> float:
        """The amax for which what a weight is multiplied with is scaled, 0 for its own."""
        return 0.0

    def scaling(self) -> Scaling:
        """What has one scale, as GEMMs are told (`Operand` of kernels/gemm/request.py)."""
        raise NotImplementedError

    def recipe(self) -> tuple[str, dict[str, Any]]:
        """(name, options) of the recipe whose GEMMs multiply by a weight that is held so: activations are scaled as the weight is."""
        raise NotImplementedError

    def needs_random(self) -> bool:
        """Whether quantizing takes random bits."""
        return False

    def transposes_columns(self) -> bool:
        """Whether columnwise data is the rows of x^T, not in the order of x."""
        return True

    def columns_are_rows(self) -> bool:
        """Whether columnwise data is the codes of the rows transposed, with the same scales: `Operand.of` makes it of them."""
        return False

    def rows_of_a_scale(self) -> int:
        """How many rows next to each other share the scales of their blocks."""
        return 1

    def experts_begin_at(self) -> int:
        """Where the experts of a weight [G, N, K] may begin, read as [G N, K]: a multiple of it, so that none shares a block with another."""
        return 1

    def no_groups_reason(self) -> str:
        """Why no GEMM multiplies groups of rows of a tensor held so (te.grouped_gemm), "" where one does."""
        return "there is no grouped GEMM for it"

    def for_groups(self, rowwise: bool, columnwise: bool) -> Quantizer:
        """How the weights [G, N, K] of grouped GEMMs are held, each as this quantizer holds one. QuantizationError without such GEMMs."""
        raise QuantizationError(f"{self.describe()}: {Quantizer.no_groups_reason(self)}")

    def for_group_columns(self, groups: Any) -> Quantizer:
        """How the columns of tokens in so many groups are held, each group's as this quantizer holds those of a tensor."""
        return self.with_usage(False, True)

    def for_block_scales(self) -> Quantizer:
        """The same values with scales as tensor cores read them that apply the scales of blocks; itself where it has no such scales."""
        return self

    def with_usage(self, rowwise: bool | None = None, columnwise: bool | None = None) -> Quantizer:
        """The same quantizer with other usages; None keeps what is set."""
        self._check_unchanged()
        return self._using(*_fields_with_usage(self, rowwise, columnwise))

    def reading(self, columnwise: bool) -> Quantizer:
        """The same quantizer with one usage, columnwise or rowwise: how an operand of a GEMM is held."""
        return self.with_usage(not columnwise, columnwise)

    def _using(self, *fields: Any) -> Quantizer:
        """One of this class with those fields. Each class names itself: Dynamo traces that, not `type(self)`."""
        return type(self)(*fields)

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raises InputError for a shape this format cannot hold."""
        self._check_unchanged()
        if len(shape) < 1:
            raise InputError(
                f"{type(self).__name__}: the shape {tuple(shape)} has rank 0; a quantized tensor is read as [M, K], of rank 1 or more"
            )

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Raises InputError unless values of that dtype can be held: floating ones."""
        if not dtype.is_floating_point:
            raise InputError(f"{self.describe()}: expected a floating dtype of the values, got {dtype}")

    def _check_unchanged(self) -> None:
        """`value`, where Dynamo is not tracing: its guards have compared."""
        if not torch.compiler.is_dynamo_compiling():
            self.value()

    def form(self) -> Form:
        """The same as kernels are told. QuantizationError for a quantizer that none knows."""
        raise QuantizationError(f"te.quantize: no kernel for {type(self).__name__}: it has no form()")

    def _describe_buffers(self, shape: tuple[int, ...]) -> Buffers:
        """The contiguous buffers of a tensor of that shape, for the usages that are on."""
        self.check_shape(shape)
        return self.form().buffers(shape)

    def create_metadata(self, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
        """What rebuilds a quantized tensor from its buffers; see `QuantizedTensorStorage.from_metadata`.

        {"cls": `storage`, "kwargs": the arguments of that class beside the buffers}.
        """
        self.check_dtype(dtype)
        return {"cls": self.storage, "kwargs": {"shape": tuple(shape), "dtype": dtype, "quantizer": self}}

    def alloc_tensors(self, shape: tuple[int, ...], device: torch.device | None = None) -> dict[str, torch.Tensor]:
        """Uninitialised buffers by name."""
        return allocate(self._describe_buffers(tuple(shape)), device)

    def quantize(self, tensor: torch.Tensor, generator: torch.Generator | None = None) -> QuantizedTensor:
        """`tensor` (bf16, fp16 or fp32, any rank from 1) in this format, through `te.quantize`. No gradient flows.

        generator: of the random bits, where this rounds stochastically; None takes torch's own.
        Raises InputError for a tensor that the format cannot hold.
        """
        from te_dynamo.quantized.quantize import quantize_tensor
        from te_dynamo.quantized.tensor import from_buffers

        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{type(self).__name__}.quantize: expected a tensor, got {type(tensor).__name__}")
        if tensor.layout != torch.strided or tensor.is_nested:
            there = "a nested one" if tensor.is_nested else f"{tensor.layout} of shape {tuple(tensor.shape)}"
            raise InputError(f"{self.describe()}: expected a dense tensor, got {there}")
        shape = tuple(tensor.shape)
        self.check_shape(shape)
        buffers = quantize_tensor(tensor.detach().contiguous(), self, generator)
        return from_buffers(buffers, shape, tensor.dtype, self, False)

    def dequantize(self, tensor: QuantizedTensor | QuantizedTensorStorage) -> torch.Tensor:
        """The values of a tensor of this format in its own dtype. Raises QuantizationError for another format."""
        there = getattr(tensor, "quantizer", None)
        if there is None or there.with_usage(True, True) != self.with_usage(True, True):
            raise QuantizationError(
                f"{self.describe()} cannot read {there.describe() if there else type(tensor).__name__}"
            )
        return tensor.dequantize()

    def buffer_names(self) -> list[str]:
        """The buffers of a tensor of any shape, in the order of `te.quantize`: neither names nor order depend on the shape."""
        return list(self._describe_buffers((1, 1, 1)))

    def operand(self, buffers: list[torch.Tensor], columnwise: bool) -> tuple[torch.Tensor, ...]:
        """What a GEMM reads: data, then its scales, contracting the last dimension, or the leading ones (columnwise).

        buffers: in the order of `_describe_buffers`, as `te.quantize` returns them.
        """
        if not (self.columnwise if columnwise else self.rowwise):
            wanted = "columnwise" if columnwise else "rowwise"
            there = ", ".join(f"{n} {list(b.shape)}" for n, b in zip(self.buffer_names(), buffers, strict=False))
            raise QuantizationError(
                f"{wanted} data of {self.describe()} was never allocated: switch the usage on; there is {there}"
            )
        names = self.buffer_names()
        return tuple(buffers[names.index(name)] for name in self._operand_names(columnwise))

    def _operand_names(self, columnwise: bool) -> tuple[str, ...]:
        """The buffers of that usage, data first."""
        names = self.form().NAMES
        half = len(names) // 2
        return names[half:] if columnwise else names[:half]

    def describe(self) -> str:
        """One short word for graphs and tables: "e4m3[row+column]"."""
        usage = "+".join(name for name, on in (("row", self.rowwise), ("column", self.columnwise)) if on)
        return f"{self._format()[0]}[{', '.join((usage, *self._settings()))}]"

    def in_words(self) -> str:
        """For a reason: "FP8 (e4m3) with a scale per row"."""
        scaling = self.scaling()
        per = scaling if scaling in ("tensor", "row") else f"block of {scaling}"
        return ", ".join((f"{self._format()[1]} with a scale per {per}", *self._settings()))

    def _format(self) -> tuple[str, str]:
        """How graphs and how sentences call it."""
        raise NotImplementedError

    def _settings(self) -> Iterable[str]:
        """Those that are not usual."""
        return ()


@functools.cache
def _reads_fields(cls: type[Quantizer]) -> Callable[[Quantizer], tuple[Any, ...]]:
    """All fields of a quantizer of that class. Found once: a step asks hundreds of times."""
    return operator.attrgetter(*(field.name for field in dataclasses.fields(cls)))


def _is_like(value: Any, default: Any) -> bool:
    """Whether a field with that default takes `value`: the same type, or an int for a float; a bool for nothing but a bool."""
    kinds = (int, float) if isinstance(default, float) else type(default)
    return isinstance(value, kinds) and isinstance(value, bool) == isinstance(default, bool)


# Not traced: fields that differ from call to call would be symbols, of which Dynamo makes no quantizer.
@torch.compiler.assume_constant_result
def _fields_with_usage(quantizer: Quantizer, rowwise: bool | None, columnwise: bool | None) -> tuple[Any, ...]:
    """All fields of a quantizer, with other usages."""
    row, column, *settings = quantizer._fields()
    return row if rowwise is None else rowwise, column if columnwise is None else columnwise, *settings


register_value_class(Quantizer)
