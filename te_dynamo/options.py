"""The options of `torch.compile(model, backend="te", options=...)`: ours checked, Inductor's passed through."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from torch import nn

from te_dynamo import recipe as recipes
from te_dynamo._compat import sm_carveout
from te_dynamo.errors import InvalidOptionError
from te_dynamo.recipe import Recipe
from te_dynamo.rules.places import check, expression, has_places, lists_of
from te_dynamo.user_code import paths_of

Function = TypeVar("Function", bound=Callable[..., Any])


class _Unset:
    def __repr__(self) -> str:  # in help() of a function with this default
        return "UNSET"


UNSET: Any = _Unset()
"""The default of a keyword whose option is then not given."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What a user asked for.

    recipe:   the recipe of every linear that no rule names; None leaves the model in its own precision. Where it is not given it is the
              environment's TE_DYNAMO_RECIPE, else current scaling. TE_DYNAMO_DISABLE=1 goes before all of this: there is no recipe then.
    rules:    (pattern, recipe or None) pairs; the first whose pattern is found in a linear's path decides its recipe. A pattern is a regular
              expression, in which `{-15%:}` and its like are places in a list of modules (te_dynamo/rules/places.py).
    codegen:  "inductor", or "eager" to run the rewritten graphs as they are.
    fusions:  False keeps every te operation by itself, for debugging; names of fusions are those to run, or with "-" before
              each those to leave out.
    weight_cache: "step" keeps each quantized weight until it is written; None quantizes it in each call.
    weight_cache_check: compares what is kept with the weights before each call, for debugging.
    save_weights: what backward has of a weight: "quantized", the data that forward made; "original", the weight, which it quantizes
              again; None, the first where it costs no more than 16 bits save elsewhere, and the second under FSDP.
    low_memory: orders backward by what is alive, and makes columnwise copies late: a step's peak is no higher than in 16 bits.
    regather: backward gathers again what forward gathered of a sequence-parallel activation; forward saves the rank's own part of it.
    replayed: the caller replays each step as a CUDA graph, so that no layer stays in 16 bits because the CPU is the bound.
    require_coverage: the least share of each graph's linear FLOPs that has to be in a recipe, 0 to 1; by te_dynamo.compile also of what
                      runs in no graph.
    sm_margin: multiprocessors that products leave to kernels beside them; as many as torch's own leave, unless given.
    inductor: options passed on to Inductor, a mode's included.
    regexes:  the rules' patterns with the places that they have in the model: `in_model` makes them, nobody gives them.
    """

    recipe: Recipe | None = dataclasses.field(default_factory=lambda: _default_recipe())
    rules: tuple[tuple[str, Recipe | None], ...] = ()
    codegen: Literal["inductor", "eager"] = "inductor"
    fusions: bool | tuple[str, ...] = True
    weight_cache: Literal["step"] | None = None
    weight_cache_check: bool = False
    save_weights: Literal["original", "quantized"] | None = None
    low_memory: bool = True
    regather: bool = False
    replayed: bool = False
    require_coverage: float = 0.0
    sm_margin: int = dataclasses.field(default_factory=sm_carveout)
    inductor: tuple[tuple[str, Any], ...] = ()
    regexes: tuple[str, ...] = ()

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None = None, mode: str | None = None) -> Options:
        """Checks and splits a user's options. Raises InvalidOptionError naming the wrong one and the nearest valid."""
        options = dict(options or {})
        inductor = _inductor_options(options, mode)
        own = {name: _checked(name, value) for name, value in options.items() if name in OWN}
        parsed = cls(**own, inductor=tuple(sorted(inductor.items())))
        if not is_disabled():
            return parsed
        _warn_disabled()
        return dataclasses.replace(parsed, recipe=None, rules=(), require_coverage=0.0)

    @property
    def max_autotune(self) -> bool:
        """Whether products are timed on the device, as Inductor's option says, or else its setting."""
        from torch._inductor import config

        return bool(dict(self.inductor).get("max_autotune", config.max_autotune))

    @property
    def searched(self) -> Sequence[str]:
        """The regular expression of each rule."""
        return self.regexes or [pattern for pattern, _ in self.rules]

    def in_model(self, model: nn.Module | None) -> Options:
        """These options for a model, whose lists the places in rules count. Raises InvalidOptionError for a function, whose modules nobody knows."""
        counting = next((pattern for pattern, _ in self.rules if has_places(pattern)), None)
        if counting is None:
            return self
        if model is None:
            raise InvalidOptionError(
                f"te_dynamo: the rule {counting!r} counts a model's modules, and a function is compiled: compile the model itself, by "
                "torch.compile(model) or model.compile(), or name the numbers"
            )
        lists = lists_of(paths_of(model))
        return dataclasses.replace(self, regexes=tuple(expression(pattern, lists) for pattern, _ in self.rules))

    def recipe_for(self, path: str, parameter: str = "") -> tuple[Recipe | None, str]:
        """(recipe, why) of the linear at `path`; why is the rule that chose it, or the reason when the recipe is None.

        parameter: the part of the path that is a parameter's, "qkv_w" of "blocks.0.qkv_w": what names "blocks.0" holds for it too.
        """
        module = path.removesuffix(parameter).removesuffix(".")
        for (pattern, chosen), regex in zip(self.rules, self.searched, strict=True):
            if re.search(regex, path) or re.search(regex, module):
                return chosen, f"rule {pattern!r} " + (
                    "leaves it in the model's precision" if chosen is None else "chooses it"
                )
        return self.recipe, "" if self.recipe else "TE_DYNAMO_DISABLE=1 is set" if is_disabled() else "recipe is None"


OWN = tuple(field.name for field in dataclasses.fields(Options) if field.name not in ("inductor", "regexes"))
"""The names of the options that are not Inductor's."""

_TYPES = get_type_hints(Options)


def is_disabled() -> bool:
    """Whether the environment leaves every linear in the model's precision."""
    return os.environ.get("TE_DYNAMO_DISABLE") == "1"


@functools.cache
def _warn_disabled() -> None:
    warnings.warn("te_dynamo: TE_DYNAMO_DISABLE=1 is set: every linear stays in the model's precision", stacklevel=2)


def _default_recipe() -> Recipe | None:
    """Of code that names none: the environment's, else current scaling."""
    name = os.environ.get("TE_DYNAMO_RECIPE", "float8_current_scaling")
    try:
        return None if name.lower() == "none" else recipes.by_name(name)
    except InvalidOptionError as error:
        raise InvalidOptionError(f"{error} (in the environment variable TE_DYNAMO_RECIPE)") from None


def _rules(value: Any) -> tuple[tuple[str, Recipe | None], ...]:
    if not isinstance(value, (list, tuple)):
        raise InvalidOptionError(
            f"te_dynamo: rules must be a list of (regular expression, recipe or None) pairs, got {value!r}"
        )
    checked = []
    for index, rule in enumerate(value):
        if not (isinstance(rule, (tuple, list)) and len(rule) == 2 and isinstance(rule[0], str)):
            raise InvalidOptionError(
                f"te_dynamo: rules[{index}] must be (regular expression, recipe or None), got {rule!r}"
            )
        try:
            check(rule[0])
            checked.append((rule[0], recipes.as_recipe(rule[1])))
        except InvalidOptionError as error:
            raise InvalidOptionError(f"{error} (in rules[{index}])") from None
    return tuple(checked)


def _fusions(value: Any) -> bool | tuple[str, ...]:
    """The names themselves are the fuser's to check: registered fusions are among them."""
    if isinstance(value, bool):
        return value
    if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) for name in value):
        raise InvalidOptionError(
            f"te_dynamo: option 'fusions' takes True, False or a list of fusions' names, got {value!r}"
        )
    if len({name.startswith("-") for name in value}) > 1:
        raise InvalidOptionError(
            f"te_dynamo: option 'fusions' takes names to run or, each with a '-', names to leave out, not both: {value!r}"
        )
    return tuple(value)


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidOptionError(f"te_dynamo: option {name!r} takes True or False, got {value!r}")
    return value


def share(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise InvalidOptionError(f"te_dynamo: {name} takes a share from 0 to 1, got {value!r}")
    return float(value)


def _margin(value: Any) -> int:
    if value is None:
        return sm_carveout()
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidOptionError(
            f"te_dynamo: option 'sm_margin' takes a number of multiprocessors or None, got {value!r}"
        )
    return value


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "recipe": recipes.as_recipe,
    "rules": _rules,
    "fusions": _fusions,
    "require_coverage": functools.partial(share, "option 'require_coverage'"),
    "sm_margin": _margin,
}
"""Of the options that more is asked of than to be a flag, or one of a few words."""


def _checked(name: str, value: Any) -> Any:
    """The value of an option of ours as `Options` holds it."""
    wanted = _TYPES[name]
    if name in _CHECKS:
        return _CHECKS[name](value)
    if wanted is bool:
        return flag(name, value)
    if not _is_of(wanted, value):
        raise InvalidOptionError.unknown(name, value, _choices(wanted))
    return value


def _choices(wanted: Any) -> list[Any]:
    """The values of a Literal, or of one that may be None."""
    parts = [wanted] if get_origin(wanted) is Literal else get_args(wanted)
    return [choice for part in parts for choice in get_args(part) or (None,)]


def inductors_own(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """`options` of Inductor's, checked. Raises InvalidOptionError for one of ours, which has a keyword, and for one that nobody knows."""
    if ours := sorted({*(options or {})} & {*OWN}):
        raise InvalidOptionError(
            f"te_dynamo: inductor= takes options of Inductor's own; {ours[0]!r} is a keyword beside it"
        )
    return _inductor_options(options or {}, None)


def _inductor_options(options: Mapping[str, Any], mode: str | None) -> dict[str, Any]:
    """Inductor's share: the mode's expansion, then every option that is Inductor's own."""
    from torch._inductor import list_mode_options, list_options

    modes = list_mode_options()
    if mode is not None and mode != "default" and mode not in modes:
        raise InvalidOptionError.unknown("mode", mode, {*modes, "default"})
    result: dict[str, Any] = dict(modes.get(mode or "default", {}))
    known = list_options()
    for name, value in options.items():
        if name in OWN:
            continue
        theirs = str(name).replace("-", "_")
        if theirs not in known:
            raise InvalidOptionError.unknown("option", name, OWN, known, "those of torch._inductor.list_options()")
        _check_type(theirs, value)
        result[theirs] = value
    return result


def _check_type(name: str, value: Any) -> None:
    """Raises InvalidOptionError where Inductor declares another type; of a generic only its class is looked at."""
    from torch._inductor import config

    wanted = config.get_type(name)  # type: ignore[attr-defined]
    if not _is_of(wanted, value):
        raise InvalidOptionError(
            f"te_dynamo: Inductor's option {name!r} takes a value of type {_name_of(wanted)}, got {value!r}"
        )


def _is_of(wanted: Any, value: Any) -> bool:
    origin = get_origin(wanted)
    if origin in (Union, UnionType):
        return any(_is_of(each, value) for each in get_args(wanted))
    if origin is Literal:
        return value in get_args(wanted)
    if origin is not None:
        wanted = origin
    return not isinstance(wanted, type) or isinstance(value, wanted)


def _name_of(wanted: Any) -> str:
    origin = get_origin(wanted)
    if origin in (Union, UnionType):
        return " or ".join(map(_name_of, get_args(wanted)))
    if origin is Literal:
        return " or ".join(map(repr, get_args(wanted)))
    return getattr(origin or wanted, "__name__", str(wanted))


def names_near_keywords(function: Function) -> Function:
    """`function`, which raises InvalidOptionError for a keyword that it lacks.

    One with **kwargs calls the model, its first argument, with them: it raises for a keyword that nearly is its own and that the model
    lacks, and warns where the model has **kwargs too.
    """
    ours = inspect.signature(function).parameters
    own = [name for name, parameter in ours.items() if parameter.kind is parameter.KEYWORD_ONLY]

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        unknown = sorted(kwargs.keys() - ours.keys())
        theirs = _parameters(args[0]) if unknown and args and _takes_any(ours) else {}
        for name in unknown:
            near = difflib.get_close_matches(name, own, n=1, cutoff=0.75)
            if name in theirs or (_takes_any(ours) and not near):
                continue
            error = InvalidOptionError.unknown("keyword", name, own)
            if not _takes_any(theirs):
                raise error
            warnings.warn(f"{error} The model is called with {name!r}", stacklevel=2)
        return function(*args, **kwargs)

    return cast(Function, checked)


def _parameters(model: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(model.forward if isinstance(model, nn.Module) else model).parameters
    except (TypeError, ValueError):  # of a callable without a signature nobody knows what it takes
        return inspect.signature(lambda **kwargs: kwargs).parameters


def _takes_any(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
