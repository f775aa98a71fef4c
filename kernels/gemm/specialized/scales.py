"""Scales of 128 for kernels/gemm/specialized/product.py: fp32 rows of the ring's slots. Codes of E8M0 are written as such first.

That is 4 bytes for 128, a hundredth of the product's time.
"""

from __future__ import annotations

import torch

from te_dynamo.kernels.layouts import block as layout
from te_dynamo.kernels.runtime._gluon import gl, gluon, tma
from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.runtime.launch import launch
from te_dynamo.kernels.tiles.blocks import decode_e8m0

_DECODE_ROWS = 128
_DECODE_BLOCKS = 8


def decoded(codes: torch.Tensor, rows: int | torch.SymInt) -> torch.Tensor:
    """fp32 [blocks, rows^4] of E8M0 codes [rows^128, 4 * blocks], of which four are equal."""
    blocks = codes.shape[1] // 4
    scale_inv = torch.empty(
        layout.scale_shape(rows, blocks * layout.BLOCK, False), dtype=torch.float32, device=codes.device
    )
    grid = (triton.cdiv(rows, _DECODE_ROWS), triton.cdiv(blocks, _DECODE_BLOCKS))
    launch(decode_kernel, grid, codes, scale_inv, rows, blocks, ROWS=_DECODE_ROWS, BLOCKS=_DECODE_BLOCKS)
    return scale_inv


@triton.jit
def decode_kernel(codes, scale_inv, M, blocks, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """scale_inv [blocks, M^4] of codes [M^128, 4 * blocks]; the first of four is read."""
    stride = (M + 3) // 4 * 4
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)[None, :]
    inside = (row < stride) & (block < blocks)
    code = tl.load(codes + row.to(tl.int64) * (4 * blocks) + 4 * block, mask=inside, other=127)
    tl.store(scale_inv + block.to(tl.int64) * stride + row, decode_e8m0(code), mask=inside)


@gluon.jit
def make_scales(scale_inv, ROWS, K, STAGES: gl.constexpr, BLOCK: gl.constexpr):
    """What `copy` needs of scales [ceil(K/128), ROWS^4]. Past the last row it reads those of the next block of K, which
    scale zeros that are not stored."""
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    stride = (ROWS + 3) // 4 * 4
    desc = tma.make_tensor_descriptor(scale_inv, [gl.cdiv(K, 128) * stride], [1], [BLOCK], layout)
    return desc, stride, gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], layout)
