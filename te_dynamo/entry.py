"""`te_dynamo.compile`: torch.compile(model, backend="te") whose options have types, and whose mistakes show where they are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar, cast

import torch

from te_dynamo.options import OWN, UNSET, Options
from te_dynamo.recipe import Recipe

__all__ = ["compile"]

Model = TypeVar("Model", bound=Callable[..., Any])


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
