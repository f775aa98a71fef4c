"""Kernels launched and bytes moved in a training step of a block: fused, unfused, and bf16 Inductor.

    python benchmarks/step_profile.py                                     # the SwiGLU MLP, 8192 tokens
    python benchmarks/step_profile.py --blocks gelu,llama8b --out /tmp

Kernels and their time are torch.profiler's, of one step after warm-up: all that ran on the GPU but copies and fills.

Bytes are counted at the launches, not measured. Each tensor that a kernel is given counts once, one that it updates in place twice:
what the kernel moves at least if it finds nothing in a cache. Counted are the launches of Triton kernels and of `extern_kernels` in
Inductor's code. `counted` is the number of these launches beside the profiler's `kernels`, so that one that was missed shows.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import environment
import report
import torch
from models import BLOCKS
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
    """All launches of one kernel in a step of a provider. mb is None where the launches of that name were not counted."""

    block: str
    provider: str
    name: str
    launches: int
    ms: float
    mb: float | None = None


@dataclasses.dataclass
class Row:
    """One provider. kernels and gpu_ms: the profiler's; counted and GB: of the launches that were counted."""

    block: str
    provider: str
    kernels: int
    counted: int
    gpu_ms: float
    step_ms: float
    gb: float
    gb_beside_products: float


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


def profile(block: str, provider: str, step: Step) -> list[Kernel]:
    """What one step runs on the GPU, longest first."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        step()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = collections.defaultdict(list)
    for event in profiler.events():
        if event.device_type != DeviceType.CUDA or event.is_user_annotation:  # a linear's annotation spans its kernels
            continue
        if not event.name.startswith(("Memcpy", "Memset")):
            times[event.name].append(event.device_time_total / 1e3)
    kernels = [Kernel(block, provider, name, len(each), sum(each)) for name, each in times.items()]
    return sorted(kernels, key=lambda kernel: -kernel.ms)


def measure(block: str, provider: str, module: nn.Module, inputs: Inputs) -> tuple[Row, list[Kernel]]:
    """The row of a provider on the block of that title, and its kernels."""
    step = training_step(module, PROVIDERS[provider](module), inputs)
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    kernels = profile(block, provider, step)
    with count_traffic() as traffic:
        step()
    torch.cuda.synchronize()
    for kernel in kernels:
        if kernel.name in traffic.kernels:
            kernel.mb = traffic.kernels[kernel.name][1] / 1e6
    moved = traffic.total()
    row = Row(
        block,
        provider,
        sum(kernel.launches for kernel in kernels),
        sum(launches for launches, _ in traffic.kernels.values()),
        sum(kernel.ms for kernel in kernels),
        statistics.median(time_step(step, str(inputs.x.device))),
        moved / 1e9,
        (moved - traffic.total(products_only=True)) / 1e9,
    )
    return row, kernels


def parse_args() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--blocks", default="swiglu", help=f"of: {','.join(BLOCKS)}")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    report.split_choices(parser, args, blocks=BLOCKS)
    return args


def main() -> None:
    args = parse_args()
    cold_caches()
    facts = environment.collect(args.device)
    rows, kernels = [], []
    for block in map(BLOCKS.__getitem__, args.blocks):
        torch.manual_seed(0)
        base = block.make().to(args.device, torch.bfloat16)
        inputs = Inputs.make(block, args.device)
        for provider in PROVIDERS:
            torch._dynamo.reset()
            row, its_kernels = measure(block.title, provider, base, inputs)
            rows.append(row)
            kernels += its_kernels
        report.write(args.out, "step_profile", facts, rows)
        report.write(args.out, "step_profile", facts, kernels, "step_kernels")


if __name__ == "__main__":
    main()
