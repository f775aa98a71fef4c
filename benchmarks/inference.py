"""Forward of frozen models at few tokens, beside bf16 Inductor.

    python benchmarks/inference.py                                        # every case, 1, 16, 64 and 512 tokens
    python benchmarks/inference.py --quick                                # the MLP at 1 and 64 tokens, few rounds
    python benchmarks/inference.py --cases mlp --recipes float8_current_scaling,mxfp8 --tokens 1,16

`frozen` is `te_dynamo.freeze(model, drop_weights=True)`. Each case is a model of several layers, so that weights are in no cache when
they are read. All providers of a case are compiled first, then timed in turn with a cold L2, each in two ways: `plain` calls it and
waits for the CPU's launches too, `graph` replays a CUDA graph of the call. Errors are relative Frobenius norms against bf16's output;
`weights MiB` is what the model and its quantized weights hold between calls.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import gc
import statistics
from collections.abc import Callable
from typing import Any

import environment
import report
import torch
from models import GatedMLP, llama_block
from step_profile import profile
from torch import nn
from train_blocks import cold_caches, memory, relative_error, synchronize, time_step

REFERENCE = "bf16"
LARGEST_ERROR = 0.25  # of many linears in a row
WIDTH, INNER = 4096, 14336


def linears() -> nn.Module:
    """Up and down, with nothing between: what a linear by itself gains."""
    return nn.Sequential(nn.Linear(WIDTH, INNER, bias=False), nn.Linear(INNER, WIDTH, bias=False))


def layers(count: int, make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(make() for _ in range(count)))


CASES: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "mlp": (f"8 SwiGLU MLPs {WIDTH}/{INNER}", layers(8, lambda: GatedMLP(WIDTH, INNER))),
    "linears": (f"16 linears {WIDTH} to {INNER} and back", layers(8, linears)),
    "llama8b": ("4 Llama-8B blocks", layers(4, lambda: llama_block(WIDTH, INNER, 32, 8))),
}


@dataclasses.dataclass
class Row:
    """One provider at one number of tokens; None where it failed, and `error` says how. Speedups are over bf16."""

    case: str
    tokens: int
    provider: str
    plain_us: float | None = None
    plain_speedup: float | None = None
    graph_us: float | None = None
    graph_speedup: float | None = None
    weights_mib: float | None = None
    output_error: float | None = None
    error: str = ""


@dataclasses.dataclass
class Candidate:
    """A compiled model and its inputs, ready to be timed."""

    provider: str
    call: Callable[[torch.Tensor], torch.Tensor]
    weights_mib: float | None


def prepare(provider: str, base: nn.Module) -> Candidate:
    """The compiled model; te providers are named by recipe, with "frozen" or, to compare with, "not frozen"."""
    device = next(base.parameters()).device
    before = memory(device)
    module = copy.deepcopy(base).eval().requires_grad_(False)
    if provider == REFERENCE:
        call = torch.compile(module)
    else:
        import te_dynamo

        recipe, _, how = provider.partition(", ")
        if how == "frozen":
            te_dynamo.freeze(module, drop_weights=True)
        call = torch.compile(module, backend="te", options={"recipe": recipe})
    with torch.no_grad():
        call(torch.randn(1, 512, module_width(base), device=device, dtype=torch.bfloat16))
    synchronize(device)
    gc.collect()
    held = (memory(device) - before) / 2**20 if device.type == "cuda" else None
    return Candidate(provider, call, held)


def module_width(module: nn.Module) -> int:
    return next(m for m in module.modules() if isinstance(m, nn.Linear)).in_features


def replayed(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Callable[[], None]:
    """The call captured as a CUDA graph."""
    with torch.no_grad():
        call(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call(x)
    return graph.replay


def print_kernels(candidate: Candidate, x: torch.Tensor) -> None:
    """The kernels of one call and their time."""
    kernels = profile(f"{x.shape[1]} tokens", candidate.provider, _without_grad(candidate.call, x))
    print(f"  {x.shape[1]:4d} {candidate.provider}: {sum(kernel.ms for kernel in kernels) * 1e3:.1f} us in kernels")
    for kernel in kernels:
        print(f"         {kernel.ms * 1e3:7.1f} us in {kernel.launches} of {kernel.name}", flush=True)


def measure(
    case: tuple[str, Callable[[], nn.Module]],
    tokens: list[int],
    providers: list[str],
    rounds: int,
    device: str,
    kernels: bool = False,
    prepare: Callable[[str, nn.Module], Candidate] = prepare,
) -> list[Row]:
    """A row for each number of tokens and provider, the reference first. case: its title, and what makes the model."""
    title, make = case
    torch.manual_seed(0)
    base = make().to(device, torch.bfloat16)
    candidates, failed = [], {}
    for provider in providers:
        try:
            candidates.append(prepare(provider, base))
        except Exception as error:  # one provider's failure is a row, not the end of the run
            if provider == REFERENCE:
                raise
            failed[provider] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        print(f"  {provider}: {failed.get(provider, 'ready')}", flush=True)
    rows = []
    for count in tokens:
        x = torch.randn(1, count, module_width(base), device=device, dtype=torch.bfloat16)
        rows += measure_tokens(title, x, candidates, rounds, device)
        for candidate in candidates if kernels else ():
            print_kernels(candidate, x)
        rows += [Row(title, count, provider, error=error) for provider, error in failed.items()]
    return rows


def measure_tokens(title: str, x: torch.Tensor, candidates: list[Candidate], rounds: int, device: str) -> list[Row]:
    """The providers in turn on one input."""
    gpu = device.startswith("cuda")
    rows, timed, reference = [], [], None
    for candidate in candidates:
        row = Row(title, x.shape[1], candidate.provider, weights_mib=candidate.weights_mib)
        rows.append(row)
        with torch.no_grad():
            out = candidate.call(x).clone()
        reference = out if reference is None else reference
        row.output_error = relative_error([out], [reference])
        if row.output_error > LARGEST_ERROR:
            row.error = f"output error {row.output_error:.3f} against bf16"
            continue
        ways: list[tuple[str, Callable[[], Any]]] = [("plain_us", _without_grad(candidate.call, x))]
        if gpu:
            ways.append(("graph_us", replayed(candidate.call, x)))
        timed += [(row, field, step, []) for field, step in ways]
    for _ in range(rounds):
        for _, _, step, samples in timed:
            samples.append(statistics.median(time_step(step, device)))
    for row, field, _, samples in timed:
        setattr(row, field, statistics.median(samples) * 1e3)
    for row in rows:
        for way in ("plain", "graph"):
            ours, theirs = getattr(row, f"{way}_us"), getattr(rows[0], f"{way}_us")
            if ours and theirs:
                setattr(row, f"{way}_speedup", theirs / ours)
        print(f"  {row}", flush=True)
    return rows


def _without_grad(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        with torch.no_grad():
            call(x)

    return step


def parse_args() -> argparse.Namespace:
    parser = report.parser(__doc__, "the first case, 1 and 64 tokens, two rounds")
    parser.add_argument("--cases", default=",".join(CASES), help="of: %(default)s")
    parser.add_argument("--tokens", default="1,16,64,512")
    parser.add_argument("--recipes", default="float8_current_scaling")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--not-frozen", action="store_true", help="also without te_dynamo.freeze")
    parser.add_argument("--kernels", action="store_true", help="print the kernels of a call")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    report.split_choices(parser, args, cases=CASES)
    args.recipes = args.recipes.split(",")
    args.tokens = [int(count) for count in args.tokens.split(",")]
    if args.quick:
        args.cases, args.tokens, args.rounds = args.cases[:1], [1, 64], min(args.rounds, 2)
    return args


def main() -> None:
    args = parse_args()
    cold_caches()
    torch._dynamo.config.recompile_limit = 64  # all providers of a case compile the same forward method
    torch._dynamo.config.automatic_dynamic_shapes = (
        False  # each number of tokens has its own tiles, as in a server's buckets
    )
    facts = environment.collect(args.device)
    hows = ("frozen", "not frozen") if args.not_frozen else ("frozen",)
    providers = [REFERENCE, *(f"{recipe}, {how}" for recipe in args.recipes for how in hows)]
    rows: list[Row] = []
    for case in args.cases:
        print(CASES[case][0], flush=True)
        rows += measure(CASES[case], args.tokens, providers, args.rounds, args.device, args.kernels)
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
    report.write(args.out, "inference", facts, rows, rounds=args.rounds)


if __name__ == "__main__":
    main()
