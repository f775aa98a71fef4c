"""`compare`: what a recipe costs a model in accuracy, linear by linear and as a whole."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from torch.utils._pytree import tree_leaves

from te_dynamo.accuracy.comparison import Comparison, RecipesCompared
from te_dynamo.accuracy.probes import Graphs, Mode, Session, is_out_of_memory
from te_dynamo.accuracy.rows import decibels
from te_dynamo.accuracy.sums import error_sums
from te_dynamo.accuracy.whole import Difference, Outcome, run_step
from te_dynamo.errors import InputError, InvalidOptionError
from te_dynamo.inspect.dynamo import Seen, dynamo_untouched, one_at_a_time
from te_dynamo.inspect.left_out import linears_of, why_in_no_graph
from te_dynamo.inspect.target import compiled_afresh, not_in_place, options_and_mode, unchanged, unwrap
from te_dynamo.options import UNSET, Options, names_near_keywords
from te_dynamo.recipe import Recipe, names
from te_dynamo.report import coverage
from te_dynamo.user_code import modules_at
from te_dynamo.weights.frozen import is_dropped

Batch = tuple[tuple[Any, ...], Mapping[str, Any]]


@names_near_keywords
def compare(
    model: Callable[..., Any],
    *args: Any,
    recipe: str | Recipe | None = UNSET,
    rules: Sequence[tuple[str, str | Recipe | None]] = UNSET,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    steps: int = 1,
    batches: Iterable[Any] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    **kwargs: Any,
) -> Comparison:
    """Runs `model` in its own precision and in a recipe, on the same inputs, and says what the recipe costs.

    model:   a module, a function, or the result of torch.compile, as for te_dynamo.explain.
    args, kwargs: what it is called with, in each step.
    recipe, rules, mode: as for te_dynamo.compile; a compiled module's own by default.
    options: as for torch.compile(model, backend="te"): recipe and rules choose what is compared; a compiled module's own by default.
    steps:   how many times it runs; each draws other random numbers.
    batches: what it is called with instead of args: of each step a tuple of arguments, a dictionary of keywords, or one argument.
    loss:    a function of the model's result that gives one number; backward begins there. By default the result itself or its "loss", where
             that is one number; else a gradient drawn at random for each floating output, the same in both runs.

    Backward runs where something requires grad; torch.no_grad() around the call leaves it out. Left as they were: all that te_dynamo.explain
    leaves. It takes the memory of a step, of one linear's quantized tensors, and of the gradients and outputs once more, on the CPU.

    Raises InputError where no linear is in a recipe or a loss is no number, InvalidOptionError for wrong options.
    """
    target, own = unwrap(model)
    given = options_and_mode(own, options, mode, recipe, rules)
    return _compare(target, [given], _batches(args, kwargs, steps, batches), loss)[0]


@names_near_keywords
def compare_recipes(
    model: Callable[..., Any],
    *args: Any,
    recipes: Sequence[str | Recipe] | None = None,
    rules: Sequence[tuple[str, str | Recipe | None]] = UNSET,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    steps: int = 1,
    batches: Iterable[Any] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    **kwargs: Any,
) -> RecipesCompared:
    """`compare` for each of several recipes on the same runs: which recipe suits this model.

    recipes: names or te_dynamo.recipe objects; None takes every name. A compiled module's own recipe is not among them.
    The other arguments are compare's, the rules those of each recipe.

    Raises InvalidOptionError for `recipe` in options: `recipes` has all of them.
    """
    if "recipe" in (options or {}):
        raise InvalidOptionError(
            "te_dynamo.compare_recipes: expected recipes=[...], got recipe; te_dynamo.compare measures one"
        )
    target, own = unwrap(model)
    given = options_and_mode(own, options, mode, rules=rules)
    if recipes is None:
        recipes = names()
    if isinstance(recipes, (str, Recipe)):
        raise InvalidOptionError(
            f"te_dynamo.compare_recipes: expected recipes=[...], got {recipes!r}; te_dynamo.compare measures one"
        )
    if not recipes:
        raise InvalidOptionError("te_dynamo.compare_recipes: expected recipes, got none")
    each = [{**given, "recipe": recipe} for recipe in recipes]
    return RecipesCompared(_compare(target, each, _batches(args, kwargs, steps, batches), loss))


def _batches(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], steps: int, batches: Iterable[Any] | None
) -> list[Batch]:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise InputError(f"te_dynamo.compare: steps must be 1 or more, got {steps!r}")
    if batches is None:
        return [(args, kwargs)] * steps
    if args or kwargs or steps > 1:
        raise InputError("te_dynamo.compare: expected the model's arguments and steps, or batches, got both")
    if isinstance(batches, (Tensor, Mapping, str)):
        raise InputError(
            f"te_dynamo.compare: batches is a list with what each step is called with, got a {type(batches).__name__}"
        )
    found: list[Batch] = []
    for batch in batches:
        if isinstance(batch, Mapping):
            found.append(((), batch))
        else:
            found.append((tuple(batch) if isinstance(batch, (tuple, list)) else (batch,), {}))
    if not found:
        raise InputError("te_dynamo.compare: batches are empty")
    return found


@one_at_a_time
def _compare(
    target: Callable[..., Any],
    options: Sequence[Mapping[str, Any]],
    batches: Sequence[Batch],
    loss: Callable[[Any], Tensor] | None,
) -> list[Comparison]:
    parsed = [Options.parse(each) for each in options]
    _check_has_values(target, batches)
    run = _Run(target, parsed, loss)
    with (
        warnings.catch_warnings(),
        not_in_place(target) as in_place,
        unchanged(target, *batches[0]),
        run.shown(len(batches)),
        dynamo_untouched() as run.seen,
    ):
        warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
        run.compiled = compiled_afresh(target, in_place, backend=run.graphs)
        run.steps(batches)
    return [run.comparison(index) for index in range(len(parsed))]


def _check_has_values(target: Callable[..., Any], batches: Sequence[Batch]) -> None:
    parameters = list(target.parameters()) if isinstance(target, torch.nn.Module) else []
    if any(map(is_dropped, parameters)):
        raise InputError(
            "te_dynamo.compare: the model's own weights were dropped by te_dynamo.freeze: compare it before"
        )
    if any(isinstance(x, Tensor) and x.is_meta for x in [*parameters, *tree_leaves(batches)]):
        raise InputError(
            "te_dynamo.compare: expected a model and inputs on cuda or cpu, got some on the device 'meta', which have no values; "
            "te_dynamo.explain takes these"
        )


class _Run:
    """All runs of one comparison, by one compiled model."""

    compiled: Callable[..., Any]

    def __init__(
        self, target: Callable[..., Any], options: Sequence[Options], loss: Callable[[Any], Tensor] | None
    ) -> None:
        self.target, self.options, self.loss = target, options, loss
        self.session = Session()
        self.graphs = Graphs(options, self.session)
        self.differences = [Difference() for _ in options]
        self.notes: list[dict[str, None]] = [{} for _ in options]
        self.done = 0
        self.seen = Seen()

    def steps(self, batches: Sequence[Batch]) -> None:
        """Each step of each recipe: measured in the model's own precision, then in the recipe."""
        for args, kwargs in batches:
            for index in range(len(self.options)):
                self.session.recipe = index
                exact = self._attempt(Mode.MEASURED, args, kwargs)
                if exact is None:
                    continue
                if not self.done and not index:
                    self._check_matched()
                    self._check_repeats(exact, args, kwargs)
                found = self._attempt(Mode.QUANTIZED, args, kwargs)
                if found is not None:
                    self.differences[index].add(exact, found)
            self.done += 1
            torch.rand(())  # the next step draws other numbers

    def comparison(self, index: int) -> Comparison:
        """What was found of one of the options."""
        options, rows = self.options[index], self.graphs.rows[index].values()
        records = self.graphs.records(index)
        summary = {
            "linears": sum(record.matched for record in records),
            "linears_in_all": len(records),
            "coverage": coverage(records),
            "steps": self.done,
            **self.differences[index].to_dict(),
        }
        name = options.recipe.describe() if options.recipe is not None else "rules alone"
        finished = [row.finish(self.done) for row in rows]
        return Comparison(name, finished, summary, list(self.notes[index]), options.rules)

    def _attempt(self, mode: Mode, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Outcome | None:
        """None where memory did not do."""
        try:
            return self._step(mode, args, kwargs)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        precision = "the recipe" if mode is Mode.QUANTIZED else "the model's own precision"
        self.notes[self.session.recipe][
            f"step {self.done + 1} ran out of memory in {precision}: the rows have what was measured until then"
        ] = None
        return None

    def _step(self, mode: Mode, args: tuple[Any, ...], kwargs: Mapping[str, Any], backward: bool = True) -> Outcome:
        self.session.mode = mode
        try:
            with unchanged(self.target, args, kwargs):
                return run_step(self.compiled, self.target, args, kwargs, self.loss, self.session, backward)
        finally:
            self.session.mode = Mode.PLAIN

    def _check_matched(self) -> None:
        """Raises InputError where there is nothing to measure."""
        if any(self.graphs.rows):
            return
        reasons = Counter(record.reason for record in self.graphs.records(0) if record.reason).most_common(3)
        listed = "; ".join(f"{times} x {reason}" for reason, times in reasons)
        linears, modules = linears_of(self.target), modules_at(self.target)
        in_none = dict.fromkeys(why_in_no_graph(self.target, path, self.seen, modules) for path in linears or [""])
        why = "; ".join(filter(None, in_none)) or "there is none in the graphs that Dynamo makes of it"
        raise InputError(
            "te_dynamo.compare: no linear of the model is in a recipe: "
            + (f"{listed}. te_dynamo.explain has a row for each" if listed else why)
        )

    def _check_repeats(self, exact: Outcome, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Notes what the whole model's differences hold that is not the recipe's."""
        if not exact.outputs:
            self._note_all("the model returns no floating tensor: there is no loss, output or gradient to compare")
            return
        again = self._step(Mode.PLAIN, args, kwargs, backward=False)
        sums = sum(error_sums(one, other) for one, other in zip(exact.outputs, again.outputs, strict=True))
        assert isinstance(sums, Tensor)
        signal, noise = sums.tolist()
        if signal != signal:
            self._note_all("the model's own precision gives NaN or infinity: its differences are not known")
        elif noise:
            snr = decibels(signal, noise)
            self._note_all(
                "two runs of the model in its own precision, from one random state, differ"
                + ("" if snr is None else f" by {snr:.1f} dB")
                + ": the whole model's differences hold that too"
            )

    def _note_all(self, text: str) -> None:
        for notes in self.notes:
            notes[text] = None

    @contextlib.contextmanager
    def shown(self, steps: int) -> Iterator[None]:
        """A bar on a terminal, a step of it for each half of a linear that is measured."""
        console = Console(stderr=True)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("compiling", total=None)

            def measured(path: str) -> None:
                halves = 2 if torch.is_grad_enabled() or self.session.in_backward else 1
                total = halves * steps * sum(map(len, self.graphs.rows))
                progress.update(task, total=total, advance=1, description=f"step {self.done + 1}: {path}")

            self.session.measured = measured
            yield
