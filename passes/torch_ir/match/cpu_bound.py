"""Whether a graph is CPU-bound: then FP8 saves time on the GPU that nobody waits for, and costs launches.

    time of a graph = max(its kernels on the GPU, what the CPU takes to call the graph and to launch them)

Kernels of 0.4 ms that the CPU takes 1.5 ms to launch (a GELU MLP 1024/4096 in training) are no faster as kernels of 0.3 ms. CPUs differ: the
time is computed for a fast and for a slow host (`HOSTS`), or for this one where `te-dynamo calibrate` measured it. Where FP8 shortens the
graph on neither, or on the fast one alone, the graph's linears stay what they are, unless a rule names them, their weights are kept, or the
caller replays whole steps as a CUDA graph (the option "replayed").

CUDA graphs (mode="reduce-overhead") replay all launches of a graph at once: forward alone is not asked then. A training step still has
two calls between which autograd and the saved tensors of each linear keep the CPU busy.

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
from te_dynamo.options import Options
from te_dynamo.passes.torch_ir.fsdp import managed_by_fsdp
from te_dynamo.passes.torch_ir.match.cost import BF16_FLOPS_PER_US, BY_RULE, BYTES_PER_US, is_kept, waiting_for_cpu
from te_dynamo.passes.torch_ir.match.patterns.linears.linear import (
    RecipeFor,
    becomes_fp8,
    chosen_recipe,
    estimated_times,
    named_by_rule,
    readers_of,
)
from te_dynamo.passes.torch_ir.match.patterns.linears.products import Product, is_parameter, product_of
from te_dynamo.passes.torch_ir.match.patterns.linears.shards import is_shared
from te_dynamo.passes.torch_ir.match.values import hint, name_of, tensor_of
from te_dynamo.passes.torch_ir.match.where import linear_path
from te_dynamo.passes.torch_ir.regions import Region, regions
from te_dynamo.quantized.tensor import QuantizedTensor
from te_dynamo.rates import Rates, rates_of
from te_dynamo.recipe import Float8CurrentScaling
from te_dynamo.report import Report


@dataclasses.dataclass(frozen=True)
class Host:
    """us of the CPU.

    call, step:     of a compiled graph: forward alone, and with backward.
    launch:         of a launch in forward alone, with its allocation; step_launch: with backward, with what autograd does for it.
    graph_linear:   of a linear in a training step that is replayed as two CUDA graphs.
    fsdp:           FSDP2's of a training step of one layer. wire: more of each weight that it gathers in FP8.
    dtensor:        DTensor's and its collectives' in a training step, of a parameter; graph_dtensor: where CUDA graphs replay the collectives.
    """

    call: float
    step: float
    launch: float
    step_launch: float
    graph_linear: float
    fsdp: float
    wire: float
    dtensor: float
    graph_dtensor: float

    def times(self, cpu: float) -> Host:
        """A host on which all of it takes that many times as long."""
        return Host(*(us * cpu for us in dataclasses.astuple(self)))


HOSTS = (Host(100, 800, 15, 32, 60, 3600, 0, 250, 40), Host(100, 800, 25, 55, 90, 5400, 260, 375, 60))
"""A fast and a slow one, both with an H200 and torch 2.11. step and step_launch: least squares of the times to enqueue a step, over the blocks of
benchmarks/cpu_time.py, in bf16 on the fast host (910 us and 32 us a launch) and in bf16 and FP8 on the slow one (700 us and 57 us); launches alone
take 8 to 15 and 17 to 27 us. fsdp, dtensor and wire: of benchmarks/train_parallel.py, less steps and launches: 22 ms for four layers of Llama-8B
under FSDP2 on the fast host, 4.15 ms for a tensor-parallel one (four 5.9 to 6.7 ms as CUDA graphs), and 44 ms for four with 28 weights in FP8
on the slow host, on which the first three are taken to be half as long again."""

_WORST = 0.98
"""FP8 may make a graph that much faster, that is 2% slower, on the slow host, if it gains on the fast one."""

# Launches of a training step, as counted in these blocks: more for the linears of one x in FP8, which are one product (9 of a Llama-1B block, 11
# of a Llama-3B one and of CLIP's, 18 of GPT-2 XL's), and for a bias, whose gradient is a sum of its own.
_MORE_IN_FP8, _OF_BIAS = 2.5, 4
# And of forward alone in FP8, of x and of the weight.
_OF_X, _OF_WEIGHT = 1, 1

_PRODUCTS = re.compile("matmul|^b?mm$|attention")
_REDUCING = re.compile("norm|softmax|mean|var|sum|amax")
_UNKNOWN = re.compile("conv|einsum|tensordot|bilinear|lstm|gru|rnn|grouped|multi_head|triton_kernel")


@contextlib.contextmanager
def cpu_known(
    gm: fx.GraphModule, options: Options, recipe_for: RecipeFor, example_inputs: Sequence[Any], report: Report
) -> Iterator[None]:
    """Inside, a linear of `gm` whose weight is quantized in each call is left, with the reason, where the graph is CPU-bound. One whose weight
    has travelled in FP8 is not: the report says so then."""
    reason, travelling = _cpu_bound_reason(gm, options, recipe_for, example_inputs)
    if travelling:
        report.slow_gather = (
            f"{reason}. {travelling} of its weights travel in FP8, and their linear layers run in FP8: without fp8_all_gather they would stay in "
            "16 bits"
        )
    token = waiting_for_cpu.set(f"{reason}; {BY_RULE}" if reason else "")
    try:
        yield
    finally:
        waiting_for_cpu.reset(token)


def _cpu_bound_reason(
    gm: fx.GraphModule, options: Options, recipe_for: RecipeFor, example_inputs: Sequence[Any]
) -> tuple[str, int]:
    """Why FP8 does not shorten a graph on every host, and how many weights FSDP gathers in FP8 for it; ("", 0) where it does, and where nobody
    knows."""
    devices = (value.device for node in gm.graph.nodes if (value := tensor_of(node)) is not None)
    device = next((device for device in devices if device.type == "cuda"), None)
    if device is None:
        return "", 0
    rates = rates_of(device)
    found = _time_of(gm, recipe_for, rates)
    graphs = bool(dict(options.inductor).get("triton.cudagraphs"))
    if found is None or not found.chosen or options.replayed or (not found.learns and graphs):
        return "", 0
    placeholders = gm.graph.find_nodes(op="placeholder")
    managed = managed_by_fsdp(gm, example_inputs)
    found.managed = found.learns and bool(managed)
    found.wire = sum(isinstance(local_of(tensor_of(placeholders[i])), QuantizedTensor) for i in managed)
    found.shared = sum(found.learns and is_shared(node) and is_parameter(node) for node in placeholders)
    hosts = [HOSTS[0].times(rates.cpu)] if rates.measured else HOSTS
    gains = [found.gain(host, graphs) for host in hosts]
    if gains[0] > 1 and gains[-1] >= _WORST:
        return "", 0
    also = ", gather its weights" * found.managed + ", share its DTensors" * bool(found.shared)
    plain, fp8 = (_us([found.cpu(host, in_fp8, graphs) for host in hosts]) for in_fp8 in (False, True))
    helps = "; FP8 pays on a fast CPU alone, te-dynamo calibrate measures this one" * (gains[0] > 1)
    ways = ['mode="reduce-overhead"'] * (not found.learns or (not graphs and found.gain(hosts[-1], graphs=True) > 1))
    ways += ["one CUDA graph of the step, with replayed=True,"] * (found.learns and found.gpu_in_fp8 < found.gpu)
    helps += f"; {' or '.join(ways)} takes it out of the way" * bool(ways)
    reason = (
        f"the graph is CPU-bound: to call the graph{also} and launch its kernels it takes {plain} us, {fp8} us with FP8, and "
        f"without it the kernels take {found.gpu:.0f} us ({rates}){helps}"
    )
    return reason, found.wire


def _us(of_hosts: Sequence[float]) -> str:
    """ "830", "830 to 1200"."""
    return " to ".join(dict.fromkeys(f"{us:.0f}" for us in of_hosts))


@dataclasses.dataclass
class _Time:
    """us of a graph's kernels on the GPU, and how many launches it has, as it is and with FP8.

    learns:  whether it is a training step's. linears: how many are in FP8. chosen: of these, by no rule.
    managed: whether by FSDP. wire: how many weights that gathers in FP8. shared: how many parameters are DTensors.
    """

    learns: bool
    gpu: float = 0
    gpu_in_fp8: float = 0
    launches: float = 0
    launches_in_fp8: float = 0
    linears: int = 0
    chosen: int = 0
    managed: bool = False
    wire: int = 0
    shared: int = 0

    def cpu(self, host: Host, in_fp8: bool, graphs: bool) -> float:
        """us of the CPU. graphs: whether CUDA graphs replay the launches."""
        launches = self.launches_in_fp8 if in_fp8 else self.launches
        if not self.learns:
            return host.call + host.launch * launches
        dtensors = (host.graph_dtensor if graphs else host.dtensor) * self.shared
        beside = host.fsdp * self.managed + host.wire * self.wire * in_fp8 + dtensors
        replayed = host.graph_linear * self.linears * (1 + in_fp8 / 4)
        return host.step + beside + (replayed if graphs else host.step_launch * launches)

    def gain(self, host: Host, graphs: bool) -> float:
        """How many times as fast the graph is with FP8."""
        return max(self.gpu, self.cpu(host, False, graphs)) / max(self.gpu_in_fp8, self.cpu(host, True, graphs))


def _time_of(gm: fx.GraphModule, recipe_for: RecipeFor, rates: Rates) -> _Time | None:
    """None where nobody knows."""
    parts = regions(gm)
    if len(parts) < sum(isinstance(module, fx.GraphModule) for module in gm.modules()):
        return None
    learns = any(v.requires_grad for n in gm.graph.nodes if n.op != "placeholder" and (v := tensor_of(n)) is not None)
    found, passes = _Time(learns), 3 if learns else 1
    for part in parts:
        runs, made = _runs(part), set[fx.Node]()
        for node in part.graph.nodes:
            product = product_of(node)
            if product is not None:
                made.add(node)
                if not _add_linear(found, node, product, recipe_for, runs, rates):
                    return None
            elif node.op in ("call_function", "call_method"):
                us = _other_us(node, rates)
                if us is None:
                    return None
                found.gpu += us * runs * passes
                found.gpu_in_fp8 += us * runs * passes
                launches = _launches(node, made) * runs * (2 if learns else 1)
                found.launches += launches
                found.launches_in_fp8 += launches
    return found


def _launches(node: fx.Node, made: set[fx.Node]) -> int:
    """Of what is no linear, in forward: Inductor has one for each reduction, and one for what reads a product. `made`: products and their views."""
    out = tensor_of(node)
    reads_product = not made.isdisjoint(node.all_input_nodes)
    if out is not None and out._is_view():
        made.update([node] if reads_product else [])
        return 0
    if _PRODUCTS.search(name_of(node)):
        made.add(node)
        return 1
    given = max((_count(local_of(v)) for n in node.all_input_nodes if (v := tensor_of(n)) is not None), default=0)
    reduces = out is not None and 0 < _count(local_of(out)) < given
    return int(reduces or reads_product or bool(_REDUCING.search(name_of(node))))


def _runs(part: Region) -> int:
    return sum(_runs(caller) for caller, _ in part.calls) if part.calls else 1


def _add_linear(found: _Time, node: fx.Node, product: Product, recipe_for: RecipeFor, runs: int, rates: Rates) -> bool:
    """Whether its time is known."""
    path = linear_path(node, product.weight)
    recipe = chosen_recipe(node, product.weight, recipe_for)[0]
    times = estimated_times(node, product, recipe or Float8CurrentScaling())
    if not times:
        return False
    learns = tensor_of(node).requires_grad
    kept, named = is_kept(product.weight), named_by_rule(recipe_for, *path)
    in_fp8 = recipe is not None and becomes_fp8(node, product, recipe, named)
    launches = 3 + _OF_BIAS * (product.bias is not None) if learns else 1
    more = (_MORE_IN_FP8 / readers_of(product.x) if learns else _OF_X + _OF_WEIGHT) - _OF_WEIGHT * kept
    found.gpu += times[0] * runs
    found.gpu_in_fp8 += times[in_fp8] * runs
    found.launches += launches * runs
    found.launches_in_fp8 += (launches + in_fp8 * more) * runs
    found.linears += in_fp8 * runs
    found.chosen += in_fp8 and not named and not kept
    return True


def _other_us(node: fx.Node, rates: Rates) -> float | None:
    """us on the GPU of what is no linear, in forward; None where nobody knows."""
    if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace not in ("aten", "prims"):
        return None
    name, out = name_of(node), local_of(tensor_of(node))
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
