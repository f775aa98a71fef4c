"""The user's graph with a probe in the place of each linear that is in a recipe.

A Dynamo backend has the stage `match` alone make a graph for each recipe. The graphs run as they are, without AOTAutograd, so all but the
linears is the user's own code. What a probe does is the session's mode:

    PLAIN       the linear in the model's precision
    MEASURED    the same, and beside it the linear in its recipe, whose errors go into the linear's row
    QUANTIZED   the linear in its recipe, for the whole model's error
"""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import once_differentiable

from te_dynamo.accuracy.products import ExpertsProduct, LinearProduct, backward_sums, forward_sums
from te_dynamo.accuracy.rows import Row
from te_dynamo.options import Options
from te_dynamo.report import RECORD, MatchRecord, Report

_PRODUCTS: dict[Any, type[LinearProduct]] = {
    torch.ops.te.linear.default: LinearProduct,
    torch.ops.te.grouped_linear.default: ExpertsProduct,
}


class Mode(enum.Enum):
    """What probes do."""

    PLAIN = enum.auto()
    MEASURED = enum.auto()
    QUANTIZED = enum.auto()


@dataclasses.dataclass
class Session:
    """What all graphs of a comparison look at when they run.

    recipe:      the index of the options whose graphs run.
    in_backward: whether backward runs: a forward that checkpointing repeats there is not measured again.
    measured:    called with a linear's path for each half of it that was measured.
    """

    recipe: int = 0
    mode: Mode = Mode.PLAIN
    in_backward: bool = False
    measured: Callable[[str], None] = lambda path: None


class Graphs:
    """The backend. rows[i]: of the linears that options[i] puts in a recipe, in the order of the graphs; reports[i]: one a graph."""

    def __init__(self, options: Sequence[Options], session: Session) -> None:
        self.options, self.session = options, session
        self.rows: list[dict[tuple[str, str, int], Row]] = [{} for _ in options]
        self.reports: list[list[Report]] = [[] for _ in options]

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        from te_dynamo.backend import linears_matched

        matched, reports = [], [Report() for _ in self.options]
        for options, report in zip(self.options, reports, strict=True):
            matched.append(linears_matched(gm, example_inputs, options, report))
        for graph, report, rows, known in zip(matched, reports, self.rows, self.reports, strict=True):
            _probe(graph, rows, self.session)
            known.append(report)
        return lambda *args: matched[self.session.recipe](*args)

    def records(self, recipe: int) -> list[MatchRecord]:
        """Of all linears in the graphs so far; of graphs that were made again, for other shapes, once."""
        found: dict[Any, MatchRecord] = {}
        for report in self.reports[recipe]:
            seen: Counter[tuple[str, str]] = Counter()
            for record in report.matches:
                if record.kind == "linear":
                    place = record.module, record.source
                    found.setdefault((*place, seen[place]), record)
                    seen[place] += 1
        return list(found.values())


def _probe(graph: fx.GraphModule, rows: dict[tuple[str, str, int], Row], session: Session) -> None:
    """Puts probes into a graph and its bodies; a linear that another graph has too, for other shapes, keeps its row."""
    seen: Counter[tuple[str, str]] = Counter()
    for body in [module for module in graph.modules() if isinstance(module, fx.GraphModule)]:
        for node in list(body.graph.nodes):
            record = node.meta.get(RECORD)
            if record is None or node.target not in _PRODUCTS:
                continue
            place = record.module, record.source
            row = rows.setdefault((*place, seen[place]), Row(record))
            seen[place] += 1
            name = f"te_probe_{node.name}"
            body.add_submodule(name, _Probe(_PRODUCTS[node.target](node.args[3]), node.target, row, session))
            with body.graph.inserting_before(node):
                probe = body.graph.call_module(name, node.args[:3])
            probe.meta = node.meta
            node.replace_all_uses_with(probe)
            body.graph.erase_node(node)
        body.recompile()


class _Probe(nn.Module):
    """One linear; its forward gives what the te operation gives, of which the graph reads the first."""

    def __init__(self, product: LinearProduct, op: Any, row: Row, session: Session) -> None:
        super().__init__()
        self.product, self.op, self.row, self.session = product, op, row, session

    def forward(self, x: Tensor, weight: Tensor, third: Tensor | None) -> Sequence[Tensor]:
        with torch.autocast(
            x.device.type, enabled=False
        ):  # the operands are of one dtype, and references are not to be cast
            if self.session.mode is Mode.QUANTIZED:
                # A copy, for a result of a function of autograd's cannot be written in place where it is a view.
                return (self.op(x, weight, third, self.product.config)[0].clone(),)
            return (_Measured.apply(x, weight, third, self),)

    def measure(self, sums: Callable[..., dict[str, Tensor]], *args: Any) -> None:
        """Adds the sums to the row; where memory does not do for them, a note."""
        if self.session.mode is not Mode.MEASURED:
            return
        if sums is forward_sums:
            self.row.flops += self.product.flops(*args[:2])
        try:
            self.row.add(sums(self.product, *args))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.row.note("out of memory while it was measured")
        self.session.measured(self.row.record.module)


class _Measured(torch.autograd.Function):
    """A linear in the model's precision, measured in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, third: Tensor | None, probe: _Probe) -> Tensor:
        out = probe.product.exact(x, weight, third)
        ctx.probe = probe
        # What no gradient needs may be written in place by then. third: offs; no gradient needs a bias.
        config, offs = probe.product.config, isinstance(probe.product, ExpertsProduct)
        of_dweight, of_dx = config.weight_requires_grad, config.input_requires_grad
        ctx.save_for_backward(x if of_dweight else None, weight if of_dx else None, third if offs else None)
        if not probe.session.in_backward:
            probe.measure(forward_sums, x, weight, third, out)
        return out.clone() if out._is_view() else out  # a view of a function like this cannot be written in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, third = ctx.saved_tensors
        gradients = ctx.probe.product.exact_gradients(x, weight, third, dy)
        ctx.probe.measure(backward_sums, x, weight, third, dy, gradients)
        of_bias = dy.reshape(-1, dy.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None
        return *gradients, of_bias, None


def is_out_of_memory(error: BaseException) -> bool:
    """Of a GPU or of the machine, whose allocator raises a RuntimeError."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )
