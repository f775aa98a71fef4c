"""Bandwidth of the quantizing kernels on one GPU.

    python benchmarks/quantize.py                        # every recipe and shape
    python benchmarks/quantize.py --recipes nvfp4 --shape 8192x4096
    python benchmarks/quantize.py --sweep                # prints other tiles of the last launch beside the chosen one

Bytes are those that the launches must move: inputs once, twice in current scaling and NVFP4, which need the tensor's amax first, and in
rowwise scaling's columns, which no cache holds whole, and every output once. Each time is that of a call replayed from a CUDA graph with a cold cache. `percent of copy` is the bandwidth as a share
of that of a kernel that copies a tensor of the same shape, measured in the same way in the same run. It can pass 100 where a second
launch finds inputs in the cache.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import environment
import report
import torch
import triton

from te_dynamo.kernels.activation.activation import activation_backward_quantize
from te_dynamo.kernels.activation.gated import gated_backward_quantize, gated_quantize
from te_dynamo.kernels.activation.gated_halves import gated_backward_quantize_halves
from te_dynamo.kernels.activation.gated_in_place import gated_backward_quantize_in_place
from te_dynamo.kernels.layouts.block import BlockForm
from te_dynamo.kernels.layouts.mxfp8 import SCALE_BLOCKS, MXFP8Form
from te_dynamo.kernels.layouts.nvfp4 import NVFP4Form
from te_dynamo.kernels.layouts.row import RowForm
from te_dynamo.kernels.layouts.tensor import TensorForm
from te_dynamo.kernels.norm.add import add_rms_norm_quantize
from te_dynamo.kernels.norm.norm import rms_norm_quantize
from te_dynamo.kernels.quantize.current import Tile, quantize, quantize_bias_grad
from te_dynamo.kernels.quantize.float8_block import BlockTile, quantize_block
from te_dynamo.kernels.quantize.float8_rowwise import quantize_rowwise
from te_dynamo.kernels.quantize.mxfp8 import dequantize_mxfp8, quantize_mxfp8
from te_dynamo.kernels.quantize.nvfp4 import quantize_nvfp4
from te_dynamo.kernels.quantize.transpose import transpose
from te_dynamo.quantized.quantize import random_key

SHAPES = ((8192, 4096), (8192, 14336), (14336, 4096))
BOTH = TensorForm(torch.float8_e4m3fn, True, True)
ROWWISE = TensorForm(torch.float8_e4m3fn, True, False)
COLUMNWISE = TensorForm(torch.float8_e4m3fn, False, True)
GRADIENT = TensorForm(torch.float8_e5m2, True, True)

Tiles = Callable[[], Iterator[tuple[int, ...]]]

Case = tuple[str, Callable[[Any], object], float, float, Tiles]
"""(name, function of a tile, reads of a bf16 tensor, bytes written for each of its elements, the tiles that --sweep tries)"""


def current_cases(rows: int, columns: int) -> Iterator[Case]:
    """Current scaling, on fresh normal data of that shape."""
    x, gate, dy = (torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    weight = torch.randn(columns, device="cuda", dtype=torch.bfloat16)
    yield "quantize row+column", lambda tile: quantize(x, BOTH, tile=tile), 2, 2, column_tiles
    yield "quantize row", lambda tile: quantize(x, ROWWISE, tile=tile), 2, 1, row_tiles
    yield "quantize column", lambda tile: quantize(x, COLUMNWISE, tile=tile), 2, 1, column_tiles
    yield (
        "rms_norm_quantize",
        lambda tile: rms_norm_quantize(x, weight, 1e-5, True, False, BOTH, False, tile=tile),
        2, 2, column_tiles,
    )  # fmt: skip
    yield (
        "add_rms_norm_quantize",
        lambda tile: add_rms_norm_quantize(x, gate, weight, 1e-5, True, False, BOTH, False, tile=tile),
        3, 4, column_tiles,
    )  # fmt: skip
    yield "quantize_bias_grad", lambda tile: quantize_bias_grad(dy, GRADIENT, tile=tile), 2, 2, column_tiles
    yield "swiglu_quantize", lambda tile: gated_quantize(gate, x, "silu", BOTH, False, tile=tile), 4, 2, column_tiles
    yield (
        "swiglu_backward_quantize",
        lambda tile: gated_backward_quantize(dy, gate, x, "silu", GRADIENT, False, tile=tile),
        6, 4, column_tiles,
    )  # fmt: skip
    yield (
        "swiglu_backward_quantize_halves",
        lambda tile: gated_backward_quantize_halves(dy, gate, x, "silu", GRADIENT, False, True, tile=tile),
        6, 4, column_tiles,
    )  # fmt: skip
    yield (
        "swiglu_backward_quantize_in_place",
        lambda tile: gated_backward_quantize_in_place(dy, gate, x, "silu", TensorForm(torch.float8_e5m2, True, False)),
        6, 2, lambda: iter(()),
    )  # fmt: skip
    codes = x.to(torch.float8_e5m2)
    yield "transpose", lambda tile: transpose(codes, tile), 0.5, 1, column_tiles
    yield (
        "gelu_tanh_backward_quantize",
        lambda tile: activation_backward_quantize(dy, x, "gelu_tanh", GRADIENT, False, True, tile=tile),
        4, 2, column_tiles,
    )  # fmt: skip


def block_cases(rows: int, columns: int) -> Iterator[Case]:
    """Float8 block scaling, on fresh normal data of that shape."""
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    for two_d, kind in ((False, "1x128"), (True, "128x128")):
        for rowwise, columnwise, usage in ((True, True, "row+column"), (True, False, "row"), (False, True, "column")):
            form = BlockForm(torch.float8_e4m3fn, rowwise, columnwise, two_d)
            tiles = block_tiles if columnwise or two_d else block_row_tiles

            def run(tile: BlockTile | None, form: BlockForm = form) -> object:
                return quantize_block(x, form, tile=tile)

            yield f"{kind} {usage}", run, 1, rowwise + columnwise, tiles


def rowwise_cases(rows: int, columns: int) -> Iterator[Case]:
    """One scale a row: a launch for the rows and one for the columns."""
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    for on, reads, usage in (((True, True), 3, "row+column"), ((True, False), 1, "row"), ((False, True), 2, "column")):
        form = RowForm(torch.float8_e4m3fn, *on)

        def run(tile: Tile | None, form: RowForm = form) -> object:
            return quantize_rowwise(x, form)

        yield f"rowwise {usage}", run, reads, sum(on), lambda: iter(())


def nvfp4_cases(rows: int, columns: int) -> Iterator[Case]:
    """NVFP4: half a byte an element and a sixteenth for its share of a scale, for rows and for columns."""
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    key = random_key(x.device)
    forms = {
        "nvfp4 row+column": NVFP4Form(True, True),
        "nvfp4 row": NVFP4Form(True, False),
        "nvfp4 column": NVFP4Form(False, True),
        "nvfp4 16x16 row+column": NVFP4Form(True, True, two_d=True),
        "nvfp4 hadamard row+column": NVFP4Form(True, True, hadamard=True),
        "nvfp4 gradient row+column": NVFP4Form(True, True, hadamard=True, stochastic_rounding=True),
    }
    for name, form in forms.items():

        def run(tile: Tile | None, form: NVFP4Form = form) -> object:
            return quantize_nvfp4(x, form, key, tile=tile)

        yield name, run, 2, 0.5625 * (form.rowwise + form.columnwise), nvfp4_tiles


def mxfp8_cases(rows: int, columns: int) -> Iterator[Case]:
    """MXFP8 in blocks of 32 and of 128, and what the GEMM's emulation reads, on fresh normal data of that shape."""
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    for scale_block, two_d in itertools.product(SCALE_BLOCKS, (False, True)):
        for rowwise, columnwise, usage in ((True, True, "row+column"), (True, False, "row"), (False, True, "column")):
            form = MXFP8Form(torch.float8_e4m3fn, rowwise, columnwise, scale_block, two_d=two_d)
            tiles = (
                mxfp8_row_tiles if not (columnwise or two_d) else mxfp8_tiles if scale_block == 32 else mxfp8_128_tiles
            )

            def run(tile: Tile | None, form: MXFP8Form = form) -> object:
                return quantize_mxfp8(x, form, tile=tile)

            written = 1 if two_d and scale_block == 32 else rowwise + columnwise
            yield f"mxfp8 {f'{scale_block}x' * two_d}{scale_block} {usage}", run, 1, written, tiles
    for columnwise, usage in ((False, "row"), (True, "column")):
        buffers = quantize_mxfp8(x, MXFP8Form(torch.float8_e4m3fn, not columnwise, columnwise, 32))

        def restore(tile: Tile | None, operand: tuple = (*buffers, columnwise, torch.bfloat16)) -> object:
            return dequantize_mxfp8(*operand, *(() if tile is None else (tile,)))

        yield f"dequantize_mxfp8 {usage}", restore, 1, 1, mxfp8_dequantize_tiles  # reads fp8 and writes bf16


RECIPES = {
    "float8_current_scaling": current_cases,
    "float8_rowwise": rowwise_cases,
    "float8_block_scaling": block_cases,
    "mxfp8": mxfp8_cases,
    "nvfp4": nvfp4_cases,
}


def milliseconds(function: Callable[[], object], repetitions: int = 60) -> float:
    """Median time of a call replayed from a CUDA graph with a cold cache: what the GPU takes, without the CPU's launches."""
    function()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return triton.testing.do_bench(graph.replay, warmup=10, rep=repetitions, return_mode="median")


def copy_bandwidth(shape: tuple[int, int]) -> float:
    """Bytes a second of a kernel that copies a bf16 tensor of that shape, read and written bytes both counted.

    It negates, because a graph runs a plain copy by the copy engine, at two thirds of what a kernel reaches.
    """
    source = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / milliseconds(lambda: torch.neg(source, out=target)) * 1e3


ROW_TILES = ((8, 1024, 8), (4, 1024, 8), (2, 2048, 8), (4, 2048, 8), (16, 512, 8), (8, 512, 8), (2, 4096, 8))


def row_tiles() -> Iterator[Tile]:
    """Tiles of current scaling's second launch without a transpose."""
    yield from ROW_TILES


def column_tiles() -> Iterator[Tile]:
    """Tiles of current scaling's second launch with one."""
    for block_m, block_k, warps in itertools.product((32, 64, 128, 256), (32, 64, 128), (4, 8, 16)):
        if 8 <= block_m * block_k // (32 * warps) <= 64:
            yield block_m, block_k, warps


def block_tiles() -> Iterator[BlockTile]:
    """Tiles of block scaling where blocks span 128 rows."""
    yield from itertools.product((128,), (4, 8, 16), (1, 4, 8, 16))


def block_row_tiles() -> Iterator[BlockTile]:
    """Tiles of block scaling by rows alone."""
    yield from (
        (16, 2, 8),
        (32, 2, 8),
        (32, 4, 8),
        (64, 2, 8),
        (64, 4, 8),
        (64, 8, 8),
        (128, 8, 8),
        (64, 4, 1),
        (128, 4, 8),
    )


def nvfp4_tiles() -> Iterator[Tile]:
    """Tiles of NVFP4's second launch."""
    yield from ((64, 64, 4), (64, 64, 8), (32, 64, 4), (64, 32, 4), (64, 128, 8), (128, 64, 8))


def mxfp8_tiles() -> Iterator[Tile]:
    """Tiles of MXFP8 in blocks of 32 that leave a thread 32 or 64 values."""
    for block_m, block_k, warps in itertools.product((32, 64, 128), (64, 128), (1, 2, 4, 8)):
        if 32 <= block_m * block_k // (32 * warps) <= 64:
            yield block_m, block_k, warps


def mxfp8_row_tiles() -> Iterator[Tile]:
    """Tiles of MXFP8 without columnwise data that leave a thread 32, 64 or 128 values."""
    for block_k, values, warps in itertools.product((128, 512, 1024), (32, 64, 128), (4, 8)):
        if 8 <= values * 32 * warps // block_k <= 128:
            yield values * 32 * warps // block_k, block_k, warps


def mxfp8_128_tiles() -> Iterator[Tile]:
    """Tiles of MXFP8 in blocks of 128: (128, rows of tiles walked together, warps)."""
    yield from itertools.product((128,), (1, 4, 8, 16), (4, 8, 16))


def mxfp8_dequantize_tiles() -> Iterator[Tile]:
    """Tiles of the dequantization."""
    yield from itertools.product((32, 64, 128), (64, 128), (2, 4, 8))


def sweep(function: Callable[[Any], object], tiles: Tiles) -> list[tuple[float, tuple[int, ...]]]:
    """(milliseconds, tile), the fastest first."""
    return sorted((milliseconds(lambda: function(tile), 15), tile) for tile in tiles())  # noqa: B023


@dataclasses.dataclass
class Row:
    """One kernel at one shape."""

    recipe: str
    shape: str
    kernel: str
    us: float
    tbps: float
    percent_of_copy: float


def measure(recipe: str, shape: tuple[int, int], copy: float, only: str, sweeping: bool) -> list[Row]:
    """A row for each kernel of a recipe at one shape. copy: bytes a second."""
    rows = []
    for name, function, reads, outputs, tiles in RECIPES[recipe](*shape):
        if only not in name:
            continue
        moved = shape[0] * shape[1] * (2 * reads + outputs)

        def row(ms: float, name: str = name, moved: float = moved) -> Row:
            speed = moved / ms * 1e3
            return Row(recipe, "{}x{}".format(*shape), name, ms * 1e3, speed / 1e12, 100 * speed / copy)

        rows.append(row(milliseconds(lambda: function(None))))  # noqa: B023
        print(rows[-1], flush=True)
        if sweeping:
            for ms, tile in sweep(function, tiles)[:6]:
                print("   ", tile, row(ms), flush=True)
    return rows


def shape_of(text: str) -> tuple[int, int]:
    """(rows, columns) of "8192x4096"."""
    rows, columns = text.split("x")
    return int(rows), int(columns)


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--recipes", default=",".join(RECIPES), help="of: %(default)s")
    parser.add_argument("--sweep", action="store_true", help="print other tiles of the last launch and write nothing")
    parser.add_argument("--only", default="", help="run only the functions whose name holds this")
    parser.add_argument("--shape", type=shape_of, action="append", help="ROWSxCOLUMNS, of which there may be several")
    args = parser.parse_args()
    report.split_choices(parser, args, recipes=RECIPES)
    torch.manual_seed(0)
    facts = environment.collect("cuda")
    rows: list[Row] = []
    for shape in args.shape or (SHAPES[:1] if args.sweep else SHAPES):
        copy = copy_bandwidth(shape)
        print("{}x{}".format(*shape), f"copy {copy / 1e12:.2f} TB/s")
        for recipe in args.recipes:
            rows += measure(recipe, shape, copy, args.only, args.sweep)
    if not args.sweep:
        report.write(args.out, "quantize", facts, rows)


if __name__ == "__main__":
    main()
