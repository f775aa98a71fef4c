"""A tensor whose parts, consecutive rows, go to one receiver each, with the scale of what that one receives. In aten operations, which
Inductor compiles.

    bits[p]  = max|x| of part p, as the int32 that its fp32 bits are: these order as magnitudes do, NaN above all
    codes[m] = cast(clamp(x[m] * scale(amax[p])))        for the rows m of part p

Rules: kernels/quantize/current.py's, bit for bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from te_dynamo.kernels.layouts.sizes import Size
from te_dynamo.kernels.layouts.tensor import TensorForm
from te_dynamo.kernels.quantize.current import cast_reference, scale_reference


def amax_bits_of_parts(x: torch.Tensor, sizes: Sequence[Size]) -> torch.Tensor:
    """bits [P] of x [M, ...], sizes: the rows of each part. A part without rows gives 0."""
    of_rows = x.abs().flatten(1).amax(-1).to(torch.float32).view(torch.int32)
    mine = _part_of_rows(x, sizes)[:, None] == torch.arange(len(sizes), device=x.device)
    of_parts = torch.where(mine, of_rows[:, None], 0)
    return torch.cat([of_parts, of_parts.new_zeros(1, len(sizes))]).amax(0)


def quantize_parts(
    x: torch.Tensor,
    sizes: Sequence[Size],
    amaxes: torch.Tensor,
    own_amax: torch.Tensor,
    form: TensorForm,
) -> list[torch.Tensor]:
    """[codes of x [M, ...], scale_inv [1] by own_amax]; amaxes fp32 [P]: of all that each receiver gets, own_amax [1]: of the caller."""
    assert form.rowwise and not form.columnwise
    scale = scale_reference(amaxes, form.dtype, form.power_of_two, form.eps)[_part_of_rows(x, sizes)]
    codes = cast_reference(x.to(torch.float32) * scale.view(-1, *[1] * (x.dim() - 1)), form.dtype)
    return [codes, 1.0 / scale_reference(own_amax, form.dtype, form.power_of_two, form.eps)]


def _part_of_rows(x: torch.Tensor, sizes: Sequence[Size]) -> torch.Tensor:
    """The part of each row of x, int64 [M]."""
    rows = torch.arange(x.shape[0], device=x.device)
    part = torch.zeros_like(rows)
    for end in itertools.accumulate(sizes[:-1]):
        part = part + (rows >= end)
    return part
