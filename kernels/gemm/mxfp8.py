"""C[M, N] = A[M, K] @ B[N, K]^T of operands in MXFP8, blocks of 32 (kernels/quantize/mxfp8.py).

    C[M, N] = round(sum over k of A[m, k] * 2^(ea[m, k/32] - 127) * B[n, k] * 2^(eb[n, k/32] - 127) + bias[n])

Tensor cores that apply the scales of blocks themselves (sm_100: tcgen05.mma ... block_scale) multiply the codes. That kernel is
persistent, data and scales come through device-side descriptors. Scales come swizzled (`swizzle_scales`): 512 bytes hold those of 128
rows by 128 columns, in the order in which the tensor core's memory wants them. Elsewhere the GEMM is emulated: both operands become
bf16, which holds all their values exactly, and torch's own GEMM multiplies those.
"""

from __future__ import annotations

import torch

from te_dynamo.kernels.quantize.mxfp8 import dequantize_mxfp8, dequantize_mxfp8_reference, swizzle_scales
from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.runtime.launch import launch
from te_dynamo.kernels.runtime.margin import gemm_multiprocessors
from te_dynamo.kernels.runtime.target import target_of
from te_dynamo.kernels.tiles.fp8 import Size

CONSTANTS = {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 128, "GROUP_M": 8}
OPTIONS = {"num_warps": 8, "num_stages": 4}


def gemm_mxfp8_reference(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    a_columnwise: bool,
    b_columnwise: bool,
) -> torch.Tensor:
    """`gemm_mxfp8` in plain PyTorch on any device, products and sums in fp32."""
    check_operands(a, b, bias, a_columnwise, b_columnwise)
    value_a = dequantize_mxfp8_reference(a, a_scale_inv, a_columnwise, torch.float32)
    value_b = dequantize_mxfp8_reference(b, b_scale_inv, b_columnwise, torch.float32)
    value = (value_a.t() if a_columnwise else value_a) @ (value_b if b_columnwise else value_b.t())
    if bias is not None:
        value = value + bias.float()
    return value.to(out_dtype)


def check_operands(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, a_columnwise: bool, b_columnwise: bool
) -> None:
    """Raises ValueError, saying what is wrong, for operands that the GEMM does not take."""
    if a.dtype == b.dtype == torch.float8_e5m2:
        raise ValueError("te gemm_mxfp8: e5m2 x e5m2 is not supported; hold one operand in e4m3")
    if a.dim() != 2 or b.dim() != 2 or a.shape[0 if a_columnwise else 1] != b.shape[0 if b_columnwise else 1]:
        wanted = f"a [{'K, M' if a_columnwise else 'M, K'}] and b [{'K, N' if b_columnwise else 'N, K'}]"
        raise ValueError(f"te gemm_mxfp8: expected {wanted}, got {tuple(a.shape)} and {tuple(b.shape)}")
    if bias is not None and tuple(bias.shape) != (b.shape[1 if b_columnwise else 0],):
        raise ValueError(f"te gemm_mxfp8: expected bias [{b.shape[1 if b_columnwise else 0]}], got {tuple(bias.shape)}")


def gemm_mxfp8(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    a_columnwise: bool,
    b_columnwise: bool,
) -> torch.Tensor:
    """C[M, N] = round(A[M, K] @ B[N, K]^T + bias[N]) of the values that the operands hold, on a CUDA device.

    a [M, K], or columnwise data [K, M]; b [N, K], or [K, N]; scales plain, as `quantize_mxfp8` returns them with them. Tensor
    cores that know block scales (sm_100) multiply the float8 data, if its rows are whole 16 bytes. Elsewhere both operands
    become bf16, which holds all values exactly, and multiply as such. The product is fp32, bias is added to that.
    Raises ValueError for e5m2 by e5m2 and for shapes that do not go together.
    """
    check_operands(a, b, bias, a_columnwise, b_columnwise)
    if target_of(a.device).has_block_scales and a.shape[1] % 16 == 0 and b.shape[1] % 16 == 0:
        a_swizzled = swizzle_scales(a_scale_inv.t() if a_columnwise else a_scale_inv)
        b_swizzled = swizzle_scales(b_scale_inv.t() if b_columnwise else b_scale_inv)
        return _multiply_scaled(a, a_swizzled, b, b_swizzled, bias, out_dtype, a_columnwise, b_columnwise)
    value_a = dequantize_mxfp8(a, a_scale_inv, a_columnwise, torch.bfloat16)
    value_b = dequantize_mxfp8(b, b_scale_inv, b_columnwise, torch.bfloat16)
    left, right = value_a.t() if a_columnwise else value_a, value_b if b_columnwise else value_b.t()
    if bias is None and out_dtype == torch.bfloat16:
        return torch.mm(left, right)
    product = torch.mm(left, right, out_dtype=torch.float32)
    return (product if bias is None else product + bias.float()).to(out_dtype)


def _multiply_scaled(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    a_columnwise: bool,
    b_columnwise: bool,
) -> torch.Tensor:
    """C by tensor cores that know block scales: a [M, K], or [K, M] if a_columnwise; b [N, K], or [K, N]; the last dimension of both a multiple of 16.

    a_scale_inv (M^128, ceil(K/32)^4) and b_scale_inv (N^128, ceil(K/32)^4), uint8, are swizzled.
    """
    m, n = sides(a, b, a_columnwise, b_columnwise)
    k = a.shape[0] if a_columnwise else a.shape[1]
    c = torch.empty((m, n), dtype=out_dtype, device=a.device)
    launch(
        gemm_mxfp8_kernel,
        (gemm_multiprocessors(a.device),),
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
