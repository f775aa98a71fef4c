"""TensorProto, quantizers and storages: descriptions equal what is really made."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import te_dynamo
from te_dynamo import Float8CurrentScalingQuantizer, QuantizedTensorStorage, TensorProto, to_tensor_proto
from te_dynamo.errors import QuantizationError
from te_dynamo.quantizers import Quantizer

USAGES = [(True, True), (True, False), (False, True)]


def quantizer(rowwise: bool = True, columnwise: bool = True, fp8_format: str = "e4m3") -> Float8CurrentScalingQuantizer:
    return Float8CurrentScalingQuantizer(rowwise=rowwise, columnwise=columnwise, fp8_format=fp8_format)


def layout(buffers: list[torch.Tensor]) -> list[tuple[torch.Size, torch.dtype, tuple[int, ...]]]:
    return [(b.shape, b.dtype, b.stride()) for b in buffers]


@settings(max_examples=25, deadline=None)
@given(
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple),
    usage=st.sampled_from(USAGES),
    fp8_format=st.sampled_from(["e4m3", "e5m2"]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
)
def test_described_layout_is_the_real_one(shape, usage, fp8_format, dtype) -> None:
    q = quantizer(*usage, fp8_format)
    real = torch.ops.te.quantize(torch.randn(shape).to(dtype), q)
    proto = TensorProto(shape, dtype, q)
    assert layout(proto.create_buffers()) == layout(real)
    assert len(proto.inner_names()) == len(real)


@pytest.mark.parametrize("usage", USAGES)
def test_create_tensor_compiles_whole(usage: tuple[bool, bool]) -> None:
    q = quantizer(*usage)

    def make(x: torch.Tensor) -> list[torch.Tensor]:
        return list(TensorProto(x.shape, x.dtype, q).create_tensor().buffers())

    x = torch.randn(24, 32)
    assert layout(torch.compile(make, fullgraph=True, backend="eager")(x)) == layout(make(x))


def test_plain_proto_makes_a_plain_tensor() -> None:
    proto = to_tensor_proto(torch.zeros(3, 4, dtype=torch.float16, requires_grad=True))
    assert not proto.is_quantized and proto.inner_names() == ()
    made = proto.create_tensor()
    assert (made.shape, made.dtype, made.requires_grad) == ((3, 4), torch.float16, True)
    with pytest.raises(QuantizationError, match="plain tensor"):
        proto.update_usage(rowwise_usage=False)


def test_quantized_round_trip_and_flatten() -> None:
    x = torch.randn(20, 48, dtype=torch.bfloat16)
    held = quantizer().quantize(x)
    proto = to_tensor_proto(held)
    assert proto == TensorProto((20, 48), torch.bfloat16, quantizer(), device=x.device)
    names, metadata = held.__tensor_flatten__()
    assert names == ["data", "transpose", "scale_inv"]
    rebuilt = QuantizedTensorStorage.__tensor_unflatten__({n: getattr(held, n) for n in names}, metadata)
    assert type(rebuilt) is te_dynamo.Float8TensorStorage
    torch.testing.assert_close(rebuilt.dequantize(), held.dequantize(), rtol=0, atol=0)
    # e4m3 keeps three mantissa bits: a relative error of at most 2^-4, and half a subnormal step near zero.
    bound = x.float().abs() * 2**-4 + x.abs().max().float() / 448 * 2**-10
    assert ((rebuilt.dequantize().float() - x.float()).abs() <= bound * 1.01).all()


def test_column_only_dequantizes_to_the_same_values() -> None:
    x = torch.randn(20, 48)
    rows, columns = quantizer(True, False).quantize(x), quantizer(False, True).quantize(x)
    torch.testing.assert_close(columns.dequantize(), rows.dequantize(), rtol=0, atol=0)


def test_update_usage_touches_only_the_protos_own_quantizer() -> None:
    q = quantizer()
    proto = TensorProto((8, 16), torch.bfloat16, q)
    proto.update_usage(columnwise_usage=False)
    assert proto.inner_names() == ("data", "scale_inv")
    assert q.columnwise
    with pytest.raises(QuantizationError, match="neither"):
        proto.update_usage(rowwise_usage=False)


def test_unflatten_with_a_missing_buffer_names_it() -> None:
    held = quantizer().quantize(torch.randn(4, 16))
    names, metadata = held.__tensor_flatten__()
    buffers = {n: getattr(held, n) for n in names if n != "transpose"}
    with pytest.raises(QuantizationError, match=r"'transpose' is missing.*shape \(4, 16\)"):
        QuantizedTensorStorage.__tensor_unflatten__(buffers, metadata)


def test_quantizers_are_values() -> None:
    assert quantizer() == quantizer() and hash(quantizer()) == hash(quantizer())
    assert quantizer() != quantizer(fp8_format="e5m2")
    with pytest.raises(dataclasses.FrozenInstanceError):
        quantizer().rowwise = False  # type: ignore[misc]


def test_bad_configuration_is_an_error_at_once() -> None:
    with pytest.raises(QuantizationError, match="e4m3"):
        quantizer(fp8_format="e3m4")
    with pytest.raises(QuantizationError, match="amax_epsilon"):
        Float8CurrentScalingQuantizer(amax_epsilon=-1.0)
    with pytest.raises(TypeError, match="compare equal"):
        Float8CurrentScalingQuantizer(amax_epsilon=object())  # type: ignore[arg-type]
    with pytest.raises(QuantizationError, match="rank 0"):
        TensorProto((), torch.float32, quantizer())


def test_an_operand_that_was_never_allocated_is_an_error() -> None:
    q: Quantizer = quantizer(True, False)
    with pytest.raises(QuantizationError, match=r"columnwise data .* never allocated"):
        q.operand(torch.ops.te.quantize(torch.randn(4, 16), q), columnwise=True)
