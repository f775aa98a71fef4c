"""A step of several Llama layers on several GPUs: FSDP2, tensor with sequence parallelism, and both, in bf16 and in FP8.

    torchrun --nproc-per-node 2 benchmarks/train_parallel.py
    torchrun --nproc-per-node 4 benchmarks/train_parallel.py --models llama70b --tokens 2048 --name _2048
    torchrun --nproc-per-node 2 benchmarks/train_parallel.py --tokens 2048 --graphs step
    torchrun --nproc-per-node 2 benchmarks/train_parallel.py --quick --device cpu          # does it run?

A step is forward and backward of bf16 layers, each compiled by itself, on random normal inputs, and what a provider does of scales between
steps: the weights count as written before each, as by an optimizer. `tokens` are a data-parallel rank's. All providers of a row are made
first and then timed in turn, round after round. `step ms` is the median of the rounds, of the slowest rank; the peak is rank 0's without the
other providers' bytes, and `wire MiB` is what comes to rank 0 from the others in a step, as `te_dynamo.testing.count_wire` counts it. Of one
more step rank 0's profiler gives the ms in which the GPU computes, in which it sends or waits for another rank (`wire ms`), in which it does
that alone, and in which it waits for the CPU (`idle ms`). `enqueue ms` is the time until the CPU has launched a step, begun with an idle
GPU, the median of some of rank 0. FSDP2 gathers a layer's weights when the CPU has come to the layer; "a layer
ahead" is its set_modules_to_forward_prefetch.

--graphs: CUDA graphs of all providers, bf16's too: "layer", Inductor's of each layer's forward and of its backward; "step", one of the whole step,
with the option replayed=True. The layout says so. A step's peak is then the memory that the allocator has for the provider.

--overlap: Inductor's own pass for all providers, bf16's too: products that do not read a collective's result run behind its start and before
its wait. Without it Inductor waits right behind each collective of a layer. The layout says so.

    te                  FP8 products; weights and activations travel in bf16
    te 16 SMs left      the same, with options={"sm_margin": 16}, which NCCL's kernels then have; 32 likewise
    te on wire          and they travel in FP8
    torchao             tensorwise scales with its FP8 all-gather, and its styles of tensor parallelism
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import gc
import itertools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import environment
import report
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from te_dynamo.recipe import MXFP8BlockScaling
from te_dynamo.testing import count_wire


class Attention(nn.Module):
    """Causal, with `kv_heads` shared among `heads`; rotary embeddings are left out."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, kv_heads * self.head_width, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for one in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(mixed.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, width: int, inner: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(width, eps=1e-5), Attention(width, heads, kv_heads)
        self.norm2, self.mlp = nn.RMSNorm(width, eps=1e-5), MLP(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Layers(nn.Module):
    def __init__(self, count: int, *sizes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(*sizes) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


MODELS = {
    "llama8b": ("Llama-8B", (4096, 14336, 32, 8)),
    "llama70b": ("Llama-70B", (8192, 28672, 64, 8)),
    "tiny": ("tiny", (256, 512, 8, 4)),
}
LAYOUTS = {
    "fsdp": "FSDP2",
    "fsdp_ahead": "FSDP2, gathers a layer ahead",
    "tp": "TP + SP",
    "fsdp_tp": "FSDP2 x TP + SP",
}
TENSOR_RANKS = 2  # of FSDP2 x TP
GRAPHS = {"": "", "layer": ", two CUDA graphs a layer", "step": ", one CUDA graph"}
OVERLAP = {
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": ["reorder_compute_for_overlap"],
}


@dataclasses.dataclass
class Row:
    """speedup and peak_ratio: bf16's time by its, its peak by bf16's. None where it failed, and `error` says how."""

    model: str
    layout: str
    gpus: int
    tokens: int
    provider: str
    step_ms: float | None = None
    speedup: float | None = None
    peak_mib: float | None = None
    peak_ratio: float | None = None
    wire_mib: float | None = None
    compute_ms: float | None = None
    wire_ms: float | None = None
    wire_alone_ms: float | None = None
    idle_ms: float | None = None
    enqueue_ms: float | None = None
    error: str = ""


@dataclasses.dataclass
class Provider:
    """compile: of a layer, with more options. convert: what is done to the model at first. before_fsdp: before FSDP2 wraps it. between: two steps, what is done
    to the wrapped model. column, row, enter: the styles of tensor parallelism."""

    compile: Callable[[nn.Module, dict[str, Any]], Any]
    convert: Callable[[nn.Module], Any] = lambda model: None
    before_fsdp: Callable[[nn.Module], Any] = lambda model: None
    between: Callable[[nn.Module], Any] = lambda model: None
    column: Callable[..., Any] = ColwiseParallel
    row: Callable[..., Any] = RowwiseParallel
    enter: Callable[..., Any] = PrepareModuleInput


def te(on_wire: bool, recipe: Any = "float8_current_scaling", **options: Any) -> Provider:
    options["recipe"] = recipe
    if not on_wire:
        options["fusions"] = ("-fuse_gather_quantize",)
        return Provider(lambda layer, more: layer.compile(backend="te", options=options | more))
    from te_dynamo.distributed import fp8_all_gather

    return Provider(
        lambda layer, more: layer.compile(backend="te", options=options | more),
        before_fsdp=lambda model: fp8_all_gather(model, options={"recipe": recipe}),
    )


def compile_by_inductor(layer: nn.Module, more: dict[str, Any]) -> None:
    layer.compile(options={name: value for name, value in more.items() if name != "replayed"} or None)


def torchao() -> Provider:
    from torchao.float8 import (
        Float8LinearConfig,
        convert_to_float8_training,
        precompute_float8_dynamic_scale_for_fsdp,
    )
    from torchao.float8.float8_tensor_parallel import (
        Float8ColwiseParallel,
        Float8RowwiseParallel,
        PrepareFloat8ModuleInput,
    )

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    return Provider(
        compile_by_inductor,
        convert=lambda model: convert_to_float8_training(model, config=config),
        between=precompute_float8_dynamic_scale_for_fsdp,
        column=Float8ColwiseParallel,
        row=Float8RowwiseParallel,
        enter=PrepareFloat8ModuleInput,
    )


PROVIDERS: dict[str, Callable[[], Provider]] = {
    "bf16": lambda: Provider(compile_by_inductor),
    "te": lambda: te(on_wire=False),
    "te 16 SMs left": lambda: te(on_wire=False, sm_margin=16),
    "te 32 SMs left": lambda: te(on_wire=False, sm_margin=32),
    "te on wire": lambda: te(on_wire=True),
    "te block on wire": lambda: te(True, "float8_block_scaling"),
    "te MXFP8/128 2-D on wire": lambda: te(True, MXFP8BlockScaling(scale_block=128, weight_block_dims=2)),
    "torchao": torchao,
}


def tensor_ranks(layout: str) -> int:
    """How many ranks share the tokens and the linears of one copy of the model."""
    return {"tp": dist.get_world_size(), "fsdp_tp": TENSOR_RANKS}.get(layout, 1)


def shared_out(model: Layers, layout: str, device: str, provider: Provider, graphs: str, overlap: bool) -> None:
    """Shares the model out among the ranks, and compiles its layers."""
    options: dict[str, Any] = dict(OVERLAP) if overlap else {}
    options |= {"layer": {"triton.cudagraphs": True}, "step": {"replayed": True}}.get(graphs, {})
    provider.convert(model)
    tensor = tensor_ranks(layout)
    mesh = init_device_mesh(device, (dist.get_world_size() // tensor, tensor), mesh_dim_names=("data", "tensor"))
    for layer in model.layers:
        if tensor > 1:
            parallelize_module(layer, mesh["tensor"], plan(provider))
        provider.compile(layer, options)
    if layout != "tp":
        provider.before_fsdp(model)
        for part in (*model.layers, model):
            fully_shard(part, mesh=mesh["data"])
    if layout == "fsdp_ahead":
        for layer, following in itertools.pairwise(model.layers):
            layer.set_modules_to_forward_prefetch([following])


def plan(provider: Provider) -> dict[str, Any]:
    """torchtitan's, of a layer whose tokens are shared out between its linears."""
    enter = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    row = {"output_layouts": Shard(1)}
    return {
        **{f"norm{i}": SequenceParallel() for i in (1, 2)},
        **{part: provider.enter(**enter) for part in ("attention", "mlp")},
        **{f"attention.{name}": provider.column() for name in "qkv"},
        **{f"mlp.{name}": provider.column() for name in ("gate", "up")},
        "attention.o": provider.row(**row),
        "mlp.down": provider.row(**row),
    }


class Candidate:
    """A provider whose step ran, ready to be timed."""

    def __init__(
        self, row: Row, base: Layers, layout: str, x: Tensor, grad: Tensor, graphs: str, overlap: bool
    ) -> None:
        self.row, self.x, self.grad, self.graphs, self.times = row, x, grad, graphs, list[float]()
        gc.collect()
        others = _memory(x.device, graphs)
        self.provider = PROVIDERS[row.provider]()
        self.model = copy.deepcopy(base)
        shared_out(self.model, layout, x.device.type, self.provider, graphs, overlap)
        self.run = self.step
        # Autograd remembers which stream forward was on.
        stream = torch.cuda.Stream(x.device) if graphs == "step" else None
        with torch.cuda.stream(stream):
            with count_wire() as wire:
                self.step()  # a replay's is not seen
            for _ in range(3):
                self.step()
        row.wire_mib = wire.total() / 2**20
        if stream is not None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self.step()
            self.run = graph.replay
        if x.device.type == "cuda":
            torch.cuda.synchronize(x.device)
            torch.cuda.reset_peak_memory_stats(x.device)
            self.run()
            torch.cuda.synchronize(x.device)
            if graphs != "layer":  # whose memory the providers share
                row.peak_mib = (_memory(x.device, graphs, peak=True) - others) / 2**20
            self.profile()
            row.enqueue_ms = statistics.median(self.enqueue_ms() for _ in range(5))

    def enqueue_ms(self) -> float:
        torch.cuda.synchronize(self.x.device)
        dist.barrier()
        torch.cuda.synchronize(self.x.device)
        start = time.perf_counter()
        self.run()
        return 1000 * (time.perf_counter() - start)

    def profile(self) -> None:
        from torch.autograd import DeviceType

        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            self.run()
            torch.cuda.synchronize(self.x.device)
        ran = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
        wire, compute = ([_span(e) for e in ran if ("nccl" in e.name) is sends] for sends in (True, False))
        busy = _union_ms(wire + compute)
        first, last = min(start for start, _ in wire + compute), max(end for _, end in wire + compute)
        self.row.compute_ms, self.row.wire_ms = _union_ms(compute), _union_ms(wire)
        self.row.wire_alone_ms, self.row.idle_ms = busy - self.row.compute_ms, (last - first) / 1e3 - busy

    def step(self) -> None:
        self.x.grad = None
        for parameter in self.model.parameters():
            parameter.grad = None
            torch.autograd.graph.increment_version(parameter)  # no amax of a weight outlives an optimizer's step
        self.provider.between(self.model)
        if self.graphs == "layer":
            torch.compiler.cudagraph_mark_step_begin()
        self.model(self.x).backward(self.grad)

    def time(self, steps: int) -> None:
        """Adds the slowest rank's ms of a step, of some in a row."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            self.run()
        if self.x.device.type == "cuda":
            torch.cuda.synchronize(self.x.device)
        took = torch.tensor([1000 * (time.perf_counter() - start) / steps], device=self.x.device)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        self.times.append(took.item())


def _span(event: Any) -> tuple[float, float]:
    """us."""
    return event.time_range.start, event.time_range.end


def _union_ms(spans: list[tuple[float, float]]) -> float:
    """How long at least one of them lasts."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total / 1e3


def _memory(device: torch.device, graphs: str, peak: bool = False) -> int:
    """Bytes that are allocated; with CUDA graphs, whose replays allocate nothing, those that the allocator has for them."""
    if device.type != "cuda":
        return 0
    if graphs:
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(device)
    return torch.cuda.max_memory_allocated(device) if peak else torch.cuda.memory_allocated(device)


def measure(args: argparse.Namespace, model: str, layout: str, tokens: int, device: torch.device) -> list[Row]:
    """A row for each provider."""
    title, sizes = MODELS[model]
    torch.manual_seed(0)
    base = Layers(args.layers, *sizes).to(device, torch.bfloat16)
    x = torch.randn(
        max(1, tokens // 4096), min(tokens, 4096) // tensor_ranks(layout), sizes[0], device=device, dtype=torch.bfloat16
    )
    x, grad, rows, candidates = x.requires_grad_(), torch.randn_like(x), [], []
    how = GRAPHS[args.graphs] + ", overlapped" * args.overlap
    for name in args.providers:
        rows.append(Row(title, LAYOUTS[layout] + how, dist.get_world_size(), tokens, name))
        try:
            candidates.append(Candidate(rows[-1], base, layout, x, grad, args.graphs, args.overlap))
        except Exception as error:  # one provider's failure is a row, not the end of the run
            rows[-1].error = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        _say(f"  {name}: {rows[-1].error or 'ready'}")
    for candidate in candidates * args.rounds:
        candidate.time(args.steps)
    for candidate in candidates:
        row, first = candidate.row, candidates[0]
        row.step_ms = statistics.median(candidate.times)
        row.speedup = statistics.median(first.times) / row.step_ms
        row.peak_ratio = row.peak_mib / first.row.peak_mib if row.peak_mib and first.row.peak_mib else None
        peak = f"{row.peak_mib:.0f} MiB ({row.peak_ratio:.2f})" if row.peak_ratio else ""
        _say(f"  {row.provider:11} {row.step_ms:8.2f} ms  {row.speedup:.2f}x  {peak}  wire {row.wire_mib:.1f} MiB")
    return rows


def _say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def parse_args() -> argparse.Namespace:
    parser = report.parser(__doc__, "the tiny model, two layers, two rounds of a step")
    parser.add_argument("--models", default="llama8b", help=f"of: {','.join(MODELS)}")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="of: %(default)s")
    parser.add_argument("--tokens", default="8192,2048", help="of a data-parallel rank")
    parser.add_argument("--providers", default=",".join(PROVIDERS), help="of: %(default)s; the first is compared to")
    parser.add_argument("--graphs", choices=GRAPHS, default="", help="what is replayed as a CUDA graph")
    parser.add_argument("--overlap", action="store_true", help="products run while collectives do")
    parser.add_argument("--name", default="", help="of the results file, after its model and GPUs")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=8, help="in a row, of a round")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    report.split_choices(parser, args, models=MODELS, layouts=LAYOUTS, providers=PROVIDERS)
    if "RANK" not in os.environ:
        parser.error("it is started by torchrun: torchrun --nproc-per-node 2 benchmarks/train_parallel.py")
    if args.graphs and args.device != "cuda":
        parser.error("--graphs needs GPUs")
    if args.quick:
        args.models, args.tokens, args.layers, args.rounds, args.steps = ["tiny"], "256", 2, 2, 1
    return args


def main() -> None:
    args = parse_args()
    torch._dynamo.config.recompile_limit = 64  # all providers compile the same forward method
    device = torch.device(args.device, int(os.environ["LOCAL_RANK"])) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    facts = environment.collect(str(device))
    for model in args.models:
        rows: list[Row] = []
        for layout in args.layouts:
            if layout == "fsdp_tp" and dist.get_world_size() < 2 * TENSOR_RANKS:
                continue
            for tokens in map(int, args.tokens.split(",")):
                _say(f"{MODELS[model][0]}, {LAYOUTS[layout]}, {dist.get_world_size()} ranks, {tokens} tokens")
                rows += measure(args, model, layout, tokens, device)
                torch._dynamo.reset()
                gc.collect()
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                if dist.get_rank() == 0:  # each time: what was measured stays if the next one does not end
                    name = f"train_parallel_{model}_{dist.get_world_size()}gpus{args.name}"
                    report.write(args.out, "train_parallel", facts, rows, name, rounds=args.rounds, steps=args.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
