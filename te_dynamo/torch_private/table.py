"""Every private name of torch and Triton that is touched, with the files that touch it: the one table, which `doctor --verbose` prints.

A name is private if a part of it begins with an underscore, and if it is not in `DOCUMENTED`. tests/project/test_private_names.py reads the code
and fails for a private name without a row, and for a row that no code touches.

To add one: a row. If it is wrapped, its wrapper goes to `WRAPPERS` of lowering/inductor/install.py.
"""

from __future__ import annotations

from te_dynamo._compat import mutation_analysis_name
from te_dynamo.torch_private.private import Private

DOCUMENTED = (
    "torch.ops",  # operators, whose schemas PyTorch keeps
    "torch._C._nn",  # the functions of torch.nn.functional, as Dynamo spells them
    "torch._dynamo.config",
    "torch._dynamo.graph_break",
    "torch._dynamo.list_backends",
    "torch._dynamo.lookup_backend",
    "torch._dynamo.register_backend",
    "torch._dynamo.backends.common.aot_autograd",
    "torch._functorch.config",
    "torch._inductor.aoti_compile_and_package",
    "torch._inductor.config",
    "torch._inductor.list_mode_options",
    "torch._inductor.list_options",
    "torch._ops.OpOverload",
    "torch._ops.OpOverloadPacket",
    "torch._subclasses.fake_tensor.FakeTensor",
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "torch.utils._python_dispatch.TorchDispatchMode",
)
"""What PyTorch's documentation has users write, and what is under it."""

_CODE = "lowering/inductor"
_EXPLAIN = "te_dynamo/inspect"
_ANYWHERE = "te_dynamo, passes, lowering"

# fmt: off
AHEAD = Private(
    "triton.runtime._async_compile.AsyncCompileMode", _CODE,
    "Gluon kernels, which Inductor only calls, are compiled in threads while it writes code",
    "a second for each Gluon kernel of a cold compile", needs=("triton.runtime._async_compile.active_mode",),
)
PTXAS = Private(
    "torch._inductor.runtime.compile_tasks._set_triton_ptxas_path", _CODE,
    "torch's ptxas is chosen before Triton asks for its version, which is part of the key of Triton's cache",
    "the kernels that another process has compiled", needs=("triton.backends.nvidia.compiler.get_ptxas_version",),
)
MUTATION = Private(
    f"torch._higher_order_ops.triton_kernel_wrap.{mutation_analysis_name()}", _CODE,
    "which tensors a launch writes is said by its kernel, or analysed once, not four times a launch",
    "1.5 s of a cold compile of 8 blocks",
)
STATIC_LAUNCH = "static_launch_user_defined_triton_kernels"
"""Inductor's option."""

WORKERS = Private(
    "torch._inductor.compile_worker.subproc_pool.SubprocPool.submit", _CODE,
    "workers give our kernels torch's own launcher; what is left of Triton's is built in threads",
    "1.3 s of a cold compile of 8 blocks",
    needs=(
        f"torch._inductor.config.{STATIC_LAUNCH}", "torch._inductor.async_compile.AsyncCompile.pool",
        "torch._inductor.runtime.triton_heuristics.TritonCompileResult",
    ),
)
DYNAMO_STATE = Private(
    "torch._dynamo.pgo.get_code_state", _EXPLAIN,
    "explain and compare set aside what Dynamo remembers of earlier calls, read what it skips and why, and leave nothing in its tables",
    "explanations and comparisons that depend on no earlier call, no later call on them, and what Dynamo skips",
    needs=(
        "torch._dynamo.convert_frame.Tracker", "torch._dynamo.convert_frame.input_codes",
        "torch._dynamo.convert_frame.register_bytecode_hook", "torch._dynamo.external_utils.wrap_inline",
        "torch._dynamo.guards.DeletedGuardManagerWrapper", "torch._dynamo.utils.counters",
        "torch._guards.TracingContext.extract_stack", "torch._C._dynamo.eval_frame._FrameExecStrategy",
        "torch._C._dynamo.eval_frame.set_code_exec_strategy", "torch._C._dynamo.eval_frame._debug_get_cache_entry_list",
    ),
)
SAVED_HOOKS = Private(
    "torch._C._autograd._top_saved_tensors_default_hooks", _CODE,
    "hooks on saved tensors get FP8 codes as bytes", "hooks on saved tensors that do what torch cannot do with float8",
)
RECOMPILATION = Private(
    "torch._dynamo.convert_frame.get_and_maybe_log_recompilation_reasons", "te_dynamo/torch_private/recompile_limit.py",
    "a function of ours that Dynamo compiles no more, since it has met its limit, is named in a warning", "that warning",
    needs=(
        "torch._dynamo.convert_frame.compute_cache_size", "torch._dynamo.convert_frame.exceeds_recompile_limit",
        "torch._guards.CompileContext.current_compile_id",
    ),
    everywhere=True,
)
UNSEEN_WRITES = Private(
    "torch._C._dispatch_get_all_op_names", "te_dynamo/weights/unseen_writes.py",
    "operators that write a weight and raise no version counter get a kernel that says so",
    "options={'weight_cache': 'step'} and te_dynamo.freeze",
    needs=(
        "torch._C._dispatch_has_kernel_for_dispatch_key", "torch._C._get_schema", "torch._C._after_ADInplaceOrView_keyset",
    ),
)
FAKE_CUDA = Private(
    "torch._inductor.compile_fx._recursive_post_grad_passes", _EXPLAIN,
    "a model is rewritten for a GPU that is not there: Inductor stops after its passes, and backward is walked in Python",
    "explain(device=..) and te_dynamo.testing.capture_on_fake_cuda",
    needs=(
        "torch._inductor.compile_fx._compile_fx_inner", "torch._C._autograd._get_current_graph_task_keep_graph",
        "torch.cuda._lazy_init", "torch.autograd.graph.Node._input_metadata", "torch.autograd.graph.Node._sequence_nr",
        "torch.autocast()._enabled", "torch.autograd.Function()._forward_cls", "torch.utils.flop_counter.FlopCounterMode()._get_raw",
        "torch._dynamo.trace_rules.get_torch_obj_rule_map", "torch._dynamo.variables.torch.TorchInGraphFunctionVariable._get_handlers",
    ),
)
AOT_COMPILE = Private(
    "torch._dynamo.aot_compile_types.SerializableCallable", "te_dynamo/weights/saved_supply.py",
    "aot_compile saves a compiled graph whose weights are frozen", "aot_compile of such models, which torch refuses then",
    needs=("torch._dynamo.aot_compile_types.BundledAOTAutogradSerializableCallable",),
)
ARTIFACT = Private(
    "torch._logging.trace_structured", "te_dynamo/torch_private/tracing.py",
    "tlparse shows decisions, fusions and the graph after each stage", "our artifacts in torch's trace",
)
TIMED = Private(
    "torch._dynamo.utils.dynamo_timed", "te_dynamo/torch_private/tracing.py",
    "torch._dynamo.utils.compile_times() has the time of each of our stages", "our lines among torch's compile times",
)
PROFILED = Private(
    "torch.autograd.profiler._is_profiler_enabled", "te_dynamo/torch_private/tracing.py",
    "calls of Gluon kernels have the path of their module in a profile", "those names",
)

TABLE = (
    # Wrapped, in graphs of ours alone.
    MUTATION,
    Private(
        "torch._inductor.fx_utils.FakeTensorUpdater.incremental_update", _CODE,
        "fake values of lowered nodes are right, and are not computed again",
        "0.4 s of a cold compile of 8 blocks, 1.8 s with dynamic shapes",
        needs=("torch._inductor.fx_utils.FakeTensorUpdater.hash_node",),
    ),
    Private(
        "torch._inductor.codegen.wrapper.PythonWrapperCodegen.define_kernel", _CODE,
        "our kernels are compiled as soon as they are defined; those of few rows are launched before their predecessor ends",
        "0.8 s of a cold compile of 8 blocks, and 2 to 4% of a step of at most 64 rows",
        needs=(
            "torch._inductor.async_compile.get_compile_threads",
            "torch._inductor.async_compile.AsyncCompile.use_process_pool",
        ),
    ),
    Private(
        "torch._inductor.memory.reorder_for_peak_memory", _CODE,
        "what a kernel of ours fills is allocated when it runs, not before its operands are made",
        "memory: 224 MiB of a step of a Llama-8B block with scales of blocks",
        needs=("torch._inductor.scheduler.NopKernelSchedulerNode",),
    ),
    Private(
        "torch._inductor.graph.constrain_to_fx_strides", _CODE,
        "an operand of a kernel of ours is computed once, not for each argument that it is",
        "time and memory: two more copies of each activation of which rows or columns alone are quantized",
    ),
    Private(
        "torch._inductor.graph.GraphLowering.can_inline_constant", _CODE,
        "in a package a weight's scale is a tensor that kernels of ours read", "a kernel for each scale of a weight in such a package",
    ),
    WORKERS,
    Private(
        "torch._inductor.runtime.triton_heuristics.TritonCompileResult.make_launcher", _CODE,
        "launches with scratch memory or early ones ask for hooks' metadata only where there are hooks, and allocate nothing",
        "some 40 us of the CPU for each product that Inductor launches",
    ),
    Private(
        "torch._inductor.codegen.cuda.device_op_overrides.CUDADeviceOpOverrides.cpp_scratch", _CODE,
        "in C++ code each program of a launch has scratch memory of its own; they write over each other's without",
        last=(2, 12),
    ),
    # Used, and done without where they are gone.
    PTXAS, AHEAD, AOT_COMPILE, ARTIFACT, TIMED, PROFILED, DYNAMO_STATE, SAVED_HOOKS, RECOMPILATION, UNSEEN_WRITES, FAKE_CUDA,
    Private(
        "torch._C._get_sm_carveout_experimental", "te_dynamo/_compat.py",
        "products leave as many multiprocessors to other kernels as torch's own do",
        "that setting: only options={'sm_margin': n} leaves some",
    ),
    Private(
        "torch._dynamo.utils.graph_break_reasons", _EXPLAIN, "explain lists the graph breaks", "explain, which raises",
    ),
    Private(
        "torch._dynamo.eval_frame._stance", _EXPLAIN,
        "te_dynamo.compile(require_coverage=..) lets what the user runs eagerly by torch.compiler.set_stance pass",
    ),
    # Used, and nothing compiles without. Calls of Dynamo and AOTAutograd:
    Private("torch._dynamo.utils._disable_saved_tensors_hooks_during_tracing", "te_dynamo/backend.py",
            "a checkpoint around the model must not count what matching saves"),
    Private("torch._dynamo.exc.RestartAnalysis", "te_dynamo/backend.py, te_dynamo/entry.py", "Dynamo's wish to trace again is passed on"),
    Private("torch._dynamo.exc.TensorifyScalarRestartAnalysis", "passes/torch_ir/workspaces.py",
            "Dynamo traces again when a dropped weight has got its values back"),
    Private("torch._dynamo.guards.install_guard", "passes/torch_ir/match",
            "modules that run one function behind a graph break, and that rules treat differently, have a graph each",
            needs=("torch._dynamo.guards.GuardBuilder.ID_MATCH",)),
    Private("torch._dynamo.eval_frame.reset_code", "te_dynamo/weights/freeze.py, te_dynamo/inspect/dynamo.py",
            "te_dynamo.freeze has code compiled again that read the weight before",
            needs=("torch._dynamo.convert_frame.compile_lock",)),
    Private("torch._dynamo.eval_frame.OptimizedModule", "te_dynamo, passes",
            "the user's module inside what torch.compile made",
            needs=("torch._dynamo.eval_frame.OptimizedModule()._orig_mod", "torch.nn.Module._compiled_call_impl",
                   "torch.nn.Module._wrapped_call_impl")),
    Private("torch._dynamo.eval_frame.DisableContext()._torchdynamo_disable", _EXPLAIN,
            "what torch.compiler.disable wraps",
            needs=("torch.nn.Module()._torchdynamo_orig_callable",)),
    Private("torch._dynamo.convert_frame.ConvertFrame()._torchdynamo_orig_backend", "te_dynamo/inspect, te_dynamo/entry.py",
            "which backend and options a compiled model has; te_dynamo.set_recipe puts another there"),
    Private("torch.fx.Node()._dynamo_source", "te_dynamo, passes",
            "which of the user's tensors an input of a graph is"),
    Private("torch._guards.TracingContext.try_get", "te_dynamo/user_code.py", "the function that Dynamo compiles",
            needs=("torch._guards.TracingContext.get_traced_code",)),
    Private("torch._guards.detect_fake_mode", "te_dynamo/dialect/fakes.py", "the fake mode of a graph's values"),
    Private("torch.compiler._is_exporting_flag", "te_dynamo/_compat.py", "a frozen model refuses an export"),
    Private("torch._opaque_base.OpaqueBaseMeta", "te_dynamo/_compat.py",
            "quantizers and operations are constants of graphs",
            needs=("torch._library.opaque_object", "torch._C._is_opaque_type_registered", "torch._C._unregister_opaque_type")),
    Private("torch._subclasses.functional_tensor.FunctionalTensorMode", "te_dynamo/dialect/define.py",
            "our operations of no kernel are traced through", needs=("torch._subclasses.functional_tensor.FunctionalTensor",)),
    Private("torch._subclasses.fake_tensor.UnsupportedFakeTensorException", _EXPLAIN,
            "a model that asks for values is said so",
            needs=("torch._subclasses.fake_tensor.DataDependentOutputException",)),
    Private("torch.autograd.forward_ad._current_level", "te_dynamo/dialect/define.py, passes/torch_ir/match",
            "tangents are refused, or left to torch, not lost",
            needs=("torch._dynamo.guards.GuardBuilder.DUAL_LEVEL", "torch._dynamo.source.GlobalStateSource")),
    Private("torch._C._functorch.is_functorch_wrapped_tensor", "passes/torch_ir/match/values.py",
            "what is inside a torch.func transform is left", needs=("torch._C._functorch.get_unwrapped",)),
    Private("torch._C._are_functorch_transforms_active", "te_dynamo/operations/sequential.py",
            "a Sequential inside a torch.func transform is an error"),
    # Graphs and operators:
    Private("torch.fx.Node._erased", "passes", "a node that an earlier rewrite took out is passed by"),
    Private("torch._ops.HigherOrderOperator", "te_dynamo, passes", "calls of operators that have graphs of their own"),
    Private("torch._ops.OpOverload()._schema", _ANYWHERE, "an operator's arguments, and which of them it writes",
            needs=("torch._ops.OpOverload._opname", "torch._ops.OpOverload()._qualified_op_name")),
    Private("torch._library.custom_ops.CustomOpDef()._opoverload", "te_dynamo/dialect/define.py",
            "the operator that was defined"),
    Private("torch._dispatch.python.enable_python_dispatcher", "passes/torch_ir/match/inline.py",
            "a function's calls are traced as Dynamo traces them"),
    Private("torch._higher_order_ops.triton_kernel_wrap", "te_dynamo",
            "launches in graphs: what they write, their constants"),
    Private("torch._grouped_mm", "passes/torch_ir/match", "calls of a user's model, by identity",
            needs=("torch._transformer_encoder_layer_fwd", "torch.amp.autocast_mode._enter_autocast",
                   "torch.amp.autocast_mode._exit_autocast")),
    Private("torch.utils._pytree", _ANYWHERE, "tensors in nested arguments"),
    # Tensors and modules:
    Private("torch.Tensor._make_wrapper_subclass", "te_dynamo", "QuantizedTensor, and the shards of fp8_all_gather",
            needs=("torch._C._disabled_torch_function_impl", "torch.utils._python_dispatch.return_and_correct_aliasing",
                   "torch.nn.Parameter()._is_param")),
    Private("torch.utils._python_dispatch.is_traceable_wrapper_subclass", "te_dynamo/inspect, passes/torch_ir",
            "the tensors in a tensor"),
    Private("torch.Tensor._version", "te_dynamo, passes",
            "which writes a kept weight has seen", needs=("torch.Tensor._is_view",)),
    Private("torch.UntypedStorage._expired", "te_dynamo/weights/cache.py, te_dynamo/operations/program.py",
            "whether memory is another's",
            needs=("torch.UntypedStorage._cdata",)),
    Private("torch.nn.Module()._parameters", "te_dynamo", "parameters are replaced where a module holds them",
            needs=("torch.nn.Module()._buffers", "torch.nn.Module()._non_persistent_buffers_set",
                   "torch.nn.Module()._is_fsdp_managed_module")),
    # Distributed:
    Private("torch.distributed._functional_collectives.AsyncCollectiveTensor", "passes/torch_ir/async_inputs.py",
            "results of collectives that still run"),
    Private("torch.distributed._composable_state._module_state_mapping", "passes/torch_ir/fsdp.py",
            "which weights FSDP2 manages"),
    Private("torch.distributed.tensor.DTensor._local_tensor", "te_dynamo/distributed", "a DTensor's shard"),
    Private("torch.distributed.distributed_c10d._resolve_process_group", "te_dynamo/operations/basic/collective.py",
            "the group that a graph names"),
    Private("torch._C.DispatchKey", "te_dynamo/testing/wire.py",
            "which collectives ran, and operators in front of torch's own",
            needs=("torch._C._dispatch_keyset_full_after", "torch.library.Library._destroy")),
    # Inductor:
    Private("torch._inductor.compile_fx.compile_fx", "te_dynamo/backend.py", "Inductor is called",
            needs=("torch._inductor.compile_fx.compile_fx_inner", "torch._inductor.custom_graph_pass.CustomGraphPass")),
    Private("torch._inductor.custom_graph_pass", "te_dynamo/_compat.py",
            "a user's passes that ask whether a graph is for inference"),
    Private("torch._inductor.select_algorithm.extern_kernels", "lowering/extern",
            "Inductor's code calls Gluon kernels by their names in it",
            needs=("torch._inductor.lowering.fallback_handler", "torch._inductor.lowering.register_lowering",
                   "torch._inductor.ir.ExternKernel", "torch._inductor.ir.ExternKernelAlloc", "torch._inductor.ir.ExternKernelOut",
                   "torch._inductor.ir.FallbackKernel", "torch._inductor.ir.MultiOutput",
                   "torch._inductor.ir.MultiOutputLayout", "torch._inductor.ir.NoneLayout", "torch._inductor.virtualized.V")),
    Private("torch._inductor.ir.TensorBox", "te_dynamo/_compat.py, lowering", "a tensor in Inductor's graph"),
    Private("torch._inductor.dependencies.ReadWrites", "te_dynamo/_compat.py, lowering",
            "what a launch reads and writes",
            needs=("torch._inductor.dependencies.Dep", "torch._inductor.dependencies.StarDep", "torch.utils._ordered_set.OrderedSet")),
    Private("torch._inductor.decomposition.select_decomp_table", "lowering/trace.py",
            "an operation becomes its launches",
            needs=("torch._subclasses.functional_tensor.dispatch_functionalize",)),
    Private("torch._inductor.pattern_matcher.stable_topological_sort", "passes/dialect/graph.py",
            "nodes in the order of their arguments"),
    Private("torch._inductor.runtime.cache_dir_utils.cache_dir", "te_dynamo/remembered.py",
            "the folder of torch's caches"),
    # Kernels:
    Private("torch.utils._python_dispatch._get_current_dispatch_mode", "kernels/runtime/launch.py",
            "whether a launch is recorded",
            needs=("torch.utils._python_dispatch._get_current_dispatch_mode_stack",)),
    Private("torch._scaled_mm", "kernels/gemm/cublaslt.py, lowering/aten.py", "cuBLASLt's product, and that of a program which leaves Python"),
    Private("triton.experimental.gluon._runtime.GluonASTSource", "kernels/runtime",
            "Gluon kernels are compiled for any GPU",
            "tests and benchmarks of compiled kernels"),
    Private("triton.experimental.gluon.language.shared_memory_descriptor._reinterpret", "kernels/runtime",
            "shared memory of another shape",
            last=(2, 14)),
)
# fmt: on
"""What is wrapped first, then what is used as it is."""
