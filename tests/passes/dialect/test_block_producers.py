"""Gradients that are written in blocks, or in rows, at once: what is done for one scale a tensor alone leaves them as they are."""

from __future__ import annotations

import pytest
import torch
from helpers.graphs.graph_builder import E5M2, Builder, te
from helpers.kernels.kernel_cases import assert_same_bits
from helpers.models.snapshot_models import compiled_run
from torch import nn

from te_dynamo.errors import QuantizationError
from te_dynamo.lowering.in_place import launches_in_place
from te_dynamo.passes.dialect.fuser import fuse
from te_dynamo.passes.dialect.low_memory import make_columns_late
from te_dynamo.quantized.quantizers import Float8BlockQuantizer, Float8RowwiseQuantizer, MXFP8Quantizer, Quantizer
from te_dynamo.recipe import Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling, Recipe
from te_dynamo.testing import capture_on_fake_cuda, fake_cuda

BLOCKS = (
    Float8BlockQuantizer(),
    MXFP8Quantizer(),
    MXFP8Quantizer(scale_block=128),
    Float8RowwiseQuantizer(),
)


@pytest.mark.parametrize("quantizer", BLOCKS, ids=lambda quantizer: quantizer.describe())
def test_columns_are_made_with_the_rows(quantizer: Quantizer) -> None:
    """Those of blocks and rows are no transposition of the rows."""
    with fake_cuda():
        moved = []
        for each in (quantizer, E5M2):
            b = Builder((256, 128), (256, 128))
            dx = b.call(te.activation_backward.default, *b.inputs, "gelu")
            names = each.buffer_names()
            graph = b.returns(*b.read(b.call(te.quantize.default, dx, each), *range(len(names))))
            assert fuse(graph, "backward") != []
            moved.append(make_columns_late(graph))
            assert len(graph.find_nodes(op="call_function", target=te.transpose.default)) == moved[-1]
    assert moved == [0, 1]


@pytest.mark.parametrize("quantizer", BLOCKS, ids=lambda quantizer: quantizer.describe())
def test_codes_do_not_take_dys_place(quantizer: Quantizer) -> None:
    with fake_cuda():
        b = Builder((256, 128), (256, 128), (256, 128))
        rows = quantizer.with_usage(columnwise=False)
        dy = b.call(te.activation.default, b.inputs[0], "relu")
        node = b.call(te.gated_backward_quantize_halves.default, dy, *b.inputs[1:], "silu", rows, False, True)
        b.returns(*b.read(node, 0, 1))
        assert launches_in_place(node) is None


@pytest.mark.parametrize("quantizer", BLOCKS, ids=lambda quantizer: quantizer.describe())
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_two_gradients_in_rows_or_blocks_are_no_stack(device: str, quantizer: Quantizer) -> None:
    gradients = [torch.empty(128, 128, dtype=torch.bfloat16, device=device) for _ in range(3)]
    with pytest.raises(QuantizationError, match="stacked=True takes one scale a tensor; without it each"):
        te.gated_backward_quantize.default(*gradients, "silu", quantizer, False, True)


@pytest.mark.parametrize("quantizer", BLOCKS[:-1], ids=lambda quantizer: quantizer.describe())
def test_two_tensors_in_blocks_are_their_concatenation(quantizer: Quantizer) -> None:
    torch.manual_seed(0)
    two = [torch.randn(40, 128, dtype=torch.bfloat16) for _ in range(2)]
    whole = te.quantize.default(torch.cat(two, 1), quantizer)
    assert_same_bits(te.quantize_stacked.default(two, quantizer, True), whole)


class Residual(nn.Module):
    """x + down(relu(up(x)))."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


@pytest.mark.parametrize(
    "recipe, added",
    [
        (Float8BlockScaling(), "h200 b200 rtx5090 l40s"),
        (MXFP8BlockScaling(scale_block=128), "b200 rtx5090 l40s"),
        (MXFP8BlockScaling(), "b200 rtx5090"),  # others multiply the values
        (NVFP4BlockScaling(), ""),
    ],
    ids=str,
)
def test_a_residual_stream_is_added_where_a_kernel_adds(recipe: Recipe, added: str) -> None:
    found = []
    for device in ("h200", "b200", "rtx5090", "l40s"):
        torch._dynamo.reset()
        graphs = capture_on_fake_cuda(
            lambda: Residual(4096).bfloat16(),
            lambda device: (torch.empty(8192, 4096, dtype=torch.bfloat16, device=device, requires_grad=True),),
            device=device,
            options={"recipe": recipe, "codegen": "eager"},
        )
        found += [device] * graphs["forward"].count(", addend=x")
    assert found == added.split()


@pytest.mark.parametrize("recipe", [Float8BlockScaling, MXFP8BlockScaling])
def test_sums_in_gemms_change_no_bit(recipe: type[Recipe]) -> None:
    options = {"codegen": "eager", "recipe": recipe()}
    x = torch.randn(40, 128, dtype=torch.bfloat16)
    fused, apart = (compiled_run(Residual, {**options, "fusions": fusions})(x) for fusions in (True, False))
    assert all(map(torch.equal, fused.outputs, apart.outputs))
    assert all(torch.equal(value, apart.gradients[name]) for name, value in fused.gradients.items())
