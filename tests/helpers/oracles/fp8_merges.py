"""Casts to fp8 in machine code that keep half of a register which nothing has written for them.

One instruction casts two values, and takes the other half of the word from a register. Where two words end in the same pair of
casts, ptxas 12.8 and 12.9 leave out the instruction that would have filled that register.
"""

from __future__ import annotations

import re

from triton.tools.disasm import get_sass

_INSTRUCTION = re.compile(r"\s(?:@!?U?P\w+ )?([A-Z][\w.]*) (?:!?U?P\w+, )*(R\d+)(?:\.\w+)*(?:, (.*?))?\s*;")
_FILLS_HALVES = ("F2FP", "PRMT", "MOV", "IMAD.MOV")
"""What fills the register: casts, and what moves words."""


def check_merges(cubin: bytes) -> None:
    """Asserts that a kernel's machine code has no such cast."""
    assert unwritten_merges(get_sass(cubin)) == []


def unwritten_merges(sass: str) -> list[str]:
    """The casts in a kernel's text whose other half was last written, in the order of the text, by nothing that fills halves."""
    written_by: dict[str, str] = {}
    found = []
    for line in sass.splitlines():
        match = _INSTRUCTION.search(line)
        if match is None:
            continue
        operation, target, operands = match.groups()
        if operation.startswith("F2FP") and operation.endswith("MERGE_C"):
            kept = operands.split(",")[-1].strip().split(".")[0]
            if kept != "RZ" and not written_by.get(kept, "").startswith(_FILLS_HALVES):
                found.append(f"{line.strip()} keeps what {written_by.get(kept, 'nothing')} wrote")
        written_by[target] = operation
    return found
