"""What the processes of test_distributed.py and test_gpu_distributed.py do: models as users share them out, compiled with backend "te".

Each function runs in all of them; what it returns goes back to the test. Nothing here compares anything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from helpers.distributed.ranks import SIZE, device, mesh
from helpers.models.small_models import GeluMLP, Llama
from torch import Tensor, nn

import te_dynamo
from te_dynamo.errors import TeError

LEARNING_RATE = 0.1


def model(dtype: torch.dtype = torch.float32) -> Llama:
    torch.manual_seed(0)
    return Llama().to(dtype)


def batch() -> tuple[Tensor, Tensor]:
    """(token numbers, the numbers to predict) [4, 24]."""
    torch.manual_seed(1)
    return torch.randint(0, 64, (4, 24)), torch.randint(0, 64, (4, 24))


def loss_of(call: Callable[..., Any], ids: Tensor, wanted: Tensor) -> Tensor:
    return F.cross_entropy(call(ids).flatten(0, 1).float(), wanted.flatten())


def step(parameters: Iterator[nn.Parameter]) -> None:
    torch.optim.SGD(parameters, lr=LEARNING_RATE).step()


# ---- data parallelism: each rank has its half of the batch


def data_parallel(
    rank: int,
    wrap: str,
    compiled: str = "blocks",
    checkpoint: bool = False,
    steps: int = 2,
    microbatches: int = 1,
    options: dict[str, Any] | None = None,
    optimize_ddp: Any = True,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """wrap: "fsdp2", "fsdp2_fp8" (weights travel in FP8), "fsdp1", "replicate" or "ddp". compiled: "blocks", each by itself before it is wrapped, or "whole", afterwards."""
    options = {"codegen": "eager", **(options or {})}
    plain = model(dtype).to(device())
    if checkpoint:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        for i, layer in enumerate(plain.layers):
            plain.layers[i] = checkpoint_wrapper(layer)
    if compiled == "blocks":
        for layer in plain.layers:
            layer.compile(backend="te", options=options)
    wrapped = WRAPPERS[wrap](plain)
    call = torch.compile(wrapped, backend="te", options=options) if compiled == "whole" else wrapped
    ids, wanted = (half.chunk(torch.distributed.get_world_size())[rank].to(device()) for half in batch())
    losses, gradients = [], {}
    with te_dynamo.capture() as graphs, torch._dynamo.config.patch(optimize_ddp=optimize_ddp):
        for number in range(steps):
            wrapped.zero_grad()
            total = 0.0
            for micro, (part, answers) in enumerate(zip(*(t.chunk(microbatches) for t in (ids, wanted)), strict=True)):
                with _synchronized(wrapped, wrap, last=micro == microbatches - 1):
                    loss = loss_of(call, part, answers) / microbatches
                    loss.backward()
                total += loss.item()
            losses.append(total)
            if number == 0:
                gradients = _gradients(wrapped, wrap)
            step(wrapped.parameters())
    return {
        "losses": losses,
        "gradients": gradients,
        "linears": [(r.module, r.reason) for report in graphs.reports for r in report.matches if r.kind == "linear"],
        "kept": [w.weight for report in graphs.reports for w in report.workspaces],
        "runs": {runs for report in graphs.reports for _, _, runs in report.lowered},
        "saved_shapes": _saved_shapes(graphs),
        "graphs": len(graphs.reports),
    }


def _saved_shapes(graphs: Any) -> set[tuple[int, ...]]:
    """Of the 8-bit tensors of known sizes that forward saves."""
    saved = (
        node for i in range(len(graphs.all("forward"))) for node in graphs.graph("forward", i).output_node().args[0]
    )
    values = [node.meta["val"] for node in saved if isinstance(node, torch.fx.Node)]
    shapes = [tuple(value.shape) for value in values if isinstance(value, Tensor) and value.element_size() == 1]
    return {shape for shape in shapes if all(isinstance(size, int) for size in shape)}


@contextlib.contextmanager
def _synchronized(wrapped: Any, wrap: str, last: bool) -> Iterator[None]:
    """Gradients meet in the last microbatch only, as each wrapper spells it."""
    if wrap.startswith("fsdp2"):
        wrapped.set_requires_gradient_sync(last)
    with contextlib.nullcontext() if last or wrap.startswith("fsdp2") else wrapped.no_sync():
        yield


def _fsdp2(plain: Llama) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    ranks = mesh()
    for layer in plain.layers:
        fully_shard(layer, mesh=ranks)
    return fully_shard(plain, mesh=ranks)


def _fsdp2_fp8(plain: Llama) -> nn.Module:
    return _fsdp2(te_dynamo.distributed.fp8_all_gather(plain, options={"rules": [("head", None)]}))


def _replicate(plain: Llama) -> nn.Module:
    """DDP on FSDP2's machinery."""
    from torch.distributed._composable.replicate_with_fsdp import replicate

    ranks = mesh(names=("replicate",))
    for layer in plain.layers:
        replicate(layer, mesh=ranks)
    return replicate(plain, mesh=ranks)


def _fsdp1(plain: Llama) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({type(plain.layers[0])})
    return FullyShardedDataParallel(plain, use_orig_params=True, auto_wrap_policy=policy, device_id=device())


def _ddp(plain: Llama) -> nn.Module:
    """With buckets of 8 KiB: Dynamo splits the graph where they end."""
    torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = 8 * 1024
    return nn.parallel.DistributedDataParallel(plain, bucket_cap_mb=1 / 128)


WRAPPERS: dict[str, Callable[[Llama], nn.Module]] = {
    "fsdp2": _fsdp2,
    "fsdp2_fp8": _fsdp2_fp8,
    "fsdp1": _fsdp1,
    "replicate": _replicate,
    "ddp": _ddp,
}


def _clean(name: str) -> str:
    for wrapper in ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "module."):
        name = name.replace(wrapper, "")
    return name


def _gradients(wrapped: nn.Module, wrap: str) -> dict[str, Tensor]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    whole = FullyShardedDataParallel.summon_full_params
    with whole(wrapped, with_grads=True) if wrap == "fsdp1" else contextlib.nullcontext():
        return {_clean(name): _full(p.grad) for name, p in wrapped.named_parameters()}


def _full(gradient: Any) -> Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient.clone()


def alone(
    rank: int,
    parts: int,
    compiled: str = "blocks",
    steps: int = 2,
    options: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """What data_parallel trains, in one process: each rank all of it. parts: of the batch, one after another."""
    options = {"codegen": "eager", **(options or {})}
    plain = model(dtype).to(device())
    if compiled == "blocks":
        for layer in plain.layers:
            layer.compile(backend="te", options=options)
    call = torch.compile(plain, backend="te", options=options) if compiled == "whole" else plain
    losses, gradients = [], {}
    for number in range(steps):
        plain.zero_grad()
        total = 0.0
        for ids, wanted in zip(*(tensor.to(device()).chunk(parts) for tensor in batch()), strict=True):
            loss = loss_of(call, ids, wanted) / parts
            loss.backward()
            total += loss.item()
        losses.append(total)
        if number == 0:
            gradients = {name: _full(p.grad) for name, p in plain.named_parameters()}
        step(plain.parameters())
    return {"losses": losses, "gradients": gradients}


# ---- tensor parallelism: two ranks have a half of each weight each, and both the same part of the batch


def tensor_parallel(
    rank: int,
    sequence: bool = False,
    fsdp: bool = False,
    compiled: str = "whole",
    options: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """The plans of torchtitan. sequence: tokens are shared out between the linears.

    Every two ranks have a part of the batch of their own; with fsdp their gradients meet.
    """
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    options = {"codegen": "eager", **(options or {})}
    both = mesh(torch.distributed.get_world_size() // SIZE, SIZE, names=("data", "tensor"))
    shared = model(dtype).to(device())
    for layer in shared.layers:
        layer.parts[0].heads //= SIZE
    parallelize_module(shared, both["tensor"], _sequence_plan(shared) if sequence else _tensor_plan(shared))
    if compiled == "blocks":
        for layer in shared.layers:
            layer.compile(backend="te", options=options)
    if fsdp:
        for layer in shared.layers:
            fully_shard(layer, mesh=both["data"])
        fully_shard(shared, mesh=both["data"])
    call = torch.compile(shared, backend="te", options=options) if compiled == "whole" else shared
    parts = (tensor.to(device()).chunk(both["data"].size())[both["data"].get_local_rank()] for tensor in batch())
    with te_dynamo.capture() as graphs:
        loss = loss_of(call, *parts)
        loss.backward()
    return {
        "losses": [loss.item()],
        "gradients": {_clean(name): _full(p.grad) for name, p in shared.named_parameters()},
        "placements": {_clean(name): str(getattr(p.grad, "placements", "")) for name, p in shared.named_parameters()},
        "linears": [(r.module, r.reason) for report in graphs.reports for r in report.matches if r.kind == "linear"],
        "others": [(r.kind, r.reason) for report in graphs.reports for r in report.matches if r.kind != "linear"],
        "fusions": {(phase, name) for report in graphs.reports for phase, name, _ in report.fusions},
        "runs": {runs for report in graphs.reports for _, _, runs in report.lowered},
        "graphs": len(graphs.reports),
    }


def _tensor_plan(shared: Llama) -> dict[str, Any]:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    column, row = ("parts.0.q", "parts.0.k", "parts.0.v", "parts.1.gate", "parts.1.up"), ("parts.0.o", "parts.1.down")
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    for i in range(len(shared.layers)):
        plan |= {f"layers.{i}.{name}": ColwiseParallel() for name in column}
        plan |= {f"layers.{i}.{name}": RowwiseParallel() for name in row}
    return plan


def _sequence_plan(shared: Llama) -> dict[str, Any]:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    plan = _tensor_plan(shared)
    for name, style in plan.items():
        if isinstance(style, RowwiseParallel):
            plan[name] = RowwiseParallel(output_layouts=Shard(1))
    plan |= {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for i in range(len(shared.layers)):
        for j in range(2):
            plan[f"layers.{i}.norms.{j}"] = SequenceParallel()
            plan[f"layers.{i}.parts.{j}"] = PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            )
    return plan


def biased(rank: int, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """A column-parallel and a row-parallel linear with biases; a DTensor in, a DTensor out."""
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    ranks = mesh()
    torch.manual_seed(0)
    mlp = parallelize_module(
        GeluMLP().to(device()), ranks, {"up": ColwiseParallel(), "down": RowwiseParallel(use_local_output=False)}
    )
    x = torch.randn(4, 24, 32)
    given = DTensor.from_local(x.to(device()), ranks, [Replicate()]).requires_grad_()
    with te_dynamo.capture() as graphs:
        y = torch.compile(mlp, backend="te", options=options or {"codegen": "eager"})(given)
        y.full_tensor().square().sum().backward()
    return {
        "x": x,
        "y": y.full_tensor().detach(),
        "gradients": {"x": _full(given.grad), **{name: _full(p.grad) for name, p in mlp.named_parameters()}},
        "placements": {name: str(p.grad.placements) for name, p in mlp.named_parameters()},
        "linears": [(r.module, r.reason) for report in graphs.reports for r in report.matches if r.kind == "linear"],
    }


# ---- the rest


def mixed_precision(rank: int) -> dict[str, Any]:
    """FSDP2 as torchtitan sets it: fp32 weights, bf16 in the blocks; Inductor's code."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shared, ranks = model().to(device()), mesh()
    for layer in shared.layers:
        layer.compile(backend="te", fullgraph=True)
        fully_shard(layer, mesh=ranks, mp_policy=policy)
    fully_shard(shared, mesh=ranks, mp_policy=policy)
    ids, wanted = (half.chunk(SIZE)[rank].to(device()) for half in batch())
    with te_dynamo.capture() as graphs:
        loss = loss_of(shared, ids, wanted)
        loss.backward()
    return {
        "losses": [loss.item()],
        "gradients": {name: _full(p.grad) for name, p in shared.named_parameters()},
        "linears": [(r.dtype, r.reason) for report in graphs.reports for r in report.matches if r.kind == "linear"],
    }


def frozen(rank: int) -> dict[str, str]:
    """What te_dynamo.freeze says of each kind of model."""
    from torch.distributed.tensor.parallel import parallelize_module

    said = {}
    tensor = model().to(device())
    parallelize_module(tensor, mesh(), _tensor_plan(tensor))
    for name, shared in {
        **{name: wrap(model().to(device())) for name, wrap in WRAPPERS.items()},
        "tensor": tensor,
    }.items():
        try:
            te_dynamo.freeze(shared)
            said[name] = ""
        except TeError as error:
            said[name] = str(error)
    return said


def sequential(operation: str, recipe: str | None = None) -> te_dynamo.Sequential:
    torch.manual_seed(0)
    ops = te_dynamo.operations.basic
    return te_dynamo.Sequential(
        ops.BasicLinear(32, 32),
        getattr(ops, operation)(),
        ops.BasicLinear(32, 64),
        recipe=te_dynamo.recipe.by_name(recipe) if recipe else None,
    )


def rows_of(rank: int) -> Tensor:
    torch.manual_seed(rank + 1)
    return torch.randn(4, 32, requires_grad=True)


def collectives(
    rank: int, recipe: str | None = None, dtype: torch.dtype = torch.float32
) -> dict[str, tuple[Tensor, Tensor]]:
    """(output, gradient of the input) of a linear, the collective and another linear, eagerly and compiled."""
    results = {}
    for operation in ("AllGather", "AllReduce", "ReduceScatter"):
        module = sequential(operation, recipe).to(device(), dtype)
        compiled = torch.compile(module, backend="te", fullgraph=True, options={"codegen": "eager"})
        for how, call in {"eager": module, "compiled": compiled}.items():
            x = rows_of(rank).detach().to(device(), dtype).requires_grad_()
            y = call(x)
            results[f"{operation}, {how}"] = (y.detach(), torch.autograd.grad(y.square().sum(), x)[0])
    return results
