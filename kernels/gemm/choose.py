"""Which kernel and tile run an FP8 product: the one place where that is decided.

    choose(Product(8192, 4096, 4096, fast_accum=False), H200)    ->    Choice("specialized", SPECIALIZED)

Eager calls, lowering, fusions and stacking ask it. Of one format there are up to three kernels:

    usual         every product, on every device               current.py, stacked.py, block.py, grouped.py, grouped_block.py
    decode        at most 64 rows, a number that is known      decode.py
    specialized   large products; in Gluon                     the folder specialized
    cublaslt      what was timed, and is fastest by it         cublaslt.py

decode and specialized are Hopper's. By the cost model of tiles.py the specialized kernel has to beat the usual one, and to take longer
than the CPU takes to call it. A product that was timed on the device (`TUNED`, filled by tuned.py) runs what was fastest then. What
MXFP8 and NVFP4 of blocks of 32 and 16 run is multiply.py's to say.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch

from te_dynamo.kernels.gemm.tiles import (
    BLOCK_TILES,
    COLUMNS_TILES,
    GROUPED_TILES,
    REDUCE_BLOCK,
    REDUCE_BYTES_PER_US,
    SPECIALIZED,
    SPECIALIZED_FAST,
    SPECIALIZED_SMALL,
    TILES,
    DecodeTile,
    Tile,
    candidates,
    choose_block_tile,
    choose_columns_tile,
    choose_decode_tile,
    choose_gated_decode_tile,
    choose_grouped_block_tile,
    choose_rows_tile,
    choose_stacked_tile,
    choose_tile,
    columns_specialized_us,
    columns_us,
    estimated_us,
    grouped_block_tiles,
    specialized_tile,
    stacked_tiles,
    stores_by_descriptor,
)
from te_dynamo.kernels.quantize.current import PARTIALS
from te_dynamo.kernels.runtime.dependent_launch import FEW_ROWS
from te_dynamo.kernels.runtime.launch import size_hint
from te_dynamo.kernels.runtime.margin import gemm_target
from te_dynamo.kernels.runtime.target import LAUNCH_US, Target
from te_dynamo.kernels.tiles.stacking import NOT_STACKED, SEGMENT_MULTIPLE, Stacking

CALL_US = 50.0
"""From here on a call pays: it keeps the CPU busy for longer than the launch that Inductor's code would make in its place."""

_LAUNCHES_US = 2 * LAUNCH_US
"""For a product and the quantization of an operand of its own."""

_SMALLEST_DECODE_WEIGHT = 4 * 2**20  # bytes: below, the time is not that of reading it


@dataclasses.dataclass(frozen=True)
class Product:
    """C [m, n] = A [m, k] @ B [n, k]^T and what happens to C.

    fast_accum: False with scales of blocks, whose products are added in fp32.
    out_bytes:  of an element of C.
    epilogue:   what the kernel does besides, if it can: add another tensor to C, find the amax of C, or that of silu(gate) * up
                where C, in bf16, is the two halves gate and up, stacked along N.
    scaling:    what has one scale: a tensor, a row, or A's blocks; those of B are the other kind, unless they are named.
    stacking:   of operands that are several tensors, with a scale each.
    m_groups:   groups of rows with a B [n, k] each, of sizes that only the device knows; 0 if there are none.
    k_groups:   groups of k, each with a C of its own.
    m_known, n_known: whether m and n are numbers that hold in every call. Otherwise they are hints.
    """

    m: int
    n: int
    k: int
    fast_accum: bool = False
    out_bytes: int = 4
    epilogue: Literal["none", "add", "amax", "gated"] = "none"
    scaling: Literal["tensor", "row", "1x128", "128x128", "1x128 by 1x128"] = "tensor"
    stacking: Stacking = NOT_STACKED
    m_groups: int = 0
    k_groups: int = 0
    m_known: bool = True
    n_known: bool = True

    @property
    def in_blocks(self) -> bool:
        """Whether scales are those of blocks, so that products are added up by them."""
        return self.scaling not in ("tensor", "row")

    @property
    def plain(self) -> Product:
        """The product as it is timed: with no epilogue, and a C of 16 bits. All that differ in these alone have one order of sums."""
        return dataclasses.replace(self, out_bytes=2, epilogue="none")


@dataclasses.dataclass(frozen=True)
class Choice:
    """kernel, tile: what runs. fused: whether it does the epilogue too; if not, that is a pass after the plain product.

    Of cublaslt the tile is the usual kernel's, which runs what cuBLASLt cannot: a product by codes of E8M0. Of small blocks, "scaled" by tensor
    cores that know them or "emulated", there is none.
    """

    kernel: Literal["usual", "decode", "specialized", "cublaslt", "scaled", "emulated"]
    tile: Any = None
    fused: bool = True

    @property
    def specialized(self) -> bool:
        """Whether the specialized kernel runs all of it."""
        return self.kernel == "specialized" and self.fused


CHOSEN: dict[Any, Choice] = {}
"""What multiply.py remembers of requests that ran: a copy of answers of this module."""

TUNED: dict[tuple[Product, Target], Choice] = {}
"""What was fastest on a device, of products as `Product.plain` writes them. `use_tuned` adds to it."""

Asked = dict[tuple[Product, Target], set[str]]
"""The epilogues of each plain product on a device."""

_asked: contextvars.ContextVar[Asked | None] = contextvars.ContextVar("te_dynamo_asked_products", default=None)


def use_tuned(choices: Mapping[tuple[Product, Target], Choice]) -> None:
    """From now on these are chosen, in the place of what the cost model says."""
    TUNED.update(choices)
    choose.cache_clear()
    CHOSEN.clear()


@contextlib.contextmanager
def asked_products() -> Iterator[Asked]:
    """Collects what `choose_for` is asked inside, on this thread, as `TUNED` has it."""
    asked: Asked = {}
    token = _asked.set(asked)
    try:
        yield asked
    finally:
        _asked.reset(token)


def choose_for(
    a: torch.Tensor,
    b: torch.Tensor,
    fast_accum: bool = False,
    out_dtype: torch.dtype = torch.float32,
    *,
    recorded: bool = False,
    **others: Any,
) -> Choice:
    """`choose` for a [M, K] and b [N, K] (or [G, N, K]) on their device; others: fields of `Product`.

    A symbolic size counts as its hint, and is not guarded on.
    """
    m, n = a.shape[0], b.shape[-2]
    product = Product(
        m=size_hint(m),
        n=size_hint(n),
        k=size_hint(a.shape[1]),
        fast_accum=fast_accum,
        out_bytes=out_dtype.itemsize,
        m_known=isinstance(m, int),
        n_known=isinstance(n, int),
        **others,
    )
    target, asked = gemm_target(a.device), _asked.get()
    if asked is not None:
        asked.setdefault((product.plain, target), set()).add(product.epilogue)
    return choose(product, target, recorded)


@functools.lru_cache(maxsize=4096)
def choose(product: Product, target: Target, recorded: bool = False) -> Choice:
    """Which kernel and tile run a product on a device. Raises ValueError where no tile fits in its shared memory.

    recorded: launches are recorded for Inductor's code, which launches kernels of the Triton language only. Where the specialized
    kernel is the fastest, lowering leaves the operation for Inductor's code to call it.
    """
    tuned = TUNED.get((product.plain, target))
    if tuned is not None and tuned.kernel == "cublaslt":
        return Choice("cublaslt", _usual_tile(product, target), fused=product.epilogue == "none")
    specialized, decode = _specialized_tile(product, target), _decode_tile(product, target)
    if not _fuses(product, specialized, decode, recorded):
        plain = dataclasses.replace(product, epilogue="none")
        return dataclasses.replace(choose(plain, target, recorded), fused=False)
    if specialized is not None and not recorded and product.epilogue != "amax":
        return Choice("specialized", specialized)
    if decode is not None:
        return Choice("decode", decode)
    return Choice("usual", _usual_tile(product, target))


def can_fuse(choice: Choice, product: Product) -> bool:
    """Whether the kernel of a choice for the plain product does this one's epilogue too."""
    tile = choice.tile if isinstance(choice.tile, Tile) and choice.kernel == "specialized" else None
    decode = choice.tile if isinstance(choice.tile, DecodeTile) else None
    return product.epilogue == "none" or (choice.kernel != "cublaslt" and _fuses(product, tile, decode, recorded=False))


def _fuses(product: Product, specialized: Tile | None, decode: DecodeTile | None, recorded: bool) -> bool:
    """Whether the kernel that is the fastest does the epilogue too."""
    if product.epilogue == "add":
        vectors = product.n_known and stores_by_descriptor(product.n)
        return vectors and (specialized is None or product.out_bytes == 2)
    if product.epilogue == "amax":
        return decode is not None
    if product.epilogue == "gated":
        return decode is not None or (specialized is not None and not recorded and specialized not in SPECIALIZED_SMALL)
    return True


def usual_tiles(p: Product, target: Target) -> list[Tile]:
    """All of the tables that the usual kernel can run a product with. Raises ValueError where none fits in shared memory."""
    fast = p.fast_accum or target.has_fp32_sums
    if p.in_blocks:
        grouped = p.m_groups or p.k_groups
        tiles: list[Tile] = [*(grouped_block_tiles(p.scaling == "1x128", target) if grouped else BLOCK_TILES)]
    elif p.stacking.along:
        tiles = stacked_tiles(fast, p.stacking)
    else:
        table = GROUPED_TILES if p.m_groups else COLUMNS_TILES if p.k_groups else TILES
        tiles = [tile for tile in table if tile.fast == fast]
    return candidates(tiles, p.n, target, p.out_bytes)


def _usual_tile(p: Product, target: Target) -> Tile:
    if p.epilogue == "add":  # the addend passes through as much shared memory as the result does
        p = dataclasses.replace(p, out_bytes=2 * p.out_bytes, epilogue="none")
    tuned = TUNED.get((p.plain, target))
    if tuned is not None and tuned.kernel == "usual":
        fitting = [tile for tile in usual_tiles(p, target) if tile.split_k == tuned.tile.split_k]
        assert isinstance(tuned.tile, Tile)
        if tuned.tile in fitting:
            return tuned.tile
        return min(fitting, key=lambda tile: estimated_us(tile, p.m, p.n, p.k, target))
    fast = p.fast_accum or target.has_fp32_sums
    if p.in_blocks and (p.m_groups or p.k_groups):
        groups = (p.m_groups, p.k_groups)
        return choose_grouped_block_tile(p.m, p.n, p.k, *groups, p.scaling == "1x128", target, p.out_bytes)
    if p.m_groups:
        return choose_rows_tile(p.m, p.n, p.k, p.m_groups, fast, target, p.out_bytes)
    if p.k_groups:
        return choose_columns_tile(p.m, p.n, p.k, p.k_groups, fast, target, p.out_bytes)
    if p.in_blocks:
        return choose_block_tile(p.m, p.n, p.k, target, p.out_bytes)
    if p.stacking.along:
        return choose_stacked_tile(p.m, p.n, p.k, fast, p.stacking, target, p.out_bytes)
    return choose_tile(p.m, p.n, p.k, fast, target, p.out_bytes)


def _specialized_tile(p: Product, target: Target) -> Tile | None:
    """The specialized kernel's, where that one runs the product the fastest, whatever C's dtype."""
    tuned, tiles = TUNED.get((p.plain, target)), specialized_tiles(p, target)
    if tuned is not None:
        return next((tile for tile in tiles if tuned == Choice("specialized", tile)), None)
    if not tiles:
        return None
    size = p.m, p.n, p.k
    if p.k_groups:
        how = (p.k_groups, p.fast_accum, target)
        usual_us = columns_us(choose_columns_tile(*size, *how), *size, p.k_groups, target)
        times = {tiles[0]: columns_specialized_us(*size, *how)}
    else:
        times = {tile: estimated_us(tile, *size, target) for tile in tiles}
        if p.in_blocks:
            usual: Tile = choose_block_tile(*size, target)
        else:
            usual = choose_tile(*size, p.fast_accum, target)
        usual_us = estimated_us(usual, *size, target)
    if p.stacking.along == "K" and p.fast_accum:
        usual_us = float("inf")  # its copies wait at every border
    return min((tile for tile, us in times.items() if CALL_US <= us < usual_us), key=times.__getitem__, default=None)


def specialized_tiles(p: Product, target: Target) -> list[Tile]:
    """The specialized kernel's for the product, the large one first."""
    if not target.has_wgmma or p.m_groups or not stores_by_descriptor(p.n):
        return []
    if p.scaling not in ("tensor", "row", "1x128") or (p.k_groups and p.in_blocks):
        return []
    tile, small = (specialized_tile(p.fast_accum, p.in_blocks, small) for small in (False, True))
    if p.k_groups:
        part = tile.block_m // (2 if p.fast_accum else 4)  # what one group of warps stores is whole in its C
        if not (p.m_known and p.n_known) or p.m % part:
            return []
    if p.stacking.along:
        # The parts that a group of warps stores lie in one segment.
        assert SPECIALIZED.block_n == SPECIALIZED.block_k == SEGMENT_MULTIPLE == SPECIALIZED.block_m // 2
        assert SPECIALIZED_FAST.block_n // 2 == SPECIALIZED_FAST.block_k == SEGMENT_MULTIPLE == SPECIALIZED_FAST.block_m
    return [tile] if p.k_groups or (p.stacking.along and not p.in_blocks) else [tile, small]


def _decode_tile(p: Product, target: Target) -> DecodeTile | None:
    """How the kernel for a few rows runs it; None where others should, or where it cannot do the epilogue."""
    tuned = TUNED.get((p.plain, target))
    return can_decode(p, target) if tuned is None or tuned.kernel == "decode" else None


def can_decode(p: Product, target: Target) -> DecodeTile | None:
    """How the kernel for a few rows runs it, where it can and the weight is large enough."""
    few_rows = p.m_known and 0 < p.m <= FEW_ROWS and p.n * p.k >= _SMALLEST_DECODE_WEIGHT
    if not target.has_wgmma or not few_rows or p.m_groups or p.k_groups or p.scaling not in ("tensor", "row", "1x128"):
        return None
    tile = choose_decode_tile(p.m, p.n, p.k, p.fast_accum, target)
    if p.stacking.along and (p.stacking.along != "N" or tile.split_k > 1):
        return None
    programs = -(-p.n // tile.block_n) if tile.split_k == 1 else -(-p.m * p.n // REDUCE_BLOCK)
    if p.epilogue == "gated":
        programs, tile = -(-p.n // 2 // tile.block_n), choose_gated_decode_tile(tile)
    if p.epilogue in ("amax", "gated") and programs > PARTIALS:
        return None  # there is no place for the amax of each
    return tile


def stacking_pays(product: Product, target: Target) -> bool:
    """Whether a stacked product takes no longer than one for each segment, launches included, and in forward (along N) has their bits.

    One program makes the whole sum of a stacked GEMM, which rounds otherwise than a GEMM that cuts K. Along K apart, the
    products have to be written and read again for their sum. Between scales of blocks there is no border: that stack runs as any product.
    """
    along, segments = product.stacking.along, product.stacking.segments
    whole = dataclasses.replace(product, stacking=NOT_STACKED)
    product = whole if product.in_blocks else product
    parts = [dataclasses.replace(whole, **{along.lower(): segment}) for segment in segments]
    if along == "N":
        timed = [TUNED[each.plain, target] for each in (product, *parts) if (each.plain, target) in TUNED]
        if any(choice.kernel == "cublaslt" or choice.tile.split_k > 1 for choice in timed):
            return False
        few_rows = [_decode_tile(p, target) for p in (whole, *parts)]
        if all(few_rows):
            return all(tile.split_k == 1 for tile in few_rows if tile is not None)
        if any(few_rows):
            return False  # a segment's own bits are another kernel's, perhaps with K in parts
    tile = _specialized_tile(product, target) or _usual_tile(product, target)
    added_us = product.m * product.n * 4 / REDUCE_BYTES_PER_US if along == "K" else 0.0
    apart = (len(segments) - 1) * (added_us + _LAUNCHES_US)
    for part in parts:
        own = _usual_tile(part, target)
        if along == "N" and (own.split_k > 1 or tile.split_k > 1):
            return False
        own = _specialized_tile(part, target) or own
        apart += estimated_us(own, part.m, part.n, part.k, target)
    return estimated_us(tile, product.m, product.n, product.k, target) <= apart


def product_us(product: Product, target: Target) -> float:
    """The cost model's time of a product on a Hopper GPU; 0 of one whose time is that of reading its weight."""
    tile = choose(product, target).tile
    return 0.0 if isinstance(tile, DecodeTile) else estimated_us(tile, product.m, product.n, product.k, target)
