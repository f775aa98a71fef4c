"""C[M, N] = A[M, K] @ B[N, K]^T by tensor cores that apply the scales of blocks themselves (`Target.has_block_scales`).

    MXFP8  sum over k of A[m, k] * 2^(ea[m, k/32] - 127) * B[n, k] * 2^(eb[n, k/32] - 127)
    NVFP4  (sum over k of A[m, k] * sa[m, k/16] * B[n, k] * sb[n, k/16]) * (amaxA * amaxB / 2688^2)

each + bias[n], rounded once, then + addend[m, n], rounded again. One persistent kernel; data and scales come through device-side descriptors, the scales swizzled
(kernels/layouts/tiled_scales.py): 512 bytes hold those of 128 rows by four blocks, in the order in which the tensor core's memory wants them.
"""

from __future__ import annotations

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_dynamo.kernels.gemm.request import Operand, Request
from te_dynamo.kernels.layouts.tiled_scales import swizzle_scales
from te_dynamo.kernels.quantize.nvfp4_kernels import TENSOR_MAX
from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.runtime.launch import launch
from te_dynamo.kernels.runtime.margin import gemm_multiprocessors
from te_dynamo.kernels.runtime.target import Target, target_of
from te_dynamo.kernels.runtime.writes import writes
from te_dynamo.kernels.tiles.fp8 import mul_rn


def multiply_scaled(r: Request, c: torch.Tensor) -> None:
    """Writes C of a request in MXFP8 or NVFP4, on a CUDA device whose tensor cores know block scales. The rows of the codes are whole 16 bytes;
    plain scales are swizzled first. c: contiguous; it may be the addend, which is contiguous too."""
    a, b, (m, n, k) = r.a, r.b, r.mnk
    launch(
        gemm_block_scales_kernel,
        (gemm_multiprocessors(c.device),),
        a=a.codes,
        a_scale_inv=_swizzled(a),
        a_amax=a.codes if a.amax is None else a.amax,
        b=b.codes,
        b_scale_inv=_swizzled(b),
        b_amax=b.codes if b.amax is None else b.amax,
        bias=a.codes if r.bias is None else r.bias,
        c=c,
        addend=r.addend,
        M=m,
        N=n,
        K=2 * a.codes.shape[1] if a.scaling == "1x16" else k,
        A_COLUMNWISE=a.turned,
        B_COLUMNWISE=b.turned,
        HAS_BIAS=r.bias is not None,
        **tile(target_of(c.device), a.scaling == "1x16", may_be_empty=not statically_known_true(k > 0)),
    )


def multiplies_codes(target: Target, b_columnwise: bool) -> bool:
    """Whether the tensor cores multiply MXFP8's codes. `mma.sync` wants the rows of b: turning columns takes more registers than there are."""
    return target.has_block_scales and (target.has_tensor_memory or not b_columnwise)


def _swizzled(x: Operand) -> torch.Tensor:
    return swizzle_scales(x.scale_inv.t() if x.turned and x.scale_inv.dim() == 2 else x.scale_inv)


def tile(target: Target, packed: bool, *, may_be_empty: bool = False) -> dict[str, int]:
    """The kernel's constants and options; packed: two values a byte (NVFP4). may_be_empty: K may be 0."""
    size = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 256 if packed else 128, "GROUP_M": 8, "num_warps": 8}
    size["MAY_BE_EMPTY"] = may_be_empty
    if target.has_tensor_memory:
        return {**size, "BLOCK_N": 256, "num_stages": 4}
    return {**size, "num_stages": 3}


@writes("c")
@triton.jit
def gemm_block_scales_kernel(
    a,
    a_scale_inv,
    a_amax,
    b,
    b_scale_inv,
    b_amax,
    bias,
    c,
    addend,
    M,
    N,
    K,
    A_COLUMNWISE: tl.constexpr,
    B_COLUMNWISE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    MAY_BE_EMPTY: tl.constexpr,  # as product.py has it
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """The module's equation, a tile of C after the other. Amaxes are read of NVFP4, whose data is uint8."""
    NVFP4: tl.constexpr = a.dtype.element_ty == tl.uint8
    A_FORMAT: tl.constexpr = "e2m1" if NVFP4 else ("e4m3" if a.dtype.element_ty == tl.float8e4nv else "e5m2")
    B_FORMAT: tl.constexpr = "e2m1" if NVFP4 else ("e4m3" if b.dtype.element_ty == tl.float8e4nv else "e5m2")
    PACK: tl.constexpr = 2 if NVFP4 else 1
    SCALES: tl.constexpr = BLOCK_K // (16 if NVFP4 else 32)  # of a row of a tile
    M, N, K = tl.cast(M, tl.int32), tl.cast(N, tl.int32), tl.cast(K, tl.int32)  # as product.py does
    a_desc = operand_descriptor(a, M, K // PACK, A_COLUMNWISE, BLOCK_M, BLOCK_K // PACK)
    b_desc = operand_descriptor(b, N, K // PACK, B_COLUMNWISE, BLOCK_N, BLOCK_K // PACK)
    if NVFP4:  # a cast of what is loaded, not of the pointers, would take the scales through registers
        a_scale_inv = a_scale_inv.to(tl.pointer_type(tl.float8e4nv))
        b_scale_inv = b_scale_inv.to(tl.pointer_type(tl.float8e4nv))
    tiles_k = tl.cdiv(K, 64 if NVFP4 else 128)
    a_scales = scale_descriptor(a_scale_inv, M, tiles_k, BLOCK_M, SCALES)
    b_scales = scale_descriptor(b_scale_inv, N, tiles_k, BLOCK_N, SCALES)
    alpha = 1.0
    if NVFP4:
        full = tl.full((), TENSOR_MAX, tl.float32)
        alpha = tl.div_rn(tl.load(a_amax), full) * tl.div_rn(tl.load(b_amax), full)
    if not MAY_BE_EMPTY:
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
            x = load_operand(a_desc, row, block * (BLOCK_K // PACK), A_COLUMNWISE)
            y = load_operand(b_desc, column, block * (BLOCK_K // PACK), B_COLUMNWISE)
            x_scale = load_scales(a_scales, row, block, BLOCK_M, SCALES)
            y_scale = load_scales(b_scales, column, block, BLOCK_N, SCALES)
            total = tl.dot_scaled(x, x_scale, A_FORMAT, y.T, y_scale, B_FORMAT, total)
        # Left and right half one after the other: the addresses of a whole tile do not fit in registers beside it.
        left, right = tl.split(tl.permute(tl.reshape(total, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
        store_part(c, addend, left, alpha, bias, row, column, M, N, NVFP4, HAS_BIAS)
        store_part(c, addend, right, alpha, bias, row, column + BLOCK_N // 2, M, N, NVFP4, HAS_BIAS)


@triton.jit
def store_part(c, addend, value, alpha, bias, row, column, M, N, HAS_ALPHA: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Applies alpha, adds the bias in fp32, rounds, adds the addend and writes a part of c [M, N]."""
    columns = column + tl.arange(0, value.shape[1])[None, :]
    if HAS_ALPHA:
        value = mul_rn(value, alpha)
    if HAS_BIAS:
        value += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)
    rows = row + tl.arange(0, value.shape[0])[:, None]
    offsets = rows.to(tl.int64) * N + columns
    inside = (rows < M) & (columns < N)
    value = value.to(c.dtype.element_ty)
    if addend is not None:
        other = tl.load(addend + offsets, mask=inside, other=0.0).to(tl.float32)
        value = (value.to(tl.float32) + other).to(c.dtype.element_ty)
    tl.store(c + offsets, value, mask=inside)


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
def scale_descriptor(scale_inv, SIDE, tiles_k, BLOCK: tl.constexpr, SCALES: tl.constexpr):
    """Tensor descriptor of swizzled scales. The 512 bytes of 128 rows by four blocks are two rows of 256."""
    per_row = tiles_k * 512
    tiles = tl.cdiv(SIDE, 128)
    return tl.make_tensor_descriptor(
        scale_inv,
        [1, tiles, tiles_k, 2, 256],
        [tiles * per_row, per_row, 512, 256, 1],
        [1, BLOCK // 128, SCALES // 4, 2, 256],
    )


@triton.jit
def load_scales(descriptor, first, block, BLOCK: tl.constexpr, SCALES: tl.constexpr):
    """The scales [BLOCK, SCALES] that go with a tile, in order."""
    codes = descriptor.load([0, first // 128, block * (SCALES // 4), 0, 0])
    codes = tl.reshape(codes, (BLOCK // 128, SCALES // 4, 32, 4, 4))
    return tl.reshape(tl.permute(codes, (0, 3, 2, 1, 4)), (BLOCK, SCALES))
