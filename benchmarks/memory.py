"""Peak memory of a training step, bf16 Inductor beside this package.

    python benchmarks/memory.py                       # the SwiGLU MLP and the Llama-8B block
    python benchmarks/memory.py --blocks llama70b
    python benchmarks/memory.py --kernels             # also where in the step, from torch's record of allocations

A step is that of train_blocks. The peak is `torch.cuda.max_memory_allocated` over forward and backward: weights, gradients, input,
output and all that the step allocates are in it. Other providers and cuBLAS's workspaces, which bf16 alone needs, are not. Step times
are medians of rounds over all providers in turn.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import pathlib
from typing import Any

import environment
import report
import torch
import train_blocks
from models import BLOCKS, Block
from train_blocks import Candidate, Inputs, Row, Step

PROVIDERS = "bf16,te,te without low_memory,te block,te MXFP8/128"
BYTES_WORTH_NAMING = 8 * 2**20


@dataclasses.dataclass
class Held:
    """What was alive at the peak of one step: (bytes, where it was allocated), the largest first."""

    provider: str
    pieces: list[tuple[int, str]]


def warm_cublas(device: str) -> None:
    """cuBLAS's workspaces, of this thread and of autograd's, exist before anything is measured."""
    weight = torch.ones(64, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    torch.mm(weight, weight).sum().backward()


def measure(
    block: Block, providers: list[str], rounds: int, device: str, kernels: bool
) -> tuple[list[Row], list[Held]]:
    """A row for each provider, bf16 first, and with `kernels` what each held at its peak."""
    torch.manual_seed(0)
    base = block.make().to(device, torch.bfloat16)
    inputs = Inputs.make(block, device)
    candidates: list[Candidate] = []
    reference, held = None, []
    for provider in providers:
        candidate, reference = train_blocks.prepare(block, provider, base, inputs, reference)
        candidates.append(candidate)
        if kernels:
            held.append(Held(provider, at_the_peak(candidate.step)))
    for _ in range(rounds):
        for candidate in candidates:
            candidate.samples.append(train_blocks.time_step(candidate.step, device))
    train_blocks.summarize(candidates)
    return [candidate.row for candidate in candidates], held


def at_the_peak(step: Step) -> list[tuple[int, str]]:
    """The allocations of a step that were alive when most was, by torch's record of them."""
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=1 << 18)
    step()
    torch.cuda.synchronize()
    (trace, *_) = (t for t in torch.cuda.memory._snapshot()["device_traces"] if t)
    torch.cuda.memory._record_memory_history(enabled=None)
    alive: dict[int, tuple[int, str]] = {}
    now = most = 0
    peak: list[tuple[int, str]] = []
    for event in trace:
        if event["action"] == "alloc":
            alive[event["addr"]] = (event["size"], _place(event))
            now += event["size"]
            if now > most:
                most, peak = now, list(alive.values())
        elif event["action"] == "free_completed" and event["addr"] in alive:
            now -= alive.pop(event["addr"])[0]
    return sorted((piece for piece in peak if piece[0] >= BYTES_WORTH_NAMING), reverse=True)


def _place(event: dict[str, Any]) -> str:
    frames = [frame for frame in event.get("frames", ()) if "/torch/" not in frame["filename"]]
    return (
        f"{pathlib.Path(frames[0]['filename']).name}:{frames[0]['line']} {frames[0]['name']}" if frames else "autograd"
    )


def parse_args() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--blocks", default="swiglu,llama8b", help=f"of: {','.join(BLOCKS)}")
    parser.add_argument("--providers", default=PROVIDERS, help="of train_blocks, the first is compared to: %(default)s")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--kernels", action="store_true", help="print what is alive at each provider's peak")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    report.split_choices(parser, args, blocks=BLOCKS, providers=train_blocks.PROVIDERS)
    return args


def main() -> None:
    args = parse_args()
    train_blocks.cold_caches()
    torch._dynamo.config.recompile_limit = 64
    facts = environment.collect(args.device)
    warm_cublas(args.device)
    rows: list[Row] = []
    for name in args.blocks:
        print(BLOCKS[name].name, flush=True)
        measured, held = measure(BLOCKS[name], args.providers, args.rounds, args.device, args.kernels)
        rows += measured
        for row in measured:
            print(f"  {row.provider:22s} {row.peak_mib or 0:8.0f} MiB {row.step_ms:8.3f} ms", flush=True)
        for of_provider in held:
            print(f"  alive at the peak of {of_provider.provider}:")
            for size, place in of_provider.pieces:
                print(f"    {size / 2**20:8.1f} MiB  {place}")
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
    report.write(args.out, "memory", facts, rows, rounds=args.rounds)


if __name__ == "__main__":
    main()
