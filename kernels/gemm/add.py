"""An FP8 GEMM that adds another tensor to its result, in the same launch.

    C[M, N] = round(round((A[M, K] @ B[N, K]^T) * (a_scale_inv * b_scale_inv) + bias[N]) + addend[M, N])

The product is rounded to C's dtype before the addend is added in fp32, so that it equals the GEMM and an addition, bit for bit. C
may take the addend's place: every element of it is read by the program that writes it, before it does.

kernels/gemm/current.py and decode.py load the addend where they store; in the kernel for large products on Hopper the copying warp
brings it through the ring behind a tile's last block of K, so that no product waits for it. That kernel takes addends of two
bytes an element: a large sum in fp32 is a pass of its own, as is one whose rows are not whole 16 bytes.
"""

from __future__ import annotations

import torch

from te_dynamo.kernels.gemm.current import check_operands, gemm, gemm_reference, gemm_with_tile
from te_dynamo.kernels.gemm.decode import decode_tile
from te_dynamo.kernels.gemm.specialized import gemm_specialized_out, runs_specialized
from te_dynamo.kernels.gemm.tiles import choose_tile, stores_by_descriptor
from te_dynamo.kernels.runtime.launch import is_hopper, is_recording, multiprocessor_count, size_hint

__all__ = [
    "add_runs_specialized",
    "adds_in_launch",
    "gemm_add",
    "gemm_add_in_place",
    "gemm_add_reference",
    "gemm_add_specialized_out",
    "is_aligned",
]

_ALIGNMENT = 16  # bytes, of a tensor that is copied by a descriptor


def gemm_add(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    addend: torch.Tensor,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:
    """The module docstring's C, a new tensor, of what `kernels.gemm.gemm` takes.

    addend [M, N]: of out_dtype, on the same device. Raises ValueError for anything else.
    """
    _check(a, b, bias, addend, out_dtype)
    if not adds_in_launch(a, b, out_dtype, fast_accum):
        return gemm(a, a_scale_inv, b, b_scale_inv, bias, out_dtype, fast_accum) + addend
    c = torch.empty((a.shape[0], b.shape[0]), dtype=out_dtype, device=a.device)
    return _launch(a, a_scale_inv, b, b_scale_inv, bias, _readable(addend), c, fast_accum)


def gemm_add_in_place(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    addend: torch.Tensor,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:
    """`gemm_add` that writes C to the addend, contiguous and aligned to 16 bytes, and returns it."""
    _check(a, b, bias, addend, out_dtype)
    return _launch(a, a_scale_inv, b, b_scale_inv, bias, addend, addend, fast_accum)


def gemm_add_reference(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    addend: torch.Tensor,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:
    """`gemm_add` in plain PyTorch on any device."""
    _check(a, b, bias, addend, out_dtype)
    return gemm_reference(a, a_scale_inv, b, b_scale_inv, bias, out_dtype, fast_accum) + addend


def gemm_add_specialized_out(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    *bias_and_addend: torch.Tensor,
    fast: bool,
    out: torch.Tensor,
) -> None:
    """Writes C to out [M, N] by the kernel for large products; a bias, if any, and the addend, which may be out. Checks nothing."""
    *bias, addend = bias_and_addend
    gemm_specialized_out(a, a_scale_inv, b, b_scale_inv, *bias, fast=fast, addend=addend, out=out)


def adds_in_launch(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, fast_accum: bool) -> bool:
    """Whether the kernel that runs a [M, K] by b [N, K] fastest adds too; otherwise `gemm_add` is a GEMM and a pass."""
    n = b.shape[0]
    rows_are_vectors = isinstance(n, int) and stores_by_descriptor(n)
    return rows_are_vectors and (out_dtype.itemsize == 2 or not runs_specialized(a, b, fast_accum))


def add_runs_specialized(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, fast_accum: bool) -> bool:
    """Whether that is the kernel for large products, whose tensor cores multiply while it reads the addend."""
    return out_dtype.itemsize == 2 and runs_specialized(a, b, fast_accum)


def is_aligned(addend: torch.Tensor) -> bool:
    """Whether an addend without an address, a fake, begins where a descriptor may: its memory does, and it some vectors later."""
    first = addend.storage_offset() * addend.element_size()
    return isinstance(first, int) and first % _ALIGNMENT == 0


def _launch(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    addend: torch.Tensor,
    c: torch.Tensor,
    fast_accum: bool,
) -> torch.Tensor:
    if not is_recording() and add_runs_specialized(a, b, c.dtype, fast_accum):
        gemm_specialized_out(a, a_scale_inv, b, b_scale_inv, bias, fast=fast_accum, addend=addend, out=c)
        return c
    m, k, n = size_hint(a.shape[0]), size_hint(a.shape[1]), size_hint(b.shape[0])
    multiprocessors = multiprocessor_count(a.device)
    tile = decode_tile(a.shape[0], n, k, fast_accum, is_hopper(a.device), multiprocessors)
    # The addend passes through as much shared memory as the result does. The number of parts of K is the same for any.
    tile = tile or choose_tile(m, n, k, fast_accum, multiprocessors, 2 * c.element_size())
    return gemm_with_tile(tile, a, a_scale_inv, b, b_scale_inv, bias, c.dtype, addend=addend, c=c)


def _check(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, addend: torch.Tensor, out_dtype: torch.dtype
) -> None:
    check_operands(a, b, bias, out_dtype)
    size = (a.shape[0], b.shape[0])
    if tuple(addend.shape) != size or addend.dtype != out_dtype:
        raise ValueError(
            f"te gemm_add: expected addend {size} of {out_dtype}, got {tuple(addend.shape)} of {addend.dtype}"
        )


def _readable(addend: torch.Tensor) -> torch.Tensor:
    """The addend as the kernels read it: rows one after the other, from an aligned address on."""
    addend = addend.contiguous()
    aligned = is_aligned(addend) if is_recording() else addend.data_ptr() % _ALIGNMENT == 0
    return addend if aligned else addend.clone()
