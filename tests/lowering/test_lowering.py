"""Lowering: what each te operation becomes, who computes an amax, and what is refused.

Graphs are written by hand, on fake CUDA tensors that the package takes for a GPU with kernels; two models go through
all of Inductor's passes.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.graphs.lowered_graphs import (
    BOTH,
    CASES,
    ROWS,
    aten,
    bf16,
    call,
    f8,
    f32,
    finish,
    graph_of,
    inputs,
    te,
)
from helpers.kernels.gemms import arguments
from helpers.models.snapshot_models import MODELS, capture_training, kernels_everywhere, launches, shape_for
from torch import fx, nn

from te_dynamo.dialect.define import KERNELS, is_te
from te_dynamo.dialect.memory import written_by_inductor
from te_dynamo.errors import LoweringError
from te_dynamo.kernels.quantize.current import amax_by_rows
from te_dynamo.kernels.runtime.target import TARGETS, acting_as
from te_dynamo.lowering.lower import lower
from te_dynamo.operations.basic import GELU
from te_dynamo.operations.define import OVERLOADS
from te_dynamo.operations.run import Call
from te_dynamo.quantized.quantizers import Float8BlockQuantizer
from te_dynamo.testing import graph_text

UNKNOWN = torch.library.Library("te", "FRAGMENT")
UNKNOWN.define("not_a_kernel_of_ours(Tensor x) -> Tensor")
UNKNOWN.impl("not_a_kernel_of_ours", torch.empty_like, "Meta")


def targets(graph: fx.Graph) -> set[Any]:
    return {node.target for node in graph.nodes if node.op == "call_function"}


# ---- every operation


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
    """But for those of the operation layer, which are made of the others, and what lowering itself puts there."""
    others = OVERLOADS | {te.sequence.default, te.hints.default}
    assert {case[0].default for case in CASES.values()} == set(KERNELS) - others


@pytest.mark.parametrize("opaque", [False, True])
def test_an_operations_class_becomes_its_parts(gpu: None, opaque: bool) -> None:
    """A node of a class, which a fusion of graphs may put in, or an opaque one leaves: te operations in it are lowered too."""
    cls = LoweredGELU if opaque else GELU
    graph = graph_of(cls.forward_overload, bf16(2, 8, 64), [], [], cls("tanh"), Call.of([cls("tanh")], [True], True))
    lower(graph)
    assert launches(graph_text(graph)) == "produce_write_kernel -> y"
    assert not any(is_te(target) for target in targets(graph))


class LoweredGELU(GELU):
    opaque = True


@pytest.mark.parametrize("case", ["gemm_mxfp8", "gemm_block_e8m0", "gemm_nvfp4"])
def test_scales_of_blocks_go_to_tensor_cores_that_know_them(gpu: None, case: str) -> None:
    """Blackwell's: the same operations, plain scales too."""
    target, arguments, _ = CASES[case]
    graph = graph_of(target.default, *arguments())
    with acting_as(TARGETS["b200"]):
        lower(graph)
    assert launches(graph_text(graph)) == "gemm_block_scales_kernel -> c"


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
            *arguments(*inputs(g, f8(16, 64), f32(1), f8(64, 64), f32(1)), None, torch.bfloat16, True),
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
    assert text.count("triton.quantize_amax_kernel") == (not by_inductor) and text.count("aten.sum") == 1
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


@pytest.mark.one_fast_case
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
    assert ("forward", "te.gemm", "Triton") in lowered, "XXX"


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

    monkeypatch.setitem(KERNELS, te.gated.default, broken)
    graph = graph_of(te.gated.default, bf16(19, 64), bf16(19, 64), "silu")
    with pytest.raises(LoweringError, match=r"te\.gated.*model\.py.*line 17.*the launcher's own words") as caught:
        lower(graph)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_results_that_are_not_read_by_index_are_an_error(gpu: None) -> None:
    graph = fx.Graph()
    (x,) = inputs(graph, bf16(16, 64))
    node = call(graph, te.quantize.default, x, BOTH)
    graph.output(graph.call_function(len, (node,)))
    with pytest.raises(LoweringError, match=r"te\.quantize.*read by .*len.*line 17"):
        lower(graph)


def test_where_there_are_no_kernels_operands_are_contiguous_too() -> None:
    """The scales of a stored weight's columns are padded and transposed: Inductor would choose strides for them."""
    weight = Float8BlockQuantizer(True, False, block_dims=2).quantize(torch.randn(256, 256, dtype=torch.bfloat16))
    linear = nn.Linear(256, 256, bias=False)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    gradients = []
    for codegen in ("eager", "inductor"):
        x = torch.ones(16, 256, dtype=torch.bfloat16, requires_grad=True)
        torch.compile(linear, backend="te", options={"recipe": "float8_block_scaling", "codegen": codegen})(
            x
        ).sum().backward()
        gradients.append(x.grad)
        torch._dynamo.reset()
    assert torch.equal(*gradients)
