"""MXFP8 GEMM on tensor cores that apply the scales of blocks themselves (sm_100: tcgen05.mma ... block_scale).

    C[M, N] = round(sum over k of A[m, k] * 2^(ea[m, k/32] - 127) * B[n, k] * 2^(eb[n, k/32] - 127) + bias[n])

Persistent, data and scales through device-side descriptors. Scales come swizzled (`mxfp8.swizzle_scales`): 512 bytes hold
those of 128 rows by 128 columns, in the order in which the tensor core's memory wants them.
"""

from __future__ import annotations

import functools

import torch

from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.runtime.launch import launch, multiprocessor_count
from te_dynamo.kernels.tiles.fp8 import Size

__all__ = ["CONSTANTS", "OPTIONS", "applies_block_scales", "gemm_mxfp8_sm100"]

CONSTANTS = {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 128, "GROUP_M": 8}
OPTIONS = {"num_warps": 8, "num_stages": 4}


def gemm_mxfp8_sm100(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    a_columnwise: bool,
    b_columnwise: bool,
) -> torch.Tensor:
    """C of the module's equation: a [M, K], or [K, M] if a_columnwise; b [N, K], or [K, N]; the last dimension of both a multiple of 16.

    a_scale_inv (M^128, ceil(K/32)^4) and b_scale_inv (N^128, ceil(K/32)^4), uint8, are swizzled.
    """
    m, n = sides(a, b, a_columnwise, b_columnwise)
    k = a.shape[0] if a_columnwise else a.shape[1]
    c = torch.empty((m, n), dtype=out_dtype, device=a.device)
    launch(
        gemm_mxfp8_kernel,
        (multiprocessor_count(a.device),),
        a=a,
        a_scale_inv=a_scale_inv,
        b=b,
        b_scale_inv=b_scale_inv,
        bias=a if bias is None else bias,
        c=c,
        M=m,
        N=n,
        K=k,
        A_COLUMNWISE=a_columnwise,
        B_COLUMNWISE=b_columnwise,
        HAS_BIAS=bias is not None,
        **CONSTANTS,
        **OPTIONS,
    )
    return c


@functools.cache
def applies_block_scales(device: torch.device) -> bool:
    """Whether the device's tensor cores take block scales in the form that this kernel compiles to."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] == 10


def sides(a: torch.Tensor, b: torch.Tensor, a_columnwise: bool, b_columnwise: bool) -> tuple[Size, Size]:
    """(M, N) of a product of these operands."""
    return a.shape[1 if a_columnwise else 0], b.shape[1 if b_columnwise else 0]


@triton.jit
def gemm_mxfp8_kernel(
    a,
    a_scale_inv,
    b,
    b_scale_inv,
    bias,
    c,
    M,
    N,
    K,
    A_COLUMNWISE: tl.constexpr,
    B_COLUMNWISE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """The module's equation, a tile of C after the other."""
    A_FORMAT: tl.constexpr = "e4m3" if a.dtype.element_ty == tl.float8e4nv else "e5m2"
    B_FORMAT: tl.constexpr = "e4m3" if b.dtype.element_ty == tl.float8e4nv else "e5m2"
    a_desc = operand_descriptor(a, M, K, A_COLUMNWISE, BLOCK_M, BLOCK_K)
    b_desc = operand_descriptor(b, N, K, B_COLUMNWISE, BLOCK_N, BLOCK_K)
    a_scales = scale_descriptor(a_scale_inv, M, K, BLOCK_M, BLOCK_K)
    b_scales = scale_descriptor(b_scale_inv, N, K, BLOCK_N, BLOCK_K)
    tl.assume(K > 0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        group = tile // (GROUP_M * tiles_n)
        rows_in_group = min(tiles_m - group * GROUP_M, GROUP_M)
        row = (group * GROUP_M + tile % rows_in_group) * BLOCK_M
        column = (tile % (GROUP_M * tiles_n)) // rows_in_group * BLOCK_N
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for block in range(tl.cdiv(K, BLOCK_K)):
            x = load_operand(a_desc, row, block * BLOCK_K, A_COLUMNWISE)
            y = load_operand(b_desc, column, block * BLOCK_K, B_COLUMNWISE)
            x_scale = load_scales(a_scales, row, block, BLOCK_M, BLOCK_K)
            y_scale = load_scales(b_scales, column, block, BLOCK_N, BLOCK_K)
            total = tl.dot_scaled(x, x_scale, A_FORMAT, y.T, y_scale, B_FORMAT, total)
        # Left and right half one after the other: the addresses of a whole tile do not fit in registers beside it.
        left, right = tl.split(tl.permute(tl.reshape(total, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
        store_part(c, left, bias, row, column, M, N, HAS_BIAS)
        store_part(c, right, bias, row, column + BLOCK_N // 2, M, N, HAS_BIAS)


@triton.jit
def store_part(c, value, bias, row, column, M, N, HAS_BIAS: tl.constexpr):
    """Adds the bias in fp32, rounds and writes a part of c [M, N]."""
    columns = column + tl.arange(0, value.shape[1])[None, :]
    if HAS_BIAS:
        value += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)
    rows = row + tl.arange(0, value.shape[0])[:, None]
    offsets = rows.to(tl.int64) * N + columns
    tl.store(c + offsets, value.to(c.dtype.element_ty), mask=(rows < M) & (columns < N))


@triton.jit
def operand_descriptor(operand, SIDE, K, COLUMNWISE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """Tensor descriptor of an operand [SIDE, K], or [K, SIDE] if COLUMNWISE."""
    if COLUMNWISE:
        descriptor = tl.make_tensor_descriptor(operand, [K, SIDE], [SIDE, 1], [BLOCK_K, BLOCK])
    else:
        descriptor = tl.make_tensor_descriptor(operand, [SIDE, K], [K, 1], [BLOCK, BLOCK_K])
    return descriptor


@triton.jit
def load_operand(descriptor, first, k, COLUMNWISE: tl.constexpr):
    """A tile [BLOCK, BLOCK_K] of it; what lies outside is zero."""
    return descriptor.load([k, first]).T if COLUMNWISE else descriptor.load([first, k])


@triton.jit
def scale_descriptor(scale_inv, SIDE, K, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """Tensor descriptor of the swizzled scales of [SIDE, K]. The 512 bytes of 128 x 128 values are two rows of 256."""
    tiles_k = tl.cdiv(K, 128)
    per_row = tiles_k * 512
    tiles = tl.cdiv(SIDE, 128)
    return tl.make_tensor_descriptor(
        scale_inv,
        [1, tiles, tiles_k, 2, 256],
        [tiles * per_row, per_row, 512, 256, 1],
        [1, BLOCK // 128, BLOCK_K // 128, 2, 256],
    )


@triton.jit
def load_scales(descriptor, first, block, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """The codes [BLOCK, BLOCK_K / 32] that go with a tile, in order."""
    BLOCKS: tl.constexpr = BLOCK // 128
    BLOCKS_K: tl.constexpr = BLOCK_K // 128
    codes = descriptor.load([0, first // 128, block * BLOCKS_K, 0, 0])
    codes = tl.reshape(codes, (BLOCKS, BLOCKS_K, 32, 4, 4))
    return tl.reshape(tl.permute(codes, (0, 3, 2, 1, 4)), (BLOCK, BLOCK_K // 32))
