"""A form: what a library calls the parts of a weight in its files, and what its configuration says of the weight."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from te_dynamo.errors import CheckpointError
from te_dynamo.quantized.quantizers import Quantizer
from te_dynamo.quantized.tensor import QuantizedTensor
from te_dynamo.weights.checkpoint.kinds import KINDS, Parts, kind_of

Config = Mapping[str, Any]
"""What config.json has under "quantization_config"."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """One weight as a file has it.

    form, kind: names of tables: forms.py, and kinds.py. names, like: of each part its name and, on meta, its dtype and shape.
    powers_of_two: how activations are scaled. kept: tensors that are written back as they are, by name. transposed: the file has [.., N, K] where
    the model has [.., K, N].
    """

    form: str
    kind: str
    names: dict[str, str]
    like: Parts
    powers_of_two: bool = False
    kept: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    transposed: bool = False

    def describe(self, recipe: str = "") -> str:
        """recipe: of the linear, in its own words."""
        used = " " if self.kind == "tensor" and "static_inputs=True" in recipe else " not "
        return f"{self.form} ({self.kind}{f', static scales of activations{used}used' if self.beside() else ''})"

    def beside(self) -> list[str]:
        """The names of static scales of activations."""
        return [name for name in self.kept if name not in self.names.values()]

    def read(self, parts: Parts, shape: tuple[int, ...], dtype: torch.dtype) -> QuantizedTensor:
        """The tensor over the parts' codes and scales."""
        return KINDS[self.kind].read(parts, shape, dtype, self.powers_of_two, self.transposed)

    def write(self, held: QuantizedTensor) -> Parts:
        """The parts of such a tensor."""
        return KINDS[self.kind].write(held, self.like, self.transposed)

    def is_of(self, held: QuantizedTensor, form: Form) -> bool:
        """Whether what a file would have of it is read as the same codes and scales, bit for bit."""
        kind, shape, there = KINDS[self.kind], tuple(held.shape), held.quantizer
        wanted: Any = kind.quantizer(len(shape), self.powers_of_two, self.transposed)
        if hasattr(wanted, "input_amax"):
            wanted = dataclasses.replace(wanted, input_amax=getattr(there, "input_amax", 0.0))
        turned = (*shape[:-2], *shape[:-3:-1]) if self.transposed else shape
        if (
            wanted.with_usage(True, True) != there.with_usage(True, True)
            or not (there.columnwise if self.transposed else there.rowwise)
            or not kind.has_codes(self.like, turned)
        ):
            return False
        kept = self.kept.get(self.names.get("tensor_scale", ""))
        parts = self.write(held) | ({} if kept is None else {"tensor_scale": form.factor(kept.to(held.device))})
        again, used = self.read(parts, shape, held.dtype), held.with_usage(wanted.rowwise, wanted.columnwise)
        pairs = zip(again.buffers(), used.buffers(), strict=True)
        return all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in pairs)


class Form:
    """Base of the forms; one a file.

    method:      its "quant_method".
    names:       role -> name, for each way to spell it; {m} is the module's path with a dot behind it, {p} its parameter.
    beside:      names of tensors that nothing here reads, such as static scales of activations.
    divides:     whether values are divided by the tensor's scale.
    says_all:    whether the configuration tells of every linear: one of another dtype is then an error.
    writes:      the kinds that it is written with. recipe: that of a plain weight where none is given.
    transposes:  whether experts are [E, N, K] there and [E, K, N] in the models, where the sizes allow it.
    squeezed:    whether one scale is a scalar there, and a row's have the shape [N].
    """

    method: ClassVar[str] = ""
    names: ClassVar[tuple[dict[str, str], ...]] = ()
    beside: ClassVar[tuple[str, ...]] = ()
    divides: ClassVar[bool] = False
    says_all: ClassVar[bool] = False
    writes: ClassVar[tuple[str, ...]] = ()
    recipe: ClassVar[str] = "float8_current_scaling"
    transposes: ClassVar[bool] = False
    squeezed: ClassVar[bool] = False

    def kind(self, config: Config, path: str, parameter: str, module: nn.Module) -> str:
        """The kind of a module's parameter, "" of one that is not quantized. Raises CheckpointError for one that has no kind here."""
        raise NotImplementedError

    def configuration(self, kinds: Mapping[str, str], left: Collection[str], powers_of_two: bool) -> dict[str, Any]:
        """What `kind` reads: module -> kind, and the linears that are not quantized."""
        raise NotImplementedError

    def spelt(self, path: str, parameter: str) -> list[dict[str, str]]:
        """role -> name of a module's parameter, for each way to spell it."""
        prefix = f"{path}." if path else ""
        return [{role: name.format(m=prefix, p=parameter) for role, name in way.items()} for way in self.names]

    def names_beside(self, path: str, parameter: str) -> list[str]:
        return [name.format(m=f"{path}." if path else "", p=parameter) for name in self.beside]

    def new(self, path: str, parameter: str, quantizer: Quantizer, shape: tuple[int, ...]) -> Stored:
        """A weight that no file has yet. Raises CheckpointError for a format that the form does not have."""
        kind, powers_of_two = kind_of(quantizer), getattr(quantizer, "power_of_two_scale", False)
        if kind not in self.writes:
            known = f"{', '.join(self.writes)}: recipe={self.recipe!r}" if self.writes else "no format"
            raise CheckpointError(
                f"{path}.{parameter} is {quantizer.in_words()}; {self.method!r} is written with {known}"
            )
        like, names = KINDS[kind].like(shape, self.squeezed), self.spelling(kind, path, parameter)
        return Stored(self.method, kind, {role: names[role] for role in like}, like, powers_of_two)

    def spelling(self, kind: str, path: str, parameter: str) -> dict[str, str]:
        """How that kind is written."""
        return self.spelt(path, parameter)[0]

    def factor(self, scale: Tensor) -> Tensor:
        """The tensor's scale of a file as what values are multiplied by; its own inverse."""
        return scale.reciprocal() if self.divides else scale


def named_kind(what: str, value: Any, known: Mapping[Any, str]) -> str:
    """The kind that a configuration's value names. Raises CheckpointError with those that are known."""
    if value not in known:
        raise CheckpointError(f"{what} {value!r} is not known; known are {', '.join(map(repr, known))}")
    return known[value]


def matches(path: str, module: nn.Module, targets: Iterable[str] | None) -> bool:
    """Whether a target is the module's path, "re:" and an expression that its path begins with, or the name of its class."""
    classes = {cls.__name__ for cls in type(module).__mro__}
    for target in targets or ():
        if target in (path, *classes) or (target.startswith("re:") and re.match(target[3:], path)):
            return True
    return False
