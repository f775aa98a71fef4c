"""The door to torch's privates: one table of what is wrapped or used, and one function that puts it in place.

To add one: a line in TABLE, its wrapper in a file of this folder. A wrapper acts inside `compiling_ours` alone, which the backend
enters around its calls of Inductor (but for one `everywhere`): other models of the process go through torch's own functions.
"""

from __future__ import annotations

from typing import Any

import torch

from te_dynamo._compat import mutation_analysis_name
from te_dynamo.errors import UnsupportedError
from te_dynamo.lowering.inductor.cpp_scratch import cpp_scratch
from te_dynamo.lowering.inductor.define_kernel import define_kernel
from te_dynamo.lowering.inductor.fake_values import incremental_update
from te_dynamo.lowering.inductor.launch_buffers import allocate_late, operands_once
from te_dynamo.lowering.inductor.launchers import make_launcher
from te_dynamo.lowering.inductor.mutation import analyse
from te_dynamo.lowering.inductor.private import Private, warn_skipped
from te_dynamo.lowering.inductor.ptxas import use_torchs_ptxas
from te_dynamo.lowering.inductor.recompile_limit import recompilation_reasons
from te_dynamo.lowering.inductor.tracing import ARTIFACT, PROFILED, TIMED
from te_dynamo.lowering.inductor.workers import STATIC_LAUNCH, submit

AHEAD = Private(
    "triton.runtime._async_compile.AsyncCompileMode",
    "Gluon kernels, which Inductor only calls, are compiled in threads while it writes code",
    "a second for each Gluon kernel of a cold compile",
    needs=("triton.runtime._async_compile.active_mode",),
)

PTXAS = Private(
    "torch._inductor.runtime.compile_tasks._set_triton_ptxas_path",
    "torch's ptxas is chosen before Triton asks for its version, which is part of the key of Triton's cache",
    "the kernels that another process has compiled",
    needs=("triton.backends.nvidia.compiler.get_ptxas_version",),
)
WORKERS = Private(
    "torch._inductor.compile_worker.subproc_pool.SubprocPool.submit",
    "workers give our kernels torch's own launcher; what is left of Triton's is built in threads",
    "1.3 s of a cold compile of 8 blocks",
    submit,
    needs=(
        f"torch._inductor.config.{STATIC_LAUNCH}",
        "torch._inductor.async_compile.AsyncCompile.pool",
        "torch._inductor.runtime.triton_heuristics.TritonCompileResult",
    ),
)

DYNAMO_STATE = Private(
    "torch._dynamo.pgo.get_code_state",
    "explain and compare set aside what Dynamo remembers of earlier calls, read what it skips and why, and leave nothing in its tables",
    "explanations and comparisons that depend on no earlier call, no later call on them, and what Dynamo skips",
    needs=(
        "torch._dynamo.convert_frame.Tracker",
        "torch._dynamo.convert_frame.input_codes",
        "torch._dynamo.convert_frame.register_bytecode_hook",
        "torch._dynamo.external_utils.wrap_inline",
        "torch._dynamo.guards.DeletedGuardManagerWrapper",
        "torch._dynamo.utils.counters",
        "torch._guards.TracingContext.get_traced_code",
        "torch._C._dynamo.eval_frame._FrameExecStrategy",
        "torch._C._dynamo.eval_frame.set_code_exec_strategy",
        "torch._dynamo.eval_frame.reset_code",
        "torch._C._dynamo.eval_frame._debug_get_cache_entry_list",
    ),
)

SAVED_HOOKS = Private(
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "hooks on saved tensors get FP8 codes as bytes",
    "hooks on saved tensors that do what torch cannot do with float8",
)

TABLE = (
    Private(
        f"torch._higher_order_ops.triton_kernel_wrap.{mutation_analysis_name()}",
        "which tensors a launch writes is said by its kernel, or analysed once, not four times a launch",
        "1.5 s of a cold compile of 8 blocks",
        analyse,
    ),
    Private(
        "torch._inductor.fx_utils.FakeTensorUpdater.incremental_update",
        "fake values of lowered nodes are right, and are not computed again",
        "0.4 s of a cold compile of 8 blocks, 1.8 s with dynamic shapes",
        incremental_update,
        needs=("torch._inductor.fx_utils.FakeTensorUpdater.hash_node",),
    ),
    Private(
        "torch._inductor.codegen.wrapper.PythonWrapperCodegen.define_kernel",
        "our kernels are compiled as soon as they are defined; those of few rows are launched before their predecessor ends",
        "0.8 s of a cold compile of 8 blocks, and 2 to 4% of a step of at most 64 rows",
        define_kernel,
        needs=(
            "torch._inductor.async_compile.get_compile_threads",
            "torch._inductor.async_compile.AsyncCompile.use_process_pool",
        ),
    ),
    Private(
        "torch._inductor.memory.reorder_for_peak_memory",
        "what a kernel of ours fills is allocated when it runs, not before its operands are made",
        "memory: 224 MiB of a step of a Llama-8B block with scales of blocks",
        allocate_late,
        needs=("torch._inductor.scheduler.NopKernelSchedulerNode",),
    ),
    Private(
        "torch._inductor.graph.constrain_to_fx_strides",
        "an operand of a kernel of ours is computed once, not for each argument that it is",
        "time and memory: two more copies of each activation of which rows or columns alone are quantized",
        operands_once,
        needs=("torch._inductor.ir.TensorBox",),
    ),
    WORKERS,
    Private(
        "torch._inductor.runtime.triton_heuristics.TritonCompileResult.make_launcher",
        "launches with scratch memory or early ones ask for hooks' metadata only where there are hooks, and allocate nothing",
        "some 40 us of the CPU for each product that Inductor launches",
        make_launcher,
    ),
    Private(
        "torch._inductor.codegen.cuda.device_op_overrides.CUDADeviceOpOverrides.cpp_scratch",
        "in C++ code each program of a launch has scratch memory of its own; they write over each other's without",
        wrapper=cpp_scratch,
        last=(2, 12),
    ),
    PTXAS,
    AHEAD,
    Private(
        "torch._inductor.select_algorithm.extern_kernels",
        "Inductor's code calls Gluon kernels by their names in it",
        needs=("torch._inductor.lowering.fallback_handler", "torch._inductor.ir.ExternKernelOut"),
    ),
    Private(
        ARTIFACT,
        "tlparse shows decisions, fusions and the graph after each stage",
        "our artifacts in torch's trace",
    ),
    Private(
        TIMED,
        "torch._dynamo.utils.compile_times() has the time of each of our stages",
        "our lines among torch's compile times",
    ),
    Private(
        PROFILED,
        "calls of Gluon kernels have the path of their module in a profile",
        "those names",
    ),
    Private(
        "torch._C._get_sm_carveout_experimental",
        "products leave as many multiprocessors to other kernels as torch's own do",
        "that setting: only options={'sm_margin': n} leaves some",
    ),
    Private(
        "torch._dynamo.utils._disable_saved_tensors_hooks_during_tracing",
        "a checkpoint around the model must not count what matching saves",
    ),
    DYNAMO_STATE,
    Private(
        "torch._dynamo.convert_frame.get_and_maybe_log_recompilation_reasons",
        "a function of ours that Dynamo compiles no more, since it has met its limit, is told",
        "that warning",
        recompilation_reasons,
        needs=("torch._dynamo.convert_frame.compute_cache_size", "torch._dynamo.convert_frame.exceeds_recompile_limit"),
        everywhere=True,
    ),
    SAVED_HOOKS,
    Private(
        "torch._dynamo.guards.install_guard",
        "modules that run one function behind a graph break, and that rules treat differently, have a graph each",
        needs=("torch._dynamo.guards.GuardBuilder.ID_MATCH",),
    ),
    Private(
        "torch._dynamo.eval_frame._stance",
        "te_dynamo.compile(require_coverage=..) lets what the user runs eagerly by torch.compiler.set_stance pass",
    ),
    Private(
        "torch._dynamo.eval_frame.reset_code",
        "te_dynamo.freeze has code compiled again that read the weight before",
    ),
)
"""What is wrapped first, then what is used as it is."""


def install() -> None:
    """Puts the wrappers in place; a second call changes nothing.

    What only saves time and is gone is left out, with one warning. Raises UnsupportedError where another name of the table is gone.
    """
    for private in (private for private in TABLE if private.needed):
        gone = private.missing()
        if not gone:
            private.wrap()
        elif private.gain:
            warn_skipped(gone, private.gain)
        else:
            raise UnsupportedError(
                f"te_dynamo: torch {torch.__version__} has no {gone}, without which graphs would fail or be wrong ({private.why}): "
                f"install a release that has it; {private.releases} are tested"
            )
    if PTXAS.active:
        use_torchs_ptxas()


def inductor_options(ours: bool) -> dict[str, Any]:
    """Inductor's options where the user gives none: what goes with what is installed, and, in a graph with operations of `ours`, no freed
    buffer is kept for a later one.

    Inductor counts a result that takes its operand's place beside it, so it finds room that is not there: a Llama-70B block with scales
    of blocks took 1.12 times bf16's memory. The allocator has a freed buffer for whoever asks next.
    """
    return {**({"allow_buffer_reuse": False} if ours else {}), **({STATIC_LAUNCH: True} if WORKERS.active else {})}
