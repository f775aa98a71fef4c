"""The package's exceptions: one class for each kind of mistake, so that a caller can tell them apart."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from te_dynamo.report import MatchRecord

__all__ = [
    "CheckpointError",
    "CoverageError",
    "FusionError",
    "GraphBreakError",
    "InputError",
    "InvalidOptionError",
    "KeptWeightError",
    "LoweringError",
    "MissingStageError",
    "NoDeviceError",
    "OperationError",
    "QuantizationError",
    "RanksDifferError",
    "TeError",
    "UnsupportedError",
]


class TeError(Exception):
    """Base of the others. Nothing raises it itself."""


class InvalidOptionError(TeError, ValueError):
    """An option, a recipe, a mode, or an argument that makes an operation or a module: one that does not exist, or a wrong value."""

    @classmethod
    def unknown(
        cls, what: str, name: object, known: Iterable[object], others: Iterable[str] = (), others_are: str = ""
    ) -> InvalidOptionError:
        """Names the unknown thing and the nearest valid ones; all of `known` too where they are few, or where none is near.

        others: valid too but too many to list; `others_are` says what they are.
        """
        known = sorted(known, key=str)
        spelt = {k.lower(): k for k in (*known, *others) if isinstance(k, str)}
        near = [spelt[found] for found in difflib.get_close_matches(str(name).lower(), spelt, n=3)]
        valid = ", ".join([*map(repr, known), *([others_are] if others_are else [])])
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else ""
        if not near or (len(known) <= 5 and not others_are):
            hint = f"{hint} valid: {valid}".strip()
        return cls(f"te_dynamo: unknown {what} {name!r}; {hint}")


class CoverageError(TeError, AssertionError):
    """Less of a graph or of a model is in a recipe than was asked for."""

    @classmethod
    def of(cls, asked: str, left: Sequence[MatchRecord]) -> CoverageError:
        """asked: what was asked for, and what there is in its place. left: the linears to list, the largest first."""
        rows = []
        for match in sorted(left, key=lambda match: -match.flops):
            source = f" ({match.source})" if match.source else ""
            shape = f", {' x '.join(match.shape)}" if match.shape else ""
            rows.append(f"    {match.module or '(no module)'}{source}{shape}: {match.reason}")
        return cls(f"te_dynamo: {asked}. Left, the largest first:\n" + "\n".join(rows))


class GraphBreakError(TeError, AssertionError):
    """A model that was asked to be one graph without breaks, and is not."""


class QuantizationError(TeError, ValueError):
    """A quantizer whose settings do not fit, buffers that are not those it describes, or a product that no GEMM multiplies."""


class CheckpointError(TeError, ValueError):
    """Files of quantized weights that cannot be read, do not fit the model, or cannot be written in the form that was asked for."""


class InputError(TeError, ValueError):
    """A tensor of the wrong shape or dtype for an operation or a quantizer, or too many or too few tensors."""


class KeptWeightError(TeError):
    """A weight that cannot be kept quantized, or that is needed in a way that its kept buffers do not serve."""


class OperationError(TeError):
    """A method of an operation's class that does not do what the class promises: a wrong result, a gradient that is missing."""


class FusionError(TeError):
    """A fusion that is registered wrongly, raises, does not end, or breaks the contract of its kind."""


class UnsupportedError(TeError):
    """What te_dynamo does not support: a double backward, an export, a write to a quantized tensor, a release of torch without a part
    that is needed."""


class RanksDifferError(TeError):
    """Ranks of one group that would train with different numbers."""

    @classmethod
    def of(cls, differences: Iterable[str]) -> RanksDifferError:
        return cls(
            "te_dynamo: ranks that train together differ. Start all of them with the same packages, script and options, or give check_ranks "
            "the group of those that are alike:\n" + "\n".join(f"    {line}" for line in differences)
        )


class LoweringError(TeError, RuntimeError):
    """A te operation that reached lowering and has no kernel: never a silent fallback."""


class NoDeviceError(TeError, RuntimeError):
    """There is no usable CUDA device; the message says why and what to do."""


class MissingStageError(TeError, KeyError):
    """A stage of the pipeline that does not exist, or that `capture` has not seen."""

    __str__ = Exception.__str__  # not the repr of a key
