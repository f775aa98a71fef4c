"""A linear of DTensors is te.linear of this rank's shards, where these alone give a shard of the result.

    before    y = torch._C._nn.linear(x, weight, bias)                          DTensors: a tensor-parallel model's
    after     y_local = torch._C._nn.linear(local(x), local(weight), local_bias(bias))        linear.py goes on from here
              y = of_shards(y_local, x, weight, placements)

                                input          weight         output           gradients of input, weight
    column-parallel             Replicate      Shard(0)       Shard(-1)        Partial,   Shard(0)
    row-parallel                Shard(-1)      Shard(1)       Partial          Shard(-1), Shard(1)
    tokens or batches shared    Shard(i)       Replicate      Shard(i)         Shard(i),  Partial
    the same everywhere         Replicate      Replicate      Replicate        Replicate, Replicate

for each dimension of the mesh. Between such linears the model communicates as it does anyway: sequence parallelism gathers the
input before and scatters the output after. AOTAutograd sees no DTensor, so fusions work on shards as on any tensor. An amax is
that of the rank's own shard.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import fx

from te_dynamo._compat import REDISTRIBUTE, SAME_SHARDS
from te_dynamo.passes.torch_ir.match.values import emit, name_of, tensor_of


def is_shared(node: Any) -> bool:
    """Whether a node gives a DTensor."""
    return _is_dtensor(tensor_of(node))


def _is_dtensor(value: Any) -> bool:
    return type(value).__name__ == "DTensor" and hasattr(value, "placements")


# --- what the graph calls. Placements are strings in it, "R", "P", "S0": constants of every release's graphs.


def local(tensor: Any, gradient: tuple[str, ...]) -> torch.Tensor:
    """This rank's shard, whose gradient is one with the placements `gradient`."""
    return tensor.to_local(grad_placements=_decoded(gradient))


def local_bias(bias: Any, placements: tuple[str, ...], gradient: tuple[str, ...], shares: int) -> torch.Tensor:
    """What a rank adds: its shard, or one of `shares` equal parts where the sum over the ranks is still to come."""
    part = bias.redistribute(placements=_decoded(placements)).to_local(grad_placements=_decoded(gradient))
    return part if shares == 1 else _Part.apply(part, shares)


class _Part(torch.autograd.Function):
    """x / n on each of n ranks, to be added up: every rank's gradient is that of the sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, n: int) -> torch.Tensor:
        return x / n

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad, None


def of_shards(y: torch.Tensor, x: Any, weight: Any, placements: tuple[str, ...]) -> Any:
    """The linear's output [..., N] of which y is this rank's part."""
    from torch.distributed.tensor import DTensor

    shape = torch.Size((*x.shape[:-1], weight.shape[0]))
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return DTensor.from_local(y, weight.device_mesh, _decoded(placements), run_check=False, shape=shape, stride=strides)


def _decoded(placements: tuple[str, ...]) -> tuple[Any, ...]:
    from torch.distributed.tensor import Partial, Replicate, Shard

    one = {"R": Replicate, "P": Partial}
    return tuple(one[p]() if p in one else Shard(int(p[1:])) for p in placements)


# --- which layouts there are


@dataclasses.dataclass(frozen=True)
class Layout:
    """Placements for each dimension of the mesh; of gradients what a rank computes from its own shards."""

    out: tuple[str, ...]
    x_gradient: tuple[str, ...]
    weight_gradient: tuple[str, ...]
    bias: tuple[str, ...]
    bias_gradient: tuple[str, ...]
    bias_shares: int


def layout_of(x: fx.Node, weight: fx.Node, bias: fx.Node | None) -> Layout | str:
    """How the shards make up the linear, or the reason why theirs alone do not."""
    given = {"input": tensor_of(x), "weight": tensor_of(weight), "bias": tensor_of(bias)}
    values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    plain = [name for name, value in values.items() if not _is_dtensor(value)]
    if plain:
        return f"its {' and '.join(plain)} is a plain tensor where another operand is a DTensor"
    if any(value.device_mesh != values["weight"].device_mesh for value in values.values()):
        return "its operands are DTensors of different meshes"
    mesh, last = values["weight"].device_mesh, values["input"].dim() - 1
    codes = {name: [_encoded(p) for p in value.placements] for name, value in values.items()}
    rows = []
    for dim, (of_x, of_weight) in enumerate(zip(codes["input"], codes["weight"], strict=True)):
        row = _of_one_dimension(of_x, of_weight, last)
        of_bias = codes["bias"][dim] if "bias" in codes else "R"
        # A bias that is shared out as the output's features is taken as it is, one that every rank has is cut.
        if row is None or of_bias not in ("R", row[3]):
            return f"no rank has its part of the product: {_described(values)}"
        rows.append(row)
    out, x_gradient, weight_gradient, of_bias_, bias_gradient = zip(*rows, strict=True)
    shares = 1
    for dim, placement in enumerate(out):
        shares *= mesh.size(dim) if placement == "P" else 1
    return Layout(out, x_gradient, weight_gradient, of_bias_, bias_gradient, shares)


def _of_one_dimension(x: str, weight: str, last: int) -> tuple[str, str, str, str, str] | None:
    """(output, gradient of x, of the weight, bias, its gradient)"""
    if (x, weight) == ("R", "R"):
        return "R", "R", "R", "R", "R"
    if (x, weight) == ("R", "S0"):
        return f"S{last}", "P", "S0", "S0", "S0"
    if (x, weight) == (f"S{last}", "S1"):
        return "P", x, "S1", "R", "R"
    if x.startswith("S") and x != f"S{last}" and weight == "R":
        return x, x, "P", "R", "P"
    return None


def _encoded(placement: Any) -> str:
    """ "?" for what no row of the table has (a strided shard, a maximum that is still to be taken)."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    if type(placement) is Shard:
        return f"S{placement.dim}"
    if type(placement) is Replicate:
        return "R"
    return "P" if type(placement) is Partial and placement.reduce_op == "sum" else "?"


def _described(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {', '.join(map(str, value.placements))}" for name, value in values.items())


# --- the rewrite


def to_shards(
    layout: Layout, x: fx.Node, weight: fx.Node, bias: fx.Node | None, node: fx.Node
) -> tuple[fx.Node, fx.Node]:
    """(a linear of the shards, the DTensor of its results), before `node`, the linear of the DTensors."""
    graph = node.graph
    operands: list[Any] = [
        emit(graph, local, (x, layout.x_gradient), node),
        emit(graph, local, (weight, layout.weight_gradient), node),
        bias and emit(graph, local_bias, (bias, layout.bias, layout.bias_gradient, layout.bias_shares), node),
    ]
    linear = emit(graph, torch._C._nn.linear, operands, node)
    value, out = tensor_of(linear), tensor_of(node)
    assert value is not None and out is not None
    if value.dtype != out.dtype:  # autocast, which is off while this is traced
        linear.meta["example_value"] = value.to(out.dtype)
    return linear, emit(graph, of_shards, (linear, x, weight, layout.out), node)


def keeps_shards(user: fx.Node, node: fx.Node) -> bool:
    """Whether `user` has the shard that `node` has, as a DTensor or as a plain tensor."""
    if user.op not in ("call_function", "call_method") or not user.args or user.args[0] is not node:
        return False
    if user.target in (local, of_shards):
        return True
    name = name_of(user)
    if name in SAME_SHARDS:
        return is_shared(user) or is_shared(node)
    before, after = tensor_of(node), tensor_of(user)
    if name not in REDISTRIBUTE or not (_is_dtensor(before) and _is_dtensor(after)):
        return False
    return before.placements == after.placements  # type: ignore[union-attr]
