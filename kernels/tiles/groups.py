"""Groups of rows whose sizes only the device knows, as kernels walk them: group g is offs[g - 1] <= m < offs[g], 0 before the first.

Kernels of formats with one scale for some rows read the columns of such a tensor in its padded order: zero rows are put in behind each
group, so that every group begins at a multiple of 128 and no block of rows is two groups'. Behind the last group all is zero, as far as
any groups of M rows can reach: `padded_rows`.
"""

from __future__ import annotations

from typing import Any

import torch

from te_dynamo.kernels.layouts.sizes import Size
from te_dynamo.kernels.runtime._triton import tl, triton

PADDED = 128
"""In the padded order groups begin at multiples of it."""


# --- reference ----------------------------------------------------------------------------------------------


def group_bounds(offs: torch.Tensor, total: int) -> list[tuple[int, int]]:
    """(start, end) of each group, clamped as the kernels do: no offset reaches out of `total` rows."""
    ends = [min(max(end, 0), total) for end in offs.tolist()]
    return [(start, max(start, end)) for start, end in zip([0, *ends], ends, strict=False)]


def padded_bounds(offs: torch.Tensor, total: int) -> list[tuple[int, int]]:
    """(start, end) of each group in the padded order of `total` rows, without its padding."""
    bounds, first = [], 0
    for start, end in group_bounds(offs, total):
        bounds.append((first, first + end - start))
        first += -(-(end - start) // PADDED) * PADDED
    return bounds


def padded_reference(x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """x [M, K] in its padded order."""
    padded = x.new_zeros(padded_rows(x.shape[0], offs.shape[0]), x.shape[1])
    bounds = group_bounds(offs, x.shape[0]), padded_bounds(offs, x.shape[0])
    for (start, end), (first, last) in zip(*bounds, strict=True):
        padded[first:last] = x[start:end]
    return padded


def padded_rows(rows: Size, groups: int) -> Size:
    """The most rows that the padded order of `rows` rows has, whatever the groups' sizes."""
    return (rows + (PADDED - 1) * groups) // PADDED * PADDED


def padded_order(x: torch.Tensor, rows: Size, offs: torch.Tensor | None) -> tuple[dict[str, Any], Size]:
    """(a kernel's arguments for `in_padded_order` of x with so many rows, the rows of that order); without offs x is read as it is."""
    if offs is None:
        return {"offs": x, "x_rows": 1, "G": 1, "GROUPS": 0}, rows
    groups = offs.shape[0]
    order = {"offs": offs, "x_rows": rows, "G": groups, "GROUPS": triton.next_power_of_2(groups)}
    return order, padded_rows(rows, groups)


# --- device functions ---------------------------------------------------------------------------------------


@triton.jit
def clamped(offset, M):
    """An offset that lies in 0..M."""
    return tl.minimum(tl.maximum(offset, 0), M)


@triton.jit
def tiles_of_groups(before, ends, M, BLOCK: tl.constexpr):
    """(first rows, ends, tiles of BLOCK rows) of groups [GROUPS], of the offsets before them and their own, as they are in memory.

    Kernels load these by themselves: torch takes the pointer that a function is given for written where its result decides a store.
    """
    starts, ends = clamped(before, M), clamped(ends, M)
    return starts, ends, tl.cdiv(tl.maximum(ends - starts, 0), BLOCK)


@triton.jit
def rows_of_tile(tile, starts, ends, tiles, after, BLOCK: tl.constexpr):
    """(group, first row, the group's end) of a tile, `after` being the running sum of `tiles`. Behind the last tile the end is 0."""
    group = tl.sum((after <= tile).to(tl.int32), axis=0)
    mine = tl.arange(0, tiles.shape[0]) == group
    # Of the group: its first row less that of as many whole tiles as are before it.
    origin = tl.sum(tl.where(mine, starts - (after - tiles) * BLOCK, 0), axis=0)
    return group, origin + tile * BLOCK, tl.sum(tl.where(mine, ends, 0), axis=0)


@triton.jit
def in_padded_order(x, row, offs, x_rows, M, K, G, GROUPS: tl.constexpr):
    """(where x [x_rows, K] would begin if its padded order's 128 rows from `row` on were the rows there, the row before which their
    group ends): behind the last group that is 0 or less. Without GROUPS x is read as it is, M rows."""
    if GROUPS == 0:
        return x, M
    else:
        groups = tl.arange(0, GROUPS)
        before = tl.load(offs + groups - 1, mask=(groups > 0) & (groups < G), other=0)
        starts, ends, tiles = tiles_of_groups(before, tl.load(offs + groups, mask=groups < G, other=0), x_rows, 128)
        _, source, end = rows_of_tile(row // 128, starts, ends, tiles, tl.cumsum(tiles, axis=0), 128)
        ahead = source - row
        return x + ahead.to(tl.int64) * K, end - ahead
