"""Tensors of equal width stacked in one operand of a GEMM, each with a scale of its own.

An operand is stacked along the GEMM's M, N or K in segments, whose scales are one buffer `scale_inv` fp32 [S]. Linears that
share an input are stacked along N in forward (their weights), along K in dgrad (weights and gradients) and along M in wgrad
(gradients).
"""

from __future__ import annotations

import dataclasses
from typing import Any

MOST_SEGMENTS = 3
"""Kernels know the first two borders: gate and up, or q, k and v."""

SEGMENT_MULTIPLE = 128
"""A segment's length is a multiple of this, the side of the tiles that read it. So no tile holds parts of two segments."""


@dataclasses.dataclass(frozen=True)
class Stacking:
    """along: "M", "N" or "K", or "" for a GEMM with one scale an operand. segments: lengths, two or three of them."""

    along: str = ""
    segments: tuple[int, ...] = ()

    def constants(self) -> dict[str, Any]:
        """The compile-time arguments of the kernels: where the second and the third segment begin, if there are any."""
        edges = [sum(self.segments[: i + 1]) for i in range(MOST_SEGMENTS - 1)]
        return {"STACKED": self.along, "SEGMENTS": len(self.segments), "EDGE_1": edges[0], "EDGE_2": edges[1]}

    def divisible(self, block_m: int, block_n: int, block_k: int) -> bool:
        """Whether no tile of that size holds parts of two segments."""
        side = {"M": block_m, "N": block_n, "K": block_k}.get(self.along, 1)
        return all(segment % side == 0 for segment in self.segments)


def check_segments(segments: tuple[int, ...]) -> None:
    """Raises ValueError for segments that the kernels do not take."""
    if not 2 <= len(segments) <= MOST_SEGMENTS or any(s <= 0 or s % SEGMENT_MULTIPLE for s in segments):
        raise ValueError(
            f"te stacked operand: expected 2 to {MOST_SEGMENTS} segments, multiples of {SEGMENT_MULTIPLE}, got {segments}"
        )


NOT_STACKED = Stacking()
