"""`te-dynamo bench`: measure the time and memory of a model with te_dynamo and without, on this GPU."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from te_dynamo.command_line import compiling
from te_dynamo.command_line.device import checked_device
from te_dynamo.command_line.failure import Failure
from te_dynamo.command_line.target import Subject, load
from te_dynamo.inspect.tables import FittedTable, text_of
from te_dynamo.inspect.target import tensors_in

_WARM_UP = 3


@dataclasses.dataclass
class Row:
    """One kind of call. ms, gib: median time and peak memory, of torch.compile alone and of backend "te"."""

    call: str
    ms_without: float
    ms_with: float
    gib_without: float
    gib_with: float


def add(parser: argparse.ArgumentParser) -> None:
    compiling.add(parser, 'cuda, cuda:1: where the model runs (default: "cuda")')
    parser.add_argument("--rounds", type=int, default=30, help="calls of each that are timed, in turn (default: 30)")


def run(parsed: argparse.Namespace) -> int:
    """Prints a row for forward and, where parameters require grad, one for forward and backward."""
    options = compiling.options_of(parsed)
    if parsed.rounds < 1:
        raise Failure(f"--rounds {parsed.rounds}: expected 1 or more", status=2)
    device = checked_device(parsed.device) or "cuda"
    if not torch.cuda.is_available() or not device.startswith("cuda"):
        raise Failure(
            "bench times a model on a CUDA GPU, and this is none: run it where there is one; "
            "`te-dynamo explain TARGET --device h200` says on any machine what an H200 would take"
        )
    subject = load(parsed, device)
    with torch.cuda.device(device):  # whose clock, memory and name are asked
        with compiling.compiling(subject, parsed.dynamic):
            rows = rows_of(subject, options, parsed.mode, parsed.rounds)
        if parsed.json:
            print(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
        else:
            print(text_of([_table(rows)]))
    return 0


def rows_of(subject: Subject, options: dict[str, Any], mode: str | None, rounds: int) -> list[Row]:
    """Times `subject` compiled by Inductor alone, in `mode`, and by backend "te" with `options`, in turn."""
    compiled = [torch.compile(subject.model, mode=mode), torch.compile(subject.model, backend="te", options=options)]  # type: ignore[call-overload]
    rows = [_row("forward", [_forward(model, subject) for model in compiled], rounds)]
    leaves = [leaf for leaf in _parameters(subject) if leaf.requires_grad]
    if leaves:
        rows.append(_row("forward and backward", [_step(model, subject, leaves) for model in compiled], rounds))
    return rows


def _parameters(subject: Subject) -> list[Tensor]:
    return list(subject.model.parameters()) if isinstance(subject.model, nn.Module) else []


def _forward(model: Callable[..., Any], subject: Subject) -> Callable[[], None]:
    @torch.no_grad()
    def call() -> None:
        model(*subject.args, **subject.kwargs)

    return call


def _step(model: Callable[..., Any], subject: Subject, leaves: list[Tensor]) -> Callable[[], None]:
    def call() -> None:
        results = [x for x in tensors_in(model(*subject.args, **subject.kwargs)) if x.requires_grad]
        torch.autograd.grad(results, leaves, [torch.ones_like(x) for x in results], allow_unused=True)

    return call


def _row(name: str, calls: list[Callable[[], None]], rounds: int) -> Row:
    peaks = []
    for call in calls:
        for _ in range(_WARM_UP):
            call()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() / 2**30)
    times: list[list[float]] = [[], []]
    for _ in range(rounds):  # in turn: the chip's clock moves, and both must see the same
        for of_one, call in zip(times, calls, strict=True):
            of_one.append(_milliseconds(call))
    return Row(name, median(times[0]), median(times[1]), peaks[0], peaks[1])


def _milliseconds(call: Callable[[], None]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def _table(rows: list[Row]) -> FittedTable:
    columns = ("call", "torch.compile", 'backend="te"', "speedup", "memory", 'memory, "te"')
    return FittedTable(torch.cuda.get_device_name(), columns, map(_cells, rows))


def _cells(row: Row) -> tuple[str, ...]:
    times = f"{row.ms_without:.3f} ms", f"{row.ms_with:.3f} ms", f"{row.ms_without / row.ms_with:.2f}x"
    return row.call, *times, f"{row.gib_without:.2f} GiB", f"{row.gib_with:.2f} GiB"
