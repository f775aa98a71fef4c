"""`mode="max-autotune"`: the products of a graph are timed on the device that is there, and the fastest of each is remembered.

What was timed is in a file of torch's cache folder (te_dynamo/remembered.py). Later compilations use it, whatever their mode.
"""

from __future__ import annotations

import copy
import functools
import json
import warnings
from collections.abc import Callable

import torch
from rich.console import Console
from rich.progress import track
from torch.fx import Graph

from te_dynamo.dialect.gemm import gemm, request_of
from te_dynamo.kernels.gemm.choose import TUNED, Choice, Product, asked_products, choose, use_tuned
from te_dynamo.kernels.gemm.multiply import choice_of
from te_dynamo.kernels.gemm.tuned import best_of, candidates, choices_of, facts, passes_us, timed_us
from te_dynamo.kernels.runtime.margin import current_sm_margin
from te_dynamo.kernels.runtime.target import Target, is_acting, target_of
from te_dynamo.lowering.lower import lower
from te_dynamo.remembered import remember, remembered

PRODUCTS = "products"
"""What te_dynamo/remembered.py calls such facts."""

_MEASURED = 512, 2 * 512 * 4096 * 4096, 2 * 1024 * 4096 * 8192
"""(the shortest side, the least FLOPs, the most) of products with scales of blocks that each took cuBLASLt less time than our kernels:
nine sizes in two forms on an H200 (benchmarks/results/gemm-nvidia-h200.json). Of larger ones either may take less."""

Timer = Callable[[Product, list[Choice], torch.device], dict[Choice, float]]


def use_remembered() -> None:
    """What was timed on this machine's device before, in this process too, is chosen from now on. Read once a process."""
    if torch.cuda.is_available() and not is_acting():
        _use_remembered(target_of(torch.device("cuda", torch.cuda.current_device())))


@functools.cache
def _use_remembered(target: Target) -> None:
    use_tuned(choices_of(remembered(PRODUCTS), target))


def tuned_key() -> str:
    """All choices that were timed, as one text: a graph that was compiled with others is not this one."""
    return json.dumps(facts(TUNED), sort_keys=True)


def tune(graph: Graph, timer: Timer = timed_us) -> None:
    """Times the products of a graph that `lower` is about to rewrite, unless they were timed before. Nothing without a device."""
    if not torch.cuda.is_available() or is_acting():
        return
    with asked_products() as asked:
        lower(copy.deepcopy(graph))
    new = [key for key in asked if key not in TUNED]
    if not new:
        return
    found, console = {}, Console(stderr=True)
    device = torch.device("cuda", torch.cuda.current_device())
    for product, target in track(
        new, "timing products", console=console, transient=True, disable=not console.is_terminal
    ):
        # torch tells cuBLASLt of its own carve-out, and of no margin.
        choices = [c for c in candidates(product, target) if c.kernel != "cublaslt" or not current_sm_margin()]
        try:
            times = timer(product, choices, device)
        except torch.OutOfMemoryError:
            times = {}
        left = functools.partial(passes_us, product=product, epilogues=asked[product, target], target=target)
        best = best_of(times, left, choose(product, target))
        if best is not None:
            found[product, target] = best
        else:
            _warn(
                f"{product} could not be timed, for want of memory or since no kernel ran; it runs what the cost model says"
            )
    use_tuned(found)
    try:
        remember(PRODUCTS, facts(found))
    except OSError as error:
        _warn(f"what was timed is not kept for later processes: {error}")


def slower_than_cublaslt(graph: Graph) -> list[str]:
    """Sizes of the products of a graph, for a Hopper GPU that need not be there, which take cuBLASLt less time by `_MEASURED`; none that was timed."""
    with asked_products() as asked:
        for node in graph.find_nodes(op="call_function", target=gemm):
            request = request_of(node)
            if request.a.scaling in ("1x128", "128x128") and request.a.codes.device.type == "cuda":
                choice_of(request)
    return [f"{p.m} x {p.n} x {p.k}" for p, target in asked if (p, target) not in TUNED and _is_slower(p, target)]


def _is_slower(p: Product, target: Target) -> bool:
    side, least, most = _MEASURED
    measured = min(p.m, p.n, p.k) >= side and least <= 2 * p.m * p.n * p.k <= most
    return target.has_wgmma and measured and any(choice.kernel == "cublaslt" for choice in candidates(p, target))


def _warn(text: str) -> None:
    warnings.warn(f"te_dynamo: {text}", stacklevel=3)
