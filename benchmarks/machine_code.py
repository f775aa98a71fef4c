"""A kernel's machine code as a hash that names and the places of arguments do not change, and what differs between two tables of them."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import re
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from triton import knobs

_INSTRUCTION = re.compile(r"^(?:\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;|(\.\w+):)", re.MULTILINE)
_SECTION = re.compile(r"^\s+\.section\s+\.text\.([\w$.]+)", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Code:
    """Of a kernel's machine code. code: a hash of its text, with what `normal` replaces."""

    code: str
    instructions: int


def code_of(cubin: bytes) -> Code:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [knobs.nvidia.nvdisasm.path, "-c", "-ndf", path]
        lines = normal(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    text = "\n".join(lines)
    return Code(hashlib.sha256(text.encode()).hexdigest()[:16], sum(not line.endswith(":") for line in lines))


def normal(sass: str) -> list[str]:
    """The instructions and labels of nvdisasm's text.

    Places of the constant bank (the arguments), labels and the names of functions are numbered as they first appear. Comments and all that
    is not code (sections, line numbers) go.
    """
    functions = sorted(map(re.escape, set(_SECTION.findall(sass))), key=len, reverse=True)
    named = re.compile("|".join([r"(?P<place>c\[0x0\]\[0x[0-9a-f]+\])", r"(?P<label>\.L_\w+)", *functions]))
    seen: dict[str, dict[str, int]] = defaultdict(dict)

    def numbered(match: re.Match[str]) -> str:
        kind = match.lastgroup or "function"
        return f"{kind}{seen[kind].setdefault(match[0], len(seen[kind]))}"

    parts = (code or f"{label}:" for code, label in _INSTRUCTION.findall(sass))
    return [named.sub(numbered, " ".join(part.split())) for part in parts]


def changes(before: Iterable[Mapping[str, Any]], after: Iterable[Mapping[str, Any]]) -> list[str]:
    """What differs between the kernels of two tables of targets.py, a line for each case; a kernel's name alone is no difference."""
    old, new = _by_case(before), _by_case(after)
    found = []
    for key in dict.fromkeys([*old, *new]):
        codes = [[row["code"] for row in rows] for rows in (old.get(key, []), new.get(key, []))]
        if codes[0] != codes[1]:
            found.append(f"{' '.join(key)}: {_described(old.get(key, []))} -> {_described(new.get(key, []))}")
    return found


def _by_case(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], list[Mapping[str, Any]]]:
    cases: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        cases[row["target"], row["case"]].append(row)
    return cases


def _described(rows: Sequence[Mapping[str, Any]]) -> str:
    facts = (
        f"{row['kernel']} {row['code']} ({row['instructions']} instructions, {row['registers']} registers, {row['spills']} bytes spilled,"
        f" {row['shared_kib']:g} KiB)"
        for row in rows
    )
    return ", ".join(facts) or "none"
