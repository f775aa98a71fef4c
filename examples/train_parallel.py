"""Trains a small Llama on several processes, each linear in FP8: FSDP2 by tensor parallelism with sequence parallelism.

    torchrun --nproc-per-node 4 examples/train_parallel.py                  # GPUs over NCCL where there are any, else CPUs over gloo
    torchrun --nproc-per-node 2 examples/train_parallel.py --steps 400      # goes on from the last checkpoint, on any number of processes
    torchrun --nproc-per-node 8 examples/train_parallel.py --tensor 4 --recipe mxfp8
    torchrun --nproc-per-node 2 examples/train_parallel.py --graph          # forward and backward are one CUDA graph

Every --tensor processes have one copy of the model between them; each of these copies has its part of the batch, and FSDP2 shares the
weights out among them. Trains on the source of Python's standard library, byte by byte (byte_text.py). A step's batch depends on its number
alone, so a run that is resumed on other processes sees what it would have seen. Checkpoints are torch's (DCP), in --out.
"""

from __future__ import annotations

import argparse
import os
import pathlib
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from byte_text import standard_library
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from tqdm import tqdm

import te_dynamo
from te_dynamo.recipe import names

SIZES = {
    "cpu": dict(steps=100, layers=2, width=128, seq=64, batch=8),
    "cuda": dict(steps=500, layers=8, width=2048, seq=1024, batch=16),
}
BYTES = 256


# ---- the model: plain PyTorch, which knows of no process but its own


class Attention(nn.Module):
    def __init__(self, width: int, head: int = 32) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, tokens, width]. Heads are counted by what the projections give: a rank has some of them."""
        q, k, v = (p(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


def rotated(x: Tensor) -> Tensor:
    """Rotary embedding of [..., tokens, head]."""
    tokens, head = x.shape[-2:]
    rates = 10000.0 ** -(torch.arange(0, head, 2, device=x.device) / head)
    angles = torch.arange(tokens, device=x.device)[:, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(width), Attention(width)
        self.mlp_norm, self.mlp = nn.RMSNorm(width), MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, BYTES, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


# ---- how it is shared out


def share_out(model: Llama, mesh: DeviceMesh, options: dict[str, object], bf16: bool) -> None:
    """In this order: tensor parallelism, FP8 on FSDP2's wire, the compiler, FSDP2."""
    whole, tokens = Replicate(), Shard(1)
    gather = PrepareModuleInput(input_layouts=(tokens,), desired_input_layouts=(whole,))
    block = {
        "attention_norm": SequenceParallel(),
        "attention": gather,
        "attention.q": ColwiseParallel(),
        "attention.k": ColwiseParallel(),
        "attention.v": ColwiseParallel(),
        "attention.o": RowwiseParallel(output_layouts=tokens),
        "mlp_norm": SequenceParallel(),
        "mlp": gather,
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=tokens),
    }
    plan = {
        "embedding": RowwiseParallel(input_layouts=whole, output_layouts=tokens),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=tokens, output_layouts=whole),
        **{f"layers.{i}.{name}": style for i in range(len(model.layers)) for name, style in block.items()},
    }
    if mesh["tensor"].size() > 1:
        parallelize_module(model, mesh["tensor"], plan)
    policy = MixedPrecisionPolicy(*([torch.bfloat16, torch.float32] if bf16 else []))
    # Once for the model: so all amaxes take one all-reduce a step. The head is not compiled.
    te_dynamo.distributed.fp8_all_gather(model, options=options | {"rules": [("^head$", None)]})
    for layer in model.layers:
        layer.compile(backend="te", options=options)
        fully_shard(layer, mesh=mesh["data"], mp_policy=policy)
    fully_shard(model, mesh=mesh["data"], mp_policy=policy)


# ---- checkpoints


def save(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, out: pathlib.Path) -> None:
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments, "step": step}, checkpoint_id=out / f"step_{step}")


def resume(model: nn.Module, optimizer: torch.optim.Optimizer, out: pathlib.Path) -> int:
    """Loads the last checkpoint of `out`; how many steps it has been trained, 0 without one."""
    done = [int(folder.name.removeprefix("step_")) for folder in out.glob("step_*") if (folder / ".metadata").exists()]
    if not done:
        return 0
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": 0}
    dcp.load(state, checkpoint_id=out / f"step_{max(done)}")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return state["step"]


# ---- training


def captured(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The step as a CUDA graph: its loss, gradients and what it reads stay where they are. FSDP2 then costs the CPU nothing."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # compiles
            step()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):  # NCCL has threads of its own
        loss = step()

    def replay() -> Tensor:
        graph.replay()
        return loss

    return replay


def train(args: argparse.Namespace, device: torch.device) -> None:
    processes = dist.get_world_size()
    mesh = init_device_mesh(device.type, (processes // args.tensor, args.tensor), mesh_dim_names=("data", "tensor"))
    data = mesh["data"]
    torch.manual_seed(0)
    model = Llama(args.layers, args.width).to(device)
    options = {"recipe": args.recipe, "codegen": args.codegen, "replayed": args.graph}
    share_out(model, mesh, options, bf16=device.type == "cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    first = resume(model, optimizer, args.out)
    text = standard_library(4_000_000)
    steps = range(first, args.steps)
    mine = torch.zeros(args.batch // data.size(), args.seq + 1, dtype=torch.int64, device=device)

    def step() -> Tensor:
        optimizer.zero_grad()
        logits = model(mine[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), mine[:, 1:].flatten())
        loss.backward()
        return loss.detach()

    run = captured(step) if args.graph and steps else step
    bar = tqdm(steps, f"{data.size()} x {args.tensor}", args.steps, initial=first, disable=dist.get_rank() > 0)
    for number in bar:
        (tokens,) = text.batches("train", 1, args.batch, args.seq + 1, seed=number)
        mine.copy_(tokens.chunk(data.size())[data.get_local_rank()])
        mean = run().clone()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        dist.all_reduce(mean)
        bar.set_postfix(loss=f"{mean.item() / processes:.4f}")
        if number + 1 == args.steps or (number + 1) % args.save_every == 0:
            save(model, optimizer, number + 1, args.out)
    if dist.get_rank() == 0:
        print(f"step {args.steps}: loss {mean.item() / processes:.4f}" if steps else f"step {first} is done already")


def parse_args(device: str) -> argparse.Namespace:
    processes = int(os.environ.get("WORLD_SIZE", 1))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor", type=int, default=2 - processes % 2, help="processes that share one copy's linears")
    parser.add_argument("--recipe", default="float8_current_scaling", choices=names())
    parser.add_argument("--codegen", default="inductor", choices=("inductor", "eager"))
    for name, value in SIZES[device].items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--graph", action="store_true", help="replay forward and backward as one CUDA graph")
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/parallel"))
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("it is started by torchrun: torchrun --nproc-per-node 2 examples/train_parallel.py")
    if args.graph and device != "cuda":
        parser.error("--graph needs GPUs: CUDA graphs are theirs")
    if processes % args.tensor:
        parser.error(f"{processes} processes are no multiple of --tensor {args.tensor}")
    if args.batch % (processes // args.tensor) or args.seq % args.tensor:
        parser.error("--batch must be a multiple of the copies of the model, and --seq one of --tensor")
    return args


def main() -> None:
    on_gpu = torch.cuda.is_available()
    args = parse_args("cuda" if on_gpu else "cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    te_dynamo.distributed.check_ranks()
    train(args, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
