"""A request (request.py) in plain PyTorch, on any device: products and sums in fp32, whatever `fast` says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from te_dynamo.kernels.activation.gated import gated_reference
from te_dynamo.kernels.gemm.gated import check_gated, halves
from te_dynamo.kernels.gemm.request import Operand, Request, check
from te_dynamo.kernels.layouts.block import BLOCK
from te_dynamo.kernels.layouts.mxfp8 import powers_of_two
from te_dynamo.kernels.layouts.sizes import blocks_of, round_up
from te_dynamo.kernels.quantize.current import PARTIALS
from te_dynamo.kernels.quantize.mxfp8 import dequantize_mxfp8_reference
from te_dynamo.kernels.quantize.nvfp4 import TENSOR_MAX, dequantize_nvfp4_reference
from te_dynamo.kernels.tiles.groups import group_bounds, padded_bounds

_ALL = slice(None)


class _Piece(NamedTuple):
    """A part of a request that has one pair of tensors' scales: rows and k of A, rows and k of B, and where its product goes in C."""

    out: Any
    a: tuple[Any, slice]
    b: tuple[Any, slice]
    a_slot: int = 0
    b_slot: int = 0


def reference(r: Request) -> torch.Tensor:
    """C of a request. Raises ValueError for what no GEMM takes."""
    check(r)
    a, b = _values(r.a), _values(r.b)
    c = torch.zeros(r.shape, dtype=torch.float32, device=r.a.codes.device)
    for piece in _pieces(r):
        product = _product(r, a, b, piece)
        c[piece.out] = c[piece.out] + product if r.stacking.along == "K" else product
    if r.bias is not None:
        c = c + r.bias.float()
    c = c.to(r.out_dtype)
    return c if r.addend is None else c + r.addend


def reference_with_amax(r: Request) -> tuple[torch.Tensor, torch.Tensor]:
    """(C, fp32 [PARTIALS]): all partial amaxes are C's amax."""
    return _with_amax(reference(r), lambda c: c)


def reference_gated(r: Request, gate: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(C, fp32 [PARTIALS]): all partial amaxes are that of f(gate) * up of C's halves (gated.py)."""
    check_gated(r, gate, kind)
    return _with_amax(reference(r), lambda c: gated_reference(*halves(c, gate), kind))


def _with_amax(c: torch.Tensor, of: Any) -> tuple[torch.Tensor, torch.Tensor]:
    partials = torch.zeros(PARTIALS, dtype=torch.float32, device=c.device)
    return c, partials + of(c).abs().amax() if c.numel() else partials


def _values(x: Operand) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(fp32 [..., rows, K], the scale of every row and block of 128, by which they are still to be multiplied)."""
    if x.scaling == "1x16":
        return dequantize_nvfp4_reference(x.codes, x.scale_inv, None, x.size[1], torch.float32), None
    if x.scaling == "1x32":
        values = dequantize_mxfp8_reference(x.codes, x.scale_inv, x.turned, torch.float32)
        return values.t() if x.turned else values, None
    return x.codes.float(), None if x.scaling in ("tensor", "row") else scales_of_rows(x)


def dequantized(x: Operand) -> torch.Tensor:
    """fp32 [rows, K] by all scales but the tensors' own of NVFP4 (`tensors_scale`)."""
    values, scales = _values(x)
    if x.scaling == "row":
        return values * x.scale_inv[:, None]
    if scales is None:
        return values * x.scale_inv if x.scaling == "tensor" else values
    return values * scales.repeat_interleave(BLOCK, dim=1)[:, : values.shape[1]]


def _product(r: Request, a: Any, b: Any, piece: _Piece) -> torch.Tensor:
    (a_values, a_scales), (b_values, b_scales) = a, b
    left, right = a_values[piece.a], b_values[piece.b]
    if a_scales is not None:
        return _sum_of_blocks(left, _blocks(a_scales, piece.a), right, _blocks(b_scales, piece.b))
    product = left @ right.t()
    if r.scaling == "tensor":
        return product * (r.a.scale_inv.view(-1)[piece.a_slot] * r.b.scale_inv.view(-1)[piece.b_slot])
    if r.scaling == "row":
        a_scales, b_scales = (x.scale_inv[piece.out] if r.groups == "columns" else x.scale_inv for x in (r.a, r.b))
        return product * a_scales[piece.a[0], None] * b_scales[piece.b[0]]
    return product if r.a.amax is None else product * tensors_scale(r.a.amax, r.b.amax)


def _blocks(scales: torch.Tensor, index: tuple[Any, slice]) -> torch.Tensor:
    rows, k = index
    return scales[rows, slice(None if k.start is None else k.start // BLOCK, None)]


def _sum_of_blocks(a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor) -> torch.Tensor:
    """The sum over blocks of 128 of a [M, K] and b [N, K], by the scales of rows and blocks."""
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float32, device=a.device)
    for number in range(blocks_of(a.shape[1], BLOCK)):
        k = slice(number * BLOCK, (number + 1) * BLOCK)
        total += (a[:, k] @ b[:, k].t()) * (a_scales[:, number, None] * b_scales[None, :, number])
    return total


def scales_of_rows(x: Operand) -> torch.Tensor:
    """The scale of every row and block of 128, fp32 [rows, ceil(K/128)], of an operand in blocks of 128."""
    (rows, k), scale_inv = x.size, x.scale_inv
    blocks = blocks_of(k, BLOCK)
    if scale_inv.dtype == torch.uint8:
        return powers_of_two(scale_inv[:rows, : 4 * blocks : 4])
    if x.scaling == "128x128":
        return scale_inv[:, :blocks].repeat_interleave(BLOCK, dim=0)[:rows]
    if x.scaling != "1x128":
        raise ValueError(f"te gemm: no reference multiplies operands with scales {x.scaling}")
    return scale_inv.t().contiguous()[:rows]  # contiguous for every M: one that is symbolic is fixed by no view


def tensors_scale(a_amax: torch.Tensor, b_amax: torch.Tensor) -> torch.Tensor:
    """amaxA * amaxB / 2688^2 of NVFP4, fp32 [1], in an order that overflows only with the result."""
    full = torch.full_like(a_amax, TENSOR_MAX)
    return (a_amax / full) * (b_amax / full)


def _pieces(r: Request) -> Iterator[_Piece]:
    m, n, k = r.mnk
    if r.groups == "rows":
        for g, (start, end) in enumerate(group_bounds(r.offs, m)):  # type: ignore[arg-type]
            below: Any = g if r.b.codes.dim() == 3 else slice(g * n, g * n + n)
            weight = (_ALL, slice(g * k, g * k + k)) if r.deep else (below, _ALL)
            yield _Piece(slice(start, end), (slice(start, end), _ALL), weight, 0, g)
    elif r.groups == "columns":
        whole = r.scaling in ("tensor", "row")
        for g, (start, end) in enumerate((group_bounds if whole else padded_bounds)(r.offs, k)):  # type: ignore[arg-type]
            part = slice(start, end if whole or r.a.turned else start + round_up(end - start, 16))
            yield _Piece(g, (_ALL, part), (_ALL, part))
    else:
        first, along = 0, r.stacking.along
        for s, length in enumerate(r.stacking.segments or (0,)):
            part, first = slice(first, first + length), first + length
            rows, columns, inner = (part if along == side else _ALL for side in "MNK")
            slots = s if along in ("M", "K") else 0, s if along in ("N", "K") else 0
            yield _Piece((rows, columns), (rows, inner), (columns, inner), *slots)
