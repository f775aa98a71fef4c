"""Storages: what the buffers of each format mean, by formulas of their own, and how a storage is taken apart and rebuilt."""

from __future__ import annotations

import pytest
import torch
from helpers.oracles.quantizer_cases import CONFIGURATIONS, QUANTIZERS, key, name, same_bits
from helpers.slow import slow_but

from te_dynamo import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    MXFP8TensorStorage,
    NVFP4Quantizer,
    QuantizedTensorStorage,
    Quantizer,
    TensorProto,
)
from te_dynamo.dialect.multiply import Operand
from te_dynamo.errors import QuantizationError
from te_dynamo.kernels.quantize import nvfp4
from te_dynamo.kernels.quantize.mxfp8 import dequantize_mxfp8_reference

SHAPE = (3, 20, 84)
ROWS, COLUMNS = 60, 84


def values(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(SHAPE, generator=generator) * 2 ** torch.randint(-6, 7, SHAPE, generator=generator)).to(dtype)


def storage(quantizer: Quantizer, dtype: torch.dtype = torch.bfloat16) -> QuantizedTensorStorage:
    return quantizer.quantize(values(dtype), key()).to_storage()


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=name)
def test_flatten_and_rebuild(quantizer: Quantizer) -> None:
    held = storage(quantizer)
    names, metadata = held.__tensor_flatten__()
    assert names == list(quantizer._describe_buffers(SHAPE)) and set(names) <= set(held._FLATTEN_TENSOR_BUFFERS)
    rebuilt = QuantizedTensorStorage.__tensor_unflatten__({n: getattr(held, n) for n in names}, metadata)
    assert type(rebuilt) is type(held) and metadata["cls"] == type(held).__qualname__
    assert (rebuilt.shape, rebuilt.dtype, rebuilt.quantizer) == (SHAPE, torch.bfloat16, quantizer)
    assert same_bits(rebuilt.dequantize(), held.dequantize())
    assert all(getattr(held, n) is None for n in set(held._FLATTEN_TENSOR_BUFFERS) - set(names))


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=name)
def test_a_missing_buffer_is_named(quantizer: Quantizer) -> None:
    held = storage(quantizer)
    names, metadata = held.__tensor_flatten__()
    for missing in names:
        buffers = {n: getattr(held, n) for n in names if n != missing}
        with pytest.raises(QuantizationError, match=rf"buffer '{missing}' is missing .* shape \(3, 20, 84\)"):
            QuantizedTensorStorage.__tensor_unflatten__(buffers, metadata)


def test_a_storage_of_another_format() -> None:
    """One scale a tensor and one a block have equal names of buffers: read as the other they are wrong numbers."""
    held = storage(Float8CurrentScalingQuantizer())
    with pytest.raises(
        QuantizationError, match=r"MXFP8TensorStorage: e4m3\[row\+column\] is held by Float8TensorStorage"
    ):
        MXFP8TensorStorage(held.named_buffers(), SHAPE, torch.bfloat16, Float8CurrentScalingQuantizer())
    metadata = held.quantizer.create_metadata(SHAPE, torch.bfloat16)
    with pytest.raises(
        QuantizationError, match="no quantized storage is named 'Float7'; there is Float8BlockTensorStorage"
    ):
        QuantizedTensorStorage.__tensor_unflatten__(held.named_buffers(), metadata | {"cls": "Float7"})
    with pytest.raises(TypeError, match=r"te_dynamo.quantized.storages.float8 has a Float8TensorStorage"):
        type("Float8TensorStorage", (QuantizedTensorStorage,), {})
    assert type(storage(Float8CurrentScalingQuantizer())) is type(held)


@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.slow), "aot_eager"])
@pytest.mark.parametrize("quantizer", slow_but(5, CONFIGURATIONS), ids=name)
def test_rebuilt_inside_a_graph(quantizer: Quantizer, backend: str) -> None:
    """By the class's name, and with nothing but tensors going in and out."""

    def rebuild(buffers: list[torch.Tensor]) -> torch.Tensor:
        proto = TensorProto(SHAPE, torch.bfloat16, quantizer)
        named = dict(zip(proto.inner_names(), buffers, strict=True))
        return QuantizedTensorStorage.from_metadata(named, proto.create_metadata()).dequantize()

    held = storage(quantizer)
    compiled = torch.compile(rebuild, fullgraph=True, backend=backend)
    assert same_bits(compiled(held.buffers()), held.dequantize())


@pytest.mark.parametrize("quantizer", CONFIGURATIONS, ids=name)
def test_usages(quantizer: Quantizer) -> None:
    held = storage(quantizer)
    rows, columns = held.with_usage(columnwise=False), held.with_usage(rowwise=False)
    assert set(map(id, rows.buffers())) <= set(map(id, held.buffers()))
    for one, there, missing in ((rows, "rowwise", "columnwise"), (columns, "columnwise", "rowwise")):
        alone = storage(one.quantizer)
        assert all(map(same_bits, one.buffers(), alone.buffers()))
        assert one.with_usage(**{there: True}).quantizer == one.quantizer
        with pytest.raises(QuantizationError, match=rf"{missing} usage of .* shape \(3, 20, 84\) was never allocated"):
            one.with_usage(**{missing: True})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=name)
def test_values_are_near(quantizer: Quantizer, dtype: torch.dtype) -> None:
    """Within a step of the format: half a step for rounding to nearest, relative to the largest of the block."""
    found = storage(quantizer, dtype).dequantize()
    assert (found.shape, found.dtype) == (SHAPE, dtype)
    x = values(dtype).float()
    steps = {"nvfp4": 2 / 6, "mxfp8": 2**-3}.get(quantizer.describe().split()[0].split("[")[0], 2**-3)
    e5m2 = getattr(quantizer, "fp8_format", "") == "e5m2"
    assert (found.float() - x).abs().max() <= x.abs().max() * steps * (2 if e5m2 else 1)
    assert torch.nn.functional.cosine_similarity(found.float().flatten(), x.flatten(), dim=0) > 0.98


def test_block_scales() -> None:
    """Each value times the scale of its block, looked up one by one."""
    for quantizer in (Float8BlockQuantizer(), Float8BlockQuantizer(block_dims=2)):
        two_d = quantizer.block_dims == 2
        for held in (storage(quantizer.with_usage(columnwise=False)), storage(quantizer.with_usage(rowwise=False))):
            found = held.dequantize().reshape(ROWS, COLUMNS)
            for r, c in ((0, 0), (59, 83), (17, 80), (31, 3)):
                if held.quantizer.rowwise:
                    data, scale = (
                        held.data[r, c],
                        held.scale_inv[r // 128, c // 128] if two_d else held.scale_inv[c // 128, r],
                    )
                else:
                    data = held.transpose[c, r]
                    scales = held.columnwise_scale_inv
                    scale = scales[c // 128, r // 128] if two_d else scales[r // 128, c]
                assert found[r, c] == (data.float() * scale).to(torch.bfloat16)


def test_mxfp8_is_what_its_gemm_reads() -> None:
    rows = storage(MXFP8Quantizer(columnwise=False))
    expected = dequantize_mxfp8_reference(rows.data, rows.scale_inv, False, torch.bfloat16)
    assert same_bits(rows.dequantize(), expected.reshape(SHAPE))
    columns = storage(MXFP8Quantizer(rowwise=False))
    expected = dequantize_mxfp8_reference(columns.columnwise_data, columns.columnwise_scale_inv, True, torch.bfloat16)
    assert same_bits(columns.dequantize(), expected.reshape(SHAPE))
    columns = storage(MXFP8Quantizer(rowwise=False, scale_block=128))
    expected = dequantize_mxfp8_reference(columns.columnwise_data, columns.columnwise_scale_inv, False, torch.bfloat16)
    assert same_bits(columns.dequantize(), expected[:, :ROWS].t().reshape(SHAPE))


@pytest.mark.parametrize("scale_block", [32, 128])
@pytest.mark.parametrize("swizzled", [False, True])
def test_mxfp8_in_square_blocks_has_one_value_of_each(scale_block: int, swizzled: bool) -> None:
    """Rows and columns dequantize to the same tensor, and columns that are made of rows are the buffers that quantizing makes."""
    quantizer = MXFP8Quantizer(scale_block=scale_block, block_dims=2, swizzled=swizzled)
    for shape in ((35, 50), (160, 288), (256, 128), (1, 1)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * torch.logspace(-9, 9, shape[1])
        held = quantizer.quantize(x)
        rows, columns = held.with_usage(columnwise=False), held.with_usage(rowwise=False)
        assert torch.equal(rows.dequantize(), columns.dequantize())
        assert len(held.buffers()) == (3 if scale_block == 32 else 4), "codes of 32x32 are kept once"
        made, wanted = (Operand.of(each.quantizer, each.buffers(), columnwise=True) for each in (rows, held))
        assert made.quantizer == wanted.quantizer
        assert all(map(same_bits, made.tensors, wanted.tensors))


def test_mxfp8_scale_codes() -> None:
    """2^(code - 127) for every code: 0 is a denormal, 255 NaN."""
    from te_dynamo.kernels.layouts.mxfp8 import powers_of_two

    found = powers_of_two(torch.arange(256).to(torch.uint8))
    assert found[:255].tolist() == [2.0 ** (code - 127) for code in range(255)] and found[255].isnan()


def test_nvfp4_is_what_its_gemm_reads() -> None:
    for quantizer in (NVFP4Quantizer(columnwise=False), NVFP4Quantizer(columnwise=False, block_dims=2)):
        held = storage(quantizer)
        expected = nvfp4.dequantize_nvfp4_reference(held.data, held.scale_inv, held.amax, COLUMNS, torch.bfloat16)
        assert same_bits(held.dequantize(), expected.reshape(SHAPE))
    for hadamard in (False, True):
        held = storage(NVFP4Quantizer(rowwise=False, hadamard=hadamard))
        buffers = held.columnwise_data, held.columnwise_scale_inv, held.columnwise_amax
        expected = nvfp4.dequantize_nvfp4_reference(*buffers, 64, torch.float32)
        if hadamard:
            expected = nvfp4.hadamard_reference(expected, inverse=True)
        assert same_bits(held.dequantize(), expected[:, :ROWS].t().reshape(SHAPE).to(torch.bfloat16))


def test_e2m1_codes() -> None:
    from te_dynamo.quantized.storages.nvfp4 import _e2m1

    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    found = _e2m1(torch.arange(16).to(torch.uint8))
    assert found.tolist() == magnitudes + [-m for m in magnitudes] and bool(found[8].signbit())


def test_prints_in_one_line() -> None:
    held = storage(Float8BlockQuantizer())
    assert repr(held) == "Float8BlockTensorStorage((3, 20, 84), torch.bfloat16, e4m3 1x128[row+column])"
