"""`te_dynamo.compile`: torch.compile(model, backend="te") whose options have types, and whose mistakes show where they are made.
`te_dynamo.set_recipe`: another recipe from a step on. `te_dynamo.export`: a model for a process without te_dynamo.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn

from te_dynamo.errors import InputError, TeError, UnsupportedError
from te_dynamo.options import OWN, UNSET, Options, inductors_own, names_near_keywords
from te_dynamo.recipe import Recipe

if TYPE_CHECKING:
    from te_dynamo.inspect.explain import Explanation
    from te_dynamo.report import Report

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
    replayed: bool = False,
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

    given = locals()
    own = {name: given[name] for name in OWN if given[name] is not UNSET}
    parsed = Options.parse({**inductors_own(inductor), **own}, mode)
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


@dataclasses.dataclass(frozen=True)
class Exported:
    """What `export` made.

    program:     of torch's operations alone: torch.export.save writes it, program.module() runs it.
    explanation: a record for each linear, as `explain` gives them.
    path:        the package, None where none was asked for.
    """

    program: torch.export.ExportedProgram
    explanation: Explanation
    path: str | None


@names_near_keywords
def export(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    path: str | Path | None = None,
    kernels: Literal["torch", "triton"] = "torch",
    dynamic_shapes: Any = None,
    recipe: str | Recipe | None = UNSET,
    rules: Sequence[tuple[str, str | Recipe | None]] = UNSET,
    inductor: Mapping[str, Any] | None = None,
) -> Exported:
    """The model for a process that has torch and no te_dynamo: linears in their recipes as operations of torch, their weights as codes.

    model:          in eval mode; frozen, from `load_checkpoint`, or with weights in high precision, which are quantized here.
    args, kwargs:   example inputs of a call.
    path:           of the AOTInductor package (".pt2") to write, which torch._inductor.aoti_load_package loads; None writes none.
    kernels:        of the package: torch's, or te_dynamo's in Triton, for GPUs as the one that is here: no GPU has run one of these yet.
                    The program has torch's.
    dynamic_shapes: as for torch.export.export.
    recipe, rules:  as for te_dynamo.compile. What they leave, and what cannot be quantized, stays in the model's precision.
    inductor:       options of Inductor for the package.

    Activations are quantized with the bits that a compiled model's have; torch's products are torch._scaled_mm, of blocks, MXFP8 and NVFP4 of
    dequantized codes.

    Raises InputError for a model in training mode, for kernels that there are not, and for a path that does not end in ".pt2", InvalidOptionError
    for options that are not Inductor's, UnsupportedError for what torch.export does not trace, DTensors, a mixture's experts, and a package of
    Triton kernels for a device that runs none.
    """
    from te_dynamo.backend import package_of_kernels
    from te_dynamo.dialect.define import leaving
    from te_dynamo.inspect.explain import Explanation
    from te_dynamo.inspect.target import options_and_mode, unwrap
    from te_dynamo.lowering.aten import decompositions

    target, given = unwrap(model)
    options = Options.parse(options_and_mode(given, None, None, recipe, rules))
    _check_leaves(target, args, kwargs)
    of_inductor = inductors_own(inductor)
    _check_package(kernels, path, of_inductor)
    token = leaving.set(True)
    try:
        ours, report = _program(target, (args, dict(kwargs or {}), dynamic_shapes), options)
        program, written = ours.run_decompositions(decompositions()), None
        if kernels == "triton":
            written = package_of_kernels(ours, str(path), options, report, of_inductor)
        elif path is not None:
            # Casts round, as they do where each operation runs by itself.
            chosen = {"emulate_precision_casts": True, **dict(options.inductor), **of_inductor}
            written = torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=chosen)
    finally:
        leaving.reset(token)
    return Exported(program, Explanation([report], [], model=type(target).__name__), written)


def _program(model: Any, call: Any, options: Options) -> tuple[torch.export.ExportedProgram, Report]:
    """The program with te operations. call: what torch.export.export takes behind the model."""
    from torch._dynamo.exc import RestartAnalysis

    from te_dynamo.backend import exported_graph
    from te_dynamo.report import Report

    report = Report()
    try:
        with torch.no_grad():
            graph = _trace(model, *call).module()
            exported_graph(graph, model, options, report)
            return _trace(graph, *call), report
    except RestartAnalysis:  # a dropped weight with another reader has its values again
        return _program(model, call, options)


def _trace(model: nn.Module, args: Any, kwargs: Any, dynamic_shapes: Any) -> torch.export.ExportedProgram:
    try:
        return torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
    except TeError:
        raise
    except Exception as error:
        line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UnsupportedError(
            f"te_dynamo.export: torch.export does not trace {type(model).__name__}: {line}"
        ) from error


def _check_package(kernels: str, path: Any, of_inductor: Mapping[str, Any]) -> None:
    if kernels not in ("torch", "triton"):
        raise InputError(f"te_dynamo.export: kernels is 'torch' or 'triton', got {kernels!r}")
    if kernels == "triton" and path is None:
        raise InputError(
            "te_dynamo.export: Triton kernels go into a package: give its path, or leave kernels='triton' out"
        )
    if of_inductor and path is None:
        raise InputError("te_dynamo.export: inductor= is of the package: give its path, or leave inductor= out")
    if path is not None and not str(path).endswith(".pt2"):
        raise InputError(f'te_dynamo.export: path is of a package and ends in ".pt2", got {path!r}')


def _check_leaves(model: Any, args: Any, kwargs: Any) -> None:
    from te_dynamo.inspect.target import tensors_in

    if not isinstance(model, nn.Module):
        raise InputError(f"te_dynamo.export: expected a torch.nn.Module, got {type(model).__name__}")
    if model.training:
        raise InputError(
            f"te_dynamo.export: {type(model).__name__} is in training mode, and a package runs inference: call model.eval() first"
        )
    named = [*model.named_parameters(), *model.named_buffers(), *(("an input", x) for x in tensors_in((args, kwargs)))]
    for name, tensor in named:
        if type(tensor).__module__.startswith("torch.distributed"):
            raise UnsupportedError(
                f"te_dynamo.export: {name!r} is a {type(tensor).__name__}, and a package runs in one process: export the model before it is distributed"
            )
