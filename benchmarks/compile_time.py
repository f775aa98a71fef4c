"""Time to compile transformer blocks: in our passes, and in all, beside Inductor's own.

    python benchmarks/compile_time.py                                     # on a GPU
    python benchmarks/compile_time.py --device cpu --width 128 --whole 8  # the CPU's reference path, its kernels in C++
    python benchmarks/compile_time.py --blocks 2 --whole 2 --out /tmp     # a try
    python benchmarks/compile_time.py --blocks "" --whole 8 --repeats 3   # medians; both backends in turn

A block is attention and a gated MLP, as Llama has them, and a rule has all of its linears in FP8. Every measurement is a process of
its own with empty caches. The clock starts after one linear was compiled and attention ran: imports, worker processes and cuDNN's
libraries are no part of it. Of several measurements the median counts (of two in the middle the upper); all are in `repeats`.

`whole` is the first forward and backward on the device, with generated code and compiled kernels. `code` is all of `torch.compile` to
the end of code generation, for CUDA on any machine, with fake tensors. The stages are our own part of the seconds of `te`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import environment
import report
import torch
from generated_code import generated_code
from models import llama_block
from torch import nn
from torch.nn import functional as F

STAGES = ("match", "joint", "fuse", "lower")
BACKENDS = ("te", "inductor")


@dataclasses.dataclass
class Row:
    """One compilation by one backend. seconds: of torch.compile, forward and backward; stages: of it, in our passes (te alone)."""

    kind: str
    backend: str
    blocks: int
    seconds: float
    stages: dict[str, float]


@dataclasses.dataclass
class Comparison:
    """The medians of both backends, and all seconds that they are of, in the order in which they were taken."""

    kind: str
    blocks: int
    match_s: float
    joint_s: float
    fuse_s: float
    lower_s: float
    stages_ms_per_block: float
    te_s: float
    inductor_s: float
    te_to_inductor: float
    te_repeats_s: list[float]
    inductor_repeats_s: list[float]


# --- one measurement, in its own process ----------------------------------------------------------------------


@contextlib.contextmanager
def timed_stages() -> Iterator[dict[str, float]]:
    """{stage: seconds} spent so far in the stages of backend "te"; "fuse" is what happens to divided graphs."""
    from te_dynamo import backend

    seconds = dict.fromkeys(STAGES, 0.0)

    def timed(stage: str, function: Any) -> Any:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[stage] += time.perf_counter() - start

        return run

    compilation = backend._Compilation
    places = (("match", backend, "match"), *((s, compilation, s) for s in ("joint", "lower")))
    with contextlib.ExitStack() as stack:
        for stage, owner, name in (*places, ("fuse", compilation, "divided")):
            stack.enter_context(mock.patch.object(owner, name, timed(stage, getattr(owner, name))))
        yield seconds


@contextlib.contextmanager
def kernels_everywhere() -> Iterator[None]:
    """Graphs are lowered to kernels where no GPU is, too."""
    from te_dynamo.kernels.runtime import availability

    with mock.patch.object(availability, "kernels_available", lambda device: availability.Availability(True)):
        yield


def options_of(backend: Any) -> dict[str, Any] | None:
    """All linears in FP8: at these sizes the backend would leave them in bf16, and have nothing to do."""
    return {"rules": [("", "float8_current_scaling")]} if backend == "te" else None


def warm_up(backend: str, device: str) -> None:
    """Compiles one linear and runs attention, so that cuDNN's libraries are there: they take two seconds where they come from the disk."""
    x = torch.randn(1024, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    linear = nn.Linear(64, 64).bfloat16().to(device)
    torch.compile(linear, backend=backend, options=options_of(backend))(x).sum().backward()
    heads = x.view(1, 16, 64, 64)
    F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).sum().backward()
    # Or Dynamo, which saw another shape in nn.Module's own frame, compiles the model for any number of tokens.
    torch._dynamo.reset()


def model_of(blocks: int, width: int) -> nn.Module:
    heads = max(width // 64, 2)
    return nn.Sequential(*(llama_block(width, 4 * width, heads, heads // 2) for _ in range(blocks))).bfloat16()


def measure_code(backend: str, blocks: int, width: int, tokens: int) -> Row:
    """All of torch.compile to the end of code generation, for a CUDA device that need not be there."""
    from torch._dynamo.utils import calculate_time_spent

    from te_dynamo.testing import capture_on_fake_cuda

    model = model_of(blocks, width)

    def compile_for_cuda(module: nn.Module) -> float:
        def inputs(device: str) -> tuple[torch.Tensor, ...]:
            return (torch.empty(1, tokens, width, dtype=torch.bfloat16, device=device, requires_grad=True),)

        capture_on_fake_cuda(lambda: module, inputs, backend=backend, options=options_of(backend))
        seconds = calculate_time_spent()["total_wall_time"]  # without the run of the graphs on fake tensors
        torch._dynamo.reset()
        return seconds

    # The graphs that `capture` copies are no part of a compilation.
    without_capture = mock.patch("te_dynamo.testing.fake_cuda.capture", contextlib.nullcontext)
    with kernels_everywhere(), generated_code(), without_capture:
        compile_for_cuda(nn.Linear(width, width).bfloat16())
        with timed_stages() as stages:
            seconds = compile_for_cuda(model)
    return Row("code", backend, blocks, seconds, stages if backend == "te" else {})


def measure_whole(backend: str, blocks: int, width: int, tokens: int, device: str) -> Row:
    """The first forward and backward on the device."""
    warm_up(backend, device)
    model = model_of(blocks, width).to(device)
    x = torch.randn(1, tokens, width, dtype=torch.bfloat16, device=device, requires_grad=True)
    with timed_stages() as stages:
        start = time.perf_counter()
        torch.compile(model, backend=backend, options=options_of(backend))(x).sum().backward()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    return Row("whole", backend, blocks, seconds, stages if backend == "te" else {})


def compare(kind: str, blocks: int, args: argparse.Namespace) -> Comparison:
    """As many measurements of each backend as asked for, taken in turn: the first process is not always the same's."""
    rows: dict[str, list[Row]] = {backend: [] for backend in BACKENDS}
    for repeat in range(args.repeats):
        for backend in BACKENDS[:: -1 if repeat % 2 else 1]:
            rows[backend].append(measure_apart(kind, backend, blocks, args))
    te, inductor = (sorted(rows[b], key=lambda row: row.seconds)[args.repeats // 2] for b in BACKENDS)
    return Comparison(
        kind,
        blocks,
        *te.stages.values(),
        sum(te.stages.values()) / blocks * 1e3,
        te.seconds,
        inductor.seconds,
        te.seconds / inductor.seconds,
        *([row.seconds for row in rows[backend]] for backend in BACKENDS),
    )


def measure_apart(kind: str, backend: str, blocks: int, args: argparse.Namespace) -> Row:
    """One measurement in a process with empty caches. Raises CalledProcessError when it fails, after its own message."""
    call = [sys.executable, "-W", "ignore", __file__, "--one", kind, backend, str(blocks)]
    call += ["--device", args.device, "--width", str(args.width), "--tokens", str(args.tokens)]
    with tempfile.TemporaryDirectory(prefix="compile_time_", ignore_cleanup_errors=True) as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        done = subprocess.run(call, env={**os.environ, **caches}, stdout=subprocess.PIPE, text=True, check=True)
    row = Row(**json.loads(done.stdout.strip().splitlines()[-1]))
    print(f"{kind} {backend:8s} {blocks:4d} blocks {row.seconds:8.2f} s", flush=True)
    return row


def parse_args() -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(word) for word in text.split(",") if word]

    parser = report.parser(__doc__)
    parser.add_argument(
        "--blocks", type=numbers, default=[8, 32, 128], help="of compilations for CUDA, to the end of code generation"
    )
    parser.add_argument("--whole", type=numbers, default=[8, 32], help="blocks of whole compilations; none when empty")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=1, help="measurements of each, of which the median counts")
    parser.add_argument("--device", default="cuda", help="of whole compilations")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)  # kind, backend, blocks
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.one:
        kind, backend, blocks = args.one
        measured = (
            measure_code(backend, int(blocks), args.width, args.tokens)
            if kind == "code"
            else measure_whole(backend, int(blocks), args.width, args.tokens, args.device)
        )
        print(json.dumps(dataclasses.asdict(measured)))
        return
    facts = environment.collect(args.device)
    kinds = (("code", args.blocks), ("whole", args.whole))
    rows = [compare(kind, blocks, args) for kind, each in kinds for blocks in each]
    report.write(args.out, "compile_time", facts, rows, width=args.width)


if __name__ == "__main__":
    main()
