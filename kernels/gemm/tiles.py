"""The tiles of the GEMMs: for each kernel a table of candidates, a cost model, and which of its candidates suits a shape best.

    cost = waves * (k blocks * time of a block + time of a tile's ends) + (split K: the pass that adds the parts)

A wave is one tile on every place that the GPU has (multiprocessors * `ctas_per_sm`). `tflops` is a candidate's
speed on an H200 when it has endlessly many tiles; `python benchmarks/gemm.py --sweep` measures all of them, with `--format block`
those of block scaling, and `python benchmarks/grouped.py --sweep` those of groups. On another GPU a candidate is taken for as much
faster or slower as that GPU's FP8 is, by the published figures. Nothing is searched at run time.

The tables are made for 227 KB of shared memory. Where a program may take less, a candidate is what `fitted` leaves of it.

Which kernel runs is choose.py's to say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, TypeVar

from te_dynamo.kernels.runtime.target import TARGETS, Target
from te_dynamo.kernels.tiles.stacking import Stacking

H200 = TARGETS["h200"]
"""The GPU that `tflops` was measured on."""
_TILE_ENDS_US = 1.0  # filling the pipeline and storing the result, as far as nothing hides it
_REDUCE_US = 3.0  # launch of the kernel that adds up the parts of a split K
_OF_64_COLUMNS = {f"fast 64x64x256 w4 s3 2/sm k/{parts}" for parts in (2, 4)}
_SPILLING = {8: {f"block 64x128x128 w4 s5 k/{parts}" for parts in (2, 4)}, 10: _OF_64_COLUMNS, 11: _OF_64_COLUMNS}
"""First number of a compute capability -> tiles that find too few registers there, as benchmarks/targets.py shows."""
REDUCE_BYTES_PER_US = 2.5e6
REDUCE_BLOCK = 1024  # elements of C that one program of that kernel adds up
_BARRIER_BYTES = 1024
_RESERVED_BYTES = 1024  # of a multiprocessor's shared memory, for each program
_LONE_PROGRAM = 0.75  # of the speed of two, of which one multiplies while the other waits or stores: an estimate
_FEWEST_BUFFERS = 2  # one that is read, one that is written
_MOST_BUFFERS = 3  # of a tile that is made to fit: with more, scaling by blocks has too few registers
_MOST_DECODE_PARTS = 4
_SHORTEST_DECODE_PART = 2048  # of K: what shorter ones save, adding them up costs


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

    def constants(self) -> dict[str, Any]:
        """The sizes as the kernels' constant arguments."""
        return {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k, "GROUP_M": self.group_m}

    @property
    def narrow(self) -> bool:
        """Whether a thread's share of the tile leaves registers for the addresses of a masked store."""
        return self.block_m * self.block_n <= 64 * 32 * self.num_warps

    def shared_bytes(self, out_bytes: int, target: Target = H200) -> int:
        """The most shared memory that a program takes: loads in flight, half a tile of results of `out_bytes` each, barriers."""
        loads = target.buffers(self.num_stages) * (self.block_m + self.block_n) * self.block_k
        return loads + self.result_bytes(out_bytes, target) + _BARRIER_BYTES

    def fits(self, out_bytes: int, target: Target = H200) -> bool:
        """Whether as many programs as there are for a multiprocessor fit in its shared memory."""
        whole = target.shared_bytes + _RESERVED_BYTES
        return self.ctas_per_sm * (self.shared_bytes(out_bytes, target) + _RESERVED_BYTES) <= whole

    def fitted(self: AnyTile, out_bytes: int, target: Target = H200) -> AnyTile | None:
        """The tile as a GPU can run it, None where it cannot.

        Of a GPU with less shared memory than the tables are made for: alone on a multiprocessor, with the warps of all that were
        there, and with fewer stages, where that makes it fit. A tile in halves suits Hopper's registers alone.
        """
        if (self.halves and not target.has_wgmma) or target.buffers(self.num_stages) < _FEWEST_BUFFERS:
            return None
        if self.name in _SPILLING.get(target.capability[0], ()):
            return None
        tile = self
        if target.shared_bytes < H200.shared_bytes:
            if not tile.fits(out_bytes, target) and tile.ctas_per_sm > 1:
                warps = tile.num_warps * tile.ctas_per_sm
                tile = dataclasses.replace(tile, ctas_per_sm=1, num_warps=warps, tflops=_LONE_PROGRAM * tile.tflops)
            beside = tile.num_stages - target.buffers(tile.num_stages)  # a stage whose block is in registers
            for buffers in range(min(_MOST_BUFFERS, tile.num_stages - beside), _FEWEST_BUFFERS - 1, -1):
                tile = dataclasses.replace(tile, num_stages=buffers + beside)
                if tile.fits(out_bytes, target):
                    break
        return tile if tile.fits(out_bytes, target) else None

    def result_bytes(self, out_bytes: int, target: Target = H200) -> int:
        """Shared memory that half a tile of results passes through.

        What comes from tensor memory passes through more to get another layout: in fp32 as much again, of 64 rows and of sums
        that are kept in registers half as much.
        """
        half = self.block_m * self.block_n // 2 * (4 if self.split_k > 1 else out_bytes)
        if not target.has_tensor_memory or self.split_k > 1:
            return half
        return 2 * half if out_bytes > 2 else 3 * half // 2 if self.block_m == 64 or not self.fast else half

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


@dataclasses.dataclass(frozen=True)
class DecodeTile:
    """One way to run kernels/gemm/decode.py. fast: for fast accumulation; slow takes 128 products between two fp32 additions."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    fast: bool
    split_k: int


AnyTile = TypeVar("AnyTile", bound=Tile)


def with_splits(tile: AnyTile, *splits: int) -> list[AnyTile]:
    """The tile, and the same with K cut into each number of parts."""
    return [tile, *(dataclasses.replace(tile, split_k=split) for split in splits)]


class BlockGemmTile(Tile):
    """A `Tile` of slow accumulation, block_k 128: the sum takes the scaled products of every 128 k."""

    def result_bytes(self, out_bytes: int, target: Target = H200) -> int:
        """As `Tile.result_bytes`; the sums of a split K leave straight from registers."""
        return 0 if self.split_k > 1 else super().result_bytes(out_bytes, target)

    @property
    def name(self) -> str:
        """ "block 128x128x128 w4 s3 halves 2/sm": unique within BLOCK_TILES."""
        return super().name.replace("slow", "block")


def _tile(m: int, n: int, warps: int, stages: int, tflops: float, **options: object) -> BlockGemmTile:
    return BlockGemmTile(m, n, 128, warps, stages, False, tflops, **options)  # type: ignore[arg-type]


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
"""What kernels/gemm/specialized/product.py runs with a scale a tensor. Its warps are the multiplying ones and those that copy."""

SPECIALIZED_FAST = Tile(128, 256, 128, 12, 4, fast=True, tflops=1385, group_m=16)
"""The same with fast accumulation; 2% above the fastest of TILES at five shapes of a training step."""


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


_NARROW_BLOCK = _tile(64, 128, 4, 3, 700, ctas_per_sm=2)
"""Of products whose operands both have a scale for each row, by groups; `tflops` is an estimate."""


class _SpecializedBlockTile(Tile):
    """Its two groups of warps store 64 rows of half its columns at once, and scales lie in the ring beside the tiles that they scale."""

    def result_bytes(self, out_bytes: int, target: Target = H200) -> int:
        return 64 * self.block_n * out_bytes + self.num_stages * 4 * (self.block_m + self.block_n)


SPECIALIZED_BLOCK = _SpecializedBlockTile(256, 128, 128, 12, 4, fast=False, tflops=1280, halves=True)
"""What kernels/gemm/specialized/product.py runs with scales of blocks."""


_OF_HALF_SIZE = {SPECIALIZED: 1240, SPECIALIZED_FAST: 1370, SPECIALIZED_BLOCK: 1200}
"""The specialized kernel's tiles -> `tflops` of its small one, for products with too few large tiles to fill the GPU."""


def _small(tile: Tile) -> Tile:
    tflops = _OF_HALF_SIZE[tile]
    return dataclasses.replace(tile, block_m=128, block_n=128, num_stages=6, tflops=tflops, halves=False, group_m=8)


SPECIALIZED_SMALL = tuple(map(_small, _OF_HALF_SIZE))


GROUPED_TILES: tuple[Tile, ...] = (
    Tile(128, 256, 128, 8, 3, fast=True, tflops=1290),
    Tile(128, 128, 128, 4, 3, fast=True, tflops=1265, ctas_per_sm=2),
    Tile(64, 128, 128, 4, 5, fast=True, tflops=800),
    Tile(128, 128, 128, 4, 3, fast=False, tflops=1100, halves=True, ctas_per_sm=2),
    Tile(64, 128, 128, 4, 5, fast=False, tflops=680),
)
"""`tflops` is the ungrouped kernel's."""


class _ColumnsTile(Tile):
    """Beside the loop over whole blocks there is one over a group's edges: two blocks in flight, and one whose edge is masked."""

    def shared_bytes(self, out_bytes: int, target: Target = H200) -> int:
        edges = 3 * (self.block_m + self.block_n) * self.block_k + self.result_bytes(out_bytes, target) + _BARRIER_BYTES
        return max(super().shared_bytes(out_bytes, target), edges)


COLUMNS_TILES = tuple(_ColumnsTile(**dataclasses.asdict(tile)) for tile in GROUPED_TILES)
"""The same for groups of columns."""

# Of a tile's ends, by the other program on the multiprocessor: where K is short, 3 to 11% of the whole.
_HIDDEN_US = 0.5


def specialized_tile(fast_accum: bool, in_blocks: bool = False, small: bool = False) -> Tile:
    """The tile of kernels/gemm/specialized/product.py for an accumulation or for scales of blocks."""
    tile = SPECIALIZED_BLOCK if in_blocks else SPECIALIZED_FAST if fast_accum else SPECIALIZED
    return _small(tile) if small else tile


def estimated_us(tile: Tile, m: int, n: int, k: int, target: Target) -> float:
    """The cost model's time of one GEMM in microseconds (module docstring)."""
    tiles = -(-m // tile.block_m) * -(-n // tile.block_n) * tile.split_k
    places = target.multiprocessors * tile.ctas_per_sm
    waves = -(-tiles // places)
    blocks = -(-k // (tile.block_k * tile.split_k))
    flops = 2 * tile.block_m * tile.block_n * tile.block_k
    block_us = flops * places / (tile.tflops * target.fp8_tflops / H200.fp8_tflops * 1e6)
    reduce_us = 0.0 if tile.split_k == 1 else _REDUCE_US + (tile.split_k + 1) * m * n * 4 / REDUCE_BYTES_PER_US
    return waves * (blocks * block_us + _TILE_ENDS_US) + reduce_us


def choose_tile(m: int, n: int, k: int, fast_accum: bool, target: Target = H200, out_bytes: int = 4) -> Tile:
    """The candidate of least estimated time for C[m, n] = A[m, k] @ B[n, k]^T, C's elements of `out_bytes` each.

    A fusion may change the width of C but not its bits. Neither the tile's sides nor its stages change the order in which
    a sum is made; the parts of K do, so how many there are is decided as for the widest C.
    Raises ValueError where no candidate fits in the target's shared memory, as all that follow do.
    """
    return choose_among([tile for tile in TILES if tile.fast == fast_accum], m, n, k, target, out_bytes)


def choose_among(tiles: list[AnyTile], m: int, n: int, k: int, target: Target, out_bytes: int) -> AnyTile:
    """`choose_tile` over the caller's candidates."""

    def time(tile: AnyTile) -> float:
        return estimated_us(tile, m, n, k, target)

    widest = min(candidates(tiles, n, target, out_bytes=4), key=time)
    same_sum = [tile for tile in tiles if tile.split_k == widest.split_k]
    return min(candidates(same_sum, n, target, out_bytes), key=time)


def candidates(tiles: Iterable[AnyTile], width: int, target: Target, out_bytes: int) -> list[AnyTile]:
    """Those that a GPU can run for rows of C of `width` elements, as it runs them. Raises ValueError where there are none."""
    found = [fitted for tile in tiles if (fitted := tile.fitted(out_bytes, target)) is not None]
    found = [tile for tile in found if tile.narrow or stores_by_descriptor(width)]
    if not found:
        raise ValueError(
            f"te gemm: no tile fits in the {target.shared_bytes // 1024} KB of shared memory of {target.name}"
        )
    return found


def choose_decode_tile(m: int, n: int, k: int, fast_accum: bool, target: Target) -> DecodeTile:
    """How kernels/gemm/decode.py runs C[m, n] = A[m, k] @ B[n, k]^T, for an m of 64 or less."""
    block_m, block_n = max(16, 1 << (m - 1).bit_length()), 64
    tiles, split, multiprocessors = -(-n // block_n), 1, target.multiprocessors
    while split < _MOST_DECODE_PARTS and 2 * split * tiles <= multiprocessors and k > 2 * split * _SHORTEST_DECODE_PART:
        split *= 2
    block_k = 256 if fast_accum else 128
    # The deepest ring of which a multiprocessor holds as many as there are for it: all programs run at once.
    programs = -(-split * tiles // multiprocessors)
    if block_m > 32 and programs > 2:
        block_k, stages = 128, 3
    elif fast_accum:
        stages = 3 if block_m > 32 and programs > 1 else 4
    else:
        stages = 6 if programs > 1 else 8  # alone, nothing else reads while a program adds
    return DecodeTile(block_m, block_n, block_k, 4, stages, fast_accum, split)


def choose_gated_decode_tile(whole: DecodeTile) -> DecodeTile:
    """How kernels/gemm/decode.py runs gate and up that `whole` is for, in one part; its block_n columns are taken of each.

    A step reads as many bytes of the weight as one of twice the depth does there.
    """
    return dataclasses.replace(whole, block_k=128, num_stages=3 if whole.block_m > 32 else 4)


def stages_that_fit(specialized: Tile, out_bytes: int) -> int:
    """As many stages of a specialized kernel's tile as fit beside results of `out_bytes` each, on any Hopper."""
    return specialized.num_stages if specialized.fits(out_bytes) else specialized.num_stages - 1


def choose_stacked_tile(
    m: int,
    n: int,
    k: int,
    fast_accum: bool,
    stacking: Stacking,
    target: Target = H200,
    out_bytes: int = 4,
) -> Tile:
    """The candidate of least estimated time that divides the segments and does not cut K."""
    return choose_among(stacked_tiles(fast_accum, stacking), m, n, k, target, out_bytes)


def stacked_tiles(fast_accum: bool, stacking: Stacking) -> list[Tile]:
    """Those that divide the segments and do not cut K. Along K a tile in halves has no registers for the borders' bookkeeping."""
    tiles = [t for t in TILES if t.fast == fast_accum and t.split_k == 1 and not (t.halves and stacking.along == "K")]
    return [t for t in tiles if stacking.divisible(t.block_m, t.block_n, t.block_k)]


def choose_block_tile(m: int, n: int, k: int, target: Target = H200, out_bytes: int = 4) -> BlockGemmTile:
    """The candidate of least estimated time for C[m, n] = A[m, k] @ B[n, k]^T, C's elements of `out_bytes` each."""
    return choose_among(list(BLOCK_TILES), m, n, k, target, out_bytes)


def choose_rows_tile(
    m: int, n: int, k: int, groups: int, fast_accum: bool, target: Target = H200, out_bytes: int = 4
) -> Tile:
    """The candidate of least estimated time for C[m, n] = A[m, k] @ B[g, n, k]^T, C's elements of `out_bytes` each.

    How many rows each group has, only the device knows: the model takes them for equal.
    """

    def time(tile: Tile) -> float:
        padded = groups * _round_up(-(-m // groups), tile.block_m)  # every group has a last tile of its own
        return _grouped_us(tile, padded, n, k, target)

    tiles = [tile for tile in GROUPED_TILES if tile.fast == fast_accum]
    return min(candidates(tiles, n, target, out_bytes), key=time)


def choose_columns_tile(
    n: int, k: int, m: int, groups: int, fast_accum: bool, target: Target = H200, out_bytes: int = 4
) -> Tile:
    """The same for C[g, n, k] = A[n, m] @ B[k, m]^T, the sum over the m of each group."""

    def time(tile: Tile) -> float:
        return columns_us(tile, n, k, m, groups, target)

    tiles = [tile for tile in COLUMNS_TILES if tile.fast == fast_accum]
    return min(candidates(tiles, k, target, out_bytes), key=time)


def grouped_block_tiles(b_two_d: bool, target: Target) -> list[BlockGemmTile]:
    """Those of BLOCK_TILES that find enough registers with groups: fewer where both operands have a scale for each row."""
    tiles = [tile for tile in BLOCK_TILES if tile.split_k == 1 and (b_two_d or tile.block_m == 64)]
    tiles += [_NARROW_BLOCK] if target.has_wgmma and not b_two_d else []
    # Wide tiles need a multiplication whose operands or sums lie outside the registers.
    wide = target.has_wgmma or (target.has_tensor_memory and b_two_d)
    return [tile for tile in tiles if wide or tile.block_m == tile.block_n]


def choose_grouped_block_tile(
    m: int,
    n: int,
    k: int,
    m_groups: int,
    k_groups: int,
    b_two_d: bool,
    target: Target = H200,
    out_bytes: int = 4,
) -> BlockGemmTile:
    """The same for scales of blocks, by groups of rows or, if k_groups, of k."""

    def time(tile: BlockGemmTile) -> float:
        if k_groups:
            return _grouped_us(tile, k_groups * _round_up(m, tile.block_m), n, -(-k // k_groups), target)
        return _grouped_us(tile, m_groups * _round_up(-(-m // m_groups), tile.block_m), n, k, target)

    return min(candidates(grouped_block_tiles(b_two_d, target), n, target, out_bytes), key=time)


def columns_us(tile: Tile, n: int, k: int, m: int, groups: int, target: Target) -> float:
    """The estimated time of that product by one of COLUMNS_TILES."""
    # Of a group's first and last block half a block each is another group's.
    length = -(-m // groups) + tile.block_k
    return _grouped_us(tile, groups * _round_up(n, tile.block_m), k, length, target)


def columns_specialized_us(n: int, k: int, m: int, groups: int, fast_accum: bool, target: Target) -> float:
    """The estimated time of that product by kernels/gemm/specialized/grouped.py."""
    tile = specialized_tile(fast_accum)
    return estimated_us(tile, groups * _round_up(n, tile.block_m), k, -(-m // groups), target)


def _grouped_us(tile: Tile, m: int, n: int, k: int, target: Target) -> float:
    """`estimated_us` of a kernel whose loads of a tile wait for the tile before, unless another program has work meanwhile."""
    us = estimated_us(tile, m, n, k, target)
    tiles = -(-m // tile.block_m) * -(-n // tile.block_n)
    return us - (_HIDDEN_US * -(-tiles // (target.multiprocessors * tile.ctas_per_sm)) if tile.ctas_per_sm > 1 else 0.0)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def stores_by_descriptor(n: int) -> bool:
    """Whether rows of n elements of C are whole 16 bytes, as tensor copies need; else stores are masked."""
    return n % 8 == 0
