"""Peak memory of a training step of Llama's blocks beside bf16's, counted to the byte from Inductor's code: no GPU.

    python benchmarks/live_memory.py                                          # some minutes
    python benchmarks/live_memory.py --models 8B --blocks 32 --tokens 2048    # plain and checkpointed graphs of 32 blocks

The peak is the larger one of the forward and of the backward code that is written for an H200, beside what the caller keeps:
parameters, the input and the gradient of the output. Gradients of weights are in it. All linears are in FP8, also where the backend
would leave them in bf16 because that is faster.

    plain           the blocks are one graph
    checkpointed    the same, each block under torch.utils.checkpoint
    FSDP            a graph for each block, as FSDP2 has it: the peak of one, and what the others have saved

bf16 is torch's own Inductor. The code runs without its kernels (generated_code.py): their own scratch and cuBLAS's workspaces are not
in it.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import warnings
from typing import Any
from unittest import mock

import report
import torch
from compile_time import kernels_everywhere
from environment import collect
from generated_code import generated_code, peak_bytes
from models import llama_block
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

MODELS = {"8B": (4096, 14336, 32, 8), "70B": (8192, 28672, 64, 8)}
"""Width, inner width, heads, heads of keys and values."""

PROVIDERS: dict[str, str | None] = {"bf16": None, "te": "float8_current_scaling", "te block": "float8_block_scaling"}
GRAPHS = ("plain", "checkpointed", "FSDP")


@dataclasses.dataclass(frozen=True)
class Row:
    """peak_ratio: the peak by bf16's."""

    model: str
    graphs: str
    blocks: int
    tokens: int
    provider: str
    peak_mib: float
    peak_ratio: float


class Checkpointed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


# Attention as one kernel, as on a GPU: torch built for the CPU would take it apart.


@torch.library.custom_op("live_memory::scaled_dot_product", mutates_args=())
def scaled_dot_product(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """[output, log of the sums of exponentials]"""
    raise NotImplementedError


@scaled_dot_product.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    return [torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)]


@torch.library.custom_op("live_memory::scaled_dot_product_backward", mutates_args=())
def scaled_dot_product_backward(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, sums: Tensor) -> list[Tensor]:
    """[dq, dk, dv]"""
    raise NotImplementedError


@scaled_dot_product_backward.register_fake
def _(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, sums: Tensor) -> list[Tensor]:
    return [torch.empty_like(x) for x in (q, k, v)]


scaled_dot_product.register_autograd(
    lambda ctx, grads: tuple(scaled_dot_product_backward(grads[0], *ctx.saved_tensors)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, *output),
)


def attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, enable_gqa: bool = False) -> Tensor:
    return scaled_dot_product(q, k, v)[0]


def peak_of(model: str, graphs: str, blocks: int, tokens: int, provider: str) -> int:
    """Bytes. FSDP's other blocks hold what they have saved, while the forward or the backward of one runs."""
    peak, saved = counted(model, graphs, 1 if graphs == "FSDP" else blocks, tokens, provider)
    return peak + (blocks - 1) * saved if graphs == "FSDP" else peak


@functools.cache
def counted(model: str, graphs: str, blocks: int, tokens: int, provider: str) -> tuple[int, int]:
    """(bytes at the peak of one graph of so many blocks, bytes from its forward to its backward)"""
    from te_dynamo.passes.dialect.live_memory import saved_bytes
    from te_dynamo.testing import capture_on_fake_cuda

    warnings.simplefilter("ignore")
    torch._dynamo.reset()

    def make() -> nn.Module:
        with torch.device("meta"):
            made = [llama_block(*MODELS[model]) for _ in range(blocks)]
            return nn.Sequential(*map(Checkpointed, made) if graphs == "checkpointed" else made).bfloat16()

    def inputs(device: str) -> tuple[Any, ...]:
        return (torch.empty(1, tokens, MODELS[model][0], dtype=torch.bfloat16, device=device, requires_grad=True),)

    options: dict[str, Any] = {"recipe": None, "rules": [("", PROVIDERS[provider])]}
    if provider == "bf16":
        options["allow_buffer_reuse"] = True  # as in torch's own Inductor
    if graphs == "FSDP":
        options["save_weights"] = "original"  # what the backend takes under FSDP
    with (
        kernels_everywhere(),
        generated_code() as written,
        mock.patch("torch.nn.functional.scaled_dot_product_attention", attention),
    ):
        captured = capture_on_fake_cuda(make, inputs, options=options)
    return max(peak_bytes(written)), saved_bytes(captured.graph("lower.backward"))


def rows_of(model: str, graphs: str, blocks: list[int], tokens: int) -> list[Row]:
    """A row for each number of blocks and each provider, bf16 first."""
    rows = []
    for number in blocks:
        peaks = {provider: peak_of(model, graphs, number, tokens, provider) for provider in PROVIDERS}
        for provider, peak in peaks.items():
            ratio = round(peak / peaks["bf16"], 3)
            rows.append(Row(model, graphs, number, tokens, provider, round(peak / 2**20, 1), ratio))
    return rows


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help="of: %(default)s")
    parser.add_argument("--graphs", default=",".join(GRAPHS), help="of: %(default)s")
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 4], help="of plain and checkpointed graphs")
    parser.add_argument("--fsdp-blocks", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192, 16384])
    args = parser.parse_args()
    report.split_choices(parser, args, models=MODELS, graphs=GRAPHS)
    cases = [
        (model, graphs, args.fsdp_blocks if graphs == "FSDP" else args.blocks, tokens)
        for model, graphs, tokens in itertools.product(args.models, args.graphs, args.tokens)
    ]
    rows: list[Row] = []
    with concurrent.futures.ProcessPoolExecutor(2) as pool:
        for made in pool.map(rows_of, *zip(*cases, strict=True)):
            rows += made
            print(report.table([dataclasses.asdict(row) for row in made], report.TABLES["live_memory"]), flush=True)
    report.write(args.out, "live_memory", {**collect("cpu"), "device": "H200, simulated"}, rows)


if __name__ == "__main__":
    main()
