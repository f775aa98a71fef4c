"""Whether the CPU is what a graph waits for: then FP8 saves time that nobody waits for, and costs launches.

    time of a graph = max(its kernels on the GPU, what the CPU takes to call the graph and to launch them)

Kernels of 0.4 ms that the CPU takes 0.9 ms to launch (a GELU MLP 1024/4096 in training) are no faster as kernels of 0.3 ms. Where FP8
makes the greater of the two no smaller, the graph's linears stay what they are, unless a rule names them or their weights are kept.

CUDA graphs (mode="reduce-overhead") replay all launches of a graph at once: forward alone is not asked then. A training step still has
two calls between which autograd and the saved tensors of each linear keep the CPU as busy, so that it is asked all the same.

Where FSDP manages a weight of a training step, the CPU also gathers the weights and shares out the gradients. Where parameters are
DTensors, it has their collectives, and everything is counted of this rank's shards.

Attention and products of activations are counted by their FLOPs, everything else by its bytes, as if nothing were fused, so that a graph is
rather taken to be bound by the GPU. A graph with something else that may take long (a convolution, a loop) is not asked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from te_dynamo.distributed.fp8_all_gather_shard import local_of
from te_dynamo.inspect.report import Report
from te_dynamo.options import Options
from te_dynamo.passes.torch_ir.fsdp import managed_by_fsdp
from te_dynamo.passes.torch_ir.match.cost import BF16_FLOPS_PER_US, BY_RULE, BYTES_PER_US, is_kept, waiting_for_cpu
from te_dynamo.passes.torch_ir.match.patterns.linear import RecipeFor, becomes_fp8, estimated_times, hint, named_by_rule
from te_dynamo.passes.torch_ir.match.patterns.products import Product, is_parameter, product_of
from te_dynamo.passes.torch_ir.match.patterns.shards import is_shared
from te_dynamo.passes.torch_ir.match.values import tensor_of
from te_dynamo.passes.torch_ir.match.where import linear_path
from te_dynamo.passes.torch_ir.regions import Region, regions
from te_dynamo.quantized.tensor import QuantizedTensor
from te_dynamo.rates import Rates, rates_of
from te_dynamo.recipe import Float8CurrentScaling

__all__ = ["cpu_known"]

# us of the CPU: a call of a compiled graph, forward alone and with backward; a launch by Inductor's code or of a library's product; a product
# of ours. Of benchmarks/inference.py at one token and of the small MLP of train_blocks.py on the fastest CPU that it was measured on.
_CALL, _STEP, _LAUNCH, _OUR_PRODUCT = 100, 800, 5, 20
_LAUNCHES_OF_QUANTIZE = 2
# FSDP2's of a training step of one layer, of benchmarks/train_parallel.py: 22 ms for four layers of Llama-8B on the faster of two machines,
# less the four steps and their launches.
_FSDP = 4500
# DTensor's and its collectives' in a training step, of a parameter: there too a layer of nine takes 4.15 ms with tensor parallelism.
_DTENSOR = 350

_PRODUCTS = re.compile("matmul|^b?mm$|attention")
_UNKNOWN = re.compile("conv|einsum|tensordot|bilinear|lstm|gru|rnn|grouped|multi_head|triton_kernel")


@contextlib.contextmanager
def cpu_known(
    gm: fx.GraphModule, options: Options, recipe_for: RecipeFor, example_inputs: Sequence[Any], report: Report
) -> Iterator[None]:
    """Inside, a linear of `gm` whose weight is quantized in each call is left, with the reason, where the CPU is the bound. One whose weight
    has travelled in FP8 is not: the report has a note then."""
    reason = cpu_bound_reason(gm, options, recipe_for, example_inputs)
    placeholders = gm.graph.find_nodes(op="placeholder")
    managed = [placeholders[i] for i in managed_by_fsdp(gm, example_inputs)] if reason else []
    travel = sum(isinstance(local_of(tensor_of(weight)), QuantizedTensor) for weight in managed)
    if travel:
        report.notes.append(
            f"{reason}. {travel} of its weights travel in FP8, whose linears are in FP8 all the same: without fp8_all_gather they would stay in "
            "16 bits"
        )
    token = waiting_for_cpu.set(f"{reason}; {BY_RULE}" if reason else "")
    try:
        yield
    finally:
        waiting_for_cpu.reset(token)


def cpu_bound_reason(gm: fx.GraphModule, options: Options, recipe_for: RecipeFor, example_inputs: Sequence[Any]) -> str:
    """Why FP8 does not shorten a graph, "" where it does, and where nobody knows."""
    devices = (value.device for node in gm.graph.nodes if (value := tensor_of(node)) is not None)
    device = next((device for device in devices if device.type == "cuda"), None)
    if device is None:
        return ""
    rates = rates_of(device)
    found = _time_of(gm, recipe_for, rates)
    if found is None or not found.chosen or (not found.learns and dict(options.inductor).get("triton.cudagraphs")):
        return ""
    by_fsdp = found.learns and bool(managed_by_fsdp(gm, example_inputs))
    shared = sum(
        found.learns and node.op == "placeholder" and is_shared(node) and is_parameter(node) for node in gm.graph.nodes
    )
    found.add_cpu((_FSDP * by_fsdp + _DTENSOR * shared) * rates.cpu)
    also = ", gather its weights" * by_fsdp + ", share its DTensors" * bool(shared)
    before, after = max(found.gpu, found.cpu), max(found.gpu_in_fp8, found.cpu_in_fp8)
    if after < before:
        return ""
    out = "" if found.learns else '; mode="reduce-overhead" takes it out of the way'
    return (
        f"the CPU is the bound: to call the graph{also} and launch its kernels it takes {found.cpu:.0f} us, {found.cpu_in_fp8:.0f} us with FP8, and "
        f"without it the kernels take {found.gpu:.0f} us ({rates}){out}"
    )


@dataclasses.dataclass
class _Time:
    """us of a graph on the GPU and of the CPU, as it is and with FP8. chosen: how many linears FP8 is chosen for by no rule."""

    gpu: float
    gpu_in_fp8: float
    cpu: float
    cpu_in_fp8: float
    learns: bool
    chosen: int = 0

    def add_cpu(self, us: float) -> None:
        self.cpu += us
        self.cpu_in_fp8 += us


def _time_of(gm: fx.GraphModule, recipe_for: RecipeFor, rates: Rates) -> _Time | None:
    """None where nobody knows."""
    parts = regions(gm)
    if len(parts) < sum(isinstance(module, fx.GraphModule) for module in gm.modules()):
        return None
    learns = any(v.requires_grad for n in gm.graph.nodes if n.op != "placeholder" and (v := tensor_of(n)) is not None)
    call = (_STEP if learns else _CALL) * rates.cpu
    found = _Time(0, 0, call, call, learns)
    for part in parts:
        runs = _runs(part)
        for node in part.graph.nodes:
            product = product_of(node)
            if product is not None:
                if not _add_linear(found, node, product, recipe_for, runs, rates):
                    return None
            elif node.op in ("call_function", "call_method"):
                us = _other_us(node, rates)
                if us is None:
                    return None
                found.gpu += us * runs * (3 if learns else 1)
                found.gpu_in_fp8 += us * runs * (3 if learns else 1)
    return found


def _runs(part: Region) -> int:
    return sum(_runs(caller) for caller, _ in part.calls) if part.calls else 1


def _add_linear(found: _Time, node: fx.Node, product: Product, recipe_for: RecipeFor, runs: int, rates: Rates) -> bool:
    """Whether its time is known."""
    path = linear_path(node, product.weight)
    recipe = recipe_for(*path)[0]
    times = estimated_times(node, product, recipe or Float8CurrentScaling())
    if not times:
        return False
    gemms = 3 if tensor_of(node).requires_grad else 1
    kept, named = is_kept(product.weight), named_by_rule(recipe_for, *path)
    in_fp8 = recipe is not None and becomes_fp8(node, product, recipe, named)
    launches = _LAUNCHES_OF_QUANTIZE * ((not kept) + (2 if gemms > 1 else 1))
    ours = _OUR_PRODUCT * gemms + _LAUNCH * launches if in_fp8 else _LAUNCH * gemms
    found.gpu += times[0] * runs
    found.gpu_in_fp8 += times[in_fp8] * runs
    found.cpu += _LAUNCH * gemms * runs * rates.cpu
    found.cpu_in_fp8 += ours * runs * rates.cpu
    found.chosen += in_fp8 and not named and not kept
    return True


def _other_us(node: fx.Node, rates: Rates) -> float | None:
    """us on the GPU of what is no linear, in forward; None where nobody knows."""
    if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace not in ("aten", "prims"):
        return None
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    out = local_of(tensor_of(node))
    given = [local_of(v) for n in node.all_input_nodes if (v := tensor_of(n)) is not None]
    if _UNKNOWN.search(name):
        return None
    if out is None or out._is_view():
        return 0.0
    flops = 0.0
    if _PRODUCTS.search(name) and len(given) > 1:
        tokens, depth = hint(given[1].shape[-2]), hint(given[0].shape[-1])
        flops = 4 * _count(given[0]) * tokens if "attention" in name else 2 * _count(out) * depth
    nbytes = sum(_count(tensor) * tensor.itemsize for tensor in (out, *given))
    return flops / BF16_FLOPS_PER_US / rates.bf16 + nbytes / BYTES_PER_US / rates.quantizing


def _count(tensor: torch.Tensor) -> int:
    return math.prod(map(hint, tensor.shape))
