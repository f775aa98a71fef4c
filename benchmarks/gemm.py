"""Speed of the FP8 GEMM on one GPU, beside cuBLASLt's.

    python benchmarks/gemm.py            the tile that the product chooses, each shape, fast and slow accumulation
    python benchmarks/gemm.py --sweep    every candidate tile: what `kernels/gemm_tiles.py` is written from

TFLOP/s, medians over a cold L2, normal-random data, all providers of one shape interleaved in one process. `*` marks
the tile that `choose_tile` takes, `+` the fastest one when that is another.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import math
import statistics
import time
from collections.abc import Callable

import torch
import triton

from te_dynamo.kernels.gemm import gemm_kernel, gemm_with_tile, kernel_options
from te_dynamo.kernels.gemm_tiles import TILES, Tile, choose_tile, estimated_us
from te_dynamo.kernels.launch import multiprocessor_count

SHAPES: list[tuple[str, int, int, int]] = [
    ("SwiGLU 4096/14336 up: fprop, down: dgrad", 8192, 14336, 4096),
    ("SwiGLU 4096/14336 down: fprop, up: dgrad", 8192, 4096, 14336),
    ("SwiGLU 4096/14336 wgrad of up", 14336, 4096, 8192),
    ("SwiGLU 4096/14336 wgrad of down", 4096, 14336, 8192),
    ("GELU 4096/16384 up: fprop", 8192, 16384, 4096),
    ("GELU 4096/16384 down: fprop", 8192, 4096, 16384),
    ("GELU 4096/16384 wgrad of up", 16384, 4096, 8192),
    ("Llama-8B q, o: fprop, dgrad", 8192, 4096, 4096),
    ("Llama-8B q, o: wgrad", 4096, 4096, 8192),
    ("Llama-8B k, v: fprop", 8192, 1024, 4096),
    ("Llama-8B k, v: dgrad", 8192, 4096, 1024),
    ("Llama-8B k, v: wgrad", 1024, 4096, 8192),
    ("Llama-70B 8192/28672 up: fprop", 8192, 28672, 8192),
    ("Llama-70B 8192/28672 down: fprop", 8192, 8192, 28672),
    ("small 1024/4096 up: fprop", 4096, 4096, 1024),
    ("small 1024/4096 down: fprop", 4096, 1024, 4096),
    ("small 1024/4096 wgrad", 4096, 1024, 4096),
    ("decode 1", 1, 14336, 4096),
    ("decode 1 down", 1, 4096, 14336),
    ("decode 16", 16, 14336, 4096),
    ("decode 16 down", 16, 4096, 14336),
    ("decode 64", 64, 14336, 4096),
    ("decode 64 down", 64, 4096, 14336),
    ("prefill 512", 512, 14336, 4096),
    ("prefill 512 down", 512, 4096, 14336),
    ("prefill 512 square", 512, 4096, 4096),
]


class Problem:
    """The operands of one GEMM on the GPU, and its providers: functions that compute it once."""

    def __init__(self, m: int, n: int, k: int) -> None:
        self.shape = (m, n, k)
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
        self.x, self.w = x, w
        self.a, self.b = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)
        self.one = torch.ones(1, device="cuda")

    def tile(self, tile: Tile) -> Callable[[], torch.Tensor]:
        return lambda: gemm_with_tile(tile, self.a, self.one, self.b, self.one, None, torch.bfloat16)

    def cublas(self, fast: bool) -> Callable[[], torch.Tensor]:
        return lambda: torch._scaled_mm(
            self.a, self.b.t(), self.one, self.one, out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    def bf16(self) -> torch.Tensor:
        return torch.mm(self.x, self.w.t())


def measure(providers: dict[str, Callable[[], torch.Tensor]], rounds: int, rep_ms: int) -> dict[str, float]:
    """Milliseconds of each provider: the median of `rounds` interleaved measurements; NaN, and a line, for a failure."""
    times: dict[str, list[float]] = collections.defaultdict(list)
    failed: set[str] = set()
    for _ in range(rounds):
        for name, provider in providers.items():
            if name in failed:
                continue
            try:
                times[name].append(time_once(provider, rep_ms))
            except Exception as error:
                failed.add(name)
                print(f"    {name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:150]}", flush=True)
    return {name: float("nan") if name in failed else statistics.median(times[name]) for name in providers}


def time_once(provider: Callable[[], torch.Tensor], rep_ms: int) -> float:
    """CUDA-graph replays below 100 us, where the CPU's launches would be what is measured."""
    ms = triton.testing.do_bench(provider, warmup=2, rep=rep_ms, return_mode="median")
    if ms < 0.1:
        return graph_time(provider, rep_ms)
    return ms


def graph_time(provider: Callable[[], torch.Tensor], rep_ms: int) -> float:
    """One call inside a CUDA graph, the L2 flushed before each replay."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        provider()
    return triton.testing.do_bench(graph.replay, warmup=2, rep=rep_ms, return_mode="median")


def worth_trying(tile: Tile, m: int, n: int, k: int, sms: int) -> bool:
    """Leaves out what the cost model puts far from the best, to keep the sweep short."""
    best = estimated_us(choose_tile(m, n, k, tile.fast, sms), m, n, k, sms)
    return tile.fits(2) and estimated_us(tile, m, n, k, sms) < 3 * best


def sweep(shapes: list[tuple[str, int, int, int]], rounds: int, rep_ms: int, everything: bool) -> None:
    """The table of tiles; then, for each tile, its speed beside the `tflops` that the table of tiles has for it."""
    sms = multiprocessor_count(torch.device("cuda", torch.cuda.current_device()))
    best_of: dict[str, float] = collections.defaultdict(float)
    for label, m, n, k in shapes:
        problem = Problem(m, n, k)
        tiles = [tile for tile in TILES if worth_trying(tile, m, n, k, sms)]
        if not everything:
            tiles = [choose_tile(m, n, k, fast, sms) for fast in (True, False)]
        providers: dict[str, Callable[[], torch.Tensor]] = {
            "bf16": problem.bf16,
            "fast cublas": problem.cublas(True),
            "slow cublas": problem.cublas(False),
        }
        providers |= {tile.name: problem.tile(tile) for tile in tiles}
        ms = measure(providers, rounds, rep_ms)
        tflops = {name: 2 * m * n * k / each / 1e9 for name, each in ms.items()}
        print(f"{label}: {m} x {n} x {k}  bf16 {tflops['bf16']:.0f} TFLOP/s, {ms['bf16'] * 1e3:.1f} us")
        for fast in (True, False):
            print_row("fast" if fast else "slow", tflops, ms, choose_tile(m, n, k, fast, sms).name)
        for name, speed in tflops.items():
            best_of[name] = max(best_of[name], 0.0 if math.isnan(speed) else speed)
    print("\nbest of each tile over all shapes, TFLOP/s, and the table's figure")
    for tile in TILES:
        if tile.name in best_of:
            print(f"    {tile.name:34} {best_of[tile.name]:6.0f}  {tile.tflops:6.0f}")


def print_row(kind: str, tflops: dict[str, float], ms: dict[str, float], chosen: str) -> None:
    """One line: cuBLASLt, the fastest five tiles and the chosen one."""
    names = [name for name in tflops if name.startswith(kind) and "cublas" not in name and not math.isnan(ms[name])]
    ranked = sorted(names, key=lambda name: ms[name])
    cells = [f"{tflops[f'{kind} cublas']:.0f} cublas ({ms[f'{kind} cublas'] * 1e3:.1f} us)"]
    for rank, name in enumerate(ranked):
        if rank < 5 or name == chosen:
            mark = "*" if name == chosen else "+" if rank == 0 else ""
            cells.append(f"{tflops[name]:.0f}{mark} {name.removeprefix(kind + ' ')} ({ms[name] * 1e3:.1f})")
    print(f"    {kind}: " + " | ".join(cells), flush=True)


def compile_ahead(tiles: list[Tile], shapes: list[tuple[str, int, int, int]]) -> None:
    """Fills Triton's cache in threads (ptxas is a process of its own), so that the timing loop compiles nothing."""
    device = torch.cuda.current_device()

    def one(tile: Tile, m: int, n: int) -> None:
        torch.cuda.set_device(device)
        a = torch.empty(m, 128, device="cuda", dtype=torch.float8_e4m3fn)
        b = torch.empty(n, 128, device="cuda", dtype=torch.float8_e4m3fn)
        scale = torch.ones(1, device="cuda")
        c = torch.empty(
            tile.split_k * m * n, device="cuda", dtype=torch.float32 if tile.split_k > 1 else torch.bfloat16
        )
        options = kernel_options(tile, n, False)
        gemm_kernel.warmup(a, scale, b, scale, scale, c, m, n, 128, grid=(1,), **options)

    jobs = [(tile, m, 1024) for tile in tiles for m in sorted({1 if m == 1 else 64 for _, m, _, _ in shapes})]
    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        errors = [error for job in [pool.submit(one, *job) for job in jobs] if (error := job.exception()) is not None]
    print(f"compiled {len(jobs)} kernels in {time.perf_counter() - start:.1f} s, {len(errors)} failed")
    for error in errors[:3]:
        print(f"    {type(error).__name__}: {(str(error).splitlines() or [''])[0][:150]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true", help="time every candidate tile, not only the chosen one")
    parser.add_argument("--only", default="", help="shapes whose label contains this")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rep", type=int, default=15, help="milliseconds of one measurement")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    torch.manual_seed(0)
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    print(f"{device.name}, {device.multi_processor_count} SMs, torch {torch.__version__}, triton {triton.__version__}")
    shapes = [shape for shape in SHAPES if arguments.only in shape[0]]
    if arguments.sweep:
        compile_ahead([tile for tile in TILES if tile.fits(2)], shapes)
    start = time.perf_counter()
    sweep(shapes, arguments.rounds, arguments.rep, arguments.sweep)
    print(f"measured in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
