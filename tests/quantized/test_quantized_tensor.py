"""QuantizedTensor behaves as one tensor: eagerly, saved and loaded, in modules, and under torch.compile."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from helpers.oracles.quantizer_cases import CONFIGURATIONS, ONE_EACH, QUANTIZERS, key, name, same_bits
from helpers.slow import slow_but

from te_dynamo import (
    Float8CurrentScalingQuantizer,
    NVFP4Quantizer,
    QuantizedTensor,
    Quantizer,
    explain,
    to_tensor_proto,
)
from te_dynamo.errors import InputError, QuantizationError, UnsupportedError

SHAPE = (4, 24, 48)
CURRENT = Float8CurrentScalingQuantizer()
BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


def quantized(quantizer: Quantizer = CURRENT, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> QuantizedTensor:
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return quantizer.quantize(x, key())


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal buffers, format, shape and dtype; of plain tensors equal bytes."""
    if type(a) is not type(b) or (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return False
    if not (isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor)):
        return same_bits(a, b)
    return a.quantizer == b.quantizer and all(map(same_bits, a.buffers(), b.buffers()))


# One tensor.


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=name)
def test_it_has_the_facts_of_the_values(quantizer: Quantizer) -> None:
    held = quantized(quantizer)
    assert (held.shape, held.dtype, held.device, held.stride()) == (
        SHAPE,
        torch.bfloat16,
        torch.device("cpu"),
        (1152, 48, 1),
    )
    assert list(held.named_buffers()) == list(quantizer._describe_buffers(SHAPE))
    assert same_bits(quantizer.dequantize(held), held.dequantize()) and type(held.dequantize()) is torch.Tensor
    assert repr(held) == f"QuantizedTensor({SHAPE}, torch.bfloat16, {quantizer.describe()}, device='cpu')"


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=name)
def test_copies_keep_the_format(quantizer: Quantizer) -> None:
    held = quantized(quantizer)
    for alias in (held.detach(), held.data, held.view(SHAPE), held.cpu(), held.to("cpu"), copy.copy(held)):
        assert same(alias, held)
        assert all(a.data_ptr() == b.data_ptr() for a, b in zip(alias.buffers(), held.buffers(), strict=True))
    for made in (held.clone(), copy.deepcopy(held), held.to("cpu", copy=True)):
        assert same(made, held)
        assert not {b.data_ptr() for b in made.buffers()} & {b.data_ptr() for b in held.buffers()}


@pytest.mark.parametrize("quantizer", CONFIGURATIONS, ids=name)
def test_it_moves(quantizer: Quantizer) -> None:
    moved = quantized(quantizer).to("meta")
    assert type(moved) is QuantizedTensor and moved.device.type == "meta"
    assert {b.device.type for b in moved.buffers()} == {"meta"}


@pytest.mark.gpu
@pytest.mark.parametrize("quantizer", CONFIGURATIONS, ids=name)
def test_it_moves_to_the_gpu_and_back(quantizer: Quantizer) -> None:
    held = quantized(quantizer)
    moved = held.cuda()
    assert moved.device.type == "cuda" and {b.device.type for b in moved.buffers()} == {"cuda"}
    assert same_bits(moved.dequantize().cpu(), held.dequantize())
    assert same(moved.cpu(), held)


def test_another_floating_dtype_is_that_of_the_values() -> None:
    held = quantized()
    wider = held.float()
    assert type(wider) is QuantizedTensor and wider.dtype == torch.float32
    assert same_bits(wider.dequantize().bfloat16(), held.dequantize())
    assert type(held.to(torch.int32)) is torch.Tensor


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=name)
@pytest.mark.parametrize("weights_only", [True, False])
def test_save_and_load(quantizer: Quantizer, weights_only: bool) -> None:
    held = quantized(quantizer)
    file = io.BytesIO()
    torch.save({"held": held, "parameter": torch.nn.Parameter(held)}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=weights_only)
    assert same(loaded["held"], held) and same(loaded["parameter"], held)
    assert isinstance(loaded["parameter"], torch.nn.Parameter) and loaded["parameter"].requires_grad
    assert not isinstance(loaded["held"], torch.nn.Parameter) and not loaded["held"].requires_grad
    file.seek(0)
    assert torch.load(file, map_location="meta")["held"].buffers()[0].is_meta
    assert same(pickle.loads(pickle.dumps(held)), held)


def test_a_file_with_wrong_buffers_is_an_error() -> None:
    load, (buffers, *rest) = quantized().__reduce_ex__(2)
    with pytest.raises(
        QuantizationError, match=r"expected the buffers \['data', 'transpose', 'scale_inv'\], got \['data'\]"
    ):
        load({"data": buffers["data"]}, *rest)
    with pytest.raises(QuantizationError, match=r"buffer 'transpose' has shape \(96, 48\), expected \(48, 96\)"):
        load(buffers | {"transpose": buffers["transpose"].t().contiguous()}, *rest)
    rest[2] = "check_linear"
    with pytest.raises(QuantizationError, match="names the quantizer 'check_linear', which te_dynamo does not have"):
        load(buffers, *rest)


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=name)
def test_flatten_and_unflatten(quantizer: Quantizer) -> None:
    held = quantized(quantizer)
    names, metadata = held.__tensor_flatten__()
    inner = {n: getattr(held, n) for n in names}
    assert same(QuantizedTensor.__tensor_unflatten__(inner, metadata, held.shape, held.stride()), held)
    for missing in names:
        rest = {n: b for n, b in inner.items() if n != missing}
        with pytest.raises(QuantizationError, match=rf"'{missing[1:]}' is missing .* shape \(4, 24, 48\)"):
            QuantizedTensor.__tensor_unflatten__(rest, metadata, held.shape, held.stride())


def test_usages() -> None:
    held = quantized()
    rows = held.with_usage(columnwise=False)
    assert list(rows.named_buffers()) == ["data", "scale_inv"] and same_bits(rows.dequantize(), held.dequantize())
    with pytest.raises(QuantizationError, match=r"columnwise usage of e4m3\[row\] of shape .* was never allocated"):
        rows.with_usage(columnwise=True)


def test_another_format_does_not_read_it() -> None:
    with pytest.raises(QuantizationError, match=r"nvfp4\[row\+column\] cannot read e4m3\[row\+column\]"):
        NVFP4Quantizer().dequantize(quantized())
    with pytest.raises(QuantizationError, match=r"nvfp4\[row\+column\] cannot read Tensor"):
        NVFP4Quantizer().dequantize(torch.ones(16, 16))  # type: ignore[arg-type]


def test_a_tensor_that_is_not_contiguous() -> None:
    x = torch.randn(48, 32)
    assert same(CURRENT.quantize(x.t()), CURRENT.quantize(x.t().contiguous()))


def test_no_gradient_flows_into_the_source() -> None:
    x = torch.randn(16, 32, requires_grad=True)
    held = CURRENT.quantize(x)
    assert not held.requires_grad and all(not b.requires_grad for b in held.buffers())


# Computing with it, and writing to it.


@pytest.mark.parametrize("quantizer", ONE_EACH, ids=name)
def test_arithmetic_is_that_of_the_values(quantizer: Quantizer) -> None:
    held, x = quantized(quantizer), torch.randn(SHAPE[-1], 16, dtype=torch.bfloat16)
    values = held.dequantize()
    computations: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda q: q + 1,
        lambda q: q @ x,
        lambda q: torch.cat([q, q]),
        lambda q: q[0],
        lambda q: q.transpose(0, 1),
        lambda q: torch.zeros_like(values).copy_(q),
        lambda q: torch.nn.functional.linear(x.t(), q[0]),
    ]
    for compute in computations:
        assert same(compute(held), compute(values))
    assert torch.equal(held, values) and held.sum().item() == values.sum().item()


@pytest.mark.parametrize(
    "write",
    [
        lambda q: q.add_(1),
        lambda q: q.copy_(torch.zeros(SHAPE)),
        lambda q: q.zero_(),
        lambda q: torch.add(torch.zeros(SHAPE), 1, out=q),
        lambda q: torch._foreach_mul_([q], 2.0),
        lambda q: q.__setitem__(0, 1.0),
        lambda q: setattr(q, "data", torch.zeros(SHAPE)),
    ],
)
def test_writing_to_it_is_an_error(write: Callable[[torch.Tensor], object]) -> None:
    held = quantized()
    before = held.clone()
    with pytest.raises(UnsupportedError, match=r"would write to QuantizedTensor\(\(4, 24, 48\).*not written in place"):
        write(held)
    assert same(held, before)


WRITES_TO_VIEWS: list[Callable[[torch.Tensor], object]] = [
    lambda q: q[0].add_(1),
    lambda q: q.transpose(0, 1)[0].zero_(),
    lambda q: q.view(96, 48).mul_(2),
    lambda q: q.detach()[0].add_(1),
]


@pytest.mark.parametrize("write", WRITES_TO_VIEWS)
def test_a_write_to_a_view_is_not_lost_silently(write: Callable[[torch.Tensor], object]) -> None:
    """It goes to a copy of the values: the next use of the tensor says so, and the compilation of what writes."""
    held = quantized()
    write(held)
    uses: list[Callable[[], object]] = [held.dequantize, held.buffers, lambda: held + 1, lambda: copy.deepcopy(held)]
    for use in uses:
        with pytest.raises(UnsupportedError, match=r"a view of QuantizedTensor\(\(4, 24, 48\).* was written.* is lost"):
            use()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_write_to_a_view_in_a_graph_is_an_error(backend: str) -> None:
    x = torch.ones(3)
    for write in WRITES_TO_VIEWS:
        with pytest.raises(Exception, match=r"a view of QuantizedTensor.* was written"):
            torch.compile(lambda q, write=write: (write(q), x * 2)[1], fullgraph=True, backend=backend)(quantized())


def test_gradients_flow_into_the_tensor_through_its_values() -> None:
    held = quantized().requires_grad_()
    (held.dequantize() * 3).sum().backward()
    assert type(held.grad) is torch.Tensor and torch.equal(held.grad, torch.full_like(held.grad, 3))


def test_inference_mode() -> None:
    held = quantized()
    values = held.dequantize()
    with torch.inference_mode():
        assert same(held.detach(), held) and same(held.view(SHAPE), held) and same(copy.copy(held), held)
        assert same_bits(held[0] + 0, values[0]) and same_bits(
            held.transpose(0, 1).contiguous(), values.transpose(0, 1)
        )
        made = CURRENT.quantize(values)
        assert made.is_inference() and same_bits(made.detach()[0] + 0, made.dequantize()[0])
    assert same_bits(held.detach().dequantize(), values)


def test_memory_is_that_of_the_buffers() -> None:
    """torch's own methods read a storage that is not there: one ends the process, the other gives a null pointer."""
    held = quantized()
    assert held.share_memory_() is held and all(buffer.is_shared() for buffer in held.buffers())
    module = linear().share_memory()
    assert all(buffer.is_shared() for buffer in module.weight.buffers())
    with pytest.raises(UnsupportedError, match="no memory of its own"):
        torch.from_dlpack(held)


def test_buffers_of_another_layout_are_refused() -> None:
    buffers = quantized().named_buffers()
    for shape, change, message in (
        ((4, 24, 32), {}, r"'data' has shape \(96, 48\), expected \(96, 32\)"),
        (
            SHAPE,
            {"scale_inv": torch.ones(1, dtype=torch.float64)},
            "'scale_inv' has dtype torch.float64, expected torch.float32",
        ),
        (SHAPE, {"scale_inv": torch.ones(1, device="meta")}, "'scale_inv' has device meta, expected cpu"),
    ):
        with pytest.raises(QuantizationError, match=message):
            QuantizedTensor(buffers | change, shape, torch.bfloat16, CURRENT)
    with pytest.raises(InputError, match=r"expected a floating dtype of the values, got torch.int32"):
        QuantizedTensor(buffers, SHAPE, torch.int32, CURRENT)


# In a module.


def linear() -> torch.nn.Linear:
    module = torch.nn.Linear(48, 32, dtype=torch.bfloat16)
    module.weight = torch.nn.Parameter(CURRENT.quantize(module.weight))
    return module


def test_a_quantized_parameter() -> None:
    module = linear()
    x = torch.randn(8, 48, dtype=torch.bfloat16, requires_grad=True)
    weight = module.weight.dequantize().detach().requires_grad_()
    expected = torch.nn.functional.linear(x, weight, module.bias)
    found = module(x)
    assert same_bits(found, expected)
    expected.sum().backward()
    dx, x.grad = x.grad, None
    found.sum().backward()
    assert same_bits(x.grad, dx) and same_bits(module.weight.grad, weight.grad)


def test_a_module_moves_and_converts() -> None:
    module = linear().float()
    assert (
        type(module.weight) is QuantizedTensor and module.weight.dtype == torch.float32 and module.weight.requires_grad
    )
    assert module(torch.randn(2, 48)).dtype == torch.float32
    assert module.to("meta").weight.buffers()[0].is_meta
    assert same(copy.deepcopy(module := linear()).weight, module.weight)


def test_state_dicts() -> None:
    module, plain = linear(), torch.nn.Linear(48, 32, dtype=torch.bfloat16)
    state = module.state_dict()
    plain.load_state_dict(state)
    assert same_bits(plain.weight.detach(), module.weight.dequantize().detach())
    plain.load_state_dict(state, assign=True)
    assert same(plain.weight, module.weight)
    with pytest.raises(RuntimeError, match=r"not written in place.*assign=True"):
        module.load_state_dict(linear().state_dict())


# Under torch.compile: whole graphs, as input and as output.


GRAPHS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "same": lambda q: q,
    "detach": lambda q: q.detach(),
    "data": lambda q: q.data,
    "clone": lambda q: q.clone(),
    "arithmetic": lambda q: q * 2,
    "dequantize": lambda q: q.dequantize(),
    "linear": lambda q: torch.nn.functional.linear(torch.ones(3, 48, dtype=torch.bfloat16), q[0]),
    "to float": lambda q: q.to(torch.float32),
    "buffers": lambda q: q.buffers()[0].view(torch.uint8),
    "usage": lambda q: q.with_usage(columnwise=False),
    "quantize again": lambda q: q.quantizer.quantize(q.dequantize() * 2),
    "operation": lambda q: torch.ops.te.quantize(q, q.quantizer)[0].view(torch.uint8),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("what", GRAPHS)
def test_a_graph_input(what: str, backend: str) -> None:
    held, function = quantized(), GRAPHS[what]
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    assert same(compiled(held), function(held))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("quantizer", slow_but(5, CONFIGURATIONS), ids=name)
def test_a_graph_output(quantizer: Quantizer, backend: str) -> None:
    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        held = quantizer.quantize(x)
        return held, held.dequantize() + 1

    x = torch.randn(SHAPE)
    torch.manual_seed(0)
    held, values = torch.compile(run, fullgraph=True, backend=backend)(x)
    torch.manual_seed(0)
    expected, _ = run(x)
    assert same(held, expected)
    torch.testing.assert_close(values, expected.dequantize() + 1)


@pytest.mark.one_fast_case
@pytest.mark.parametrize("backend", BACKENDS)
def test_dynamic_shapes(backend: str) -> None:
    compiled = torch.compile(lambda q: q * 2, fullgraph=True, backend=backend, dynamic=True)
    make = torch.compile(CURRENT.quantize, fullgraph=True, backend=backend, dynamic=True)
    for rows in (16, 17, 40):
        x = torch.randn(2, rows, 48)
        held = CURRENT.quantize(x)
        assert same(compiled(held), held * 2) and same(make(x), held)


@pytest.mark.one_fast_case
@pytest.mark.parametrize("backend", BACKENDS)
def test_another_quantizer_is_another_graph(backend: str) -> None:
    compiled = torch.compile(lambda q: q.dequantize(), fullgraph=True, backend=backend)
    for quantizer in (
        CURRENT,
        Float8CurrentScalingQuantizer(fp8_format="e5m2"),
        CURRENT.with_usage(False, True),
        *ONE_EACH,
    ):
        held = quantized(quantizer, torch.float32)
        torch.testing.assert_close(compiled(held), held.dequantize())


def test_guards_of_a_call_compare_no_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph with many weights is called often, and each comparison takes the CPU as long as a small kernel."""
    weights = [Float8CurrentScalingQuantizer().quantize(torch.randn(16, 32)) for _ in range(3)]
    compiled = torch.compile(lambda: sum(weight.dequantize().sum() for weight in weights), backend="eager")
    expected, compared = compiled(), list[Quantizer]()
    own = Quantizer.__eq__
    monkeypatch.setattr(Quantizer, "__eq__", lambda one, other: compared.append(one) or own(one, other))
    assert torch.equal(compiled(), expected) and not compared
    weights[1] = Float8CurrentScalingQuantizer().quantize(weights[1].dequantize())  # equal, and not the same
    compiled()
    assert len(compared) == 1


def test_compile_caches_tell_quantizers_apart() -> None:
    """torch's own key of a tensor subclass names an opaque constant's type only."""
    keys = [quantized(q)._stable_hash_for_caching() for q in QUANTIZERS]
    assert len(set(keys)) == len(keys)
    assert keys == [quantized(q, seed=1)._stable_hash_for_caching() for q in QUANTIZERS]  # values do not matter
    assert quantized(dtype=torch.float32)._stable_hash_for_caching() not in keys


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_a_quantized_parameter(backend: str) -> None:
    module = linear()
    x = torch.randn(8, 48, dtype=torch.bfloat16, requires_grad=True)
    module(x).sum().backward()
    expected = (x.grad, module.weight.grad, module.bias.grad)
    x.grad = None
    module.zero_grad()
    torch.compile(module, fullgraph=True, backend=backend)(x).sum().backward()
    for found, wanted in zip((x.grad, module.weight.grad, module.bias.grad), expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_dynamo_compiles_none_of_our_code_where_it_leaves_the_users() -> None:
    """It did, in graphs of its own with breaks in them, which `explain` counted as the model's."""

    class Skipped(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                torch._dynamo.graph_break()
                return super().forward(x)
            finally:
                pass

    model = Skipped(64, 64).requires_grad_(False)
    model.weight = torch.nn.Parameter(CURRENT.quantize(model.weight), requires_grad=False)
    explanation = explain(model, torch.randn(32, 64))
    assert explanation.reports == []
    assert [stop.source.partition(":")[0] for stop in explanation.graph_breaks] == ["test_quantized_tensor.py"]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_writing_to_it_in_a_graph_is_an_error(backend: str) -> None:
    for write in (lambda q: q.add_(1), lambda q: torch.ops.aten.zero_(q)):
        with pytest.raises(Exception, match="not written in place"):
            torch.compile(write, fullgraph=True, backend=backend)(quantized())


def test_under_a_fake_mode() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        made = to_tensor_proto(quantized(CURRENT)).create_tensor()
        assert type(made) is QuantizedTensor and all(type(b).__name__ == "FakeTensor" for b in made.buffers())
        assert type(made.dequantize()).__name__ == "FakeTensor"
    fake = mode.from_tensor(quantized())
    assert type(fake) is QuantizedTensor and fake.buffers()[0].fake_mode is mode
