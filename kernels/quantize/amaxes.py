"""Partial amaxes of several tensors in one launch: a launch takes the CPU longer than one of few bytes takes the GPU.

Their maximum is that of `partial_amaxes` (kernels/quantize/current.py), bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from te_dynamo.kernels.quantize.current import PARTIALS
from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.runtime.launch import launch
from te_dynamo.kernels.runtime.writes import writes
from te_dynamo.kernels.tiles.fp8 import abs_bits

MOST_TENSORS = 8
"""Of one launch: each is an argument of the kernel, because a graph cannot know addresses."""

_BLOCK = 4096


def partial_amaxes_of_reference(xs: Sequence[torch.Tensor]) -> torch.Tensor:
    """`partial_amaxes_of` in plain PyTorch, on any device: each row is full of its tensor's amax."""
    amaxes = [x.abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32) for x in xs]
    return torch.stack(amaxes).reshape(-1, 1).repeat(1, PARTIALS)


@writes("partials")
@triton.jit
def quantize_amaxes_kernel(
    x0, x1, x2, x3, x4, x5, x6, x7, partials, SIZE_0, SIZE_1, SIZE_2, SIZE_3, SIZE_4, SIZE_5, SIZE_6, SIZE_7, BLOCK: tl.constexpr
):  # fmt: skip
    """partials[i, p] = amax of every BLOCK of x_i, SIZE_i values, from the p-th on, as many apart as there are programs p."""
    which = tl.program_id(1)
    x, size = select_tensor(which, 4, x4, x5, x6, x7, SIZE_4, SIZE_5, SIZE_6, SIZE_7)
    first, first_size = select_tensor(which, 0, x0, x1, x2, x3, SIZE_0, SIZE_1, SIZE_2, SIZE_3)
    x, size = tl.where(which < 4, first, x), tl.where(which < 4, first_size, size)
    bits = tl.zeros((BLOCK,), tl.int32)
    for block in range(tl.program_id(0), tl.cdiv(size, BLOCK), tl.num_programs(0)):
        offsets = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        bits = tl.maximum(bits, abs_bits(tl.load(x + offsets, mask=offsets < size, other=0.0)))
    amax = tl.max(bits, axis=0).to(tl.float32, bitcast=True)
    tl.store(partials + which * tl.num_programs(0) + tl.program_id(0), amax)


@triton.jit
def select_tensor(which, FIRST: tl.constexpr, x0, x1, x2, x3, size_0, size_1, size_2, size_3):
    """The tensor with number `which`, and its size, of four that begin with number FIRST."""
    x, size = tl.where(which == FIRST + 1, x1, x0), tl.where(which == FIRST + 1, size_1, size_0)
    x, size = tl.where(which == FIRST + 2, x2, x), tl.where(which == FIRST + 2, size_2, size)
    return tl.where(which == FIRST + 3, x3, x), tl.where(which == FIRST + 3, size_3, size)


def partial_amaxes_of(xs: Sequence[torch.Tensor]) -> torch.Tensor:
    """fp32 [len(xs), PARTIALS]: a row's maximum is the amax of its tensor. Contiguous tensors of one dtype, MOST_TENSORS or fewer."""
    assert 0 < len(xs) <= MOST_TENSORS
    partials = torch.empty(len(xs), PARTIALS, dtype=torch.float32, device=xs[0].device)
    given = [*xs, *[xs[0]] * (MOST_TENSORS - len(xs))]
    launch(
        quantize_amaxes_kernel,
        (PARTIALS, len(xs)),
        **{f"x{i}": x for i, x in enumerate(given)},
        partials=partials,
        **{f"SIZE_{i}": x.numel() for i, x in enumerate(given)},
        BLOCK=_BLOCK,
        num_warps=8,
    )
    return partials
