"""Fused and unfused halves on a GPU: the same outputs to the bit, the same gradients to the rounding of a sum.

The graphs as they are: Inductor's own kernels round less often where they hold more of a graph.
"""

from __future__ import annotations

import pytest
import torch
from helpers.kernels.kernel_cases import gpu, needs_cuda
from helpers.models.residual_models import NAMES, GeluResidual, SwigluResidual
from torch import Tensor, nn

pytestmark = [gpu, needs_cuda]


def run(model: type[nn.Module], fusions: list[str], rows: int) -> tuple[Tensor, dict[str, Tensor]]:
    """(output, gradients) of one step, the same weights and inputs each time."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = model().to("cuda", torch.bfloat16)
    x = torch.randn(rows, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = torch.compile(module, backend="te", options={"fusions": fusions, "codegen": "eager"})(x)
    y.backward(torch.randn_like(y))
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()} | {"x": x.grad}
    assert all(gradient is not None for gradient in gradients.values())
    return y.detach(), gradients  # type: ignore[return-value]


@pytest.mark.parametrize("rows", [19, 512])
@pytest.mark.parametrize("model", [GeluResidual, SwigluResidual])
def test_all_four_combinations_agree(model: type[nn.Module], rows: int) -> None:
    output, gradients = run(model, [], rows)
    for forward in (False, True):
        for backward in (False, True):
            y, found = run(model, NAMES["forward"] * forward + NAMES["backward"] * backward, rows)
            assert torch.equal(y, output)
            for name, gradient in found.items():
                error = (gradient.float() - gradients[name].float()).norm() / gradients[name].float().norm()
                assert error < 5e-3, (name, float(error))
