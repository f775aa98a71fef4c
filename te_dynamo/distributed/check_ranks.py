"""`check_ranks`: ranks that would train with different numbers stop, each with an error that says in what they differ.

    at the call                   versions, environment, registered fusions     assert_same
    before the next step          what each rank has compiled since the call    _Watch, which tell_compiled fills

Compiling itself communicates nothing. A rank may compile what others do not (rank 0 alone prints samples), or at another time (its batch
has another length), and would wait in vain. All ranks come by the optimizer's step, also one that has compiled nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from te_dynamo.cache_key import sources_digest
from te_dynamo.errors import InputError, RanksDifferError
from te_dynamo.fusion_registry import PHASES, fusion_name, registered
from te_dynamo.options import Options

if TYPE_CHECKING:
    from te_dynamo.report import Report

_ENVIRONMENT = (
    "TORCH_COMPILE_DISABLE",
    "TORCHDYNAMO_DISABLE",
    "TRITON_INTERPRET",
    "TE_DYNAMO_DISABLE",
    "TE_DYNAMO_RECIPE",
)
"""What turns the compiler or the kernels off, and the default recipe."""

_MOST_LINES = 20
"""Of differences in an error."""


def check_ranks(group: Any = None) -> None:
    """Stops all ranks of a group if one would train with other numbers: FP8 beside bf16, another recipe, another version.

        dist.init_process_group()                   # on GPUs after torch.cuda.set_device
        te_dynamo.distributed.check_ranks()

    Nothing else notices it: such ranks exchange gradients and go on. Every rank of the group has to call it. It compares

    - at once: the versions of te_dynamo (its sources too), torch and Triton, the registered fusions, and what of the environment turns
      compiling or kernels off;
    - right before the next optimizer step: the options of what backend "te" has compiled for training since the call, and for each linear,
      norm and activation in it the recipe, or that it was left. Sizes of batches, the number of graphs and their order may differ.

    Each is one all-gather of a digest, and one of the texts if the digests differ. There is no other communication: compiling never waits
    for another rank. The second runs inside of `step` of the optimizer of torch's that steps first, which every rank of the group must
    reach. Without an optimizer call `check_ranks` again, after the first batch: it compares what was compiled since the last call, for
    training or not. What `explain` compiles is not compared.

    group: the ranks that compile the same; None is all ranks. With pipeline parallelism it is the ranks of one stage, as stages differ:
        each rank gives the group of its own stage.

    Raises RanksDifferError, on every rank of the group, with a line for each difference and the ranks that have each value. Raises
    InputError on a rank that is not in the group, and what torch.distributed raises without a process group.
    """
    if torch.distributed.get_rank(group) < 0:
        raise InputError(
            f"te_dynamo.distributed.check_ranks: rank {torch.distributed.get_rank()} is not in the group that it was given; each rank "
            "gives a group that it is in"
        )
    earlier = _watches.pop(group, None)
    if earlier is None:
        assert_same(_environment(), group)
    else:
        earlier.before_step.remove()
        earlier.assert_same(group, _environment())
    _watches[group] = _Watch(group)


def assert_same(facts: Mapping[str, str], group: Any = None, details: Mapping[str, str] | None = None) -> None:
    """One all-gather of a digest of `facts` (what -> its value here). Raises RanksDifferError, on all ranks, if one has others.

    details: what -> a text that the error puts behind the value, and that may differ.
    """
    digest = hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()
    if len(set(_gathered(digest, group))) > 1:
        ranks = torch.distributed.get_process_group_ranks(group)
        texts = _gathered((dict(facts), dict(details or {})), group)
        raise RanksDifferError.of(differences(dict(zip(ranks, texts, strict=True))))


def assert_same_where_checked(facts: Mapping[str, str]) -> None:
    """`assert_same` in each group that `check_ranks` was called for, right now: of what would hang in a collective before the next step."""
    for group in _watches:
        assert_same(facts, group)


def tell_compiled(options: Options, report: Report) -> None:
    """The pipeline's side: what it has made of a graph. Nothing happens if nobody has called `check_ranks`."""
    for watch in _watches.values() if _compared else ():
        watch.add(options, report)


@contextlib.contextmanager
def not_compared() -> Iterator[None]:
    """What is compiled inside is to be looked at, maybe by one rank alone, and not to train with."""
    global _compared
    before, _compared = _compared, False
    try:
        yield
    finally:
        _compared = before


class _Watch:
    """What this rank has compiled since `check_ranks`; it is compared before the next optimizer step.

    _ways: (the options, or a linear, norm or activation; whether it was for training) -> how it was compiled -> the reason.
    """

    def __init__(self, group: Any) -> None:
        self._ways: dict[tuple[str, bool], dict[str, str]] = {}
        self._is_compared = False
        self.before_step = register_optimizer_step_pre_hook(lambda *_: self._check(group))

    def add(self, options: Options, report: Report) -> None:
        self._add("options", _in_words(options))
        for match in report.matches:
            way = f"{match.recipe or 'te'} of {match.dtype}" if match.matched else f"left in {match.dtype}"
            self._add(f"{match.kind} {match.module}".strip(), way, match.reason)

    def _add(self, what: str, way: str, reason: str = "") -> None:
        self._ways.setdefault((what, torch.is_grad_enabled()), {})[way] = reason

    @torch.compiler.disable
    def _check(self, group: Any) -> None:
        # The hook stays: torch goes through its hooks while they run, and does not bear one less.
        if torch.distributed.is_initialized() and not self._is_compared:
            self._is_compared = True
            self._ways = {key: ways for key, ways in self._ways.items() if key[1]}
            self.assert_same(group, {})

    def assert_same(self, group: Any, beside: Mapping[str, str]) -> None:
        """Compares it, and facts beside it. What is compiled from now on is for the next call."""
        ways = {what if training else f"{what} (not for training)": how for (what, training), how in self._ways.items()}
        self._ways = {}
        facts = {what: ", ".join(sorted(how)) for what, how in ways.items()}
        details = {what: "; ".join(filter(None, how.values())) for what, how in ways.items()}
        assert_same({**beside, **facts}, group, details)


_watches: dict[Any, _Watch] = {}
"""Group -> what was compiled since it was checked."""

_compared = True


def _environment() -> dict[str, str]:
    import te_dynamo

    try:
        from triton import __version__ as triton
    except ImportError:
        triton = "none"
    fusions = [
        f"{fusion_name(fusion)} ({phase})"
        for of in ("ops", "graph")
        for phase in PHASES
        for fusion in registered(of, phase)
    ]
    return {
        "te_dynamo": f"{te_dynamo.__version__}, sources {sources_digest()[:12]}",
        "torch": str(torch.__version__),
        "triton": triton,
        "registered fusions": ", ".join(fusions) or "none",
        **{f"environment variable {name}": os.environ.get(name, "not set") for name in _ENVIRONMENT},
    }


def _in_words(options: Options) -> str:
    """Those that are not the default, but for Inductor's: no number depends on them, and a pass among them has no stable text."""
    given = [
        f"{field.name}={getattr(options, field.name)!r}"
        for field in dataclasses.fields(options)
        if field.name != "inductor" and getattr(options, field.name) != field.default
    ]
    return ", ".join(given)


def _gathered(value: Any, group: Any) -> Sequence[Any]:
    values = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(values, value, group=group)
    return values


def differences(texts: Mapping[int, tuple[Mapping[str, str], Mapping[str, str]]]) -> list[str]:
    """A line for each fact that ranks do not share: its values, with the ranks that have each, the one of most ranks first.

    texts: rank -> (facts, details), as `assert_same` has them.
    """
    lines = []
    for what in dict.fromkeys(what for facts, _ in texts.values() for what in facts):
        ranks_of: dict[str, list[int]] = {}
        for rank, (facts, _) in texts.items():
            ranks_of.setdefault(facts.get(what, "not compiled"), []).append(rank)
        if len(ranks_of) > 1:
            values = []
            for value, ranks in sorted(ranks_of.items(), key=lambda item: -len(item[1])):
                detail = texts[ranks[0]][1].get(what)
                values.append(f"{value} on rank {_ranges(ranks)}" + (f" ({detail})" if detail else ""))
            lines.append(f"{what}: " + " | ".join(values))
    left = len(lines) - _MOST_LINES
    return lines if left <= 0 else [*lines[:_MOST_LINES], f"and {left} more"]


def _ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
