"""How Inductor's code calls the warp-specialized GEMMs, which it cannot write launches of: their kernels are in Gluon.

`lower` leaves a GEMM that such a kernel runs fastest in the graph. Inductor asks the lowering registered here for it, and
writes `extern_kernels.te_gemm(a, ..., name='layers.0.up te_gemm', out=buf3)`: a plain call, without the dispatcher, into a buffer that it has planned.
Of several results none is planned: the function allocates and returns them. te.gemm_add may write to its addend
(lowering/extern/in_place.py).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from te_dynamo.dialect.fakes import fake_mode_of
from te_dynamo.dialect.gemm import blocks, gemm, gemm_add, gemm_block, gemm_gated
from te_dynamo.dialect.grouped import gemm_grouped_columns
from te_dynamo.dialect.stacked import gemm_stacked
from te_dynamo.kernels.gemm.choose import Choice, Stacking, choose_for
from te_dynamo.kernels.gemm.multiply import is_aligned
from te_dynamo.kernels.gemm.specialized.gated import gemm_gated_specialized
from te_dynamo.kernels.gemm.specialized.grouped import columns_specialized_out
from te_dynamo.kernels.gemm.specialized.product import gemm_specialized_out
from te_dynamo.kernels.runtime import availability
from te_dynamo.kernels.runtime.margin import current_sm_margin, sm_margin
from te_dynamo.lowering.extern.in_place import call_into_last, can_write_into_addend
from te_dynamo.lowering.inductor.compile_ahead import compile_ahead
from te_dynamo.torch_private.tracing import named_in_profiles
from te_dynamo.user_code import clean_path


@dataclasses.dataclass(frozen=True)
class _Extern:
    """What runs an operation whose arguments are (a, a_scale_inv, b, b_scale_inv, [bias or offs, [addend,]] [out_dtype,] *flags).

    name:     of the function in Inductor's code.
    call:     the function: (a, a_scale_inv, b, b_scale_inv, bias or offs?, addend?, **keywords, out=...).
    choose:   of (a, b, [offs or addend,] *flags): what runs it, this function or a launch.
    keywords: of (*flags): what it is told of them.
    tensors:  how many arguments come first. Of six the last is an addend, which `out` may be.
    grouped:  whether the last of them is offs [G]: C is [G, N, K], of a [N, M] and b [K, M].
    planned:  whether the result is one tensor of out_dtype, written to `out`. Else there is neither: the function returns
              the operation's several results.
    """

    name: str
    call: Callable[..., None]
    choose: Callable[..., Choice]
    keywords: Callable[..., dict[str, Any]]
    tensors: int = 5
    grouped: bool = False
    planned: bool = True

    @property
    def adds(self) -> bool:
        """Whether there is an addend."""
        return self.tensors == 6

    def flags(self, arguments: Sequence[Any]) -> Sequence[Any]:
        """Those of an operation's arguments."""
        return arguments[self.tensors + self.planned :]


def _gemm_add_out(
    a: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    *bias_and_addend: torch.Tensor,
    fast: bool,
    out: torch.Tensor,
) -> None:
    """te.gemm_add, written to out [M, N]; a bias, if any, and the addend, which may be out."""
    *bias, addend = bias_and_addend
    gemm_specialized_out(a, a_scale_inv, b, b_scale_inv, *bias, fast=fast, addend=addend, out=out)


_EXTERNS = {
    gemm: _Extern("te_gemm", gemm_specialized_out, choose_for, lambda fast_accum: {"fast": fast_accum}),
    gemm_add: _Extern(
        "te_gemm_add",
        _gemm_add_out,
        lambda a, b, addend, fast_accum: choose_for(
            a, b, fast_accum, addend.dtype, epilogue="add", recorded=not is_aligned(addend)
        ),
        lambda fast_accum: {"fast": fast_accum},
        tensors=6,
    ),
    gemm_block: _Extern(
        "te_gemm_block",
        gemm_specialized_out,
        lambda a, b, a_two_d, b_two_d: choose_for(a, b, scaling="128x128" if a_two_d else "1x128"),
        lambda a_two_d, b_two_d: {"scaling": f"1x128 {blocks(b_two_d)}"},
    ),
    gemm_stacked: _Extern(
        "te_gemm_stacked",
        gemm_specialized_out,
        lambda a, b, fast_accum, along, segments: choose_for(
            a, b, fast_accum, stacking=Stacking(along, tuple(segments))
        ),
        lambda fast_accum, along, segments: {"fast": fast_accum, "along": along, "segments": tuple(segments)},
    ),
    gemm_gated: _Extern(
        "te_gemm_gated",
        gemm_gated_specialized,
        lambda a, b, fast_accum, gate, kind: choose_for(
            a, b, fast_accum, epilogue="gated", stacking=Stacking("N", 2 * (b.shape[0] // 2,))
        ),
        lambda fast_accum, gate, kind: {"fast": fast_accum, "gate": gate, "kind": kind},
        tensors=4,
        planned=False,
    ),
    gemm_grouped_columns: _Extern(
        "te_gemm_grouped_columns",
        columns_specialized_out,
        lambda a, b, offs, fast_accum: choose_for(a, b, fast_accum, k_groups=offs.shape[0]),
        lambda fast_accum: {"fast": fast_accum},
        grouped=True,
    ),
}


def is_extern(node: torch.fx.Node) -> bool:
    """Whether a node of a graph for a device with kernels is a GEMM that a specialized kernel runs fastest.

    Code in C++ cannot call it: under Inductor's cpp_wrapper every GEMM is a launch.
    """
    from torch._inductor import config

    if node.target not in _EXTERNS or config.cpp_wrapper:
        return False
    extern = _EXTERNS[node.target]
    operands = [node.args[i] for i in (0, 2, *([4] if extern.grouped else []), *([5] if extern.adds else []))]
    values = [operand.meta["val"] for operand in operands if isinstance(operand, torch.fx.Node)]
    return extern.choose(*values, *extern.flags(node.args)).specialized


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
        a, tensors = arguments[0], arguments[: extern.tensors]
        given = [x and ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(x)) for x in tensors]
        if not availability.kernels_available(a.get_device()).ok:
            return opaque(*given, *arguments[extern.tensors :])
        _compile_kernel_of(V.graph.current_node, extern)
        operands, inputs = ([x for x in each if x is not None] for each in (tensors, given))
        keywords, function = extern.keywords(*extern.flags(arguments)), f"extern_kernels.{extern.name}"
        keywords["name"] = _name_in_profiles(V.graph.current_node, extern)
        if current_sm_margin():
            keywords["margin"] = current_sm_margin()
        its_own = not extern.adds or inputs[-1].get_name() == operands[-1].get_name()  # no copy of it, of other strides
        if extern.adds and its_own and can_write_into_addend(V.graph.current_node):
            call_into_last(inputs, keywords, function)
            return operands[-1]
        call: dict[str, Any] = {
            "inputs": inputs,
            "kwargs": keywords,
            "python_kernel_name": function,
            "op_overload": operation,
        }
        if extern.planned:
            size = [operands[i].get_size()[0] for i in ((4, 0, 2) if extern.grouped else (0, 2))]
            layout = ir.FixedLayout(a.get_device(), arguments[extern.tensors], size)
            return ir.TensorBox.create(ir.ExternKernelOut(layout=layout, **call))
        results = ir.ExternKernelAlloc(layout=ir.MultiOutputLayout(device=a.get_device()), **call)
        layouts = [ir.FallbackKernel.tensor_to_layout(value) for value in V.graph.current_node.meta["val"]]
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
    others = " and others" if path and node.target in (gemm_stacked, gemm_gated) else ""
    return f"{path}{others} {extern.name}{'' if forward or not backward else ' backward'}".strip()


def _compile_kernel_of(node: torch.fx.Node, extern: _Extern) -> None:
    """Ahead of the call, of an operation's node, whose values are fakes."""
    tensors = [x.meta["val"] for x in node.args[: extern.tensors] if isinstance(x, torch.fx.Node)]
    keywords = extern.keywords(*extern.flags(node.args))
    with fake_mode_of(tensors), disable_proxy_modes_tracing():
        if extern.planned:
            keywords["out"] = torch.empty_like(node.meta["val"])
        compile_ahead(extern.call, tensors, **keywords)
