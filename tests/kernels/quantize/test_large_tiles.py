"""The tiles of large tensors, on small ragged ones: the same bits as the tiles chosen for those.

The other GPU tests of the fused kernels use tensors that are too small for these tiles.
"""

from __future__ import annotations

import pytest
import torch
from helpers.kernels.kernel_cases import DTYPES, assert_same_bits, gpu, make_input, needs_cuda

from te_dynamo.kernels.activation import activation, gated
from te_dynamo.kernels.layouts.tensor import TensorForm
from te_dynamo.kernels.norm import kernels, norm
from te_dynamo.kernels.produce.tensor import LARGE_TILES
from te_dynamo.kernels.quantize import current as quantize

pytestmark = [gpu, needs_cuda]

SHAPES = [(17, 304), (303, 4096), (4096, 48)]
BOTH = TensorForm(torch.float8_e4m3fn, True, True, False, 0.0)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def tensors(count: int, shape: tuple[int, int], dtype: torch.dtype) -> list[torch.Tensor]:
    return [make_input("normal", shape, dtype, "cuda", seed=seed) for seed in range(count)]


@pytest.mark.parametrize("shape", SHAPES)
def test_quantize(shape: tuple[int, int], dtype: torch.dtype) -> None:
    (x,) = tensors(1, shape, dtype)
    assert_same_bits(quantize.quantize(x, BOTH, None, quantize.CAST_TILE), quantize.quantize_reference(x, BOTH))


@pytest.mark.parametrize("shape", SHAPES)
def test_norms(shape: tuple[int, int], dtype: torch.dtype) -> None:
    (x,), weight = tensors(1, shape, dtype), make_input("normal", shape[-1:], dtype, "cuda", seed=9)
    y, rstd = norm.rms_norm(x, weight, 1e-5, True, False)
    fused = norm.rms_norm_quantize(x, weight, 1e-5, True, False, BOTH, True, tile=kernels.CAST_TILE)
    assert_same_bits(fused, [y, rstd, *quantize.quantize_reference(y, BOTH)])
    y, mean, rstd = norm.layer_norm(x, weight, weight, 1e-5)
    fused = norm.layer_norm_quantize(x, weight, weight, 1e-5, BOTH, True, tile=kernels.CAST_TILE)
    assert_same_bits(fused, [y, mean, rstd, *quantize.quantize_reference(y, BOTH)])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", activation.KINDS)
def test_activations(kind: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, dy = tensors(2, shape, dtype)
    y, dx = activation.activation(x, kind), activation.activation_backward(dy, x, kind)
    fused = activation.activation_quantize(x, kind, BOTH, True, LARGE_TILES["activation"])
    assert_same_bits(fused, [y, *quantize.quantize_reference(y, BOTH)])
    fused = activation.activation_backward_quantize(dy, x, kind, BOTH, True, False, LARGE_TILES["activation_backward"])
    assert_same_bits(fused, [dx, *quantize.quantize_reference(dx, BOTH)])


@pytest.mark.parametrize("shape", SHAPES)
def test_swiglu(shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate, up, dy = tensors(3, shape, dtype)
    y, (dgate, dup) = gated.gated(gate, up, "silu"), gated.gated_backward(dy, gate, up, "silu")
    fused = gated.gated_quantize(gate, up, "silu", BOTH, True, tile=LARGE_TILES["gated"])
    assert_same_bits(fused, [y, *quantize.quantize_reference(y, BOTH)])
    fused = gated.gated_backward_quantize(dy, gate, up, "silu", BOTH, True, False, LARGE_TILES["gated_backward"])
    expected = [*quantize.quantize_reference(dgate, BOTH), *quantize.quantize_reference(dup, BOTH)]
    assert_same_bits(fused, [dgate, dup, *expected])
