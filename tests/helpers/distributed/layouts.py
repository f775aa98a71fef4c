"""What the processes of test_distributed_layouts.py do: the same training in each layout, some steps of the same batch."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from helpers.distributed.rank_bodies import _clean, _full, _sequence_plan, _tensor_plan, batch, loss_of, step
from helpers.distributed.ranks import device, mesh
from helpers.models.mixture import Mixture
from helpers.models.small_models import Llama
from torch import Tensor, nn

import te_dynamo
from te_dynamo.testing import count_wire

Step = Callable[[Tensor, Tensor], Tensor]
"""(ids, wanted) of the whole batch -> this rank's loss, gradients made."""

RECIPE = {"codegen": "eager", "recipe": "float8_current_scaling"}


def train(
    rank: int,
    layout: str,
    checkpoint: bool = False,
    steps: int = 20,
    options: dict[str, Any] | None = None,
    layers: int = 2,
    width: int = 64,
    bf16: bool = False,
) -> dict[str, Any]:
    """layout: of LAYOUTS; "alone" and "alone experts" are one process without the others. bf16: the weights, else fp32 but for a mixture's.

    Returns losses [steps] ([] where no loss is), gradients of the first step, whole, by name; graphs: how many were compiled after two steps
    and at the end; wire: (operation, dtype) -> bytes of the last step.
    """
    torch.manual_seed(0)
    plain = Llama(layers, width=width, heads=4)
    if "experts" in layout:
        # Only there: with more, a token that another rounding sends to another expert decides gradients of few tokens.
        plain.layers[0].parts[1] = Mixture(width)
    if bf16 or "experts" in layout:  # grouped products are of bf16
        plain.bfloat16()
    plain.to(device())
    ids, wanted = (tensor.to(device()) for tensor in batch())
    run, trained = LAYOUTS[layout](plain, checkpoint, {**RECIPE, **(options or {})})
    losses, gradients, graphs = [], {}, []
    for number in range(steps):
        trained.zero_grad()
        with count_wire() as wire:
            loss = run(ids, wanted)
        losses.append(loss.item())
        if number == 0:
            gradients = {_clean(name): _whole(name, p) for name, p in trained.named_parameters()}
        if number in (1, steps - 1):
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        step(trained.parameters())
    return {
        "losses": [loss for loss in losses if loss == loss],
        "gradients": gradients,
        "graphs": graphs,
        "wire": dict(wire.bytes),
    }


def killed(rank: int) -> None:
    """The last rank is killed between forward and backward of the second step."""
    run, trained = LAYOUTS["fsdp2"](Llama(layers=2).to(device()), False, RECIPE)
    ids, wanted = (tensor.to(device()) for tensor in batch())
    run(ids, wanted)
    if rank == dist.get_world_size() - 1:
        os.write(2, b"about to be killed")
        trained.head.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    run(ids, wanted)


def _whole(name: str, parameter: nn.Parameter) -> Tensor:
    """A parameter's gradient; that of experts with those of the other ranks'."""
    gradient = _full(parameter.grad)
    if ".experts." not in name or len(gradient) == 4:
        return gradient
    parts = [torch.empty_like(gradient) for _ in range(4 // len(gradient))]
    dist.all_gather(parts, gradient)
    return torch.cat(parts)


def _blocks(plain: Llama, checkpoint: bool, options: dict[str, Any]) -> None:
    """Compiled one by one, as torchtitan does; of a mixture what lies around the routing."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for i, layer in enumerate(plain.layers):
        if isinstance(layer.parts[1], Mixture):
            layer.parts[0].compile(backend="te", options=options)
            layer.parts[1].experts.compile(backend="te", options=options, dynamic=True)
            plain.layers[i] = checkpoint_wrapper(layer) if checkpoint else layer
        else:
            plain.layers[i] = checkpoint_wrapper(layer) if checkpoint else layer
            plain.layers[i].compile(backend="te", options=options)


def _part(call: Callable[..., Tensor], rank: int = 0, of: int = 1) -> Step:
    def run(ids: Tensor, wanted: Tensor) -> Tensor:
        loss = loss_of(call, ids.chunk(of)[rank], wanted.chunk(of)[rank])
        loss.backward()
        return loss.detach()

    return run


def _alone(plain: Llama, checkpoint: bool, options: dict[str, Any]) -> tuple[Step, nn.Module]:
    _blocks(plain, checkpoint, options)
    return _part(plain), plain


def _microbatches(plain: Llama, checkpoint: bool, options: dict[str, Any]) -> tuple[Step, nn.Module]:
    """Amaxes of what each rank has of the batch: a router's gradient is small beside what another rounding changes."""
    _blocks(plain, checkpoint, options)
    size = dist.get_world_size()

    def run(ids: Tensor, wanted: Tensor) -> Tensor:
        losses = [_part(plain, rank, size)(ids, wanted) for rank in range(size)]
        for p in plain.parameters():
            p.grad /= size
        return torch.stack(losses).mean()

    return run, plain


def _ddp(plain: Llama, checkpoint: bool, options: dict[str, Any]) -> tuple[Step, nn.Module]:
    _blocks(plain, checkpoint, options)
    return _part(nn.parallel.DistributedDataParallel(plain), dist.get_rank(), dist.get_world_size()), plain


def _fsdp2(fp8: bool) -> Callable[..., tuple[Step, nn.Module]]:
    def build(plain: Llama, checkpoint: bool, options: dict[str, Any]) -> tuple[Step, nn.Module]:
        for layer in plain.layers if fp8 else ():
            te_dynamo.distributed.fp8_all_gather(layer, options=options)
        _blocks(plain, checkpoint, options)
        _shard(plain, mesh())
        return _part(plain, dist.get_rank(), dist.get_world_size()), plain

    return build


def _shard(plain: Llama, ranks: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    for layer in plain.layers:
        fully_shard(layer, mesh=ranks)
    fully_shard(plain, mesh=ranks)


def _tensor(sequence: bool, fsdp: bool, fp8: bool = False) -> Callable[..., tuple[Step, nn.Module]]:
    def build(plain: Llama, checkpoint: bool, options: dict[str, Any]) -> tuple[Step, nn.Module]:
        from torch.distributed.tensor.parallel import parallelize_module

        size = dist.get_world_size()
        tensor = 2 if fsdp else size
        both = mesh(size // tensor, tensor, names=("data", "tensor"))
        for layer in plain.layers:
            layer.parts[0].heads //= tensor
        parallelize_module(plain, both["tensor"], _sequence_plan(plain) if sequence else _tensor_plan(plain))
        for layer in plain.layers if fp8 else ():
            te_dynamo.distributed.fp8_all_gather(layer, options=options)
        _blocks(plain, checkpoint, options)
        if fsdp:
            _shard(plain, both["data"])
        return _part(plain, both["data"].get_local_rank(), both["data"].size()), plain

    return build


class _Stage(nn.Module):
    """A rank's part of the layers, under their names in the whole model."""

    def __init__(self, plain: Llama, number: int, of: int) -> None:
        super().__init__()
        count = len(plain.layers) // of
        mine = range(number * count, (number + 1) * count)
        self.layers = nn.ModuleDict({str(i): plain.layers[i] for i in mine})
        self.embedding = plain.embedding if number == 0 else None
        self.norm, self.head = (plain.norm, plain.head) if number == of - 1 else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embedding is None else self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(self.norm(x))


def _pipeline(plain: Llama, checkpoint: bool, options: dict[str, Any]) -> tuple[Step, nn.Module]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, size = dist.get_rank(), dist.get_world_size()
    _blocks(plain, checkpoint, options)
    module = _Stage(plain, rank, size)
    schedule = Schedule1F1B(
        PipelineStage(module, rank, size, device()),
        n_microbatches=4,
        loss_fn=lambda y, wanted: loss_of(lambda _: y, wanted, wanted),
    )

    def run(ids: Tensor, wanted: Tensor) -> Tensor:
        losses: list[Tensor] = []
        last = rank == size - 1
        schedule.step(*([ids] if rank == 0 else []), **({"target": wanted, "losses": losses} if last else {}))
        return torch.stack(losses).mean().detach() if last else torch.tensor(float("nan"))

    return run, module


def _experts(plain: Llama, checkpoint: bool, options: dict[str, Any]) -> tuple[Step, nn.Module]:
    """Each rank has its part of the batch, all of what is no expert, and its part of the experts."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mixture = plain.layers[0].parts[1]
    mixture.group = dist.group.WORLD
    for name, weight in list(mixture.experts.named_parameters()):
        setattr(mixture.experts, name, nn.Parameter(weight.detach().chunk(size)[rank].clone()))
    _blocks(plain, checkpoint, options)
    part = _part(plain, rank, size)

    def run(ids: Tensor, wanted: Tensor) -> Tensor:
        loss = part(ids, wanted)
        for name, p in plain.named_parameters():
            assert p.grad is not None, name
            if ".experts." not in name:
                dist.all_reduce(p.grad)
            p.grad /= size
        return loss

    return run, plain


LAYOUTS: dict[str, Callable[[Llama, bool, dict[str, Any]], tuple[Step, nn.Module]]] = {
    "alone": _alone,
    "alone experts": _microbatches,
    "ddp": _ddp,
    "fsdp2": _fsdp2(fp8=False),
    "fsdp2 in fp8": _fsdp2(fp8=True),
    "tensor": _tensor(sequence=False, fsdp=False),
    "sequence": _tensor(sequence=True, fsdp=False),
    "fsdp2 x tensor": _tensor(sequence=False, fsdp=True),
    "fsdp2 x sequence": _tensor(sequence=True, fsdp=True),
    "fsdp2 in fp8 x tensor": _tensor(sequence=False, fsdp=True, fp8=True),
    "fsdp2 in fp8 x sequence": _tensor(sequence=True, fsdp=True, fp8=True),
    "pipeline": _pipeline,
    "experts": _experts,
}
