"""GroupedMLP, a joint fusion, against the operations that it stands for: the same bits, and less that is saved."""

from __future__ import annotations

import itertools
import operator
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.models.snapshot_models import kernels_everywhere, launches
from helpers.oracles.quantizer_cases import same_bits

from te_dynamo import Sequential
from te_dynamo.dialect.define import is_te
from te_dynamo.lowering.lower import lower
from te_dynamo.operations.basic import GELU, GroupedLinear, Identity, ScaledSReLU, ScaledSwiGLU, SwiGLU
from te_dynamo.operations.fused import GroupedMLP, quantized
from te_dynamo.operations.fuser import OperationFuser, grouped
from te_dynamo.operations.op import BasicOperation
from te_dynamo.operations.program import Program
from te_dynamo.operations.run import Call
from te_dynamo.recipe import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling
from te_dynamo.testing import fake_cuda, graph_text

te = torch.ops.te
G, K, F = 3, 32, 48
FP8 = Float8CurrentScaling()
ACTIVATIONS = [ScaledSwiGLU(), ScaledSReLU(), SwiGLU(), GELU()]
RECIPES = pytest.mark.parametrize("recipe", [FP8, NVFP4BlockScaling(), None], ids=["fp8", "nvfp4", "none"])


def operations(activation: BasicOperation) -> list[BasicOperation]:
    width = 2 * F if isinstance(activation, (SwiGLU, ScaledSwiGLU)) else F
    return [GroupedLinear(G, K, width), activation, GroupedLinear(G, F, K)]


def experts(activation: BasicOperation, recipe: Any, fusions: bool) -> Sequential:
    torch.manual_seed(0)
    return Sequential(*operations(activation), recipe=recipe, fusions=fusions, dtype=torch.bfloat16)


def tensors(scaled: bool, sizes: tuple[int, ...] = (5, 0, 14)) -> list[torch.Tensor]:
    """x, and the extra inputs."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(sizes) + 2, K, generator=generator).bfloat16().requires_grad_()
    scales = [torch.rand(len(x), generator=generator).requires_grad_()] * scaled
    ends = torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return [x, ends, *scales, ends.clone()]


def run(module: Any, inputs: list[torch.Tensor], params: list[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
    """(output and gradients, bytes that autograd keeps beside the parameters and the inputs)."""
    kept: dict[int, int] = {}
    given = {t.data_ptr() for t in (*params, *inputs)}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in given:
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = module(*inputs)
    wanted = [t for t in (*inputs, *params) if t.requires_grad]
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, wanted, dy)], sum(kept.values())


@RECIPES
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda op: type(op).__name__)
def test_same_bits_and_less_is_saved(activation: BasicOperation, recipe: Any) -> None:
    inputs, kept = tensors(activation.num_extra_inputs == 1), []
    results = []
    for fusions in (True, False):
        module = experts(activation, recipe, fusions)
        found, size = run(module, inputs, [*module.parameters()])
        results.append(found), kept.append(size)
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))
    rows = len(inputs[0])
    assert kept[1] - kept[0] == (F * (-(-rows // 16) * 16) + 4 if recipe is FP8 else 2 * F * rows), (
        "a by columns, or in bf16"
    )


@pytest.mark.parametrize("recipe", [Float8BlockScaling(), MXFP8BlockScaling()], ids=["blocks", "mxfp8"])
@pytest.mark.parametrize("activation", [ScaledSwiGLU(), GELU()], ids=lambda op: type(op).__name__)
def test_same_bits_with_scales_of_blocks(activation: BasicOperation, recipe: Any) -> None:
    """Columns of a that are computed again begin at the groups' borders, as those that were not saved."""
    inputs, results = tensors(activation.num_extra_inputs == 1), []
    for fusions in (True, False):
        torch.manual_seed(0)
        wide = 256 if isinstance(activation, ScaledSwiGLU) else 128
        ops = GroupedLinear(G, K, wide), activation, GroupedLinear(G, 128, 128)
        module = Sequential(*ops, recipe=recipe, fusions=fusions, dtype=torch.bfloat16)
        found, size = run(module, inputs, [*module.parameters()])
        results.append((size, found))
    (less, fused), (more, apart) = results
    assert all(same_bits(a, b) for a, b in zip(fused, apart, strict=True)) and less < more


@pytest.mark.parametrize("activation", [ScaledSwiGLU(), SwiGLU()], ids=lambda op: type(op).__name__)
def test_the_gradient_of_both_halves_is_quantized_in_one_kernel(activation: BasicOperation) -> None:
    inputs, module = tensors(activation.num_extra_inputs == 1), experts(activation, FP8, True)
    with mock.patch.object(quantized, "gated_backward_quantize_halves", wraps=te.gated_backward_quantize_halves) as op:
        run(module, inputs, [*module.parameters()])
    assert op.call_count == 1


@pytest.mark.parametrize("needs", [*itertools.product((True, False), repeat=4)][:-1], ids=str)
def test_frozen_tensors(needs: tuple[bool, ...]) -> None:
    """x, scales, both weights: the same gradients for every set of them that needs one."""
    results = []
    for fusions in (True, False):
        inputs, module = tensors(True), experts(ScaledSwiGLU(), FP8, fusions)
        for tensor, needed in zip((inputs[0], inputs[2], *module.parameters()), needs, strict=True):
            tensor.requires_grad_(needed)
        results.append(run(module, inputs, [*module.parameters()])[0])
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


@RECIPES
def test_fake_has_the_real_layout(recipe: Any) -> None:
    """Slot for slot, for every combination of gradients."""
    x, *extra = (t.detach() for t in tensors(True))
    ops = OperationFuser(operations(ScaledSwiGLU()), recipe=recipe).basic_ops
    fused = GroupedMLP(ops)
    weights = [torch.randn(G, 2 * F, K), torch.randn(G, K, F)]
    for of_x, of_w1, of_w2, of_scales in itertools.product((True, False), repeat=4):
        groups = grouped([fused])
        call = Call.of(ops, [of_x, of_w1, of_w2, False, of_scales, False], True)
        program = Program(call, groups, groups)
        real, fake = program.run(x, weights, extra), program.fake(x, weights, extra)
        assert [(t.shape, t.dtype, t.stride()) for t in real] == [(t.shape, t.dtype, t.stride()) for t in fake]
        if not any((of_x, of_w1, of_w2, of_scales)):
            assert len(real) == 1


def test_each_linear_has_its_own_groups() -> None:
    """Also in one operation."""
    x, ends, scales, others = tensors(True)
    others = torch.tensor([1, 9, 12], dtype=torch.int32)
    results = []
    for fusions in (True, False):
        module = experts(ScaledSwiGLU(), FP8, fusions)
        results.append(run(module, [x, ends, scales, others], [*module.parameters()])[0])
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))
    assert results[0][0][11].any() and not results[0][0][12:].any()


def test_what_is_fused() -> None:
    for activation in ACTIVATIONS:
        fused = OperationFuser(operations(activation), recipe=FP8).fuse()
        assert [type(group.op) for group in fused.forward] == [GroupedMLP]
        assert fused.forward[0].op is fused.backward[0].op
    first, _, second = operations(GELU())
    left = OperationFuser([first, Identity(), second], recipe=FP8).fuse()
    assert [type(group.op) for group in left.forward] == [GroupedLinear, Identity, GroupedLinear]


@pytest.mark.parametrize("backend", ["aot_eager", "te"])
def test_compiled_whole(backend: str) -> None:
    """Nothing more is saved than by an eager run: what backward computes again stays in backward."""
    inputs, module = tensors(True), experts(ScaledSwiGLU(), FP8, True)
    torch._dynamo.reset()
    options = {"codegen": "eager"} if backend == "te" else None
    compiled = torch.compile(module, backend=backend, fullgraph=True, options=options)
    (eager, size), (found, kept) = (run(f, inputs, [*module.parameters()]) for f in (module, compiled))
    assert all(map(torch.equal, eager, found)) and kept == size


def test_it_is_lowered_to_kernels() -> None:
    """One node that becomes the launches of its parts; Inductor's own kernel gives the amax of a."""
    ops = OperationFuser(operations(ScaledSwiGLU()), recipe=FP8).basic_ops
    call = Call.of(ops, [True, True, True, False, True, False], True)
    graph = torch.fx.Graph()
    with fake_cuda(), kernels_everywhere():
        bf16 = {"dtype": torch.bfloat16, "device": "cuda"}
        offs = [torch.empty(G, dtype=torch.int32, device="cuda") for _ in range(2)]
        values = [
            torch.empty(64, K, **bf16),
            torch.empty(G, 2 * F, K, **bf16),
            torch.empty(G, K, F, **bf16),
            *(offs[0], torch.empty(64, device="cuda"), offs[1]),
        ]
        nodes = [graph.placeholder(f"t{i}") for i in range(len(values))]
        for node, value in zip(nodes, values, strict=True):
            node.meta["val"] = value
        target, rest = GroupedMLP.forward_overload, (GroupedMLP(ops), call)
        node = graph.call_function(target, (nodes[0], nodes[1:3], nodes[3:], *rest))
        node.meta["val"] = target(values[0], values[1:3], values[3:], *rest)
        results = [graph.call_function(operator.getitem, (node, i)) for i in range(len(node.meta["val"]))]
        for i, result in enumerate(results):
            result.meta["val"] = node.meta["val"][i]
        graph.output(results)
        lower(graph)
        text = graph_text(graph)
    weight = (
        "quantize_amax_kernel -> partials\nquantize_cast_kernel -> data, transpose, scale_inv\ngemm_grouped_kernel -> c"
    )
    assert launches(text) == (
        f"quantize_amax_kernel -> partials\nquantize_cast_kernel -> data, transpose, scale_inv\n{weight}\n"
        f"produce_write_kernel -> y\nquantize_cast_kernel -> data, scale_inv\n{weight}"
    )
    assert not any(is_te(node.target) for node in graph.nodes)
