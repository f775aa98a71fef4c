"""What happened to a model, as records: the matcher, the fuser and lowering write them, `explain` reads them."""

from __future__ import annotations

import dataclasses
import re
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

RECORD = "te_dynamo_record"
"""Key of the meta of a node that was a linear, and of the te node in its place: its MatchRecord."""


@dataclasses.dataclass
class MatchRecord:
    """One matched, or deliberately left, piece of the user's model. A product by a weight is a "linear", a convolution too.

    kind:    "linear", "rms_norm", "layer_norm", "layer_norm_modulate", "gelu", "quick_gelu", "silu", "relu", "relu2",
             or "gated silu" and its like.
    module:  path of the module that holds it ("layers.0.mlp.down_proj"), "" where the graph gives none.
    parameter: the part of `module` that names a parameter which the module holds itself: "qkv_w" of "layers.0.qkv_w"; "" of `weight`.
    source:  the user's line, "file.py:17", "" where unknown.
    matched: whether it became a te operation.
    reason:  why it was left in the user's precision; "" when matched.
    recipe:  the recipe that applies, its name with what differs from its defaults ("mxfp8(scale_block=128)"), "" when left.
    shape:   for a linear (M, N, K) with M the product of the leading dimensions, as printed (a symbol where dynamic).
    flops:   2*M*N*K for a linear (size hints where dynamic), else 0.
    dtype:   the user's precision, "bf16".
    groups:  experts of a grouped linear, whose N x K the shape holds; 0 for any other.
    us:      (microseconds in the model's precision, in the recipe) as the rule of what FP8 costs on a GPU estimates them, () where it is not
             asked. The second is the first where the linear is left.
    emulated_on: the GPU whose tensor cores do not multiply the recipe's operands, "" where they do, and on a CPU.
    stored:  the form of the file whose codes and scales the weight is, "fp8 (block)"; "" where it came from none, or in the model's precision.
    shared:  behind graph breaks, the paths at which other modules of the same class may run the same graph.
    """

    kind: str
    module: str = ""
    source: str = ""
    matched: bool = True
    reason: str = ""
    recipe: str = ""
    shape: tuple[str, ...] = ()
    flops: int = 0
    dtype: str = ""
    groups: int = 0
    us: tuple[float, ...] = ()
    shared: tuple[str, ...] = ()
    parameter: str = ""
    stored: str = ""
    emulated_on: str = ""

    @property
    def owner(self) -> str:
        """The path of the module alone."""
        return self.module.removesuffix(self.parameter).removesuffix(".")


@dataclasses.dataclass(frozen=True)
class WorkspaceRecord:
    """One quantized weight that is kept between calls.

    weight:    its name, or the names of those that are one stack.
    quantizer: how it is held, "e4m3[row]".
    nbytes:    what it takes.
    kept:      "for a step", "frozen", "in place of its values" of a frozen weight that was dropped, or "in the program" that was exported.
    """

    weight: str
    quantizer: str
    nbytes: int
    kept: str


@dataclasses.dataclass
class Report:
    """All records of one compiled graph."""

    matches: list[MatchRecord] = dataclasses.field(default_factory=list)
    fusions: list[tuple[str, str, int]] = dataclasses.field(default_factory=list)
    """(phase, name of the fusion, times applied); of a fusion of operations the class that it made"""
    lowered: list[tuple[str, str, str]] = dataclasses.field(default_factory=list)
    """(phase, te op, what runs it: a kernel's name or "reference")"""
    workspaces: list[WorkspaceRecord] = dataclasses.field(default_factory=list)
    gathered_again: int | None = None
    """all-gathers of forward that backward repeats, of the option "regather"; None where no pass has looked for them"""
    slower_than_cublaslt: list[str] = dataclasses.field(default_factory=list)
    """"M x N x K" of products that would take cuBLASLt less time, as was measured on an H200"""
    notes: list[str] = dataclasses.field(default_factory=list)
    model: weakref.ref[nn.Module] | None = None
    """what was compiled, where it is a module: paths begin there"""
    slow_gather: str = ""
    """why the graph would be faster without `fp8_all_gather`"""


_NUMBER = re.compile(r"(?<!\w)'[^']*'|(?<![\w.:/])(\d+(?:\.\d+)?)(?![\w/]|\.\w)")
"""A number that stands alone, as a size or a time does: those of a quoted name, of a path and of a line of code do not."""


def without_numbers(reason: str) -> str:
    """What a reason shares with those that differ from it in their numbers alone."""
    return _NUMBER.sub(lambda found: "#" if found[1] else found[0], reason)


def in_one(reasons: Iterable[str]) -> str:
    """Reasons that `without_numbers` makes equal, with a range where their numbers differ: "bf16 takes 11-29 us"."""
    reasons = list(reasons)
    numbers = zip(*([found[1] for found in _NUMBER.finditer(reason) if found[1]] for reason in reasons), strict=True)
    ranges = (dict.fromkeys((min(each, key=float), max(each, key=float))) for each in numbers)
    return _NUMBER.sub(lambda found: "-".join(next(ranges)) if found[1] else found[0], reasons[0])


def coverage(linears: Sequence[MatchRecord]) -> float:
    """The share of linear FLOPs that runs in a recipe, 0 to 1; 0.0 without any. A linear on as many tokens as data decides (an
    expert's) counts nothing."""
    total = sum(match.flops for match in linears)
    return sum(match.flops for match in linears if match.matched) / total if total else 0.0
