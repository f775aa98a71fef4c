"""How Inductor's code calls the warp-specialized GEMM, which it cannot write a launch of: the kernel is in Gluon.

`lower` leaves a `te.gemm` that this kernel runs fastest in the graph. Inductor asks the lowering registered here for it, and
writes `extern_kernels.te_gemm(a, ..., out=buf3)`: a plain call, without the dispatcher, into a buffer that it has planned.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from te_dynamo.kernels.availability import kernels_available
from te_dynamo.kernels.gemm_specialized import gemm_specialized_out, runs_specialized
from te_dynamo.ops.gemm import gemm

__all__ = ["is_extern", "register"]

_NAME = "te_gemm"


def is_extern(node: torch.fx.Node) -> bool:
    """Whether a node of a graph for a device with kernels is a `te.gemm` that the specialized kernel runs fastest.

    Code in C++ cannot call it: under Inductor's cpp_wrapper every GEMM is a launch.
    """
    from torch._inductor import config

    if node.target is not gemm or config.cpp_wrapper:
        return False
    a, b = (operand.meta["val"] for operand in (node.args[0], node.args[2]) if isinstance(operand, torch.fx.Node))
    return runs_specialized(a, b, fast_accum=bool(node.args[6]))


@functools.cache
def register() -> None:
    """Tells Inductor; once a process, and also where its cache answers: the cached code calls by name."""
    from torch._inductor import ir
    from torch._inductor.lowering import fallback_handler, register_lowering
    from torch._inductor.select_algorithm import extern_kernels

    setattr(extern_kernels, _NAME, gemm_specialized_out)
    opaque = fallback_handler(gemm)

    @register_lowering(gemm, type_promotion_kind=None)
    def lowered(a: Any, a_scale_inv: Any, b: Any, b_scale_inv: Any, bias: Any, out_dtype: Any, fast_accum: Any) -> Any:
        if not kernels_available(a.get_device()).ok:
            return opaque(a, a_scale_inv, b, b_scale_inv, bias, out_dtype, fast_accum)
        operands = [x for x in (a, a_scale_inv, b, b_scale_inv, bias) if x is not None]
        inputs = [ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(x)) for x in operands]
        size = [a.get_size()[0], b.get_size()[0]]
        call = ir.ExternKernelOut(
            layout=ir.FixedLayout(a.get_device(), out_dtype, size),
            inputs=inputs,
            python_kernel_name=f"extern_kernels.{_NAME}",
            op_overload=gemm,
        )
        return ir.TensorBox.create(call)
