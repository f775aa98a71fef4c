"""Which tile the FP8 GEMM runs for a shape: a table of candidates and a cost model, no search at run time.

    cost = waves * (k blocks * time of a block + time of a tile's ends) + (split K: the pass that adds the parts)

A wave is one tile on every place that the GPU has (multiprocessors * `ctas_per_sm`). `tflops` is a candidate's
speed on an H200 when it has endlessly many tiles; `python benchmarks/gemm.py --sweep` measures all of them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TypeVar

from te_dynamo.kernels.tiles.stacking import SEGMENT_MULTIPLE, Stacking

__all__ = [
    "SPECIALIZED",
    "SPECIALIZED_FAST",
    "SPECIALIZED_MINIMUM_US",
    "TILES",
    "Tile",
    "choose_among",
    "choose_stacked_tile",
    "choose_tile",
    "estimated_us",
    "is_worth_a_call",
    "specialized_is_faster",
    "specialized_tile",
    "stacked_is_faster",
    "stacked_is_specialized",
    "stages_that_fit",
    "stores_by_descriptor",
    "with_splits",
]

_REFERENCE_SMS = 132  # of the GPU that `tflops` was measured on
_TILE_ENDS_US = 1.0  # filling the pipeline and storing the result, as far as nothing hides it
_REDUCE_US = 3.0  # launch of the kernel that adds up the parts of a split K
_REDUCE_BYTES_PER_US = 2.5e6
_SHARED_BYTES = 227 * 1024  # what one multiprocessor of sm_90 and sm_100 lends to its programs
_BARRIER_BYTES = 1024


@dataclasses.dataclass(frozen=True)
class Tile:
    """One way to run the GEMM.

    fast:        for fast accumulation, or for slow: block_k is then how many products go between two fp32 additions.
    tflops:      speed of the main loop on a full H200: measured for the large tiles, an estimate for 64 rows.
    halves:      slow accumulation in two products of half the height, so that only half a tile of terms lives beside the
                 sum: a thread that holds 128 sums has no registers for 128 terms.
    split_k:     parts of K computed by different programs into fp32 and added, in order, by a second kernel.
    ctas_per_sm: programs that fit on one multiprocessor together.
    group_m:     rows of tiles that are walked together, column by column, so that both operands stay in the L2.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    fast: bool
    tflops: float
    halves: bool = False
    split_k: int = 1
    ctas_per_sm: int = 1
    group_m: int = 8

    @property
    def narrow(self) -> bool:
        """Whether a thread's share of the tile leaves registers for the addresses of a masked store."""
        return self.block_m * self.block_n <= 64 * 32 * self.num_warps

    def fits(self, out_bytes: int) -> bool:
        """Whether loads in flight and half a tile of results of `out_bytes` each fit in shared memory."""
        loads = self.num_stages * (self.block_m + self.block_n) * self.block_k
        return loads + self.result_bytes(out_bytes) + _BARRIER_BYTES <= _SHARED_BYTES // self.ctas_per_sm

    def result_bytes(self, out_bytes: int) -> int:
        """Shared memory that half a tile of results passes through."""
        return self.block_m * self.block_n // 2 * (4 if self.split_k > 1 else out_bytes)

    @property
    def name(self) -> str:
        """ "slow 128x256x128 w8 s3 halves": unique within TILES."""
        parts = [
            "fast" if self.fast else "slow",
            f"{self.block_m}x{self.block_n}x{self.block_k}",
            f"w{self.num_warps}",
            f"s{self.num_stages}",
        ]
        parts += ["halves"] if self.halves else []
        parts += [f"{self.ctas_per_sm}/sm"] if self.ctas_per_sm > 1 else []
        parts += [f"k/{self.split_k}"] if self.split_k > 1 else []
        return " ".join(parts)


AnyTile = TypeVar("AnyTile", bound=Tile)


def with_splits(tile: AnyTile, *splits: int) -> list[AnyTile]:
    """The tile, and the same with K cut into each number of parts."""
    return [tile, *(dataclasses.replace(tile, split_k=split) for split in splits)]


TILES: tuple[Tile, ...] = (
    # Large products.
    Tile(256, 128, 128, 8, 4, fast=True, tflops=1360),
    Tile(128, 256, 128, 8, 4, fast=True, tflops=1325),
    Tile(128, 256, 128, 8, 3, fast=True, tflops=1290),
    Tile(256, 128, 128, 8, 3, fast=True, tflops=1260),
    # Too few tiles of that size to fill the GPU.
    Tile(128, 128, 128, 4, 3, fast=True, tflops=1265, ctas_per_sm=2),
    *with_splits(Tile(128, 128, 128, 8, 4, fast=True, tflops=1250), 2, 4),
    # Decoding: a few rows of A, all the time goes into reading B.
    *with_splits(Tile(64, 128, 128, 4, 5, fast=True, tflops=800), 2, 4),
    *with_splits(Tile(64, 64, 256, 4, 4, fast=True, tflops=520), 2, 4, 8),
    *with_splits(Tile(64, 64, 256, 4, 3, fast=True, tflops=520, ctas_per_sm=2), 2, 4),
    Tile(64, 32, 256, 4, 4, fast=True, tflops=300, ctas_per_sm=2),
    # The same three groups for slow accumulation. Of two programs on a multiprocessor one adds while the other multiplies.
    Tile(128, 128, 128, 4, 3, fast=False, tflops=1130, halves=True, ctas_per_sm=2),
    Tile(256, 128, 128, 8, 4, fast=False, tflops=1045, halves=True),
    Tile(256, 128, 128, 8, 3, fast=False, tflops=950, halves=True),
    *with_splits(Tile(128, 128, 128, 8, 4, fast=False, tflops=900), 2, 4),
    *with_splits(Tile(64, 128, 128, 4, 5, fast=False, tflops=680), 2, 4),
    *with_splits(Tile(64, 64, 128, 4, 6, fast=False, tflops=500), 2, 4, 8),
    *with_splits(Tile(64, 64, 128, 4, 5, fast=False, tflops=500, ctas_per_sm=2), 2, 4),
)


SPECIALIZED = Tile(256, 128, 128, 12, 4, fast=False, tflops=1290, halves=True)
"""What kernels/gemm/specialized.py runs. Its warps are the multiplying ones and those that copy."""

SPECIALIZED_FAST = Tile(128, 256, 128, 12, 4, fast=True, tflops=1385, group_m=16)
"""The same with fast accumulation; 2% above the fastest of TILES at five shapes of a training step."""

SPECIALIZED_MINIMUM_US = 50.0  # a call keeps the CPU busy for some 20 us longer than a launch by Inductor's code


def specialized_tile(fast_accum: bool) -> Tile:
    """The one tile of kernels/gemm/specialized.py for an accumulation."""
    return SPECIALIZED_FAST if fast_accum else SPECIALIZED


def estimated_us(tile: Tile, m: int, n: int, k: int, multiprocessors: int) -> float:
    """The cost model's time of one GEMM in microseconds (module docstring)."""
    tiles = -(-m // tile.block_m) * -(-n // tile.block_n) * tile.split_k
    waves = -(-tiles // (multiprocessors * tile.ctas_per_sm))
    blocks = -(-k // (tile.block_k * tile.split_k))
    flops = 2 * tile.block_m * tile.block_n * tile.block_k
    block_us = flops * _REFERENCE_SMS * tile.ctas_per_sm / (tile.tflops * 1e6)
    reduce_us = 0.0 if tile.split_k == 1 else _REDUCE_US + (tile.split_k + 1) * m * n * 4 / _REDUCE_BYTES_PER_US
    return waves * (blocks * block_us + _TILE_ENDS_US) + reduce_us


@functools.lru_cache(maxsize=4096)
def choose_tile(
    m: int, n: int, k: int, fast_accum: bool, multiprocessors: int = _REFERENCE_SMS, out_bytes: int = 4
) -> Tile:
    """The candidate of least estimated time for C[m, n] = A[m, k] @ B[n, k]^T, C's elements of `out_bytes` each.

    A fusion may change the width of C but not its bits. Neither the tile's sides nor its stages change the order in which
    a sum is made; the parts of K do, so how many there are is decided as for the widest C.
    """

    candidates = [tile for tile in TILES if tile.fast == fast_accum]
    return choose_among(candidates, m, n, k, multiprocessors, out_bytes)


def choose_among(candidates: list[AnyTile], m: int, n: int, k: int, multiprocessors: int, out_bytes: int) -> AnyTile:
    """`choose_tile` over the caller's candidates."""

    def best(candidates: list[AnyTile]) -> AnyTile:
        return min(candidates, key=lambda tile: estimated_us(tile, m, n, k, multiprocessors))

    if not stores_by_descriptor(n):
        candidates = [tile for tile in candidates if tile.narrow]
    widest = best([tile for tile in candidates if tile.fits(out_bytes=4)])
    return best([tile for tile in candidates if tile.split_k == widest.split_k and tile.fits(out_bytes)])


@functools.lru_cache(maxsize=4096)
def specialized_is_faster(m: int, n: int, k: int, fast_accum: bool, multiprocessors: int = _REFERENCE_SMS) -> bool:
    """Whether to run C[m, n] = A[m, k] @ B[n, k]^T by kernels/gemm/specialized.py, whatever C's dtype."""
    usual = choose_tile(m, n, k, fast_accum, multiprocessors)
    return is_worth_a_call(specialized_tile(fast_accum), usual, m, n, k, multiprocessors)


def is_worth_a_call(specialized: Tile, usual: Tile, m: int, n: int, k: int, multiprocessors: int) -> bool:
    """Whether a specialized kernel can run it, beats the usual one's tile, and takes longer than the CPU to call it."""
    us = estimated_us(specialized, m, n, k, multiprocessors)
    return stores_by_descriptor(n) and SPECIALIZED_MINIMUM_US <= us < estimated_us(usual, m, n, k, multiprocessors)


def stages_that_fit(specialized: Tile, out_bytes: int) -> int:
    """As many stages of a specialized kernel's tile as fit beside results of `out_bytes` each."""
    return specialized.num_stages if specialized.fits(out_bytes) else specialized.num_stages - 1


@functools.lru_cache(maxsize=4096)
def choose_stacked_tile(
    m: int,
    n: int,
    k: int,
    fast_accum: bool,
    stacking: Stacking,
    multiprocessors: int = _REFERENCE_SMS,
    out_bytes: int = 4,
) -> Tile:
    """The candidate of least estimated time that divides the segments and does not cut K.

    Along K a tile in halves has no registers for the borders' bookkeeping.
    """
    candidates = [
        t for t in TILES if t.fast == fast_accum and t.split_k == 1 and not (t.halves and stacking.along == "K")
    ]
    candidates = [t for t in candidates if stacking.divisible(t.block_m, t.block_n, t.block_k)]
    return choose_among(candidates, m, n, k, multiprocessors, out_bytes)


def stacked_is_specialized(
    m: int, n: int, k: int, fast_accum: bool, along: str, multiprocessors: int = _REFERENCE_SMS
) -> bool:
    """Whether to run a stacked GEMM by kernels/gemm/specialized.py: as any other, and along K, where the other kernel's
    copies wait at every border, any large one with fast accumulation."""
    # The parts that a group of warps stores lie in one segment.
    assert SPECIALIZED.block_n == SPECIALIZED.block_k == SEGMENT_MULTIPLE == SPECIALIZED.block_m // 2
    assert SPECIALIZED_FAST.block_n // 2 == SPECIALIZED_FAST.block_k == SEGMENT_MULTIPLE == SPECIALIZED_FAST.block_m
    if not (fast_accum and along == "K"):
        return specialized_is_faster(m, n, k, fast_accum, multiprocessors)
    large = estimated_us(SPECIALIZED_FAST, m, n, k, multiprocessors) >= SPECIALIZED_MINIMUM_US
    return large and stores_by_descriptor(n)


@functools.lru_cache(maxsize=4096)
def stacked_is_faster(
    m: int,
    n: int,
    k: int,
    fast_accum: bool,
    stacking: Stacking,
    hopper: bool = True,
    multiprocessors: int = _REFERENCE_SMS,
) -> bool:
    """Whether one GEMM of size m, n, k takes less time than one for each segment, and in forward (along N) has their bits.

    One program makes the whole sum of a stacked GEMM, which rounds otherwise than a GEMM that cuts K. Along K apart, the
    products have to be written and read again for their sum.
    """
    if hopper and stacked_is_specialized(m, n, k, fast_accum, stacking.along, multiprocessors):
        tile = specialized_tile(fast_accum)
    else:
        tile = choose_stacked_tile(m, n, k, fast_accum, stacking, multiprocessors)
    apart = (len(stacking.segments) - 1) * m * n * 4 / _REDUCE_BYTES_PER_US if stacking.along == "K" else 0.0
    for segment in stacking.segments:
        sizes = {"M": m, "N": n, "K": k} | {stacking.along: segment}
        size = (sizes["M"], sizes["N"], sizes["K"])
        own = choose_tile(*size, fast_accum, multiprocessors)
        if own.split_k > 1 and stacking.along == "N":
            return False
        if hopper and specialized_is_faster(*size, fast_accum, multiprocessors):
            own = specialized_tile(fast_accum)
        apart += estimated_us(own, *size, multiprocessors)
    return estimated_us(tile, m, n, k, multiprocessors) <= apart


def stores_by_descriptor(n: int) -> bool:
    """Whether rows of n elements of C are whole 16 bytes, as tensor copies need; else stores are masked."""
    return n % 8 == 0
