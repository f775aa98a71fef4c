"""Triton's interpreter with inline assembly (by `ptx_emulator`), and with the rounding and the NaN of a GPU.

Import after setting TRITON_INTERPRET=1 and before any kernel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from helpers.kernels.ptx_emulator import PtxEmulator, fp8
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

__all__ = ["install"]


def install() -> None:
    """Changes Triton's interpreter in this process."""
    InterpreterBuilder.create_inline_asm = create_inline_asm
    convert = InterpreterBuilder.create_fp_to_fp

    def create_fp_to_fp(self: Any, source: TensorHandle, kind: Any, rounding: Any) -> TensorHandle:
        if kind.scalar == tl.float8e4nv and source.dtype.scalar == tl.float32:
            return TensorHandle(
                fp8(source.data.reshape(-1), torch.float8_e4m3fn).astype(np.uint8).reshape(source.data.shape),
                tl.float8e4nv,
            )
        if source.dtype.scalar == tl.float8e4nv and kind.scalar == tl.float32:
            codes = torch.from_numpy(source.data.copy()).view(torch.float8_e4m3fn)
            return TensorHandle(codes.float().numpy(), tl.float32)
        return convert(self, source, kind, rounding)

    def create_fma(self: Any, a: TensorHandle, b: TensorHandle, c: TensorHandle) -> TensorHandle:
        x, y, z = (value.data.astype(np.float64) for value in (a, b, c))
        return TensorHandle((x * y + z).astype(np.float32), a.dtype.scalar)

    def create_fp_ext(self: Any, source: TensorHandle, kind: Any) -> TensorHandle:
        if source.dtype.scalar == tl.bfloat16:  # the interpreter's own loses subnormals
            return TensorHandle((source.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32), tl.float32)
        return self.cast_impl(source, kind)

    InterpreterBuilder.create_fp_to_fp = create_fp_to_fp
    InterpreterBuilder.create_fp_ext = create_fp_ext
    InterpreterBuilder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)  # drops NaN
    InterpreterBuilder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    InterpreterBuilder.create_fma = create_fma


class Results:
    def __init__(self, handles: list[TensorHandle]) -> None:
        self.handles = handles

    def get_result(self, index: int) -> TensorHandle:
        return self.handles[index]


def create_inline_asm(
    self: Any, text: str, constraints: str, values: list[TensorHandle], kinds: list[Any], pure: bool, pack: int
) -> Results:
    """Assembly on elements of 32 bits, one a time."""
    assert pack == 1 and len(constraints.split(",")) == len(values) + len(kinds)
    shape = values[0].data.shape
    arguments = [np.ascontiguousarray(value.data).reshape(-1) for value in values]
    outputs = PtxEmulator(arguments, len(kinds)).run(text.replace("$$", "$"))
    handles = []
    for output, kind in zip(outputs, kinds, strict=True):
        scalar = kind.scalar
        dtype = {tl.int32: np.int32, tl.float32: np.float32, tl.int64: np.int64}[scalar]
        handles.append(TensorHandle(output.view(dtype).reshape(shape), scalar))
    return Results(handles)
