"""What the processes of test_fp8_all_gather.py do: models whose weights FSDP2 gathers in FP8. Nothing here compares anything but bits."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from helpers.distributed.rank_bodies import _sequence_plan, batch, loss_of, model
from helpers.distributed.ranks import device, mesh
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import te_dynamo
from te_dynamo.distributed import fp8_all_gather, fp8_all_gather_shard, fp8_all_gather_weight
from te_dynamo.distributed.fp8_all_gather_shard import ShardedWeight, local_of
from te_dynamo.distributed.fp8_all_gather_weight import WEIGHTS
from te_dynamo.errors import TeError
from te_dynamo.passes.dialect.live_memory import peak_bytes
from te_dynamo.recipe import Recipe, as_recipe
from te_dynamo.testing import count_wire

RULES = [("head", None)]
"""The head is not compiled: FSDP's hooks break the graph before each block."""


def sharded(
    fp8: bool = True, dtype: torch.dtype = torch.bfloat16, mp_policy: Any = None, tensor: int = 1, **options: Any
) -> nn.Module:
    """Blocks that are compiled by themselves, each a group of FSDP2; options: of the backend."""
    shared, ranks = _parallel(dtype, tensor)
    of_fsdp: dict[str, Any] = {"mesh": ranks} | ({"mp_policy": mp_policy} if mp_policy else {})
    for layer in shared.layers:
        layer.compile(backend="te", fullgraph=True, options={"codegen": "eager", **options})
    if fp8:
        fp8_all_gather(shared, options={**options, "rules": RULES})
    for layer in shared.layers:
        fully_shard(layer, **of_fsdp)
    return fully_shard(shared, **of_fsdp)


def _parallel(dtype: torch.dtype, tensor: int) -> tuple[nn.Module, Any]:
    """(a model, the mesh of FSDP2). So many ranks of tensor have a part of each weight, and of the tokens between the linears."""
    shared, ranks = model(dtype).to(device()), mesh(dist.get_world_size() // tensor, tensor, names=("data", "tensor"))
    if tensor > 1:
        parallelize_module(shared, ranks["tensor"], _sequence_plan(shared))
    for layer in shared.layers:
        layer.parts[0].heads //= tensor
    return shared, ranks["data"]


def moved(rank: int) -> list[float]:
    """Of each gather the scale over what it should be; the shard is written in fp64, and often lies where it lay before."""
    shared, found = nn.Sequential(nn.Linear(1024, 1024, bias=False)), []
    fully_shard(fp8_all_gather(shared), mesh=mesh(dist.get_world_size()))
    for factor in (1, 10, 10, 10):
        with torch.no_grad():
            shared.double()[0].weight.mul_(factor)
        shared.float().unshard()
        scale = local_of(shared[0].weight)._scale_inv
        shared.reshard()
        found.append((scale * 448 / shared[0].weight.full_tensor().abs().max()).item())
    return found


def _part(rank: int, tensor: int = 1) -> tuple[Tensor, Tensor]:
    ids, wanted = (t.chunk(dist.get_world_size() // tensor)[rank // tensor].to(device()) for t in batch())
    return ids, wanted


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def wire(rank: int, recipe: str | Recipe, width: int, count: int = 3) -> dict[str, dict[str, Any]]:
    """Of steps with FP8 on the wire and in bf16: bytes of all-gathers, collectives, what graphs keep alive, compilations."""
    torch.manual_seed(rank)
    x, told = torch.randn(128, width, dtype=torch.bfloat16, device=device()), {}
    for name, of_blocks in (("fp8", recipe), ("bf16", None)):
        torch._dynamo.reset()
        shared = nn.Sequential(*(Block(width) for _ in range(2))).to(device(), torch.bfloat16)
        options = {"recipe": of_blocks, "codegen": "eager"}
        fp8_all_gather(shared, options=options)
        for block in shared:
            block.compile(backend="te", fullgraph=True, options=options)
            fully_shard(block, mesh=mesh())
        fully_shard(shared, mesh=mesh())
        compiled = []
        with te_dynamo.capture() as graphs, count_wire() as counted:
            for _ in range(count):
                shared(x).square().sum().backward()
                torch.optim.SGD(shared.parameters(), lr=1e-4).step()
                shared.zero_grad()
                compiled.append(len(graphs.reports))
        told[name] = {
            "gathered": counted.total("all_gather"),
            "reductions": counted.calls.get(("all_reduce", torch.float32), 0),
            "peaks": [peak_bytes(graphs.graph(phase)) for phase in ("forward", "backward")],
            "compiled": compiled,
            "notes": graphs.reports[0].notes,
            "graphs": {phase: graphs.all(phase)[0] for phase in ("match", "forward", "backward")},
        }
    return told


def no_tokens(rank: int) -> list[Tensor]:
    """The gradients of a block of which the last rank has no tokens, with FP8 on the wire and in bf16."""
    found = []
    for fp8 in (True, False):
        torch.manual_seed(0)
        torch._dynamo.reset()
        block = Block(64).to(device(), torch.bfloat16)
        if fp8:
            fp8_all_gather(block)
        block.compile(backend="te", fullgraph=True, options={"codegen": "eager"})
        fully_shard(block, mesh=mesh())
        block(torch.ones(32 * (rank == 0), 64, dtype=torch.bfloat16, device=device())).sum().backward()
        found.append(torch.cat([p.grad.full_tensor().flatten() for p in block.parameters()]))
    return found


def inference(rank: int, recipe: str | Recipe, width: int, inference_mode: bool) -> dict[str, Any]:
    """Of a model that does not train: whether its output is that of unsharded weights, and the bytes that it gathers."""
    x, told = torch.randn(128, width, generator=torch.Generator().manual_seed(0)).to(device(), torch.bfloat16), {}
    for name in ("whole", "bf16", "fp8"):
        torch.manual_seed(0)
        torch._dynamo.reset()
        shared = nn.Sequential(*(Block(width) for _ in range(2))).to(device(), torch.bfloat16).requires_grad_(False)
        options = {"recipe": recipe, "codegen": "eager"}
        if name == "fp8":
            fp8_all_gather(shared, options=options)
        for block in shared:
            block.compile(backend="te", fullgraph=True, options=options)
            _ = name != "whole" and fully_shard(block, mesh=mesh())
        with torch.inference_mode() if inference_mode else torch.no_grad(), count_wire() as counted:
            told[name] = shared(x), counted.total("all_gather")
    return {
        "same": all(torch.equal(told["whole"][0], output) for output, _ in told.values()),
        "gathered": told["fp8"][1] / told["bf16"][1],
    }


class Wide(nn.Module):
    """Linears of sizes whose shards have few rows or an end inside of a block; the last one is shared out by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Linear(k, n, bias=False) for n, k in ((16, 32), (48, 128), (80, 144), (512, 160), (1024, 128), (32, 96))
        )

    def forward(self, x: Tensor) -> Tensor:
        return sum(part(x[:, : part.in_features]).sum(1) for part in self.parts)


def bits(
    rank: int, recipe: str | Recipe, dtype: torch.dtype, param_dtype: torch.dtype | None, trains: bool = True
) -> dict[str, str]:
    """Each gathered weight is what its quantizer makes of the whole weight, cast to param_dtype first; a reason where it is plain."""
    torch.manual_seed(0)
    wide = Wide().to(dtype).requires_grad_(trains)
    with torch.no_grad():
        wide.parts[1].weight.zero_()
        wide.parts[2].weight[-1, 0] = 3e4  # the amax is in the last shard, and not a value of bf16
        wide.parts[3].weight[3, 5] = torch.nan
        wide.parts[4].weight[-1, 1] = torch.inf
    whole = {name: p.detach().clone().to(device()) for name, p in wide.named_parameters()}
    fp8_all_gather(wide.to(device()), options={"recipe": recipe})
    fully_shard(
        wide,
        mesh=mesh(),
        mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype),
        shard_placement_fn=lambda p: Shard(1) if p is wide.parts[5].weight else None,
    )
    quantizer = as_recipe(recipe).weight_quantizer().with_usage(True, False)
    found = {}
    for _ in range(2):  # the second gather writes to the tensors of the first
        wide.unshard()
        for name, values in whole.items():
            gathered, values = wide.get_parameter(name), values.to(param_dtype or dtype)
            assert gathered.dtype == values.dtype and gathered.shape == values.shape
            if isinstance(gathered, te_dynamo.QuantizedTensor):
                expected = quantizer.quantize(values)
                for one, other in zip(gathered.buffers(), expected.buffers(), strict=True):
                    assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), name
                found[name] = ""
            else:
                assert torch.equal(gathered.view(torch.uint8), values.view(torch.uint8)), name
                found[name] = "as it is"
        wide.reshard()
    return found


def reasons(rank: int, recipe: Recipe, rows: tuple[int, ...], trains: bool = True) -> dict[int, str]:
    """Why a weight of so many rows travels as it is, "" where it does not."""
    linears = nn.Sequential(*(nn.Linear(64, n, bias=False) for n in rows)).to(device()).requires_grad_(trains)
    fp8_all_gather(linears, options={"recipe": recipe})
    fully_shard(linears, mesh=mesh())
    linears.unshard()
    return {n: WEIGHTS[linear].reason for n, linear in zip(rows, linears, strict=True)}


PLACEMENTS = {
    "column": ((256, 48), Shard(0)),
    "row": ((512, 96), Shard(1)),
    "whole": ((256, 32), Replicate()),
    "short": ((80, 32), Shard(0)),
    "narrow": ((64, 48), Shard(1)),
    "sums": ((32, 32), Partial()),
    "columns of FSDP": ((64, 64), Shard(0)),
}
"""Name -> (N, K), how two ranks of tensor parallelism share it."""


def replicated(rank: int, recipe: str | Recipe) -> str:
    """Why a weight that all ranks have whole travels as it is."""
    from torch.distributed._composable.replicate_with_fsdp import replicate

    linear = nn.Linear(32, 256, bias=False).to(device(), torch.bfloat16)
    whole = linear.weight.detach().clone()
    fp8_all_gather(linear, options={"recipe": recipe})
    replicate(linear, mesh=mesh(names=("replicate",)))
    linear.unshard()
    of_linear, gathered = WEIGHTS[linear], linear.weight
    if of_linear.reason:
        assert torch.equal(gathered, whole)
    else:
        for one, other in zip(gathered.buffers(), of_linear.quantizer.quantize(whole).buffers(), strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    return of_linear.reason


def tensor_bits(rank: int, recipe: str) -> dict[str, str]:
    """Two ranks have a part of each weight, which FSDP2 shares out: the gathered part is what its quantizer makes of it. Returns the reasons
    of those that are plain."""
    both = mesh(dist.get_world_size() // 2, 2, names=("data", "tensor"))
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict((name, nn.Linear(k, n, bias=False)) for name, ((n, k), _) in PLACEMENTS.items()))
    for linear, (_, placement) in zip(model.to(device()), PLACEMENTS.values(), strict=True):
        whole = DTensor.from_local(linear.weight.data, both["tensor"], [Replicate()])
        linear.weight = nn.Parameter(
            DTensor.from_local(whole.to_local(), both["tensor"], [placement])
            if isinstance(placement, Partial)
            else whole.redistribute(placements=[placement])
        )
    parts = {name: linear.weight.to_local().detach().clone() for name, linear in model.named_children()}
    fp8_all_gather(model, options={"recipe": recipe})
    of_columns = model[-1].weight
    fully_shard(model, mesh=both["data"], shard_placement_fn=lambda p: Shard(1) if p is of_columns else None)
    quantizer = te_dynamo.recipe.by_name(recipe).weight_quantizer().with_usage(True, False)
    for _ in range(2):  # the second gather writes to the tensors of the first
        model.unshard()
        for name, values in parts.items():
            gathered = model.get_submodule(name).weight.to_local()
            if isinstance(gathered, te_dynamo.QuantizedTensor):
                for one, other in zip(gathered.buffers(), quantizer.quantize(values).buffers(), strict=True):
                    assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), name
            else:
                assert torch.equal(gathered, values), name
        model.reshard()
        with torch.no_grad():
            for name, linear in model.named_children():
                linear.weight.mul_(2)
                parts[name] = parts[name] * 2
    return {name: WEIGHTS[linear].reason for name, linear in model.named_children() if WEIGHTS[linear].reason}


def tensor_graphs(rank: int) -> dict[str, str]:
    """Of a block whose tokens and weights two ranks share."""
    shared = sharded(tensor=2)
    with te_dynamo.capture() as graphs:
        shared(_part(rank, 2)[0]).sum().backward()
    return {phase: graphs.all(phase)[-1] for phase in ("match", "forward", "backward")}


def work(rank: int, recipe: str | Recipe) -> list[dict[str, Any]]:
    """Of forward's gather, backward's and the next step's forward's: how many weights each search for amaxes and each cast is of, how many
    scales are copied, and calls of the subclasses' Python dispatch."""
    linears = nn.Sequential(*(nn.Linear(32, 256, bias=False) for _ in range(3))).to(device())
    fp8_all_gather(linears, options={"recipe": recipe})
    fully_shard(linears, mesh=mesh(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    linears.unshard()  # makes the parameters
    told = []
    for write in (True, False, True):
        linears.reshard()
        with torch.no_grad():
            for weight in linears.parameters() if write else ():
                weight.mul_(2)
        with (
            _counted(fp8_all_gather_weight, "quantize_several") as launches,
            _counted(fp8_all_gather_weight, "largest_magnitudes") as amaxes,
            _counted(ShardedWeight, "__torch_dispatch__") as of_shards,
            _counted(te_dynamo.QuantizedTensor, "__torch_dispatch__") as of_gathered,
            _CopiedScales() as copied,
        ):
            linears.unshard()
        casts = [len(call.args[0]) for call in launches.call_args_list]
        found = [len(call.args[0]) for call in amaxes.call_args_list]
        dispatches = of_shards.call_count + of_gathered.call_count
        told.append({"amaxes": found, "casts": casts, "copied": copied.count, "dispatches": dispatches})
    return told


class _CopiedScales(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.copy_.default and args[0].shape == (1,)
        return func(*args, **(kwargs or {}))


def _counted(owner: Any, name: str) -> Any:
    return mock.patch.object(owner, name, side_effect=getattr(owner, name))


def steps(rank: int, reshard: bool, policy: bool, tensor: int = 1) -> dict[str, Any]:
    """AdamW with clipping; two microbatches a step, of which the last one's gradients meet."""
    mp_policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if policy else None
    told: dict[str, Any] = {}
    for name, fp8 in (("fp8", True), ("bf16", False)):
        torch._dynamo.reset()
        shared = sharded(fp8, torch.float32, mp_policy, tensor, fusions=["-fuse_shared_input"])
        shared.set_reshard_after_forward(reshard)
        optimizer = torch.optim.AdamW(shared.parameters(), lr=1e-2)
        ids, wanted = _part(rank, tensor)
        losses, norms = [], []
        for _ in range(4):
            for last in (False, True):
                shared.set_requires_gradient_sync(last)
                loss = loss_of(shared, ids, wanted) / 2
                loss.backward()
            losses.append(loss.item())
            norms.append(nn.utils.clip_grad_norm_(shared.parameters(), 1.0).full_tensor().item())
            optimizer.step()
            optimizer.zero_grad()
        told[name] = losses, norms, {n: p.full_tensor() for n, p in shared.state_dict().items()}
        kinds = {type(v.to_local()) for s in optimizer.state.values() for v in s.values() if hasattr(v, "to_local")}
        assert kinds == {Tensor}
    return told


def replayed(rank: int, recipe: str | Recipe, whole: bool) -> dict[str, Any]:
    """Steps on other tokens with other weights, called and by CUDA graphs: Inductor's of each block, or one of the whole step. The loss and the
    blocks' gradients of each, and how many captures of Inductor's each took."""
    from torch._inductor.cudagraph_trees import CUDAGraphTreeManager

    options = {"recipe": recipe, "codegen": "inductor", "rules": [("", recipe)]}
    told: dict[str, Any] = {"captures": []}
    for name, more in (("called", {}), ("replayed", {} if whole else {"triton.cudagraphs": True})):
        torch._dynamo.reset()
        shared = sharded(**options, **more)
        ids, wanted = _part(rank)

        def step(shared: nn.Module = shared, ids: Tensor = ids, wanted: Tensor = wanted) -> Tensor:
            torch.compiler.cudagraph_mark_step_begin()
            shared.zero_grad()
            loss = loss_of(shared, ids, wanted)
            loss.backward()
            return loss.detach()

        run = _captured(step) if whole and name == "replayed" else step
        told[name] = []
        for factor in (1.0, 1.5, 0.25, 3.0, 1.25):
            with torch.no_grad():
                ids.copy_(ids.flip(1) + 1).remainder_(64)
                for parameter in shared.parameters():
                    parameter.mul_(factor)
            record = CUDAGraphTreeManager.record_function
            with mock.patch.object(
                CUDAGraphTreeManager, "record_function", autospec=True, side_effect=record
            ) as captures:
                loss = run().item()
            gradients = {n: p.grad.to_local().clone() for n, p in shared.layers.named_parameters()}
            told[name].append((loss, gradients))
            told["captures"] += [captures.call_count] if name == "replayed" else []
    return told


def _captured(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """One CUDA graph of the step, as torch's documentation captures it."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        loss = step()

    def run() -> Tensor:
        graph.replay()
        return loss

    return run


# ---- checkpoints


def _objects(recipe: str, tensor: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    shared = sharded(True, torch.float32, tensor=tensor, recipe=recipe)
    return shared, torch.optim.AdamW(shared.parameters(), lr=1e-2)


def _step(rank: int, shared: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    ids, wanted = batch()
    loss = loss_of(shared, ids.to(device()), wanted.to(device()))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def save(rank: int, folder: str, recipe: str, tensor: int) -> dict[str, Any]:
    """A step, a checkpoint, and the loss of the next."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    shared, optimizer = _objects(recipe, tensor)
    _step(rank, shared, optimizer)
    state, of_optimizer = get_state_dict(shared, optimizer)
    assert {type(v.to_local()) for v in state.values()} == {Tensor}
    dcp.save({"model": state, "optimizer": of_optimizer}, checkpoint_id=folder)
    return {"weights": {n: p.full_tensor() for n, p in state.items()}, "loss": _step(rank, shared, optimizer)}


def load(rank: int, folder: str, recipe: str, tensor: int) -> dict[str, Any]:
    """The same after a load into a model that has trained already, and once more after load_state_dict(assign=True)."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    shared, optimizer = _objects(recipe, tensor)
    _step(rank, shared, optimizer)
    state, of_optimizer = get_state_dict(shared, optimizer)
    loaded = {"model": state, "optimizer": of_optimizer}
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(shared, optimizer, model_state_dict=state, optim_state_dict=of_optimizer)
    told = {"weights": {n: p.full_tensor().clone() for n, p in shared.state_dict().items()}}
    kept = {name: p.clone() for name, p in shared.state_dict().items()}
    told["loss"] = _step(rank, shared, optimizer)
    shared.load_state_dict(kept, assign=True)
    told["assigned"] = _step(rank, shared, optimizer)
    return told


# ---- what must not go wrong in silence


def stale(rank: int) -> list[tuple[float, float]]:
    """(amax by the scale of the gathered weight, amax of the values) after each way to write to it."""
    linear = nn.Linear(32, 32, bias=False).to(device())
    fp8_all_gather(linear)
    fully_shard(linear, mesh=mesh())
    parameter = linear.weight
    optimizer = torch.optim.AdamW(linear.parameters(), lr=1.0, fused=True)

    def by_optimizer(amax: float) -> None:
        parameter.grad = torch.full_like(parameter, -amax)
        optimizer.step()

    def by_state_dict(amax: float) -> None:
        linear.state_dict()["weight"].to_local().fill_(amax)

    def by_load(amax: float) -> None:
        linear.load_state_dict({"weight": torch.full_like(linear.state_dict()["weight"], amax)}, assign=amax == 64)

    def by_inductor(amax: float) -> None:
        """A graph of a DTensor writes to its buffers and raises the counter of what it was given."""
        shard = linear.weight.to_local().plain
        with torch.autograd._unsafe_preserve_version_counter(shard):
            shard.fill_(amax)
        torch.autograd.graph.increment_version(linear.weight)

    ways: list[Callable[[float], Any]] = [
        lambda amax: parameter.detach().fill_(amax),
        lambda amax: parameter.to_local().detach().fill_(amax),
        by_optimizer,
        by_state_dict,
        by_load,
        by_load,
        by_inductor,
        lambda amax: nn.init.constant_(linear.weight, amax),
        lambda amax: linear.weight.to_local()[0].fill_(amax),
        lambda amax: linear.weight.to_local().t()[3, 5].fill_(amax),
        lambda amax: linear.weight[:, 3].fill_(amax),
    ]
    scales = []
    for i, write in enumerate(ways):
        with torch.no_grad():
            write(2.0 ** (i + 1))
        linear.unshard()
        scale_inv = linear.weight.buffers()[1].item()
        linear.reshard()
        scales.append((scale_inv * 448, linear.state_dict()["weight"].full_tensor().abs().max().item()))
    return scales


def written_by_replays(rank: int, recipe: str | Recipe, gathers: bool) -> list[int]:
    """How many weights each cast is of: before a capture, in two of them, and behind their replays, which write to weights and raise no counter.
    Whatever is gathered is the whole weight quantized as it is then. gathers: whether the graphs gather; else they write alone."""
    linears = nn.Sequential(*(nn.Linear(32, 256, bias=False) for _ in range(2))).to(device())
    fp8_all_gather(linears, options={"recipe": recipe})
    for linear in linears:
        fully_shard(linear, mesh=mesh(), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    with _counted(fp8_all_gather_weight, "quantize_several") as casts:
        for capture in (0, 5, 5, 6, 0, 0, 0):
            for linear in linears:
                _write_unseen(linear, 1 if capture == 5 else 3)
                if capture and not gathers:
                    with torch.no_grad(), _capturing(capture):
                        linear.weight.mul_(1)
            for linear in linears if gathers or not capture else ():
                _gather(linear, capture)
    assert all(WEIGHTS[linear]._shard()._made is None for linear in linears)
    return [len(call.args[0]) for call in casts.call_args_list]


def beside_a_graph(rank: int, recipe: str | Recipe) -> list[int]:
    """The same where a graph gathers and writes to one of two weights alone, and the other is gathered between."""
    one, other = linears = nn.Sequential(*(nn.Linear(32, 256, bias=False) for _ in range(2))).to(device())
    fp8_all_gather(linears, options={"recipe": recipe})
    for linear in linears:
        fully_shard(linear, mesh=mesh(), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    with _counted(fp8_all_gather_weight, "quantize_several") as casts:
        for linear, capture in ((one, 0), (other, 0), (one, 5)):
            _gather(linear, capture)
        for _ in range(2):
            with torch.no_grad():
                other.weight.mul_(2)
            _gather(other)
            _write_unseen(one, 3)
            _gather(one)
    return [len(call.args[0]) for call in casts.call_args_list]


def _capturing(capture: int) -> Any:
    return mock.patch.object(fp8_all_gather_shard, "captured_into", lambda: capture)


def _write_unseen(linear: nn.Linear, factor: float) -> None:
    plain = linear.weight.to_local().plain
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(plain):
        plain.mul_(factor)


def _gather(linear: nn.Linear, capture: int = 0) -> None:
    """What is gathered is the whole weight quantized as it is now."""
    whole = linear.weight.full_tensor()
    with _capturing(capture):
        linear.unshard()
    wanted = WEIGHTS[linear].quantizer.quantize(getattr(whole, "plain", whole).to(torch.bfloat16)).buffers()
    for one, other in zip(linear.weight.buffers(), wanted, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), capture
    linear.reshard()


def in_any_order(rank: int, seed: int, recipe: str | Recipe) -> list[int]:
    """How many weights each cast is of, where weights are written to and gathered in an order that the seed gives. Whatever is gathered is the
    whole weight quantized as it is then, and its scale lies where the first one did: a CUDA graph reads it there."""
    order, places = random.Random(seed), dict[nn.Module, int]()
    linears = nn.Sequential(*(nn.Linear(32, 256, bias=False) for _ in range(4))).to(device())
    fp8_all_gather(linears, options={"recipe": recipe, "rules": [("2", "float8_block_scaling")]})
    for i, linear in enumerate(linears):  # one group has another dtype, and is cast by itself
        fully_shard(linear, mesh=mesh(), mp_policy=MixedPrecisionPolicy(torch.float16 if i == 3 else torch.bfloat16))
    with _counted(fp8_all_gather_weight, "quantize_several") as casts:
        for _ in range(60):
            linear = order.choice(linears)
            if order.random() < 0.3:
                with torch.no_grad():
                    linear.weight.mul_(order.choice([-1.5, 0.3, 7.0]))
                continue
            whole = linear.weight.full_tensor()
            linear.unshard()
            codes, scale_inv = linear.weight.buffers()
            wanted = (
                WEIGHTS[linear].quantizer.quantize(getattr(whole, "plain", whole).to(linear.weight.dtype)).buffers()
            )
            assert torch.equal(codes.view(torch.uint8), wanted[0].view(torch.uint8)) and torch.equal(
                scale_inv, wanted[1]
            )
            if scale_inv.numel() == 1:  # FSDP2 has the places of all else
                assert places.setdefault(linear, scale_inv.data_ptr()) == scale_inv.data_ptr()
            linear.reshard()
    return [len(call.args[0]) for call in casts.call_args_list]


def refused(rank: int) -> dict[str, str]:
    """What is said of each mistake."""
    mistakes: dict[str, Callable[[], Any]] = {
        "after fully_shard": lambda: fp8_all_gather(sharded(False)),
        "without fully_shard": lambda: torch.compile(
            fp8_all_gather(model()), backend="te", options={"codegen": "eager"}
        )(_part(rank)[0]),
        "twice": lambda: fp8_all_gather(fp8_all_gather(model())),
        "freeze": lambda: te_dynamo.freeze(fp8_all_gather(model())),
        "frozen": lambda: fp8_all_gather(te_dynamo.freeze(model())),
        "another recipe": lambda: _forward(rank, _with_options({"recipe": "float8_block_scaling"})),
        "a rule": lambda: _forward(rank, _with_options({"rules": [("up", None)]})),
        "not compiled": lambda: _forward(rank, _with_options(None)),
        "another backend": lambda: _forward(rank, _with_options(None, backend="aot_eager")),
        "a wrapped linear": lambda: _forward(rank, _with_options({}, wrapped="parts.1.up")),
        "not compiled parts": lambda: _forward(rank, _with_options(None, 2), 2),
        "a rule for parts": lambda: _forward(rank, _with_options({"rules": [("up", None)]}, 2), 2),
        "option": lambda: fp8_all_gather(model(), options={"recpie": None}),
    }
    said = {}
    for name, make in mistakes.items():
        torch._dynamo.reset()
        try:
            make()
            said[name] = ""
        except (TeError, RuntimeError) as error:
            said[name] = str(error)
    return said


def _with_options(
    options: dict[str, Any] | None, tensor: int = 1, backend: str | None = None, wrapped: str = ""
) -> nn.Module:
    """Compiled with other options than its weights travel with. wrapped: a linear of each block that is a group of its own."""
    shared, ranks = _parallel(torch.float32, tensor)
    fp8_all_gather(shared, options={"rules": RULES})
    for layer in shared.layers:
        if options is not None:
            layer.compile(backend="te", options={"codegen": "eager", **options})
        elif backend:
            layer.compile(backend=backend)
        if wrapped:
            fully_shard(layer.get_submodule(wrapped), mesh=ranks)
        fully_shard(layer, mesh=ranks)
    return fully_shard(shared, mesh=ranks)


def _forward(rank: int, shared: nn.Module, tensor: int = 1) -> None:
    shared(_part(rank, tensor)[0])
