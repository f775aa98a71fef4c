"""`explain`: what the backend made of a model, a row per linear, and why it left the rest alone."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, UnsupportedFakeTensorException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from te_dynamo.distributed.check_ranks import not_compared
from te_dynamo.errors import UnsupportedError
from te_dynamo.inspect.advice import unheard
from te_dynamo.inspect.assertions import check_coverage, check_no_graph_breaks, check_quantized
from te_dynamo.inspect.dynamo import GraphBreak, dynamo_untouched, one_at_a_time
from te_dynamo.inspect.explanation_text import gpu_name, of_slower, parts_of
from te_dynamo.inspect.fake_autocast import cpu_autocast_on_cuda
from te_dynamo.inspect.fake_cuda import checked_gpu, fake_cuda, moved
from te_dynamo.inspect.flops import MatrixFlops, count_matrix_flops, share_with_rows
from te_dynamo.inspect.graphs.capture import Captured, capture
from te_dynamo.inspect.left_out import breaks_and_skips, rows_left_out
from te_dynamo.inspect.tables import text_of
from te_dynamo.inspect.target import (
    compiled_afresh,
    holder_of,
    not_in_place,
    options_and_mode,
    tensors_in,
    unchanged,
    unwrap,
)
from te_dynamo.kernels.runtime.target import TARGETS
from te_dynamo.options import UNSET, Options, names_near_keywords
from te_dynamo.rates import published, rates_of
from te_dynamo.recipe import Recipe
from te_dynamo.report import MatchRecord, Report, WorkspaceRecord, coverage
from te_dynamo.user_code import clean_path, modules_at
from te_dynamo.weights.checkpoint.record import stored_of

__all__ = ["Explanation", "GraphBreak", "explain"]

_DEFAULT_GPU = "h200"


class Explanation:
    """What was matched, fused, lowered and left. str(), to_html() for people, to_dict() for programs."""

    def __init__(
        self,
        reports: list[Report],
        graph_breaks: list[GraphBreak],
        matrix_flops: MatrixFlops | None = None,
        left_out: Sequence[MatchRecord] = (),
        device: str = "",
        on_gpu: Explanation | str | None = None,
        graphs: Captured | None = None,
        model: str = "",
    ) -> None:
        self.reports = reports
        self.graph_breaks = graph_breaks
        self.matrix_flops = matrix_flops
        self.device = device  # that it was rewritten for without running on it, "" for a run
        self.on_gpu = on_gpu  # of a run without a GPU: what one would do, or why that is not known
        self.graphs = graphs  # after each stage, and before it
        self.model = model  # name of its class, or of the function
        self._left_out = left_out

    @property
    def linears(self) -> list[MatchRecord]:
        """A record for each product by a weight: of each graph, in the model's order, then those that are in no graph."""
        return [*_linears(self.reports), *self._left_out]

    @property
    def norms_activations(self) -> list[MatchRecord]:
        """A record for each norm and activation."""
        return [match for report in self.reports for match in report.matches if match.kind != "linear"]

    @property
    def coverage(self) -> float:
        """The share of linear FLOPs that runs in a recipe, 0 to 1: `coverage` in te_dynamo/report.py."""
        return coverage(self.linears)

    @property
    def estimated_ms(self) -> tuple[float, float] | None:
        """(in the model's precision, as it runs) of the linears on the GPU that was named or that it ran on, as the cost model estimates them; None
        where it knows none."""
        known = [match.us for match in self.linears if match.us]
        return (sum(us[0] for us in known) / 1e3, sum(us[1] for us in known) / 1e3) if known else None

    @property
    def measured(self) -> bool:
        """Whether a GPU of that kind was ever measured: else `estimated_ms` follows its published figures alone."""
        rates = published(TARGETS[self.device]) if self.device else rates_of(torch.device("cuda"))
        return rates.measured or rates.target.measured

    @property
    def recipes(self) -> str:
        """Those of the linears, "no recipe" without any."""
        return ", ".join(dict.fromkeys(match.recipe for match in self.linears if match.recipe)) or "no recipe"

    @property
    def headline(self) -> str:
        """One line: coverage, recipes, counts; of a run without a GPU, what one would take."""
        matched = [match for match in self.linears if match.matched]
        kept = sum(weight.nbytes for weight in self.kept_weights)
        weights = f"; {kept / 2**20:.1f} MiB of quantized weights kept" if kept else ""
        unknown = sum(not match.flops and not all(size.isdigit() for size in match.shape) for match in self.linears)
        uncounted = f"; {_count(unknown, 'linear')} of a length that data decides not counted" if unknown else ""
        here = f"on {gpu_name(self.device)}, where it was not run: " if self.device else ""
        share, linears = f"coverage {_percent(self.coverage)} of linear FLOPs", _count(len(self.linears), "linear")
        which = f" in {self.recipes}, {len(matched)} of {linears}" if matched else f": none of {linears} is in a recipe"
        return (
            f"{here}{share}{which}; "
            f"{self._estimate()}{f'the rows are {self.share_of_rows}; ' if self.share_of_rows else ''}"
            f"{_count(len(self.reports), 'graph')}, {_count(len(self.graph_breaks), 'graph break')}{weights}{uncounted}{f'; {self.on_h200}' if self.on_h200 else ''}"
        )

    def _estimate(self) -> str:
        if self.estimated_ms is None:
            return ""
        plain, ours = self.estimated_ms
        never = "" if self.measured else " (never measured there)"
        return f"they take an estimated {ours:.3g} ms{never} instead of {plain:.3g} ms ({plain / ours:.2f}x); "

    @property
    def on_h200(self) -> str:
        """What one would take, of a run without a GPU."""
        if not isinstance(self.on_gpu, Explanation):
            return ""
        there = self.on_gpu.linears
        return (
            f"{gpu_name(self.on_gpu.device)} would take {sum(match.matched for match in there)} of {_count(len(there), 'linear')}, "
            f"{_percent(self.on_gpu.coverage)}"
        )

    @property
    def share_of_rows(self) -> str:
        """What `linears` are of all matrix products; "" where these were not counted."""
        if self.matrix_flops is None or not self.matrix_flops.total:
            return ""
        of_activations = self.matrix_flops.activations / self.matrix_flops.total
        of_rows = share_with_rows(self.matrix_flops, self.linears) - of_activations
        beside = f", products of two activations {_percent(of_activations)}" if of_activations else ""
        return f"{_percent(of_rows)} of the model's matrix FLOPs{beside}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data: "coverage", "device", "on_gpu", "matrix_flops", "linears", "norms_activations", "fusions", "lowered", "weights", "graph_breaks",
        "graphs", "notes".

        "linears" and "norms_activations" hold MatchRecord's fields, "weights" WorkspaceRecord's: the quantized weights that are
        kept between calls; "graphs" is the number of Dynamo graphs. "matrix_flops" are those of one forward, as torch counts them: "by_weight"
        and of "activations", and which share of both "has_a_row" or is one of activations; None where the forward cannot be counted.
        "device" is what `explain` was given; "on_gpu" is another such dictionary: of a run without a GPU what an H200 would do.
        """
        flops = self.matrix_flops
        return {
            "coverage": self.coverage,
            "device": self.device,
            "on_gpu": self.on_gpu.to_dict() if isinstance(self.on_gpu, Explanation) else None,
            "matrix_flops": flops
            and {
                "by_weight": flops.by_weight.total(),
                "activations": flops.activations,
                "has_a_row": share_with_rows(flops, self.linears),
            },
            "linears": [dataclasses.asdict(match) for match in self.linears],
            "norms_activations": [dataclasses.asdict(match) for match in self.norms_activations],
            "fusions": [
                {"phase": phase, "fusion": fusion, "count": count} for (phase, fusion), count in self._fusions().items()
            ],
            "lowered": [
                {"phase": phase, "op": op, "runs": runs, "count": count}
                for (phase, op, runs), count in self._lowered().items()
            ],
            "weights": [dataclasses.asdict(weight) for weight in self.kept_weights],
            "graph_breaks": [dataclasses.asdict(stop) for stop in self.graph_breaks],
            "graphs": len(self.reports),
            "notes": self._notes(),
        }

    def to_html(self, path: Any, comparison: Any = None) -> None:
        """Writes a page with all of this and the graph of each stage: one file, which loads nothing.

        comparison: what te_dynamo.compare found, for the tab Numerics.
        """
        from te_dynamo.inspect.page import render  # Jinja2 is loaded by those who want a page

        Path(path).write_text(render(self, comparison), encoding="utf-8")

    def __repr__(self) -> str:
        return f"<Explanation: {self.headline}>"

    def _repr_html_(self) -> str:
        """The page's Overview, for a notebook."""
        from te_dynamo.inspect.page import in_notebook
        from te_dynamo.inspect.page.data import overview_data

        more = "print() shows a row for each module, to_html(path) writes a page with the graphs."
        return in_notebook(overview=overview_data(self), notes=[more])

    def __str__(self) -> str:
        return text_of(parts_of(self))

    def _notes(self) -> list[str]:
        """Each once, though several graphs have it."""
        notes = [note for report in self.reports for note in report.notes]
        notes += of_slower([*dict.fromkeys(size for report in self.reports for size in report.slower_than_cublaslt)])
        if isinstance(self.on_gpu, str):
            notes.append(f"what {gpu_name(_DEFAULT_GPU)} would take is not known: {self.on_gpu}")
        return list(dict.fromkeys(notes))

    def _fusions(self) -> Counter[tuple[str, str]]:
        counts: Counter[tuple[str, str]] = Counter()
        for report in self.reports:
            for phase, fusion, count in report.fusions:
                counts[phase, fusion] += count
        return counts

    @property
    def kept_weights(self) -> list[WorkspaceRecord]:
        """Each once, though several graphs read it."""
        return list(dict.fromkeys(weight for report in self.reports for weight in report.workspaces))

    def _lowered(self) -> Counter[tuple[str, str, str]]:
        return Counter(row for report in self.reports for row in report.lowered)

    def assert_quantized(self, pattern: str = "") -> None:
        """Raises CoverageError, an AssertionError, unless every linear whose module path has a match of the regular expression `pattern`
        is in a recipe. It lists those that are left, with the reasons. It is also raised where no linear's path matches."""
        check_quantized(self.linears, pattern)

    def assert_coverage(self, least: float) -> None:
        """Raises CoverageError, an AssertionError, where `coverage` is below `least`, 0 to 1, or not known, since linears of no known size are
        in no graph. It lists what was left, the largest first."""
        check_coverage(self.linears, least)

    def assert_no_graph_breaks(self) -> None:
        """Raises GraphBreakError, an AssertionError, with the line and the reason of each graph break, of code that Dynamo skips too, or where
        there is no graph."""
        check_no_graph_breaks(self.graph_breaks, len(self.reports), self.linears)


@names_near_keywords
def explain(
    model: Callable[..., Any],
    *args: Any,
    recipe: str | Recipe | None = UNSET,
    rules: Sequence[tuple[str, str | Recipe | None]] = UNSET,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    device: str | None = None,
    **kwargs: Any,
) -> Explanation:
    """Compiles `model` afresh with backend "te", runs it once on `args` and `kwargs`, and says what happened.

    model:         a module, a function, or the result of torch.compile: then what it wraps is compiled, with
                   its own options and mode where none are given, also those of `model.compile()`.
    recipe, rules, mode: as for te_dynamo.compile.
    options:       as for torch.compile. Code is generated with {"codegen": "inductor"} alone: then "lowered" says what runs each operation.
    device:        "h200", "h100", "b200", "rtx4090": what a GPU of that name would do, whatever the machine. The model is rewritten for it
                   on fake tensors, with the rule of what costs more than it saves there, and no kernel is listed. Letters may have any case.
                   Raises InvalidOptionError, which names the nearest, for another one.

    Without a GPU the headline also has what an H200 would take. There, and with `device`, autocast for the CPU is the GPU's.

    Runs forward and, where an output requires grad, backward; then forward once more without the compiler, on fake tensors where data does
    not decide what runs, to count the FLOPs of all matrix products. Left as they were: parameters, `.grad`,
    buffers (BatchNorm's statistics), what modules hold (one that decompresses its weights at its first call has the codes again), train or
    eval, torch's random state, earlier compilations, Dynamo's counters and the sizes that it has
    seen, torch's caches on disk. Not undone: what the model's own Python code does elsewhere (prints, in-place writes to
    the arguments), and tensor hooks, which run. Of code that was compiled before, Dynamo's table keeps an empty entry for each
    explanation, which counts towards `accumulated_recompile_limit` (256) alone.

    Raises CoverageError where options={"require_coverage": share} asks for more than there is, in graphs or in none, and
    UnsupportedError with `device` for a model that asks for values of tensors, as there are none, and where it is not known whether
    autocast would be on.
    """
    target, own = unwrap(model)
    chosen = {"codegen": "eager", **options_and_mode(own, options, mode, recipe, rules)}
    Options.parse(chosen)  # raises here for a wrong one: in the backend Dynamo would put its own error around ours
    if device is not None:
        gpu = checked_gpu(device)
        try:
            return _required(_explain_for(gpu, target, args, kwargs, chosen), chosen)
        except (GuardOnDataDependentSymNode, UnsupportedFakeTensorException, DataDependentOutputException) as error:
            raise UnsupportedError(
                f'te_dynamo.explain(device="{device}"): the model asks for values of tensors, which are not there without a run '
                f"({str(error).partition(chr(10))[0]}). Leave `device` out, or explain a part that does not"
            ) from error
    found = _required(_explain_here(target, args, kwargs, chosen), chosen)
    if not torch.cuda.is_available() and not _on_gpu(args, kwargs):
        try:
            found.on_gpu = _explain_for(_DEFAULT_GPU, target, args, kwargs, chosen)
        except Exception as error:  # of the model's own code too, where it asks for values
            found.on_gpu = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return found


def _required(found: Explanation, options: Mapping[str, Any]) -> Explanation:
    """`found`, where it has the coverage that the options require: the backend holds graphs to it, and sees nothing of what is in none."""
    least = options.get("require_coverage", 0.0)
    if least and found.linears:
        found.assert_coverage(least)
    return found


def _on_gpu(args: Any, kwargs: Any) -> bool:
    return any(tensor.is_cuda for tensor in tensors_in((args, kwargs)))


@one_at_a_time
def _explain_here(target: Any, args: Any, kwargs: Any, options: Mapping[str, Any]) -> Explanation:
    with unchanged(target, args, kwargs):
        graphs, breaks, (flops, left_out) = _compile_and_run(target, args, kwargs, options)
    return Explanation(graphs.reports, breaks, flops, left_out, graphs=graphs, model=_name(target))


@one_at_a_time
def _explain_for(device: str, target: Any, args: Any, kwargs: Any, options: Mapping[str, Any]) -> Explanation:
    """Of the graphs that such a GPU would run, made from fake tensors: no code is generated, since none can be compiled for it here."""
    options = {**options, "codegen": "eager"}
    options.pop("require_coverage", None)
    with (
        unchanged(target, args, kwargs),
        unheard(),
        fake_cuda(device),
        contextlib.nullcontext() if _on_gpu(args, kwargs) else cpu_autocast_on_cuda(),
        moved(target, (args, kwargs)) as (args, kwargs),
    ):
        graphs, breaks, (flops, left_out) = _compile_and_run(target, args, kwargs, options)
    return Explanation(graphs.reports, breaks, flops, left_out, device, graphs=graphs, model=_name(target))


def _compile_and_run(
    target: Any, args: Any, kwargs: Any, options: Mapping[str, Any]
) -> tuple[Captured, list[GraphBreak], tuple[MatrixFlops | None, list[MatchRecord]]]:
    """(the graphs, where they break, all FLOPs and the rows of what is in no graph)"""
    # A new backend object: an equal one would find the code that the user compiled earlier and run no pass.
    backend = _fresh(_te_backend())
    with warnings.catch_warnings(), not_compared(), capture() as graphs, not_in_place(target) as in_place:
        compiled = compiled_afresh(target, in_place, backend=backend, options=dict(options))
        warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
        # Backward is compiled with forward: some outputs are not found here, and nobody would call theirs.
        with dynamo_untouched() as seen, torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
            _run(compiled, target, args, kwargs)
        flops = _matrix_flops(target, args, kwargs)
    _begin_in(target, graphs.reports)
    _name_stored(target, _linears(graphs.reports))
    left_out = list(rows_left_out(target, flops, _linears(graphs.reports), seen))
    return graphs, breaks_and_skips(seen), (flops, left_out)


def _matrix_flops(target: Any, args: Any, kwargs: Any) -> MatrixFlops | None:
    """None where the model runs compiled alone, or once alone."""
    try:
        return count_matrix_flops(target, args, kwargs)
    except Exception:
        return None


def _begin_in(target: Any, reports: Sequence[Report]) -> None:
    """Paths of a block that is compiled by itself begin in the block, as where FSDP2 wraps it: from here on in the target. Dynamo may run
    its graph for other such blocks."""
    modules = dict(target.named_modules()) if isinstance(target, nn.Module) else {}
    paths = {module: clean_path(path) for path, module in modules.items()}
    backends: dict[Any, Any] = {}
    for module in modules.values():
        if (holder := holder_of(module)) is not None:
            backends[unwrap(module)[0]] = holder._torchdynamo_orig_backend
    for report in reports:
        block = report.model() if report.model else None
        if block is None or not paths.get(block):
            continue
        given = backends.get(block)
        alike = [
            paths[m] for m, backend in backends.items() if m is not block and backend == given and _alike(m, block)
        ]
        for match in report.matches:
            own = (match.module, *match.shared)
            match.module, *shared = (f"{at}.{p}".rstrip(".") for at in (paths[block], *alike) for p in own)
            match.shared = tuple(shared)


def _alike(one: nn.Module, other: nn.Module) -> bool:
    forms = [[(n, p.shape, p.dtype, p.requires_grad) for n, p in m.named_parameters()] for m in (one, other)]
    return type(one) is type(other) and forms[0] == forms[1]


def _name_stored(target: Any, linears: Sequence[MatchRecord]) -> None:
    modules = modules_at(target)
    for match in linears:
        stored = match.owner in modules and stored_of(modules[match.owner][-1], match.parameter or "weight")
        match.stored = stored.describe(match.recipe) if stored else match.stored


def _linears(reports: Sequence[Report]) -> list[MatchRecord]:
    return [match for report in reports for match in report.matches if match.kind == "linear"]


def _run(compiled: Callable[..., Any], target: Any, args: Any, kwargs: Any) -> None:
    outputs = [out for out in tensors_in(compiled(*args, **kwargs)) if out.requires_grad]
    parameters = list(target.parameters()) if isinstance(target, nn.Module) else []
    leaves = [leaf for leaf in (*parameters, *tensors_in((args, kwargs))) if leaf.requires_grad]
    if outputs and leaves:
        torch.autograd.grad(outputs, leaves, [torch.ones_like(out) for out in outputs], allow_unused=True)


def _name(target: Any) -> str:
    return getattr(target, "__qualname__", type(target).__name__)


def _te_backend() -> Callable[..., Any]:
    return torch._dynamo.lookup_backend("te")


def _fresh(backend: Callable[..., Any]) -> Callable[..., Any]:
    def te(gm: Any, example_inputs: Any, **options: Any) -> Any:
        return backend(gm, example_inputs, **options)

    return te


def _percent(share: float) -> str:
    return f"{share * 100:.1f}%"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
