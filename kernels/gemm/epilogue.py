"""An FP8 GEMM that does more with its result in the same launch: it adds another tensor to it, or finds its amax.

    add     C[M, N] = round(round((A[M, K] @ B[N, K]^T) * (a_scale_inv * b_scale_inv) + bias[N]) + addend[M, N])

The product is rounded to C's dtype before the addend is added in fp32, so that it equals the GEMM and an addition, bit for bit. C
may take the addend's place: every element of it is read by the program that writes it, before it does.

kernels/gemm/current.py and decode.py load the addend where they store; in the kernel for large products on Hopper the copying warp
brings it through the ring behind a tile's last block of K, so that no product waits for it. That kernel takes addends of two
bytes an element: a large sum in fp32 is a pass of its own, as is one whose rows are not whole 16 bytes.

    amax    C = kernels/gemm/current.py's;  amax = max |C|, of the rounded values

What a linear writes is often what the next one quantizes. With a few rows a launch takes as long as what it computes, so the kernel for
a few rows finds the amax; after another one it is a pass of its own.
"""

from __future__ import annotations

import torch

from te_dynamo.kernels.gemm.choose import Choice, choose_for
from te_dynamo.kernels.gemm.current import check_operands, gemm, gemm_reference, gemm_with_tile
from te_dynamo.kernels.gemm.specialized.current import gemm_specialized_out
from te_dynamo.kernels.quantize.current import PARTIALS, partial_amaxes
from te_dynamo.kernels.runtime.launch import is_recording

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
    """The module docstring's C, a new tensor, of what `gemm` takes.

    addend [M, N]: of out_dtype, on the same device. Raises ValueError for anything else.
    """
    _check(a, b, bias, addend, out_dtype)
    choice = _choice(a, b, out_dtype, fast_accum)
    if not choice.fused:
        return gemm(a, a_scale_inv, b, b_scale_inv, bias, out_dtype, fast_accum) + addend
    c = torch.empty((a.shape[0], b.shape[0]), dtype=out_dtype, device=a.device)
    return _launch(choice, a, a_scale_inv, b, b_scale_inv, bias, _readable(addend), c, fast_accum)


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
    """`gemm_add` that writes C to the addend, contiguous and aligned to 16 bytes, and returns it.

    Of products that are added to in their launch (`Choice.fused`).
    """
    _check(a, b, bias, addend, out_dtype)
    return _launch(
        _choice(a, b, out_dtype, fast_accum), a, a_scale_inv, b, b_scale_inv, bias, addend, addend, fast_accum
    )


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


def is_aligned(addend: torch.Tensor) -> bool:
    """Whether an addend without an address, a fake, begins where a descriptor may: its memory does, and it some vectors later."""
    first = addend.storage_offset() * addend.element_size()
    return isinstance(first, int) and first % _ALIGNMENT == 0


def _choice(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, fast_accum: bool) -> Choice:
    return choose_for(a, b, fast_accum, out_dtype, epilogue="add", recorded=is_recording())


def _launch(
    choice: Choice,
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    addend: torch.Tensor,
    c: torch.Tensor,
    fast_accum: bool,
) -> torch.Tensor:
    if choice.specialized:
        gemm_specialized_out(a, a_scale_inv, b, b_scale_inv, bias, fast=fast_accum, addend=addend, out=c)
        return c
    return gemm_with_tile(choice.tile, a, a_scale_inv, b, b_scale_inv, bias, c.dtype, addend=addend, c=c)


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


def gemm_amax(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(C [M, N], fp32 [PARTIALS] whose maximum is the amax) of what `gemm` takes; ValueError where it raises one."""
    check_operands(a, b, bias, out_dtype)
    choice = choose_for(a, b, fast_accum, out_dtype, epilogue="amax")
    if not choice.fused:
        c = gemm(a, a_scale_inv, b, b_scale_inv, bias, out_dtype, fast_accum)
        return c, partial_amaxes(c)
    partials = torch.empty(PARTIALS, dtype=torch.float32, device=a.device)
    return gemm_with_tile(choice.tile, a, a_scale_inv, b, b_scale_inv, bias, out_dtype, partials), partials


def gemm_amax_reference(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gemm_amax` in plain PyTorch on any device; all its partial amaxes are the amax."""
    c = gemm_reference(a, a_scale_inv, b, b_scale_inv, bias, out_dtype, fast_accum)
    partials = torch.zeros(PARTIALS, dtype=torch.float32, device=a.device)
    if c.numel():
        partials += c.abs().amax()
    return c, partials
