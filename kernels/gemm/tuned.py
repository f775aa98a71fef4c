"""Timing a product in every kernel and tile that can run it, and what was fastest as JSON holds it.

    candidates(product, target)                 all that can run it: Choices
    timed_us(product, candidates, device)       the time of each
    passes_us(choice, product, epilogues, ...)  and of what it leaves to other kernels
    facts(choices), choices_of(facts, target)   as JSON holds them, and back

The fastest are for `use_tuned` of choose.py. lowering/tune.py times the products of a graph.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Mapping

import torch

from te_dynamo.kernels.gemm.choose import (
    CALL_US,
    Choice,
    Product,
    Stacking,
    can_decode,
    can_fuse,
    specialized_tiles,
    usual_tiles,
)
from te_dynamo.kernels.gemm.cublaslt import can_use_cublaslt
from te_dynamo.kernels.gemm.multiply import run
from te_dynamo.kernels.gemm.request import Operand, Request
from te_dynamo.kernels.gemm.tiles import SPECIALIZED_SMALL, Tile
from te_dynamo.kernels.layouts.block import scale_shape
from te_dynamo.kernels.runtime._triton import triton
from te_dynamo.kernels.runtime.launch import compiling_only
from te_dynamo.kernels.runtime.target import Target


def candidates(product: Product, target: Target) -> list[Choice]:
    """All that can run a plain product (`Product.plain`)."""
    found = [Choice("usual", tile) for tile in usual_tiles(product, target)]
    if (decode := can_decode(product, target)) is not None:
        found.append(Choice("decode", decode))
    found += [Choice("specialized", tile) for tile in specialized_tiles(product, target)]
    whole = not product.stacking.along and not product.m_groups and not product.k_groups and product.scaling != "row"
    blocks = product.in_blocks
    known = product.n_known and (product.m_known or not blocks)
    if whole and known and can_use_cublaslt(product.m, product.n, product.k, blocks):
        found.append(Choice("cublaslt", found[0].tile))
    return found


CLEARLY = 1.05
"""How many times as fast as the cost model's choice another has to be. In a step the GPU is at its power limit, and the fastest alone need not
be the fastest: SwiGLU's step took 8.95 ms by those, and 8.72 by the cost model's choices (an H100)."""


def best_of(times: Mapping[Choice, float], others_us: Callable[[Choice], float], usual: Choice) -> Choice | None:
    """The fastest by microseconds of each and of what it leaves to others, None of none; but `usual`, the cost model's, where nothing is
    CLEARLY faster. What Inductor's code calls and does not launch has to take CALL_US or more itself."""
    launched = {c: us + others_us(c) for c, us in times.items() if us >= CALL_US or c.kernel in ("usual", "decode")}
    if not launched:
        return None
    fastest = min(launched, key=launched.__getitem__)
    return usual if usual in launched and launched[usual] < CLEARLY * launched[fastest] else fastest


_PASSES = {"add": 3, "amax": 1, "gated": 1}
"""How often a pass that does the epilogue moves the bytes of C."""


def passes_us(choice: Choice, product: Product, epilogues: Iterable[str], target: Target) -> float:
    """Microseconds, by bytes, of the passes over C in 16 bits that do those epilogues which the choice's kernel does not."""
    left = [e for e in epilogues if not can_fuse(choice, dataclasses.replace(product, epilogue=e))]
    return sum(_PASSES[e] for e in left) * product.m * product.n * 2 / (1e6 * target.bandwidth)


def timed_us(product: Product, choices: list[Choice], device: torch.device) -> dict[Choice, float]:
    """Microseconds of each choice on the device, by operands of random values; those that fail there are left out.

    Raises torch.OutOfMemoryError where there is no memory for the operands.
    """
    request = _request(product, device)
    runs = [(choice, functools.partial(run, choice, request)) for choice in choices]
    with compiling_only(), contextlib.suppress(Exception):  # at once, in compile_ahead.py's threads
        for choice, product_of in runs:
            if choice.kernel != "cublaslt":
                product_of()
    times = {}
    for choice, product_of in runs:
        # Triton, its compiler or cuBLASLt may refuse it: then it cannot run the product here.
        with contextlib.suppress(Exception):
            times[choice] = 1000 * triton.testing.do_bench(product_of, warmup=10, rep=40, return_mode="median")
    return times


def _request(p: Product, device: torch.device) -> Request:
    """A plain product of random values, in bf16, by groups of one size."""
    generator = torch.Generator(device).manual_seed(0)  # the user's random numbers stay what they are

    def operand(rows: int, scaling: str, scales: int, experts: int = 0) -> Operand:
        whole = scaling in ("tensor", "row")
        shape = (experts, rows, p.k) if experts and whole else (max(experts, 1) * rows, p.k)
        values = torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)
        of_rows = (p.k_groups, rows) if p.k_groups else shape[:-1]
        size = {"tensor": (scales,), "row": of_rows}.get(scaling) or scale_shape(shape[0], p.k, scaling == "128x128")
        return Operand(values.to(torch.float8_e4m3fn), torch.ones(size, device=device), scaling)  # type: ignore[arg-type]

    segments, groups = len(p.stacking.segments) or 1, p.m_groups or p.k_groups
    named = {"1x128": ("1x128", "128x128"), "1x128 by 1x128": ("1x128",) * 2, "128x128": ("128x128", "1x128")}
    a, b = named.get(p.scaling, (p.scaling, p.scaling))
    ends = [(i + 1) * (p.m if p.m_groups else p.k) // groups for i in range(groups)]
    return Request(
        operand(p.m, a, segments if p.stacking.along in ("M", "K") else 1),
        operand(
            p.n,
            b,
            p.m_groups or (segments if p.stacking.along in ("N", "K") else 1),
            p.m_groups,
        ),
        torch.bfloat16,
        p.fast_accum,
        stacking=p.stacking,
        groups="rows" if p.m_groups else "columns" if p.k_groups else "",
        offs=torch.tensor(ends, dtype=torch.int32, device=device) if groups else None,
    )


def facts(choices: Mapping[tuple[Product, Target], Choice]) -> dict[str, str]:
    """Choices as JSON holds them: {the product and the number of multiprocessors: the name of what runs it}."""
    return {
        json.dumps([dataclasses.asdict(product), target.multiprocessors]): _name(choice)
        for (product, target), choice in choices.items()
    }


def choices_of(held: Mapping[str, str], target: Target) -> dict[tuple[Product, Target], Choice]:
    """What `facts` wrote of choices for this device; what cannot run there is left out."""
    found = {}
    for key, name in held.items():
        fields, multiprocessors = json.loads(key)
        stacking = Stacking(fields["stacking"]["along"], tuple(fields["stacking"]["segments"]))
        product = Product(**{**fields, "stacking": stacking})
        part = dataclasses.replace(target, multiprocessors=multiprocessors)
        named = {_name(choice): choice for choice in candidates(product, part)}
        if name in named:
            found[product, part] = named[name]
    return found


def _name(choice: Choice) -> str:
    """ "usual slow 128x256x128 w8 s3", "specialized": unique among the candidates of a product."""
    if choice.specialized and choice.tile in SPECIALIZED_SMALL:
        return "specialized small"
    return f"usual {choice.tile.name}" if choice.kernel == "usual" and isinstance(choice.tile, Tile) else choice.kernel
