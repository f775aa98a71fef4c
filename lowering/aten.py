"""te operations as torch's own, for what leaves Python: `decompositions`, which ExportedProgram.run_decompositions takes.

An operation becomes its reference, so that quantized tensors have the reference's bits. Products:

    scales of tensors    aten._scaled_mm
    scales of rows       aten._scaled_mm of the codes in fp32, times the scales: it rounds once, as the reference does, with a bias too
    blocks, MXFP8, NVFP4 the codes dequantized in fp32, and one aten.mm

A sum of products has another order than the reference's: results agree within the rounding of fp32 sums. Without float8 products on the
device (`multiplies_fp8`) all are dequantized.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from te_dynamo.dialect.define import REFERENCES
from te_dynamo.dialect.gemm import Gemm
from te_dynamo.kernels.gemm.reference import dequantized, tensors_scale
from te_dynamo.kernels.gemm.request import Request, check


def decompositions() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """Operation -> what computes the same of torch's operations."""
    return {**REFERENCES, torch.ops.te.gemm.default: _gemm}


def multiplies_fp8(device: torch.device) -> bool:
    """Whether aten._scaled_mm multiplies float8 there: on a CPU, and on a GPU of compute capability 8.9 or newer."""
    return device.type == "cpu" or (device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9))


def _gemm(*args: Any) -> torch.Tensor:
    r = Gemm(*args).request()
    check(r)
    if r.stacking.along:
        return REFERENCES[torch.ops.te.gemm.default](*args)  # type: ignore[no-any-return]
    c = _product(r)
    if r.bias is not None:
        c = c + r.bias.float()
    c = c.to(r.out_dtype)
    return c if r.addend is None else c + r.addend


def _product(r: Request) -> torch.Tensor:
    """[M, N], fp32; of r's dtype where that rounds it once."""
    if r.scaling not in ("tensor", "row") or not multiplies_fp8(r.a.codes.device) or r.mnk[1] % 16:
        product = dequantized(r.a) @ dequantized(r.b).t()
        return product if r.a.amax is None else product * tensors_scale(r.a.amax, r.b.amax)
    by_tensor = r.scaling == "tensor"
    one = torch.ones(1, device=r.a.codes.device)
    a_scale, b_scale = (r.a.scale_inv, r.b.scale_inv) if by_tensor else (one, one)
    dtype = r.out_dtype if by_tensor and r.bias is None else torch.float32
    c = torch._scaled_mm(r.a.codes, r.b.codes.t(), a_scale, b_scale, out_dtype=dtype, use_fast_accum=r.fast)
    return c if by_tensor else c * r.a.scale_inv[:, None] * r.b.scale_inv
