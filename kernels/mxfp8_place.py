"""The Triton kernel of kernels/mxfp8.py that places the codes of blocks of 128 of a large tensor (`stages_codes`)."""

from __future__ import annotations

from te_dynamo.kernels._triton import tl, triton
from te_dynamo.kernels.writes import writes

__all__ = ["place_codes_kernel"]


@writes("scale_inv", "columnwise_scale_inv")
@triton.jit
def place_codes_kernel(staged, scale_inv, columnwise_staged, columnwise_scale_inv, M, K, TILES: tl.constexpr):
    """Moves the words of TILES tiles of rowwise and, at program_id(1) = 1, of columnwise codes to where they belong."""
    if tl.program_id(1) == 0:
        place_codes(staged, scale_inv, M, K, TILES)
    else:
        place_codes(columnwise_staged, columnwise_scale_inv, K, M, TILES)


@triton.jit
def place_codes(staged, scale_inv, R, C, TILES: tl.constexpr):
    """Words [R / 128, ceil(C / 128), 128] of blocks along rows to [R^128, ceil(C / 128)]."""
    tiles = tl.cdiv(C, 128)  # of a row, which is as many words
    per_row = tl.cdiv(tiles, TILES)
    row, first = tl.program_id(0) // per_row, tl.program_id(0) % per_row * TILES
    tile, i = first + tl.arange(0, TILES), tl.arange(0, 128)
    inside = (tile < tiles) & (row * 128 < R)
    words = tl.load(staged + ((row * tiles + tile[:, None]) * 128 + i[None, :]), mask=inside[:, None])
    places = (row * 128 + i[:, None]) * tiles + tile[None, :]
    tl.store(scale_inv.to(tl.pointer_type(tl.int32), bitcast=True) + places, tl.trans(words), mask=inside[None, :])
