"""Which quantizations of a lowered graph guess their scales, and what lasts of their hints."""

from __future__ import annotations

import operator
import re
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from helpers.graphs.lowered_graphs import aten, bf16, call, f32, graph_of, te
from helpers.models.snapshot_models import kernels_everywhere, launches
from torch import fx

from te_dynamo.errors import InvalidOptionError, QuantizationError
from te_dynamo.kernels.runtime import hints
from te_dynamo.lowering.lower import lower
from te_dynamo.quantized.quantizers import Float8CurrentScalingQuantizer
from te_dynamo.recipe import Float8CurrentScaling
from te_dynamo.testing import graph_text
from te_dynamo.testing.fake_cuda import fake_cuda

ONE = Float8CurrentScalingQuantizer(power_of_two_scale=True, one_pass=True)
ROWS = ONE.with_usage(True, False)
X, HALF = (256, 1024), (256, 512)


def lowered(operation: Any, *arguments: Any) -> str:
    with fake_cuda(), kernels_everywhere():
        given = [argument() if callable(argument) else argument for argument in arguments]
        graph = graph_of(operation.default, *given)
        lower(graph)
    return graph_text(graph)


def x() -> torch.Tensor:
    return bf16(*X)


SITES = {
    "quantize": (te.quantize, x, ONE),
    "stacked": (te.quantize_stacked, lambda: [x(), x()], ONE, False),
    "activation": (te.activation_quantize, x, "gelu", ONE, True),
    "activation backward": (te.activation_backward_quantize, x, x, "gelu", ONE, False, False),
    "gated": (te.gated_quantize, x, x, "silu", ONE, False),
    "gated backward": (te.gated_backward_quantize, x, x, x, "silu", ROWS, False, True),
    "halves": (te.gated_backward_quantize_halves, x, x, x, "silu", ONE, False, True),
}


@pytest.mark.parametrize("name", SITES)
def test_a_site_is_a_launch_that_guesses_and_one_that_mends(name: str) -> None:
    text = lowered(*SITES[name])
    assert text.count("PASS='guess'") == text.count("PASS='mend'") == 1
    assert "PASS='known'" not in text and "amax_kernel" not in text
    scales = 2 if name in ("stacked", "gated backward") else 1
    assert f"hints: i64[{scales}, 2] = te.hints(" in text


LEFT = {
    "column sums": (te.quantize_bias_grad, x, ONE),
    "column sums of a gradient": (te.activation_backward_quantize, x, x, "gelu", ONE, False, True),
    "a norm": (te.rms_norm_quantize, x, None, 1e-6, False, False, ONE, False),
    "a product's amax": (te.gated_quantize, x, x, "silu", ONE, False, lambda: f32(512)),
    "few values": (te.quantize, lambda: bf16(2, 32), ROWS),
    "two passes": (te.quantize, x, Float8CurrentScalingQuantizer(power_of_two_scale=True)),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_in_two_passes(name: str) -> None:
    text = lowered(*LEFT[name])
    assert "hints" not in text and "guess" not in text


def test_what_inductor_writes_has_its_amax_from_there() -> None:
    graph = fx.Graph()
    with fake_cuda(), kernels_everywhere():
        one = graph.placeholder("x")
        one.meta["val"] = x()
        quantized = call(graph, te.quantize.default, call(graph, aten.add.Tensor, one, one), ONE)
        graph.output(tuple(call(graph, operator.getitem, quantized, i) for i in range(3)))
        lower(graph)
    assert launches(graph_text(graph)) == "quantize_cast_kernel -> data, transpose, scale_inv"


def test_each_scale_has_its_own_hint() -> None:
    graph = fx.Graph()
    with fake_cuda(), kernels_everywhere():
        nodes = [graph.placeholder(name) for name in "ab"]
        for node in nodes:
            node.meta["val"] = x()
        made = [call(graph, te.quantize_stacked.default, nodes, ONE, False)]
        made += [call(graph, te.quantize.default, node, ONE) for node in nodes]
        graph.output(tuple(call(graph, operator.getitem, node, 0) for node in made))
        lower(graph)
    text = [re.sub("'[0-9a-f]{16}'", "a name", line) for line in graph_text(graph).splitlines() if "hints" in line]
    assert_expected_inline(
        "\n".join(text),
        """\
hints: i64[4, 2] = te.hints(a, a name, 4)
slice: i64[2, 2] = aten.slice(hints, start=0, end=2)
slice_1: i64[1, 2] = aten.slice(hints, start=2, end=3)
slice_2: i64[1, 2] = aten.slice(hints, start=3, end=4)""",
    )


def test_hints_last_and_no_run_sees_anothers_writes() -> None:
    like = torch.empty(1)
    first = hints.copy_of_hints(like, "a graph of this test", 3)
    assert first[:, 0].tolist() == [0, 0, 0] and first[:, 1].diff().tolist() == [16, 16]
    kept = hints._kept[like.device, "a graph of this test", 3]
    assert first[:, 1].tolist() == [kept.data_ptr() + 16 * i for i in range(3)]
    kept[1, 0] = 7  # as a kernel does, by the address
    assert first[1, 0] == 0
    assert hints.copy_of_hints(like, "a graph of this test", 3)[:, 0].tolist() == [0, 7, 0]
    assert hints.copy_of_hints(like, "another graph of this test", 2)[:, 0].tolist() == [0, 0]


def test_only_powers_of_two_are_guessed() -> None:
    with pytest.raises(QuantizationError, match="only a power of two can be guessed"):
        Float8CurrentScalingQuantizer(one_pass=True)
    with pytest.raises(InvalidOptionError, match="Float8CurrentScaling: one_pass: only a power of two"):
        Float8CurrentScaling(one_pass=True)
    recipe = Float8CurrentScaling(power_of_two_scales=True, one_pass=True)
    assert recipe.describe() == "float8_current_scaling(power_of_two_scales=True, one_pass=True)"
    assert recipe.weight_quantizer().with_usage(True, False).describe() == "e4m3[row, pow2, one pass]"


def test_two_passes_where_nothing_is_lowered() -> None:
    value = torch.randn(64, 64)
    expected = te.quantize(value, Float8CurrentScalingQuantizer(power_of_two_scale=True))
    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(te.quantize(value, ONE), expected, strict=True)
    )
