"""What a training step costs the CPU: FP8 beside bf16, in a plain loop and in CUDA graphs.

    python benchmarks/cpu_time.py                                        # everything that is installed
    python benchmarks/cpu_time.py --blocks small,llama1b_4096 --rounds 9
    python benchmarks/cpu_time.py --blocks "" --calls                    # single calls alone

A step sets gradients to None and runs forward and backward of a bf16 block. All providers of a block are compiled first, and then
measured in turn, round after round. `enqueue ms` is the time until the CPU has launched a step, begun with an idle GPU. `wall ms` is a
step's time in a loop. Both are medians of the rounds; p20 and p80 are of the walls. Ratios are bf16's time by the provider's: of walls,
and of enqueueing. Where enqueueing takes longer than the kernels, the CPU is the bound.

Kernels, their time and `launches`, the CUDA calls by name, are the profiler's, of one step. Allocations are those of torch's allocator.

`te` is by its own rule, which leaves in 16 bits what would not pay; `te forced` has all linears in FP8. `--calls` times single calls of
products so small that the GPU waits for the CPU.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import environment
import models
import report
import torch
from torch import nn
from train_blocks import REFERENCE, Inputs, Step, cold_caches, synchronize, torchao, training_step

LLAMAS = {"1B": (2048, 8192, 32, 8), "3B": (3072, 8192, 24, 8)}
"""Width, inner width, heads, heads of keys and values."""


def llama(name: str, tokens: int, layers: int = 1) -> models.Block:
    """Blocks of a Llama, on sequences of at most 4096 tokens."""
    sizes = LLAMAS[name]
    title = f"Llama-{name} block" if layers == 1 else f"{layers} Llama-{name} blocks"
    shape = (max(tokens // 4096, 1), min(tokens, 4096), sizes[0])
    return models.Block(title, lambda: nn.Sequential(*(models.llama_block(*sizes) for _ in range(layers))), shape)


BLOCKS = {
    **{name: models.BLOCKS[name] for name in ("small", "clip", "gpt2", "whisper")},
    **{f"llama1b_{tokens}": llama("1B", tokens) for tokens in (2048, 4096, 8192)},
    "llama3b_4096": llama("3B", 4096),
    "llama1b_x4": llama("1B", 4096, layers=4),
}

GRAPHS = "reduce-overhead"
FORCED = {"rules": [("", "float8_current_scaling")]}


def te(options: dict[str, Any], mode: str | None = None) -> Callable[[nn.Module], Callable]:
    """This package with these options, in this mode of torch.compile."""
    settings = torch._inductor.list_mode_options(mode) if mode else {}
    return lambda module: torch.compile(module, backend="te", options={**options, **settings})


PROVIDERS: dict[str, Callable[[nn.Module], Callable]] = {
    REFERENCE: torch.compile,
    "te": te({}),
    "te forced": te(FORCED),
    "torchao": torchao("tensorwise"),
    "bf16 graphs": lambda module: torch.compile(module, mode=GRAPHS),
    "te graphs": te(FORCED, GRAPHS),
}


@dataclasses.dataclass
class Row:
    """One provider on one block; None where it failed, and `error` says how, or where there is no GPU.

    launches: "29 cuLaunchKernel", the most frequent first.
    """

    block: str
    provider: str
    wall_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    speedup: float | None = None
    enqueue_ms: float | None = None
    enqueue_ratio: float | None = None
    kernels: int | None = None
    kernels_ms: float | None = None
    launches: list[str] = dataclasses.field(default_factory=list)
    allocations: int | None = None
    error: str = ""


@dataclasses.dataclass
class Call:
    """CPU time of one call, the median of rounds in turn."""

    call: str
    us: float


@dataclasses.dataclass
class Candidate:
    """A provider that compiled. samples: (enqueue, wall) of each round, in ms."""

    row: Row
    step: Step
    samples: list[tuple[float, float]] = dataclasses.field(default_factory=list)


def prepare(block: models.Block, provider: str, base: nn.Module, inputs: Inputs) -> Candidate:
    """Compiles, and looks at one step. Raises what the provider raises."""
    module = copy.deepcopy(base)
    plain = training_step(module, PROVIDERS[provider](module), inputs)

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        plain()

    for _ in range(5):  # a step of CUDA graphs runs, is captured, and is replayed
        step()
    candidate = Candidate(Row(block.title, provider), step)
    if inputs.x.is_cuda:
        _look_at_a_step(candidate, inputs.x.device)
    return candidate


def _look_at_a_step(candidate: Candidate, device: torch.device) -> None:
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity

    def allocated() -> int:
        return int(torch.cuda.memory_stats(device)["allocation.all.allocated"])

    row, before = candidate.row, allocated()
    candidate.step()
    row.allocations = allocated() - before
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profile:
        candidate.step()
        torch.cuda.synchronize(device)
    on_device = [
        event
        for event in profile.events()
        if event.device_type == DeviceType.CUDA
        and not (event.is_user_annotation or event.name.startswith(("Memcpy", "Memset")))
    ]
    row.kernels, row.kernels_ms = len(on_device), sum(e.device_time_total for e in on_device) / 1e3
    called = [e for e in profile.key_averages() if "Launch" in e.key and e.key.startswith("cu")]
    row.launches = [f"{e.count} {e.key}" for e in sorted(called, key=lambda e: -e.count)]


def time_round(step: Step, device: torch.device, steps: int = 10) -> tuple[float, float]:
    """(ms until the CPU has launched a step, ms of a step in a loop)"""
    enqueues = []
    for _ in range(steps):
        synchronize(device)
        start = time.perf_counter()
        step()
        enqueues.append(time.perf_counter() - start)
    synchronize(device)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize(device)
    return statistics.median(enqueues) * 1e3, (time.perf_counter() - start) / steps * 1e3


def measure_block(block: models.Block, providers: list[str], rounds: int, device: str) -> list[Row]:
    """A row for each provider, the reference first."""
    torch.manual_seed(0)
    base = block.make().to(device, torch.bfloat16)
    inputs = Inputs.make(block, device)
    rows, candidates = [], []
    for provider in providers:
        try:
            candidates.append(prepare(block, provider, base, inputs))
            rows.append(candidates[-1].row)
        except Exception as error:  # one provider's failure is a row, not the end of the run
            if provider == REFERENCE:
                raise
            first_line = (str(error).strip().splitlines() or [""])[0]
            rows.append(Row(block.title, provider, error=f"{type(error).__name__}: {first_line[:160]}"))
        print(f"  {provider}: {rows[-1].error or 'ready'}", flush=True)
    for candidate in candidates * rounds:
        candidate.samples.append(time_round(candidate.step, inputs.x.device))
    summarize(candidates)
    return rows


def summarize(candidates: list[Candidate]) -> None:
    """Fills in times, and what they are beside the first one's."""
    for candidate in candidates:
        row, walls = candidate.row, sorted(wall for _, wall in candidate.samples)
        row.enqueue_ms = statistics.median(enqueue for enqueue, _ in candidate.samples)
        row.wall_ms = statistics.median(walls)
        row.p20_ms, row.p80_ms = (walls[round(share * (len(walls) - 1))] for share in (0.2, 0.8))
    first = candidates[0].row
    for row in (candidate.row for candidate in candidates):
        row.speedup, row.enqueue_ratio = first.wall_ms / row.wall_ms, first.enqueue_ms / row.enqueue_ms


def measure_calls(rounds: int) -> list[Call]:
    """One call of a specialized GEMM, of a Triton kernel of ours, and of torch.mm, on a GPU that waits for each."""
    from te_dynamo.kernels.gemm.specialized.product import gemm_specialized_out
    from te_dynamo.kernels.quantize.current import partial_amaxes

    m, n, k = 256, 512, 256
    a, b = (torch.randn(rows, k, device="cuda").to(torch.float8_e4m3fn) for rows in (m, n))
    scale, out = torch.ones(1, device="cuda"), torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    x, y = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for shape in ((m, k), (k, n)))
    calls: dict[str, Callable[[], Any]] = {
        "specialized GEMM": lambda: gemm_specialized_out(a, scale, b, scale, out=out),
        "amax": lambda: partial_amaxes(x),
        "torch.mm": lambda: torch.mm(x, y, out=out),
    }
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for name, call in [*calls.items()] * (rounds + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(300):
            call()
        samples[name].append((time.perf_counter() - start) / 300 * 1e6)
        torch.cuda.synchronize()
    return [Call(name, statistics.median(each[1:])) for name, each in samples.items()]  # the first compiles


def parse_args() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--blocks", default=",".join(BLOCKS), help='of: %(default)s; "" for none')
    parser.add_argument("--providers", default=",".join(PROVIDERS), help="of: %(default)s; bf16 always runs")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", action="store_true", help="single calls too")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    if args.blocks:
        report.split_choices(parser, args, blocks=BLOCKS)
    report.split_choices(parser, args, providers=PROVIDERS)
    args.providers = [REFERENCE] + [p for p in args.providers if p != REFERENCE]
    return args


def main() -> None:
    args = parse_args()
    cold_caches()
    torch._dynamo.config.recompile_limit = 64  # all providers of a block compile the same forward method
    facts = environment.collect(args.device)
    if args.calls:
        report.write(args.out, "cpu_time", facts, measure_calls(args.rounds), "cpu_time_calls", rounds=args.rounds)
    rows: list[Row] = []
    for name in args.blocks:
        print(BLOCKS[name].title, flush=True)
        rows += measure_block(BLOCKS[name], args.providers, args.rounds, args.device)
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
        # After each block: what was measured stays if the next one does not end.
        report.write(args.out, "cpu_time", facts, rows, rounds=args.rounds)


if __name__ == "__main__":
    main()
