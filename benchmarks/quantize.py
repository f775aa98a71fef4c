"""Bandwidth of the quantizing kernels on this GPU: `python benchmarks/quantize.py [--format nvfp4] [--sweep]`.

Bytes are those the two launches must move: inputs twice, every output once. A row's percentage is of the
bandwidth of a device-to-device copy measured in the same run; it can pass 100 where the second launch finds
inputs in the cache. --sweep tries other tiles of the second launch and prints the best ones beside the
chosen.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
from collections.abc import Callable, Iterator

import torch
import triton

from te_dynamo.kernels.activation import activation_backward_quantize
from te_dynamo.kernels.norm import rms_norm_quantize
from te_dynamo.kernels.nvfp4 import quantize_nvfp4, random_key
from te_dynamo.kernels.quantize import Tile, quantize
from te_dynamo.kernels.swiglu import swiglu_backward_quantize, swiglu_quantize

SHAPES = ((8192, 4096), (8192, 14336), (14336, 4096))
BOTH = (torch.float8_e4m3fn, True, True, False, 0.0)
ROWWISE = (torch.float8_e4m3fn, True, False, False, 0.0)
COLUMNWISE = (torch.float8_e4m3fn, False, True, False, 0.0)
GRADIENT = (torch.float8_e5m2, True, True, False, 0.0)

Case = tuple[str, Callable[[Tile | None], object], int, float, bool]
"""(name, function of a tile, bf16 inputs, bytes written for each element of one, whether a transpose is among them)"""


def cases(rows: int, columns: int) -> Iterator[Case]:
    """The benchmarked functions on fresh normal data of that shape."""
    x, gate, dy = (torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    weight = torch.randn(columns, device="cuda", dtype=torch.bfloat16)
    yield "quantize row+column", lambda tile: quantize(x, *BOTH, tile=tile), 1, 2, True
    yield "quantize row", lambda tile: quantize(x, *ROWWISE, tile=tile), 1, 1, False
    yield "quantize column", lambda tile: quantize(x, *COLUMNWISE, tile=tile), 1, 1, True
    yield (
        "rms_norm_quantize",
        lambda tile: rms_norm_quantize(x, weight, 1e-5, True, False, *BOTH, False, tile=tile),
        1, 2, True,
    )  # fmt: skip
    yield "swiglu_quantize", lambda tile: swiglu_quantize(gate, x, *BOTH, False, tile=tile), 2, 2, True
    yield (
        "swiglu_backward_quantize",
        lambda tile: swiglu_backward_quantize(dy, gate, x, *GRADIENT, False, tile=tile),
        3, 4, True,
    )  # fmt: skip
    yield (
        "gelu_tanh_backward_quantize",
        lambda tile: activation_backward_quantize(dy, x, "gelu_tanh", *GRADIENT, False, True, tile=tile),
        2, 2, True,
    )  # fmt: skip


def nvfp4_cases(rows: int, columns: int) -> Iterator[Case]:
    """NVFP4: half a byte an element and a sixteenth for its share of a scale, for rows and for columns."""
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    key = random_key(x.device)
    forms = {
        "nvfp4 row+column": (True, True, False, False, False, None),
        "nvfp4 row": (True, False, False, False, False, None),
        "nvfp4 column": (False, True, False, False, False, None),
        "nvfp4 16x16 row+column": (True, True, True, False, False, None),
        "nvfp4 hadamard row+column": (True, True, False, True, False, None),
        "nvfp4 gradient row+column": (True, True, False, True, True, key),
    }
    for name, form in forms.items():
        yield (
            name,
            lambda tile, form=form: quantize_nvfp4(x, *form, tile=tile),
            1,
            0.5625 * (form[0] + form[1]),
            form[1],
        )


FORMATS = {"float8": cases, "nvfp4": nvfp4_cases}
"""What --format chooses among."""


def milliseconds(function: Callable[[], object], repetitions: int = 60) -> float:
    """Median time with a cold cache."""
    return triton.testing.do_bench(function, warmup=10, rep=repetitions, return_mode="median")


def copy_bandwidth() -> float:
    """Bytes a second of a copy, read and written bytes both counted."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / milliseconds(lambda: target.copy_(source)) * 1e3


NVFP4_TILES = ((128, 128, 4), (128, 256, 8), (256, 128, 8), (256, 256, 16))
ROW_TILES = ((8, 1024, 8), (4, 1024, 8), (2, 2048, 8), (4, 2048, 8), (16, 512, 8), (8, 512, 8), (2, 4096, 8))


def tiles(name: str, columnwise: bool) -> Iterator[Tile]:
    """The second launch's tiles that --sweep tries."""
    if name.startswith("nvfp4"):
        yield from NVFP4_TILES
        return
    if not columnwise:
        yield from ROW_TILES
        return
    for block_m, block_k, warps in itertools.product((32, 64, 128, 256), (32, 64, 128), (4, 8, 16)):
        if 8 <= block_m * block_k // (32 * warps) <= 64:
            yield block_m, block_k, warps


def sweep(function: Callable[[Tile | None], object], tried: Iterator[Tile]) -> list[tuple[float, Tile]]:
    """(milliseconds, tile), the fastest first."""
    return sorted((milliseconds(lambda: function(tile), 15), tile) for tile in tried)  # noqa: B023


def environment() -> str:
    """What a published number must say."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]
    name = torch.cuda.get_device_name()
    return f"{name}, driver {driver}, torch {torch.__version__}, Triton {triton.__version__}"


def measure(rows: int, columns: int, copy: float, arguments: argparse.Namespace) -> None:
    """Prints the rows of one shape."""
    for name, function, inputs, outputs, columnwise in FORMATS[arguments.format](rows, columns):
        if arguments.only not in name:
            continue
        moved = rows * columns * (2 * 2 * inputs + outputs)

        def row(time: float, moved: float = moved) -> str:
            speed = moved / time * 1e3
            return f"{time * 1e3:8.1f} us  {speed / 1e12:5.2f} TB/s  {speed / copy:4.0%}"

        chosen = milliseconds(lambda: function(None))  # noqa: B023
        print(f"{rows}x{columns}".ljust(12), name.ljust(28), row(chosen), flush=True)
        if arguments.sweep:
            for time, tile in sweep(function, tiles(name, columnwise))[:6]:
                print("   ", row(time), tile, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="try other tiles of the second launch")
    parser.add_argument("--only", default="", help="run only the functions whose name holds this")
    parser.add_argument("--format", choices=FORMATS, default="float8", help="which kernels")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    copy = copy_bandwidth()
    print(environment())
    print(f"copy {copy / 1e12:.2f} TB/s")
    for rows, columns in SHAPES[:1] if arguments.sweep else SHAPES:
        measure(rows, columns, copy, arguments)


if __name__ == "__main__":
    main()
