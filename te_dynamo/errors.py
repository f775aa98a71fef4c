"""The package's exceptions, one class an error, the message's form on the class."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from te_dynamo.inspect.report import MatchRecord

__all__ = ["CoverageError", "FusionError", "InvalidOptionError", "LoweringError", "QuantizationError", "TeError"]


class TeError(Exception):
    """Base of every error raised by te_dynamo."""


class InvalidOptionError(TeError, ValueError):
    """An option, recipe or mode that does not exist or has a value of the wrong kind."""

    @classmethod
    def unknown(
        cls, what: str, name: object, known: Iterable[object], others: Iterable[str] = (), others_are: str = ""
    ) -> InvalidOptionError:
        """Names the unknown thing and the nearest valid ones; without a near one all of `known`.

        others: valid too but too many to list; `others_are` says what they are.
        """
        known = sorted(known, key=str)
        near = difflib.get_close_matches(str(name), [*(k for k in known if isinstance(k, str)), *others], n=3)
        valid = ", ".join([*map(repr, known), *([others_are] if others_are else [])])
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"valid: {valid}"
        return cls(f"te_dynamo: unknown {what} {name!r}; {hint}")


class CoverageError(TeError):
    """Less of a graph is in a recipe than `require_coverage` asks for."""

    @classmethod
    def of(cls, share: float, required: float, left: Sequence[MatchRecord]) -> CoverageError:
        """Lists what was left, the largest first."""
        rows = [
            f"    {match.module or '(no module)'} ({match.source}), {' x '.join(match.shape)}: {match.reason}"
            for match in sorted(left, key=lambda match: -match.flops)
        ]
        return cls(
            f"te_dynamo: {share:.1%} of the linear FLOPs of this graph are in a recipe, and require_coverage asks for {required:.1%}. "
            "Left, the largest first:\n" + "\n".join(rows)
        )


class QuantizationError(TeError, ValueError):
    """A tensor that a quantizer cannot hold, or a buffer that was never allocated."""


class FusionError(TeError):
    """A fusion that is registered wrongly, raises, does not end, or breaks the contract of its kind."""


class LoweringError(TeError, RuntimeError):
    """A te operation that reached lowering and has no kernel: never a silent fallback."""
