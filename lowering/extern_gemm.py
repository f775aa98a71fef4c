"""How Inductor's code calls the warp-specialized GEMM, which it cannot write a launch of: the kernel is in Gluon.

`lower` leaves a `te.gemm` that this kernel runs fastest in the graph. Inductor asks the lowering registered here for it, and
writes `extern_kernels.te_gemm(a, ..., out=buf3)`: a plain call, without the dispatcher, into a buffer that it has planned.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from te_dynamo.kernels.availability import kernels_available
from te_dynamo.kernels.gemm_specialized import (
    gemm_specialized_out,
    runs_specialized,
    stacked_runs_specialized,
    stacked_specialized_out,
)
from te_dynamo.ops.gemm import gemm
from te_dynamo.ops.stacked import gemm_stacked

__all__ = ["is_extern", "register"]

_NAME = "te_gemm"
_STACKED_NAME = "te_gemm_stacked"


def is_extern(node: torch.fx.Node) -> bool:
    """Whether a node of a graph for a device with kernels is a `te.gemm`, or one of stacked operands, that the specialized kernel
    runs fastest.

    Code in C++ cannot call it: under Inductor's cpp_wrapper every GEMM is a launch.
    """
    from torch._inductor import config

    if node.target not in (gemm, gemm_stacked) or config.cpp_wrapper:
        return False
    a, b = (operand.meta["val"] for operand in (node.args[0], node.args[2]) if isinstance(operand, torch.fx.Node))
    if node.target is gemm:
        return runs_specialized(a, b, fast_accum=bool(node.args[6]))
    return stacked_runs_specialized(a, b, fast_accum=bool(node.args[5]), along=str(node.args[6]))


@functools.cache
def register() -> None:
    """Tells Inductor; once a process, and also where its cache answers: the cached code calls by name."""
    from torch._inductor import ir
    from torch._inductor.lowering import fallback_handler, register_lowering
    from torch._inductor.select_algorithm import extern_kernels

    def call(op: Any, name: str, out_dtype: Any, operands: list[Any], constants: tuple[Any, ...] = ()) -> Any:
        inputs = [ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(x)) for x in operands]
        a, b = operands[0], operands[2]
        kernel = ir.ExternKernelOut(
            layout=ir.FixedLayout(a.get_device(), out_dtype, [a.get_size()[0], b.get_size()[0]]),
            inputs=inputs,
            constant_args=constants,
            python_kernel_name=f"extern_kernels.{name}",
            op_overload=op,
        )
        return ir.TensorBox.create(kernel)

    setattr(extern_kernels, _NAME, gemm_specialized_out)
    setattr(extern_kernels, _STACKED_NAME, stacked_specialized_out)
    opaque, opaque_stacked = fallback_handler(gemm), fallback_handler(gemm_stacked)

    @register_lowering(gemm, type_promotion_kind=None)
    def lowered(a: Any, a_scale_inv: Any, b: Any, b_scale_inv: Any, bias: Any, out_dtype: Any, fast_accum: Any) -> Any:
        if not kernels_available(a.get_device()).ok:
            return opaque(a, a_scale_inv, b, b_scale_inv, bias, out_dtype, fast_accum)
        operands = [x for x in (a, a_scale_inv, b, b_scale_inv, bias) if x is not None]
        return call(gemm, _NAME, out_dtype, operands)

    @register_lowering(gemm_stacked, type_promotion_kind=None)
    def lowered_stacked(
        a: Any, a_scale_inv: Any, b: Any, b_scale_inv: Any, out_dtype: Any, fast_accum: Any, along: Any, segments: Any
    ) -> Any:
        if not kernels_available(a.get_device()).ok:
            return opaque_stacked(a, a_scale_inv, b, b_scale_inv, out_dtype, fast_accum, along, segments)
        constants = (bool(fast_accum), str(along), tuple(segments))
        return call(gemm_stacked, _STACKED_NAME, out_dtype, [a, a_scale_inv, b, b_scale_inv], constants)
