"""What a comparison says of one linear."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from te_dynamo.accuracy.sums import ERROR, QUANTIZED
from te_dynamo.report import MatchRecord

TENSORS = ("x", "weight", "dy")
PRODUCTS = ("output", "dx", "dw")

EXACT = 200.0
"""The SNR, in dB, that stands for no difference at all."""


@dataclasses.dataclass(frozen=True)
class TensorAccuracy:
    """One of TENSORS as it is quantized, over all steps.

    snr_db:      10 log10(sum x^2 / sum (x_q - x)^2), EXACT at most; None where it is not known.
    saturated:   share of the values that are above the largest one that their scale can hold, 0 to 1.
    flushed:     share of the values that are not zero and are held as zero.
    zero:        share of the values that are zero.
    amax:        the largest |x| of all steps; None where it is not finite.
    amax_spread: the largest amax of a step over the smallest: 1.0 where it does not change; None where one is zero or not finite.
    """

    snr_db: float | None
    saturated: float
    flushed: float
    zero: float
    amax: float | None
    amax_spread: float | None


@dataclasses.dataclass(frozen=True)
class LinearAccuracy:
    """One linear that is in a recipe. Its errors are its own: what it reads has the model's own precision.

    module, source, recipe, shape, dtype: as explain's MatchRecord has them.
    flops:         of one forward, 2*M*N*K.
    snr_db:        the smallest of its products; None where none is known.
    output_snr_db, dx_snr_db, dw_snr_db: of the products, as the model's own precision and as the recipe compute them.
    tensors:       of those of TENSORS that were quantized.
    note:          what is missing and why, "" normally.
    finite:        whether the recipe gives finite numbers where the model's own precision does.
    """

    module: str
    source: str
    recipe: str
    shape: tuple[str, ...]
    dtype: str
    flops: float
    output_snr_db: float | None
    dx_snr_db: float | None
    dw_snr_db: float | None
    tensors: Mapping[str, TensorAccuracy]
    note: str
    finite: bool

    @property
    def snr_db(self) -> float | None:
        return min((snr for name in PRODUCTS if (snr := getattr(self, f"{name}_snr_db")) is not None), default=None)

    def to_dict(self) -> dict[str, Any]:
        """Flat: "module", ..., "snr_db", "snr_output_db", "snr_x_db" and their like, "x_flushed" and its like, "note"."""
        plain = {
            name: getattr(self, name) for name in ("module", "source", "recipe", "shape", "dtype", "flops", "snr_db")
        }
        plain["shape"] = " x ".join(self.shape)
        plain |= {f"snr_{name}_db": getattr(self, f"{name}_snr_db") for name in PRODUCTS}
        for name in TENSORS:
            tensor = self.tensors.get(name)
            plain[f"snr_{name}_db"] = tensor and tensor.snr_db
            for share in ("saturated", "flushed", "zero", "amax", "amax_spread"):
                plain[f"{name}_{share}"] = tensor and getattr(tensor, share)
        return {**plain, "finite": self.finite, "note": self.note}


class Row:
    """The sums of one linear while a comparison runs: small tensors, read once at its end."""

    def __init__(self, record: MatchRecord) -> None:
        self.record, self.flops = record, 0
        self._sums: dict[str, list[Tensor]] = {}
        self._notes: dict[str, None] = {}

    def add(self, sums: Mapping[str, Tensor]) -> None:
        """Sums of QUANTIZED by the name of a tensor, of ERROR by that of a product."""
        for name, numbers in sums.items():
            self._sums.setdefault(name, []).append(numbers)

    def note(self, text: str) -> None:
        """Said once."""
        self._notes[text] = None

    def finish(self, steps: int) -> LinearAccuracy:
        """What was measured in so many steps."""
        found = {name: torch.stack(numbers).cpu() for name, numbers in self._sums.items()}
        notes = list(self._notes)
        if not found:
            notes.append("not measured: it did not run by itself")
        exact = all(torch.isfinite(numbers[:, ERROR.index("signal")]).all() for numbers in found.values())
        if not exact:
            notes.append("NaN or infinity in the model's own precision")
        finite = not exact or all(torch.isfinite(numbers).all() for numbers in found.values())
        if not finite:
            notes.append("NaN or infinity in the recipe alone")
        totals = {name: numbers.sum(0).tolist() for name, numbers in found.items()}
        snr = {name: decibels(*total[: len(ERROR)]) for name, total in totals.items()}
        record = self.record
        return LinearAccuracy(
            module=record.module,
            source=record.source,
            recipe=record.recipe,
            shape=record.shape,
            dtype=record.dtype,
            flops=self.flops / max(steps, 1),
            output_snr_db=snr.get("output"),
            dx_snr_db=snr.get("dx"),
            dw_snr_db=snr.get("dw"),
            tensors={name: _tensor(found[name], snr[name]) for name in TENSORS if name in found},
            note="; ".join(notes),
            finite=finite,
        )


def _tensor(numbers: Tensor, snr_db: float | None) -> TensorAccuracy:
    """numbers: QUANTIZED [steps, ...]."""
    of = dict(zip(QUANTIZED, numbers.unbind(1), strict=True))
    count = max(of["count"].sum().item(), 1)
    smallest, largest = of["amax"].min().item(), of["amax"].max().item()
    return TensorAccuracy(
        snr_db=snr_db,
        saturated=of["saturated"].sum().item() / count,
        flushed=of["flushed"].sum().item() / count,
        zero=of["zero"].sum().item() / count,
        amax=largest if math.isfinite(largest) else None,
        amax_spread=largest / smallest if math.isfinite(largest) and smallest else None,
    )


def decibels(signal: float, noise: float) -> float | None:
    """10 log10(signal / noise), EXACT at most; None where one is not finite, or where there is no signal."""
    if not (math.isfinite(signal) and math.isfinite(noise)) or signal == 0:
        return None
    return min(EXACT, 10 * math.log10(signal / noise)) if noise else EXACT
