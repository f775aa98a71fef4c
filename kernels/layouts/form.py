"""How a tensor is held, as kernels, their launchers and references are told: a frozen value a format, `Form`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch

from te_dynamo.kernels.layouts.sizes import Buffers, Size, allocate

Scaling = Literal["tensor", "row", "1x128", "128x128", "1x32", "1x16"]
"""What has one scale: of a quantizer, and of an operand of a GEMM."""


@dataclasses.dataclass(frozen=True)
class Form:
    """Base of the formats, one a file beside this one. Fields: dtype, of the codes; rowwise and columnwise, the usages; options."""

    NAMES: ClassVar[tuple[str, ...]]
    """Its buffers, of both usages, in the order in which `te.quantize` returns them."""

    dtype: torch.dtype
    rowwise: bool
    columnwise: bool

    def buffers(self, shape: tuple[Size, ...]) -> Buffers:
        """The buffers of a tensor of that shape, for the usages that are on."""
        raise NotImplementedError

    def allocate(self, shape: tuple[Size, ...], device: torch.device) -> dict[str, torch.Tensor]:
        """These, uninitialised."""
        return allocate(self.buffers(shape), device)

    def pointers(
        self, held: Mapping[str, torch.Tensor], unused: torch.Tensor, prefix: str = ""
    ) -> dict[str, torch.Tensor]:
        """All buffers as a kernel's arguments; `unused` stands in for one that is not held."""
        return {f"{prefix}{name}": held.get(name, unused) for name in self.NAMES}

    def constants(self) -> dict[str, Any]:
        """What kernels are told beside the usages."""
        return {"FMAX": torch.finfo(self.dtype).max}

    def launches(self, itemsize: int) -> list[dict[str, bool]]:
        """The usages of the launches that fill all buffers: one, or two where what is loaded or cast has 4-byte elements.

        Triton 3.6 stores a wrong transpose of an fp32 tile that is also stored by rows (seen on an H200, also of a tile that was loaded
        in 16 bits and not rounded to them; 16-bit tiles and a transpose by itself are right).
        """
        if self.rowwise and self.columnwise and itemsize == 4:
            return [{"ROWWISE": True, "COLUMNWISE": False}, {"ROWWISE": False, "COLUMNWISE": True}]
        return [{"ROWWISE": self.rowwise, "COLUMNWISE": self.columnwise}]


@dataclasses.dataclass(frozen=True)
class ScaledForm(Form):
    """A form with fp32 scales: powers of two alone, or any; of amaxes that are at least eps."""

    power_of_two: bool = False
    eps: float = 0.0

    def constants(self) -> dict[str, Any]:
        return {**super().constants(), "EPS": float(self.eps), "POWER_OF_TWO": self.power_of_two}
