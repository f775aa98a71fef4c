"""How Inductor's code calls the warp-specialized GEMMs, which it cannot write launches of: their kernels are in Gluon.

`lower` leaves a GEMM that such a kernel runs fastest in the graph. Inductor asks the lowering registered here for it, and
writes `extern_kernels.te_gemm(a, ..., name='layers.0.up te_gemm', out=buf3)`: a plain call, without the dispatcher, into a buffer that it has planned.
Of several results none is planned: the function allocates and returns them. A sum may be written to its addend
(lowering/extern/in_place.py).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils._pytree import tree_map_only

from te_dynamo.dialect.fakes import fake_mode_of
from te_dynamo.dialect.gemm import ARGUMENTS, Gemm, gemm, gemm_gated, grouped_gemm, request_of, values_of
from te_dynamo.kernels.gemm.multiply import choice_of, is_aligned
from te_dynamo.kernels.gemm.specialized.gated import gemm_gated_specialized
from te_dynamo.kernels.gemm.specialized.grouped import columns_specialized_out
from te_dynamo.kernels.gemm.specialized.product import gemm_specialized_out
from te_dynamo.kernels.gemm.tiles import SPECIALIZED_SMALL
from te_dynamo.kernels.runtime import availability
from te_dynamo.kernels.runtime.margin import current_sm_margin, sm_margin
from te_dynamo.lowering.extern.in_place import call_into_last, can_write_into_addend
from te_dynamo.lowering.inductor.compile_ahead import compile_ahead
from te_dynamo.torch_private.tracing import named_in_profiles
from te_dynamo.user_code import clean_path


@dataclasses.dataclass(frozen=True)
class _Extern:
    """How Inductor's code calls an operation.

    name:     of the function in that code.
    call:     the function: (*tensors, **keywords, out=...).
    tensors:  the operation's arguments -> the tensors that the function reads; None is left out.
    keywords: the operation's arguments -> the function's keywords.
    epilogue: what the kernel computes beside C, as `choose_for` names it.
    planned:  whether the result is one tensor, written to `out`. Else there is no `out`: the function returns the operation's several results.
    """

    name: str
    call: Callable[..., Any]
    tensors: Callable[[Any], tuple[Any, ...]]
    keywords: Callable[[Any], dict[str, Any]]
    epilogue: str = "none"
    planned: bool = True


def _gemm_out(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    *bias_and_addend: torch.Tensor,
    adds: bool = False,
    **keywords: Any,
) -> None:
    """te.gemm, written to out [M, N]; with `adds` the last of the tensors is an addend, which may be out."""
    bias, addend = bias_and_addend[: len(bias_and_addend) - adds], bias_and_addend[-1] if adds else None
    gemm_specialized_out(a, a_scale_inv, b, b_scale_inv, bias[0] if bias else None, addend, **keywords)


def _of_gemm(x: Gemm) -> dict[str, Any]:
    request = x.request()
    said = {
        "scaling": "" if request.scaling == "tensor" else request.scaling,
        "along": request.borders.along,
        "segments": request.borders.segments,
        "adds": x.addend is not None,
        "small": choice_of(request).tile in SPECIALIZED_SMALL,
    }
    return {"fast": x.fast_accum} | {name: value for name, value in said.items() if value}


_EXTERNS = {
    gemm: _Extern("te_gemm", _gemm_out, lambda x: (*x.a, *x.b, x.bias, x.addend), _of_gemm),
    gemm_gated: _Extern(
        "te_gemm_gated",
        gemm_gated_specialized,
        lambda x: (*x.a, *x.b),
        lambda x: {"fast": x.fast_accum, "gate": x.gate, "kind": x.kind},
        epilogue="gated",
        planned=False,
    ),
    grouped_gemm: _Extern(
        "te_grouped_gemm",
        columns_specialized_out,
        lambda x: (*x.a, *x.b, x.offs),
        lambda x: {"fast": x.fast_accum} | ({} if x.a_quantizer.one_scale else {"scaling": x.a_quantizer.scaling()}),
    ),
}


def is_extern(node: torch.fx.Node) -> bool:
    """Whether a node of a graph for a device with kernels is a GEMM that a specialized kernel runs fastest.

    Code in C++ cannot call it: under Inductor's cpp_wrapper every GEMM is a launch.
    """
    from torch._inductor import config

    if node.target not in _EXTERNS or config.cpp_wrapper:
        return False
    request = request_of(node)
    if request.addend is not None and not is_aligned(request.addend):
        return False
    return choice_of(request, _EXTERNS[node.target].epilogue).specialized


@functools.cache
def register() -> None:
    """Tells Inductor; once a process, and also where its cache answers: the cached code calls by name."""
    for operation, extern in _EXTERNS.items():
        _register(operation, extern)


def _register(operation: torch._ops.OpOverload, extern: _Extern) -> None:
    from torch._inductor import ir
    from torch._inductor.lowering import fallback_handler, register_lowering
    from torch._inductor.select_algorithm import extern_kernels
    from torch._inductor.virtualized import V

    setattr(extern_kernels, extern.name, named_in_profiles(_with_margin(extern.call)))
    opaque = fallback_handler(operation)

    @register_lowering(operation, type_promotion_kind=None)
    def lowered(*arguments: Any) -> Any:
        asked, node = ARGUMENTS[operation](*arguments), V.graph.current_node
        operands = [x for x in extern.tensors(asked) if x is not None]
        device = operands[0].get_device()
        if not availability.kernels_available(device).ok:
            return opaque(*tree_map_only(ir.TensorBox, ir.ExternKernel.require_contiguous, arguments))
        inputs = [ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(x)) for x in operands]
        _compile_kernel_of(node, extern)
        keywords, function = extern.keywords(values_of(node)), f"extern_kernels.{extern.name}"
        keywords["name"] = _name_in_profiles(node, extern)
        if current_sm_margin():
            keywords["margin"] = current_sm_margin()
        adds = keywords.get("adds", False)
        its_own = inputs[-1].get_name() == operands[-1].get_name()  # no copy of it, of other strides
        if adds and its_own and can_write_into_addend(node):
            call_into_last(inputs, keywords, function)
            return operands[-1]
        call: dict[str, Any] = {
            "inputs": inputs,
            "kwargs": keywords,
            "python_kernel_name": function,
            "op_overload": operation,
        }
        if extern.planned:
            layout = ir.FallbackKernel.tensor_to_layout(node.meta["val"])
            return ir.TensorBox.create(ir.ExternKernelOut(layout=layout, **call))
        results = ir.ExternKernelAlloc(layout=ir.MultiOutputLayout(device=device), **call)
        layouts = [ir.FallbackKernel.tensor_to_layout(value) for value in node.meta["val"]]
        return tuple(
            ir.TensorBox.create(ir.MultiOutput(layout, results, [(tuple, i)], skip_size_stride_alignment_checks=True))
            for i, layout in enumerate(layouts)
        )


def _with_margin(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` with one more keyword: the multiprocessors that it leaves to other kernels."""

    @functools.wraps(call)
    def called(*args: Any, margin: int = 0, **keywords: Any) -> Any:
        if not margin:
            return call(*args, **keywords)
        with sm_margin(margin):
            return call(*args, **keywords)

    return called


def _name_in_profiles(node: torch.fx.Node, extern: _Extern) -> str:
    """ "layers.0.up te_gemm": the module whose linear the node is of, if torch knows it; of a stack that of its first."""
    forward, backward = (node.meta.get(key) for key in ("nn_module_stack", "fwd_nn_module_stack"))
    stack = forward or backward or {"": ("", None)}
    path = clean_path(next(reversed(stack.values()))[0])
    stacked = node.target is gemm_gated or (node.target is gemm and bool(Gemm.of(node).along))
    others = " and others" if path and stacked else ""
    return f"{path}{others} {extern.name}{'' if forward or not backward else ' backward'}".strip()


def _compile_kernel_of(node: torch.fx.Node, extern: _Extern) -> None:
    """Ahead of the call, of an operation's node, whose values are fakes."""
    asked = values_of(node)
    tensors = [x for x in extern.tensors(asked) if x is not None]
    keywords = extern.keywords(asked)
    with fake_mode_of(tensors), disable_proxy_modes_tracing():
        if extern.planned:
            keywords["out"] = torch.empty_like(node.meta["val"])
        compile_ahead(extern.call, tensors, **keywords)
