"""Triton's interpreter with the float8 and the subnormal numbers of a GPU.

Import after setting TRITON_INTERPRET=1 and before any kernel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

__all__ = ["install"]


def install() -> None:
    """Changes Triton's interpreter in this process."""
    convert = InterpreterBuilder.create_fp_to_fp

    def create_fp_to_fp(self: Any, source: TensorHandle, kind: Any, rounding: Any) -> TensorHandle:
        if kind.scalar == tl.float8e4nv and source.dtype.scalar == tl.float32:
            return TensorHandle(e4m3(source.data), tl.float8e4nv)
        if source.dtype.scalar == tl.float8e4nv and kind.scalar == tl.float32:
            codes = torch.from_numpy(source.data.copy()).view(torch.float8_e4m3fn)
            return TensorHandle(codes.float().numpy(), tl.float32)
        return convert(self, source, kind, rounding)

    def create_fp_ext(self: Any, source: TensorHandle, kind: Any) -> TensorHandle:
        if source.dtype.scalar == tl.bfloat16:  # the interpreter's own loses subnormals
            return TensorHandle((source.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32), tl.float32)
        return self.cast_impl(source, kind)

    InterpreterBuilder.create_fp_to_fp = create_fp_to_fp
    InterpreterBuilder.create_fp_ext = create_fp_ext


def e4m3(value: np.ndarray) -> np.ndarray:
    """Saturating codes, uint8; NaN's is 0x7F."""
    codes = torch.from_numpy(value.clip(-448.0, 448.0)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return np.where(np.isnan(value), np.uint8(0x7F), codes)
