"""What goes to other ranks and is then quantized, quantized before it goes: the graphs, and every rank's bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from helpers.distributed.all_ranks import run_all_ranks
from helpers.graphs.graph_builder import BOTH, COLUMNS, E5M2, ROWS, Builder, aten, te
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from te_dynamo.kernels.layouts.tensor import TensorForm
from te_dynamo.kernels.quantize.current import quantize_reference
from te_dynamo.kernels.quantize.parts import amax_bits_of_parts, quantize_parts
from te_dynamo.passes.dialect.collectives.gather_quantize import gathers_left
from te_dynamo.passes.dialect.fuser import fuse
from te_dynamo.quantized.quantizers import Float8BlockQuantizer, Float8CurrentScalingQuantizer, Float8RowwiseQuantizer
from te_dynamo.testing import fake_cuda, graph_text

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")

NAME = "fuse_all_to_all_quantize"


def exchanged(
    tokens: int, ranks: int, quantizer: Any = BOTH, order: str = "sort", reader: Any = None, columns: int = 32
) -> tuple[fx.Graph, fx.Graph]:
    """The graph of an all-to-all of as many tokens for each rank and te.quantize, and what the fusion makes of it.

    order: of the tokens in between: "sort" of the other input, that input itself, or "" for none. reader: another one of the tokens.
    """
    c10d, graphs = torch.ops._c10d_functional, []
    with fake_cuda():
        for names in ((), (NAME,)):
            b = Builder((ranks * tokens, columns), (ranks * tokens,))
            x, experts = b.inputs
            sizes = [tokens] * ranks
            there = b.call(c10d.all_to_all_single.default, x, sizes, sizes, "ep")
            value = b.call(c10d.wait_tensor.default, there)
            if order == "sort":
                (indices,) = b.read(b.call(aten.sort.default, experts), 1)
                value = b.call(aten.index.Tensor, value, [indices])
            elif order:
                indices = b.call(aten.to.dtype, experts, torch.int64)
                value = b.call(aten.index.Tensor, value, [indices])
            buffers = b.call(te.quantize.default, value, quantizer)
            results = b.read(buffers, *range(len(quantizer.buffer_names())))
            results += [b.call(reader, value)] if reader else []
            graphs.append(b.returns(*results))
            fuse(graphs[-1], "joint", names)
    return graphs[0], graphs[1]


def test_graph() -> None:
    assert_expected_inline(
        graph_text(exchanged(12, 2)[1]),
        """\
x0: bf16[24, 32] = input
x1: bf16[24] = input
amax_bits_of_parts: i32[2] = te.amax_bits_of_parts(x0, [12, 12])
reduce_scatter_tensor: i32[1] = _c10d_functional.reduce_scatter_tensor(amax_bits_of_parts, 'max', 2, 'ep')
wait_tensor: i32[1] = _c10d_functional.wait_tensor(reduce_scatter_tensor)
all_gather_into_tensor: i32[2] = _c10d_functional.all_gather_into_tensor(wait_tensor, 2, 'ep')
wait_tensor_1: i32[2] = _c10d_functional.wait_tensor(all_gather_into_tensor)
view: f32[2] = aten.view(wait_tensor_1, f32)
view_1: f32[1] = aten.view(wait_tensor, f32)
quantize_parts: (f8e4m3[24, 32], f32[1]) = te.quantize_parts(x0, [12, 12], view, view_1, e4m3[row])
view_2: u8[24, 32] = aten.view(quantize_parts[0], u8)
all_to_all_single: u8[24, 32] = _c10d_functional.all_to_all_single(view_2, [12, 12], [12, 12], 'ep')
sort: (bf16[24], i64[24]) = aten.sort(x1)
wait_tensor_2: u8[24, 32] = _c10d_functional.wait_tensor(all_to_all_single)
index: u8[24, 32] = aten.index(wait_tensor_2, [sort[1]])
view_3: u8[24, 32] = aten.view(index, [-1, 32])
view_4: f8e4m3[24, 32] = aten.view(view_3, f8e4m3)
transpose: f8e4m3[32, 32] = te.transpose(view_4)
return view_4, transpose, quantize_parts[1]""",
    )


@settings(deadline=None, max_examples=25)
@given(
    ranks=st.integers(1, 4),
    tokens=st.integers(1, 20),
    order=st.sampled_from(["", "sort"]),
    quantizer=st.sampled_from([BOTH, ROWS, COLUMNS, E5M2, Float8CurrentScalingQuantizer(power_of_two_scale=True)]),
    extreme=st.sampled_from([1.0, 0.0, 1e30, float("inf"), float("nan"), -float("nan")]),
    seed=st.integers(0, 99),
)
def test_bits(ranks: int, tokens: int, order: str, quantizer: Any, extreme: float, seed: int) -> None:
    """On every rank, each with the scale of what it receives, whichever sends it the largest value."""
    torch.manual_seed(seed)
    rows = ranks * tokens
    inputs = [[torch.randn(rows, 32).bfloat16(), torch.randint(5, (rows,)).bfloat16()] for _ in range(ranks)]
    inputs[seed % ranks][0].view(-1)[seed % (rows * 32)] = extreme
    before, after = exchanged(tokens, ranks, quantizer, order)
    assert "te.quantize_parts.default" in [str(node.target) for node in after.nodes]
    for plain, fused in zip(run_all_ranks(before, inputs), run_all_ranks(after, inputs), strict=True):
        for one, other in zip(plain, fused, strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(0, 99))
def test_parts_are_tensors_of_their_own(sizes: list[int], seed: int) -> None:
    """Also those without rows, and where there are no rows at all."""
    torch.manual_seed(seed)
    x = torch.randn(sum(sizes), 16).bfloat16()
    amaxes = amax_bits_of_parts(x, sizes).view(torch.float32)
    form = TensorForm(torch.float8_e4m3fn, True, False)
    codes, scale_inv = quantize_parts(x, sizes, amaxes, amaxes[:1], form)
    for index, (part, mine) in enumerate(zip(x.split(sizes), codes.split(sizes), strict=True)):
        data, scale = quantize_reference(part, form)
        assert torch.equal(data.view(torch.uint8), mine.view(torch.uint8))
        assert index or torch.equal(scale, scale_inv)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ({"order": "unknown"}, "tokens are picked by indices that are not known to be an order of all of them"),
        ({"reader": aten.neg.default}, "aten.neg reads it too, beside te.quantize to e4m3[row+column]"),
        ({"reader": te.bias_grad.default}, "te.bias_grad reads it too, beside te.quantize to e4m3[row+column]"),
        (
            {"quantizer": Float8BlockQuantizer()},
            "codes travel where a tensor has one scale; it is read as FP8 (e4m3) with a scale per block of 1x128",
        ),
        (
            {"quantizer": Float8RowwiseQuantizer()},
            "codes travel where a tensor has one scale; it is read as FP8 (e4m3) with a scale per row",
        ),
    ],
    ids=["indices", "reader", "sum", "blocks", "rows"],
)
def test_what_stays(case: dict[str, Any], reason: str) -> None:
    before, after = exchanged(12, 2, **case)
    assert graph_text(before) == graph_text(after)
    (note,) = gathers_left(after)
    assert note.startswith("the all-to-all for ") and reason in note
