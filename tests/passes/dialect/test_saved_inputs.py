"""Of an input whose view backward reads forward saves the input."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from te_dynamo.dialect.memory import is_view
from te_dynamo.testing import capture_on_fake_cuda


class Head(nn.Linear):
    """Forward and backward read one view of each half of x; backward gets the weight by way of two transpositions."""

    def forward(self, x: Tensor) -> Tensor:
        half, other = x.chunk(2, -1)
        return super().forward(half.relu()) * other


def test_views_of_inputs_are_made_again() -> None:
    graphs = capture_on_fake_cuda(
        lambda: Head(64, 64, bias=False),
        lambda device: (torch.empty(2, 16, 128, device=device, requires_grad=True),),
        options={"recipe": None},
    )
    saved = graphs.graph("forward").output_node().args[0][1:]
    assert sum(node.op == "placeholder" for node in saved) == 2  # x and the weight
    assert not any(is_view(node) and node.args[0].op == "placeholder" for node in saved)
