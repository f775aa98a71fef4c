"""`written_by` against what torch's functions really write: its operator database, and what else it binds (helpers/writes)."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.writes.calls import database_calls, guessed_calls
from helpers.writes.observed import Observed, spelled
from helpers.writes.special import calls_of_writers, flagged_calls, traced_functions
from torch import fx

NAMED_THOUGH_IDLE = {
    "torch.empty(out)",
    "torch.fused_moving_avg_obs_fake_quant(6)",
    *(f"torch._fused_{name}_(1)" for name in ("sgd", "adam", "adamw")),
} | {f"torch._amp_{name}_(1)" for name in ("foreach_non_finite_check_and_unscale", "update_scale")}
"""What `written_by` names, and what was written in no call. `empty` leaves what is in `out`; schemas say it of the others: gradients are
divided by a loss's scale if there is one, and a zero point is often zero."""


@pytest.fixture(scope="module")
def observed() -> Observed:
    """What was seen of all calls."""
    found = Observed()
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        for call in database_calls():
            with contextlib.suppress(Exception):  # not each variant takes all that the operator takes
                found.run(*call)
        for guesses in guessed_calls(set(found).__contains__):
            possible = 0
            for call in guesses:
                with contextlib.suppress(Exception):
                    found.run(*call)
                    possible += 1
                if possible == 2:
                    break
        for call in itertools.chain(flagged_calls(True), flagged_calls(False), calls_of_writers()):
            found.run(*call)
        for function, args in traced_functions():
            torch.compile(function, backend=_observing(found), fullgraph=True)(*args)
    return found


def _observing(found: Observed) -> Callable[..., Any]:
    class Interpreter(fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            return found.call("call_function", target, args, kwargs, lambda: target(*args, **kwargs))

        def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
            return found.call(
                "call_method", target, args, kwargs, lambda: getattr(args[0], target)(*args[1:], **kwargs)
            )

    return lambda module, _: Interpreter(module).run


@pytest.mark.slow
def test_what_a_function_writes_is_named(observed: Observed) -> None:
    missed = [f"{name}({where}): {call}" for name, seen in observed.items() for where, call in seen.missed.items()]
    written = sum(len(seen.written) for seen in observed.values())
    print(f"{len(observed)} functions run, {written} arguments written, {len(missed)} of them not named")
    assert not missed, "\n".join(missed)
    assert len(observed) > 3000 and written > 1700, "the sweep saw less than it did"


@pytest.mark.slow
def test_what_never_writes_is_not_named(observed: Observed) -> None:
    """Operators are left out: their schemas say what they may write, and there is no version to tell a write of equal bytes."""
    wrong = {
        f"{name}({where})": seen.idle[where]
        for name, seen in observed.items()
        for where in seen.named
        if not seen.written[where] and not name.startswith("torch.ops") and f"{name}({where})" not in NAMED_THOUGH_IDLE
    }
    assert not wrong, "\n".join(f"{name}: {call}" for name, call in wrong.items())


@pytest.mark.parametrize("on", [True, False])
def test_flags_decide(on: bool) -> None:
    """Named is what is written, and no more: `batch_norm` reads its statistics where it does not train."""
    wrong = []
    for call in flagged_calls(on):
        (found := Observed()).run(*call)
        seen = found[name := spelled(*call[:2])]
        assert bool(seen.written) == on, f"the flag of {name} no longer decides"
        if seen.named != seen.written:
            wrong.append(f"{name}: written {sorted(seen.written)}, named {sorted(seen.named)}")
    assert not wrong, "\n".join(wrong)
