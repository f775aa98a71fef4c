"""`te-dynamo calibrate`: benchmark this GPU and save the result for the cost model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from statistics import median, quantiles
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.progress import track
from torch import nn

import te_dynamo.dialect  # noqa: F401  # registers the operations
from te_dynamo.command_line.failure import Failure
from te_dynamo.inspect.tables import FittedTable, text_of
from te_dynamo.kernels.runtime import availability
from te_dynamo.rates import H200, KIND, QUANTIZED
from te_dynamo.recipe import Float8CurrentScaling
from te_dynamo.remembered import remember

_PRODUCT = (8192, 4096, 4096)
_CPU_STEP = "step by the CPU"
_WIDEST_SPREAD = 0.15  # of the median; a GPU at its power limit alone differs by a tenth
_WIDEST_OF_CPU = 0.3  # an idle host with two H200s had 0.23; two hosts differ by half
_LAUNCHES = 100

Call = Callable[[], object]
Make = Callable[[], Call]


class Clock(Protocol):
    """How calls are timed: `gpu` and `cpu` run what `make` returns, and give the microseconds of each repetition."""

    def gpu(self, make: Make) -> list[float]:
        """Of its kernels, one after another, with a cold cache."""

    def cpu(self, make: Make) -> list[float]:
        """Until the CPU may go on."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="plain data in place of the table")
    parser.add_argument("--debug", action="store_true", help="a failure has its traceback")


def run(parsed: argparse.Namespace) -> int:
    """Prints what was found, and where it is kept. Fails without a GPU that runs the kernels, and on one that is busy."""
    device = torch.device("cuda")
    if not torch.cuda.is_available():
        raise Failure("calibrate measures this GPU, and there is none: run it where there is one")
    if not (available := availability.kernels_available(device)).ok:
        raise Failure(f"calibrate measures FP8 kernels, which do not run here: {available.reason}")
    facts = measure(_GpuClock())
    try:
        path = remember(KIND, facts)
    except OSError as error:
        raise Failure(
            f"cannot keep what was measured: {error}; TORCHINDUCTOR_CACHE_DIR names another folder"
        ) from error
    if parsed.json:
        print(json.dumps(facts, indent=1))
    else:
        print(text_of([_table(facts)]))
        print(f"kept in {path}; models that are compiled from now on follow it")
    return 0


def measure(clock: Clock) -> dict[str, Any]:
    """What te_dynamo/rates.py reads. Raises Failure where repetitions differ by more than that of a GPU or a CPU with nothing else to do."""
    steps: dict[str, tuple[Callable[[Make], list[float]], Make]] = {
        "copy": (clock.gpu, _copy),
        "bf16 product": (clock.gpu, _bf16_product),
        "FP8 product": (clock.gpu, _fp8_product),
        "launches": (clock.gpu, partial(_launches, _LAUNCHES)),
        _CPU_STEP: (clock.cpu, _step),
        **{f"quantize {m}x{n}": (clock.gpu, partial(_quantize, m, n)) for m, n in QUANTIZED},
    }
    us = {
        name: _steady(name, timed(make))
        for name, (timed, make) in track(steps.items(), "measuring", console=Console(stderr=True), transient=True)
    }
    m, n, k = _PRODUCT
    rows, columns = QUANTIZED[1]
    return {
        "copy_tbps": 2 * 2 * rows * columns / us["copy"] / 1e6,
        "bf16_tflops": 2 * m * n * k / us["bf16 product"] / 1e6,
        "fp8_tflops": 2 * m * n * k / us["FP8 product"] / 1e6,
        "launch_us": us["launches"] / _LAUNCHES,
        "cpu_step_us": us[_CPU_STEP],
        "quantize_us": [us[f"quantize {m}x{n}"] for m, n in QUANTIZED],
    }


def _steady(name: str, us: list[float]) -> float:
    """The median of repetitions that agree."""
    middle = median(us)
    low, *_, high = quantiles(us, n=5)
    if high - low > (_WIDEST_OF_CPU if name == _CPU_STEP else _WIDEST_SPREAD) * middle:
        raise Failure(
            f"the GPU or the CPU is busy: {name} took {low:.1f} to {high:.1f} us from one repetition to the next; nothing is kept, "
            "stop what else runs there and repeat"
        )
    return middle


class _GpuClock:
    def gpu(self, make: Make) -> list[float]:
        from triton.testing import do_bench

        call = make()
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return [
            ms * 1e3 for ms in do_bench(graph.replay, warmup=500, rep=300, return_mode="all")
        ]  # clocks fall as it warms up

    def cpu(self, make: Make) -> list[float]:
        from torch.utils.benchmark import Timer

        timer = Timer("call()", globals={"call": make()})
        return [timer.timeit(1000).mean * 1e6 for _ in range(10)]


# --- what is timed --------------------------------------------------------------------------------------------


def _random(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)


def _copy() -> Call:
    x = _random(*QUANTIZED[1])
    out = torch.empty_like(x)
    return lambda: out.copy_(x)


def _bf16_product() -> Call:
    m, n, k = _PRODUCT
    x, weight = _random(m, k), _random(n, k)
    return lambda: torch.mm(x, weight.t())


def _fp8_product() -> Call:
    m, n, k = _PRODUCT
    quantizer = _rowwise()
    x, weight = (torch.ops.te.quantize(_random(rows, k), quantizer) for rows in (m, n))
    return lambda: torch.ops.te.gemm(x, quantizer, weight, quantizer, torch.bfloat16, False)


def _quantize(rows: int, columns: int) -> Call:
    x, quantizer = _random(rows, columns), _rowwise()
    return lambda: torch.ops.te.quantize(x, quantizer)


def _launches(count: int) -> Call:
    x = torch.zeros(1, device="cuda")
    return lambda: [x.add_(1) for _ in range(count)]


def _step(device: str = "cuda") -> Call:
    """Forward and backward of a compiled MLP with so few rows that the GPU waits for the CPU."""
    mlp = nn.Sequential(nn.Linear(256, 1024, bias=False), nn.GELU(), nn.Linear(1024, 256, bias=False)).to(
        device, torch.bfloat16
    )
    compiled, x = torch.compile(mlp), torch.randn(128, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
    dy, learning = torch.ones_like(x), [x, *mlp.parameters()]
    return lambda: torch.autograd.grad(compiled(x), learning, dy)


def _rowwise() -> Any:
    return Float8CurrentScaling().input_quantizer().with_usage(rowwise=True, columnwise=False)


def _table(facts: dict[str, Any]) -> FittedTable:
    rows = [(name.replace("_", " "), _text(found), _text(H200[name])) for name, found in facts.items()]
    return FittedTable(torch.cuda.get_device_name(), ("measured", "here", "H200"), rows)


def _text(value: Any) -> str:
    return " and ".join(map(_text, value)) if isinstance(value, list) else f"{value:.3g}"
