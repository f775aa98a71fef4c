"""What is gathered and then quantized, quantized and then gathered: the graphs, and every rank's bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from helpers.distributed.all_ranks import run_all_ranks
from helpers.graphs.graph_builder import BOTH, COLUMNS, E5M2, ROWS, Builder, aten, te
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from te_dynamo.passes.dialect.collectives.gather_quantize import gathers_left
from te_dynamo.passes.dialect.fuser import fuse
from te_dynamo.quantized.quantizers import Float8BlockQuantizer, Float8CurrentScalingQuantizer, MXFP8Quantizer
from te_dynamo.testing import fake_cuda, graph_text

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")

NAME = "fuse_gather_quantize"


def gathered(b: Builder, part: fx.Node, ranks: int, dim: int, slices: bool = False) -> fx.Node:
    """A rank's part, and the others', one behind the other in `dim`, as torch's functional collectives do it.

    slices: as Inductor has it where torch divided what is gathered by torch.chunk.
    """
    c10d = torch.ops._c10d_functional
    rows = part.meta["val"].shape[0]
    both = b.call(c10d.all_gather_into_tensor.default, part, ranks, "tp")
    awaited = b.call(c10d.wait_tensor.default, both)
    if dim == 0:
        return awaited
    if slices:
        parts = [b.call(aten.slice.Tensor, awaited, 0, i * rows, (i + 1) * rows) for i in range(ranks)]
    else:
        parts = b.read(b.call(aten.split.Tensor, awaited, rows), *range(ranks))
    return b.call(aten.cat.default, parts, dim)


def quantized(
    shape: tuple[int, ...], ranks: int, dim: int, quantizer: Any = BOTH, bias: bool = False, slices: bool = False
) -> tuple[fx.Graph, fx.Graph]:
    """The graph of an all-gather and te.quantize, and what the fusion makes of it."""
    graphs = []
    with fake_cuda():
        for names in ((), (NAME,)):
            b = Builder(shape)
            whole = gathered(b, b.inputs[0], ranks, dim, slices)
            buffers = b.call(te.quantize.default, whole, quantizer)
            results = b.read(buffers, *range(len(quantizer.buffer_names())))
            results += [b.call(te.bias_grad.default, whole)] if bias else []
            graphs.append(b.returns(*results))
            fuse(graphs[-1], "forward", names)
    return graphs[0], graphs[1]


def operations(graph: fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes]


def test_graphs() -> None:
    """Tokens are shared out in a dimension behind the batch, as in sequence parallelism."""
    before, after = quantized((4, 16, 32), 2, 1)
    assert_expected_inline(
        f"{graph_text(before)}\n\n{graph_text(after)}",
        """\
x0: bf16[4, 16, 32] = input
all_gather_into_tensor: bf16[8, 16, 32] = _c10d_functional.all_gather_into_tensor(x0, 2, 'tp')
wait_tensor: bf16[8, 16, 32] = _c10d_functional.wait_tensor(all_gather_into_tensor)
split: (bf16[4, 16, 32], bf16[4, 16, 32]) = aten.split(wait_tensor, 4)
cat: bf16[4, 32, 32] = aten.cat([split[0], split[1]], 1)
quantize: (f8e4m3[128, 32], f8e4m3[32, 128], f32[1]) = te.quantize(cat, e4m3[row+column])
return quantize[0], quantize[1], quantize[2]

x0: bf16[4, 16, 32] = input
amax: f32[1] = te.amax(x0)
view: i32[1] = aten.view(amax, i32)
all_reduce: i32[1] = _c10d_functional.all_reduce(view, 'max', 'tp')
wait_tensor: i32[1] = _c10d_functional.wait_tensor(all_reduce)
view_1: f32[1] = aten.view(wait_tensor, f32)
quantize_with_amax: (f8e4m3[64, 32], f32[1]) = te.quantize_with_amax(x0, e4m3[row], view_1)
view_2: u8[64, 32] = aten.view(quantize_with_amax[0], u8)
view_3: u8[4, 16, 32] = aten.view(view_2, [4, 16, 32])
all_gather_into_tensor: u8[8, 16, 32] = _c10d_functional.all_gather_into_tensor(view_3, 2, 'tp')
wait_tensor_1: u8[8, 16, 32] = _c10d_functional.wait_tensor(all_gather_into_tensor)
split: (u8[4, 16, 32], u8[4, 16, 32]) = aten.split(wait_tensor_1, 4)
cat: u8[4, 32, 32] = aten.cat([split[0], split[1]], 1)
view_4: u8[128, 32] = aten.view(cat, [-1, 32])
view_5: f8e4m3[128, 32] = aten.view(view_4, f8e4m3)
transpose: f8e4m3[32, 128] = te.transpose(view_5)
return view_5, transpose, quantize_with_amax[1]""",
    )


def test_a_bias_gradient_is_the_sum_of_the_ranks() -> None:
    _, after = quantized((16, 32), 2, 0, E5M2, bias=True)
    assert_expected_inline(
        graph_text(after),
        """\
x0: bf16[16, 32] = input
amax: f32[1] = te.amax(x0)
view: i32[1] = aten.view(amax, i32)
all_reduce: i32[1] = _c10d_functional.all_reduce(view, 'max', 'tp')
wait_tensor: i32[1] = _c10d_functional.wait_tensor(all_reduce)
view_1: f32[1] = aten.view(wait_tensor, f32)
quantize_with_amax: (f8e5m2[16, 32], f32[1]) = te.quantize_with_amax(x0, e5m2[row], view_1)
view_2: u8[16, 32] = aten.view(quantize_with_amax[0], u8)
view_3: u8[16, 32] = aten.view(view_2, [16, 32])
all_gather_into_tensor: u8[32, 32] = _c10d_functional.all_gather_into_tensor(view_3, 2, 'tp')
wait_tensor_1: u8[32, 32] = _c10d_functional.wait_tensor(all_gather_into_tensor)
view_4: u8[32, 32] = aten.view(wait_tensor_1, [-1, 32])
view_5: f8e5m2[32, 32] = aten.view(view_4, f8e5m2)
transpose: f8e5m2[32, 32] = te.transpose(view_5)
bias_grad: f32[32] = te.bias_grad(x0)
all_reduce_1: f32[32] = _c10d_functional.all_reduce(bias_grad, 'sum', 'tp')
wait_tensor_2: f32[32] = _c10d_functional.wait_tensor(all_reduce_1)
return view_5, transpose, quantize_with_amax[1], wait_tensor_2""",
    )


@settings(deadline=None, max_examples=25)
@given(
    ranks=st.integers(1, 4),
    batch=st.integers(1, 3),
    tokens=st.integers(1, 20),
    columns=st.sampled_from([16, 48]),
    dim=st.integers(0, 2),
    quantizer=st.sampled_from([BOTH, ROWS, COLUMNS, E5M2, Float8CurrentScalingQuantizer(power_of_two_scale=True)]),
    slices=st.booleans(),
    extreme=st.sampled_from([1.0, 0.0, 1e30, float("inf"), float("nan"), -float("nan")]),
    seed=st.integers(0, 99),
)
def test_bits(
    ranks: int, batch: int, tokens: int, columns: int, dim: int, quantizer: Any, slices: bool, extreme: float, seed: int
) -> None:
    """On every rank, whichever of them has the largest value; no number of tokens is special."""
    torch.manual_seed(seed)
    inputs = [[torch.randn(batch, tokens, columns).bfloat16()] for _ in range(ranks)]
    inputs[seed % ranks][0].view(-1)[seed % columns] = extreme
    before, after = quantized((batch, tokens, columns), ranks, dim, quantizer, slices=slices)
    assert "te.quantize_with_amax.default" in operations(after) and "te.quantize.default" not in operations(after)
    for plain, fused in zip(run_all_ranks(before, inputs), run_all_ranks(after, inputs), strict=True):
        assert_same(plain, fused)


def assert_same(plain: Sequence[Tensor], fused: Sequence[Tensor]) -> None:
    assert len(plain) == len(fused) > 0
    for one, other in zip(plain, fused, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride()
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_the_sum_of_a_bias_gradient() -> None:
    inputs = [[torch.randn(3, 5, 32).bfloat16()] for _ in range(4)]
    before, after = quantized((3, 5, 32), 4, 1, E5M2, bias=True)
    for plain, fused in zip(run_all_ranks(before, inputs), run_all_ranks(after, inputs), strict=True):
        assert_same(plain[:-1], fused[:-1])
        torch.testing.assert_close(plain[-1], fused[-1])


@pytest.mark.parametrize("quantizer", [Float8BlockQuantizer(), MXFP8Quantizer()], ids=["block", "mxfp8"])
def test_blocks_are_left(quantizer: Any) -> None:
    before, after = quantized((4, 32, 128), 2, 1, quantizer)
    assert graph_text(before) == graph_text(after)
    assert gathers_left(after) == [
        "the all-gather for quantize_default is in bfloat16: codes travel where a tensor has one scale; it is read as "
        f"{quantizer.in_words()}"
    ]


def test_another_reader() -> None:
    """The whole tensor travels for one, so that the other reads it too."""
    with fake_cuda():
        b = Builder((4, 16, 32))
        whole = gathered(b, b.inputs[0], 2, 1)
        one = b.call(te.quantize.default, whole, ROWS)
        other = b.call(te.quantize.default, whole, E5M2)
        graph = b.returns(*b.read(one, 0, 1), *b.read(other, 0, 1, 2))
        assert fuse(graph, "forward", (NAME,)) == []
        assert gathers_left(graph) == [
            "the all-gather for quantize_default is in bfloat16: te.quantize to e5m2[row+column] reads it too, beside te.quantize to e4m3[row]",
            "the all-gather for quantize_default_1 is in bfloat16: te.quantize to e4m3[row] reads it too, beside te.quantize to e5m2[row+column]",
        ]
        b = Builder((4, 16, 32))
        whole = gathered(b, b.inputs[0], 2, 1)
        graph = b.returns(whole, *b.read(b.call(te.quantize.default, whole, ROWS), 0, 1))
        assert fuse(graph, "forward", (NAME,)) == []
        assert gathers_left(graph) == [
            "the all-gather for quantize_default is in bfloat16: the graph's caller reads it too, beside te.quantize to e4m3[row]"
        ]


def test_a_part_of_what_is_gathered() -> None:
    """The amax of the ranks' parts is none of a slice's."""
    with fake_cuda():
        b = Builder((16, 32))
        whole = gathered(b, b.inputs[0], 2, 0)
        first, _ = b.read(b.call(aten.split.Tensor, whole, 16), 0, 1)
        twice = b.call(aten.cat.default, [first, first])
        other = b.call(aten.slice.Tensor, whole, 0, 17, 32)
        overlapping = b.call(aten.cat.default, [b.call(aten.slice.Tensor, whole, 0, 0, 16), other])
        quantized = [b.call(te.quantize.default, each, ROWS) for each in (twice, overlapping)]
        graph = b.returns(*(item for each in quantized for item in b.read(each, 0, 1)))
        assert fuse(graph, "forward", (NAME,)) == [] == gathers_left(graph)


def test_what_is_not_gathered() -> None:
    """Parts that are inputs, that are made otherwise, and items of one operation with several results."""
    with fake_cuda():
        b = Builder((16, 32), (16, 32))
        norm = b.call(te.layer_norm.default, b.inputs[0], None, None, 1e-5)
        doubled = [b.call(aten.add.Tensor, x, x) for x in b.inputs]
        joined = [b.call(aten.cat.default, parts) for parts in (b.inputs, doubled, b.read(norm, 1, 2))]
        quantized = [b.call(te.quantize.default, each, ROWS) for each in joined]
        graph = b.returns(*(item for each in quantized for item in b.read(each, 0, 1)))
        assert fuse(graph, "forward", (NAME,)) == [] == gathers_left(graph)


def test_a_slice_of_all_is_none() -> None:
    """DTensors have such a slice behind a gather of more than 256 tokens, and one that drops padding behind an uneven one."""
    for kept in (32, 31):
        with fake_cuda():
            b = Builder((4, 16, 32))
            whole = b.call(aten.slice.Tensor, gathered(b, b.inputs[0], 2, 1), 1, 0, kept)
            graph = b.returns(*b.read(b.call(te.quantize.default, whole, BOTH), 0, 1, 2))
            assert fuse(graph, "forward", (NAME,)) == ([(NAME, 1)] if kept == 32 else [])
    assert gathers_left(graph) == [
        "the all-gather for quantize_default is in bfloat16: the ranks' parts are of different sizes, and some are padded"
    ]


def test_symbolic_sizes() -> None:
    """A rank's part of a batch and tokens that are not known when compiling."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    part = torch.empty(4, 16, 32, dtype=torch.bfloat16)
    sizes: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(
        dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.DYNAMIC, DimDynamic.STATIC]
    )
    with fake_cuda():
        b = Builder((4, 16, 32))
        mode: Any = torch._guards.detect_fake_mode(b.inputs[0].meta["val"])
        b.inputs[0].meta["val"] = mode.from_tensor(part, source=ConstantSource("x"), symbolic_context=sizes)
        whole = gathered(b, b.inputs[0], 2, 0)
        graph = b.returns(*b.read(b.call(te.quantize.default, whole, BOTH), 0, 1, 2))
        assert fuse(graph, "forward", (NAME,)) == [(NAME, 1)]
    inputs = [[torch.randn(3, 5, 32).bfloat16()] for _ in range(2)]
    expected = te.quantize(torch.cat([x for (x,) in inputs]), BOTH)
    for buffers in run_all_ranks(graph, inputs):
        assert_same(expected, buffers)
