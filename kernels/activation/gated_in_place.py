"""A gated unit's gradients quantized into the memory of dy: the rowwise half of `gated_backward_quantize`, without a buffer of its own.

    data [M, 2K] = [q(dgate), q(dup)]      one byte an element, in the 2 K bytes that a row of bf16 or fp16 dy [M, K] has

The two have a scale each, or one as halves of one tensor, in either order (kernels/activation/gated_halves.py).

One program holds a whole row: it has read all of it before it writes the first code. The transposed copy is made of the codes
later (kernels/quantize/transpose.py), when gate and up are gone; with both copies written at once, this is where a training step's
memory is at its peak.
"""

from __future__ import annotations

import torch

from te_dynamo.kernels.activation.gated import source_of_gradients
from te_dynamo.kernels.layouts.sizes import Size, rows_and_columns
from te_dynamo.kernels.layouts.tensor import TensorForm
from te_dynamo.kernels.produce.tensor import partial_amaxes
from te_dynamo.kernels.quantize.current import PARTIALS
from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.runtime.launch import launch, multiprocessor_count
from te_dynamo.kernels.runtime.writes import updates, writes
from te_dynamo.kernels.tiles.activations import gradients
from te_dynamo.kernels.tiles.fp8 import load_scale, rounded, saturating_cast

MOST_COLUMNS = 32768
"""Longest row of dy that fits into a program's registers."""

COLUMNS_MULTIPLE = 128
"""dy's columns are a multiple of this. Quarters of a row, and dup's codes behind dgate's, then begin at whole vectors."""


@triton.jit
def _load(x, QUARTER: tl.constexpr, BLOCK_K: tl.constexpr):
    """A quarter of a row, from x on; zero behind its end."""
    columns = tl.arange(0, BLOCK_K)
    return tl.load(x + columns, mask=columns < QUARTER, other=0.0)


@triton.jit
def _write_quarter(
    grad,
    gate,
    up,
    codes,
    scales,
    KIND: tl.constexpr,
    J: tl.constexpr,
    UP_FIRST: tl.constexpr,
    QUARTER: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Codes of dgate and dup for quarter J of a row, of which `grad` is dy."""
    first: tl.constexpr = J * QUARTER
    gate_place: tl.constexpr = first + 4 * QUARTER if UP_FIRST else first
    up_place: tl.constexpr = first if UP_FIRST else first + 4 * QUARTER
    g_scale, u_scale = scales
    g = _load(gate + first, QUARTER, BLOCK_K).to(tl.float32)
    u = _load(up + first, QUARTER, BLOCK_K).to(tl.float32)
    dgate, dup = gradients(grad.to(tl.float32), g, u, KIND)
    dgate, dup = rounded(dgate, gate.dtype.element_ty), rounded(dup, gate.dtype.element_ty)
    DTYPE: tl.constexpr = codes.dtype.element_ty
    columns = tl.arange(0, BLOCK_K)
    inside = columns < QUARTER
    tl.store(codes + gate_place + columns, saturating_cast(dgate, g_scale, DTYPE), mask=inside)
    tl.store(codes + up_place + columns, saturating_cast(dup, u_scale, DTYPE), mask=inside)


@updates("dy")
@writes("dy", "scale_inv")
@triton.jit
def gated_backward_rows_kernel(
    dy,
    gate,
    up,
    gate_partials,
    up_partials,
    scale_inv,
    gate_stride,
    up_stride,
    M,
    KIND: tl.constexpr,
    GATE_HALF: tl.constexpr,
    E5M2: tl.constexpr,
    FMAX: tl.constexpr,
    EPS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    PARTIALS: tl.constexpr,
    QUARTER: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Rows of dy [M, 4 QUARTER] become the codes of dgate and, behind them, of dup: the last first, which are in the cache.

    GATE_HALF: 0 or 1 where both have one scale, from the gate's partial amaxes, and dgate is this half; -1 elsewhere.
    """
    DTYPE: tl.constexpr = tl.float8e5 if E5M2 else tl.float8e4nv
    g_scale = load_scale(gate_partials, scale_inv, PARTIALS, FMAX, EPS, POWER_OF_TWO)
    u_scale = g_scale
    if GATE_HALF == -1:
        u_scale = load_scale(up_partials, scale_inv + 1, PARTIALS, FMAX, EPS, POWER_OF_TWO)
    UP_FIRST: tl.constexpr = GATE_HALF == 1
    scales = (g_scale, u_scale)
    for index in tl.range(tl.program_id(0), M, tl.num_programs(0), num_stages=1):
        row = (M - 1 - index).to(tl.int64)
        grad, g, u = dy + row * (4 * QUARTER), gate + row * gate_stride, up + row * up_stride
        d0 = _load(grad + 0 * QUARTER, QUARTER, BLOCK_K)
        d1 = _load(grad + 1 * QUARTER, QUARTER, BLOCK_K)
        d2 = _load(grad + 2 * QUARTER, QUARTER, BLOCK_K)
        d3 = _load(grad + 3 * QUARTER, QUARTER, BLOCK_K)
        codes = grad.to(tl.pointer_type(DTYPE), bitcast=True)
        tl.debug_barrier()  # every thread has its part of the row
        _write_quarter(d0, g, u, codes, scales, KIND, 0, UP_FIRST, QUARTER, BLOCK_K)
        _write_quarter(d1, g, u, codes, scales, KIND, 1, UP_FIRST, QUARTER, BLOCK_K)
        _write_quarter(d2, g, u, codes, scales, KIND, 2, UP_FIRST, QUARTER, BLOCK_K)
        _write_quarter(d3, g, u, codes, scales, KIND, 3, UP_FIRST, QUARTER, BLOCK_K)


def gated_backward_quantize_in_place(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    kind: str,
    form: TensorForm,
    gate_first: bool | None = None,
) -> list[torch.Tensor]:
    """[data, scale_inv] of `quantize_stacked([dgate, dup], by_columns=True)`, rowwise only; data [M, 2K] lies in dy's memory.

    gate_first: if it is given, those of `gated_backward_quantize_halves` in their place.
    dy: contiguous, of two bytes an element, its columns a multiple of COLUMNS_MULTIPLE and at most MOST_COLUMNS; it is
    overwritten. gate, up: as `gated` takes them. Raises ValueError for another dy.
    """
    rows, columns = rows_and_columns(dy.shape)
    if (
        dy.element_size() != 2
        or columns % COLUMNS_MULTIPLE
        or not 0 < columns <= MOST_COLUMNS
        or not dy.is_contiguous()
    ):
        raise ValueError(
            f"te gated_backward_quantize_in_place: expected a contiguous dy of two bytes an element whose columns are a multiple "
            f"of {COLUMNS_MULTIPLE} up to {MOST_COLUMNS}, got {dy.dtype} {tuple(dy.shape)} with strides {dy.stride()}"
        )
    halves = gate_first is not None
    source = source_of_gradients(dy, gate, up, kind)
    found, _ = partial_amaxes(source, together=halves)
    _, gate, up = source.inputs
    _, gate_stride, up_stride = source.strides
    scale_inv = torch.empty(1 if halves else 2, dtype=torch.float32, device=dy.device)
    block_k, warps = row_block(columns)
    dy = dy.reshape(rows, columns)
    launch(
        gated_backward_rows_kernel,
        (row_programs(rows, warps, dy.device),),
        dy=dy,
        gate=gate,
        up=up,
        gate_partials=found[0],
        up_partials=found[-1],
        scale_inv=scale_inv,
        gate_stride=gate_stride,
        up_stride=up_stride,
        M=rows,
        KIND=kind,
        GATE_HALF=int(not gate_first) if halves else -1,
        E5M2=form.dtype == torch.float8_e5m2,
        **form.constants(),
        PARTIALS=PARTIALS,
        QUARTER=columns // 4,
        BLOCK_K=block_k,
        num_warps=warps,
    )
    return [dy.view(form.dtype), scale_inv]


def row_block(columns: int) -> tuple[int, int]:
    """(BLOCK_K, warps) for rows of that many columns: a quarter in 16 elements a thread."""
    block_k = triton.next_power_of_2(columns // 4)
    return block_k, min(max(block_k // 512, 1), 16)


def row_programs(rows: Size, warps: int, device: torch.device) -> int:
    """Programs of a launch: as many as are resident, 24 warps a multiprocessor; one at least, which writes the scales."""
    most = max(24 // warps, 1) * multiprocessor_count(device)
    return min(max(rows, 1), most) if isinstance(rows, int) else most
