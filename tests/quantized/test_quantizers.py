"""Quantizers are values: equal by configuration, impossible to change, and clear about what they cannot hold."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from helpers.oracles.quantizer_cases import CONFIGURATIONS, ONE_EACH, QUANTIZERS, USAGES, key, name, same_bits

import te_dynamo
from te_dynamo import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8GroupedQuantizer,
    Float8GroupedRowwiseQuantizer,
    Float8RowwiseQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
    TensorProto,
)
from te_dynamo.errors import InputError, QuantizationError
from te_dynamo.kernels.quantize.formats import FORMATS
from te_dynamo.quantized.quantize import quantize_tensor


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=name)
def test_equal_configuration_is_an_equal_object(quantizer: Quantizer) -> None:
    fields = {field.name: getattr(quantizer, field.name) for field in dataclasses.fields(quantizer)}
    twins = (type(quantizer)(**fields), copy.deepcopy(quantizer), pickle.loads(pickle.dumps(quantizer)))
    assert all(twin == quantizer and hash(twin) == hash(quantizer) for twin in twins)
    text, names = quantizer.__fx_repr__()
    assert eval(text, dict(names)) == quantizer


@pytest.mark.parametrize("quantizer", CONFIGURATIONS, ids=name)
def test_usages_leave_the_rest(quantizer: Quantizer) -> None:
    for rowwise, columnwise in USAGES:
        expected = dataclasses.replace(quantizer, rowwise=rowwise, columnwise=columnwise)
        assert quantizer.with_usage(rowwise, columnwise) == expected
        assert expected.with_usage(True, True) == quantizer and expected.with_usage() == expected


def test_different_configurations_are_different_objects() -> None:
    assert len(set(QUANTIZERS)) == len(QUANTIZERS)


@pytest.mark.parametrize("quantizer", CONFIGURATIONS, ids=name)
def test_a_value_object_does_not_change(quantizer: Quantizer) -> None:
    for field in dataclasses.fields(quantizer):
        with pytest.raises(dataclasses.FrozenInstanceError, match=field.name):
            setattr(quantizer, field.name, getattr(quantizer, field.name))
        with pytest.raises(dataclasses.FrozenInstanceError):
            delattr(quantizer, field.name)
    with pytest.raises(dataclasses.FrozenInstanceError):
        quantizer.amax_reduction_group = None  # type: ignore[attr-defined]


@pytest.fixture
def changing() -> Iterator[Float8CurrentScalingQuantizer]:
    """A quantizer that a test may change: put right afterwards, for torch's caches hold it and compare it with those of later tests."""
    quantizer = Float8CurrentScalingQuantizer()
    yield quantizer
    object.__setattr__(quantizer, "fp8_format", "e4m3")


def test_a_change_past_the_frozen_class_is_an_error(changing: Float8CurrentScalingQuantizer) -> None:
    quantizer = changing
    x = torch.randn(16, 32)
    compiled = torch.compile(lambda x: quantizer.quantize(x).dequantize(), fullgraph=True, backend="eager")
    expected = compiled(x)
    object.__setattr__(quantizer, "fp8_format", "e5m2")
    for use in (
        lambda: quantizer == Float8CurrentScalingQuantizer(),
        lambda: hash(quantizer),
        lambda: quantizer.quantize(x),
        lambda: torch.ops.te.quantize(x, quantizer),
        lambda: quantizer.with_usage(columnwise=False),
        lambda: quantizer.alloc_tensors((16, 32)),
        lambda: quantizer.buffer_names(),
        lambda: TensorProto((16, 32), torch.bfloat16, quantizer),
    ):
        with pytest.raises(QuantizationError, match=r"was changed: made with .*'e4m3'.*now .*'e5m2'"):
            use()
    assert torch.equal(compiled(x), expected)  # a graph holds a copy, made when it was compiled


GROUP = """
import torch, te_dynamo, tempfile
import torch.distributed as dist
with tempfile.NamedTemporaryFile() as file:
    dist.init_process_group("gloo", init_method="file://" + file.name, rank=0, world_size=1)
    for cls in (te_dynamo.Float8CurrentScalingQuantizer, te_dynamo.Float8BlockQuantizer, te_dynamo.MXFP8Quantizer,
                te_dynamo.NVFP4Quantizer):
        for kwargs in ({"rowwise": dist.group.WORLD}, {"amax_reduction_group": dist.group.WORLD}):
            try:
                cls(**kwargs)
            except TypeError as error:
                print(cls.__name__, error)
    dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_a_process_group_is_a_type_error() -> None:
    """In a process of its own: a process group belongs to a process."""
    done = subprocess.run([sys.executable, "-c", GROUP], capture_output=True, text=True, timeout=120)
    lines = done.stdout.splitlines()
    assert len(lines) == 8, done.stderr
    assert sum("expected int, bool, float, str or enum, got ProcessGroup" in line for line in lines) == 4
    assert sum("unexpected keyword argument 'amax_reduction_group'" in line for line in lines) == 4


@pytest.mark.parametrize(
    ("cls", "fields", "message"),
    [
        (Float8BlockQuantizer, {"block_dims": 3}, r"block_dims: expected 1 .*1x128.* or 2 .*128x128.*got 3"),
        (Float8BlockQuantizer, {"fp8_format": "e3m4"}, r"fp8_format: expected one of \['e4m3', 'e5m2'\], got 'e3m4'"),
        (Float8BlockQuantizer, {"amax_epsilon": float("nan")}, "amax_epsilon: expected a finite number"),
        (Float8CurrentScalingQuantizer, {"amax_epsilon": 1e300}, r"amax_epsilon: .* got 1e\+300 \(an amax is fp32\)"),
        (MXFP8Quantizer, {"scale_block": 64}, "scale_block: expected 32 .* or 128 .*got 64"),
        (MXFP8Quantizer, {"block_dims": 3}, r"block_dims: expected 1 .*1x32.* or 2 .*32x32.*got 3"),
        (NVFP4Quantizer, {"block_dims": 0}, r"block_dims: expected 1 .*1x16.* or 2 .*16x16.*got 0"),
        (MXFP8Quantizer, {"fp8_format": "e2m1"}, "fp8_format"),
        (NVFP4Quantizer, {"block_dims": 2, "hadamard": True}, "share scales between rows and columns"),
        (NVFP4Quantizer, {"rowwise": False, "columnwise": False}, "neither rowwise nor columnwise"),
    ],
)
def test_bad_configuration_is_an_error_at_once(cls: type[Quantizer], fields: dict, message: str) -> None:
    with pytest.raises(QuantizationError, match=message):
        cls(**fields)


@pytest.mark.parametrize(
    ("cls", "field", "value", "kind"),
    [
        (Float8CurrentScalingQuantizer, "rowwise", 1, "bool"),
        (Float8CurrentScalingQuantizer, "amax_epsilon", "0", "float"),
        (Float8CurrentScalingQuantizer, "amax_epsilon", True, "float"),
        (Float8BlockQuantizer, "power_of_two_scale", "no", "bool"),
        (Float8BlockQuantizer, "block_dims", True, "int"),
        (MXFP8Quantizer, "scale_block", 32.0, "int"),
        (NVFP4Quantizer, "hadamard", "no", "bool"),
    ],
)
def test_a_field_of_another_kind_is_a_type_error(cls: type[Quantizer], field: str, value: object, kind: str) -> None:
    """ "no" would be a switch that is on, and True a block_dims equal to 1."""
    with pytest.raises(TypeError, match=f"{cls.__name__}.{field}: expected {kind}, got {value!r}"):
        cls(**{field: value})  # type: ignore[arg-type]


def test_the_description_tells_epsilons_apart() -> None:
    assert Float8CurrentScalingQuantizer(amax_epsilon=1e-3).describe() == "e4m3[row+column, eps 0.001]"
    assert Float8BlockQuantizer(amax_epsilon=2).describe() == "e4m3 1x128[row+column, eps 2]"


def test_reasons_name_a_format_in_words() -> None:
    assert Float8RowwiseQuantizer().describe() == "e4m3 by rows[row+column]"
    assert Float8RowwiseQuantizer().in_words() == "FP8 (e4m3) with a scale per row"
    assert NVFP4Quantizer(hadamard=True).in_words() == "NVFP4 with a scale per block of 1x16, hadamard"


@pytest.mark.parametrize("quantizer", ONE_EACH, ids=name)
def test_what_is_no_dense_tensor(quantizer: Quantizer) -> None:
    with pytest.raises(TypeError, match="quantize: expected a tensor, got list"):
        quantizer.quantize([1.0])  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"expected a dense tensor, got torch.sparse_coo of shape \(16, 16\)"):
        quantizer.quantize(torch.eye(16).to_sparse())
    for layout in (torch.jagged, torch.strided):  # the second has no sizes to be said
        nested = torch.nested.nested_tensor([torch.ones(2, 16), torch.ones(3, 16)], layout=layout)
        with pytest.raises(InputError, match="expected a dense tensor, got a nested one"):
            quantizer.quantize(nested)


@pytest.mark.parametrize("quantizer", ONE_EACH, ids=name)
def test_a_tensor_that_the_format_cannot_hold(quantizer: Quantizer) -> None:
    for run in (quantizer.quantize, lambda x: torch.ops.te.quantize(x, quantizer)):
        with pytest.raises(InputError, match=r"rank 0"):
            run(torch.tensor(1.0))
        with pytest.raises(InputError, match=r"expected bf16, fp16 or fp32 values, got torch.int32"):
            run(torch.ones(4, 4, dtype=torch.int32))


@pytest.mark.parametrize("quantizer", ONE_EACH, ids=name)
def test_an_operand_that_was_never_allocated(quantizer: Quantizer) -> None:
    for usage, missing in (((True, False), "columnwise"), ((False, True), "rowwise")):
        q = quantizer.with_usage(*usage)
        with pytest.raises(
            QuantizationError, match=rf"{missing} data of .* was never allocated.* there is \w*data|transpose \["
        ):
            q.operand(torch.ops.te.quantize(torch.randn(4, 16), q), columnwise=missing == "columnwise")


@pytest.mark.parametrize("quantizer", CONFIGURATIONS, ids=name)
def test_operands_are_the_same_whatever_else_is_kept(quantizer: Quantizer) -> None:
    x = torch.randn(48, 80)
    both = quantizer.quantize(x, key())
    for rowwise, columnwise in USAGES[1:]:
        one = quantizer.with_usage(rowwise, columnwise)
        expected = quantizer.operand(both.buffers(), columnwise)
        found = one.operand(one.quantize(x, key()).buffers(), columnwise)
        assert len(found) == len(expected) and all(map(same_bits, found, expected))


PUBLIC = [getattr(te_dynamo, name) for name in dir(te_dynamo)]  # which imports each
QUANTIZERS = [cls for cls in PUBLIC if isinstance(cls, type) and issubclass(cls, Quantizer) and cls is not Quantizer]


def test_a_format_is_one_entry() -> None:
    assert set(FORMATS) == {type(cls().form()) for cls in QUANTIZERS}
    grouped = {Float8GroupedQuantizer, Float8GroupedRowwiseQuantizer}
    assert set(QUANTIZERS) - grouped == set(map(type, CONFIGURATIONS)), "the other tests run for each"

    @dataclasses.dataclass(frozen=True)
    class Unknown(Quantizer):
        pass

    with pytest.raises(QuantizationError, match="no kernel for Unknown: it has no form"):
        torch.ops.te.quantize(torch.randn(4, 16), Unknown())


# Stochastic rounding: its random bits are an argument, so that a graph is a function of what it is given.

STOCHASTIC = NVFP4Quantizer(stochastic_rounding=True)


def test_the_generator_decides() -> None:
    x = torch.randn(64, 64)
    first, again, other = (STOCHASTIC.quantize(x, key(seed)) for seed in (1, 1, 2))
    assert all(map(same_bits, first.buffers(), again.buffers()))
    assert not all(map(same_bits, first.buffers(), other.buffers()))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_torchs_random_state_decides_in_a_graph(backend: str) -> None:
    compiled = torch.compile(STOCHASTIC.quantize, fullgraph=True, backend=backend)
    x = torch.randn(64, 64)
    torch.manual_seed(5)
    first, second = compiled(x).dequantize(), compiled(x).dequantize()
    torch.manual_seed(5)
    assert torch.equal(compiled(x).dequantize(), first) and not torch.equal(first, second)


def test_bits_must_be_given_to_the_operation() -> None:
    with pytest.raises(InputError, match=r"stochastic.*random bits that it is given"):
        torch.ops.te.quantize(torch.randn(4, 16), STOCHASTIC)


def test_other_quantizers_draw_nothing() -> None:
    before = torch.get_rng_state()
    quantize_tensor(torch.ones(4, 16), NVFP4Quantizer())
    assert torch.equal(torch.get_rng_state(), before)


def test_what_kernels_can_do_for_each_format() -> None:
    found = {}
    for format in QUANTIZERS:
        abilities = [name for name in ("one_scale", "fused_producers") if getattr(format, name)]
        found[format.__name__] = format.stacks, abilities
    assert found == {
        "Float8CurrentScalingQuantizer": ("tensors", ["one_scale", "fused_producers"]),
        "Float8BlockQuantizer": ("blocks", ["fused_producers"]),
        "Float8GroupedQuantizer": ("", []),
        "Float8GroupedRowwiseQuantizer": ("", []),
        "Float8RowwiseQuantizer": ("rows", ["fused_producers"]),
        "MXFP8Quantizer": ("blocks", ["fused_producers"]),
        "NVFP4Quantizer": ("", []),
    }


@pytest.mark.parametrize("quantizer", ONE_EACH, ids=name)
def test_weights_of_groups_are_held_as_one_weight_is(quantizer: Quantizer) -> None:
    if quantizer.no_groups_reason():
        with pytest.raises(QuantizationError, match="there is no grouped GEMM for it"):
            quantizer.for_groups(True, False)
        return
    weights = torch.stack([torch.randn(128, 64) * scale for scale in (1.0, 100.0)])
    for usage in ((True, False), (False, True)):
        stacked = quantizer.for_groups(*usage).quantize(weights).dequantize()
        apart = [quantizer.with_usage(*usage).quantize(weight).dequantize() for weight in weights]
        assert same_bits(stacked, torch.stack(apart))


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_compiled_function_takes_quantizers_whose_numbers_differ(dynamic: bool | None) -> None:
    """Dynamo makes a symbol of a number that differs from call to call, and of each with dynamic=True."""

    def values(x: torch.Tensor, quantizer: te_dynamo.Quantizer) -> torch.Tensor:
        return quantizer.with_usage(columnwise=False).quantize(x).dequantize()

    x = torch.randn(32, 64)
    compiled = torch.compile(values, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for make, field, numbers in (
        (te_dynamo.Float8CurrentScalingQuantizer, "amax_epsilon", (0.0, 100.0)),
        (te_dynamo.MXFP8Quantizer, "scale_block", (32, 128)),
    ):
        for number in numbers:
            quantizer = make(**{field: number})
            assert torch.equal(compiled(x, quantizer), values(x, quantizer))
