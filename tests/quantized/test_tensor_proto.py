"""TensorProto: what it describes is what is really made, eagerly, under a fake mode and in a graph."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from helpers.oracles.quantizer_cases import CONFIGURATIONS, QUANTIZERS, USAGES, name
from helpers.slow import slow_but
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from te_dynamo import (
    Float8CurrentScalingQuantizer,
    QuantizedTensor,
    QuantizedTensorStorage,
    Quantizer,
    TensorProto,
    to_tensor_proto,
)
from te_dynamo._compat import torch_version
from te_dynamo.errors import InputError, QuantizationError
from te_dynamo.quantized.quantize import quantize_tensor
from te_dynamo.testing.fake_cuda import fake_cuda

# Around every boundary that a layout rounds up to: 4, 16, 32, 128.
SIZES = st.sampled_from([1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33, 48, 100, 127, 128, 129, 160, 256, 260])
SHAPES = st.one_of(
    st.tuples(SIZES),
    st.tuples(SIZES, SIZES),
    st.tuples(st.integers(0, 3), st.integers(1, 40), SIZES),
    st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 20), SIZES),
)
DTYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])


def named(proto: TensorProto, buffers: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(zip(proto.inner_names(), buffers, strict=True))


def check_all_ways(quantizer: Quantizer, shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> None:
    """The layout of what te.quantize, its fake and create_tensor make, against the proto."""
    x = torch.randn(shape).to(dtype).to(device)
    proto = TensorProto(shape, dtype, quantizer, device=x.device)
    proto.check_layout(named(proto, quantize_tensor(x, quantizer)))
    proto.check_layout(proto.create_tensor().named_buffers())
    with FakeTensorMode() as mode:
        proto.check_layout(named(proto, quantize_tensor(mode.from_tensor(x), quantizer)))
        proto.check_layout(proto.create_tensor().named_buffers())


@settings(max_examples=60, deadline=None)
@given(shape=SHAPES, quantizer=st.sampled_from(QUANTIZERS), dtype=DTYPES)
def test_the_described_layout_is_the_real_one(shape: tuple[int, ...], quantizer: Quantizer, dtype: torch.dtype) -> None:
    check_all_ways(quantizer, shape, dtype)


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=name)
@pytest.mark.parametrize("shape", [(1, 32), (128, 128), (303, 300), (2, 128, 272)])
def test_the_layout_of_every_quantizer_and_usage(quantizer: Quantizer, shape: tuple[int, ...]) -> None:
    check_all_ways(quantizer, shape, torch.bfloat16)


@pytest.mark.gpu
@settings(max_examples=100, deadline=None)
@given(shape=SHAPES.filter(lambda shape: 0 not in shape), quantizer=st.sampled_from(QUANTIZERS), dtype=DTYPES)
def test_the_layout_on_the_gpu(shape: tuple[int, ...], quantizer: Quantizer, dtype: torch.dtype) -> None:
    check_all_ways(quantizer, shape, dtype, "cuda")


@pytest.mark.one_fast_case
@pytest.mark.parametrize(
    "backend",
    [pytest.param("eager", marks=pytest.mark.slow), "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("configuration", slow_but(2, CONFIGURATIONS), ids=name)
def test_the_layout_in_a_graph(configuration: Quantizer, backend: str) -> None:
    """What a compiled function returns, of both: Inductor's own check of sizes and strides runs too."""

    def run(x: torch.Tensor) -> tuple[QuantizedTensor, torch.Tensor]:
        proto = TensorProto(x.shape, x.dtype, quantizer, device=x.device)
        return quantizer.quantize(x), proto.create_tensor()

    for usage in USAGES:
        quantizer = configuration.with_usage(*usage)
        torch._dynamo.reset()
        compiled = torch.compile(run, fullgraph=True, backend=backend)
        for shape in ((20, 48), (3, 43, 129)):
            proto = TensorProto(shape, torch.bfloat16, quantizer, device=torch.device("cpu"))
            for made in compiled(torch.randn(shape).to(torch.bfloat16)):
                assert type(made) is QuantizedTensor and to_tensor_proto(made) == proto
                proto.check_layout(made.named_buffers())


@settings(max_examples=10, deadline=None)
@given(shapes=st.lists(st.tuples(SIZES, SIZES), min_size=2, max_size=3), quantizer=st.sampled_from(QUANTIZERS))
def test_create_tensor_in_a_graph_of_any_shape(shapes: list[tuple[int, int]], quantizer: Quantizer) -> None:
    torch._dynamo.reset()
    create = torch.compile(
        lambda x: TensorProto(x.shape, x.dtype, quantizer).create_tensor().buffers(),
        fullgraph=True,
        backend="eager",
        dynamic=True,
    )
    for shape in shapes:
        proto = TensorProto(shape, torch.float32, quantizer)
        proto.check_layout(named(proto, create(torch.empty(shape))))


# The check itself: it names the slot and the fact.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b | {"data": b["data"][:5]}, r"buffer 'data' has shape \(5, 48\), expected \(20, 48\)"),
        (
            lambda b: b | {"scale_inv": b["scale_inv"].double()},
            r"buffer 'scale_inv' has dtype torch.float64, expected torch.float32",
        ),
        (
            lambda b: b | {"data": b["data"].t().contiguous().t()},
            r"buffer 'data' has stride \(1, 20\), expected the contiguous one",
        ),
        (lambda b: b | {"transpose": b["transpose"].to("meta")}, r"buffer 'transpose' has device meta, expected cpu"),
        (
            lambda b: {n: b[n] for n in ("transpose", "data", "scale_inv")},
            r"expected the buffers \['data', 'transpose'",
        ),
        (lambda b: {n: b[n] for n in ("data", "scale_inv")}, r"got \['data', 'scale_inv'\]"),
    ],
)
def test_a_wrong_layout_is_named(change: Any, message: str) -> None:
    held = Float8CurrentScalingQuantizer().quantize(torch.randn(20, 48))
    to_tensor_proto(held).check_layout(held.named_buffers())
    with pytest.raises(QuantizationError, match=r"e4m3\[row\+column\] of shape \(20, 48\): .*" + message):
        to_tensor_proto(held).check_layout(change(held.named_buffers()))


# to_tensor_proto and create_tensor.


@pytest.mark.parametrize("backend", [None, "eager", "inductor"])
def test_a_plain_tensor_and_back(backend: str | None) -> None:
    x = torch.zeros(3, 4, dtype=torch.float16, requires_grad=True)
    proto = to_tensor_proto(x)
    assert proto == TensorProto((3, 4), torch.float16, None, True, torch.device("cpu"))
    assert not proto.is_quantized and proto.inner_names() == ()
    made = proto.create_tensor()
    assert (made.shape, made.dtype, made.requires_grad) == ((3, 4), torch.float16, True)
    if backend:
        made = torch.compile(lambda x: to_tensor_proto(x.detach()).create_tensor(), fullgraph=True, backend=backend)(x)
        assert (made.shape, made.dtype, made.is_contiguous()) == ((3, 4), torch.float16, True)
    for use in (proto.create_metadata, proto.create_buffers, lambda: proto.update_usage(rowwise_usage=False)):
        with pytest.raises(QuantizationError, match="plain tensor"):
            use()


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=name)
def test_a_quantized_tensor_and_back(quantizer: Quantizer) -> None:
    held = quantizer.quantize(torch.randn(20, 48, dtype=torch.bfloat16))
    expected = TensorProto((20, 48), torch.bfloat16, quantizer, device=held.device)
    for given_as in (held, held.to_storage()):
        proto = to_tensor_proto(given_as)
        assert proto == expected and proto.inner_names() == tuple(held.named_buffers())
    made = expected.create_tensor()
    assert type(made) is QuantizedTensor and to_tensor_proto(made) == expected
    storage = QuantizedTensorStorage.from_metadata(held.named_buffers(), expected.create_metadata())
    assert type(storage) is type(held.to_storage())


def test_a_quantized_tensor_that_requires_grad() -> None:
    proto = TensorProto((8, 16), torch.float32, Float8CurrentScalingQuantizer(), requires_grad=True)
    made = proto.create_tensor()
    assert made.requires_grad and to_tensor_proto(made).requires_grad
    assert not any(buffer.requires_grad for buffer in made.buffers())


@pytest.mark.skipif(torch_version() < (2, 12), reason="torch 2.11 does not trace methods of a value made in the graph")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_proto_of_a_graphs_input(backend: str) -> None:
    def run(held: QuantizedTensor) -> list[torch.Tensor]:
        proto = to_tensor_proto(held)
        proto.update_usage(columnwise_usage=False)
        return proto.create_tensor().buffers()

    held = Float8CurrentScalingQuantizer().quantize(torch.randn(20, 48))
    made = torch.compile(run, fullgraph=True, backend=backend)(held)
    assert [(b.shape, b.dtype) for b in made] == [
        (b.shape, b.dtype) for b in held.with_usage(columnwise=False).buffers()
    ]


# update_usage: the proto's own.


@pytest.mark.parametrize("quantizer", CONFIGURATIONS, ids=name)
def test_update_usage_touches_only_the_protos_own_quantizer(quantizer: Quantizer) -> None:
    before = copy.deepcopy(quantizer)
    one, other = (TensorProto((8, 16), torch.bfloat16, quantizer) for _ in range(2))
    every = one.inner_names()
    one.update_usage(columnwise_usage=False)
    assert set(one.inner_names()) < set(every) and one.quantizer == quantizer.with_usage(True, False)
    one.update_usage(rowwise_usage=False, columnwise_usage=True)
    assert one.quantizer == quantizer.with_usage(False, True)
    one.check_layout(one.create_tensor().named_buffers())
    assert quantizer == before and other.quantizer is quantizer and other.inner_names() == every
    with pytest.raises(QuantizationError, match="neither"):
        one.update_usage(columnwise_usage=False)
    one.update_usage()
    assert one.quantizer == quantizer.with_usage(False, True)


# Bad input.


def test_a_quantizer_that_is_none() -> None:
    with pytest.raises(TypeError, match="expected a Quantizer or None, got str"):
        TensorProto((4, 4), torch.float32, "e4m3")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "dtype", "error", "message"),
    [
        ((-1, 4), torch.float32, TypeError, r"TensorProto.shape: expected sizes, integers from 0, got \(-1, 4\)"),
        ((1.5, 4), torch.float32, TypeError, r"TensorProto.shape: expected sizes"),
        ((4, 4), "float32", TypeError, "TensorProto.dtype: expected a torch.dtype, got 'float32'"),
        (
            (4, 4),
            torch.int32,
            InputError,
            r"e4m3\[row\+column\]: expected a floating dtype of the values, got torch.int32",
        ),
    ],
)
def test_what_is_no_tensor(shape: Any, dtype: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TensorProto(shape, dtype, Float8CurrentScalingQuantizer())


def test_a_device_by_name_and_without_an_index() -> None:
    proto = TensorProto((4, 4), torch.float32, Float8CurrentScalingQuantizer(), device="cpu")  # type: ignore[arg-type]
    assert proto == dataclasses.replace(proto, device=torch.device("cpu"))
    proto.check_layout(proto.create_tensor().named_buffers())
    with FakeTensorMode(), fake_cuda():
        on_cuda = dataclasses.replace(proto, device=torch.device("cuda"))
        made = on_cuda.create_tensor()
        assert made.device == torch.device("cuda", 0)
        on_cuda.check_layout(made.named_buffers())


@pytest.mark.parametrize("quantizer", [None, Float8CurrentScalingQuantizer()])
def test_a_graph_makes_no_leaf(quantizer: Quantizer | None) -> None:
    """AOTAutograd would give back a tensor that does not require grad."""
    proto = TensorProto((8, 16), torch.float32, quantizer, requires_grad=True)
    with pytest.raises(Exception, match=r"cannot make a tensor of shape \(8, 16\) that requires grad"):
        torch.compile(lambda: proto.create_tensor(), fullgraph=True, backend="eager")()


@pytest.mark.parametrize("quantizer", CONFIGURATIONS, ids=name)
def test_a_shape_that_no_format_holds(quantizer: Quantizer) -> None:
    with pytest.raises(InputError, match="rank 0"):
        TensorProto((), torch.float32, quantizer)
