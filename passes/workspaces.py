"""Linears whose quantized weight is kept read it as inputs of the graph: of frozen weights, and under weight_cache="step".

    before    l_w = placeholder;  y = te.linear(x, l_w, bias, config)[0]
    after     w_data = placeholder;  w_scale_inv = placeholder
              y = te.linear_with_workspace(x, None, bias, config, [w_data, w_scale_inv])[0]      frozen: l_w is no input any more
              y = te.linear_with_workspace(x, l_w, bias, config, [w_data, ...])[0]               else l_w is what gets the gradient

At Torch IR, so that AOTAutograd, the partitioner and Inductor see the buffers as what they are: inputs, which are never
written and of which backward gets references. te_dynamo/weight_cache.py supplies them.

Linears that fusions/shared_input.py would stack have slices of one stack (te.quantize_stacked), for it to find: the two that
te.swiglu reads, and of frozen weights any two or three of one input whose columns nobody reads.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from te_dynamo.errors import TeError
from te_dynamo.frozen import FROZEN, frozen_name, is_dropped, restore
from te_dynamo.ops import LinearConfig
from te_dynamo.ops.fakes import quantized, quantized_stack
from te_dynamo.ops.stacked import segments_stack
from te_dynamo.passes.fusions.producer import has_fused_kernels
from te_dynamo.passes.match.values import emit, emit_getitem, emit_method, tensor_of
from te_dynamo.passes.match.where import parameter_name, source_line
from te_dynamo.quantizers import Quantizer
from te_dynamo.report import Report, WorkspaceRecord
from te_dynamo.weight_cache import Workspace, entry_of

__all__ = ["Supplied", "use_workspaces", "weights_read"]

_te = torch.ops.te
_READING: dict[Any, torch._ops.OpOverload] = {
    _te.linear.default: _te.linear_with_workspace.default,
    _te.grouped_linear.default: _te.grouped_linear_with_workspace.default,
}
"""The operations that quantize a weight, and what they are with a workspace: both have x, weight, .., config."""
_SWIGLU = _te.swiglu.default


@dataclasses.dataclass
class Supplied:
    """What the graph takes now: inputs of Dynamo's graph by position, then the buffers of workspaces."""

    kept: list[int]
    workspaces: list[Workspace]
    buffers: list[torch.Tensor]  # fakes, in order


@dataclasses.dataclass(eq=False)
class _Reader:
    """One te.linear of a weight that may be kept."""

    node: fx.Node
    position: int
    weight: nn.Parameter

    @property
    def config(self) -> LinearConfig:
        config = self.node.args[3]
        assert isinstance(config, LinearConfig)
        return config

    @property
    def operand(self) -> torch.Tensor:
        """What is quantized: the weight, or autocast's cast of it."""
        value = tensor_of(self.node.args[1])
        assert value is not None
        return value

    @property
    def kind(self) -> Any:
        """Readers of one kind share a workspace."""
        return self.operand.dtype, self.config.weight_quantizer.with_usage(True, True)


def weights_read(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[nn.Parameter]:
    """The parameters that the graph's te linears quantize."""
    return [reader.weight for reader in _readers(gm.graph, example_inputs)]


def use_workspaces(gm: fx.GraphModule, example_inputs: Sequence[Any], by_step: bool, report: Report) -> Supplied | None:
    """Rewrites in place; None where no weight is kept.

    by_step: the option weight_cache="step".

    Raises TeError for a frozen weight whose gradient is asked for, torch's RestartAnalysis where a weight whose values were
    dropped has another reader: it has its values again, and Dynamo has to trace anew.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    readers = []
    of_fsdp = _parameters_of_fsdp() if by_step else set()
    for reader in _readers(gm.graph, example_inputs):
        if reader.weight in FROZEN:
            _check_frozen(reader)
            readers.append(reader)
        elif by_step and not (_managed_by_fsdp(placeholders[reader.position]) or id(reader.weight) in of_fsdp):
            readers.append(reader)
    if not readers:
        _give_back_dropped(gm, example_inputs)
        return None
    inputs = _Inputs(gm.graph)
    for group in _groups(gm.graph, readers):
        inputs.add(group)
    for group, workspace in inputs.groups:
        _rewrite(gm.graph, group, inputs.nodes[workspace])
        report.workspaces.append(_record(group, workspace, inputs.nodes[workspace]))
    kept = []
    for position, placeholder in enumerate(placeholders):
        frozen = any(reader.position == position and reader.weight in FROZEN for reader in readers)
        if frozen and not placeholder.users:
            gm.graph.erase_node(placeholder)
        else:
            kept.append(position)
    _give_back_dropped(gm, [example_inputs[position] for position in kept])
    gm.recompile()
    workspaces = [workspace for _, workspace in inputs.groups]
    buffers = [n.meta["example_value"] for w in workspaces for n in inputs.nodes[w].values()]
    return Supplied(kept, workspaces, buffers)


# --- finding ------------------------------------------------------------------------------------------------


def _readers(graph: fx.Graph, example_inputs: Sequence[Any]) -> list[_Reader]:
    positions = {node: i for i, node in enumerate(graph.find_nodes(op="placeholder"))}
    found = []
    for target in _READING:
        for node in graph.find_nodes(op="call_function", target=target):
            weight: Any = node.args[1]
            if weight.op == "call_method" and weight.target == "to" and isinstance(weight.args[1], torch.dtype):
                weight = weight.args[0]
            position = positions.get(weight)
            if position is not None and _is_plain_parameter(example_inputs[position]):
                found.append(_Reader(node, position, example_inputs[position]))
    return found


def _is_plain_parameter(value: Any) -> bool:
    """Fake ones too: what DDP's buckets are compiled with."""
    return isinstance(value, nn.Parameter) and type(value) in (nn.Parameter, FakeTensor)


def _check_frozen(reader: _Reader) -> None:
    name, config = frozen_name(reader.weight), reader.config
    line = source_line(reader.node)
    where = f" ({line})" if line else ""
    if config.weight_requires_grad:
        raise TeError(
            f"te_dynamo: {name!r} is frozen for inference and would get a gradient{where}. Run under torch.no_grad(), "
            "call requires_grad_(False) on it to train what is beside it, or te_dynamo.unfreeze(model) to train it"
        )
    if config.grad_output_quantizer is None and config.input_requires_grad and is_dropped(reader.weight):
        raise TeError(
            f"te_dynamo: the high-precision values of {name!r} were dropped, and the backward of its linear{where} "
            'reads them under backward="high_precision"; freeze the model with drop_weights=False'
        )


def _managed_by_fsdp(placeholder: fx.Node) -> bool:
    """Whether Dynamo took it from a module of FSDP, whose parameters change under the same version counter."""
    source = getattr(placeholder, "_dynamo_source", None)
    while source is not None:
        if "FSDP" in type(source).__name__:
            return True
        source = getattr(source, "base", None)
    return False


def _parameters_of_fsdp() -> set[int]:
    """The ids of what FSDP2 manages in this process: torch's `replicate` runs on it too, which Dynamo does not know of."""
    states, fsdp = (sys.modules.get(f"torch.distributed.{name}") for name in ("_composable_state", "fsdp"))
    if states is None or fsdp is None:
        return set()
    managed = [module for module in list(states._module_state_mapping) if isinstance(module, fsdp.FSDPModule)]
    return {id(parameter) for module in managed for parameter in module.parameters()}


def _groups(graph: fx.Graph, readers: list[_Reader]) -> list[list[list[_Reader]]]:
    """The readers of each workspace: a list for each of its weights, several of them where it is a stack."""
    by_weight: dict[Any, list[_Reader]] = {}
    for reader in readers:
        by_weight.setdefault((reader.position, *reader.kind), []).append(reader)
    alone = {id(members[0]): members[0] for members in by_weight.values() if len(members) == 1}
    groups, stacked = [], set()
    for stack in _stacks(graph, list(alone.values())):
        groups.append([[reader] for reader in stack])
        stacked |= {id(reader) for reader in stack}
    return [*groups, *([members] for members in by_weight.values() if id(members[0]) not in stacked)]


def _stacks(graph: fx.Graph, readers: list[_Reader]) -> Iterable[list[_Reader]]:
    by_input: dict[Any, list[_Reader]] = {}
    order = {node: i for i, node in enumerate(graph.nodes)}
    linears = (reader for reader in readers if reader.node.target is _te.linear.default)
    for reader in sorted(linears, key=lambda reader: order[reader.node]):
        x, _, bias, _ = reader.node.args
        config, frozen = reader.config, reader.weight in FROZEN
        if bias is None and has_fused_kernels(config.weight_quantizer):
            by_input.setdefault((x, config, reader.operand.dtype, frozen), []).append(reader)
    for (_, config, _, frozen), group in by_input.items():
        pair = _gate_and_up(group)
        if pair is not None:
            stack = pair
        elif frozen and not config.weight_quantizer.columnwise and len(group) >= 2:
            stack = group
        else:
            continue
        widths = [reader.operand.shape[0] for reader in stack]
        distinct = len({reader.position for reader in stack}) == len(stack)
        if distinct and segments_stack(widths) and not _kept_apart(stack):
            yield stack


def _gate_and_up(group: list[_Reader]) -> list[_Reader] | None:
    """The two of one te.swiglu, the gate first."""
    if len(group) != 2:
        return None
    by_output = {user: reader for reader in group for user in reader.node.users}
    for output in by_output:
        for user in output.users:
            if user.target is _SWIGLU and all(a in by_output for a in user.args):
                return [by_output[a] for a in user.args]  # type: ignore[index]
    return None


def _kept_apart(stack: list[_Reader]) -> bool:
    """Whether these weights' values are gone but for buffers of their own."""
    if not all(is_dropped(reader.weight) and FROZEN[reader.weight].source is None for reader in stack):
        return False
    weights = [reader.weight for reader in stack]
    return entry_of(weights, _workspace([[reader] for reader in stack])) is None


# --- rewriting ----------------------------------------------------------------------------------------------


def _workspace(group: list[list[_Reader]]) -> Workspace:
    every = [reader for readers in group for reader in readers]
    quantizers = [reader.config.weight_quantizer for reader in every]
    union = quantizers[0].with_usage(any(q.rowwise for q in quantizers), any(q.columnwise for q in quantizers))
    names = dict.fromkeys(frozen_name(r.weight) or parameter_name(_placeholder(r)) or "a weight" for r in every)
    positions = tuple(readers[0].position for readers in group)
    return Workspace(positions, every[0].operand.dtype, union, ", ".join(names))


def _placeholder(reader: _Reader) -> fx.Node:
    node: Any = reader.node.args[1]
    return node if node.op == "placeholder" else node.args[0]


class _Inputs:
    """The buffers' placeholders, behind those that there are."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._last = graph.find_nodes(op="placeholder")[-1]
        self.groups: list[tuple[list[list[_Reader]], Workspace]] = []
        self.nodes: dict[Workspace, dict[str, fx.Node]] = {}

    def add(self, group: list[list[_Reader]]) -> None:
        workspace = _workspace(group)
        operands = [readers[0].operand for readers in group]
        with operands[0].fake_mode:  # type: ignore[attr-defined]
            fakes = _fakes(operands, workspace.quantizer)
        frozen = group[0][0].weight in FROZEN
        names = workspace.quantizer.buffer_names()
        self.nodes[workspace] = {
            name: self._placeholder(f"workspace_{len(self.groups)}_{name}", fake, frozen)
            for name, fake in zip(names, fakes, strict=True)
        }
        self.groups.append((group, workspace))

    def _placeholder(self, name: str, fake: torch.Tensor, fixed: bool) -> fx.Node:
        with self._graph.inserting_after(self._last):
            node = self._graph.placeholder(name)
        node._dynamo_source = None  # type: ignore[attr-defined]  # AOTAutograd asks each input for it
        node.meta["example_value"] = fake
        if fixed:  # its address does not change: CUDA graphs read it where it is
            node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
        self._last = node
        return node


def _fakes(operands: list[torch.Tensor], quantizer: Quantizer) -> list[torch.Tensor]:
    if len(operands) == 1:
        return quantized(operands[0], quantizer)
    rows = sum(operand.shape[0] for operand in operands)
    return quantized_stack(operands[0], (rows, operands[0].shape[1]), len(operands), quantizer)


def _rewrite(graph: fx.Graph, group: list[list[_Reader]], nodes: dict[str, fx.Node]) -> None:
    ends = list(itertools.accumulate(readers[0].operand.shape[0] for readers in group))
    for index, readers in enumerate(group):
        for reader in readers:
            node, config = reader.node, reader.config
            x, weight, *others = node.args
            with graph.inserting_before(node):
                buffers = [
                    _part(graph, nodes[name], name, index, [0, *ends], node) if len(group) > 1 else nodes[name]
                    for name in config.weight_quantizer.buffer_names()
                ]
                reads_values = config.grad_output_quantizer is None and config.input_requires_grad
                kept = weight if config.weight_requires_grad or reads_values else None
                new = emit(graph, _READING[node.target], (x, kept, *others, buffers), node)
                for item in list(node.users):
                    item.replace_all_uses_with(emit_getitem(graph, new, item.args[1]))  # type: ignore[arg-type]
                    graph.erase_node(item)
            graph.erase_node(node)
            if isinstance(weight, fx.Node) and weight.op != "placeholder" and not weight.users:
                graph.erase_node(weight)


def _part(graph: fx.Graph, stack: fx.Node, name: str, index: int, ends: list[int], like: fx.Node) -> fx.Node:
    """What one weight of a stack has of a buffer."""
    if name == "scale_inv":
        return emit_method(graph, "narrow", (stack, 0, index, 1), like)
    first, length = ends[index], ends[index + 1] - ends[index]
    if name == "data":
        return emit_method(graph, "narrow", (stack, 0, first, length), like)
    # A GEMM reads whole rows: a copy, which goes where the stack is read as one.
    return emit_method(graph, "contiguous", (emit_method(graph, "narrow", (stack, 1, first, length), like),), like)


def _record(group: list[list[_Reader]], workspace: Workspace, nodes: dict[str, fx.Node]) -> WorkspaceRecord:
    weight = group[0][0].weight
    return WorkspaceRecord(
        weight=workspace.name,
        quantizer=workspace.quantizer.describe(),
        nbytes=sum(node.meta["example_value"].nbytes for node in nodes.values()),
        kept="for a step" if weight not in FROZEN else "in place of its values" if is_dropped(weight) else "frozen",
    )


def _give_back_dropped(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Dropped weights that the graph still reads get their values again, and Dynamo traces anew."""
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis

    for placeholder, weight in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=False):
        if not _is_plain_parameter(weight) or not placeholder.users or not is_dropped(weight):
            continue
        source, name = FROZEN[weight].source, frozen_name(weight)
        if source is None:
            reader = next(iter(placeholder.users))
            raise TeError(
                f"te_dynamo: the high-precision values of {name!r} were dropped by te_dynamo.freeze, and {reader.target} "
                f"reads them ({source_line(reader)}); freeze the model with drop_weights=False"
            )
        restore(weight, source)
        # The one restart that a backend may ask for: Dynamo wraps all else that it raises.
        raise TensorifyScalarRestartAnalysis(restart_reason=f"te_dynamo: {name} keeps its values")
