"""`torch.compile(model, backend="te")`: the pipeline, the only file that knows all of its stages.

    match      on Dynamo's graph, before AOTAutograd: what it leaves is part of every cache key; then registered fusions of operations
    joint      on the joint graph of forward and backward
    forward    on the forward graph (on an inference graph: "inference")
    backward   on the backward graph
    lower      every te operation into kernel launches (CUDA) or its reference (elsewhere)

docs/architecture.md describes each.
"""

from __future__ import annotations

import contextvars
import copy
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._dynamo.exc import RestartAnalysis
from torch.fx import Graph, GraphModule, Node
from torch.nn import Module

from te_dynamo._compat import asks_for_inference
from te_dynamo.cache_key import cache_key
from te_dynamo.dialect.define import is_te
from te_dynamo.distributed.check_ranks import tell_compiled
from te_dynamo.errors import InvalidOptionError, UnsupportedError
from te_dynamo.fusion_registry import fusion_key
from te_dynamo.inspect.advice import advise, warn_if_emulated, warn_if_left_for_cost
from te_dynamo.inspect.graphs.capture import GraphInProgress, abandon, publish, record, record_before, uncached
from te_dynamo.inspect.left_out import begins_in
from te_dynamo.inspect.logs import tell_decisions, tell_fusions, tell_lowered
from te_dynamo.inspect.required_coverage import counted, require_coverage
from te_dynamo.kernels.runtime import availability
from te_dynamo.kernels.runtime.margin import sm_margin
from te_dynamo.kernels.runtime.target import target_of
from te_dynamo.lowering.extern import gemm as extern_gemm
from te_dynamo.lowering.inductor.compile_ahead import compiles_ahead
from te_dynamo.lowering.inductor.install import inductor_options, install
from te_dynamo.lowering.inductor.saved_hooks import saves_bytes
from te_dynamo.lowering.lower import lower
from te_dynamo.lowering.tune import slower_than_cublaslt, tune, tuned_key, use_remembered
from te_dynamo.options import Options
from te_dynamo.passes.dialect.collectives.gather_quantize import gathers_left
from te_dynamo.passes.dialect.collectives.regather import gather_again_in_backward
from te_dynamo.passes.dialect.concatenate_gradients import put_halves_side_by_side
from te_dynamo.passes.dialect.cse import merge_common_subexpressions
from te_dynamo.passes.dialect.fuser import check_choice, fuse
from te_dynamo.passes.dialect.fusions.shared_input import linears_left
from te_dynamo.passes.dialect.late_weight_gradients import make_weight_gradients_late
from te_dynamo.passes.dialect.low_memory import make_columns_late, write_gradients_in_16_bits
from te_dynamo.passes.dialect.recompute import save_products_only
from te_dynamo.passes.dialect.saved_inputs import save_inputs_themselves
from te_dynamo.passes.dialect.saved_weights import choose_saved_weights
from te_dynamo.passes.dialect.shared_amaxes import share_amaxes
from te_dynamo.passes.dialect.usage import drop_unread_usages
from te_dynamo.passes.dialect.views import read_through_views, return_no_views
from te_dynamo.passes.torch_ir.async_inputs import WaitsForInputs, plain_examples
from te_dynamo.passes.torch_ir.exported import in_dynamos_form, in_exports_form
from te_dynamo.passes.torch_ir.fsdp import managed_by_fsdp
from te_dynamo.passes.torch_ir.gathered_weights import check_gathered
from te_dynamo.passes.torch_ir.match import match
from te_dynamo.passes.torch_ir.match.cost import LEFT_FOR_COST
from te_dynamo.passes.torch_ir.match.mutation import facts_known
from te_dynamo.passes.torch_ir.match.root import compiled_model
from te_dynamo.passes.torch_ir.match.where import linear_path, source_line
from te_dynamo.passes.torch_ir.operation_fusions import fuse_operations
from te_dynamo.passes.torch_ir.quantized_weights import read_buffers
from te_dynamo.passes.torch_ir.workspaces import use_workspaces
from te_dynamo.report import Report
from te_dynamo.torch_private.private import compiling_ours
from te_dynamo.torch_private.recompile_limit import compiled_here
from te_dynamo.torch_private.table import SAVED_HOOKS
from te_dynamo.torch_private.tracing import timed
from te_dynamo.user_code import traced_code
from te_dynamo.weights.cache import make_buffers
from te_dynamo.weights.freeze import watch
from te_dynamo.weights.saved_supply import make_supply

_phase: contextvars.ContextVar[str] = contextvars.ContextVar("te_dynamo_phase")
"""Which graph Inductor is compiling: "forward", "backward" or "inference"."""


def te(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend that the entry point `te` names.

    Raises InvalidOptionError for an option that does not exist, TeError on a torch without a private name that results depend on.
    """
    install()
    given, model = Options.parse(options, mode), compiled_model()
    check_choice(given.fusions)
    parsed = given.in_model(model)
    report = Report(model=None if model is None else weakref.ref(model))
    compilation = _Compilation(parsed, report, GraphInProgress())
    try:
        compiled = _compile(_private_copy(gm), example_inputs, compilation)
        advise(model, _is_whole(gm, model), parsed, compilation.report)
    except RestartAnalysis:
        abandon(compilation.progress)
        raise
    compiled_here(traced_code())
    publish(compilation.report, compilation.progress)
    tell_compiled(given, compilation.report)
    return compiled


@dataclasses.dataclass
class _Compilation:
    """One Dynamo graph on its way through the stages."""

    options: Options
    report: Report
    progress: GraphInProgress

    def record(self, stage: str, graph: Graph) -> None:
        record(stage, graph, self.progress)

    def joint(self, graph: Graph) -> None:
        record_before("joint", graph, self.progress)
        with timed("te_dynamo.joint"):
            save_products_only(graph)
            self._simplify(graph)
            self._fuse(graph, "joint")
            choose_saved_weights(graph, self.options.save_weights)
            save_inputs_themselves(graph)
        if not any(node.op == "placeholder" and "tangents" in node.name for node in graph.nodes):
            return
        if self.options.regather:
            self.report.gathered_again = gather_again_in_backward(graph)
        self.record("joint", graph)

    def divided(self, graph: Graph, phase: str) -> None:
        record_before(phase, graph, self.progress)
        with timed(f"te_dynamo.{phase}"):
            if phase == "inference":  # has no joint graph before it
                self._simplify(graph)
            self._fuse(graph, phase)
            self.report.notes += gathers_left(graph)
            if not self.options.max_autotune:
                self.report.slower_than_cublaslt += slower_than_cublaslt(graph)
            drop_unread_usages(graph)
            if self.options.low_memory:
                make_columns_late(graph)
                make_weight_gradients_late(graph)
                write_gradients_in_16_bits(graph)
        self.record(phase, graph)

    def lower(self, graph: Graph, phase: str) -> None:
        share_amaxes(graph)
        if self.options.max_autotune:
            with timed("te_dynamo.tune"):
                tune(graph)
        with timed("te_dynamo.lower"):
            lowered = lower(graph)
        self.report.lowered += [(phase, op, runs) for op, runs in lowered]
        tell_lowered(phase, lowered)
        self.record(f"lower.{phase}", graph)

    def _simplify(self, graph: Graph) -> None:
        put_halves_side_by_side(graph)
        read_through_views(graph)
        merge_common_subexpressions(graph)

    def _fuse(self, graph: Graph, phase: str) -> None:
        if self.options.fusions:
            if phase in ("joint", "inference"):
                self.report.notes += linears_left(graph)
            fired = fuse(graph, phase, self.options.fusions)
            self.report.fusions += [(phase, name, times) for name, times in fired]
            tell_fusions(phase, fired)


def _compile(gm: GraphModule, example_inputs: Sequence[Any], compilation: _Compilation) -> Callable[..., Any]:
    from torch._dynamo.utils import _disable_saved_tensors_hooks_during_tracing

    _prepare_devices(example_inputs, compilation.options.sm_margin)
    _watch_for_freezing(example_inputs)
    example_inputs, asynchronous = plain_examples(gm, example_inputs)
    if compilation.options.save_weights is None and managed_by_fsdp(gm, example_inputs):
        compilation.options = dataclasses.replace(compilation.options, save_weights="original")
    options = compilation.options
    record_before("match", gm.graph, compilation.progress)
    # The new nodes' fake values are computed with autograd on. A checkpoint around the compiled model must not count what
    # that saves: recomputation, which does not compile, would save less.
    with timed("te_dynamo.match"), _disable_saved_tensors_hooks_during_tracing(), facts_known(gm):
        match(gm, options, compilation.report, example_inputs)
        if options.fusions:
            fuse_operations(gm, options, compilation.report)
        read_buffers(gm)
        check_gathered(gm, example_inputs, compilation.report)
        supplied = use_workspaces(gm, example_inputs, options.weight_cache == "step", compilation.report)
    tell_decisions(compilation.report)
    compilation.record("match", gm.graph)
    require_coverage(options, compilation.report)
    warn_if_emulated(gm, compilation.report)
    warn_if_left_for_cost([node.meta[LEFT_FOR_COST] for node in _nodes(gm) if node.meta.get(LEFT_FOR_COST)])
    compiler = sm_margin(options.sm_margin)(_compile_with_inductor if options.codegen == "inductor" else _compile_eager)
    inputs = example_inputs
    if supplied is not None:
        inputs = [*(example_inputs[i] for i in supplied.kept), *supplied.buffers]
    compiled = compiler(gm, inputs, compilation)
    if SAVED_HOOKS.active and torch.is_grad_enabled():
        compiled = saves_bytes(compiled)
    if supplied is not None:
        by_step, check = options.weight_cache == "step", options.weight_cache_check
        compiled = make_supply(compiled, supplied.kept, supplied.workspaces, by_step, check)
    compiled = WaitsForInputs(compiled, asynchronous) if asynchronous else compiled
    return counted(compiled) if options.require_coverage else compiled


def linears_matched(gm: GraphModule, example_inputs: Sequence[Any], options: Options, report: Report) -> GraphModule:
    """A copy of Dynamo's graph with te operations for the linears alone, and their records in `report`: what `compare` runs."""
    from torch._dynamo.utils import _disable_saved_tensors_hooks_during_tracing

    copied = _private_copy(gm)
    with _disable_saved_tensors_hooks_during_tracing():
        match(copied, options.in_model(compiled_model()), report, example_inputs, linears_only=True)
    return copied


def exported_graph(gm: GraphModule, model: Module, options: Options, report: Report) -> None:
    """Puts te operations into a graph of torch.export, in place, with their weights as codes among its attributes: for te_dynamo.export.

    gm: the module of an ExportedProgram of `model`. Raises UnsupportedError for what is matched and cannot leave Python.
    """
    values = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    inputs = in_dynamos_form(gm, values)
    with facts_known(gm):
        match(gm, options.in_model(model), report, inputs)
        read_buffers(gm)
        for node in _nodes(gm):
            if is_te(node.target) and "grouped" in str(node.target):
                path, _ = linear_path(node, node.args[1])
                raise UnsupportedError(
                    f"te_dynamo.export: experts ({path!r}, {source_line(node)}) are multiplied in groups, which no exported graph holds: leave "
                    f"them in the model's precision by rules=[({path!r}, None)]"
                )
        supplied = use_workspaces(gm, inputs, True, report)
    report.workspaces = [dataclasses.replace(record, kept="in the program") for record in report.workspaces]
    workspaces = [] if supplied is None else supplied.workspaces
    in_exports_form(gm, values, [buffer for made in make_buffers(workspaces, inputs) for buffer in made.values()])


def package_of_kernels(
    program: torch.export.ExportedProgram, path: str, options: Options, report: Report, inductor: Mapping[str, Any]
) -> str:
    """Writes AOTInductor's package of an exported graph with te operations, for te_dynamo.export: their Triton kernels are in it."""
    if found := _without_kernels(_nodes(program.graph_module), "val"):
        raise UnsupportedError(
            f"te_dynamo.export: kernels='triton' needs kernels for every te operation, and {found}: leave kernels='triton' out"
        )
    install()
    _prepare_devices((node.meta.get("val") for node in program.graph.nodes), options.sm_margin)
    chosen = {**inductor_options(True), **dict(options.inductor), **inductor}
    chosen = _with_stages(chosen, _Compilation(options, report, GraphInProgress()))
    token = _phase.set("inference")
    try:
        with compiling_ours(), sm_margin(options.sm_margin):
            return torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=chosen)
    finally:
        _phase.reset(token)


def _nodes(gm: GraphModule) -> Iterator[Node]:
    """Those of the bodies in it too."""
    return (node for body in gm.modules() if isinstance(body, GraphModule) for node in body.graph.nodes)


def _is_whole(gm: GraphModule, model: Module | None) -> bool:
    """Whether Dynamo has made one graph of what it compiles: none came before a break, none after it, and nothing around it was given up."""
    code = traced_code()
    resumes = code is not None and code.co_name.startswith("torch_dynamo_resume_in")
    inside = code is not None and model is not None and not begins_in(model, code)
    return not resumes and not inside and not getattr(getattr(gm, "compile_subgraph_reason", None), "graph_break", True)


def _watch_for_freezing(example_inputs: Sequence[Any]) -> None:
    """te_dynamo.freeze has what is being compiled now compiled again, if it freezes a parameter that it reads."""
    code = traced_code()
    if code is not None:
        watch(code, [value for value in example_inputs if isinstance(value, torch.nn.Parameter)])


def _private_copy(gm: GraphModule, copies: dict[GraphModule, GraphModule] | None = None) -> GraphModule:
    """A copy we may rewrite, with the bodies in it: Dynamo reads its own graph's placeholders again after the backend returns.

    copies: what was copied of a body that several nodes share.
    """
    copies = {} if copies is None else copies
    copied = copies[gm] = GraphModule(gm, copy.deepcopy(gm.graph))
    copied.meta.update(gm.meta)
    for attribute in ("_param_name_to_source", "_backend_id", "torchdynamo_force_dynamic"):
        if hasattr(gm, attribute):
            setattr(copied, attribute, getattr(gm, attribute))
    for node, twin in zip(gm.graph.nodes, copied.graph.nodes, strict=True):
        twin.meta = {key: value for key, value in node.meta.items() if key != "grapharg"}  # refers to the input
        if hasattr(node, "_dynamo_source"):
            twin._dynamo_source = node._dynamo_source
        body = getattr(gm, node.target, None) if node.op == "get_attr" else None
        if isinstance(body, GraphModule):
            setattr(copied, node.target, copies[body] if body in copies else _private_copy(body, copies))
    return copied


def _compile_with_inductor(gm: GraphModule, example_inputs: Sequence[Any], compilation: _Compilation) -> Any:
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def inner(graph_module: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        phase = "backward" if kwargs.get("is_backward") else "inference" if kwargs.get("is_inference") else "forward"
        token = _phase.set(phase)
        try:
            # Autograd compiles a CUDA backward after compile_fx has returned, on a thread of its own: what holds there does not here,
            # nor do capture()'s patches.
            with uncached(), compiling_ours(), compiles_ahead(), sm_margin(compilation.options.sm_margin):
                return compile_fx_inner(graph_module, inputs, **kwargs)
        finally:
            _phase.reset(token)

    ours = any(is_te(node.target) for node in _nodes(gm))
    patches: dict[str, Any] = {**inductor_options(ours), **dict(compilation.options.inductor)}
    _check_cpp_wrapper(gm, patches)
    extern_gemm.register()
    patches = _with_stages(patches, compilation)
    with compiling_ours():  # a cache may answer, whose code then loads its kernels outside of `inner`
        return compile_fx(gm, list(example_inputs), inner_compile=inner, config_patches=patches)


def _with_stages(patches: Mapping[str, Any], compilation: _Compilation) -> dict[str, Any]:
    """Inductor's options with our passes in its hooks."""
    key = cache_key(compilation.options, fusion_key(), tuned_key())
    hooks = {
        "joint_custom_pre_pass": compilation.joint,
        "post_grad_custom_pre_pass": lambda graph: compilation.divided(graph, _phase.get()),
        "post_grad_custom_post_pass": lambda graph: compilation.lower(graph, _phase.get()),
    }
    return {**patches, **{hook: _chained(hook, stage, patches, key) for hook, stage in hooks.items()}}


def _prepare_devices(values: Iterable[Any], margin: int) -> None:
    """What was measured of the GPUs that tensors are on is used. Raises InvalidOptionError where products would have no multiprocessor left."""
    devices = {x.device for x in values if isinstance(x, torch.Tensor) and x.is_cuda}
    for device in devices:
        count = target_of(device).multiprocessors
        if margin >= count:
            raise InvalidOptionError(
                f"te_dynamo: sm_margin leaves {margin} multiprocessors to other kernels, and {device} has {count} in all: at most "
                f"{count - 1} can be left (without the option it is torch's own carve-out)"
            )
    if devices:
        use_remembered()


def _check_cpp_wrapper(gm: GraphModule, patches: Mapping[str, Any]) -> None:
    """Raises InvalidOptionError where a wrapper in C++ would have to call the references."""
    from torch._inductor import config

    if not patches.get("cpp_wrapper", config.cpp_wrapper):
        return
    if found := _without_kernels(_nodes(gm), "example_value"):
        raise InvalidOptionError(
            f"te_dynamo: cpp_wrapper needs kernels for every te operation, and {found}: leave cpp_wrapper out, or the linears in the model's "
            "precision by recipe=None"
        )


def _without_kernels(nodes: Iterable[Node], value: str) -> str:
    """Why a te operation has no kernel, and which is the first; "" where all have one. value: what its fake is called in meta."""
    for node in nodes:
        fake = next((x.meta.get(value) for x in node.all_input_nodes), None) if is_te(node.target) else None
        available = availability.kernels_available(fake.device) if isinstance(fake, torch.Tensor) else None
        if available is not None and not available.ok:
            line = source_line(node)
            return f"{available.reason} (first met: {node.target}{f', {line}' if line else ''})"
    return ""


def _chained(hook: str, stage: Callable[[Graph], None], patches: Mapping[str, Any], key: str) -> Any:
    """Our pass for one of Inductor's hooks, after the passes that the user has there already."""
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    users = patches.get(hook, getattr(config, hook))
    passes = users if isinstance(users, (list, tuple)) else () if users is None else (users,)

    class Stage(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            for each in passes:
                told = {"is_inference": _phase.get() == "inference"} if asks_for_inference(each) else {}
                each(graph, **told)
            stage(graph)

        def uuid(self) -> Any:
            theirs = [each.uuid() if isinstance(each, CustomGraphPass) else None for each in passes]
            if not all(theirs):
                return None  # torch caches nothing, for it could not tell a change
            return (hook, key, *theirs)

    return Stage()


def _compile_eager(gm: GraphModule, example_inputs: Sequence[Any], compilation: _Compilation) -> Any:
    """The rewritten graphs as they are, every node through the dispatcher: for debugging and for fast tests."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    if torch._functorch.config.bundled_autograd_cache:
        raise UnsupportedError(
            'te_dynamo: graphs that run as they are, under codegen="eager", cannot be saved by aot_compile: use codegen="inductor"'
        )
    leaving = sm_margin(compilation.options.sm_margin)  # backward compiles and runs on a thread of its own

    returned = {"backward": 0}  # how many results of a graph are the caller's; in inference all

    def partition(joint: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        returned["forward"] = kwargs["num_fwd_outputs"]
        compilation.joint(joint.graph)
        joint.recompile()
        return min_cut_rematerialization_partition(joint, inputs, **kwargs)

    def compiler(phase: str) -> Callable[..., Any]:
        @leaving
        def compile_graph(graph_module: GraphModule, inputs: Sequence[Any]) -> Any:
            compilation.divided(graph_module.graph, phase)
            return_no_views(graph_module.graph, returned.get(phase, len(graph_module.graph.nodes)))
            graph_module.recompile()
            return make_boxed_func(leaving(graph_module.forward))

        return compile_graph

    backend = aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        partition_fn=partition,
        keep_inference_input_mutations=True,  # as for Inductor; without it torch refuses a model that sets a parameter's data
    )
    return backend(gm, example_inputs)
