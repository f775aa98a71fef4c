"""Speed of a mixture's experts on one GPU: the grouped FP8 GEMMs, and a training step of all experts.

    python benchmarks/grouped.py               each product, beside bf16's grouped_mm and loops over the experts; the steps
    python benchmarks/grouped.py --sweep       prints every candidate tile: what `kernels/gemm/tiles.py` is written from

`rows` multiplies each expert's tokens by its weight, `columns` is the gradient of the weights. Times are medians over a cold L2, short
ones in CUDA graphs, on normal random data, all providers of a product in turn. Groups have the sizes of tokens that choose their
experts at random, with unequal favour, so that none is a round number; `--even` gives all the same. `*` marks the tile that is chosen,
and `specialized*` the kernel that runs in its place. A `step` is forward and backward, with all quantization. Without a rule the
backend leaves experts in bf16 whose quantization takes longer than their GEMMs save.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import environment
import report
import torch
import torch.nn.functional as F
from gemm import Provider, measure, parsed, time_once
from models import Experts

from te_dynamo.kernels.gemm.choose import Choice, Product, choose
from te_dynamo.kernels.gemm.multiply import multiply, run
from te_dynamo.kernels.gemm.request import Operand, Request
from te_dynamo.kernels.gemm.specialized.grouped import columns_specialized_out
from te_dynamo.kernels.gemm.tiles import COLUMNS_TILES, GROUPED_TILES, Tile
from te_dynamo.kernels.runtime.target import target_of

# label, tokens (times experts a token), experts, N, K of one projection
SHAPES: list[tuple[str, int, int, int, int]] = [
    ("Mixtral 8x7B up", 16384, 8, 14336, 4096),
    ("Mixtral 8x7B down", 16384, 8, 4096, 14336),
    ("Qwen3 30B-A3B gate and up", 65536, 128, 1536, 2048),
    ("Qwen3 30B-A3B down", 65536, 128, 2048, 768),
    ("DeepSeek V3 up, 8 of 256 experts", 32768, 8, 2048, 7168),
    ("DeepSeek V3 down, 8 of 256 experts", 32768, 8, 7168, 2048),
    ("few tokens", 256, 64, 2048, 2048),
]

# label, width, inner width, experts, tokens
STEPS: list[tuple[str, int, int, int, int]] = [
    ("Mixtral 8x7B", 4096, 14336, 8, 16384),
    ("Qwen3 30B-A3B", 2048, 768, 128, 65536),
]


@dataclasses.dataclass
class Row:
    """One provider of a product, "rows" or "columns", or of a "step"; None where it failed."""

    problem: str
    product: str
    provider: str
    tflops: float | None
    us: float | None


def group_ends(tokens: int, groups: int, even: bool) -> torch.Tensor:
    """int32 [groups]: where each group's tokens end."""
    if even:
        return torch.arange(1, groups + 1, device="cuda").mul(tokens // groups).int()
    favour = torch.rand(groups, generator=torch.Generator().manual_seed(0)) + 0.25
    chosen = torch.multinomial(favour, tokens, replacement=True, generator=torch.Generator().manual_seed(1))
    return torch.bincount(chosen, minlength=groups).cumsum(0).to("cuda", torch.int32)


class Problem:
    """The operands of one projection's three products, and their providers."""

    def __init__(self, tokens: int, groups: int, n: int, k: int, even: bool) -> None:
        self.sizes = (tokens, groups, n, k)
        self.ends = group_ends(tokens, groups, even)
        self.parts = list(itertools.pairwise([0, *self.ends.tolist()]))
        self.x, self.dy = (torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16) for width in (k, n))
        self.w = torch.randn(groups, n, k, device="cuda", dtype=torch.bfloat16)
        fp8 = torch.float8_e4m3fn
        self.x8, self.w8 = self.x.to(fp8), self.w.to(fp8)
        self.x8_t, self.dy8_t = self.x.t().contiguous().to(fp8), self.dy.t().contiguous().to(torch.float8_e5m2)
        self.one = torch.ones(1, device="cuda")
        self.ones = torch.ones(groups, device="cuda")

    def chosen(self, product: str, fast: bool) -> Tile:
        """The tile of the usual kernel."""
        choice = choose(self.question(product, fast), target_of(self.x.device), recorded=True)
        assert isinstance(choice.tile, Tile)
        return choice.tile

    def question(self, product: str, fast: bool) -> Product:
        tokens, groups, n, k = self.sizes
        if product == "rows":
            return Product(tokens, n, k, fast, 2, m_groups=groups, m_known=False)
        return Product(n, k, tokens, fast, 2, k_groups=groups)

    def tile(self, product: str, tile: Tile) -> Provider:
        if product == "rows":
            sides = Operand(self.x8, self.one), Operand(self.w8, self.ones)
        else:
            sides = Operand(self.dy8_t, self.one), Operand(self.x8_t, self.one)
        groups: Any = "rows" if product == "rows" else "columns"
        request = Request(*sides, torch.bfloat16, tile.fast, groups=groups, offs=self.ends)
        return lambda: run(Choice("usual", tile), request)

    def specialized(self, fast: bool) -> Provider:
        """The columns by the kernel of kernels/gemm/specialized/grouped.py."""
        _, groups, n, k = self.sizes
        out = torch.empty(groups, n, k, device="cuda", dtype=torch.bfloat16)
        operands = (self.dy8_t, self.one, self.x8_t, self.one, self.ends)
        return lambda: columns_specialized_out(*operands, fast, out=out)

    def peers(self, product: str) -> dict[str, Provider]:
        """What else computes it: bf16 in one call and in a loop, FP8 in a loop and torch's own with row scales."""
        if product == "columns":
            dy_t = self.dy.t()
            return {
                "bf16 grouped_mm": lambda: F.grouped_mm(dy_t, self.x, offs=self.ends),
                "bf16 loop": lambda: [torch.mm(dy_t[:, a:b], self.x[a:b]) for a, b in self.parts][-1],
            }
        w, w8 = self.w.transpose(1, 2), self.w8.transpose(1, 2)
        row_scales = torch.ones(self.sizes[0], device="cuda"), torch.ones(self.sizes[1:3], device="cuda")
        return {
            "bf16 grouped_mm": lambda: F.grouped_mm(self.x, w, offs=self.ends),
            "bf16 loop": lambda: [torch.mm(self.x[a:b], w[g]) for g, (a, b) in enumerate(self.parts)][-1],
            "fp8 loop": lambda: [
                multiply(Request(Operand(self.x8[a:b], self.one), Operand(self.w8[g], self.one), torch.bfloat16, True))
                for g, (a, b) in enumerate(self.parts)
                if b > a
            ][-1],
            "fp8 _scaled_grouped_mm": lambda: torch._scaled_grouped_mm(
                self.x8, w8, *row_scales, offs=self.ends, out_dtype=torch.bfloat16, use_fast_accum=True
            ),
        }


def products(shapes: list[tuple[str, int, int, int, int]], arguments: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    for label, tokens, groups, n, k in shapes:
        problem = Problem(tokens, groups, n, k, arguments.even)
        largest = max(b - a for a, b in problem.parts)
        title = f"{label}: {tokens} tokens, {groups} experts (largest {largest}) of {n} x {k}"
        for product in ("rows", "columns"):
            providers, chosen = problem.peers(product), {fast: problem.chosen(product, fast) for fast in (True, False)}
            of_product = GROUPED_TILES if product == "rows" else COLUMNS_TILES
            tiles = of_product if arguments.sweep else chosen.values()
            target = target_of(problem.x.device)
            fitting = [fitted for tile in tiles if (fitted := tile.fitted(2, target))]
            providers |= {
                f"{tile.name}{'*' * (tile in chosen.values())}": problem.tile(product, tile) for tile in fitting
            }
            if product == "columns":
                for fast in (True, False):
                    taken = choose(problem.question(product, fast), target_of(problem.x.device)).specialized
                    name = f"{'fast' if fast else 'slow'} specialized{'*' * taken}"
                    providers[name] = problem.specialized(fast)
            for name, ms in measure(providers, arguments.rounds, arguments.rep).items():
                failed = math.isnan(ms)
                tflops, us = (None, None) if failed else (2 * tokens * n * k / ms / 1e9, ms * 1e3)
                rows.append(Row(title, product, name, tflops, us))
                print(rows[-1], flush=True)
    return rows


def step(run: Callable[..., torch.Tensor], experts: Experts, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Forward and backward of `experts` by `run`."""
    x.grad = None
    experts.zero_grad(set_to_none=True)
    y = run(x, ends)
    y.backward(x.detach())
    return y


def steps(arguments: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    for label, width, inner, groups, tokens in STEPS:
        with torch.device("cuda"):
            experts = Experts(width, inner, groups).bfloat16()
        x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        ends = group_ends(tokens, groups, arguments.even)
        title = f"{label}: {tokens} tokens, {groups} experts of {width} / {inner}"
        by_rule = {"rules": [("", "float8_current_scaling")]}
        for name, backend, options in (
            ("bf16 eager", None, None),
            ("bf16 inductor", "inductor", None),
            ("te", "te", None),
            ("te, all in FP8 by a rule", "te", by_rule),
        ):
            torch._dynamo.reset()
            run = experts if backend is None else torch.compile(experts, backend=backend, options=options)
            once = functools.partial(step, run, experts, x, ends)
            rows.append(Row(title, "step", name, None, time_once(once, 10 * arguments.rep) * 1e3))
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    arguments = parsed(__doc__, even={"action": "store_true", "help": "groups of one size"})
    facts = environment.collect("cuda")
    rows = products([shape for shape in SHAPES if arguments.only in shape[0]], arguments)
    if not arguments.sweep:
        report.write(arguments.out, "grouped", facts, rows + steps(arguments), even=arguments.even)


if __name__ == "__main__":
    main()
