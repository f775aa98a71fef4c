"""Several tensors -> float8 rows, each with a scale and buffers of its own (kernels/quantize/current.py), in one launch.

A launch takes the CPU longer than a small cast takes the GPU. Each element has the bits that `quantize` gives it, of values rounded to
another dtype before where that is asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from te_dynamo.kernels.layouts.tensor import TensorForm
from te_dynamo.kernels.quantize.current import quantize_reference
from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.runtime.launch import launch
from te_dynamo.kernels.tiles.fp8 import FLOAT32_MAX, saturating_cast, scale_from_amax

SPAN = 65_536
"""Values that a program casts, of one tensor."""

_BLOCK = 4096
_SCALE_STRIDE = 4
"""fp32 values from a scale to the next: each begins at 16 bytes, as a tensor of its own, which compiled code counts with."""


def quantize_several_reference(
    xs: Sequence[torch.Tensor], dtype: torch.dtype, form: TensorForm, amaxes: Sequence[torch.Tensor]
) -> list[list[torch.Tensor]]:
    """`quantize_several` in plain PyTorch, on any device."""
    return [quantize_reference(x.to(dtype), form, amax) for x, amax in zip(xs, amaxes, strict=True)]


@triton.jit
def quantize_several_kernel(
    table,
    x_like,
    codes_like,
    scale_inv,
    COUNT: tl.constexpr,
    DTYPE: tl.constexpr,
    FMAX: tl.constexpr,
    EPS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ALIGNED: tl.constexpr,
    SPAN: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One span of one tensor. table int64 [5, COUNT]: a tensor's first program and number of values, the addresses of values, codes and amax.

    x_like and codes_like: one of the tensors each, for the dtypes.
    """
    firsts = tl.load(table + tl.arange(0, COUNT))
    which = tl.sum((firsts <= tl.program_id(0)).to(tl.int32), axis=0) - 1
    size = tl.load(table + COUNT + which)
    x = tl.load(table + 2 * COUNT + which).to(x_like.dtype)
    codes = tl.load(table + 3 * COUNT + which).to(codes_like.dtype)
    amax = tl.load(tl.load(table + 4 * COUNT + which).to(scale_inv.dtype))
    if ALIGNED:
        x, codes, size = tl.multiple_of(x, 16), tl.multiple_of(codes, 16), tl.multiple_of(size, 16)
    scale = scale_from_amax(amax, FMAX, EPS, POWER_OF_TWO, FLOAT32_MAX)
    begin = (tl.program_id(0) - tl.load(table + which)) * SPAN
    if begin == 0:
        tl.store(scale_inv + which * SCALE_STRIDE, tl.div_rn(tl.full((), 1.0, tl.float32), scale))
    for start in range(0, SPAN, BLOCK):
        offsets = begin + start + tl.arange(0, BLOCK)
        value = tl.load(x + offsets, mask=offsets < size, other=0.0).to(DTYPE)
        tl.store(codes + offsets, saturating_cast(value, scale, codes.dtype.element_ty), mask=offsets < size)


def quantize_several(
    xs: Sequence[torch.Tensor], dtype: torch.dtype, form: TensorForm, amaxes: Sequence[torch.Tensor]
) -> list[list[torch.Tensor]]:
    """[codes [M, K], scale_inv [1]] of each of xs [M, K], as of x.to(dtype); amaxes: fp32 [1] of each. xs have one dtype and one device.

    The scales lie side by side, the codes in tensors of their own. Not for graphs: the addresses are those of this call.
    """
    assert form.rowwise and not form.columnwise
    xs = [x.contiguous() for x in xs]
    codes = [torch.empty(x.shape, dtype=form.dtype, device=x.device) for x in xs]
    scale_inv = torch.empty(len(xs), _SCALE_STRIDE, dtype=torch.float32, device=xs[0].device)
    # A tensor without values has one program too: for its scale.
    *firsts, programs = itertools.accumulate((max(triton.cdiv(x.numel(), SPAN), 1) for x in xs), initial=0)
    addresses = [[each.data_ptr() for each in tensors] for tensors in (xs, codes, amaxes)]
    rows = (firsts, [x.numel() for x in xs], *addresses)
    aligned = all(number % 16 == 0 for number in itertools.chain(*rows[1:4]))
    unused = [programs] * (triton.next_power_of_2(len(xs)) - len(xs))
    filled = [[*row, *unused] for row in rows]
    table = torch.tensor(filled, dtype=torch.int64, pin_memory=xs[0].is_cuda).to(xs[0].device, non_blocking=True)
    cast_several(table, programs, xs[0], codes[0], scale_inv, dtype, form, aligned)
    return [list(each) for each in zip(codes, scale_inv[:, :1].unbind(), strict=True)]


def cast_several(
    table: torch.Tensor,
    programs: int,
    x_like: torch.Tensor,
    codes_like: torch.Tensor,
    scale_inv: torch.Tensor,
    dtype: torch.dtype,
    form: TensorForm,
    aligned: bool,
) -> None:
    """The launch. aligned: whether all values and codes begin at 16 bytes, and are multiples of 16."""
    launch(
        quantize_several_kernel,
        (programs,),
        table=table,
        x_like=x_like,
        codes_like=codes_like,
        scale_inv=scale_inv,
        COUNT=table.shape[1],
        DTYPE=getattr(tl, str(dtype).removeprefix("torch.")),
        **form.constants(),
        ALIGNED=aligned,
        SPAN=SPAN,
        SCALE_STRIDE=_SCALE_STRIDE,
        BLOCK=_BLOCK,
        num_warps=8,
    )
