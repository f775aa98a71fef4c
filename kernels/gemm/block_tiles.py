"""Which tile the block-scaled FP8 GEMM runs for a shape; the cost model is that of tiles.py.

`python benchmarks/gemm.py --formats block --sweep` measures all candidates.
"""

from __future__ import annotations

import functools

from te_dynamo.kernels.gemm.tiles import Tile, choose_among, is_worth_a_call, with_splits

__all__ = ["BLOCK_TILES", "SPECIALIZED_BLOCK", "BlockGemmTile", "choose_block_tile", "specialized_block_is_faster"]


class BlockGemmTile(Tile):
    """A `Tile` of slow accumulation, block_k 128: the sum takes the scaled products of every 128 k."""

    def result_bytes(self, out_bytes: int) -> int:
        """As `Tile.result_bytes`; the sums of a split K leave straight from registers."""
        return 0 if self.split_k > 1 else super().result_bytes(out_bytes)

    @property
    def name(self) -> str:
        """ "block 128x128x128 w4 s3 halves 2/sm": unique within BLOCK_TILES."""
        return super().name.replace("slow", "block")


def _tile(m: int, n: int, warps: int, stages: int, tflops: float, **options: object) -> BlockGemmTile:
    return BlockGemmTile(m, n, 128, warps, stages, False, tflops, **options)  # type: ignore[arg-type]


# `tflops` with blocks of 1x128 by 128x128. Other scales are slower, by about as much for all tiles; a split K's figures and those
# of tiles for small products are of products that fill the GPU once, which is what they are chosen for.
BLOCK_TILES: tuple[BlockGemmTile, ...] = (
    # Large products. Of two programs on a multiprocessor one scales and adds while the other multiplies.
    *with_splits(_tile(128, 128, 4, 3, 1000, halves=True, ctas_per_sm=2), 2),
    # fp32 results, and GPUs that no tile in two halves is for.
    _tile(128, 128, 4, 2, 765, halves=True, ctas_per_sm=2),
    _tile(128, 128, 8, 4, 500),
    # A few rows of A: all the time goes into reading B.
    *with_splits(_tile(64, 128, 4, 5, 540), 2, 4),
    *with_splits(_tile(64, 64, 4, 5, 430, ctas_per_sm=2), 2, 4),
)


class _SpecializedBlockTile(Tile):
    """Its results leave in quarters, not halves, and scales lie in the ring beside the tiles that they scale."""

    def result_bytes(self, out_bytes: int) -> int:
        return super().result_bytes(out_bytes) // 2 + self.num_stages * 4 * (self.block_m + self.block_n)


SPECIALIZED_BLOCK = _SpecializedBlockTile(256, 128, 128, 12, 4, fast=False, tflops=1280, halves=True)
"""What kernels/gemm/block_specialized.py runs."""


@functools.lru_cache(maxsize=4096)
def choose_block_tile(
    m: int, n: int, k: int, multiprocessors: int = 132, out_bytes: int = 4, halves: bool = True
) -> BlockGemmTile:
    """The candidate of least estimated time for C[m, n] = A[m, k] @ B[n, k]^T, C's elements of `out_bytes` each.

    halves False leaves out the tiles in two halves, which suit Hopper's registers and no later GPU.
    """
    candidates = [tile for tile in BLOCK_TILES if halves or not tile.halves]
    return choose_among(candidates, m, n, k, multiprocessors, out_bytes)


@functools.lru_cache(maxsize=4096)
def specialized_block_is_faster(m: int, n: int, k: int, multiprocessors: int = 132) -> bool:
    """Whether to run C[m, n] = A[m, k] @ B[n, k]^T by kernels/gemm/block_specialized.py, whatever C's dtype."""
    return is_worth_a_call(SPECIALIZED_BLOCK, choose_block_tile(m, n, k, multiprocessors), m, n, k, multiprocessors)
