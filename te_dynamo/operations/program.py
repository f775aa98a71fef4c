"""Groups of operations as what a `te::` operation needs: a forward over flat lists of tensors, its fake, its autograd.

A `te::` operation returns one flat list, with no result twice, and no input:

    [output, *extra outputs, *tensors to save that are neither an input nor a result already]

The list is made by identity, of tensors and of protos alike: a fake that returns the proto of its input stands for a forward that
returns its input, so both have the same list.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Optional

import torch

from te_dynamo.dialect.fakes import of_proto
from te_dynamo.errors import OperationError
from te_dynamo.operations import autograd
from te_dynamo.operations.context import OperationContext
from te_dynamo.operations.fuser import Group
from te_dynamo.operations.op import BasicOperation
from te_dynamo.operations.run import Call, check_params, compute, contexts, fake, save
from te_dynamo.quantized.tensor_proto import to_tensor_proto

Tensors = Sequence[torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Program:
    """Groups to run, and how they are called. Every method takes the parameters and the extra inputs as flat lists.

    backward: the groups whose backward runs. parts: whether an opaque operation, too, is run as its parts. All operations have the
    split API.
    """

    call: Call
    forward: tuple[Group, ...]
    backward: tuple[Group, ...]
    parts: bool = False

    def expand(self, input: torch.Tensor, params: Tensors, extra_inputs: Tensors) -> list[torch.Tensor]:
        """[output, *extra outputs, *what backward saves]: what is traced."""
        forward = functools.partial(compute, parts=self.parts)
        return self._run(input, params, extra_inputs, forward).results

    def run(self, input: torch.Tensor, params: Tensors, extra_inputs: Tensors) -> list[torch.Tensor]:
        """`expand` for the dispatcher, which takes no view of an input."""
        return unaliased([input, *params, *extra_inputs], self.expand(input, params, extra_inputs))

    def fake(self, input: torch.Tensor, params: Tensors, extra_inputs: Tensors) -> list[torch.Tensor]:
        """`expand` without data, over protos."""
        return [of_proto(proto) for proto in self.protos(input, params, extra_inputs).results]

    def protos(self, input: torch.Tensor, params: Tensors, extra_inputs: Tensors) -> _Flat:
        """The protos of what a forward returns, and where among them and its arguments each saved tensor is."""
        return self._run(to_tensor_proto(input), _protos(params), _protos(extra_inputs), fake)

    def _run(self, input: Any, params: Sequence[Any], extra_inputs: Sequence[Any], forward: Any) -> _Flat:
        """The groups one after another, with `forward` compute (on tensors) or fake (on protos)."""
        inputs = [input, *params, *extra_inputs]
        split_params, split_extras = split_tensors(self.call.ops, params, extra_inputs)
        check_params(self.call.ops, split_params)
        extra_outputs: list[Any] = []
        saved: list[Any] = []
        for group in self.forward:
            input, extra, to_save = forward(group, self.call, input, split_params, split_extras)
            extra_outputs += chain.from_iterable(extra)
            saved += to_save
        return _flatten(inputs, [input, *extra_outputs], saved, _copy)

    def setup_context(
        self, func_ctx: Any, input: torch.Tensor, params: Tensors, extra_inputs: Tensors, results: Tensors
    ) -> None:
        """Runs every save_ctx on what a forward returned."""
        proto, param_protos, extra_protos = to_tensor_proto(input), _protos(params), _protos(extra_inputs)
        flat = self._run(proto, param_protos, extra_protos, fake)
        if len(results) != len(flat.results):
            names = ", ".join(type(group.op).__qualname__ for group in self.forward)
            raise OperationError(
                f"{names}: forward gave {len(results)} tensors, its fake {len(flat.results)}; a forward that is fused alone saves "
                "what its basic operations save"
            )
        saved = flat.resolve([input, *params, *extra_inputs], results)
        split = split_tensors(self.call.ops, param_protos, extra_protos)
        ctxs: list[OperationContext] = []
        for group in self.forward:
            made = contexts(group, self.call, proto, *split)
            save(group, self.call, made, saved[group.indices.start : group.indices.stop])
            ctxs += made
            proto = fake(group, self.call, proto, *split)[0]
        autograd.keep(func_ctx, self.call, self.backward, ctxs, results[0])
        func_ctx.mark_non_differentiable(*results[1 + sum(op.num_extra_outputs for op in self.call.ops) :])


def gradients(
    func_ctx: Any, grads: Sequence[Optional[torch.Tensor]]
) -> tuple[Optional[torch.Tensor], list[Optional[torch.Tensor]], list[Optional[torch.Tensor]]]:
    """(grad of the input, grads of the parameters, grads of the extra inputs) after `setup_context`, the last two flat."""
    count = sum(op.num_extra_outputs for op in func_ctx.call.ops)
    grad, params, extra_inputs = autograd.backward(func_ctx, grads[0], grads[1 : 1 + count])
    return grad, list(chain.from_iterable(params)), list(chain.from_iterable(extra_inputs))


def split_tensors(
    ops: Sequence[BasicOperation], params: Sequence[Any], extra_inputs: Sequence[Any]
) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """Flat lists of parameters and of extra inputs as one tuple for each operation."""
    given, extra = iter(params), iter(extra_inputs)
    return (
        [tuple(next(given) for _ in op.parameters()) for op in ops],
        [tuple(next(extra) for _ in range(op.num_extra_inputs)) for op in ops],
    )


def _protos(tensors: Tensors) -> list[Any]:
    return [to_tensor_proto(tensor) for tensor in tensors]


def _copy(result: Any) -> Any:
    return result.clone() if isinstance(result, torch.Tensor) else dataclasses.replace(result)


@dataclasses.dataclass
class _Flat:
    """results: the list. saved: for each basic operation the places of what it saves, an index into (*inputs, *results)."""

    results: list[Any]
    saved: list[list[Optional[int]]]

    def resolve(self, inputs: Sequence[Any], results: Sequence[Any]) -> list[list[Any]]:
        """The saved tensors of each basic operation, from the tensors of one run."""
        all_tensors = [*inputs, *results]
        return [[None if place is None else all_tensors[place] for place in places] for places in self.saved]


def _flatten(
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    saved: Sequence[Sequence[Any]],
    copy: Callable[[Any], Any],
) -> _Flat:
    """outputs: the output and the extra outputs; one that is an input or another output is copied."""
    place = {id(tensor): i for i, tensor in reversed(list(enumerate(inputs)))}
    results: list[Any] = []
    for tensor in outputs:
        if id(tensor) in place:
            tensor = copy(tensor)
        place[id(tensor)] = len(inputs) + len(results)
        results.append(tensor)
    for tensor in (tensor for tensors in saved for tensor in tensors):
        if tensor is not None and id(tensor) not in place:
            place[id(tensor)] = len(inputs) + len(results)
            results.append(tensor)
    return _Flat(results, [[None if t is None else place[id(t)] for t in tensors] for tensors in saved])


def unaliased(inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results, those that are views of an input or of another result copied: a custom operation may return no view."""
    seen = {tensor.untyped_storage()._cdata for tensor in inputs}
    fresh = []
    for tensor in results:
        if tensor.untyped_storage()._cdata in seen:
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage()._cdata)
        fresh.append(tensor)
    return fresh
