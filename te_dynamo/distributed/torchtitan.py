"""torchtitan's quantization converters as options of backend "te". Nothing of torchtitan is imported."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from te_dynamo.errors import InvalidOptionError
from te_dynamo.options import Options
from te_dynamo.recipe import Float8RowwiseScaling, Recipe

_RECIPES = {"Float8": "float8_current_scaling", "MXFP8": "mxfp8", "NVFP4": "nvfp4"}
"""How the names of torchtitan's converters begin -> the recipe in their place."""


def torchtitan_backend(converters: Sequence[Any] = (), **options: Any) -> str:
    """The name of a backend for torchtitan's `CompileConfig.backend`: "te" with the options that stand for torchtitan's converters.

        from te_dynamo.distributed import torchtitan_backend

        converters = [Float8LinearConverter.Config(filter_fqns=["wk", "wv"])]
        compile_config = CompileConfig(enable=True, backend=torchtitan_backend(converters))
        model_spec = model_registry("8B", converters=[])    # the model stays as it is: no torchao

    torchtitan compiles each transformer block with it, after tensor parallelism and checkpointing and before FSDP2.

    converters: Config objects, as model_registry takes them, or none of them.
    options: options of "te" that win over those made of the converters.

    Raises InvalidOptionError as `torchtitan_options` does, and for a wrong option.
    """
    chosen = {**torchtitan_options(converters), **options}
    name = "te_" + hashlib.sha256(repr(Options.parse(chosen)).encode()).hexdigest()[:12]
    if name not in torch._dynamo.list_backends(exclude_tags=None):
        te: Callable[..., Any] = torch._dynamo.lookup_backend("te")
        torch._dynamo.register_backend(functools.partial(te, options=chosen), name=name)
    return name


def torchtitan_options(converters: Sequence[Any]) -> dict[str, Any]:
    """The options of backend "te" for torchtitan's quantization converters: {} for none, and else "recipe", and "rules" for the names in
    them.

    Float8...Config is float8_current_scaling (torchtitan's scales are of a row; give `recipe="float8_rowwise"` for such), with the
    recipe_name "rowwise_with_gw_hp" Float8RowwiseScaling(wgrad="bf16"), MXFP8...Config mxfp8, NVFP4...Config nvfp4. Converters of linears and of experts are alike here. `filter_fqns` leaves linears whose
    path holds such a text, `fqns` takes these alone; "auto_filter_small_kn" falls away, as sizes are decided by cost. The wrappers and the
    degrees of parallelism need no option.

    Raises InvalidOptionError for a converter that is none of these, and for a path from the model's root: a block that is compiled by
    itself knows paths in the block.
    """
    rules: list[tuple[str, str | Recipe | None]] = []
    recipe: str | Recipe | None = None
    for converter in converters:
        kind = type(converter).__qualname__
        chosen: str | Recipe | None = next(
            (recipe for start, recipe in _RECIPES.items() if kind.startswith(start)), None
        )
        if chosen is None:
            raise InvalidOptionError.unknown("converter of torchtitan", kind, [f"{start}..." for start in _RECIPES])
        if "gw_hp" in getattr(converter, "recipe_name", ""):
            chosen = Float8RowwiseScaling(wgrad="bf16")
        left, taken = getattr(converter, "filter_fqns", ()), getattr(converter, "fqns", ())
        rules += [(_pattern(fqn), None) for fqn in left if fqn != "auto_filter_small_kn"]
        rules += [(_pattern(fqn), chosen) for fqn in taken]
        recipe = recipe if taken else chosen
    return {"recipe": recipe, "rules": rules} if converters else {}


def _pattern(fqn: str) -> str:
    if fqn.startswith("layers."):
        raise InvalidOptionError(
            f"te_dynamo: torchtitan compiles each block by itself, and linears have paths in their block there: {fqn!r} is none. Name what "
            "follows the number, such as 'attention.wk'"
        )
    return re.escape(fqn)
