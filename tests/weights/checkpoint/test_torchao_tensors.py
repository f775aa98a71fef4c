"""Weights that are tensors of torchao's are multiplied by their codes and scales as they are."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.weights.checkpoint_files import net
from torch import Tensor, nn

import te_dynamo
from te_dynamo.weights.checkpoint.torchao import as_quantized

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:(?!te_dynamo)")]
ao = pytest.importorskip("torchao.quantization")
mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")


def _float8(granularity: Any, **more: Any) -> Callable[[Tensor], Tensor]:
    return lambda weight: ao.Float8Tensor.from_hp(weight, granularity=granularity, **more)


def _mx(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    emulated = mx.KernelPreference.EMULATED
    inputs = mx.QuantizeTensorToMXKwargs(elem_dtype=dtype, block_size=32, kernel_preference=emulated)
    more = {"kernel_preference": emulated, "act_quant_kwargs": inputs}
    return lambda weight: mx.MXTensor.to_mx(weight, dtype, 32, **more)


KINDS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "tensor": ("float8_current_scaling", _float8(ao.PerTensor())),
    "row": ("float8_rowwise", _float8(ao.PerRow())),
    "block": ("float8_block_scaling(power_of_two_scales=False)", _float8(ao.PerBlock([128, 128]))),
    "mxfp8": ("mxfp8", _mx(torch.float8_e4m3fn)),
    "mxfp4": ("mxfp8", _mx(torch.float4_e2m1fn_x2)),
    "nvfp4": (
        "nvfp4(weight_block_dims=1)",
        lambda weight: nvfp4.NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=weight.float().abs().max() / (448 * 6)),
    ),
}


def converted(make: Callable[[Tensor], Tensor], model: nn.Module | None = None) -> Any:
    model = (model or net()).requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(make(module.weight.data), requires_grad=False)
    return model


def compiled(model: nn.Module, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend="te", fullgraph=True, options={"codegen": "eager", **options})


X = torch.randn(32, 256, generator=torch.manual_seed(2)).bfloat16()


@pytest.mark.parametrize("kind", KINDS)
def test_codes_and_scales_are_multiplied_as_they_are(kind: str) -> None:
    """The bits of the same weight as a QuantizedTensor; explain says so, and nothing warns of torchao."""
    recipe, make = KINDS[kind]
    theirs, ours = converted(make), converted(make)
    for module in (ours.mlp[0], ours.mlp[2]):  # 384 and 256 rows: nothing to pad
        held = as_quantized(module.weight)
        torch.testing.assert_close(
            held.dequantize(), module.weight.dequantize(), rtol=2**-7 if kind == "nvfp4" else 0, atol=0
        )
        if kind != "mxfp4":
            assert held._data.data_ptr() == module.weight.qdata.data_ptr()
        module.weight = nn.Parameter(held, requires_grad=False)
    with warnings.catch_warnings(), te_dynamo.capture() as graphs:
        warnings.filterwarnings("error", message="te_dynamo: (linears|no linear)")
        y = compiled(theirs)(X)
    linears = [match for match in graphs.reports[0].matches if match.kind == "linear"]
    assert [match.recipe for match in linears] == [recipe] * 2
    assert torch.equal(y, compiled(ours)(X))
    explained = te_dynamo.explain(theirs, X)
    assert explained.coverage == 1.0 and {row.stored for row in explained.linears} == {f"torchao ({kind})"}
    te_dynamo.freeze(theirs)  # nothing to do


def test_by_inductor() -> None:
    model = converted(KINDS["row"][1])
    expected = compiled(model)(X)
    torch.testing.assert_close(torch.compile(model, backend="te")(X), expected, rtol=0.02, atol=0.02)


def test_an_input_that_learns() -> None:
    """dgrad multiplies the dequantized weight where no columns are there."""
    for kind in ("tensor", "row"):
        linear = converted(KINDS[kind][1], nn.Linear(256, 384, bias=False).bfloat16())
        x = X.clone().requires_grad_()
        y = compiled(linear)(x)
        y.sum().backward()
        expected = torch.ones_like(y) @ as_quantized(linear.weight).dequantize()
        torch.testing.assert_close(x.grad, expected, rtol=0.05, atol=0.5)


def test_what_is_not_read_stays_with_its_reason() -> None:
    """As torchao computes it, which a rule asks for too."""
    columns = _float8(ao.PerRow(), float8_dtype=torch.float8_e5m2)
    model = converted(columns)
    (first, *_) = te_dynamo.explain(model, X).linears
    assert first.reason.startswith(
        "its weight is a Float8Tensor of torchao: 'Float8Tensor' is torch.float8_e5m2; row has torch.float8_e4m3fn"
    )
    integers = nn.Sequential(nn.Linear(256, 64)).bfloat16()
    ao.quantize_(integers, ao.Int8WeightOnlyConfig())
    (row,) = te_dynamo.explain(integers, X).linears
    assert row.reason.endswith("is not known; known are 'Float8Tensor', 'MXTensor', 'NVFP4Tensor'")
    with pytest.warns(UserWarning, match="linears of torchao are in the model"):
        compiled(converted(columns))(X)
    model = converted(KINDS["row"][1])
    assert torch.equal(compiled(model, rules=[("", None)])(X), model(X))
    explained = te_dynamo.explain(model, X, rules=[("mlp.0", None)])
    assert [row.stored for row in explained.linears] == ["", "torchao (row)"]
