"""Lowering: what each te operation becomes, who computes an amax, and what is refused.

Graphs are written by hand, on fake CUDA tensors that the package takes for a GPU with kernels; two models go through
all of Inductor's passes.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from snapshot_models import MODELS, capture_training, kernels_everywhere, launches, shape_for
from torch import Tensor, fx
from torch.utils._pytree import tree_flatten

from te_dynamo.dialect import KERNELS, is_te
from te_dynamo.dialect.grouped_linear import GroupedLinearConfig
from te_dynamo.dialect.linear import LinearConfig
from te_dynamo.errors import LoweringError
from te_dynamo.kernels.runtime.device import Device
from te_dynamo.lowering.amax import amax_by_rows, written_by_inductor
from te_dynamo.lowering.lower import lower
from te_dynamo.operations.basic import GELU
from te_dynamo.operations.define import OVERLOADS
from te_dynamo.operations.run import Call
from te_dynamo.quantized.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from te_dynamo.recipe import Float8CurrentScaling
from te_dynamo.testing import fake_cuda, graph_text

te, aten = torch.ops.te, torch.ops.aten
BOTH = Float8CurrentScalingQuantizer()
ROWS = Float8CurrentScalingQuantizer(columnwise=False)
COLUMNS = Float8CurrentScalingQuantizer(rowwise=False)
LINEAR = LinearConfig.from_recipe(Float8CurrentScaling(), input_requires_grad=True, weight_requires_grad=True)

GROUPED_LINEAR = GroupedLinearConfig.for_weight(
    Float8CurrentScaling(), weight_transposed=False, input_requires_grad=True, weight_requires_grad=True
)

UNKNOWN = torch.library.Library("te", "FRAGMENT")
UNKNOWN.define("not_a_kernel_of_ours(Tensor x) -> Tensor")
UNKNOWN.impl("not_a_kernel_of_ours", torch.empty_like, "Meta")


@pytest.fixture
def gpu() -> Iterator[None]:
    """Fake CUDA tensors, on a device with kernels as far as the package knows."""
    with fake_cuda(), kernels_everywhere():
        yield


def bf16(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device="cuda")


def f32(*shape: int) -> Tensor:
    return torch.empty(*shape, device="cuda")


def f8(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.float8_e4m3fn, device="cuda")


def u8(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.uint8, device="cuda")


def offsets() -> Tensor:
    return torch.empty(3, dtype=torch.int32, device="cuda")


def key() -> Tensor:
    return torch.empty(2, dtype=torch.int32, device="cuda")


def call(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    """A call with its fake result, from line 17 of the user's model."""
    node = graph.call_function(target, args)
    node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]))
    node.meta["stack_trace"] = '  File "model.py", line 17, in forward\n    y = f(x)'
    return node


def inputs(graph: fx.Graph, *values: Tensor) -> list[fx.Node]:
    """Placeholders for `values`."""
    nodes = []
    for number, value in enumerate(values):
        nodes.append(graph.placeholder(f"x{number}"))
        nodes[-1].meta["val"] = value
    return nodes


def finish(graph: fx.Graph, result: fx.Node) -> fx.Graph:
    """Returns every tensor of `result`."""
    values = result.meta["val"]
    items: list[fx.Node] = [result]
    if not isinstance(values, Tensor):
        items = [call(graph, operator.getitem, result, index) for index in range(len(values))]
    graph.output(tuple(items))
    return graph


def graph_of(target: Any, *args: Any) -> fx.Graph:
    """A graph of one operation; its tensors among `args` are the inputs."""
    graph = fx.Graph()
    leaves, spec = tree_flatten(args)
    nodes = iter(inputs(graph, *(leaf for leaf in leaves if isinstance(leaf, Tensor))))
    given = spec.unflatten([next(nodes) if isinstance(leaf, Tensor) else leaf for leaf in leaves])
    return finish(graph, call(graph, target, *given))


def targets(graph: fx.Graph) -> set[Any]:
    return {node.target for node in graph.nodes if node.op == "call_function"}


# ---- every operation

Case = tuple[Any, Callable[[], tuple[Any, ...]], str]
CASES: dict[str, Case] = {
    "quantize": (
        te.quantize,
        lambda: (bf16(19, 64), BOTH),
        "quantize_amax_kernel -> partials\nquantize_cast_kernel -> data, transpose, scale_inv",
    ),
    "quantize rows": (
        te.quantize,
        lambda: (bf16(1024, 128), ROWS),
        "quantize_amax_kernel -> partials\nquantize_cast_kernel -> data, scale_inv",
    ),
    "quantize a few rows": (
        te.quantize,
        lambda: (bf16(19, 64), ROWS),
        "quantize_few_kernel -> data, scale_inv",
    ),
    "quantize columns": (
        te.quantize,
        lambda: (bf16(19, 64), COLUMNS),
        "quantize_amax_kernel -> partials\nquantize_cast_kernel -> transpose, scale_inv",
    ),
    "gemm": (
        te.gemm,
        lambda: (f8(16, 64), f32(1), f8(32, 64), f32(1), None, torch.bfloat16, True),
        "gemm_kernel -> c",
    ),
    "gemm with bias": (
        te.gemm,
        lambda: (f8(16, 64), f32(1), f8(32, 64), f32(1), bf16(32), torch.bfloat16, True),
        "gemm_kernel -> c",
    ),
    "rms_norm": (te.rms_norm, lambda: (bf16(19, 64), bf16(64), 1e-5, False, False), "norm_rows_kernel -> y, rstd"),
    "rms_norm without weight": (
        te.rms_norm,
        lambda: (bf16(19, 64), None, 1e-5, False, False),
        "norm_rows_kernel -> y, rstd",
    ),
    "layer_norm": (
        te.layer_norm,
        lambda: (bf16(19, 64), bf16(64), bf16(64), 1e-5),
        "norm_rows_kernel -> y, mean, rstd",
    ),
    "rms_norm_quantize": (
        te.rms_norm_quantize,
        lambda: (bf16(19, 64), bf16(64), 1e-5, False, False, BOTH, False),
        "norm_rows_kernel -> rstd, partials\nnorm_cast_kernel -> data, transpose, scale_inv",
    ),
    "rms_norm_quantize keeping y": (
        te.rms_norm_quantize,
        lambda: (bf16(19, 64), bf16(64), 1e-5, False, False, ROWS, True),
        "norm_rows_kernel -> rstd, partials\nnorm_cast_kernel -> y, data, scale_inv",
    ),
    "layer_norm_quantize": (
        te.layer_norm_quantize,
        lambda: (bf16(19, 64), bf16(64), None, 1e-5, BOTH, False),
        "norm_rows_kernel -> mean, rstd, partials\nnorm_cast_kernel -> data, transpose, scale_inv",
    ),
    "activation": (te.activation, lambda: (bf16(19, 64), "gelu"), "activation_write_kernel -> y"),
    "activation_backward": (
        te.activation_backward,
        lambda: (bf16(19, 64), bf16(19, 64), "silu"),
        "activation_write_kernel -> y",
    ),
    "activation_quantize": (
        te.activation_quantize,
        lambda: (bf16(19, 64), "relu", BOTH, True),
        "activation_amax_kernel -> partials\nactivation_write_kernel -> y, data, transpose, scale_inv",
    ),
    "add_rms_norm_quantize": (
        te.add_rms_norm_quantize,
        lambda: (bf16(19, 64), bf16(19, 64), bf16(64), 1e-5, False, False, BOTH, False),
        "add_norm_rows_kernel -> h, rstd, partials\nnorm_cast_kernel -> data, transpose, scale_inv",
    ),
    "add_layer_norm_quantize keeping y": (
        te.add_layer_norm_quantize,
        lambda: (bf16(19, 64), bf16(19, 64), bf16(64), bf16(64), 1e-5, ROWS, True),
        "add_norm_rows_kernel -> h, mean, rstd, partials\nnorm_cast_kernel -> y, data, scale_inv",
    ),
    "quantize_stacked": (
        te.quantize_stacked,
        lambda: ([bf16(128, 64), bf16(256, 64)], BOTH, False),
        "quantize_amax_kernel -> partials\nquantize_stacked_kernel -> data, transpose, scale_inv\n"
        "quantize_amax_kernel -> partials\nquantize_stacked_kernel -> data, transpose, scale_inv",
    ),
    "gemm_stacked": (
        te.gemm_stacked,
        lambda: (f8(16, 64), f32(1), f8(384, 64), f32(2), torch.bfloat16, True, "N", [128, 256]),
        "gemm_stacked_kernel -> c",
    ),
    "gemm_swiglu": (
        te.gemm_swiglu,
        lambda: (f8(16, 64), f32(1), f8(256, 64), f32(2), True, 1),
        "gemm_stacked_kernel -> c\nswiglu_amax_kernel -> partials",
    ),
    "gemm_grouped": (
        te.gemm_grouped,
        lambda: (f8(19, 64), f32(1), f8(3, 32, 64), f32(3), offsets(), torch.bfloat16, True),
        "gemm_grouped_kernel -> c",
    ),
    "gemm_grouped_columns": (
        te.gemm_grouped_columns,
        lambda: (f8(64, 32), f32(1), f8(128, 32), f32(1), offsets(), torch.bfloat16, False),
        "gemm_grouped_columns_kernel -> c",
    ),
    "grouped_linear": (
        te.grouped_linear,
        lambda: (bf16(19, 64), bf16(3, 32, 64), offsets(), GROUPED_LINEAR),
        "quantize_amax_kernel -> partials\nquantize_cast_kernel -> data, transpose, scale_inv\n"
        "grouped_amax_kernel -> partials\ngrouped_cast_kernel -> data, transpose, scale_inv\n"
        "gemm_grouped_kernel -> c",
    ),
    "grouped_linear_with_workspace": (
        te.grouped_linear_with_workspace,
        lambda: (bf16(19, 64), None, offsets(), GROUPED_LINEAR, [f8(3, 32, 64), f8(3, 64, 32), f32(3)]),
        "quantize_amax_kernel -> partials\nquantize_cast_kernel -> data, transpose, scale_inv\ngemm_grouped_kernel -> c",
    ),
    "quantize_bias_grad": (
        te.quantize_bias_grad,
        lambda: (bf16(19, 64), BOTH),
        "amax_column_sums_kernel -> partials, sums\nquantize_cast_kernel -> data, transpose, scale_inv",
    ),
    "activation_backward_quantize": (
        te.activation_backward_quantize,
        lambda: (bf16(19, 64), bf16(19, 64), "gelu", BOTH, False, True),
        "activation_backward_sums_kernel -> partials, sums\nactivation_write_kernel -> dbias, data, transpose, scale_inv",
    ),
    "swiglu": (te.swiglu, lambda: (bf16(19, 64), bf16(19, 64)), "swiglu_write_kernel -> y"),
    "swiglu_quantize": (
        te.swiglu_quantize,
        lambda: (bf16(19, 64), bf16(19, 64), BOTH, False),
        "swiglu_amax_kernel -> partials\nswiglu_write_kernel -> data, transpose, scale_inv",
    ),
    "swiglu_quantize with amax": (
        te.swiglu_quantize,
        lambda: (bf16(19, 64), bf16(19, 64), BOTH, False, f32(512)),
        "swiglu_write_kernel -> data, transpose, scale_inv",
    ),
    "swiglu_backward": (
        te.swiglu_backward,
        lambda: (bf16(19, 64), bf16(19, 64), bf16(19, 64)),
        "swiglu_backward_write_kernel -> dgate, dup",
    ),
    "swiglu_backward_quantize": (
        te.swiglu_backward_quantize,
        lambda: (bf16(19, 64), bf16(19, 64), bf16(19, 64), ROWS, False),
        "swiglu_backward_amax_kernel -> gate_partials, up_partials\n"
        "swiglu_backward_write_kernel -> gate_data, gate_scale_inv, up_data, up_scale_inv",
    ),
    "swiglu_backward_quantize_halves": (
        te.swiglu_backward_quantize_halves,
        lambda: (bf16(19, 64), bf16(19, 64), bf16(19, 64), BOTH, True, True),
        "swiglu_backward_amax_kernel -> gate_partials\n"
        "swiglu_backward_write_kernel -> dgate, gate_data, gate_transpose, gate_scale_inv",
    ),
    "transpose": (te.transpose, lambda: (f8(19, 64),), "transpose_kernel -> transpose"),
    "quantize_block": (
        te.quantize,
        lambda: (bf16(19, 64), Float8BlockQuantizer()),
        "quantize_block_kernel -> data, scale_inv, transpose, columnwise_scale_inv",
    ),
    "quantize_block_2d_rows": (
        te.quantize,
        lambda: (bf16(19, 64), Float8BlockQuantizer(columnwise=False, block_dims=2)),
        "quantize_block_kernel -> data, scale_inv",
    ),
    "quantize_mxfp8_columns": (
        te.quantize,
        lambda: (bf16(19, 64), MXFP8Quantizer(rowwise=False)),
        "quantize_mxfp8_kernel -> columnwise_data, columnwise_scale_inv",
    ),
    "quantize_mxfp8_128": (
        te.quantize,
        lambda: (bf16(19, 64), MXFP8Quantizer(scale_block=128)),
        "quantize_mxfp8_128_kernel -> data, scale_inv, columnwise_data, columnwise_scale_inv",
    ),
    "quantize_nvfp4": (
        te.quantize,
        lambda: (bf16(19, 64), NVFP4Quantizer(hadamard=True, stochastic_rounding=True), key()),
        "hadamard_amax_kernel -> partials, columnwise_partials\n"
        "quantize_nvfp4_kernel -> data, scale_inv, amax, columnwise_data, columnwise_scale_inv, columnwise_amax",
    ),
    "gemm_block": (
        te.gemm_block,
        lambda: (f8(19, 64), f32(1, 20), f8(32, 64), f32(1, 4), bf16(32), torch.bfloat16, False, True),
        "gemm_block_kernel -> c",
    ),
    "gemm_block_e8m0": (
        te.gemm_block,
        lambda: (f8(19, 64), u8(128, 4), f8(32, 64), u8(128, 4), None, torch.bfloat16, False, False),
        "gemm_block_kernel -> c",
    ),
    "gemm_mxfp8": (
        te.gemm_mxfp8,
        lambda: (f8(64, 32), u8(4, 128), f8(64, 32), u8(4, 128), None, torch.bfloat16, True, True),
        "dequantize_mxfp8_kernel -> values\ndequantize_mxfp8_kernel -> values",
    ),
    "gemm_nvfp4": (
        te.gemm_nvfp4,
        lambda: (u8(19, 32), u8(128, 4), f32(1), u8(32, 32), u8(128, 4), f32(1), bf16(32), torch.bfloat16),
        "dequantize_nvfp4_kernel -> y\ndequantize_nvfp4_kernel -> y\nnvfp4_epilogue_kernel -> c",
    ),
    "add_bias": (te.add_bias, lambda: (f32(19, 64), bf16(64), torch.bfloat16), ""),
    "bias_grad": (te.bias_grad, lambda: (bf16(19, 64),), ""),
    # These are expanded before autograd ends; one that slipped through must still become kernels.
    "gelu": (te.gelu, lambda: (bf16(19, 64), "none"), "activation_write_kernel -> y"),
    "silu": (te.silu, lambda: (bf16(19, 64),), "activation_write_kernel -> y"),
    "relu": (te.relu, lambda: (bf16(19, 64),), "activation_write_kernel -> y"),
    "linear": (
        te.linear,
        lambda: (bf16(2, 8, 64), bf16(32, 64), bf16(32), LINEAR),
        "quantize_amax_kernel -> partials\nquantize_cast_kernel -> data, transpose, scale_inv\n"
        "quantize_amax_kernel -> partials\nquantize_cast_kernel -> data, transpose, scale_inv\ngemm_kernel -> c",
    ),
    "linear_with_workspace": (
        te.linear_with_workspace,
        lambda: (bf16(2, 8, 64), None, bf16(32), LINEAR, [f8(32, 64), f8(64, 32), f32(1)]),
        "quantize_amax_kernel -> partials\nquantize_cast_kernel -> data, transpose, scale_inv\ngemm_kernel -> c",
    ),
    "gemm of a few rows": (
        te.gemm,
        lambda: (f8(16, 8192), f32(1), f8(1024, 8192), f32(1), None, torch.bfloat16, True),
        "gemm_decode_kernel -> c\ngemm_reduce_kernel -> c",
    ),
    "gemm_add": (
        te.gemm_add,
        lambda: (f8(19, 64), f32(1), f8(32, 64), f32(1), bf16(32), bf16(19, 32), torch.bfloat16, True),
        "gemm_kernel -> c",
    ),
    "gemm_add, K in parts": (
        te.gemm_add,
        lambda: (f8(128, 8192), f32(1), f8(256, 8192), f32(1), None, bf16(128, 256), torch.bfloat16, True),
        "gemm_kernel -> c\ngemm_reduce_kernel -> c",
    ),
    "gemm_add of a few rows": (
        te.gemm_add,
        lambda: (f8(16, 1024), f32(1), f8(4096, 1024), f32(1), None, bf16(16, 4096), torch.bfloat16, True),
        "gemm_decode_kernel -> c",
    ),
    "gemm_add of rows that are no vectors": (
        te.gemm_add,
        lambda: (f8(19, 64), f32(1), f8(33, 64), f32(1), None, bf16(19, 33), torch.bfloat16, True),
        "gemm_kernel -> c",
    ),
    "gemm_amax of a few rows": (
        te.gemm_amax,
        lambda: (f8(16, 1024), f32(1), f8(4096, 1024), f32(1), bf16(4096), torch.bfloat16, True),
        "gemm_decode_kernel -> c, partials",
    ),
    "gemm_amax of a few rows, K in parts": (
        te.gemm_amax,
        lambda: (f8(16, 8192), f32(1), f8(1024, 8192), f32(1), None, torch.bfloat16, True),
        "gemm_decode_kernel -> c\ngemm_reduce_kernel -> c, partials",
    ),
    "gemm_amax": (
        te.gemm_amax,
        lambda: (f8(16, 64), f32(1), f8(32, 64), f32(1), None, torch.bfloat16, True),
        "gemm_kernel -> c\nquantize_amax_kernel -> partials",
    ),
    "gemm_swiglu of a few rows": (
        te.gemm_swiglu,
        lambda: (f8(16, 512), f32(1), f8(28672, 512), f32(2), True, 0),
        "gemm_decode_swiglu_kernel -> c, partials",
    ),
    "quantize_with_amax": (
        te.quantize_with_amax,
        lambda: (bf16(16, 64), BOTH.with_usage(columnwise=False), f32(512)),
        "quantize_cast_kernel -> data, scale_inv",
    ),
    "gemm_stacked of a few rows": (
        te.gemm_stacked,
        lambda: (f8(16, 512), f32(1), f8(28672, 512), f32(2), torch.bfloat16, True, "N", [14336, 14336]),
        "gemm_decode_kernel -> c",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_operation_becomes_its_launches(gpu: None, case: str) -> None:
    """The kernels in order, and which arguments torch sees each of them write: an input among them would be a copy."""
    target, arguments, expected = CASES[case]
    graph = graph_of(target.default, *arguments())
    output = graph.find_nodes(op="output")[0]
    before = [node.meta["val"].shape for node in output.args[0]]
    lower(graph)
    assert launches(graph_text(graph)) == expected
    assert not any(is_te(target) for target in targets(graph))
    assert [node.meta["val"].shape for node in output.args[0]] == before


def test_every_operation_is_tested() -> None:
    """But for those of the operation layer, which are made of the others."""
    assert {case[0].default for case in CASES.values()} == set(KERNELS) - OVERLOADS - {te.sequence.default}


@pytest.mark.parametrize("opaque", [False, True])
def test_an_operations_class_becomes_its_parts(gpu: None, opaque: bool) -> None:
    """A node of a class, which a fusion of graphs may put in, or an opaque one leaves: te operations in it are lowered too."""
    cls = LoweredGELU if opaque else GELU
    graph = graph_of(cls.forward_overload, bf16(2, 8, 64), [], [], cls("tanh"), Call.of([cls("tanh")], [True], True))
    lower(graph)
    assert launches(graph_text(graph)) == "activation_write_kernel -> y"
    assert not any(is_te(target) for target in targets(graph))


class LoweredGELU(GELU):
    opaque = True


@pytest.mark.parametrize("case", ["gemm_mxfp8", "gemm_block_e8m0"])
def test_mxfp8_runs_on_tensor_cores_that_know_it(gpu: None, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blackwell's: the same operations, both forms of scales."""
    for module in ("kernels.gemm.mxfp8", "dialect.gemm_block"):
        monkeypatch.setattr(f"te_dynamo.{module}.device_of", lambda device: Device((10, 0), 148))
    target, arguments, _ = CASES[case]
    graph = graph_of(target.default, *arguments())
    lower(graph)
    assert launches(graph_text(graph)) == "gemm_mxfp8_kernel -> c"


def test_operations_without_a_kernel_are_inductors(gpu: None) -> None:
    """fp32 in between, one rounding: what Inductor fuses with its neighbours."""
    graph = graph_of(te.add_bias.default, f32(19, 64), bf16(64), torch.bfloat16)
    assert lower(graph) == [("te.add_bias", "Inductor")]
    lines = graph_text(graph).splitlines()
    assert lines[2:] == [
        "to: f32[64] = x1.to(f32)",
        "add: f32[19, 64] = aten.add(x0, to)",
        "to_1: bf16[19, 64] = add.to(bf16)",
        "return to_1",
    ]
    graph = graph_of(te.bias_grad.default, bf16(2, 8, 64))
    assert lower(graph) == [("te.bias_grad", "Inductor")]
    assert "aten.sum(view, [0], dtype=f32)" in graph_text(graph)


def test_the_users_line_stays_with_the_launches(gpu: None) -> None:
    graph = graph_of(te.quantize.default, bf16(19, 64), BOTH)
    lower(graph)
    made = [node for node in graph.nodes if node.op == "call_function" and node.target is not operator.getitem]
    assert made and all("line 17" in node.meta["stack_trace"] for node in made)


# ---- who computes the amax

SOURCES: dict[str, tuple[Callable[[fx.Graph], fx.Node], bool]] = {
    "an input (a weight)": (lambda g: inputs(g, bf16(16, 64))[0], False),
    "a view of an input": (lambda g: call(g, aten.view.default, *inputs(g, bf16(2, 8, 64)), [16, 64]), False),
    "a GEMM": (
        lambda g: call(
            g,
            te.gemm.default,
            *inputs(g, f8(16, 64), f32(1), f8(64, 64), f32(1)),
            None,
            torch.bfloat16,
            True,
        ),
        False,
    ),
    "torch's GEMM": (lambda g: call(g, aten.mm.default, *inputs(g, bf16(16, 32), bf16(32, 64))), False),
    "another kernel of ours": (lambda g: call(g, te.activation.default, *inputs(g, bf16(16, 64)), "gelu"), False),
    "a sum of two": (lambda g: call(g, aten.add.Tensor, *inputs(g, bf16(16, 64), bf16(16, 64))), True),
    "a view of a product": (
        lambda g: call(
            g, aten.view.default, call(g, aten.mul.Tensor, *inputs(g, bf16(2, 8, 64), bf16(2, 8, 64))), [16, 64]
        ),
        True,
    ),
    "a cast": (
        lambda g: call(g, torch.ops.prims.convert_element_type.default, *inputs(g, f32(16, 64)), torch.bfloat16),
        True,
    ),
}


@pytest.mark.parametrize("source", SOURCES)
def test_amax_is_computed_where_the_tensor_is_written(gpu: None, source: str) -> None:
    """By Inductor's kernel if that writes the tensor (aten.amax in the graph), otherwise by ours."""
    make, by_inductor = SOURCES[source]
    graph = fx.Graph()
    tensor = make(graph)
    assert written_by_inductor(tensor) == by_inductor
    lower(finish(graph, call(graph, te.quantize.default, tensor, BOTH)))
    text = graph_text(graph)
    assert ("aten.amax" in text) == by_inductor
    assert ("triton.quantize_amax_kernel" in text) != by_inductor
    assert text.count("triton.quantize_cast_kernel") == 1


@pytest.mark.parametrize("source", ["a GEMM", "a sum of two"])
def test_a_bias_gradient_is_summed_where_the_amax_is_computed(gpu: None, source: str) -> None:
    """In our amax kernel, or by Inductor, beside the amax that it computes; its fake result is that of the operation."""
    make, by_inductor = SOURCES[source]
    graph = fx.Graph()
    node = call(graph, te.quantize_bias_grad.default, make(graph), BOTH)
    expected = [(value.shape, value.dtype) for value in node.meta["val"]]
    lower(finish(graph, node))
    text = graph_text(graph)
    assert ("aten.amax" in text) == by_inductor
    assert ("triton.amax_column_sums_kernel" in text) != by_inductor
    assert text.count("aten.sum") == 1 and "triton.quantize_amax_kernel" not in text
    results = [result.meta["val"] for result in graph.output_node().args[0]]
    assert [(value.shape, value.dtype) for value in results] == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("special", [None, float("nan"), float("inf")])
def test_amax_by_rows_is_the_amax(dtype: torch.dtype, special: float | None) -> None:
    x = torch.randn(3, 5, 7).to(dtype)
    if special is not None:
        x[1, 2, 3] = special
    amax = amax_by_rows(x)
    assert amax.dtype == torch.float32 and amax.shape == (1,)
    torch.testing.assert_close(amax, x.float().abs().max().reshape(1), rtol=0, atol=0, equal_nan=True)


def test_a_tensor_without_rows(gpu: None) -> None:
    """An expert that got no token: its amax is 0, and nothing fails while compiling."""
    assert amax_by_rows(torch.empty(0, 64, dtype=torch.bfloat16, device="cuda")).shape == (1,)
    graph = fx.Graph()
    total = call(graph, aten.add.Tensor, *inputs(graph, bf16(0, 64), bf16(0, 64)))
    lower(finish(graph, call(graph, te.quantize.default, total, ROWS)))
    assert not any(is_te(target) for target in targets(graph))


# ---- whole models


@pytest.mark.parametrize("name", ["gelu", "block"])
def test_no_te_operation_is_left(name: str) -> None:
    """Also behind the residual's gradient, whose amax is Inductor's, and with rows that are no multiple of 16."""
    model = MODELS[name]
    with kernels_everywhere():
        graphs = capture_training(model, shape_for(model, 19), "cuda", codegen="inductor")
    for stage in ("lower.forward", "lower.backward"):
        assert not any(is_te(target) for target in targets(graphs.graph(stage)))
        assert "triton.gemm_kernel" in graphs[stage]
    # Only the block adds gradients up before a linear reads them.
    assert ("aten.amax" in graphs["lower.backward"]) == (name == "block")
    lowered = graphs.reports[0].lowered
    assert {runs for _, _, runs in lowered} == {"Triton"}
    assert ("backward", "te.quantize_bias_grad", "Triton") in lowered or name == "block"
    assert (("forward", "te.gemm_add", "Triton") in lowered) == (name == "block"), "its last residual sum"


def test_without_kernels_the_reference_stays_an_opaque_call() -> None:
    """And the report says why, for each operation."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = capture_training(MODELS["gelu"], (16, 64), "cpu", fusions=False).graph("backward")
    before = [node.target for node in graph.nodes if is_te(node.target)]
    done = lower(graph)
    reason = "reference (device cpu has no FP8 kernels)"
    assert ("te.gemm", reason) in done and ("te.activation_backward", reason) in done
    assert ("te.bias_grad", "Inductor") in done
    after = [node.target for node in graph.nodes if is_te(node.target)]
    assert after == [target for target in before if target is not te.bias_grad.default]


# ---- what is refused


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_unknown_operation_is_an_error(gpu: None, device: str) -> None:
    """On any device: an operation that nobody lowers is never left to run by chance."""
    graph = graph_of(te.not_a_kernel_of_ours.default, torch.empty(4, device=device))
    with pytest.raises(LoweringError, match=r'te\.not_a_kernel_of_ours.*File "model\.py", line 17, in forward'):
        lower(graph)


def test_a_launcher_that_fails_is_an_error_with_the_users_line(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("the launcher's own words")

    monkeypatch.setitem(KERNELS, te.swiglu.default, broken)
    graph = graph_of(te.swiglu.default, bf16(19, 64), bf16(19, 64))
    with pytest.raises(LoweringError, match=r"te\.swiglu.*model\.py.*line 17.*the launcher's own words") as caught:
        lower(graph)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_results_that_are_not_read_by_index_are_an_error(gpu: None) -> None:
    graph = fx.Graph()
    (x,) = inputs(graph, bf16(16, 64))
    node = call(graph, te.quantize.default, x, BOTH)
    graph.output(graph.call_function(len, (node,)))
    with pytest.raises(LoweringError, match=r"te\.quantize.*read by .*len.*line 17"):
        lower(graph)
