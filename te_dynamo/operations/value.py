"""Values: frozen dataclasses that graphs carry as constants and that guards compare by equality."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import torch
from typing_extensions import dataclass_transform

from te_dynamo._compat import OpaqueMeta, register_value_class
from te_dynamo.quantized.quantizers import Quantizer
from te_dynamo.recipe import Recipe

_PLAIN = (type(None), bool, int, float, str, enum.Enum, torch.dtype, Quantizer, Recipe)


@dataclass_transform(frozen_default=True, eq_default=False)
class Value(metaclass=OpaqueMeta):
    """Base of what is compared by its fields. A subclass is a frozen dataclass without saying so.

    A field may be None, bool, int, float, str, an enum, a dtype, a quantizer, a recipe, another value, or a tuple of those; TypeError
    otherwise.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclasses.dataclass(frozen=True, eq=False)(cls)
        register_value_class(cls)

    def __post_init__(self) -> None:
        for name, value in self._fields().items():
            _check(f"{type(self).__qualname__}.{name}", value)

    def _fields(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self is other or self._fields() == other._fields()  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        known = self.__dict__.get("_hash")
        if known is None:
            known = self.__dict__["_hash"] = hash((type(self), *self._fields().values()))
        return int(known)

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone: the hash of a string is another in another process."""
        return self._fields()

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        """The constructor call, for graph code: part of torch's contract for value classes."""
        names: dict[str, type] = {}
        fields = ", ".join(f"{name}={_code(value, names)}" for name, value in self._fields().items())
        return f"{_unique(type(self), names)}({fields})", names

    def describe(self) -> str:
        """One short line for graphs and tables: the class and the fields that are not at their default."""
        changed = []
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value != field.default:
                text = _describe(value)
                changed.append(text if field.default is dataclasses.MISSING else f"{field.name}={text}")
        return f"{type(self).__name__}({', '.join(changed)})"


def _check(name: str, value: Any) -> None:
    if isinstance(value, tuple):
        for item in value:
            _check(name, item)
    elif not isinstance(value, (*_PLAIN, Value)):
        raise TypeError(
            f"{name}: expected a value (number, str, dtype, enum, quantizer, recipe, operation or a tuple of them), got "
            f"{type(value).__name__}; tensors are parameters or extra inputs"
        )


def _describe(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_describe, value))})"
    return str(value.describe()) if hasattr(value, "describe") else repr(value)


def _code(value: Any, names: dict[str, type]) -> str:
    """Python text that makes the value; `names` gets the classes that it mentions."""
    if isinstance(value, tuple):
        return f"({''.join(f'{_code(item, names)}, ' for item in value)})"
    if hasattr(value, "__fx_repr__"):
        text, inner = value.__fx_repr__()
        names.update(inner)
        return str(text)
    if isinstance(value, Recipe):
        fields = ", ".join(f"{f.name}={_code(getattr(value, f.name), names)}" for f in dataclasses.fields(value))
        return f"{_unique(type(value), names)}({fields})"
    if isinstance(value, enum.Enum):
        return f"{_unique(type(value), names)}[{value.name!r}]"
    if isinstance(value, float):
        return f"float({str(value)!r})"  # inf and nan too
    return repr(value)


def _unique(cls: type, names: dict[str, type]) -> str:
    """A name for the class in graph code: its own; with its module outside of te_dynamo, where two may have one name."""
    name = cls.__name__ if cls.__module__.startswith("te_dynamo.") else f"{cls.__module__}.{cls.__qualname__}"
    name = "".join(c if c.isalnum() else "_" for c in name).strip("_")  # Python renames __x inside of classes
    names[name] = cls
    return name


register_value_class(Value)
