"""Triton's interpreter with the float8 and the subnormal numbers of a GPU, its products of blocks with scales and some instructions.

Import after setting TRITON_INTERPRET=1 and before any kernel.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from helpers.kernels import ptx
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, TensorHandle

FLOAT8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}


def install() -> None:
    """Changes Triton's interpreter in this process."""
    convert = InterpreterBuilder.create_fp_to_fp

    def create_fp_to_fp(self: Any, source: TensorHandle, kind: Any, rounding: Any) -> TensorHandle:
        if kind.scalar in FLOAT8 and source.dtype.scalar == tl.float32:
            return TensorHandle(ptx.codes(FLOAT8[kind.scalar], source.data).astype(np.uint8), kind.scalar)
        if source.dtype.scalar in FLOAT8 and kind.scalar == tl.float32:
            codes = torch.from_numpy(source.data.copy()).view(FLOAT8[source.dtype.scalar])
            return TensorHandle(codes.float().numpy(), tl.float32)
        return convert(self, source, kind, rounding)

    def create_fp_ext(self: Any, source: TensorHandle, kind: Any) -> TensorHandle:
        if source.dtype.scalar == tl.bfloat16:  # the interpreter's own loses subnormals
            return TensorHandle((source.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32), tl.float32)
        return self.cast_impl(source, kind)

    def create_fp_trunc(self: Any, source: TensorHandle, kind: Any) -> TensorHandle:
        if kind.scalar == tl.bfloat16:  # the interpreter's own cuts bits off
            rounded = torch.from_numpy(source.data.astype(np.float32)).bfloat16()
            return TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)
        return self.cast_impl(source, kind)

    ReduceOps.generic_reduce = reduce_by_halves
    InterpreterBuilder.create_fp_trunc = create_fp_trunc
    InterpreterBuilder.create_fp_to_fp = create_fp_to_fp
    InterpreterBuilder.create_fp_ext = create_fp_ext
    InterpreterBuilder.create_inline_asm = create_inline_asm
    InterpreterBuilder.create_dot_scaled = create_dot_scaled

    multiply = TritonSemantic.dot_scaled  # which asks formats for their `value`, that the interpreter's strings lack

    def dot_scaled(
        self: Any, a: Any, a_scale: Any, a_format: str, b: Any, b_scale: Any, b_format: str, *rest: Any
    ) -> Any:
        return multiply(self, a, a_scale, tl.constexpr(a_format), b, b_scale, tl.constexpr(b_format), *rest)

    TritonSemantic.dot_scaled = dot_scaled

    patch_tensor = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        # Triton 3.6 calls int() of an array with one element, which NumPy 2.4 refuses.
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_lang_tensor


def reduce_by_halves(self: ReduceOps, inputs: tuple[Any, ...]) -> list[Any]:
    """A reduction of one tensor by a function of ours, in which order does not matter; the interpreter's own goes by single elements."""
    (values,) = inputs
    assert self.axis is not None and not self.keep_dims
    data = np.moveaxis(values.handle.data, self.axis, 0)
    while len(data) > 1:
        half = len(data) // 2
        pair = (self.to_tensor(np.ascontiguousarray(part), values.dtype) for part in (data[:half], data[half:]))
        data = self.combine_fn.fn(*pair).handle.data
    return [self.to_tensor(data[0], values.dtype)]


def install_products() -> None:
    """For the kernel of products: mul_rn is not libdevice's, and a part of K, which the interpreter's loops count in numbers, a tensor."""
    from te_dynamo.kernels.gemm import product

    origin = product.tile_origin

    def tile_origin(*where: Any) -> Any:
        row, column, part = origin(*where)
        return row, column, tl.full((), part, tl.int32)

    product.tile_origin = tile_origin
    product.libdevice = SimpleNamespace(mul_rn=lambda x, y: x * y)  # type: ignore[assignment]


def create_inline_asm(
    self: Any, asm: str, constraints: str, values: list[TensorHandle], kinds: list[Any], pure: bool, pack: int
) -> Any:
    """By `ptx`, but for a conversion to a part of a register."""
    if "cvt.rn.satfinite.e2m1x2.f32" in asm:
        first, second = (value.data for value in values)
        results = [e2m1(first) | e2m1(second) << 4]
    else:
        dtypes = [np.dtype(_NUMPY[kind.scalar]) for kind in kinds]
        results = ptx.run(asm, [value.data for value in values], dtypes, pack)
    handles = [TensorHandle(result, kind.scalar) for result, kind in zip(results, kinds, strict=True)]
    return SimpleNamespace(get_result=handles.__getitem__)


_NUMPY = {tl.float32: "f4", tl.bfloat16: "u2", tl.float16: "f2", tl.int32: "i4", tl.int16: "i2", tl.int8: "i1"}


def create_dot_scaled(
    self: Any,
    a: TensorHandle,
    a_scale: TensorHandle,
    a_format: Any,
    b: TensorHandle,
    b_scale: TensorHandle,
    b_format: Any,
    fast_math: bool,
    a_packed: bool,
    b_packed: bool,
    total: TensorHandle,
) -> TensorHandle:
    """[M, N] of a [M, K] and b [K, N], each with scales by its rows and blocks, in fp32."""
    left = block_values(a, a_scale)
    right = block_values(TensorHandle(b.data.T, b.dtype), b_scale)
    return TensorHandle(total.data + (left @ right.T).astype(np.float32), tl.float32)


def block_values(codes: TensorHandle, scales: TensorHandle) -> np.ndarray:
    """The values [R, K], in float64, of codes [R, K], or of two e2m1 codes a byte along K, and e4m3 or e8m0 scales [R, blocks]."""
    if codes.dtype.scalar in (tl.float8e4nv, tl.float8e5):
        kind = FLOAT8[codes.dtype.scalar]
        values = torch.from_numpy(np.ascontiguousarray(codes.data)).view(torch.uint8).view(kind).double().numpy()
    else:
        bits = codes.data.astype(np.uint8)
        values = E2M1[np.stack([bits & 15, bits >> 4], axis=-1).reshape(len(bits), -1)]
    powers = scales.data.astype(np.uint8)
    if scales.dtype.scalar == tl.float8e4nv:
        factors = torch.from_numpy(np.ascontiguousarray(powers)).view(torch.float8_e4m3fn).double().numpy()
    else:
        factors = np.where(powers == 255, np.nan, np.exp2(powers.astype(np.float64) - 127))
    return values * factors.repeat(values.shape[1] // factors.shape[1], axis=1)


MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1 = np.concatenate([MAGNITUDES, -MAGNITUDES])


def e2m1(value: np.ndarray) -> np.ndarray:
    """Saturating codes of fp32, uint8, ties to the even one; NaN's is that of 6."""
    magnitude = np.abs(value.astype(np.float64))
    middles = (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2
    codes = np.searchsorted(middles, magnitude)  # ties to the lower
    codes += (codes % 2 == 1) & (magnitude == middles[np.minimum(codes, 6)])
    return np.where(np.isnan(value), 7, np.minimum(codes, 7) | np.signbit(value) * 8).astype(np.uint8)
