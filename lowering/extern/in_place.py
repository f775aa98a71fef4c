"""A call in Inductor's code that writes into the memory of its last tensor: `extern_kernels.te_gemm(a, ..., buf2, out=buf2)`.

Inductor plans a buffer for what an extern kernel writes, and knows of no call that returns its argument. It does know operations in
place, which the class here is one of: the readers of that tensor from before stay before the call, and later ones come after it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from te_dynamo.dialect.gemm import Gemm
from te_dynamo.dialect.memory import has_own_buffer
from te_dynamo.lowering.in_place import sum_fits_addend


def can_write_into_addend(node: Node) -> bool:
    """Whether te.gemm, a node of the graph that Inductor lowers, may write its result to its addend's buffer."""
    addend = Gemm.of(node).addend
    return addend is not None and has_own_buffer(addend) and sum_fits_addend(node)


def call_into_last(operands: Sequence[Any], keywords: dict[str, Any], function: str) -> None:
    """Has Inductor's code call `function(*operands, **keywords, out=operands[-1])`, operands being values of Inductor's."""
    _operation_in_place()(operands, keywords, function)


@functools.cache
def _operation_in_place() -> Any:
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    class CallIntoLast(ir.ExternKernel):
        """A call that writes its result into the last operand's memory. It has no buffer of its own, and its layout says so."""

        def __init__(self, operands: Sequence[Any], keywords: dict[str, Any], function: str) -> None:
            last = operands[-1]
            super().__init__(
                None,
                ir.NoneLayout(device=last.get_device()),
                self.unwrap_storage(operands),
                kwargs=keywords,
                python_kernel_name=function,
            )
            V.graph.mark_buffer_mutated(last.get_name())
            self.name = V.graph.register_buffer(self)
            V.graph.register_operation(self)

        def codegen(self, wrapper: Any) -> None:
            tensors = self.codegen_args()
            keywords = [f"{name}={value!r}" for name, value in self.kwargs.items()]
            arguments = ", ".join([*tensors, *keywords, f"out={tensors[-1]}"])
            wrapper.writeline(f"{self.get_kernel_name()}({arguments}){wrapper.ending}")

        def should_allocate(self) -> bool:
            return False

        def get_mutation_names(self) -> list[str]:
            return [self.input_name(len(self.inputs) - 1)]

        def get_unbacked_symbol_defs(self) -> Any:
            return torch.utils._ordered_set.OrderedSet()

    return CallIntoLast
