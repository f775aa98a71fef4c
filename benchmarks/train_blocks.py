"""Forward and backward of plain transformer blocks: FP8 providers beside bf16 Inductor.

    python benchmarks/train_blocks.py                                     # everything that is installed
    python benchmarks/train_blocks.py --quick --providers te              # one block, few rounds
    python benchmarks/train_blocks.py --blocks swiglu,llama8b --rounds 9

A step sets gradients to None and runs forward and backward of a bf16 module on random normal inputs. All providers of a block are
compiled first. Then they are timed in turn, round after round, so that clocks and heat bear on all alike. `step ms` is the median of
the rounds' medians, p20 and p80 are percentiles of all samples, and `speedup` is bf16's time by the provider's.

`te` adds up in fp32 in all three GEMMs, `te fast` in the tensor core's own accumulator. `te fast forward` does so in forward alone,
as torchao's and Transformer Engine's recipes do. Errors are relative Frobenius norms against bf16's output, without the residual, and
against its weight gradients. The peak counts weights, gradients, input, output and all that the step allocates.

`TE` is Transformer Engine with its own modules of norms, linears and MLPs, and torch's attention. It loads the system's cuDNN, with which
torch's attention leaves cuDNN for flash kernels in every row, or fails. The folder of torch's own in LD_LIBRARY_PATH prevents both; the
column `attention` shows what ran.

The small MLP is bound by the CPU that launches its kernels.
"""

from __future__ import annotations

import argparse
import atexit
import copy
import dataclasses
import gc
import os
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import environment
import report
import torch
import triton
from models import BLOCKS, Block
from nvidia_blocks import Inside, converted
from torch import nn

REFERENCE = "bf16"
LARGEST_ERROR = 0.25  # FP8 gives 0.03 to 0.1; a provider beyond this computes something else

Step = Callable[[], None]


def torchao(recipe: str) -> Callable[[nn.Module], Callable]:
    """torchao's float8 training, as its README has it."""

    def compile_(module: nn.Module) -> Callable:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(recipe)
        return torch.compile(convert_to_float8_training(module, config=config))

    return compile_


def transformer_engine(recipe: str) -> Callable[[nn.Module], Callable]:
    """Transformer Engine's modules, which are not compiled, in this recipe of its own."""

    def build(module: nn.Module) -> Callable:
        import transformer_engine.common.recipe
        import transformer_engine.pytorch as library

        made = getattr(transformer_engine.common.recipe, recipe)()
        return Inside(converted(module, library), lambda: library.autocast(enabled=True, recipe=made))

    return build


def te(
    recipe: str = "Float8CurrentScaling", low_memory: bool = True, mode: str | None = None, **recipe_fields: Any
) -> Callable[[nn.Module], Callable]:
    """This package, this recipe's class with these fields set."""

    def compile_(module: nn.Module) -> Callable:
        import te_dynamo.recipe

        made = getattr(te_dynamo.recipe, recipe)(**recipe_fields)
        return te_dynamo.compile(module, recipe=made, mode=mode, low_memory=low_memory)

    return compile_


PROVIDERS: dict[str, Callable[[nn.Module], Callable]] = {
    REFERENCE: torch.compile,
    "TE current": transformer_engine("Float8CurrentScaling"),
    "TE delayed": transformer_engine("DelayedScaling"),
    "TE block": transformer_engine("Float8BlockScaling"),
    "torchao tensorwise": torchao("tensorwise"),
    "torchao rowwise": torchao("rowwise"),
    "te": te(),
    "te without low_memory": te(low_memory=False),
    "te max-autotune": te(mode="max-autotune-no-cudagraphs"),
    "te fast forward": te(fprop_fast_accum=True),
    "te fast": te(fprop_fast_accum=True, dgrad_fast_accum=True, wgrad_fast_accum=True),
    "te block": te("Float8BlockScaling"),
    "te MXFP8/128": te("MXFP8BlockScaling", scale_block=128),
    "te rowwise": te("Float8RowwiseScaling"),
    # What is not the default.
    "te block without low_memory": te("Float8BlockScaling", low_memory=False),
    "te MXFP8/128 without low_memory": te("MXFP8BlockScaling", low_memory=False, scale_block=128),
    "te rowwise without low_memory": te("Float8RowwiseScaling", low_memory=False),
    "te powers of two": te(power_of_two_scales=True),
    "te one pass": te(power_of_two_scales=True, one_pass=True),
    "te one pass fast forward": te(power_of_two_scales=True, one_pass=True, fprop_fast_accum=True),
    "te MXFP8/128 2-D": te("MXFP8BlockScaling", scale_block=128, weight_block_dims=2),
}


@dataclasses.dataclass
class Row:
    """One provider on one block; None where it failed, and `error` says how. speedup and peak_ratio: bf16's time by its, its peak by bf16's.

    attention: the attention kernels of its step, which depend on what the process has imported.
    """

    block: str
    provider: str
    step_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    speedup: float | None = None
    peak_mib: float | None = None
    peak_ratio: float | None = None
    compile_seconds: float | None = None
    output_error: float | None = None
    grad_error: float | None = None
    attention: str = ""
    error: str = ""


@dataclasses.dataclass
class Candidate:
    """A provider that compiled and computed the right thing, ready to be timed."""

    row: Row
    step: Step
    samples: list[list[float]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Inputs:
    """A block's input and the gradient of its output, random normal."""

    x: torch.Tensor
    grad: torch.Tensor

    @classmethod
    def make(cls, block: Block, device: str) -> Inputs:
        x = torch.randn(block.shape, device=device, dtype=torch.bfloat16)
        return cls(x.requires_grad_(), torch.randn_like(x))

    def nbytes(self) -> int:
        return self.x.nbytes + self.grad.nbytes


def training_step(module: nn.Module, compiled: Callable, inputs: Inputs) -> Step:
    """What is timed. Gradients are freed, not zeroed, as an optimizer does by default."""
    parameters = list(module.parameters())

    def step() -> None:
        inputs.x.grad = None
        for parameter in parameters:
            parameter.grad = None
        compiled(inputs.x).backward(inputs.grad)

    return step


def answer(module: nn.Module, compiled: Callable, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """(output without the residual, all weight gradients in a row) of one step, on the device."""
    training_step(module, compiled, inputs)()
    output = compiled(inputs.x).detach() - inputs.x.detach()  # with gradients on: no second graph to compile
    return output, torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def relative_error(ours: list[torch.Tensor], reference: list[torch.Tensor]) -> float:
    """||ours - reference|| / ||reference|| over all tensors together; inf when something is not finite."""
    squares = [
        ((a.float() - b.float()).square().sum(), b.float().square().sum()) for a, b in zip(ours, reference, strict=True)
    ]
    error = (sum(d for d, _ in squares) / sum(r for _, r in squares)) ** 0.5
    return float(error) if torch.isfinite(error) else float("inf")


def prepare(
    block: Block, provider: str, base: nn.Module, inputs: Inputs, reference: tuple | None
) -> tuple[Candidate, tuple]:
    """Compiles, measures memory and compile time, and checks the numbers. Raises what the provider raises."""
    device, row = inputs.x.device, Row(block.title, provider)
    inputs.x.grad = None
    others = memory(device) - inputs.nbytes()
    module = copy.deepcopy(base)
    compiled = PROVIDERS[provider](module)
    module = compiled if isinstance(compiled, Inside) else module  # which has parameters of its own
    step = training_step(module, compiled, inputs)

    start = time.perf_counter()
    step()
    synchronize(device)
    row.compile_seconds = time.perf_counter() - start

    step()
    row.peak_mib = peak_memory(step, device, others)
    row.attention = attention_kernels(step, device)
    got = answer(module, compiled, inputs)
    reference = reference or got
    row.output_error = relative_error([got[0]], [reference[0]])
    row.grad_error = relative_error([got[1]], [reference[1]])
    if max(row.output_error, row.grad_error) > LARGEST_ERROR:
        raise ArithmeticError(f"output error {row.output_error:.3f}, gradient error {row.grad_error:.3f} against bf16")
    return Candidate(row, step), reference


def measure_block(
    block: Block, providers: list[str], rounds: int, device: str, prepare: Callable[..., Any] = prepare
) -> list[Row]:
    """A row for each provider, the reference first. prepare: as the function of this name."""
    torch.manual_seed(0)
    base = block.make().to(device, torch.bfloat16)
    inputs = Inputs.make(block, device)
    with torch.no_grad():
        base(inputs.x)  # cuBLAS's workspace must not count as the first provider's memory
    rows, candidates, reference = [], [], None
    for provider in providers:
        try:
            candidate, reference = prepare(block, provider, base, inputs, reference)
            candidates.append(candidate)
            rows.append(candidate.row)
        except Exception as error:  # one provider's failure is a row, not the end of the run
            if provider == REFERENCE:
                raise
            first_line = (str(error).strip().splitlines() or [""])[0]
            rows.append(Row(block.title, provider, error=f"{type(error).__name__}: {first_line[:160]}"))
        print(f"  {provider}: ready" if not rows[-1].error else f"  {provider}: {rows[-1].error}", flush=True)
    for candidate in candidates * rounds:
        candidate.samples.append(time_step(candidate.step, device))
    summarize(candidates)
    return rows


def summarize(candidates: list[Candidate]) -> None:
    """Fills in times: the median of the rounds' medians, and the 20th and 80th percentile of all samples."""
    medians = [statistics.median(statistics.median(round_) for round_ in c.samples) for c in candidates]
    for candidate, median in zip(candidates, medians, strict=True):
        row, samples = candidate.row, sorted(s for round_ in candidate.samples for s in round_)
        row.step_ms = median
        row.p20_ms = samples[round(0.2 * (len(samples) - 1))]
        row.p80_ms = samples[round(0.8 * (len(samples) - 1))]
        row.speedup = medians[0] / median
        if row.peak_mib is not None:
            row.peak_ratio = row.peak_mib / candidates[0].row.peak_mib


def time_step(step: Step, device: str) -> list[float]:
    """Milliseconds of some steps, with a cold L2 on a GPU."""
    if device.startswith("cuda"):
        return triton.testing.do_bench(step, warmup=30, rep=250, return_mode="all")
    start = time.perf_counter()
    step()
    return [(time.perf_counter() - start) * 1e3]


def memory(device: torch.device) -> int:
    """Bytes allocated now, 0 on a CPU, which does not count them."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def peak_memory(step: Step, device: torch.device, others: int) -> float | None:
    """MiB at the peak of a step, without the bytes that other providers hold."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - others) / 2**20


def attention_kernels(step: Step, device: torch.device) -> str:
    """The names of the attention kernels that a step launches, as the profiler has them, without their template's arguments."""
    if device.type != "cuda":
        return ""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize(device)
    names = {event.key for event in profile.key_averages() if re.search("sdpa|flash|fmha", event.key.lower())}
    return ", ".join(sorted({re.split("[<(]", name.removeprefix("void "))[0] for name in names}))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def parse_args() -> argparse.Namespace:
    parser = report.parser(__doc__, "the first block, two rounds")
    parser.add_argument("--blocks", default=",".join(BLOCKS), help="of: %(default)s")
    parser.add_argument("--providers", default=",".join(PROVIDERS), help="of: %(default)s; bf16 always runs")
    parser.add_argument("--name", default="train_blocks", help="of the results file")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    report.split_choices(parser, args, blocks=BLOCKS, providers=PROVIDERS)
    args.providers = [REFERENCE] + [p for p in args.providers if p != REFERENCE]
    if args.quick:
        args.blocks, args.rounds = args.blocks[:1], min(args.rounds, 2)
    return args


def cold_caches() -> None:
    """Compiles into empty folders: "compile s" would otherwise time the cache. Removed at exit."""
    folder = tempfile.mkdtemp(prefix="train_blocks_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(folder, "inductor")
    os.environ["TRITON_CACHE_DIR"] = os.path.join(folder, "triton")


def main() -> None:
    args = parse_args()
    cold_caches()
    torch._dynamo.config.recompile_limit = 64  # all providers of a block compile the same forward method
    facts = environment.collect(args.device)
    rows: list[Row] = []
    for name in args.blocks:
        print(BLOCKS[name].name, flush=True)
        rows += measure_block(BLOCKS[name], args.providers, args.rounds, args.device)
        for row in rows:
            if row.block == BLOCKS[name].title and not row.error:
                print(f"  {row.provider:20s} {row.step_ms:8.3f} ms  {row.speedup:.2f}x bf16", flush=True)
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
        # After each block: what was measured stays if the next one does not end.
        report.write(args.out, "train_blocks", facts, rows, args.name, rounds=args.rounds)


if __name__ == "__main__":
    main()
