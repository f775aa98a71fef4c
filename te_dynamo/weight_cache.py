"""Quantized weights that outlive a call: what `te_dynamo.freeze` and `options={"weight_cache": "step"}` keep.

A compiled graph takes the buffers as inputs; `WeightSupply` is called in its place and supplies them. Before each call it
compares every weight's identity, version counter and memory with those of the values that were quantized;
unseen_writes.py tells of operators and optimizers that raise no counter. What a write shows in none of these
(`parameter.data.copy_`, a numpy view) is missed until `te_dynamo.invalidate`.

Buffers of frozen weights are written in place, so that a CUDA graph which reads them stays valid. Those that last a step are
made anew: a backward that still has to run keeps the ones that its forward read.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary

from te_dynamo.errors import TeError
from te_dynamo.frozen import FROZEN, is_dropped, values_of
from te_dynamo.ops.quantize import quantize_tensor
from te_dynamo.ops.stacked import quantize_stacked
from te_dynamo.quantizers import Float8GroupedQuantizer, Quantizer
from te_dynamo.storage import QuantizedTensorStorage
from te_dynamo.unseen_writes import tell_of_unseen_writes

__all__ = ["WeightSupply", "Workspace", "dequantized", "entry_of", "forget_weights", "make_buffers", "renew_weights"]


@dataclasses.dataclass(frozen=True)
class Workspace:
    """The buffers that a graph takes in place of a weight, or of several that it multiplies as one.

    positions: of the weights among the inputs of Dynamo's graph; more than one is a stack, by rows (te.quantize_stacked), or
               experts in one tensor (Float8GroupedQuantizer).
    dtype:     in which the weight is quantized: its own, or autocast's.
    quantizer: with the usages that the graph reads.
    name:      of the weight, for errors.
    """

    positions: tuple[int, ...]
    dtype: torch.dtype
    quantizer: Quantizer
    name: str

    def key(self, weights: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """What the buffers are told by among those of the first weight."""
        return self.dtype, self.quantizer.with_usage(True, True), *map(id, weights[1:])


class _State(NamedTuple):
    """What a write to a weight changes, if torch shows it: its version counter, or where its values are."""

    version: int
    address: int
    form: tuple[Any, ...]
    storage: StorageWeakRef

    @classmethod
    def of(cls, weight: torch.Tensor) -> _State:
        form = weight.dtype, *weight.stride()
        return cls(weight._version, weight.data_ptr(), form, StorageWeakRef(weight.untyped_storage()))


class Entry:
    """The kept buffers of one weight or stack."""

    __slots__ = ("__weakref__", "buffers", "quantizer", "readers", "states", "weights")

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        this = weakref.ref(self)
        self.weights = [weakref.ref(weight, lambda _: _expire(this)) for weight in weights]
        self.states: list[_State] | None = None  # None: the values are out of date
        self.quantizer: Quantizer | None = None
        self.buffers: dict[str, torch.Tensor] = {}
        self.readers: weakref.WeakSet[_Bundle] = weakref.WeakSet()

    def is_of(self, weights: Sequence[torch.Tensor]) -> bool:
        return all(ref() is weight for ref, weight in zip(self.weights, weights, strict=True))

    def expire(self) -> None:
        """The next call of every graph that reads it looks again."""
        for bundle in self.readers:
            bundle.held = None
        self.readers.clear()


def _expire(entry: weakref.ref[Entry]) -> None:
    """A weight is gone."""
    held = entry()
    if held is not None:
        held.expire()


_entries: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""First weight -> {key: Entry}."""

_lock = threading.RLock()


def entry_of(weights: Sequence[torch.Tensor], workspace: Workspace) -> Entry | None:
    """The kept buffers, if there are any."""
    entry = _entries.get(weights[0], {}).get(workspace.key(weights))
    return entry if entry is not None and entry.is_of(weights) else None


def renew_weights(weights: Iterable[torch.Tensor]) -> None:
    """What is kept of these weights is quantized anew at the next call."""
    _each_entry(weights, keep=True)


def forget_weights(weights: Iterable[torch.Tensor]) -> None:
    """What is kept of these weights is freed."""
    _each_entry(weights, keep=False)


def _memory_was_written(tensors: Iterable[torch.Tensor]) -> None:
    """What is kept of weights in the memory of `tensors` is quantized anew at the next call."""
    plain = (torch.Tensor, torch.nn.Parameter)
    storages = {StorageWeakRef(tensor.untyped_storage()) for tensor in tensors if type(tensor) in plain}
    with _lock:
        for table in _entries.values():
            for entry in table.values():
                if any(state.storage in storages for state in entry.states or ()):
                    entry.states = None
                    entry.expire()


def dequantized(weight: torch.Tensor) -> torch.Tensor:
    """What is kept of a dropped weight, in its own shape and dtype."""
    with _lock, torch.no_grad():
        for table in _entries.values():
            for entry in table.values():
                members = [ref() for ref in entry.weights]
                if not any(member is weight for member in members) or entry.quantizer is None:
                    continue
                index = next(i for i, member in enumerate(members) if member is weight)
                first = sum(member.shape[0] for member in members[:index] if member is not None)
                quantizer, buffers = entry.quantizer, entry.buffers
                if len(members) > 1 and isinstance(quantizer, Float8GroupedQuantizer):
                    shape = (len(members), *weight.shape)
                    metadata = quantizer.create_metadata(shape, weight.dtype)
                    return QuantizedTensorStorage.from_metadata(buffers, metadata).dequantize()[index].clone()
                if len(members) > 1:
                    quantizer = quantizer.with_usage(columnwise=False)
                    rows = entry.buffers["data"][first : first + weight.shape[0]]
                    buffers = {"data": rows, "scale_inv": entry.buffers["scale_inv"][index : index + 1]}
                metadata = quantizer.create_metadata(tuple(weight.shape), weight.dtype)
                return QuantizedTensorStorage.from_metadata(buffers, metadata).dequantize()
    raise TeError("te_dynamo: nothing is kept of this weight")


def _each_entry(weights: Iterable[torch.Tensor], keep: bool) -> None:
    wanted = {id(weight) for weight in weights}
    with _lock:
        for first, table in list(_entries.items()):
            for key, entry in list(table.items()):
                if id(first) in wanted or wanted & {id(ref()) for ref in entry.weights}:
                    entry.states = None
                    entry.expire()
                    if not keep:
                        del table[key]
            if not table:  # nor a weak reference, for torch.utils.swap_tensors
                del _entries[first]


class _Held(NamedTuple):
    """All buffers of one graph for one set of weights, and what must hold for them to be current."""

    tensors: tuple[torch.Tensor, ...]
    checks: list[tuple[int, Any, int, int, StorageWeakRef]]
    entries: list[Entry]


class _Bundle:
    """What is held for one set of weights, None once one of them was written or is gone."""

    __slots__ = ("__weakref__", "held", "ready", "streams")

    def __init__(self, held: _Held) -> None:
        self.held: _Held | None = held
        self.streams: set[int] = set()
        self.ready: Any = None

    def current(self, args: Sequence[Any]) -> tuple[torch.Tensor, ...] | None:
        held = self.held  # once: another thread may find a weight written
        if held is None:
            return None
        for position, ref, version, address, storage in held.checks:
            weight = args[position]
            if (
                ref() is not weight
                or weight._version != version
                or weight.data_ptr() != address
                or _is_gone(storage.cdata)  # other memory may have its address
            ):
                return None
        return held.tensors


_is_gone = torch.UntypedStorage._expired


class WeightSupply:
    """Calls a compiled graph with the weights' buffers behind those of its inputs that it still takes.

    kept:       positions of the inputs of Dynamo's graph that the compiled one takes.
    workspaces: what it takes behind them, in order.
    by_step:    whether buffers of weights that are not frozen are kept too.
    check:      whether kept buffers are compared with the weights before each call (the option weight_cache_check).
    """

    def __init__(
        self,
        compiled: Callable[..., Any],
        kept: Sequence[int],
        workspaces: Sequence[Workspace],
        by_step: bool,
        check: bool,
    ) -> None:
        tell_of_unseen_writes(_memory_was_written)
        self._compiled, self._workspaces = compiled, tuple(workspaces)
        self._kept = _taker(kept)
        self._by_step, self._check = by_step, check
        self._first = workspaces[0].positions[0]
        # Layers of one class share a graph: a bundle for each, by its first weight.
        self._bundles: dict[int, _Bundle] = {}

    def __call__(self, *args: Any) -> Any:
        first = args[self._first]
        bundle = self._bundles.get(id(first))
        tensors = None if bundle is None else bundle.current(args)
        if bundle is None or tensors is None:
            tensors = self._renew(args)
        else:
            if self._check:
                self._compare(args, tensors)
            if first.is_cuda:
                tensors = self._on_this_stream(args, bundle, tensors)
        return self._compiled(*self._kept(args), *tensors)

    def _renew(self, args: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """Quantizes what is out of date; remembers the result if all of it may be kept."""
        with _lock, torch.inference_mode(False), torch.no_grad():
            if not all(self._may_keep([args[p] for p in w.positions]) for w in self._workspaces):
                return tuple(buffer for w in self._workspaces for buffer in make_buffers(w, args).values())
            held = _Held((), [], [])
            tensors: list[torch.Tensor] = []
            for workspace in self._workspaces:
                entry = _up_to_date([args[p] for p in workspace.positions], workspace, args)
                held.entries.append(entry)
                tensors += [entry.buffers[name] for name in workspace.quantizer.buffer_names()]
                for position, ref, state in zip(workspace.positions, entry.weights, entry.states or (), strict=True):
                    held.checks.append((position, ref, state.version, state.address, state.storage))
            self._release_sources(args)
            bundle = _Bundle(held._replace(tensors=tuple(tensors)))
            first = args[self._first]
            if first.is_cuda:
                bundle.streams.add(torch.cuda.current_stream(first.device).cuda_stream)
                bundle.ready = torch.cuda.current_stream(first.device).record_event()
                for device in {tensor.device for tensor in tensors} - {first.device}:
                    torch.cuda.synchronize(device)  # the event is of one device
            for entry in held.entries:
                entry.readers.add(bundle)
            for other in [key for key, each in self._bundles.items() if each.held is None]:
                del self._bundles[other]
            self._bundles[id(first)] = bundle
        return tuple(tensors)

    def _may_keep(self, weights: Sequence[torch.Tensor]) -> bool:
        """Whether writes to the weights would be seen, and keeping what is made of them was asked for."""
        if any(isinstance(weight, FakeTensor) or weight.is_inference() for weight in weights):
            return False
        if weights[0].is_cuda and torch.cuda.is_current_stream_capturing():
            return False  # what is made here exists when the CUDA graph is replayed, not before
        return self._by_step or all(weight in FROZEN for weight in weights)

    def _release_sources(self, args: Sequence[Any]) -> None:
        for workspace in self._workspaces:
            for position in workspace.positions:
                if is_dropped(args[position]):
                    FROZEN[args[position]].source = None

    def _on_this_stream(
        self, args: Sequence[Any], bundle: _Bundle, tensors: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """The buffers, once the work that made them on another stream is ordered before this one's."""
        stream = torch.cuda.current_stream(args[self._first].device)
        capturing = torch.cuda.is_current_stream_capturing()
        if capturing and self._by_step:
            # A replay compares nothing: the CUDA graph has to quantize what is not frozen.
            with torch.no_grad():
                return tuple(buffer for w in self._workspaces for buffer in make_buffers(w, args).values())
        if stream.cuda_stream not in bundle.streams and not capturing:
            stream.wait_event(bundle.ready)
            for tensor in tensors:
                tensor.record_stream(stream)
            bundle.streams.add(stream.cuda_stream)
        return tensors

    def _compare(self, args: Sequence[Any], tensors: tuple[torch.Tensor, ...]) -> None:
        held = iter(tensors)
        for workspace in self._workspaces:
            if any(is_dropped(args[position]) for position in workspace.positions):
                for _ in workspace.quantizer.buffer_names():
                    next(held)
                continue
            with torch.no_grad():
                expected = make_buffers(workspace, args)
            differing = [name for name, new in expected.items() if not _same_bytes(new, next(held))]
            if differing:
                raise TeError(
                    f"te_dynamo: {workspace.name} was written in a way that neither its version counter nor its address "
                    "shows (through .data, a numpy view, another process): its quantized copy is out of date. Call "
                    "te_dynamo.invalidate(model) after such a write"
                )


def _taker(positions: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    if len(positions) > 1:
        return itemgetter(*positions)
    return lambda args: [args[p] for p in positions]


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def make_buffers(
    workspace: Workspace, args: Sequence[Any], quantizer: Quantizer | None = None
) -> dict[str, torch.Tensor]:
    """The buffers by name, quantized now; `quantizer` for other usages than the workspace's."""
    quantizer = quantizer or workspace.quantizer
    values = [values_of(args[p]).to(workspace.dtype).contiguous() for p in workspace.positions]
    if len(values) == 1:
        made = quantize_tensor(values[0], quantizer)
    elif isinstance(quantizer, Float8GroupedQuantizer):
        made = quantize_tensor(torch.stack(values), quantizer)
    else:
        made = quantize_stacked(values, quantizer, False)
    return dict(zip(quantizer.buffer_names(), made, strict=True))


def _up_to_date(weights: Sequence[torch.Tensor], workspace: Workspace, args: Sequence[Any]) -> Entry:
    """The entry with the usages that the workspace reads, of the weights' present values."""
    table = _entries.setdefault(weights[0], {})
    key = workspace.key(weights)
    entry = entry_of(weights, workspace)
    if entry is None:
        for other in [k for k, e in table.items() if any(ref() is None for ref in e.weights)]:
            del table[other]
        entry = table[key] = Entry(weights)
    states = [_State.of(weight) for weight in weights]
    wanted, held = workspace.quantizer, entry.quantizer
    if held is not None:
        wanted = wanted.with_usage(wanted.rowwise or held.rowwise, wanted.columnwise or held.columnwise)
    written = entry.states != states
    if not written and wanted == held:
        return entry
    made = make_buffers(workspace, args, wanted)
    if not written:  # a usage more: what is there stays where it is
        made |= entry.buffers
    elif all(weight in FROZEN for weight in weights):
        for name, buffer in entry.buffers.items():
            made[name] = buffer.copy_(made[name])
    entry.expire()
    entry.buffers = {name: made[name] for name in wanted.buffer_names()}
    entry.states, entry.quantizer = states, wanted
    return entry
