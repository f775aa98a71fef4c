"""PTX in Triton's interpreter: the instructions that our inline assembly has, by the words of the PTX manual, on registers of 32 and 16 bits."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch


def run(asm: str, inputs: list[np.ndarray], outputs: list[np.dtype], pack: int) -> list[np.ndarray]:
    """What the assembly writes for each `pack` elements of the inputs, which have one shape, in arrays of these dtypes."""
    shape, size = inputs[0].shape, inputs[0].size
    registers = [0] * sum(_registers(dtype, pack) for dtype in outputs)
    for values in inputs:
        padded = np.zeros(-(-size // pack) * pack, values.dtype)
        padded[:size] = np.ascontiguousarray(values).reshape(-1)
        words = padded.view(np.uint32 if padded.itemsize * pack >= 4 else f"u{padded.itemsize}")
        registers += list(words.reshape(len(padded) // pack, -1).T.copy())
    state: dict[str, Any] = {f"${i}": register for i, register in enumerate(registers)}
    for statement in asm.strip("{} ").replace("\n", " ").split(";"):
        _step(statement.strip(), state)
    results, first = [], 0
    for dtype in outputs:
        count = _registers(dtype, pack)
        words = np.stack([_bits(state[f"${first + i}"], 32) for i in range(count)], axis=1)
        results.append(np.ascontiguousarray(words).view(dtype).reshape(-1)[:size].reshape(shape))
        first += count
    return results


def _registers(dtype: np.dtype, pack: int) -> int:
    return max(np.dtype(dtype).itemsize * pack // 4, 1)


def _step(statement: str, state: dict[str, Any]) -> None:
    if not statement or statement.startswith(".reg"):
        return
    name, _, operands = statement.partition(" ")
    target, *sources = (operand.strip() for operand in re.findall(r"\{[^}]*\}|[^,{\s][^,]*", operands))
    values = [_value(source, state) for source in sources]
    state[target] = INSTRUCTIONS[name](*values)


def _value(operand: str, state: dict[str, Any]) -> Any:
    if operand.startswith("{"):
        low, high = (_bits(_value(part.strip(), state), 16) for part in operand.strip("{}").split(","))
        return low.astype(np.uint32) | high.astype(np.uint32) << 16
    return state[operand] if operand in state else np.uint32(int(operand, 0))


def _bits(value: Any, width: int) -> np.ndarray:
    return np.asarray(value).astype(np.uint32) & np.uint32(2**width - 1)


def _fp32(register: Any) -> np.ndarray:
    return np.asarray(register, np.uint32).view(np.float32)


def _register(values: np.ndarray) -> np.ndarray:
    return np.asarray(values, np.float32).view(np.uint32)


def _rounded(dtype: torch.dtype, register: Any) -> np.ndarray:
    """The 16 bits of fp32 in that dtype."""
    values = torch.from_numpy(np.ascontiguousarray(_fp32(register))).to(dtype)
    return values.view(torch.int16).numpy().view(np.uint16).astype(np.uint32)


def codes(dtype: torch.dtype, values: np.ndarray) -> np.ndarray:
    """Saturating float8 codes of fp32; NaN's is 0x7F."""
    most = torch.finfo(dtype).max
    found = torch.from_numpy(np.ascontiguousarray(values.clip(-most, most))).to(dtype).view(torch.uint8).numpy()
    return np.where(np.isnan(values), np.uint32(0x7F), found).astype(np.uint32)


def _codes(dtype: torch.dtype, register: Any) -> np.ndarray:
    return codes(dtype, _fp32(register))


def _halves(function: Any) -> Any:
    """An instruction on the low and the high 16 bits."""
    return lambda *registers: (
        function(*(_bits(r, 16) for r in registers))
        | function(*(_bits(r >> np.uint32(16), 16) for r in registers)) << np.uint32(16)
    )


def _product_of_bf16(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    wide = (_fp32(a << np.uint32(16)).astype(np.float64) * _fp32(b << np.uint32(16))).astype(np.float32)
    return _rounded(torch.bfloat16, _register(wide))


def _prmt(a: Any, b: Any, selector: Any) -> np.ndarray:
    both = _bits(a, 32).astype(np.uint64) | _bits(b, 32).astype(np.uint64) << np.uint64(32)
    result = np.zeros(np.shape(both), np.uint32)
    for place in range(4):
        nibble = int(selector) >> 4 * place & 15
        byte = (both >> np.uint64(8 * (nibble & 7))).astype(np.uint32) & np.uint32(0xFF)
        if nibble & 8:
            byte = (byte >> np.uint32(7)) * np.uint32(0xFF)
        result |= byte << np.uint32(8 * place)
    return result


def _flushed(values: np.ndarray) -> np.ndarray:
    return np.where(np.abs(values) < np.finfo(np.float32).tiny, values * np.float32(0), values)


def _approximate(function: Any) -> Any:
    return lambda x: _register(_flushed(function(_flushed(_fp32(x))).astype(np.float32)))


def _pair(convert: Any, dtype: torch.dtype, shift: int) -> Any:
    return lambda high, low: convert(dtype, high) << np.uint32(shift) | convert(dtype, low)


INSTRUCTIONS: dict[str, Any] = {
    "cvt.rn.bf16x2.f32": _pair(_rounded, torch.bfloat16, 16),
    "cvt.rn.f16x2.f32": _pair(_rounded, torch.float16, 16),
    "cvt.rn.satfinite.e4m3x2.f32": _pair(_codes, torch.float8_e4m3fn, 8),
    "cvt.rn.satfinite.e5m2x2.f32": _pair(_codes, torch.float8_e5m2, 8),
    "shl.b32": lambda a, b: _bits(a, 32) << b,
    "and.b32": lambda a, b: _bits(a, 32) & b,
    "mov.b32": lambda a: a,
    "prmt.b32": _prmt,
    "mul.rn.f32": lambda a, b: _register(_fp32(a) * _fp32(b)),
    "mul.rn.bf16x2": _halves(_product_of_bf16),
    "max.u16x2": _halves(np.maximum),
    "ex2.approx.ftz.f32": _approximate(np.exp2),
    "rcp.approx.ftz.f32": _approximate(lambda x: np.float32(1) / x),
}
