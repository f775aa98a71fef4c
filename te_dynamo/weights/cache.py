"""Quantized weights that outlive a call: what `te_dynamo.freeze` and `options={"weight_cache": "step"}` keep.

A compiled graph takes the buffers as inputs; `WeightSupply` is called in its place and supplies them. Before each call it
compares every weight's identity, version counter and memory with those of the values that were quantized;
unseen_writes.py tells of operators and optimizers that raise no counter. What a write shows in none of these
(`parameter.data.copy_`, a numpy view) is missed until `te_dynamo.invalidate`.

Buffers of frozen weights are written in place, so that a CUDA graph which reads them stays valid; where they do not fit any
more, new ones are made. Those that last a step are made anew: a backward that still has to run keeps the ones that its
forward read. Of a dropped weight the buffers are all there is: one in a stack keeps its part of them while others are written.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary

from te_dynamo.dialect.stacked import places_in_stack
from te_dynamo.errors import KeptWeightError
from te_dynamo.quantized.quantizers import Quantizer
from te_dynamo.quantized.storage import QuantizedTensorStorage
from te_dynamo.weights.frozen import FROZEN, end_own_load, is_dropped, is_part, lock, place_of, values_of
from te_dynamo.weights.quantize_together import Values, quantize_together
from te_dynamo.weights.unseen_writes import tell_of_unseen_writes


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

    @property
    def kind(self) -> tuple[torch.dtype, Quantizer]:
        """Workspaces of one kind hold a weight in the same codes."""
        return self.dtype, self.quantizer.with_usage(True, True)

    def weights(self, args: Sequence[Any]) -> list[torch.Tensor]:
        return [args[position] for position in self.positions]

    def key(self, weights: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """What the buffers are told by among those of a weight."""
        return *self.kind, *map(id, weights)


class _State(NamedTuple):
    """What a write to a weight changes, if torch shows it: its version counter, or where its values are."""

    version: int
    address: int
    form: tuple[Any, ...]
    storage: StorageWeakRef

    @classmethod
    def of(cls, weight: torch.Tensor) -> _State:
        place = place_of(weight)
        form = place.dtype, *place.stride()
        return cls(weight._version, place.data_ptr(), form, StorageWeakRef(place.untyped_storage()))


class Entry:
    """The kept buffers of one weight or stack."""

    __slots__ = ("__weakref__", "buffers", "made", "quantizer", "readers", "rows", "states", "weights")

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        this = weakref.ref(self)
        self.weights: list[Callable[[], torch.Tensor | None]]
        self.weights = [weakref.ref(weight, lambda _: _expire(this)) for weight in weights]
        self.states: list[_State | None] = [None] * len(weights)  # None: the values are out of date
        self.rows: list[int] = []  # of each, where they are stacked
        self.quantizer: Quantizer | None = None
        self.buffers: dict[str, torch.Tensor] = {}
        self.made: tuple[int, Any] | None = None  # on which stream, and the event behind it
        self.readers: weakref.WeakSet[_Bundle] = weakref.WeakSet()

    def is_of(self, weights: Sequence[torch.Tensor]) -> bool:
        return all(ref() is weight for ref, weight in zip(self.weights, weights, strict=True))

    def part(self, weight: torch.Tensor) -> dict[str, torch.Tensor] | None:
        """What the buffers hold of one weight, as views; None if that is not what the weight is."""
        index = next((i for i, ref in enumerate(self.weights) if ref() is weight), None)
        if index is None or self.quantizer is None or self.states[index] != _State.of(weight):
            return None
        self.on_this_stream()
        return _part(self.buffers, self.quantizer, self.rows, index)

    def on_this_stream(self) -> None:
        """The work that made the buffers on another stream is ordered before what this one is given from now on."""
        if self.made is None:
            return
        stream = torch.cuda.current_stream(next(iter(self.buffers.values())).device)
        made_on, ready = self.made
        if stream.cuda_stream == made_on or torch.cuda.is_current_stream_capturing():
            return
        _use_behind(ready, stream, self.buffers.values())

    def forget(self, weight: torch.Tensor, keep: bool) -> None:
        """What is held of the weight is out of date; without `keep`, nothing leads to the weight any more."""
        for index, ref in enumerate(self.weights):
            if ref() is weight:
                self.states[index] = None
                if not keep:
                    self.weights[index] = _nothing
        self.expire()

    def expire(self) -> None:
        """The next call of every graph that reads it looks again."""
        for bundle in self.readers:
            bundle.held = None
        self.readers.clear()


def _nothing() -> None:
    """Stands for a reference to a weight that is gone."""


def _expire(entry: weakref.ref[Entry]) -> None:
    """A weight is gone."""
    held = entry()
    if held is not None:
        held.expire()


_entries: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Weight -> {key: Entry}: a stack is found by, and lives on with, each of its weights."""


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
    with lock:
        sharing = [w for w in list(_entries) if not is_dropped(w) and StorageWeakRef(w.untyped_storage()) in storages]
        renew_weights(sharing)


def dequantized(weight: torch.Tensor) -> torch.Tensor:
    """What is kept of a dropped weight, in its own shape and dtype. Raises KeptWeightError if there is nothing."""
    return kept_storage(weight).dequantize().view(weight.shape)


def kept_storage(weight: torch.Tensor) -> QuantizedTensorStorage:
    """What is kept of a dropped weight, as it is held. Raises KeptWeightError if there is nothing."""
    with lock, torch.inference_mode(False), torch.no_grad():
        for entry in _entries.get(weight, {}).values():
            part = entry.part(weight)
            if part is None or entry.quantizer is None:
                continue
            quantizer, shape = entry.quantizer, tuple(weight.shape)
            if len(entry.weights) > 1:
                quantizer = quantizer.with_usage(columnwise=False)
                shape = (1, *shape) if not quantizer.reads_as_matrix else shape
            buffers = {name: part[name] for name in quantizer.buffer_names()}
            metadata = quantizer.create_metadata(shape, weight.dtype)
            return QuantizedTensorStorage.from_metadata(buffers, metadata)
    raise KeptWeightError("te_dynamo: nothing is kept of this weight")


def _each_entry(weights: Iterable[torch.Tensor], keep: bool) -> None:
    with lock:
        for weight in weights:
            for entry in _entries.get(weight, {}).values():
                entry.forget(weight, keep)
            if not keep:  # nor a weak reference, for torch.utils.swap_tensors
                _entries.pop(weight, None)


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
        self.compiled, self.kept, self.workspaces = compiled, tuple(kept), tuple(workspaces)
        self.by_step, self.check = by_step, check
        self._taken = _taker(kept)
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
            if self.check:
                self._compare(args, tensors)
            if first.is_cuda:
                tensors = self._on_this_stream(args, bundle, tensors)
        return self.compiled(*self._taken(args), *tensors)

    def _renew(self, args: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """Quantizes what is out of date; remembers the result if all of it may be kept."""
        with lock, torch.inference_mode(False), torch.no_grad():
            if not all(self._may_keep(w.weights(args)) for w in self.workspaces):
                return tuple(buffer for made in make_buffers(self.workspaces, args) for buffer in made.values())
            for weight in (weight for w in self.workspaces for weight in w.weights(args)):
                end_own_load(weight, dequantized)
            held = _Held((), [], _up_to_date(self.workspaces, args))
            tensors: list[torch.Tensor] = []
            for workspace, entry in zip(self.workspaces, held.entries, strict=True):
                tensors += [entry.buffers[name] for name in workspace.quantizer.buffer_names()]
                for position, ref, state in zip(workspace.positions, entry.weights, entry.states, strict=True):
                    assert state is not None
                    held.checks.append((position, ref, state.version, state.address, state.storage))
            self._release_sources(args)
            bundle = _Bundle(held._replace(tensors=tuple(tensors)))
            first = args[self._first]
            if made := _work_so_far(first.device):
                stream, bundle.ready = made
                bundle.streams.add(stream)
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
        if any(isinstance(weight, FakeTensor) or weight.is_inference() or is_part(weight) for weight in weights):
            return False
        if weights[0].is_cuda and torch.cuda.is_current_stream_capturing():
            return False  # what is made here exists when the CUDA graph is replayed, not before
        return self.by_step or all(weight in FROZEN for weight in weights)

    def _release_sources(self, args: Sequence[Any]) -> None:
        for workspace in self.workspaces:
            for position in workspace.positions:
                if not is_dropped(weight := args[position]):
                    continue
                source, FROZEN[weight].source = FROZEN[weight].source, None
                if source is not None and source.is_cuda:
                    # The stream that loaded it would have its memory back at once.
                    source.record_stream(torch.cuda.current_stream(source.device))

    def _on_this_stream(
        self, args: Sequence[Any], bundle: _Bundle, tensors: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """The buffers, once the work that made them on another stream is ordered before this one's."""
        stream = torch.cuda.current_stream(args[self._first].device)
        capturing = torch.cuda.is_current_stream_capturing()
        if capturing and self.by_step:
            # A replay compares nothing: the CUDA graph has to quantize what is not frozen.
            with torch.no_grad():
                return tuple(buffer for made in make_buffers(self.workspaces, args) for buffer in made.values())
        if stream.cuda_stream not in bundle.streams and not capturing:
            _use_behind(bundle.ready, stream, tensors)
            bundle.streams.add(stream.cuda_stream)
        return tensors

    def _compare(self, args: Sequence[Any], tensors: tuple[torch.Tensor, ...]) -> None:
        held = iter(tensors)
        for workspace in self.workspaces:
            if any(is_dropped(args[position]) for position in workspace.positions):
                for _ in workspace.quantizer.buffer_names():
                    next(held)
                continue
            with torch.no_grad():
                (expected,) = make_buffers([workspace], args)
            differing = [name for name, new in expected.items() if not _same_bytes(new, next(held))]
            if differing:
                raise KeptWeightError(
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


def make_buffers(workspaces: Sequence[Workspace], args: Sequence[Any]) -> Iterator[dict[str, torch.Tensor]]:
    """The buffers of each by name, quantized when they are asked for."""
    quantized = quantize_together(_values(workspace, args) for workspace in workspaces)
    for workspace, made in zip(workspaces, quantized, strict=True):
        buffers = dict(zip(workspace.quantizer.buffer_names(), made, strict=True))
        weights = workspace.weights(args)
        for index, weight in enumerate(weights):  # its own codes: quantized twice they may be others
            if (part := _kept_part(weight, workspace)) is not None:
                rows = [weight.shape[0] for weight in weights]
                for name, into in _part(buffers, workspace.quantizer, rows, index).items():
                    into.copy_(part[name])
        yield buffers


def _values(workspace: Workspace, args: Sequence[Any]) -> Values:
    """What is quantized for the workspace: its weight, or its weights as a stack; experts as one tensor."""
    weights, quantizer = workspace.weights(args), workspace.quantizer
    values = [dequantized(w) if _kept_part(w, workspace) else values_of(w) for w in weights]
    values = [value.to(workspace.dtype).contiguous() for value in values]
    together = len(values) > 1 and not quantizer.reads_as_matrix
    return Values([torch.stack(values)] if together else values, quantizer)


def _part(
    buffers: dict[str, torch.Tensor], quantizer: Quantizer, rows: Sequence[int], index: int
) -> dict[str, torch.Tensor]:
    """Views of what the buffers hold of one weight; rows: of each weight in them."""
    if len(rows) == 1:
        return buffers
    if not quantizer.reads_as_matrix:
        return {name: buffer.narrow(0, index, 1) for name, buffer in buffers.items()}
    places = places_in_stack(quantizer, rows, index)
    return {name: buffer.narrow(*places[name]) for name, buffer in buffers.items()}


def _kept_part(weight: torch.Tensor, workspace: Workspace) -> dict[str, torch.Tensor] | None:
    """What is kept, in the same codes, of a dropped weight whose values are gone; None without all of the usages."""
    if not is_dropped(weight) or FROZEN[weight].source is not None:
        return None
    for key, entry in _entries.get(weight, {}).items():
        part = entry.part(weight) if key[:2] == workspace.kind else None
        if part is not None and part.keys() >= set(workspace.quantizer.buffer_names()):
            return part
    return None


def _up_to_date(workspaces: Sequence[Workspace], args: Sequence[Any]) -> list[Entry]:
    """The entries with the usages that the workspaces read, of the weights' present values."""
    entries, stale = [], []
    for workspace in workspaces:
        weights, wanted = workspace.weights(args), workspace.quantizer
        entry = entry_of(weights, workspace) or Entry(weights)
        entries.append(entry)
        entry.on_this_stream()
        if (held := entry.quantizer) is not None:
            wanted = wanted.with_usage(wanted.rowwise or held.rowwise, wanted.columnwise or held.columnwise)
        states = [_State.of(weight) for weight in weights]
        if entry.states != states or wanted != held:
            stale.append((entry, states, dataclasses.replace(workspace, quantizer=wanted)))
    buffers = make_buffers([workspace for *_, workspace in stale], args)
    for (entry, states, workspace), made in zip(stale, buffers, strict=True):
        _renew_entry(entry, states, made, workspace, workspace.weights(args))
    now = functools.cache(_work_so_far)
    for entry, *_ in stale:
        entry.made = now(next(iter(entry.buffers.values())).device)
    return entries


def _work_so_far(device: torch.device) -> tuple[int, Any] | None:
    """(the current stream, an event behind what it was given)"""
    if device.type != "cuda":
        return None
    stream = torch.cuda.current_stream(device)
    return stream.cuda_stream, stream.record_event()


def _use_behind(ready: Any, stream: Any, tensors: Iterable[torch.Tensor]) -> None:
    """The stream waits for the event, and the tensors' memory for the stream."""
    stream.wait_event(ready)
    for tensor in tensors:
        tensor.record_stream(stream)


def _renew_entry(
    entry: Entry,
    states: Sequence[_State],
    made: dict[str, torch.Tensor],
    workspace: Workspace,
    weights: Sequence[torch.Tensor],
) -> None:
    if entry.states == states:  # a usage more: what is there stays where it is
        made |= entry.buffers
    elif all(weight in FROZEN for weight in weights) and all(
        _form(made[n]) == _form(b) for n, b in entry.buffers.items()
    ):
        made |= {name: buffer.copy_(made[name]) for name, buffer in entry.buffers.items()}
    entry.expire()
    entry.buffers = {name: made[name] for name in workspace.quantizer.buffer_names()}
    entry.states, entry.rows, entry.quantizer = [*states], [w.shape[0] for w in weights], workspace.quantizer
    _enter(entry, weights, workspace)


def _form(buffer: torch.Tensor) -> tuple[Any, ...]:
    return buffer.shape, buffer.stride(), buffer.dtype, buffer.device


def _enter(entry: Entry, weights: Sequence[torch.Tensor], workspace: Workspace) -> None:
    """Each of the weights leads to the entry, and to none any more with a weight that is gone."""
    for weight in weights:
        table = _entries.setdefault(weight, {})
        for other in [key for key, each in table.items() if any(ref() is None for ref in each.weights)]:
            del table[other]
        table[workspace.key(weights)] = entry
