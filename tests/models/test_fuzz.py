"""Small models drawn at random (fuzz_models.py), in a recipe: against a float64 oracle (fuzz_oracle.py), and against themselves compiled otherwise.

`make fuzz N=2000` runs any number of them, others each time. What fails is shrunk and printed as a program.

    the oracle      outputs and every gradient, within what roundings move them; what is there, None or shares memory as in eager
    fusions         with and without: every bit, but for gradients where linears that share an input have one dgrad, which is rounded once
    weight cache    several steps with it and without: every bit
    freeze          in inference, the same
    Inductor        its code and the graphs run as they are: within what roundings move them (it keeps fp32 inside its kernels)
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
import re
import statistics
from typing import Any

import pytest
import torch
from helpers.fuzz.fuzz_blocks import MATCHED, LinearCall
from helpers.fuzz.fuzz_models import Program, programs
from helpers.fuzz.fuzz_oracle import FACTOR, OutOfRangeError, Step, eager_errors, oracle_steps, run, tolerances
from helpers.models.recipe_cases import te
from hypothesis import HealthCheck, given, reject, seed, settings
from torch import Tensor, nn

import te_dynamo
from te_dynamo import recipe as recipes
from te_dynamo.recipe import Recipe

MODELS = int(os.environ.get("FUZZ_MODELS", 50))
SEED = int(os.environ.get("FUZZ_SEED", 0))

AGAINST = {"fusions": programs(), "weights kept": programs(), "inductor": programs(most_around=1, most_steps=1)}
"""What programs are compared to beside the oracle. Inductor takes seconds for each, more for a large one."""

MOVES = 3
MORE_MOVES = 32
"""Before a tensor is said to be wrong: a rounding that moves it may be rare, one value in thousands that lies on an edge."""


class Mismatch(AssertionError):
    """Two runs of one program that disagree."""


class NotAProgramError(Exception):
    """Eager raises too, or torch's own backend."""


class Failure(Exception):
    """What is wrong, and the program."""


@dataclasses.dataclass
class Compiled:
    """A program's steps through the backend, and what the backend says that it did."""

    steps: list[Step]
    report: list[Any]

    def fired(self, fusion: str) -> int:
        return sum(times for report in self.report for _, name, times in report.fusions if name == fusion)


def evaluated(text: str) -> Any:
    """An option as a program's text has it."""
    return eval(text, vars(recipes))


def compiled_run(
    program: Program, only: list[dict[str, Tensor]] | None = None, freeze: bool = False, **options: Any
) -> Compiled:
    """only: the weights of each step, in place of those that the program's updates make."""
    model = program.model()
    if freeze:
        te_dynamo.freeze(model)
    options |= {"recipe": evaluated(program.recipe), "rules": evaluated(program.rules)}
    with te_dynamo.capture() as graphs:
        steps = run(program, te(model, dynamic=program.dynamic, **options), model, only)
    return Compiled(steps, graphs.reports)


# ---- which linears are in which recipe


def expected_recipe(program: Program, call: LinearCall) -> Recipe | None:
    """The recipe of a linear by the rules and by its sizes."""
    rules = [*evaluated(program.rules), ("", evaluated(program.recipe))]
    recipe = recipes.as_recipe(next(chosen for pattern, chosen in rules if re.search(pattern, call.path)))
    return None if recipe is None or call.n % recipe.alignment or call.k % recipe.alignment else recipe


def recipes_of(program: Program, compiled: Compiled) -> list[Recipe | None]:
    """The recipe of each linear of the program, by the records of what was matched. Raises Mismatch if one should have another."""
    records = [record for report in compiled.report for record in report.matches if record.kind == "linear"]
    found = []
    for call in program.written(False)[1]:
        here = [record for record in records if record.source.endswith(f":{call.line}")]
        expected = expected_recipe(program, call)
        matched = {record.recipe for record in here if record.matched}
        if unmatched := [record for record in here if not record.matched and not record.reason]:
            raise Mismatch(f"line {call.line} is left without a reason: {unmatched}")
        if matched - {"" if expected is None else expected.describe()}:
            raise Mismatch(f"line {call.line} is in {matched}, expected {expected}: {here}")
        if call.style in MATCHED and expected and not matched and all(0 not in leading for leading in program.leading):
            raise Mismatch(f"line {call.line} is not in {expected.describe()}: {here}")
        found.append(expected if matched else None)
    return found


# ---- what is compared


class Oracle:
    """The oracle's steps of a program with given weights, and by how much roundings move each of their tensors."""

    def __init__(self, program: Program, weights: list[dict[str, Tensor]], recipes: list[Recipe | None]) -> None:
        self.moved: list[list[Step]] = []
        self.eager: list[dict[str, float]] | None = None
        self._steps = functools.partial(oracle_steps, program, weights, recipes)
        self._weights = weights
        self.program, self.exact = program, self._steps(None)
        self._move(MOVES)

    def _move(self, times: int) -> None:
        self.moved += [self._steps(len(self.moved) + i) for i in range(times)]

    def tolerances(self, number: int) -> dict[str, float]:
        found = tolerances(self.program, self.exact[number], [steps[number] for steps in self.moved])
        eager = self.eager[number] if self.eager else {}
        return {name: max(allowed, FACTOR * eager.get(name, 0.0)) for name, allowed in found.items()}

    def compare(self, what: str, steps: list[Step], others: list[Step] | None = None) -> None:
        """Raises Mismatch where `steps` are further from `others`, or from the oracle's, than roundings move them."""
        for number, step in enumerate(steps):
            other = (self.exact if others is None else others)[number].tensors()
            errors = {name: _distance(value, other[name]) for name, value in step.tensors().items()}
            if _above(errors, self.tolerances(number)) and len(self.moved) < MORE_MOVES:
                self._move(MORE_MOVES)
            if _above(errors, self.tolerances(number)) and self.eager is None:
                self.eager = eager_errors(self.program, self._weights)
            if wrong := _above(errors, allowed := self.tolerances(number)):
                norms = {name: float(value.double().norm()) for name, value in self.exact[number].tensors().items()}
                lines = [
                    f"{name}: off by {errors[name]:.3g}, allowed {allowed[name]:.3g}, norm {norms[name]:.3g}"
                    for name in wrong
                ]
                raise Mismatch("\n".join([f"{what}, step {number}:", *lines]))

    def sharpness(self) -> list[float]:
        """The tolerance of each tensor by its norm."""
        norms = [{name: float(value.norm()) for name, value in step.tensors().items()} for step in self.exact]
        return [self.tolerances(i)[name] / norm for i, step in enumerate(norms) for name, norm in step.items() if norm]


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm())


def _above(errors: dict[str, float], allowed: dict[str, float]) -> list[str]:
    return [name for name, error in errors.items() if not error <= allowed[name]]


def compare_bits(what: str, steps: list[Step], others: list[Step], only_outputs: bool = False) -> None:
    """Raises Mismatch where two runs differ in a bit (but for the sign of zero)."""
    for number, (step, other) in enumerate(zip(steps, others, strict=True)):
        ours, theirs = step.tensors(), other.tensors()
        wrong = [
            name
            for name in ours
            if not (only_outputs and "gradient" in name) and not torch.equal(ours[name], theirs[name])
        ]
        if wrong:
            lines = [
                f"{name}: off by {_distance(ours[name], theirs[name]):.3g} of {float(theirs[name].double().norm()):.3g}"
                for name in wrong
            ]
            raise Mismatch("\n".join([f"{what}, step {number}, differ in a bit:", *lines]))


def compare_described(step_by_step: list[Step], eager: list[Step]) -> None:
    for number, (step, other) in enumerate(zip(step_by_step, eager, strict=True)):
        ours, theirs = step.described(), other.described()
        for name, value in ours.items():
            if value != theirs[name]:
                raise Mismatch(f"step {number}, {name}: {value}, eager has {theirs[name]}")


SHARED = "fuse_shared_input"


def compare_fusions(program: Program, fused: Compiled, weights: list[dict[str, Tensor]], oracle: Oracle) -> None:
    unfused = compiled_run(program, weights, fusions=False)
    rounded_once = fused.fired(SHARED) > 0
    compare_bits("fused and unfused", fused.steps, unfused.steps, only_outputs=rounded_once)
    if rounded_once:
        oracle.compare("fused and unfused", unfused.steps, fused.steps)


def compare_kept(program: Program, fused: Compiled) -> None:
    how: dict[str, Any] = {"freeze": True} if program.inference else {"weight_cache": "step"}
    kept = compiled_run(program, **how)
    if kept.fired(SHARED) != fused.fired(SHARED):  # q, k and v of kept weights are multiplied apart
        kept, fused = (compiled_run(program, fusions=[f"-{SHARED}"], **options) for options in (how, {}))
    compare_bits("kept weights and none", kept.steps, fused.steps)


def _raises(program: Program, call: Any) -> bool:
    """Whether the program fails in `call`, in eager or in torch's own compiler."""
    try:
        run(program, call, getattr(call, "_orig_mod", call))
    except Exception:
        return True
    return False


def _finite(weights: dict[str, Tensor]) -> bool:
    return all(bool(w.isfinite().all()) for w in weights.values())


def run_or_reject(program: Program, model: nn.Module, backend: str, *args: Any, **options: Any) -> Compiled:
    """`compiled_run`. Raises NotAProgramError where it fails and torch's own backend fails too."""
    try:
        return compiled_run(program, *args, **options)
    except Exception as error:
        torch._dynamo.reset()
        if _raises(program, torch.compile(model, backend=backend, dynamic=program.dynamic)):
            raise NotAProgramError from error
        raise


def check(program: Program, *against: str) -> list[float]:
    """Compares a program to its oracle, and to itself compiled otherwise; the tolerances by the tensors' norms.

    Raises Mismatch; NotAProgramError where eager or torch's own compiler raises too; OutOfRangeError.
    """
    model = program.model()
    if _raises(program, model):
        raise NotAProgramError
    fused = run_or_reject(program, model, "aot_eager")
    # Weights that overflow are of no use to a step; if wrong gradients made them so, the step before shows it.
    weights = list(itertools.takewhile(_finite, (step.weights for step in fused.steps)))
    program = dataclasses.replace(program, leading=program.leading[: len(weights)])
    fused.steps = fused.steps[: len(weights)]
    oracle = Oracle(program, weights, recipes_of(program, fused))
    compare_described(fused.steps, run(program, model, model, weights))
    oracle.compare("the package and the oracle", fused.steps)
    if "fusions" in against:
        compare_fusions(program, fused, weights, oracle)
    if "weights kept" in against:
        compare_kept(program, fused)
    if "inductor" in against:
        inductor = run_or_reject(program, model, "inductor", weights, codegen="inductor")
        oracle.compare("Inductor's code and the oracle", inductor.steps)
    return oracle.sharpness()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("against", "share", "part"), [("fusions", 4, 0), ("fusions", 4, 1), ("weights kept", 2.5, 2), ("inductor", 10, 3)]
)
def test_drawn_models(against: str, share: float, part: int) -> None:
    """FUZZ_MODELS: how many, in all parts. FUZZ_SEED: which.

    share: this part has one of so many of them.
    """
    tolerated: list[float] = []

    @seed(4 * SEED + part)
    @settings(
        max_examples=math.ceil(MODELS / share),
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(AGAINST[against])
    def checked(program: Program) -> None:
        try:
            tolerated.extend(check(program, against))
        except (NotAProgramError, OutOfRangeError):
            reject()
        except Exception as error:
            raise Failure(
                f"{type(error).__name__}: {error}\n\nof this program, compared: {against}\n\n{program.script()}"
            ) from error

    checked()
    # The median: of programs of many steps tolerances differ by orders of magnitude, so that larger quantiles differ from draw to draw.
    assert statistics.median(tolerated) < 0.3, "the tolerances would hide a lost term"
