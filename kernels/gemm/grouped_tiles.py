"""Which tile a grouped FP8 GEMM runs: the candidates and the cost model of tiles.py, over groups.

How many rows each group has, only the device knows: the model takes them for equal.
"""

from __future__ import annotations

import functools

from te_dynamo.kernels.gemm.tiles import (
    SPECIALIZED_MINIMUM_US,
    Tile,
    estimated_us,
    specialized_tile,
    stores_by_descriptor,
)

__all__ = ["GROUPED_TILES", "choose_columns_tile", "choose_rows_tile", "columns_specialized_is_faster"]

GROUPED_TILES: tuple[Tile, ...] = (
    Tile(128, 256, 128, 8, 3, fast=True, tflops=1290),
    Tile(128, 128, 128, 4, 3, fast=True, tflops=1265, ctas_per_sm=2),
    Tile(64, 128, 128, 4, 5, fast=True, tflops=800),
    Tile(128, 128, 128, 4, 3, fast=False, tflops=1100, halves=True, ctas_per_sm=2),
    Tile(64, 128, 128, 4, 5, fast=False, tflops=680),
)
"""`tflops` is the ungrouped kernel's. `python benchmarks/grouped.py --sweep` measures all of them."""

_HIDDEN_US = (
    0.5  # of a tile's ends, by the other program on the multiprocessor: where K is short, 3 to 11% of the whole
)


@functools.lru_cache(maxsize=4096)
def choose_rows_tile(
    m: int, n: int, k: int, groups: int, fast_accum: bool, multiprocessors: int = 132, out_bytes: int = 4
) -> Tile:
    """The candidate of least estimated time for C[m, n] = A[m, k] @ B[g, n, k]^T, C's elements of `out_bytes` each."""

    def time(tile: Tile) -> float:
        padded = groups * _round_up(-(-m // groups), tile.block_m)  # every group has a last tile of its own
        return _time(tile, padded, n, k, multiprocessors)

    return min(_candidates(n, fast_accum, out_bytes), key=time)


@functools.lru_cache(maxsize=4096)
def choose_columns_tile(
    n: int, k: int, m: int, groups: int, fast_accum: bool, multiprocessors: int = 132, out_bytes: int = 4
) -> Tile:
    """The same for C[g, n, k] = A[n, m] @ B[k, m]^T, the sum over the m of each group."""

    def time(tile: Tile) -> float:
        # Of a group's first and last block half a block each is another group's.
        return _time(tile, groups * _round_up(n, tile.block_m), k, -(-m // groups) + tile.block_k, multiprocessors)

    return min(_candidates(k, fast_accum, out_bytes), key=time)


@functools.lru_cache(maxsize=4096)
def columns_specialized_is_faster(
    n: int, k: int, m: int, groups: int, fast_accum: bool, multiprocessors: int = 132
) -> bool:
    """Whether to run that product by kernels/gemm/grouped_specialized.py, whatever C's dtype.

    Its parts of C are whole in their group; a call costs the CPU more than a launch does.
    """
    rows = -(-m // groups)
    own = specialized_tile(fast_accum)
    us = estimated_us(own, groups * _round_up(n, own.block_m), k, rows, multiprocessors)
    usual = choose_columns_tile(n, k, m, groups, fast_accum, multiprocessors)
    usual_us = _time(usual, groups * _round_up(n, usual.block_m), k, rows + usual.block_k, multiprocessors)
    whole = n % (own.block_m // (2 if fast_accum else 4)) == 0 and stores_by_descriptor(k)
    return whole and SPECIALIZED_MINIMUM_US <= us < usual_us


def _time(tile: Tile, m: int, n: int, k: int, multiprocessors: int) -> float:
    """`estimated_us` of a kernel whose loads of a tile wait for the tile before, unless another program has work meanwhile."""
    us = estimated_us(tile, m, n, k, multiprocessors)
    tiles = -(-m // tile.block_m) * -(-n // tile.block_n)
    return us - (_HIDDEN_US * -(-tiles // (multiprocessors * tile.ctas_per_sm)) if tile.ctas_per_sm > 1 else 0.0)


def _candidates(width: int, fast_accum: bool, out_bytes: int) -> list[Tile]:
    fitting = [tile for tile in GROUPED_TILES if tile.fast == fast_accum and tile.fits(out_bytes)]
    return fitting if stores_by_descriptor(width) else [tile for tile in fitting if tile.narrow]


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
