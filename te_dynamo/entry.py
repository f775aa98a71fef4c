"""`te_dynamo.compile`: torch.compile(model, backend="te") whose options have types, and whose mistakes show where they are made.
`te_dynamo.set_recipe`: another recipe from a step on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn

from te_dynamo.errors import InputError
from te_dynamo.options import OWN, UNSET, Options, names_near_keywords
from te_dynamo.recipe import Recipe

__all__ = ["compile", "set_recipe"]

Model = TypeVar("Model", bound=Callable[..., Any])


@names_near_keywords
def compile(
    model: Model,
    *,
    recipe: str | Recipe | None = UNSET,
    rules: Sequence[tuple[str, str | Recipe | None]] = (),
    codegen: Literal["inductor", "eager"] = "inductor",
    fusions: bool | Sequence[str] = True,
    weight_cache: Literal["step"] | None = None,
    weight_cache_check: bool = False,
    save_weights: Literal["original", "quantized"] | None = None,
    low_memory: bool = True,
    regather: bool = False,
    require_coverage: float = 0.0,
    sm_margin: int | None = None,
    inductor: Mapping[str, Any] | None = None,
    mode: str | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
) -> Model:
    """`torch.compile(model, backend="te", options=...)`, with the options as keywords: `te_dynamo.options.Options` says what each does.

    inductor: options of Inductor's own, beside those of `mode`.
    mode, dynamic, fullgraph: as for torch.compile.

    Raises InvalidOptionError at once for a wrong option, rule, recipe, fusion or mode, not at the model's first call. With `require_coverage` a
    call raises CoverageError too where linears run in no graph: torch.compile never calls the backend then, and cannot tell.
    """
    from te_dynamo.inspect.required_coverage import hold_coverage
    from te_dynamo.passes.dialect.fuser import check_choice

    given = locals() | {"rules": list(rules)}
    own = {name: given[name] for name in OWN if given[name] is not UNSET}
    parsed = Options.parse({**(inductor or {}), **own}, mode)
    check_choice(parsed.fusions)
    # torch takes a mode or options: the mode's are among them now.
    compiled = torch.compile(
        model, backend="te", options={**dict(parsed.inductor), **own}, dynamic=dynamic, fullgraph=fullgraph
    )
    if not parsed.require_coverage:
        return cast(Model, compiled)
    return hold_coverage(cast(Model, compiled), require_coverage)


_backends: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()
"""Those that a compiled model has had: Dynamo keeps what each has compiled."""


@names_near_keywords
def set_recipe(
    compiled: Callable[..., Any],
    recipe: str | Recipe | None = UNSET,
    rules: Sequence[tuple[str, str | Recipe | None]] = UNSET,
) -> None:
    """From its next call on a compiled model runs in another recipe, as in bf16 for the last steps of a training.

        te_dynamo.set_recipe(compiled, None, rules=[])  # every linear in the model's own precision

    compiled: what torch.compile(model, backend="te") made, or a module, of which all parts change that `compile` has compiled in place.
    recipe, rules: as for te_dynamo.compile; what is not given stays as it is, other options too.

    The next call compiles. What was compiled before is kept: back in an earlier recipe nothing is compiled. Both count towards Dynamo's limit of
    compilations. A backward whose forward has run stays in that forward's recipe; with torch.utils.checkpoint around a compiled model its
    forward runs again there, so that the step has to be over.

    Raises InputError where nothing is compiled by backend "te", InvalidOptionError for a wrong recipe or rule, before anything changes.
    """
    from te_dynamo.inspect.target import holder_of, options_and_mode

    parts = list(compiled.modules()) if isinstance(compiled, nn.Module) else [compiled]
    holders = [holder for holder in map(holder_of, parts) if holder is not None]
    te = torch._dynamo.lookup_backend("te")
    ours = [holder for holder in holders if getattr(holder._torchdynamo_orig_backend, "compiler_fn", None) is te]
    if not ours:
        names = sorted({getattr(h._torchdynamo_orig_backend, "compiler_name", "another") for h in holders})
        raise InputError(
            'te_dynamo.set_recipe: expected what torch.compile(model, backend="te") or model.compile(backend="te") made, got '
            f"{type(compiled).__name__}, " + (f"compiled by backend {', '.join(names)}" if names else "not compiled")
        )
    for holder in ours:
        backend = holder._torchdynamo_orig_backend
        options = options_and_mode(backend.kwargs, None, None, recipe, rules)
        parsed, had = Options.parse(options), _backends.setdefault(holder, [backend])
        chosen = next((each for each in had if Options.parse(**each.kwargs) == parsed), None)
        if chosen is None:
            chosen = copy.copy(backend)
            chosen.kwargs = {"options": options}
            had.append(chosen)
        holder._torchdynamo_orig_backend = chosen
