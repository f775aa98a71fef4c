"""C[M, N] = A[M, K] @ B[N, K]^T of operands in NVFP4 (kernels/quantize/nvfp4.py).

Tensor cores that apply the scales of blocks themselves multiply the codes (kernels/gemm/block_scales.py). Elsewhere the GEMM is emulated:
operands times their block scales are exact in bf16, torch's own GEMM multiplies those, and one launch applies the tensors' scales, adds
the bias and rounds. A large product is made in parts, so that little is alive in bf16 and fp32 at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from te_dynamo.kernels.gemm.block_scales import multiply_scaled
from te_dynamo.kernels.layouts.sizes import Size, round_up
from te_dynamo.kernels.layouts.tiled_scales import plain_scales, swizzle_scales
from te_dynamo.kernels.quantize.nvfp4 import TENSOR_MAX, dequantize_nvfp4, dequantize_nvfp4_reference
from te_dynamo.kernels.quantize.nvfp4_kernels import nvfp4_epilogue_kernel
from te_dynamo.kernels.runtime._triton import triton
from te_dynamo.kernels.runtime.launch import launch
from te_dynamo.kernels.runtime.target import target_of

_OUT = (torch.bfloat16, torch.float16, torch.float32)

LEAST_BYTES = 2**25
"""A part of an emulated product has as many in fp32, so that its GEMM fills a GPU."""

MOST_PARTS = 4
"""Each has three launches, which have to be compiled too."""


def gemm_nvfp4_reference(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    a_amax: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    b_amax: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """`gemm_nvfp4` in plain PyTorch on any device: products and sums in fp32."""
    check_operands(a, a_scale_inv, b, b_scale_inv, bias, out_dtype)
    width = 2 * a.shape[1]
    product = dequantize_nvfp4_reference(a, a_scale_inv, None, width, torch.float32)
    product = product @ dequantize_nvfp4_reference(b, b_scale_inv, None, width, torch.float32).t()
    value = product * gemm_alpha(a_amax, b_amax)
    if bias is not None:
        value = value + bias.to(torch.float32)
    return value.to(out_dtype)


def gemm_alpha(a_amax: torch.Tensor, b_amax: torch.Tensor) -> torch.Tensor:
    """amaxA * amaxB / 2688^2, fp32 [1], in an order that overflows only with the result."""
    full = torch.full_like(a_amax, TENSOR_MAX)
    return (a_amax / full) * (b_amax / full)


def check_operands(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> None:
    """Raises ValueError, saying what is wrong, for operands that the GEMM does not take."""
    if out_dtype not in _OUT:
        raise ValueError(f"te gemm_nvfp4: out_dtype must be bfloat16, float16 or float32, got {out_dtype}")
    if any(tensor.dtype != torch.uint8 for tensor in (a, a_scale_inv, b, b_scale_inv)) or a.dim() != 2 or b.dim() != 2:
        raise ValueError("te gemm_nvfp4: data and scales are uint8 tensors, as quantize_nvfp4 returns them")
    if a.shape[1] != b.shape[1]:
        raise ValueError(
            f"te gemm_nvfp4: expected a [M, K/2] and b [N, K/2], got {tuple(a.shape)} and {tuple(b.shape)}"
        )
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != b.shape[0]):
        raise ValueError(f"te gemm_nvfp4: expected bias [{b.shape[0]}], got {tuple(bias.shape)}")


def gemm_nvfp4(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    a_amax: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    b_amax: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """C[M, N] = round(sum_k (A * scale_a)[M, k] (B * scale_b)[N, k] * (amaxA * amaxB / 2688^2) + bias), on a CUDA device.

    a [M, K/2] and b [N, K/2] with their scales and amaxes as `quantize_nvfp4` returns one usage; bias [N] of any
    floating dtype, or None. Tensor cores that know block scales multiply the codes, of which plain scales are swizzled first. Elsewhere
    operands times their block scales, exact in bfloat16, are multiplied. Products are summed in fp32; alpha, bias and the one
    rounding follow. Raises ValueError for other operands.
    """
    check_operands(a, a_scale_inv, b, b_scale_inv, bias, out_dtype)
    if target_of(a.device).has_block_scales:
        operands = (a, swizzle_scales(a_scale_inv), a_amax), (b, swizzle_scales(b_scale_inv), b_amax)
        return multiply_scaled(*operands, bias, out_dtype, False, False)
    c = torch.empty(a.shape[0], b.shape[0], dtype=out_dtype, device=a.device)
    scaled = (a, plain_scales(a_scale_inv)), (b, plain_scales(b_scale_inv))
    for row, column, product in _products(*scaled):
        rows, columns = product.shape
        launch(
            nvfp4_epilogue_kernel,
            (triton.cdiv(rows, 16) * triton.cdiv(columns, 256),),
            product=product,
            a_amax=a_amax,
            b_amax=b_amax,
            bias=a_amax if bias is None else bias,
            c=c,
            first_row=row,
            first_column=column,
            row_stride=b.shape[0],
            M=rows,
            N=columns,
            HAS_BIAS=bias is not None,
            BLOCK_M=16,
            BLOCK_N=256,
            num_warps=4,
        )
    return c


def _products(
    a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(first row, first column, fp32) of each part of the product. The smaller operand is held whole in bf16, the other in parts."""
    sizes = a[0].shape[0], b[0].shape[0]
    by_rows = not all(isinstance(size, int) for size in sizes) or sizes[0] >= sizes[1]
    large, whole = (a, _in_bf16(*b)) if by_rows else (b, _in_bf16(*a))
    rows = _rows_of_a_part(*(sizes if by_rows else sizes[::-1]))
    parts = zip(*(buffer.split(rows) for buffer in large), strict=True) if rows else [large]
    for index, part in enumerate(parts):
        left, right = (_in_bf16(*part), whole) if by_rows else (whole, _in_bf16(*part))
        product = torch.mm(left, right.t(), out_dtype=torch.float32)
        yield (index * rows, 0, product) if by_rows else (0, index * rows, product)


def _in_bf16(data: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    return dequantize_nvfp4(data, scale_inv, None, 2 * data.shape[1], torch.bfloat16)


def _rows_of_a_part(rows: Size, columns: Size) -> int:
    """Rows of a product's larger operand that are multiplied at once, whole tiles of 128; 0 for all."""
    known = isinstance(rows, int) and isinstance(columns, int)
    count = min(4 * rows * columns // LEAST_BYTES, MOST_PARTS) if known else 1
    return round_up(triton.cdiv(rows, count), 128) if count > 1 else 0
