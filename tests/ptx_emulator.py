"""Runs a piece of straight-line PTX on numpy arrays: what inline assembly computes, tested without a GPU."""

from __future__ import annotations

import re

import numpy as np

__all__ = ["PtxEmulator"]


class PtxEmulator:
    """Arguments are $1, $2, ...; registers hold uint32 patterns. Knows the instructions of kernels/e2m1.py and gemm_swiglu.py."""

    def __init__(self, arguments: list[np.ndarray]) -> None:
        self.registers = {f"${index + 1}": value.view(np.uint32) for index, value in enumerate(arguments)}
        self.count = len(arguments[0])

    def run(self, text: str) -> np.ndarray:
        text = re.sub(r"//[^\n]*", "", text).strip("{} \n")
        for statement in filter(None, (part.strip() for part in text.split(";"))):
            if not statement.startswith(".reg"):
                name, operands = statement.split(None, 1)
                target, *sources = (operand.strip() for operand in operands.split(","))
                with np.errstate(all="ignore"):
                    self.registers[target] = self.execute(name, [self.value(s) for s in sources])
        return self.registers["$0"]

    def value(self, operand: str) -> np.ndarray:
        if operand in self.registers:
            return self.registers[operand]
        number = int(operand[2:], 16) if operand.startswith("0f") else int(operand, 0)
        return np.full(self.count, number, np.uint32)

    def execute(self, name: str, values: list[np.ndarray]) -> np.ndarray:
        operation = name.split(".")[0]
        if name in ("mov.b32", "mov.f32"):
            return values[0]
        if (operation in ("fma", "min", "abs") and name.endswith("f32")) or name in ("add.rn.f32", "add.rz.f32"):
            return self.floating(name, *(value.view(np.float32) for value in values)).view(np.uint32)
        if name.endswith("bf16x2"):
            low, high = (self.brain(name, *(half(value) for value in values)) for half in (_low, _high))
            return high | low >> np.uint32(16)
        wide = [value.astype(np.uint64) for value in values]
        result = {
            "add": lambda a, b: a + b,
            "sub": lambda a, b: a - b,
            "mul": lambda a, b: a * b,
            "mad": lambda a, b, c: a * b + c,
            "and": lambda a, b: a & b,
            "or": lambda a, b: a | b,
            "xor": lambda a, b: a ^ b,
            "shl": lambda a, b: a << b,
            "shr": lambda a, b: a >> b,
            "shf": lambda low, high, n: (high << n) | (low >> (np.uint64(32) - n)),
            "min": lambda a, b: np.minimum(a, b),  # of positive numbers only
        }[operation](*wide)
        return (result & np.uint64(0xFFFFFFFF)).astype(np.uint32)

    @staticmethod
    def floating(name: str, *values: np.ndarray) -> np.ndarray:
        if name == "abs.f32":
            return np.abs(values[0])
        if name == "min.f32":
            return np.fmin(*values)  # drops NaN, as PTX's does
        exact = values[0].astype(np.float64)
        exact = exact * values[1] + values[2] if name.startswith("fma") else exact + values[1]
        rounded = exact.astype(np.float32)
        if ".rz" in name:
            rounded = np.where(rounded > exact, np.nextafter(rounded, np.float32(0)), rounded)
        return rounded

    @staticmethod
    def brain(name: str, *values: np.ndarray) -> np.ndarray:
        """bf16 in the upper half of fp32, rounded once to nearest even from the exact result (but for denormals)."""
        wide = [value.astype(np.float64) for value in values]
        result = {
            "fma.rn.bf16x2": lambda a, b, c: a * b + c,
            "mul.rn.bf16x2": lambda a, b: a * b,
            "max.NaN.bf16x2": np.maximum,
        }[name](*wide)
        bits = result.astype(np.float32).view(np.uint32).astype(np.uint64)
        rounded = (bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))).astype(np.uint32)
        return np.where(np.isnan(result), np.uint32(0x7FC00000), rounded) & np.uint32(0xFFFF0000)


def _high(word: np.ndarray) -> np.ndarray:
    return (word & np.uint32(0xFFFF0000)).view(np.float32)


def _low(word: np.ndarray) -> np.ndarray:
    return (word << np.uint32(16)).view(np.float32)
