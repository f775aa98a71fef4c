"""x [G, N, K] -> float8 with one scale a group: the weights of G experts, each in current scaling by itself.

    data [G, N, K], transpose [G, K, N rounded up to 16], scale_inv [G]

Equations: kernels/tiles/fp8.py, for each x[g]. `quantize_grouped` makes two launches, `quantize_grouped_reference` is the same
function in plain PyTorch, equal bit for bit, and equal to `quantize` of every group.
"""

from __future__ import annotations

import torch

from te_dynamo.kernels.layouts import tensor
from te_dynamo.kernels.layouts.sizes import allocate
from te_dynamo.kernels.quantize.current import amax_tile, cast_tile, quantize_reference
from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.runtime.launch import launch, multiprocessor_count
from te_dynamo.kernels.runtime.writes import writes
from te_dynamo.kernels.tiles.fp8 import (
    FLOAT32_MAX,
    PROGRAMS_PER_MULTIPROCESSOR,
    abs_bits,
    cast_launches,
    load_amax,
    load_tile,
    scale_from_amax,
    store_quantized_tile,
    tile_origin,
)

PARTIALS = 64
"""Programs of the amax launch for each group, so also partial amaxes: a power of two."""


# --- reference ----------------------------------------------------------------------------------------------


def quantize_grouped_reference(
    x: torch.Tensor, fp8_dtype: torch.dtype, rowwise: bool, columnwise: bool, power_of_two: bool, eps: float
) -> list[torch.Tensor]:
    """`quantize_grouped` in plain PyTorch, on any device."""
    _check(x)
    groups = [quantize_reference(group, fp8_dtype, rowwise, columnwise, power_of_two, eps) for group in x]
    buffers = [_stacked([group[i] for group in groups]) for i in range(rowwise + columnwise)]
    return [*buffers, torch.cat([group[-1] for group in groups])]


def _stacked(parts: list[torch.Tensor]) -> torch.Tensor:
    """As integers: torch stacks no float8."""
    return torch.stack([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)


def _check(x: torch.Tensor) -> None:
    if x.dim() != 3 or 0 in x.shape:
        raise ValueError(f"te quantize by groups: expected x [G, N, K], none of them 0, got {tuple(x.shape)}")


# --- kernels ------------------------------------------------------------------------------------------------


@writes("partials")
@triton.jit
def grouped_amax_kernel(x, partials, N, K, PARTIALS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """partials[g, p] = amax of every PARTIALS-th tile of x[g], from tile p on."""
    group = tl.program_id(0) // PARTIALS
    x += group.to(tl.int64) * N * K
    bits = tl.zeros((BLOCK_N, BLOCK_K), tl.int32)
    tiles = tl.cdiv(N, BLOCK_N) * tl.cdiv(K, BLOCK_K)
    for tile in range(tl.program_id(0) % PARTIALS, tiles, PARTIALS):
        row, column = tile_origin(tile, K, BLOCK_N, BLOCK_K)
        bits = tl.maximum(bits, abs_bits(load_tile(x, row, column, K, N, K, BLOCK_N, BLOCK_K)))
    tl.store(partials + tl.program_id(0), tl.max(bits, axis=None).to(tl.float32, bitcast=True))


@writes("scale_inv", data="ROWWISE", transpose="COLUMNWISE")
@triton.jit
def grouped_cast_kernel(
    x,
    partials,
    data,
    transpose,
    scale_inv,
    G,
    N,
    K,
    FMAX: tl.constexpr,
    EPS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    PARTIALS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Every tile of x: the scale of its group, cast, store."""
    tiles = tl.cdiv(N, BLOCK_N) * tl.cdiv(K, BLOCK_K)
    for index in tl.range(tl.program_id(0), G * tiles, tl.num_programs(0), num_stages=1):
        group = index // tiles
        scale = scale_from_amax(load_amax(partials + group * PARTIALS, PARTIALS), FMAX, EPS, POWER_OF_TWO, FLOAT32_MAX)
        if index % tiles == 0:
            tl.store(scale_inv + group, tl.div_rn(tl.full((), 1.0, tl.float32), scale))
        row, column = tile_origin(index % tiles, K, BLOCK_N, BLOCK_K)
        before = group.to(tl.int64) * K
        value = load_tile(x + before * N, row, column, K, N, K, BLOCK_N, BLOCK_K)
        rows, columns = data + before * N, transpose + before * ((N + 15) // 16 * 16)
        store_quantized_tile(value, scale, row, column, N, K, rows, columns, ROWWISE, COLUMNWISE, BLOCK_N, BLOCK_K)


# --- launcher -----------------------------------------------------------------------------------------------


def quantize_grouped(
    x: torch.Tensor, fp8_dtype: torch.dtype, rowwise: bool, columnwise: bool, power_of_two: bool, eps: float
) -> list[torch.Tensor]:
    """[data?, transpose?, scale_inv] of x [G, N, K], bf16, fp16 or fp32, of fixed shape, on a CUDA device.

    data [G, N, K] and transpose [G, K, N rounded up to 16] (zero past N) are `fp8_dtype`, scale_inv is fp32 [G].
    Raises ValueError for a tensor that is not three-dimensional or is empty.
    """
    _check(x)
    x = x.contiguous()
    groups, n, k = x.shape
    partials = torch.empty((groups, PARTIALS), dtype=torch.float32, device=x.device)
    block_n, block_k, warps = amax_tile(k)
    launch(
        grouped_amax_kernel,
        (groups * PARTIALS,),
        x=x,
        partials=partials,
        N=n,
        K=k,
        PARTIALS=PARTIALS,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=warps,
    )
    buffers = allocate(tensor.buffers((groups, n, k), fp8_dtype, rowwise, columnwise, groups), x.device)
    block_n, block_k, warps = cast_tile(groups * n, k, columnwise)
    tiles = groups * triton.cdiv(n, block_n) * triton.cdiv(k, block_k)
    for rows, columns in cast_launches(rowwise, columnwise, x.element_size()):
        launch(
            grouped_cast_kernel,
            (min(tiles, PROGRAMS_PER_MULTIPROCESSOR * multiprocessor_count(x.device)),),
            x=x,
            partials=partials,
            **dict.fromkeys(tensor.BUFFERS, x) | buffers,
            G=groups,
            N=n,
            K=k,
            FMAX=torch.finfo(fp8_dtype).max,
            EPS=float(eps),
            POWER_OF_TWO=power_of_two,
            ROWWISE=rows,
            COLUMNWISE=columns,
            PARTIALS=PARTIALS,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            num_warps=warps,
        )
    return list(buffers.values())
