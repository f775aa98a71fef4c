"""Speed of the FP8 GEMMs on one GPU, beside cuBLASLt's and bf16's.

    python benchmarks/gemm.py                    the tile that the product chooses, each shape and way of scaling
    python benchmarks/gemm.py --formats tensor   one scale a tensor, with fast and slow accumulation; of "row" one a row
    python benchmarks/gemm.py --sweep            prints every candidate tile: what `kernels/gemm/tiles.py` is written from

Shapes are M x N x K. Times are medians over a cold L2 on normal random data, all providers of one shape in turn in one process. `block`
is Float8 block scaling, and MXFP8 with 128 values a scale (e8m0), for which cuBLASLt has no GEMM on Hopper. A sweep marks the tile that the
product takes by `*` and a faster one by `+`; the one of 12 warps is the specialized kernel's.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import environment
import report
import torch
import triton

from te_dynamo.kernels.gemm.choose import Choice, Product, choose
from te_dynamo.kernels.gemm.multiply import gemm_options, run
from te_dynamo.kernels.gemm.product import gemm_kernel
from te_dynamo.kernels.gemm.request import Operand, Request
from te_dynamo.kernels.gemm.tiles import (
    BLOCK_TILES,
    SPECIALIZED,
    SPECIALIZED_BLOCK,
    SPECIALIZED_FAST,
    SPECIALIZED_SMALL,
    TILES,
    Tile,
    estimated_us,
)
from te_dynamo.kernels.layouts.block import BlockForm
from te_dynamo.kernels.layouts.row import RowForm
from te_dynamo.kernels.quantize.float8_block import quantize_block
from te_dynamo.kernels.quantize.float8_rowwise import quantize_rowwise
from te_dynamo.kernels.runtime.target import target_of
from te_dynamo.kernels.tiles.stacking import NOT_STACKED

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


Provider = Callable[[], torch.Tensor]


@dataclasses.dataclass
class Row:
    """One product in TFLOP/s, te's by the tile that it chooses; None where cuBLASLt has no such GEMM."""

    product: str
    shape: str
    scales: str
    te_tflops: float
    cublas_tflops: float | None
    bf16_tflops: float
    tile: str


class Problem:
    """The operands of one GEMM on the GPU, one scale a tensor, and its providers: functions that compute it once."""

    kinds = ("fast", "slow")
    tiles: tuple[Tile, ...] = TILES
    specialized: tuple[Tile, ...] = (SPECIALIZED, SPECIALIZED_FAST, *SPECIALIZED_SMALL[:2])

    def __init__(self, m: int, n: int, k: int) -> None:
        self.shape = (m, n, k)
        self.x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        self.w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
        self.target = target_of(self.x.device)
        self.quantize()

    def quantize(self) -> None:
        self.a, self.b = self.x.to(torch.float8_e4m3fn), self.w.to(torch.float8_e4m3fn)
        self.one = torch.ones(1, device="cuda")

    def bf16(self) -> torch.Tensor:
        return torch.mm(self.x, self.w.t())

    def chosen(self, kind: str) -> Tile:
        """The tile that the product takes; that of the usual kernel for a few rows too, for it is those that are compared."""
        return self.among_tiles(fast_accum=kind == "fast")

    def among_tiles(self, **how: Any) -> Tile:
        tile = choose(Product(*self.shape, out_bytes=2, m_known=False, **how), target_of(self.x.device)).tile
        assert isinstance(tile, Tile)
        return tile

    def tile(self, kind: str, tile: Tile) -> Provider | None:
        """The kernel with that tile, None where it is not for that kind."""
        if tile.fast != (kind == "fast"):
            return None
        request = Request(Operand(self.a, self.one), Operand(self.b, self.one), torch.bfloat16, tile.fast)
        return lambda: run(Choice("specialized" if tile in self.specialized else "usual", tile), request)

    @staticmethod
    def compile(tile: Tile, m: int, n: int) -> None:
        """Compiles all that `tile` runs for operands of those sizes."""
        a, b, c, scale = compile_operands(tile, m, n)
        options = gemm_options(tile, n, "tensor", NOT_STACKED)
        gemm_kernel.warmup(a, scale, b, scale, None, c, None, m, n, 128, grid=(1,), **options)

    def cublas(self, kind: str) -> Provider | None:
        """cuBLASLt's, None where it has none."""
        return lambda: torch._scaled_mm(
            self.a, self.b.t(), self.one, self.one, out_dtype=torch.bfloat16, use_fast_accum=kind == "fast"
        )


class BlockProblem(Problem):
    """One scale for 128 k: forward and dgrad's operands, wgrad's, and both in MXFP8 with 128 values a scale."""

    kinds = ("1x128.128x128", "1x128.1x128", "e8m0.e8m0")
    tiles = BLOCK_TILES
    specialized = (SPECIALIZED_BLOCK, SPECIALIZED_SMALL[2])

    def quantize(self) -> None:
        rows = torch.float8_e4m3fn, True, False
        one = [quantize_block(x, BlockForm(*rows, two_d=False)) for x in (self.x, self.w)]
        two = quantize_block(self.w, BlockForm(*rows, two_d=True))
        self.operands = {
            "1x128.128x128": (*one[0], *two, False, True),
            "1x128.1x128": (*one[0], *one[1], False, False),
            "e8m0.e8m0": (one[0][0], e8m0(one[0]), one[1][0], e8m0(one[1]), False, False),
        }

    def chosen(self, kind: str) -> Tile:
        return self.among_tiles(scaling="1x128")

    def tile(self, kind: str, tile: Tile) -> Provider | None:
        a, a_scale, b, b_scale, *two_d = self.operands[kind]
        kinds = ["128x128" if square else "1x128" for square in two_d]
        request = Request(Operand(a, a_scale, kinds[0]), Operand(b, b_scale, kinds[1]), torch.bfloat16)
        return lambda: run(Choice("specialized" if tile in self.specialized else "usual", tile), request)

    def cublas(self, kind: str) -> Provider | None:
        if kind == "e8m0.e8m0" or self.shape[0] % 4 or self.shape[2] % 512:
            return None
        a, a_scale, b, b_scale, _, two_d = self.operands[kind]
        right = b_scale.t() if two_d else b_scale
        return lambda: torch._scaled_mm(a, b.t(), a_scale.t(), right, out_dtype=torch.bfloat16)

    @staticmethod
    def compile(tile: Tile, m: int, n: int) -> None:
        a, b, c, scale = compile_operands(tile, m, n)
        for two_d, dtype in ((True, torch.float32), (False, torch.float32), (False, torch.uint8)):
            scale = scale.to(dtype)
            options = gemm_options(tile, n, "1x128 128x128" if two_d else "1x128 1x128", NOT_STACKED)
            gemm_kernel.warmup(a, scale, b, scale, None, c, None, m, n, 128, grid=(1,), **options)


class RowProblem(Problem):
    """One scale a row of each operand."""

    def quantize(self) -> None:
        rows = RowForm(torch.float8_e4m3fn, True, False)
        self.operands = [quantize_rowwise(x, rows) for x in (self.x, self.w)]

    def chosen(self, kind: str) -> Tile:
        return self.among_tiles(fast_accum=kind == "fast", scaling="row")

    def tile(self, kind: str, tile: Tile) -> Provider | None:
        if tile.fast != (kind == "fast"):
            return None
        request = Request(*(Operand(*each, "row") for each in self.operands), torch.bfloat16, tile.fast)
        return lambda: run(Choice("specialized" if tile in self.specialized else "usual", tile), request)

    def cublas(self, kind: str) -> Provider | None:
        (a, a_scale), (b, b_scale) = self.operands
        scales, fast = (a_scale[:, None], b_scale[None, :]), kind == "fast"
        return lambda: torch._scaled_mm(a, b.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=fast)

    @staticmethod
    def compile(tile: Tile, m: int, n: int) -> None:
        a, b, c, scale = compile_operands(tile, m, n)
        options = gemm_options(tile, n, "row", NOT_STACKED)
        gemm_kernel.warmup(a, scale, b, scale, None, c, None, m, n, 128, grid=(1,), **options)


FORMATS: dict[str, type[Problem]] = {"tensor": Problem, "row": RowProblem, "block": BlockProblem}


def compile_operands(tile: Tile, m: int, n: int) -> tuple[torch.Tensor, ...]:
    """a, b and c of the dtypes that the launcher passes, and a scale."""
    a = torch.empty(m, 128, device="cuda", dtype=torch.float8_e4m3fn)
    b = torch.empty(n, 128, device="cuda", dtype=torch.float8_e4m3fn)
    c_dtype = torch.float32 if tile.split_k > 1 else torch.bfloat16
    return a, b, torch.empty(tile.split_k * m * n, device="cuda", dtype=c_dtype), torch.ones(1, device="cuda")


def e8m0(quantized: list[torch.Tensor]) -> torch.Tensor:
    """The power-of-two scales of 1x128 blocks as codes in MXFP8's rowwise layout."""
    data, scale_inv = quantized
    codes = torch.zeros(-(-data.shape[0] // 128) * 128, scale_inv.shape[0] * 4, device="cuda", dtype=torch.uint8)
    exponents = scale_inv[:, : data.shape[0]].t().contiguous().view(torch.int32) >> 23
    codes[: data.shape[0]] = exponents.repeat_interleave(4, dim=1).to(torch.uint8)
    return codes


def measure(providers: dict[str, Provider], rounds: int, rep_ms: int) -> dict[str, float]:
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


def time_once(provider: Provider, rep_ms: int) -> float:
    """CUDA-graph replays below 300 us, where the CPU's launches would be what is measured."""
    ms = triton.testing.do_bench(provider, warmup=2, rep=rep_ms, return_mode="median")
    if ms < 0.3:
        return graph_time(provider, rep_ms)
    return ms


def graph_time(provider: Provider, rep_ms: int) -> float:
    """One call inside a CUDA graph, the L2 flushed before each replay."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        provider()
    return triton.testing.do_bench(graph.replay, warmup=2, rep=rep_ms, return_mode="median")


def worth_trying(problem: Problem, kind: str) -> list[Tile]:
    """The tiles that the cost model does not put far from the best, to keep the sweep short."""
    best = estimated_us(problem.chosen(kind), *problem.shape, problem.target)
    near = [
        tile
        for tile in (*problem.tiles, *problem.specialized)
        if estimated_us(tile, *problem.shape, problem.target) < 3 * best
    ]
    return [fitted for tile in near if (fitted := tile.fitted(2, problem.target))]


def sweep(
    format: str, shapes: list[tuple[str, int, int, int]], rounds: int, rep_ms: int, everything: bool
) -> list[Row]:
    """A row for each shape and kind. Prints all tiles; then, for each, its speed beside the `tflops` that the table of tiles has for it."""
    problem_of, rows = FORMATS[format], []
    best_of: dict[str, float] = collections.defaultdict(float)
    for label, m, n, k in shapes:
        problem = problem_of(m, n, k)
        providers: dict[str, Provider] = {"bf16": problem.bf16}
        for kind in problem.kinds:
            tiles = worth_trying(problem, kind) if everything else [problem.chosen(kind)]
            found = [("cublas", problem.cublas(kind)), *((short(tile), problem.tile(kind, tile)) for tile in tiles)]
            providers |= {f"{kind} {name}": provider for name, provider in found if provider is not None}
        ms = measure(providers, rounds, rep_ms)
        tflops = {name: 2 * m * n * k / each / 1e9 for name, each in ms.items()}
        print(f"{label}: {m} x {n} x {k}  bf16 {tflops['bf16']:.0f} TFLOP/s, {ms['bf16'] * 1e3:.1f} us")
        for kind in problem.kinds:
            tile = short(problem.chosen(kind))
            print_row(kind, tflops, ms, f"{kind} {tile}")
            speeds = (tflops[f"{kind} {tile}"], tflops.get(f"{kind} cublas"), tflops["bf16"])
            rows.append(Row(label, f"{m} x {n} x {k}", f"{format} {kind}", *speeds, tile))
        for name, speed in tflops.items():
            best_of[name] = max(best_of[name], 0.0 if math.isnan(speed) else speed)
    print("\nbest of each tile over all shapes, TFLOP/s, and the table's figure")
    for kind in problem_of.kinds:
        for tile in (*problem_of.tiles, *problem_of.specialized):
            if (name := f"{kind} {short(tile)}") in best_of:
                print(f"    {name:50} {best_of[name]:6.0f}  {tile.tflops:6.0f}")
    return rows


def short(tile: Tile) -> str:
    """The tile's name without its first word, which says what it is for."""
    return tile.name.partition(" ")[2]


def print_row(kind: str, tflops: dict[str, float], ms: dict[str, float], chosen: str) -> None:
    """One line: cuBLASLt, the fastest five tiles and the chosen one."""
    cublas = f"{kind} cublas"
    names = [name for name in tflops if name.startswith(kind) and name != cublas and not math.isnan(ms[name])]
    ranked = sorted(names, key=lambda name: ms[name])
    cells = [f"{tflops[cublas]:.0f} cublas ({ms[cublas] * 1e3:.1f} us)" if cublas in tflops else "no cublas"]
    for rank, name in enumerate(ranked):
        if rank < 5 or name == chosen:
            mark = "*" if name == chosen else "+" if rank == 0 else ""
            cells.append(f"{tflops[name]:.0f}{mark} {name.removeprefix(kind + ' ')} ({ms[name] * 1e3:.1f})")
    print(f"    {kind}: " + " | ".join(cells), flush=True)


def compile_ahead(problem_of: type[Problem], shapes: list[tuple[str, int, int, int]]) -> None:
    """Fills Triton's cache in threads (ptxas is a process of its own), so that the timing loop compiles nothing."""
    device = torch.cuda.current_device()
    target = target_of(torch.device("cuda", device))
    tiles = [fitted for tile in problem_of.tiles if (fitted := tile.fitted(2, target))]

    def one(tile: Tile, m: int, n: int) -> None:
        torch.cuda.set_device(device)
        problem_of.compile(tile, m, n)

    jobs = [(tile, m, 1024) for tile in tiles for m in sorted({1 if m == 1 else 64 for _, m, _, _ in shapes})]
    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        errors = [error for job in [pool.submit(one, *job) for job in jobs] if (error := job.exception()) is not None]
    print(f"compiled {len(jobs)} kernels in {time.perf_counter() - start:.1f} s, {len(errors)} failed")
    for error in errors[:3]:
        print(f"    {type(error).__name__}: {(str(error).splitlines() or [''])[0][:150]}")


def parsed(doc: str, **options: dict[str, Any]) -> argparse.Namespace:
    """The command line of a benchmark of GEMMs, `options` beside what all take."""
    parser = report.parser(doc)
    for name, settings in options.items():
        parser.add_argument(f"--{name}", **settings)
    parser.add_argument("--sweep", action="store_true", help="print every candidate tile and write nothing")
    parser.add_argument("--only", default="", help="shapes whose label contains this")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rep", type=int, default=15, help="milliseconds of one measurement")
    args = parser.parse_args()
    if "formats" in options:
        report.split_choices(parser, args, formats=FORMATS)
    torch.manual_seed(0)
    return args


def main() -> None:
    args = parsed(__doc__, formats={"default": ",".join(FORMATS), "help": "how operands are scaled: %(default)s"})
    facts = environment.collect("cuda")
    shapes = [shape for shape in SHAPES if args.only in shape[0]]
    rows: list[Row] = []
    for format in args.formats:
        if args.sweep:
            compile_ahead(FORMATS[format], shapes)
        rows += sweep(format, shapes, args.rounds, args.rep, args.sweep)
    if not args.sweep:
        report.write(args.out, "gemm", facts, rows, rounds=args.rounds)


if __name__ == "__main__":
    main()
