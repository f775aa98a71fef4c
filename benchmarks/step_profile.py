"""Kernels launched and bytes moved in a training step of the SwiGLU MLP: fused, unfused, and bf16 Inductor.

    python benchmarks/step_profile.py                                     # 8192 tokens, width 4096, inner 14336
    python benchmarks/step_profile.py --tokens 2048 --out /tmp

Kernels and their time are torch.profiler's, of one step after warm-up: all that ran on the GPU but copies and fills.

Bytes are counted at the launches, not measured: for each kernel the sizes of the tensors that it is given, each once, twice
what it updates in place ("in_out_ptr"). That is what it must move if it reads every input once and keeps nothing in a cache from
the kernel before. Counted are the launches of Triton kernels and the calls of `extern_kernels` in Inductor's code; the
number counted stands beside the profiler's, so that one that was missed shows. Writes step_profile-<device>.md and .json.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import pathlib
import statistics
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import environment
import report
import torch
from models import BLOCKS, Block
from torch import nn
from torch.utils._pytree import tree_leaves
from train_blocks import Inputs, Step, cold_caches, time_step, training_step


def te(fusions: bool) -> Callable[[nn.Module], Callable]:
    return lambda module: torch.compile(module, backend="te", options={"fusions": fusions})


PROVIDERS: dict[str, Callable[[nn.Module], Callable]] = {
    "bf16 Inductor": torch.compile,
    "te, unfused": te(fusions=False),
    "te": te(fusions=True),
}


@dataclasses.dataclass
class Kernel:
    """All launches of one kernel in a step. bytes is None where the launches of that name were not counted."""

    name: str
    launches: int
    ms: float
    bytes: int | None = None


@dataclasses.dataclass
class Row:
    """One provider. kernels: the profiler's; counted and bytes: of the launches that were counted (see the module's text)."""

    provider: str
    step_ms: float
    kernels: list[Kernel]
    counted: int
    bytes: int
    product_bytes: int

    @property
    def launches(self) -> int:
        return sum(kernel.launches for kernel in self.kernels)

    @property
    def gpu_ms(self) -> float:
        return sum(kernel.ms for kernel in self.kernels)


# --- bytes ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Traffic:
    """(launches, bytes) by kernel name; products are kept apart from everything else."""

    kernels: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    products: set[str] = dataclasses.field(default_factory=set)

    def add(self, name: str, tensors: list[tuple[str, torch.Tensor]], product: bool) -> None:
        launches, moved = self.kernels.get(name, (0, 0))
        self.kernels[name] = launches + 1, moved + launch_bytes(tensors)
        if product:
            self.products.add(name)

    def total(self, products_only: bool = False) -> int:
        return sum(moved for name, (_, moved) in self.kernels.items() if name in self.products or not products_only)


def launch_bytes(tensors: list[tuple[str, torch.Tensor]]) -> int:
    """Bytes of the (argument name, tensor) pairs of one launch: each tensor once, an argument updated in place twice.

    A tensor that stands in for an argument which is not there (kernels/runtime/launch.py) is one that is given anyway.
    """
    sizes: dict[int, int] = {}
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size() * (2 if name.startswith("in_out_ptr") else 1)
        sizes[tensor.data_ptr()] = max(size, sizes.get(tensor.data_ptr(), 0))
    return sum(sizes.values())


@contextlib.contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Inside, every launch that Inductor's code makes is counted."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch._inductor.select_algorithm import extern_kernels

    traffic = Traffic()
    launch = CachingAutotuner.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = self.fn.__name__
        traffic.add(name, named_tensors(self.triton_meta["signature"], args), product="gemm" in name)
        return launch(self, *args, **kwargs)

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            tensors = [("", x) for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
            traffic.add(f"extern_kernels.{name}", tensors, product=True)
            return result

        return call

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(CachingAutotuner, "run", run))
        for name, function in list(vars(extern_kernels).items()):
            if callable(function):
                stack.enter_context(mock.patch.object(extern_kernels, name, counted(name, function)))
        yield traffic


def named_tensors(signature: dict[str, str], args: tuple[Any, ...]) -> list[tuple[str, torch.Tensor]]:
    """The tensors among a Triton launch's arguments with their names: pointers in the signature's order.

    Without names where some pointer is no tensor (a null): then an update in place counts once.
    """
    names = [name for name, kind in signature.items() if kind.startswith("*")]
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    return list(zip(names if len(names) == len(tensors) else [""] * len(tensors), tensors, strict=True))


# --- the profiler ---------------------------------------------------------------------------------------------


def profile(step: Step) -> list[Kernel]:
    """What one step runs on the GPU, longest first."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        step()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = collections.defaultdict(list)
    for event in profiler.events():
        if event.device_type == DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset")):
            times[event.name].append(event.device_time_total / 1e3)
    kernels = [Kernel(name, len(each), sum(each)) for name, each in times.items()]
    return sorted(kernels, key=lambda kernel: -kernel.ms)


def measure(provider: str, block: Block, base: nn.Module, inputs: Inputs) -> Row:
    module = base  # parameters are read only: a step frees the gradients of the one before
    step = training_step(module, PROVIDERS[provider](module), inputs)
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    kernels = profile(step)
    with count_traffic() as traffic:
        step()
    torch.cuda.synchronize()
    for kernel in kernels:
        kernel.bytes = traffic.kernels.get(kernel.name, (0, None))[1]
    return Row(
        provider,
        statistics.median(time_step(step, str(inputs.x.device))),
        kernels,
        sum(launches for launches, _ in traffic.kernels.values()),
        traffic.total(),
        traffic.total(products_only=True),
    )


# --- the report -----------------------------------------------------------------------------------------------


def markdown(facts: dict[str, str], block: Block, rows: list[Row]) -> str:
    """The report: a line a provider, then the kernels of each."""
    tokens = block.shape[0] * block.shape[1]
    lines = report.heading(f"A training step of the {block.name}, {tokens} tokens", facts)
    lines += [
        "Kernels and GPU time by torch.profiler, copies and fills left out. Bytes: the tensors that each launch is given, each",
        "once, twice what it updates in place; a lower bound of what it moves, with nothing kept in a cache between kernels.",
        "`counted` is the number of launches behind the bytes. Made by `benchmarks/step_profile.py`.",
        "",
        "| provider | kernels | counted | GPU ms | step ms | GB | GB beside the products |",
        "| --- " * 7 + "|",
    ]
    for row in rows:
        cells = [row.provider, str(row.launches), str(row.counted), f"{row.gpu_ms:.3f}", f"{row.step_ms:.3f}"]
        cells += [f"{row.bytes / 1e9:.2f}", f"{(row.bytes - row.product_bytes) / 1e9:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    for row in rows:
        lines += ["", f"## {row.provider}", "", "| kernel | launches | ms | MB |", "| --- " * 4 + "|"]
        for kernel in row.kernels:
            moved = "" if kernel.bytes is None else f"{kernel.bytes / 1e6:.0f}"
            name = kernel.name if len(kernel.name) <= 70 else kernel.name[:67] + "..."
            lines.append(f"| `{name}` | {kernel.launches} | {kernel.ms:.3f} | {moved} |".replace("``", ""))
    return "\n".join(lines) + "\n"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=pathlib.Path, default=report.RESULTS, help="folder of the two result files")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    cold_caches()
    torch.manual_seed(0)
    facts = environment.collect(args.device)
    block = dataclasses.replace(BLOCKS["swiglu"], shape=(1, args.tokens, BLOCKS["swiglu"].shape[2]))
    base = block.make().to(args.device, torch.bfloat16)
    inputs = Inputs.make(block, args.device)
    rows = []
    for provider in PROVIDERS:
        torch._dynamo.reset()
        rows.append(measure(provider, block, base, inputs))
        print(
            f"{provider:14s} {rows[-1].launches:3d} kernels, {rows[-1].bytes / 1e9:.2f} GB, {rows[-1].step_ms:.3f} ms"
        )
    report.write(args.out, "step_profile", facts, markdown(facts, block, rows), rows, tokens=args.tokens)


if __name__ == "__main__":
    main()
