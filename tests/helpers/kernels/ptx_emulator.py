"""Runs a piece of straight-line PTX on numpy arrays: what inline assembly computes, tested without a GPU."""

from __future__ import annotations

import re

import numpy as np
import torch

__all__ = ["PtxEmulator"]


class PtxEmulator:
    """Outputs are $0, $1, ..., then come the arguments. Registers hold uint32 patterns, of 64 bits uint64. Knows the instructions
    of kernels/quantize/e2m1_assembly.py, hadamard_amax_assembly.py, shared_tile.py, block_words.py and gemm_swiglu.py.

    All threads execute an instruction before any executes the next. Shared memory stays from one piece to the next, one program's."""

    shared = np.zeros(1 << 14, np.uint32)

    def __init__(self, arguments: list[np.ndarray], outputs: int = 1) -> None:
        self.registers = {f"${outputs + index}": value.view(np.uint32) for index, value in enumerate(arguments)}
        self.count = len(arguments[0])
        self.outputs = outputs

    def run(self, text: str) -> list[np.ndarray]:
        """The outputs' patterns."""
        for statement in filter(None, (part.strip() for part in text.strip("{} \n").split(";"))):
            statement = re.sub(r"^\w+:\s*", "", statement)
            # What a branch skips is executed, and must change nothing where the branch is taken.
            if reserved := re.match(r"\.shared .* (\w+)\[\d+\]", statement):
                self.registers[reserved.group(1)] = np.zeros(self.count, np.uint32)
            elif access := re.match(r"(ld|st)\.shared\.v\d\.b32 (.*)", statement):
                self.access(access.group(1), access.group(2))
            elif statement and not statement.startswith((".reg", "bar.warp.sync")) and " bra " not in statement:
                self.execute_predicated(statement)
        return [self.registers[f"${index}"] for index in range(self.outputs)]

    def value(self, operand: str) -> np.ndarray:
        if operand in self.registers:
            return self.registers[operand]
        number = int(operand[2:], 16) if operand.startswith("0f") else int(operand, 0)
        return np.full(self.count, number, np.uint32)

    def access(self, operation: str, operands: str) -> None:
        """A load from shared memory, or a store there, of several words."""
        words = re.search(r"\{(.*)\}", operands).group(1).split(", ")
        register, offset = re.search(r"\[([^+\]]*)\+?(\d*)\]", operands).groups()
        place = (self.value(register) + np.uint32(int(offset or 0))) // np.uint32(4)
        for index, word in enumerate(words):
            if operation == "st":
                self.shared[place + index] = self.value(word)
            else:
                self.registers[word] = self.shared[place + index]

    def execute_predicated(self, statement: str) -> None:
        guard, name, operands = re.match(r"(?:@!(\w+)\s+)?(\S+)\s+(.*)", statement).groups()
        target = operands.split(",")[0]
        before = self.registers.get(target)
        self.execute(name, operands)
        if guard:
            self.registers[target] = np.where(self.registers[guard], before, self.registers[target])

    def execute(self, name: str, operands: str) -> None:
        target, rest = re.match(r"(\{[^}]*\}|[^,]*),\s*(.*)", operands).groups()
        if target.startswith("{"):
            low, high = target.strip("{}").split(",")
            value = self.value(rest.strip())
            self.registers[low.strip()], self.registers[high.strip()] = (
                value & np.uint32(0xFFFF),
                value >> np.uint32(16),
            )
        elif rest.startswith("{"):
            low, high = (self.value(part.strip()).astype(np.uint64) for part in rest.strip("{}").split(","))
            wide = name == "mov.b64"
            self.registers[target] = (low | high << np.uint64(32 if wide else 16)).astype(
                np.uint64 if wide else np.uint32
            )
        else:
            values = [self.value(operand.strip()) for operand in rest.split(",")]
            with np.errstate(all="ignore"):
                self.registers[target] = self.result(name, values)

    def result(self, name: str, values: list[np.ndarray]) -> np.ndarray:
        operation = name.split(".")[0]
        if operation == "mov" or name == "cvt.u32.u16":
            return values[0]
        if operation == "cvt":
            return conversion(name, values)
        if operation == "setp":
            compare = {"lt": np.less, "gt": np.greater, "eq": np.equal, "ne": np.not_equal, "ge": np.greater_equal}[
                name.split(".")[1]
            ]
            return compare(*(value.view(np.int32 if name.endswith("s32") else np.float32) for value in values))
        if operation == "selp":
            return np.where(values[2], *values[:2])
        if name == "and.pred":
            return values[0] & values[1]
        if name.endswith("bf16x2"):
            return bf16_pairs(name, *values)
        if name == "max.s32":
            return np.maximum(*(value.view(np.int32) for value in values)).view(np.uint32)
        if name.endswith("f32"):
            return floating(name, *(value.view(np.float32) for value in values)).view(np.uint32)
        if name.endswith("u16x2"):
            of_halves = {"max": np.maximum, "min": np.minimum, "add": np.add}[operation]
            return of_halves(*(value.view(np.uint16) for value in values)).view(np.uint32)
        if operation == "prmt":
            return permuted(*values)
        wide = [value.astype(np.uint64) for value in values]
        result = {
            "add": lambda a, b: a + b,
            "sub": lambda a, b: a - b,
            "mul": lambda a, b: a * b,
            "mad": lambda a, b, c: a * b + c,
            "and": lambda a, b: a & b,
            "or": lambda a, b: a | b,
            "shl": lambda a, b: a << b,
            "shr": lambda a, b: a >> b,
            "shf": lambda low, high, n: (high << n) | (low >> (np.uint64(32) - n)),
            "lop3": lambda a, b, c, table: LOGIC[int(table[0])](a, b, c),
        }[operation](*wide)
        return (result & np.uint64(0xFFFFFFFF)).astype(np.uint32)


LOGIC = {
    0xE4: lambda a, b, c: (a & c) | (b & ~c),
    0x28: lambda a, b, c: (a ^ b) & c,
}


def floating(name: str, *values: np.ndarray) -> np.ndarray:
    operation = name.split(".")[0]
    if operation == "abs":
        return np.abs(values[0])
    if operation == "neg":
        return -values[0]
    if operation == "rcp":
        return (1 / values[0].astype(np.float64) * (1 - 2.0**-23)).astype(np.float32)  # off by an ulp, as may be
    if operation in ("min", "max"):
        drops_nan, keeps_nan = {"min": (np.fmin, np.minimum), "max": (np.fmax, np.maximum)}[operation]
        return (keeps_nan if ".NaN" in name else drops_nan)(*values)
    exact = [value.astype(np.float64) for value in values]
    rounded = {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "mul": lambda a, b: a * b,
        "fma": lambda a, b, c: a * b + c,
    }[operation](*exact)
    if ".rp." in name:
        return rounded_up(rounded)
    rounded = rounded.astype(np.float32)
    return np.where(rounded > 0, np.fmin(rounded, 1), 0).astype(np.float32) if ".sat" in name else rounded


def rounded_up(exact: np.ndarray) -> np.ndarray:
    """The next fp32 not below exact values of fp64."""
    nearest = exact.astype(np.float32)
    return np.where(nearest < exact, np.nextafter(nearest, np.float32(np.inf)), nearest).astype(np.float32)


def bf16_pairs(name: str, *words: np.ndarray) -> np.ndarray:
    """Two bf16 a word."""
    if ".xorsign" in name:
        return larger_magnitudes(name, *words)
    # As the upper half of fp32; rounded once to nearest even from the exact result (but for denormals).
    halves = [(word << np.uint32(16), word & np.uint32(0xFFFF0000)) for word in words]
    low, high = (
        bf16(name, *(half.view(np.float32).astype(np.float64) for half in each)) for each in zip(*halves, strict=True)
    )
    return high | low >> np.uint32(16)


def bf16(name: str, *values: np.ndarray) -> np.ndarray:
    result = {
        "fma.rn.bf16x2": lambda a, b, c: a * b + c,
        "mul.rn.bf16x2": lambda a, b: a * b,
        "max.NaN.bf16x2": np.maximum,
    }[name](*values)
    bits = result.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))).astype(np.uint32)
    return np.where(np.isnan(result), np.uint32(0x7FC00000), rounded) & np.uint32(0xFFFF0000)


def larger_magnitudes(name: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """max{.NaN}.xorsign.abs: the larger magnitude under the product of the signs."""
    assert name in ("max.xorsign.abs.bf16x2", "max.NaN.xorsign.abs.bf16x2")
    a, b = a.view(np.uint16), b.view(np.uint16)
    sign, magnitudes = (a ^ b) & np.uint16(0x8000), [a & np.uint16(0x7FFF), b & np.uint16(0x7FFF)]
    nan = [magnitude > 0x7F80 for magnitude in magnitudes]
    larger = np.maximum(*magnitudes)
    if ".NaN" not in name:
        larger = np.where(nan[0], magnitudes[1], np.where(nan[1], magnitudes[0], larger))
    return (sign | larger).astype(np.uint16).view(np.uint32)


def permuted(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    places, both = int(selector[0]), np.stack([a, b], axis=-1).view(np.uint8)
    return np.stack([both[:, places >> 4 * index & 7] for index in range(4)], axis=-1).view(np.uint32)[:, 0]


def conversion(name: str, values: list[np.ndarray]) -> np.ndarray:
    if name in FP8_CASTS:
        high, low = (fp8(value.view(np.float32), FP8_CASTS[name]) for value in values)
        return high << np.uint32(8) | low
    if name == "cvt.rn.f16x2.e4m3x2":
        codes = torch.from_numpy(np.stack([values[0] & 0xFF, values[0] >> 8], axis=-1).astype(np.uint8))
        return codes.view(torch.float8_e4m3fn).to(torch.float16).numpy().view(np.uint32)[:, 0]
    if name == "cvt.rn.f16x2.f32":
        high, low = (value.view(np.float32).astype(np.float16).view(np.uint16).astype(np.uint32) for value in values)
        return high << np.uint32(16) | low
    assert name == "cvt.f32.f16"
    return values[0].astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)


FP8_CASTS = {
    "cvt.rn.satfinite.e4m3x2.f32": torch.float8_e4m3fn,
    "cvt.rn.satfinite.e5m2x2.f32": torch.float8_e5m2,
}


def fp8(value: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Saturating codes; NaN's is 0x7F."""
    largest = torch.finfo(dtype).max
    codes = torch.from_numpy(value.clip(-largest, largest)).to(dtype).view(torch.uint8).numpy()
    return np.where(np.isnan(value), 0x7F, codes).astype(np.uint32)
