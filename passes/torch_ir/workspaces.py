"""Linears whose quantized weight is kept read it as inputs of the graph: of frozen weights, and under weight_cache="step".

    before    l_w = placeholder;  y = te.linear(x, l_w, bias, config)[0]
    after     w_data = placeholder;  w_scale_inv = placeholder
              y = te.linear_with_workspace(x, None, bias, config, [w_data, w_scale_inv])[0]      frozen: l_w is no input any more
              y = te.linear_with_workspace(x, l_w, bias, config, [w_data, ...])[0]               else l_w is what gets the gradient

At Torch IR, so that AOTAutograd, the partitioner and Inductor see the buffers as what they are: inputs, which are never
written and of which backward gets references. In a body (a checkpointed region) placeholders and the operands of its calls
lead to them. te_dynamo/weights/cache.py supplies them, before the graph runs: a weight that the graph writes is not kept.

Linears that fusions/shared_input.py would stack have slices of one stack (te.quantize_stacked), for it to find: the two that
te.gated reads, and of frozen weights the others of one input too, if nobody reads their columns.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from te_dynamo.dialect.fakes import quantized, quantized_stack
from te_dynamo.dialect.linear import LinearConfig
from te_dynamo.dialect.stacked import places_in_stack, side_stacks, stacks_of
from te_dynamo.errors import KeptWeightError
from te_dynamo.passes.torch_ir.fsdp import managed_by_fsdp
from te_dynamo.passes.torch_ir.match.mutation import reads_through, written_inputs
from te_dynamo.passes.torch_ir.match.values import calls, emit, emit_getitem, emit_method, replace, tensor_of
from te_dynamo.passes.torch_ir.match.where import parameter_name, source_line
from te_dynamo.passes.torch_ir.regions import Region, regions
from te_dynamo.quantized.quantizers import Quantizer
from te_dynamo.report import Report, WorkspaceRecord
from te_dynamo.weights.cache import Workspace, entry_of
from te_dynamo.weights.frozen import FROZEN, frozen_name, is_dropped, is_part, restore

_te = torch.ops.te
_READING: dict[Any, torch._ops.OpOverload] = {
    _te.linear.default: _te.linear_with_workspace.default,
    _te.grouped_linear.default: _te.grouped_linear_with_workspace.default,
}
"""The operations that quantize a weight, and what they are with a workspace: both have x, weight, .., config."""
_GATED = _te.gated.default

_Kind = tuple[torch.dtype, Quantizer]
_Key = tuple[Region, tuple[fx.Node, ...], _Kind]
"""A workspace in a region: the placeholders of its weights, and what it is."""


@dataclasses.dataclass
class Supplied:
    """What the graph takes now: inputs of Dynamo's graph by position, then the buffers of workspaces."""

    kept: list[int]
    workspaces: list[Workspace]
    buffers: list[torch.Tensor]  # fakes, in order


@dataclasses.dataclass(eq=False)
class _Reader:
    """One te.linear or te.grouped_linear of a weight, or of several that one tensor is made of, that may be kept.

    sources: the weights' placeholders in the region.
    ways:    their positions among the whole graph's inputs, for each way that leads to the region.
    weights: the parameters of all ways.
    """

    region: Region
    node: fx.Node
    sources: tuple[fx.Node, ...]
    ways: list[tuple[int, ...]]
    weights: list[nn.Parameter]

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
    def kind(self) -> _Kind:
        """Readers of one kind share a workspace."""
        return self.operand.dtype, self.config.weight_quantizer.with_usage(True, True)

    @property
    def frozen(self) -> bool:
        return all(weight in FROZEN for weight in self.weights)

    @property
    def positions(self) -> set[int]:
        return set(itertools.chain.from_iterable(self.ways))


@dataclasses.dataclass(eq=False)
class _Group:
    """The readers of one workspace in one region: a list for each of its parts, several of them where it is a stack."""

    parts: list[list[_Reader]]

    @property
    def readers(self) -> list[_Reader]:
        return [reader for readers in self.parts for reader in readers]

    @property
    def region(self) -> Region:
        return self.parts[0][0].region

    @property
    def kind(self) -> _Kind:
        return self.parts[0][0].kind

    @property
    def sources(self) -> tuple[fx.Node, ...]:
        return tuple(source for readers in self.parts for source in readers[0].sources)

    @property
    def ways(self) -> list[tuple[int, ...]]:
        of_parts = zip(*(readers[0].ways for readers in self.parts), strict=True)
        return [tuple(itertools.chain.from_iterable(way)) for way in of_parts]

    @property
    def quantizer(self) -> Quantizer:
        """With every usage that is read."""
        quantizers = [reader.config.weight_quantizer for reader in self.readers]
        return functools.reduce(_union, quantizers)


def use_workspaces(gm: fx.GraphModule, example_inputs: Sequence[Any], by_step: bool, report: Report) -> Supplied | None:
    """Rewrites in place; None where no weight is kept.

    by_step: the option weight_cache="step".

    Raises KeptWeightError for a frozen weight whose gradient is asked for, torch's RestartAnalysis where a weight whose values were
    dropped has another reader: it has its values again, and Dynamo has to trace anew.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    parts = regions(gm)
    found = _readers(parts, example_inputs)
    written = {placeholders.index(node) for node in written_inputs(gm.graph)} if found else set()
    managed = managed_by_fsdp(gm, example_inputs) if by_step else set()
    parts_of_more = {reader.node: reader for reader in found if any(map(is_part, reader.weights))}
    report.notes += _of_parts([reader for reader in parts_of_more.values() if by_step or reader.frozen])
    readers = [
        reader
        for reader in map(_checked, found)
        if reader.positions.isdisjoint(written)
        and reader.node not in parts_of_more
        and (reader.frozen or (by_step and reader.positions.isdisjoint(managed)))
    ]
    if not readers:
        _give_back_dropped(gm, example_inputs)
        return None
    groups = _groups(readers, example_inputs)
    inputs = _Inputs(example_inputs)
    for group in groups:
        inputs.ask(group.region, group.sources, group.kind, group.quantizer)
    for group in groups:
        _rewrite(group, inputs.buffers(group.region, group.sources, group.kind, group.readers[0].operand))
    inputs.close(parts)
    frozen = {p for reader in readers for p in reader.positions if example_inputs[p] in FROZEN}
    kept = []
    for position, placeholder in enumerate(placeholders):
        if position in frozen and not placeholder.users:
            gm.graph.erase_node(placeholder)
        else:
            kept.append(position)
    _give_back_dropped(gm, [example_inputs[position] for position in kept])
    gm.recompile()
    report.workspaces += [_record(w, fakes, example_inputs) for w, fakes in inputs.workspaces]
    buffers = [fake for _, fakes in inputs.workspaces for fake in fakes]
    return Supplied(kept, [workspace for workspace, _ in inputs.workspaces], buffers)


# --- finding ------------------------------------------------------------------------------------------------


def _readers(parts: list[Region], example_inputs: Sequence[Any]) -> list[_Reader]:
    found = []
    for region in parts:
        for target in _READING:
            for node in region.graph.find_nodes(op="call_function", target=target):
                sources = _sources(node)
                positions = [region.inputs.get(source, []) for source in sources]
                if not positions or [] in positions:
                    continue
                weights = [example_inputs[p] for each in positions for p in each]
                if all(map(_is_plain_parameter, weights)):
                    found.append(_Reader(region, node, sources, list(zip(*positions, strict=True)), weights))
    return found


def _sources(node: fx.Node) -> tuple[fx.Node, ...]:
    """The weight that a te linear reads, the experts' of a tensor that was made of them; before autocast's cast.

    Experts that share one matrix's blocks of scales have no part of it each, and are not kept. A cast or a stack that is written is no
    copy of a weight any more: it stands for itself.
    """
    weight: Any = node.args[1]
    weights = [weight]
    grouped = node.target is _te.grouped_linear.default and node.args[3].input_quantizer.one_scale  # type: ignore[union-attr]
    if grouped and calls(weight, {torch.stack}) and len(weight.args) == 1 and not weight.kwargs:
        weights = weight.args[0]
    casts = [w for w in weights if w.op == "call_method" and w.target == "to" and isinstance(w.args[1], torch.dtype)]
    between = [*casts, *([] if weights == [weight] else [weight])]
    if between and not reads_through(node, *between):
        return (weight,)
    return tuple(each.args[0] if each in casts else each for each in weights)


def _is_plain_parameter(value: Any) -> bool:
    """Fake ones too: what DDP's buckets are compiled with."""
    return isinstance(value, nn.Parameter) and type(value) in (nn.Parameter, FakeTensor)


def _of_parts(readers: list[_Reader]) -> Iterator[str]:
    if readers:
        name = frozen_name(readers[0].weights[0]) or parameter_name(readers[0].sources[0]) or "a weight"
        yield (
            f"the weights of {len(readers)} linears ({name!r} first) are quantized in each call: they are parts of larger memory, such as a flat "
            "buffer of DeepSpeed, apex or Megatron, and a write to that raises no version counter of theirs. A parameter of its own "
            "memory is kept: parameter.data = parameter.data.clone()"
        )


def _checked(reader: _Reader) -> _Reader:
    """The reader. Raises KeptWeightError where a frozen weight would get a gradient, or values that are gone would be read."""
    config = reader.config
    line = source_line(reader.node)
    where = f" ({line})" if line else ""
    for weight in reader.weights:
        if weight in FROZEN and config.weight_requires_grad and weight.requires_grad:
            raise KeptWeightError(
                f"te_dynamo: {frozen_name(weight)!r} is frozen for inference and would get a gradient{where}. Run under "
                "torch.no_grad(), call requires_grad_(False) on it to train what is beside it, or "
                "te_dynamo.unfreeze(model) to train it"
            )
        if config.grad_output_quantizer is None and config.input_requires_grad and is_dropped(weight):
            raise KeptWeightError(
                f"te_dynamo: the high-precision values of {frozen_name(weight)!r} were dropped, and the backward of its "
                f'linear{where} reads them under backward="high_precision"; freeze the model with drop_weights=False'
            )
    return reader


# --- grouping -----------------------------------------------------------------------------------------------


def _groups(readers: list[_Reader], example_inputs: Sequence[Any]) -> list[_Group]:
    """A weight is in one stack wherever it is read, or in none: otherwise it would be quantized once for each."""
    by_region: dict[Region, list[_Reader]] = {}
    for reader in readers:
        by_region.setdefault(reader.region, []).append(reader)
    groups = [group for region in by_region for group in _groups_of(by_region[region], example_inputs)]
    stacks: dict[Any, set[tuple[int, ...]]] = {}
    for group in groups:
        for way in group.ways:
            for position in way:
                stacks.setdefault((position, group.kind), set()).add(way)
    split = []
    for group in groups:
        several = any(len(stacks[position, group.kind]) > 1 for way in group.ways for position in way)
        split += [_Group([part]) for part in group.parts] if several else [group]
    return split


def _groups_of(readers: list[_Reader], example_inputs: Sequence[Any]) -> list[_Group]:
    by_weight: dict[Any, list[_Reader]] = {}
    for reader in readers:
        by_weight.setdefault((reader.sources, *reader.kind), []).append(reader)
    alone = [members[0] for members in by_weight.values() if len(members) == 1]
    stacks = list(_stacks(alone, example_inputs))
    stacked = {id(reader) for stack in stacks for reader in stack.readers}
    return [*stacks, *(_Group([members]) for members in by_weight.values() if id(members[0]) not in stacked)]


def _stacks(readers: list[_Reader], example_inputs: Sequence[Any]) -> Iterable[_Group]:
    by_input: dict[Any, list[_Reader]] = {}
    linears = [reader for reader in readers if reader.node.target is _te.linear.default]
    for reader in sorted(linears, key=lambda reader: reader.node):
        x, config = reader.node.args[0], reader.config
        sides_stack = side_stacks(reader.operand.shape[0])
        if _stacks_kept(config.weight_quantizer) and not config.weight_transposed and sides_stack:
            by_input.setdefault((x, config, reader.operand.dtype, reader.frozen), []).append(reader)
    for (_, config, _, frozen), group in by_input.items():
        stacks = _gates_and_ups(group)
        if frozen and not config.weight_quantizer.columnwise:
            stacks += stacks_of([reader for reader in group if not any(reader in pair for pair in stacks)])
        for stack in stacks:
            found = _Group([[reader] for reader in stack])
            distinct = all(len(set(way)) == len(way) for way in found.ways)
            if len(stack) > 1 and distinct and not _kept_apart(found, example_inputs):
                yield found


def _stacks_kept(quantizer: Quantizer) -> bool:
    """Whether kept weights may be a stack: in blocks where nobody reads columns, of which no slice is a part's own buffer."""
    return quantizer.one_scale or (quantizer.stacks == "blocks" and not quantizer.columnwise)


def _gates_and_ups(group: list[_Reader]) -> list[Sequence[_Reader]]:
    """The two of each te.gated, the gate first."""
    by_output = {user: reader for reader in group for user in reader.node.users}
    pairs: list[Sequence[_Reader]] = []
    for user in dict.fromkeys(user for output in by_output for user in output.users if user.target is _GATED):
        pair = [by_output[a] for a in user.args[:2] if a in by_output]  # type: ignore[index]
        if len({*pair}) == 2 and not any(reader in other for other in pairs for reader in pair):
            pairs.append(pair)
    return pairs


def _kept_apart(stack: _Group, example_inputs: Sequence[Any]) -> bool:
    """Whether the values of these weights are gone but for buffers of their own."""
    for way in stack.ways:
        weights = [example_inputs[position] for position in way]
        gone = all(is_dropped(weight) and FROZEN[weight].source is None for weight in weights)
        if gone and entry_of(weights, Workspace(way, stack.kind[0], stack.quantizer, "")) is None:
            return True
    return False


# --- rewriting ----------------------------------------------------------------------------------------------


def _union(one: Quantizer, other: Quantizer) -> Quantizer:
    return one.with_usage(one.rowwise or other.rowwise, one.columnwise or other.columnwise)


class _Inputs:
    """The buffers' placeholders, behind those that there are: of the whole graph and, as operands, of every body.

    What is asked for in a body is asked for in those that run it, so that all who read one weight share its workspace.
    """

    def __init__(self, example_inputs: Sequence[Any]) -> None:
        self._example_inputs = example_inputs
        self._asked: dict[_Key, Quantizer] = {}
        self._nodes: dict[_Key, dict[str, fx.Node]] = {}
        self._count: dict[Region, int] = {}
        self.workspaces: list[tuple[Workspace, list[torch.Tensor]]] = []

    def ask(self, region: Region, sources: tuple[fx.Node, ...], kind: _Kind, quantizer: Quantizer) -> None:
        key = region, sources, kind
        self._asked[key] = _union(self._asked[key], quantizer) if key in self._asked else quantizer
        for caller, operands in _operands(region, sources):
            self.ask(caller, operands, kind, quantizer)

    def buffers(
        self, region: Region, sources: tuple[fx.Node, ...], kind: _Kind, operand: torch.Tensor
    ) -> dict[str, fx.Node]:
        """Name -> placeholder, once everything was asked for."""
        key = region, sources, kind
        if key not in self._nodes:
            quantizer = self._asked[key]
            passed = [self.buffers(caller, given, kind, operand) for caller, given in _operands(region, sources)]
            fakes = _fakes(sources, operand, quantizer)
            number = self._count[region] = self._count.get(region, -1) + 1
            self._nodes[key] = {
                name: region.take(f"workspace_{number}_{name}", fake, [buffers[name] for buffers in passed])
                for name, fake in zip(quantizer.buffer_names(), fakes, strict=True)
            }
            if not region.calls:
                self._add(key, fakes)
        return self._nodes[key]

    def _add(self, key: _Key, fakes: list[torch.Tensor]) -> None:
        region, sources, (dtype, _) = key
        positions = tuple(position for source in sources for position in region.inputs[source])
        weights = [self._example_inputs[position] for position in positions]
        names = dict.fromkeys(
            frozen_name(weight) or parameter_name(source) or "a weight"
            for weight, source in zip(weights, sources, strict=True)
        )
        self.workspaces.append((Workspace(positions, dtype, self._asked[key], ", ".join(names)), fakes))
        if all(weight in FROZEN for weight in weights):
            for node in self._nodes[key].values():  # its address does not change: CUDA graphs read it where it is
                node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}

    def close(self, parts: list[Region]) -> None:
        """Bodies take the buffers, and no more the weights that only were quantized."""
        sources: dict[Region, dict[fx.Node, None]] = {}
        for region, of_region, _ in self._asked:
            sources.setdefault(region, {}).update(dict.fromkeys(of_region))
        for region in reversed(parts):
            if region.calls and region in sources:
                for source in sources[region]:
                    if not source.users:
                        region.drop(source)
                region.close()


def _operands(region: Region, sources: tuple[fx.Node, ...]) -> list[tuple[Region, tuple[fx.Node, ...]]]:
    """(caller, its nodes for these placeholders) of each call."""
    return [
        (caller, tuple(region.operands[source][i] for source in sources)) for i, (caller, _) in enumerate(region.calls)
    ]


def _fakes(sources: tuple[fx.Node, ...], operand: torch.Tensor, quantizer: Quantizer) -> list[torch.Tensor]:
    with operand.fake_mode:  # type: ignore[attr-defined]
        if len(sources) == 1 or operand.dim() > 2:
            return quantized(operand, quantizer)
        rows = sum(tensor_of(source).shape[0] for source in sources)
        return quantized_stack(operand, (rows, operand.shape[1]), len(sources), quantizer)


def _rewrite(group: _Group, nodes: dict[str, fx.Node]) -> None:
    rows = [readers[0].operand.shape[0] for readers in group.parts]
    graph = group.region.graph
    for index, readers in enumerate(group.parts):
        for reader in readers:
            node, config = reader.node, reader.config
            x, weight, *others = node.args
            with graph.inserting_before(node):
                buffers = [
                    _part(graph, nodes[name], places_in_stack(config.weight_quantizer, rows, index)[name], node)
                    if len(rows) > 1
                    else nodes[name]
                    for name in config.weight_quantizer.buffer_names()
                ]
                reads_values = config.grad_output_quantizer is None and config.input_requires_grad
                kept = weight if config.weight_requires_grad or reads_values else None
                new = emit(graph, _READING[node.target], (x, kept, *others, buffers), node)
                for item in list(node.users):
                    replace(item, emit_getitem(graph, new, item.args[1]))  # type: ignore[arg-type]
                    graph.erase_node(item)
            graph.erase_node(node)
            _erase_computed(graph, weight)


def _erase_computed(graph: fx.Graph, weight: Any) -> None:
    """Takes away autocast's casts and the experts' tensor, once nothing reads them."""
    if weight.op != "placeholder" and not weight.users:
        inputs = weight.all_input_nodes
        graph.erase_node(weight)
        for node in inputs:
            _erase_computed(graph, node)


def _part(graph: fx.Graph, stack: fx.Node, place: tuple[int, int, int], like: fx.Node) -> fx.Node:
    """What one weight of a stack has of a buffer."""
    part = emit_method(graph, "narrow", (stack, *place), like)
    # A GEMM reads whole rows: a copy, which goes where the stack is read as one.
    return emit_method(graph, "contiguous", (part,), like) if place[0] else part


def _record(workspace: Workspace, fakes: list[torch.Tensor], example_inputs: Sequence[Any]) -> WorkspaceRecord:
    weights = [example_inputs[position] for position in workspace.positions]
    frozen, dropped = all(w in FROZEN for w in weights), any(is_dropped(w) for w in weights)
    return WorkspaceRecord(
        weight=workspace.name,
        quantizer=workspace.quantizer.describe(),
        nbytes=sum(fake.nbytes for fake in fakes),
        kept="for a step" if not frozen else "in place of its values" if dropped else "frozen",
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
            raise KeptWeightError(
                f"te_dynamo: the high-precision values of {name!r} were dropped by te_dynamo.freeze, and {reader.target} "
                f"reads them ({source_line(reader)}); freeze the model with drop_weights=False"
            )
        restore(weight, source)
        # The one restart that a backend may ask for: Dynamo wraps all else that it raises.
        raise TensorifyScalarRestartAnalysis(restart_reason=f"te_dynamo: {name} keeps its values")
