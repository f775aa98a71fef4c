"""What a person is told without asking, where a model runs otherwise than was probably meant.

Each is a warning, once a model, and a note of `explain`'s:

    nothing in a recipe     no linear of the model is in one
    a rule without effect   no module path matches it
    quantized already       linears of transformers, Transformer Engine and their like, which stay what they are
    a cache without effect  weight_cache="step" keeps nothing of a graph's weights
    nothing to gather       regather=True, and backward needs nothing that forward gathers in FP8

Once a process it is told that the reference runs in place of the kernels, that a recipe is emulated, and that linears are left for their cost.
"""

from __future__ import annotations

import contextlib
import contextvars
import difflib
import itertools
import re
import warnings
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import fx, nn

from te_dynamo.kernels.runtime import availability
from te_dynamo.kernels.runtime.target import is_acting
from te_dynamo.options import Options
from te_dynamo.report import MatchRecord, Report, in_one, without_numbers
from te_dynamo.rules.places import has_places, lists_of, taken
from te_dynamo.user_code import paths_of
from te_dynamo.weights.checkpoint.torchao import is_readable

_QUANTIZED_BY = (
    "torchao",
    "transformer_engine",
    "bitsandbytes",
    "transformers.integrations",
    "compressed_tensors",
    "hqq",
    "optimum",
)
"""Packages with linears of their own, which multiply what they have quantized themselves."""


class _Model:
    """What is known of a model from the graphs that were compiled so far.

    linears: paths of the linears in them. matched: whether one is in a recipe. told: the warnings that were given.
    """

    def __init__(self, told: set[str]) -> None:
        self.linears: set[str] = set()
        self.matched = False
        self.told = told


_models: weakref.WeakKeyDictionary[nn.Module, _Model] = weakref.WeakKeyDictionary()
_told_of_functions: set[str] = set()
_told_once: set[str] = set()
_unheard: contextvars.ContextVar[bool] = contextvars.ContextVar("te_dynamo_unheard", default=False)


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Inside, nothing warns and nothing is remembered: of a run for a device that is not here. Its report has the notes."""
    token = _unheard.set(True)
    try:
        yield
    finally:
        _unheard.reset(token)


def advise(model: nn.Module | None, whole: bool, options: Options, report: Report) -> None:
    """Warns, and adds to `report.notes`.

    model: the module that was compiled, None for a function.
    whole: whether the graph is all of it, as far as Dynamo knows yet.
    """
    if _unheard.get():
        known = _Model(set())
    else:
        known = _Model(_told_of_functions) if model is None else _models.setdefault(model, _Model(set()))
    for text in _advice(model, known, whole, options, report):
        report.notes.append(text)
        if text not in known.told and not _unheard.get():
            known.told.add(text)
            warnings.warn(f"te_dynamo: {text}", stacklevel=2)


def warn_if_emulated(gm: fx.GraphModule, report: Report) -> None:
    """One warning a process for each reason why the kernels multiply no FP8; of a recipe that the GPU emulates, a note of `explain`'s too."""
    matched = [record for record in report.matches if record.matched]
    values = (node.meta.get("example_value") for node in gm.graph.nodes)
    device = next((value.device for value in values if isinstance(value, torch.Tensor)), None)
    if not matched or device is None:
        return
    if not is_acting() and not (available := availability.kernels_available(device)).ok:
        text = f"te_dynamo: {available.reason}: the reference path runs, with the same results, much slower than bf16"
        _warn_once(available.reason, text)
        return
    for recipe, gpu in dict.fromkeys((record.recipe, record.emulated_on) for record in matched if record.emulated_on):
        text = f"{recipe} is emulated on {gpu}, whose tensor cores do not multiply its operands: exact, and slower than bf16"
        report.notes += [text] * (text not in report.notes)
        _warn_once(text, f"te_dynamo: {text}")


def warn_if_left_for_cost(reasons: Sequence[str]) -> None:
    """One warning a process where linears are left as they are because the recipe would be slower, for these reasons."""
    if reasons:
        text = f"{len(reasons)} linears stay in the model's precision, which is faster for them: {reasons[0]}"
        _warn_once("cost", f"te_dynamo: {text}. te_dynamo.explain lists all")


def _warn_once(subject: str, text: str) -> None:
    if subject not in _told_once and not _unheard.get():
        _told_once.add(subject)
        warnings.warn(text, stacklevel=3)


def _advice(model: nn.Module | None, known: _Model, whole: bool, options: Options, report: Report) -> Iterator[str]:
    linears = [match for match in report.matches if match.kind == "linear"]
    known.linears |= {match.module for match in linears}
    known.matched |= any(match.matched for match in linears)
    modules = [] if model is None else list(model.named_modules())
    asked = any(recipe is not None for recipe in (options.recipe, *(recipe for _, recipe in options.rules)))
    if asked and not known.matched and (whole or _all_seen(modules, known)):
        yield from _nothing_matched(linears, modules)
    if modules or whole:
        paths = [*(paths_of(model) if model is not None else ()), *known.linears]
        report.notes += _places_taken(options, paths)
        yield from _rules_without_effect(options, paths)
    yield from _quantized_already(modules)
    matched = [match for match in linears if match.matched]
    if options.weight_cache == "step" and matched and not report.workspaces:
        yield (
            f'weight_cache="step" keeps nothing of the {len(matched)} linears of this graph: only weights that are plain nn.Parameters are '
            "kept, none of FSDP's, no DTensors, and none that the graph itself writes; they are quantized in each call"
        )
    if report.slow_gather:
        yield report.slow_gather
    if options.regather and matched and report.gathered_again == 0:
        yield (
            f"regather=True gathers nothing again for the {len(matched)} linears of this graph: only the inputs of sequence-parallel linears "
            "with one scale a tensor are gathered in FP8, and what is checkpointed is gathered again in any case"
        )


def _all_seen(modules: Sequence[tuple[str, nn.Module]], known: _Model) -> bool:
    paths = {path for path, module in modules if type(module) is nn.Linear}
    return bool(paths) and paths <= known.linears


def _nothing_matched(linears: Sequence[MatchRecord], modules: Sequence[tuple[str, nn.Module]]) -> Iterator[str]:
    if linears:
        groups: dict[str, list[str]] = {}
        for match in linears:
            groups.setdefault(without_numbers(match.reason), []).append(match.reason)
        largest = sorted(groups.values(), key=len, reverse=True)[:3]
        listed = "; ".join(f"{len(alike)} x {in_one(alike)}" for alike in largest)
        yield f"no linear of the model is in a recipe: {listed}. te_dynamo.explain has a row for each"
    elif modules:
        yield "no linear was found in the model: it runs as with Inductor alone"


def _places_taken(options: Options, paths: Sequence[str]) -> Iterator[str]:
    """Of each rule that counts a model's modules, which it takes."""
    for (pattern, _), regex in zip(options.rules, options.searched, strict=True):
        if has_places(pattern) and (found := taken(regex, paths)):
            listed = ", ".join(found if len(found) < 6 else [*found[:2], "..", *found[-2:]])
            yield f"the rule {pattern!r} takes {listed} ({len(found)})"


def _rules_without_effect(options: Options, paths: Sequence[str]) -> Iterator[str]:
    for (pattern, _), regex in zip(options.rules, options.searched, strict=True):
        if not any(re.search(regex, path) for path in paths):
            names = sorted({*paths, *(part for path in paths for part in path.split(".") if not part.isdigit())} - {""})
            near = difflib.get_close_matches(
                re.sub(r"\\.|\{.*?\}|[\\^$()|\[\]?*+]", "", pattern).strip("."), names, n=3
            )
            hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
            if has_places(pattern):
                lists = (f"{parent or 'the model'} ({len(numbers)})" for parent, numbers in lists_of(paths))
                hint += f"; its lists of modules: {', '.join(itertools.islice(lists, 5)) or 'none'}"
            yield f"no module path of the model matches the rule {pattern!r}{hint}"


def _quantized_already(modules: Sequence[tuple[str, nn.Module]]) -> Iterator[str]:
    found: dict[str, list[str]] = {}
    for path, module in modules:
        parameters = [each for each in module.parameters(recurse=False) if not is_readable(each)]
        classes = type(module), *(type(parameter) for parameter in parameters)
        for cls in classes:
            package = next((p for p in _QUANTIZED_BY if f"{cls.__module__}.".startswith(f"{p}.")), "")
            if package and (isinstance(module, nn.Linear) or "Linear" in type(module).__name__):
                found.setdefault(package, []).append(path)
                break
    for package, paths in found.items():
        yield (
            f"linears of {package} are in the model ({len(paths)}, {paths[0]!r} first): they quantize by themselves and are in no recipe; "
            "build the model without them to have te_dynamo do it"
        )
