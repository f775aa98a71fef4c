"""FP8 GEMM with one scale for every 128 products: Float8 block scaling, and MXFP8 whose codes repeat four times.

    C[M, N] = round(sum over blocks kb of 128 k: (A_kb @ B_kb^T) * (a_scale_kb * b_scale_kb) + bias[N])

A and B are float8_e4m3fn or float8_e5m2, both contiguous, the contracted dimension in memory order. Scales are
`scale_inv` in the rowwise layouts of kernels/quantize/float8_block.py, float32:

    1D (one scale a row and block):       [ceil(K/128), M^4], of row m at [kb, m]
    2D (one scale for 128 rows):          [ceil(M/128), ceil(K/128)^4]

or uint8 E8M0 codes in the rowwise layout of MXFP8, 1D only: [M^128, (K/32)^4], of row m at [m, 4 * kb]. Code c is
2^(c - 127), 255 is NaN. At most one of A and B is 2D, as in Transformer Engine.

Products of 128 are summed by the tensor core and added to an fp32 sum by one fused multiply-add with the product of
the two scales. The kernel is built as kernels/gemm/current.py's: persistent, with tensor descriptors and two halves a tile.
"""

from __future__ import annotations

from typing import Any

import torch

from te_dynamo.kernels.gemm.choose import choose_for
from te_dynamo.kernels.gemm.cublaslt import gemm_block_cublaslt
from te_dynamo.kernels.gemm.current import add_parts, check_operands, store_result, tile_origin
from te_dynamo.kernels.gemm.specialized.block import gemm_block_specialized_out
from te_dynamo.kernels.gemm.tiles import Tile, stores_by_descriptor
from te_dynamo.kernels.layouts import block as layout
from te_dynamo.kernels.layouts import mxfp8
from te_dynamo.kernels.layouts.block import BLOCK
from te_dynamo.kernels.layouts.sizes import blocks_of
from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.runtime.launch import is_recording, launch
from te_dynamo.kernels.runtime.margin import gemm_multiprocessors
from te_dynamo.kernels.runtime.writes import writes
from te_dynamo.kernels.tiles.blocks import decode_e8m0


def gemm_block(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    a_two_d: bool,
    b_two_d: bool,
) -> torch.Tensor:
    """The module docstring's C, of dtype `out_dtype` (bfloat16, float16 or float32), on a CUDA device.

    a [M, K], b [N, K]: float8, contiguous, K a multiple of 16; not both e5m2, not both 2D. M may be symbolic.
    a_scale_inv, b_scale_inv: both float32 or both uint8 E8M0 codes, layouts as above. bias [N]: any floating dtype.
    Raises ValueError for anything else. The same input gives the same bits on every run.
    """
    check_block_operands(a, a_scale_inv, b, b_scale_inv, bias, out_dtype, a_two_d, b_two_d)
    scaling = "128x128" if a_two_d else "1x128"
    choice = choose_for(a, b, out_dtype=out_dtype, scaling=scaling, recorded=is_recording())
    if choice.specialized:
        c = torch.empty((a.shape[0], b.shape[0]), dtype=out_dtype, device=a.device)
        gemm_block_specialized_out(a, a_scale_inv, b, b_scale_inv, bias, b_two_d=b_two_d, out=c)
        return c
    if choice.kernel == "cublaslt" and a_scale_inv.dtype == torch.float32:
        return gemm_block_cublaslt(a, a_scale_inv, b, b_scale_inv, bias, out_dtype, a_two_d, b_two_d)
    return gemm_block_with_tile(choice.tile, a, a_scale_inv, b, b_scale_inv, bias, out_dtype, a_two_d, b_two_d)


def gemm_block_reference(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    a_two_d: bool,
    b_two_d: bool,
) -> torch.Tensor:
    """`gemm_block` in plain PyTorch on any device, products and sums in fp32."""
    check_block_operands(a, a_scale_inv, b, b_scale_inv, bias, out_dtype, a_two_d, b_two_d)
    k = a.shape[1]
    a_scales = scales_reference(a_scale_inv, a.shape[0], k, a_two_d)
    total = sum_reference(a, a_scales, b, scales_reference(b_scale_inv, b.shape[0], k, b_two_d))
    if bias is not None:
        total = total + bias.float()
    return total.to(out_dtype)


def sum_reference(a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor) -> torch.Tensor:
    """The sum over the blocks of a [M, K] and b [N, K], in fp32, with scales as `scales_reference` gives them."""
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float32, device=a.device)
    for block in range(blocks_of(a.shape[1], BLOCK)):
        columns = slice(block * BLOCK, (block + 1) * BLOCK)
        product = a[:, columns].float() @ b[:, columns].float().t()
        total += product * (a_scales[:, block, None] * b_scales[None, :, block])
    return total


def scales_reference(scale_inv: torch.Tensor, rows: int, k: int, two_d: bool) -> torch.Tensor:
    """The scale of every row and block of 128, fp32 [rows, ceil(K/128)], from any of the layouts."""
    blocks = blocks_of(k, BLOCK)
    if scale_inv.dtype == torch.uint8:
        codes = scale_inv[:rows, : 4 * blocks : 4].to(torch.int32)
        # 2^-127 is subnormal: its exponent field is 0 and its highest mantissa bit set.
        bits = torch.where(codes == 0, 0x00400000, codes << 23)
        return torch.where(codes == 255, 0x7FC00000, bits).view(torch.float32)
    if two_d:
        return scale_inv[:, :blocks].repeat_interleave(BLOCK, dim=0)[:rows]
    return scale_inv[:, :rows].t()


def check_block_operands(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    a_two_d: bool,
    b_two_d: bool,
) -> None:
    """Raises ValueError, saying what is wrong, for operands that the GEMM does not take."""
    check_operands(a, b, bias, out_dtype)
    if a_two_d and b_two_d:
        raise ValueError(
            f"te gemm_block: 128x128 x 128x128 blocks are not supported, for a {tuple(a.shape)} and b "
            f"{tuple(b.shape)}; quantize one operand in blocks of 1x128"
        )
    if a_scale_inv.dtype != b_scale_inv.dtype or a_scale_inv.dtype not in (torch.float32, torch.uint8):
        raise ValueError(
            "te gemm_block: scales must both be float32 or both be uint8 (E8M0), got "
            f"{a_scale_inv.dtype} and {b_scale_inv.dtype}"
        )
    for name, operand, scale_inv, two_d in (("a", a, a_scale_inv, a_two_d), ("b", b, b_scale_inv, b_two_d)):
        check_scale(name, operand, scale_inv, two_d)


def check_scale(name: str, operand: torch.Tensor, scale_inv: torch.Tensor, two_d: bool) -> None:
    if scale_inv.dtype == torch.uint8 and two_d:
        raise ValueError(f"te gemm_block: {name} has E8M0 scales, which are 1D, and {name}_two_d is set")
    if not scale_inv.is_contiguous():
        raise ValueError(f"te gemm_block: {name}_scale_inv must be contiguous")
    rows, k = operand.shape
    if not (isinstance(rows, int) and isinstance(k, int)):
        return  # a guard on a symbolic size would specialize the graph
    codes = scale_inv.dtype == torch.uint8
    expected = mxfp8.scale_shape(rows, k) if codes else layout.scale_shape(rows, k, two_d)
    if tuple(scale_inv.shape) != expected:
        kind = "E8M0" if codes else "128x128" if two_d else "1x128"
        raise ValueError(
            f"te gemm_block: expected {name}_scale_inv {list(expected)} for {name} {list(operand.shape)} in {kind} "
            f"blocks, got {list(scale_inv.shape)}"
        )


# --- launcher -----------------------------------------------------------------------------------------------


def gemm_block_with_tile(
    tile: Tile,
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    a_two_d: bool,
    b_two_d: bool,
) -> torch.Tensor:
    """`gemm_block` with a tile of the caller's choice; checks nothing."""
    m, k, n = a.shape[0], a.shape[1], b.shape[0]
    c = torch.empty((m, n), dtype=out_dtype, device=a.device)
    split = tile.split_k > 1
    target = torch.empty((tile.split_k, m, n), dtype=torch.float32, device=a.device) if split else c
    programs = gemm_multiprocessors(a.device) * tile.ctas_per_sm
    # A pointer that is never read stands in for a bias that is not there: torch wants every argument.
    bias_or_any = b_scale_inv if bias is None else bias
    arguments = (a, a_scale_inv, b, b_scale_inv, bias_or_any, target, m, n, k)
    options = block_kernel_options(tile, n, bias is not None, a_two_d, b_two_d)
    launch(gemm_block_kernel, (programs,), *arguments, **options)
    if split:
        add_parts(target, a_scale_inv, b_scale_inv, bias, c, scaled=False)
    return c


def block_kernel_options(
    tile: Tile, n: int | torch.SymInt, has_bias: bool, a_two_d: bool, b_two_d: bool
) -> dict[str, Any]:
    """The constant arguments and compile options of `gemm_block_kernel` for a tile and a width N."""
    return {
        "HAS_BIAS": has_bias and tile.split_k == 1,
        "A_TWO_D": a_two_d,
        "B_TWO_D": b_two_d,
        "HALVES": tile.halves,
        "SPLIT_K": tile.split_k,
        "DESCRIPTOR_STORE": tile.split_k == 1 and isinstance(n, int) and stores_by_descriptor(n),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "GROUP_M": tile.group_m,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


# --- kernel -------------------------------------------------------------------------------------------------


@writes("c")
@triton.jit
def gemm_block_kernel(
    a,
    a_scale_inv,
    b,
    b_scale_inv,
    bias,
    c,
    M,
    N,
    K,
    HAS_BIAS: tl.constexpr,
    A_TWO_D: tl.constexpr,
    B_TWO_D: tl.constexpr,
    HALVES: tl.constexpr,
    SPLIT_K: tl.constexpr,
    DESCRIPTOR_STORE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """C, or with SPLIT_K > 1 the fp32 sums of each part of K as c [SPLIT_K, M, N]."""
    # A tile leaves in two parts: its upper and its lower half with HALVES, its left and its right half otherwise.
    PART_M: tl.constexpr = BLOCK_M // 2 if HALVES else BLOCK_M
    PART_N: tl.constexpr = BLOCK_N if HALVES else BLOCK_N // 2
    a_desc = tl.make_tensor_descriptor(a, [M, K], [K, 1], [PART_M, 128])
    b_desc = tl.make_tensor_descriptor(b, [N, K], [K, 1], [BLOCK_N, 128])
    c_desc = tl.make_tensor_descriptor(c, [M, N], [N, 1], [PART_M, PART_N]) if DESCRIPTOR_STORE else None
    tl.assume(K > 0)
    all_blocks = tl.cdiv(K, 128)
    blocks = tl.cdiv(all_blocks, SPLIT_K)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)

    for index in tl.range(tl.program_id(0), tiles_m * tiles_n * SPLIT_K, tl.num_programs(0), flatten=True):
        row, column, part = tile_origin(index, tiles_m, tiles_n, SPLIT_K, BLOCK_M, BLOCK_N, GROUP_M)
        # A last part that reaches past K reads zeros: the descriptors' bounds.
        first = part * blocks
        if HALVES:
            one, two = accumulate_halves(
                *(a_desc, a_scale_inv, b_desc, b_scale_inv, row, column, first, blocks),
                *(all_blocks, M, 0, all_blocks, N),
                *(A_TWO_D, B_TWO_D, PART_M, BLOCK_N),
            )
        else:
            one, two = accumulate(
                *(a_desc, a_scale_inv, b_desc, b_scale_inv, row, column, first, blocks),
                *(all_blocks, M, 0, all_blocks, N),
                *(A_TWO_D, B_TWO_D, BLOCK_M, BLOCK_N),
            )
        # Computed only here: no register holds it through the loop.
        row_2 = row + (PART_M if HALVES else 0)
        column_2 = column + (0 if HALVES else PART_N)
        if HAS_BIAS:
            one += _load_bias(bias, column, N, PART_N)
            two += _load_bias(bias, column_2, N, PART_N)
        target = c + part.to(tl.int64) * M * N
        store_result(target, c_desc, one, row, column, M, N, DESCRIPTOR_STORE)
        store_result(target, c_desc, two, row_2, column_2, M, N, DESCRIPTOR_STORE)


@triton.jit
def accumulate(
    a_desc,
    a_scale_inv,
    b_desc,
    b_scale_inv,
    row,
    column,
    first,
    blocks,
    a_blocks,
    M,
    b_ahead,
    b_blocks,
    N,
    A_TWO_D: tl.constexpr,
    B_TWO_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The tile's sum as its left and its right half, so that its way out needs half the shared memory.

    It goes over `blocks` blocks of 128, from `first` on of the a_blocks of A, which has M rows, and from first + b_ahead on of the
    b_blocks of B, which has N.
    """
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in range(first, first + blocks):
        a_scale = _load_scales(a_scale_inv, row, block, a_blocks, M, BLOCK_M, A_TWO_D)
        b_scale = _load_scales(b_scale_inv, column, block + b_ahead, b_blocks, N, BLOCK_N, B_TWO_D)
        x = a_desc.load([row, block * 128])
        y = b_desc.load([column, (block + b_ahead) * 128])
        total = _add_scaled(tl.dot(x, y.T), a_scale, b_scale, total, A_TWO_D, B_TWO_D)
    return tl.split(tl.permute(tl.reshape(total, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))


@triton.jit
def accumulate_halves(
    a_desc,
    a_scale_inv,
    b_desc,
    b_scale_inv,
    row,
    column,
    first,
    blocks,
    a_blocks,
    M,
    b_ahead,
    b_blocks,
    N,
    A_TWO_D: tl.constexpr,
    B_TWO_D: tl.constexpr,
    HALF_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The sums of the tile's upper and lower half, one product after the other: terms of one half are all beside them."""
    upper = tl.zeros((HALF_M, BLOCK_N), tl.float32)
    lower = tl.zeros((HALF_M, BLOCK_N), tl.float32)
    nothing = tl.minimum(M, 0)  # 0, which the compiler does not know
    for block in range(first, first + blocks):
        upper_scale = _load_scales(a_scale_inv, row, block, a_blocks, M, HALF_M, A_TWO_D)
        lower_scale = _load_scales(a_scale_inv, row + HALF_M, block, a_blocks, M, HALF_M, A_TWO_D)
        b_scale = _load_scales(b_scale_inv, column, block + b_ahead, b_blocks, N, BLOCK_N, B_TWO_D)
        # Triton puts a barrier before the first use of what was loaded last; in this order it falls before
        # both products, and one warp group can add while the other multiplies.
        x_lower = a_desc.load([row + HALF_M, block * 128])
        x_upper = a_desc.load([row, block * 128])
        y = b_desc.load([column, (block + b_ahead) * 128])
        upper = _add_scaled(tl.dot(x_upper, y.T), upper_scale, b_scale, upper, A_TWO_D, B_TWO_D)
        # The zeros that the second product starts from are made of the first one's sum. Otherwise ptxas starts it before
        # the first one's terms are added, and two sets of terms beside two halves of sums do not fit in the registers.
        zeros = (upper.to(tl.int32, bitcast=True) & nothing).to(tl.float32, bitcast=True)
        lower = _add_scaled(tl.dot(x_lower, y.T, zeros), lower_scale, b_scale, lower, A_TWO_D, B_TWO_D)
    return upper, lower


@triton.jit
def _load_scales(scale_inv, index, block, blocks, SIZE, COUNT: tl.constexpr, TWO_D: tl.constexpr):
    """The scale of rows index : index + COUNT of an operand, [COUNT] or for TWO_D a scalar, for a block of K.

    Past the last row or block the last one's is read again: it scales zeros or what is not stored. In Triton a clamp
    takes fewer registers than a mask.
    """
    block = tl.minimum(block, blocks - 1)
    if TWO_D:
        stride = (blocks + 3) // 4 * 4
        value = tl.load(scale_inv + tl.minimum(index, SIZE - 1) // 128 * stride + block)
    else:
        rows = tl.minimum(index + tl.arange(0, COUNT), SIZE - 1)
        if scale_inv.dtype.element_ty == tl.uint8:
            value = tl.load(scale_inv + 4 * block + rows * (4 * blocks))
        else:
            value = tl.load(scale_inv + tl.cast(block, tl.int64) * ((SIZE + 3) // 4 * 4) + rows)
    return value


@triton.jit
def _add_scaled(terms, a_scale, b_scale, total, A_TWO_D: tl.constexpr, B_TWO_D: tl.constexpr):
    """total + terms * (a_scale * b_scale), one rounding for the scales' product and one for the rest."""
    if a_scale.dtype == tl.uint8:
        a_scale = decode_e8m0(a_scale)
        b_scale = decode_e8m0(b_scale)
    if A_TWO_D:
        scale = (a_scale * b_scale)[None, :]
    elif B_TWO_D:
        scale = (a_scale * b_scale)[:, None]
    else:
        scale = a_scale[:, None] * b_scale[None, :]
    return tl.fma(terms, tl.broadcast_to(scale, terms.shape), total)


@triton.jit
def _load_bias(bias, column, N, COUNT: tl.constexpr):
    """bias[column : column + COUNT] in fp32 as a row."""
    columns = column + tl.arange(0, COUNT)
    return tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
