"""The quantizing kernels, compiled without a GPU, and what their code says of spills and reductions."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from te_dynamo.kernels.quantize.current import MOST_TENSORS
from te_dynamo.kernels.tiles.stacking import MOST_SEGMENTS

TARGET = GPUTarget("cuda", 90, 32)

POINTERS = {f"{name}partials" for name in ("", "second_")} | {"sums", "dbias", "mean", "rstd"}

FP8 = {f"{name}{codes}" for name in ("", "second_") for codes in ("data", "transpose")}

SIZES = {"G", "M", "K", "SIZE", "a_stride", "b_stride", "c_stride", "weight_stride", "bias_stride", "rows_of_sample"}
SIZES |= {"other", "scale_stride", *(f"SIZE_{i}" for i in range(MOST_TENSORS))}
SIZES |= {f"{name}_{i}" for name in ("SIDE", "COUNT") for i in range(MOST_SEGMENTS)}
POINTERS |= {f"partials{i}" for i in range(MOST_SEGMENTS)}


NOT_BY_ROWS = {"BY_COLUMNS": False, "ROWWISE": False, "FMAX": 448.0, "EPS": 0.0, "POWER_OF_TWO": False}
NOT_BY_ROWS |= {"LARGEST": 3.4028234663852886e38, "SCALE_BLOCK": 32}
"""Of the kernel of a norm's rows, where it quantizes with one scale a tensor, or not at all."""


def source(name: str, kind: str, dtype: str = "bf16") -> dict[str, Any]:
    """The constants of kernels/produce/tensor.py for one SOURCE; None is what it has not."""
    strided = {"gated": "ab", "gated_backward": "bc"}.get(name, "")
    count = 1 + (name != "activation") + (name == "gated_backward")
    absent = [*"abc"[count:], *(f"{x}_stride" for x in "abc" if x not in strided)]
    return {**dict.fromkeys(absent), "SOURCE": name, "KIND": kind, "ROUNDED_TO": dtype}


def compile_kernel(
    kernel, constants: dict[str, Any], warps: int, dtype: str = "bf16", weight: str = "bf16", **others: str
):
    """The kernel for sm_90, pointers and sizes multiples of 16; constants are its compile-time arguments, `others` dtypes by name."""
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = (
            "i32" if name in SIZES
            else "*fp32" if name in POINTERS
            else "*fp8e4nv" if name in FP8
            else "*i64" if name == "hint"
            else f"*{others.get(name, weight if name in ('weight', 'bias') else dtype)}"
        )  # fmt: skip
        attributes[(index,)] = [["tt.divisibility", 16]]
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source, log = ASTSource(kernel, signature, values, attributes), io.StringIO()
    with knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(source, target=TARGET, options={"num_warps": warps})
    _LOGS.setdefault(compiled.hash, log.getvalue())
    return compiled


_LOGS: dict[str, str] = {}
"""What ptxas said of each kernel; nothing of those that another process had compiled."""


def assert_no_spills(compiled, tmp_path, allowed: int = 0) -> None:
    """At most `allowed` bytes a thread."""
    if not (report := _LOGS[compiled.hash]):
        (tmp_path / "kernel.ptx").write_text(compiled.asm["ptx"])
        command = [get_ptxas(TARGET.arch).path, "-v", "--gpu-name", "sm_90a", "-o", "/dev/null"]
        file = str(tmp_path / "kernel.ptx")
        report = subprocess.run([*command, file], capture_output=True, text=True, check=True).stderr
    spills = re.findall(r"(\d+) bytes spill", report)
    assert spills and max(map(int, spills)) <= allowed, report


def reduction_layouts(compiled) -> list[str]:
    """The layouts that reductions read, in order: with the shape, they fix the order of the additions."""
    ir = compiled.asm["ttgir"]
    layouts = dict(re.findall(r"(#\w+) = (#ttg\..*)", ir))
    return [layouts[name] for name in re.findall(r"\}\) : \(tensor<\d+x\w+, (#\w+)>\) -> f32", ir)]
