"""What is checked when an operation's class is defined: a wrong definition is a TypeError there, not at its first call.

    BasicOperation   op_forward_compute + op_forward_save_ctx + op_forward_fake + op_backward      the split API
                     op_forward + op_backward                                                      the legacy API
                     the same names with fuser_ in place of op_                                    with extra inputs or outputs
    FusedOperation   fuser_forward_compute + fuser_forward_save_ctx (+ fuser_forward_fake)         and/or fuser_backward
                     fuser_forward                                                                 the legacy API

A method may be inherited. A class that defines a method of the legacy API leaves an inherited split path, and the other way
round.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Sequence

from te_dynamo.errors import InputError, InvalidOptionError
from te_dynamo.recipe import Recipe

COMPUTE, SAVE_CTX, FAKE, LEGACY, BACKWARD = "forward_compute", "forward_save_ctx", "forward_fake", "forward", "backward"

SPLIT = (COMPUTE, SAVE_CTX, FAKE)

_METHODS = tuple(f"{api}_{method}" for api in ("op", "fuser") for method in (*SPLIT, LEGACY, BACKWARD))


def check_definition(cls: type, kind: str, framework: tuple[type, ...]) -> None:
    """Raises TypeError, naming the class and the missing or extra method, unless `cls` is a whole operation.

    kind: "basic" or "fused". framework: the base classes, whose own methods do not count as defined.
    """
    _check_names(cls)
    for api in ("op", "fuser"):
        _check_no_mix(cls, api)
    defined = _defined(cls, framework)
    if kind == "basic":
        _check_basic(cls, defined, framework)
    else:
        _check_fused(cls, defined, framework)


def uses_split_forward(cls: type, framework: tuple[type, ...]) -> bool:
    """Whether the most derived class that defines a forward defines the split one; True without any forward."""
    for base in cls.__mro__:
        if base in framework:
            continue
        own = vars(base)
        if any(f"{api}_{LEGACY}" in own for api in ("op", "fuser")):
            return False
        if any(f"{api}_{method}" in own for api in ("op", "fuser") for method in SPLIT):
            return True
    return True


def halves(cls: type, framework: tuple[type, ...]) -> tuple[bool, bool]:
    """Whether `cls` has a forward, and whether it has a backward."""
    defined = {name.partition("_")[2] for name in _defined(cls, framework)}
    return bool(defined & {LEGACY, COMPUTE}), BACKWARD in defined


def _defined(cls: type, framework: tuple[type, ...]) -> set[str]:
    return {name for base in cls.__mro__ if base not in framework for name in vars(base) if name in _METHODS}


def _check_names(cls: type) -> None:
    """A method that nobody calls: a misspelt one, or one of another system."""
    for name, member in vars(cls).items():
        if name.startswith(("op_", "fuser_")) and name not in _METHODS and inspect.isfunction(member):
            near = difflib.get_close_matches(name, _METHODS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the methods are {', '.join(_METHODS)}"
            raise TypeError(f"{cls.__qualname__}: no operation has a method {name}; {hint}")
    if "_use_split_forward" in vars(cls):
        raise TypeError(f"{cls.__qualname__}: _use_split_forward is found from the methods; do not define it")


def _check_no_mix(cls: type, api: str) -> None:
    split = [f"{api}_{method}" for method in SPLIT if f"{api}_{method}" in vars(cls)]
    if split and f"{api}_{LEGACY}" in vars(cls):
        raise TypeError(
            f"{cls.__qualname__} defines both {api}_{LEGACY}, of the legacy API, and {_and(split)}, of the split API: define one"
        )


def _check_basic(cls: type, defined: set[str], framework: tuple[type, ...]) -> None:
    extra = cls.num_extra_inputs or cls.num_extra_outputs  # type: ignore[attr-defined]
    api, other = ("fuser", "op") if extra else ("op", "fuser")
    wrong = sorted(name for name in defined if name.startswith(f"{other}_"))
    mine = sorted(name for name in defined if name.startswith(f"{api}_"))
    if extra and wrong:
        raise TypeError(
            f"{cls.__qualname__} has extra inputs or outputs, which {_and(wrong)} cannot take: define the fuser_ methods instead"
        )
    if wrong and mine:
        raise TypeError(
            f"{cls.__qualname__} mixes {_and(mine)} with {_and(wrong)}: define the methods of one of the two"
        )
    if wrong:
        api = other
    _check_forward(cls, api, defined, framework)
    if not any(f"{api}_{method}" in defined for method in (*SPLIT, LEGACY)):
        raise TypeError(
            f"{cls.__qualname__} defines no forward: {_and(f'{api}_{m}' for m in SPLIT)}, or {api}_{LEGACY} in the legacy API, "
            "is missing"
        )
    if f"{api}_{BACKWARD}" not in defined:
        raise TypeError(f"{cls.__qualname__} defines a forward without {api}_{BACKWARD}")


def _check_fused(cls: type, defined: set[str], framework: tuple[type, ...]) -> None:
    wrong = sorted(name for name in defined if name.startswith("op_"))
    if wrong:
        raise TypeError(f"{cls.__qualname__} is a fused operation and runs no {_and(wrong)}: define the fuser_ methods")
    for count in ("num_extra_inputs", "num_extra_outputs"):
        if count in vars(cls):
            raise TypeError(f"{cls.__qualname__}.{count}: a fused operation has those of its basic operations")
    if not defined:
        raise TypeError(
            f"{cls.__qualname__} defines neither a forward (fuser_forward_compute and fuser_forward_save_ctx) nor "
            "fuser_backward"
        )
    joint = f"fuser_{BACKWARD}" in defined
    forward = defined - {f"fuser_{BACKWARD}"}
    if forward:
        # A forward alone saves what the unfused operations save, so their fakes are its fake.
        _check_forward(cls, "fuser", defined if joint else defined | {f"fuser_{FAKE}"}, framework)


def _check_forward(cls: type, api: str, defined: set[str], framework: tuple[type, ...]) -> None:
    """All of the split methods, once one of them is what `cls` runs."""
    present = [f"{api}_{method}" for method in SPLIT if f"{api}_{method}" in defined]
    if not present or not uses_split_forward(cls, framework):
        return
    missing = [f"{api}_{method}" for method in SPLIT if f"{api}_{method}" not in defined]
    if missing:
        raise TypeError(
            f"{cls.__qualname__} defines {_and(present)} without {_and(missing)}: the split forward needs all three"
        )


def _and(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def check_width(op: object, shape: Sequence[int], width: int) -> None:
    """Raises InputError unless the last dimension of an input is `width`: the op and what it got, not an error of the product inside."""
    if not shape or shape[-1] != width:
        raise InputError(f"{op.describe()}: expected an input [..., {width}], got {list(shape)}")  # type: ignore[attr-defined]


def check_settings(op: object, *sizes: str) -> None:
    """Raises InvalidOptionError for one of these fields that is no positive whole number, TypeError for a recipe that is no recipe."""
    for name in sizes:
        value = getattr(op, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InvalidOptionError(f"{type(op).__qualname__}.{name}: expected a positive whole number, got {value!r}")
    recipe = getattr(op, "recipe", None)
    if recipe is not None and not isinstance(recipe, Recipe):
        raise TypeError(
            f"{type(op).__qualname__}.recipe: expected a te_dynamo.recipe object or None, got {recipe!r}; Sequential(..., recipe=) "
            "takes names too"
        )
