"""Layers on few rows, whose weights are quantized in each call, beside bf16 Inductor.

    python benchmarks/few_rows.py                                         # every case, forward alone and with backward
    python benchmarks/few_rows.py --quick                                 # one case, two numbers of rows, forward alone
    python benchmarks/few_rows.py --cases swiglu --rows 512,1024 --recipes mxfp8-128 --jobs 8

Below some number of rows the GEMMs of FP8 do not repay the quantization, and the backend leaves a linear in bf16
(`passes/torch_ir/match/cost.py`). Each recipe is measured twice. `te` decides by itself, and `coverage` is the share of the linears'
FLOPs that it has in FP8; where that is 0, it runs bf16's program. `all` has a rule that names all linears. A speedup is over bf16.

bf16 and all recipes of a case are replayed as CUDA graphs in turn, round after round, with a cold L2. `--jobs` processes compile side
by side; one at a time measures.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import gc
import itertools
import multiprocessing
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import environment
import report
import torch
from models import GatedMLP, GeluMLP
from torch import nn
from train_blocks import LARGEST_ERROR, cold_caches, relative_error, time_step

import te_dynamo
from te_dynamo.recipe import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, Recipe

RECIPES: dict[str, Recipe] = {
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
    "mxfp8-128": MXFP8BlockScaling(scale_block=128),
}
MODES = ("forward", "forward and backward")
ROWS = (256, 512, 1024, 1536, 2048, 4096, 8192)


def linears(*widths: int) -> nn.Module:
    """Nothing between them that would write x in FP8: each quantizes its own."""
    return nn.Sequential(*(nn.Linear(k, n, bias=False) for k, n in itertools.pairwise(widths)))


# title, width of x and y, module
CASES: dict[str, tuple[str, int, Callable[[], nn.Module]]] = {
    "square": ("4 linears 4096", 4096, lambda: linears(*[4096] * 5)),
    "linears": ("2 linears 4096 to 14336 and back", 4096, lambda: linears(4096, 14336, 4096, 14336, 4096)),
    "narrow": ("2 linears 1024 to 4096 and back", 1024, lambda: linears(1024, 4096, 1024, 4096, 1024)),
    "swiglu": ("2 SwiGLU MLPs 4096/14336", 4096, lambda: nn.Sequential(*(GatedMLP(4096, 14336) for _ in "ab"))),
    "gelu": ("2 GELU MLPs 1024/4096", 1024, lambda: nn.Sequential(*(GeluMLP(1024, 4096) for _ in "ab"))),
}
_turn: Any = contextlib.nullcontext()  # a lock that all processes share: one measures at a time


@dataclasses.dataclass
class Row:
    """One recipe at one number of rows. te: what the backend decides; all: every linear in FP8. coverage: of te, the share of FLOPs in FP8."""

    case: str
    mode: str
    rows: int
    recipe: str
    coverage: float
    bf16_us: float
    te_us: float
    all_us: float
    te_speedup: float
    all_speedup: float


@dataclasses.dataclass
class Captured:
    """A call as a CUDA graph, its output, and the call itself: it holds the weights and the x that the graph reads."""

    graph: torch.cuda.CUDAGraph
    output: torch.Tensor
    call: Callable[[], torch.Tensor]


def captured(base: nn.Module, x: torch.Tensor, backward: bool, **backend: Any) -> Captured:
    """Forward, and with `backward` the gradients of all weights and of x."""
    torch._dynamo.reset()
    model, x, dy = copy.deepcopy(base), x.clone().requires_grad_(backward), torch.ones_like(x)
    compiled = torch.compile(model, dynamic=False, **backend)

    def call() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        x.grad = None
        y = compiled(x)
        if backward:
            y.backward(dy)
        return y.detach()

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.set_grad_enabled(backward):
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            y = call()
    graph.replay()
    return Captured(graph, y, call)


def measure(case: str, mode: str, rows: int, recipes: list[str], rounds: int) -> list[Row]:
    """bf16 and the recipes in turn, on one number of rows."""
    gc.collect()  # the graphs of the number of rows before, and their memory
    torch.cuda.empty_cache()
    title, width, make = CASES[case]
    backward = mode != MODES[0]
    torch.manual_seed(0)
    with torch.device("cuda"):
        base = make().bfloat16().requires_grad_(backward)
        x = torch.randn(rows, width, dtype=torch.bfloat16)
    ways, coverage = [captured(base, x, backward)], []
    for name in recipes:
        for options in ({"recipe": RECIPES[name]}, {"rules": [("", RECIPES[name])]}):
            ways.append(captured(base, x, backward, backend="te", options=options))
            error = relative_error([ways[-1].output], [ways[0].output])
            if error > LARGEST_ERROR:
                raise ArithmeticError(f"{case}, {mode}, {rows} rows, {options}: output error {error:.3f} against bf16")
        with torch.set_grad_enabled(backward):
            coverage.append(
                te_dynamo.explain(base, x.clone().requires_grad_(backward), options={"recipe": RECIPES[name]}).coverage
            )
    with _turn:
        samples = [[statistics.median(time_step(way.graph.replay, "cuda")) for way in ways] for _ in range(rounds)]
    bf16, *medians = [statistics.median(times) * 1e3 for times in zip(*samples, strict=True)]
    return [
        Row(title, mode, rows, name, share, bf16, te, in_fp8, bf16 / te, bf16 / in_fp8)
        for name, share, te, in_fp8 in zip(recipes, coverage, medians[::2], medians[1::2], strict=True)
    ]


def parse_args() -> argparse.Namespace:
    parser = report.parser(__doc__, "the first case and mode, 512 and 2048 rows, two rounds")
    parser.add_argument("--cases", default=",".join(CASES), help="of: %(default)s")
    parser.add_argument("--modes", default=",".join(MODES), help="of: %(default)s")
    parser.add_argument("--recipes", default=",".join(RECIPES), help="of: %(default)s")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=4, help="processes that compile side by side")
    args = parser.parse_args()
    report.split_choices(parser, args, cases=CASES, modes=MODES, recipes=RECIPES)
    args.rows = [int(count) for count in args.rows.split(",")]
    if args.quick:
        args.cases, args.modes, args.rows, args.rounds = args.cases[:1], args.modes[:1], [512, 2048], 2
    return args


def main() -> None:
    args = parse_args()
    cold_caches()
    facts = environment.collect("cuda")
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.jobs, spawning, _take_turns, (spawning.Lock(),)) as pool:
        waiting = [
            pool.submit(measure, case, mode, count, args.recipes, args.rounds)
            for case, mode, count in itertools.product(args.cases, args.modes, args.rows)
        ]
        rows: list[Row] = []
        for future in waiting:
            rows += future.result()
            report.write(args.out, "few_rows", facts, rows, rounds=args.rounds)  # each time: what was measured stays


def _take_turns(lock: contextlib.AbstractContextManager) -> None:
    global _turn
    _turn = lock


if __name__ == "__main__":
    main()
