"""Puts torch's privates in place: what is wrapped, and one function that does it.

te_dynamo/torch_private/table.py says what for. A wrapper acts inside `compiling_ours` alone, which the backend enters around its calls
of Inductor (but for one `everywhere`): other models of the process go through torch's own functions.
"""

from __future__ import annotations

from typing import Any

from te_dynamo.lowering.inductor.cpp_scratch import cpp_scratch
from te_dynamo.lowering.inductor.define_kernel import define_kernel
from te_dynamo.lowering.inductor.fake_values import incremental_update
from te_dynamo.lowering.inductor.kept_constants import can_inline_constant
from te_dynamo.lowering.inductor.launch_buffers import allocate_late, operands_once
from te_dynamo.lowering.inductor.launchers import make_launcher
from te_dynamo.lowering.inductor.mutation import analyse
from te_dynamo.lowering.inductor.ptxas import use_torchs_ptxas
from te_dynamo.lowering.inductor.workers import submit
from te_dynamo.torch_private.private import warn_skipped
from te_dynamo.torch_private.recompile_limit import recompilation_reasons
from te_dynamo.torch_private.table import MUTATION, PTXAS, RECOMPILATION, STATIC_LAUNCH, TABLE, WORKERS

WRAPPERS = {
    MUTATION.name: analyse,
    "torch._inductor.fx_utils.FakeTensorUpdater.incremental_update": incremental_update,
    "torch._inductor.codegen.wrapper.PythonWrapperCodegen.define_kernel": define_kernel,
    "torch._inductor.memory.reorder_for_peak_memory": allocate_late,
    "torch._inductor.graph.constrain_to_fx_strides": operands_once,
    "torch._inductor.graph.GraphLowering.can_inline_constant": can_inline_constant,
    WORKERS.name: submit,
    RECOMPILATION.name: recompilation_reasons,
    "torch._inductor.runtime.triton_heuristics.TritonCompileResult.make_launcher": make_launcher,
    "torch._inductor.codegen.cuda.device_op_overrides.CUDADeviceOpOverrides.cpp_scratch": cpp_scratch,
}
"""Name in the table -> what is called in its place, with torch's own function before its arguments."""


def install() -> None:
    """Puts the wrappers in place; a second call changes nothing.

    What is gone and is done without is left out, with one warning. Raises UnsupportedError where another name of the table is gone.
    """
    for private in (private for private in TABLE if private.needed):
        gone = private.missing()
        if gone and private.gain:
            warn_skipped(gone, private.gain)
        else:
            private.require()
            if (wrapper := WRAPPERS.get(private.name)) is not None:
                private.wrap(wrapper)
    if PTXAS.active:
        use_torchs_ptxas()


def inductor_options(ours: bool) -> dict[str, Any]:
    """Inductor's options where the user gives none: what goes with what is installed, and, in a graph with operations of `ours`, no freed
    buffer is kept for a later one.

    Inductor counts a result that takes its operand's place beside it, so it finds room that is not there: a Llama-70B block with scales
    of blocks took 1.12 times bf16's memory. The allocator has a freed buffer for whoever asks next.
    """
    return {**({"allow_buffer_reuse": False} if ours else {}), **({STATIC_LAUNCH: True} if WORKERS.active else {})}
