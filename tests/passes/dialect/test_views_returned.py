"""What a graph gives back is the caller's to write, as torch's own results are, also where a GEMM's result has another shape."""

from __future__ import annotations

import pytest
import torch
from torch import nn


@pytest.mark.parametrize("codegen", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_caller_writes_several_results(codegen: str) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(64, 32, bias=False), nn.Linear(64, 32)

        def forward(self, x):
            return self.a(x), self.b(x), x @ x.transpose(1, 2)

    torch._dynamo.reset()
    results = torch.compile(Two(), backend="te", options={"codegen": codegen})(
        torch.randn(2, 16, 64, requires_grad=True)
    )
    for result in results:
        result.mul_(-3)
    sum(result.sum() for result in results).backward()
