"""Products of MXFP8 and NVFP4 where tensor cores apply no scales of blocks: torch's own GEMM multiplies them in bf16.

Operands of MXFP8, and of NVFP4 times their block scales, are exact in bf16. Of NVFP4 one launch applies the tensors' scales, adds the bias and
rounds; a large product is made in parts, so that little is alive in bf16 and fp32 at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from te_dynamo.kernels.gemm.request import Operand, Request
from te_dynamo.kernels.layouts.sizes import Size, round_up
from te_dynamo.kernels.layouts.tiled_scales import plain_scales
from te_dynamo.kernels.quantize.mxfp8 import dequantize_mxfp8
from te_dynamo.kernels.quantize.nvfp4 import dequantize_nvfp4
from te_dynamo.kernels.quantize.nvfp4_kernels import nvfp4_epilogue_kernel
from te_dynamo.kernels.runtime._triton import triton
from te_dynamo.kernels.runtime.launch import launch

LEAST_BYTES = 2**25
"""A part of an emulated product has as many in fp32, so that its GEMM fills a GPU."""

MOST_PARTS = 4
"""Each has three launches, which have to be compiled too."""


def multiply_mxfp8(r: Request) -> torch.Tensor:
    """C of a request in MXFP8, on a CUDA device."""
    value_a, value_b = (dequantize_mxfp8(x.codes, x.scale_inv, x.turned, torch.bfloat16) for x in (r.a, r.b))
    left, right = value_a.t() if r.a.turned else value_a, value_b if r.b.turned else value_b.t()
    if r.bias is None and r.out_dtype == torch.bfloat16:
        return torch.mm(left, right)
    product = torch.mm(left, right, out_dtype=torch.float32)
    return (product if r.bias is None else product + r.bias.float()).to(r.out_dtype)


def multiply_nvfp4(r: Request) -> torch.Tensor:
    """C of a request in NVFP4, on a CUDA device."""
    c, bias, a_amax = r.empty(), r.bias, r.a.amax
    for row, column, product in _products(_plain(r.a), _plain(r.b)):
        rows, columns = product.shape
        launch(
            nvfp4_epilogue_kernel,
            (triton.cdiv(rows, 16) * triton.cdiv(columns, 256),),
            product=product,
            a_amax=a_amax,
            b_amax=r.b.amax,
            bias=a_amax if bias is None else bias,
            c=c,
            first_row=row,
            first_column=column,
            row_stride=c.shape[1],
            M=rows,
            N=columns,
            HAS_BIAS=bias is not None,
            BLOCK_M=16,
            BLOCK_N=256,
            num_warps=4,
        )
    return c


def _plain(x: Operand) -> tuple[torch.Tensor, torch.Tensor]:
    return x.codes, plain_scales(x.scale_inv)


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
