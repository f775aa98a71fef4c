"""The codes of dgate and dup in dy's own memory."""

from __future__ import annotations

import re

import pytest
import torch
from helpers.kernels.kernel_cases import FP8_DTYPES, assert_same_bits, gpu, make_input, needs_cuda

from te_dynamo.kernels.activation import gated
from te_dynamo.kernels.activation import gated_in_place as kernels
from te_dynamo.kernels.layouts.tensor import TensorForm
from te_dynamo.kernels.quantize.current import PARTIALS
from te_dynamo.kernels.runtime.compiled_code import compile_for

ROWS = TensorForm(torch.float8_e5m2, True, False)


@pytest.mark.parametrize(
    "dy",
    [torch.ones(4, 128), torch.ones(4, 192).bfloat16(), torch.ones(128, 4).bfloat16().t(), torch.ones(1, 32896).half()],
    ids=["fp32", "columns", "strides", "long"],
)
def test_a_dy_that_cannot_hold_the_codes_is_an_error(dy: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="expected a contiguous dy of two bytes an element"):
        kernels.gated_backward_quantize_in_place(dy, dy, dy, "silu", ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", gated.KINDS)
@pytest.mark.parametrize(
    "columns, most_registers, gate_half",
    [(14336, 80, -1), (28672, 128, -1), (4096, 80, -1), (128, 80, -1), (14336, 80, 1)],
)
def test_a_row_is_read_before_it_is_written(columns: int, most_registers: int, gate_half: int, kind: str) -> None:
    block_k, warps = kernels.row_block(columns)
    constants = {"E5M2": True, "FMAX": 57344.0, "EPS": 0.0, "POWER_OF_TWO": False, "PARTIALS": PARTIALS}
    constants |= {"QUARTER": columns // 4, "BLOCK_K": block_k, "GATE_HALF": gate_half, "KIND": kind}
    arguments = dict.fromkeys(("dy", "gate", "up"), "*bf16") | dict.fromkeys(("gate_stride", "up_stride", "M"), "i32")
    arguments |= dict.fromkeys(("gate_partials", "up_partials", "scale_inv"), "*fp32")
    report = compile_for(
        kernels.gated_backward_rows_kernel, arguments, constants, aligned=list(arguments), num_warps=warps
    )
    code = report.ptx.splitlines()
    loads, stores, barriers = (
        [number for number, line in enumerate(code) if re.search(pattern, line)]
        for pattern in (r"ld\.global", r"st\.global", r"bar(rier)?\.sync")
    )
    # In the loop: a quarter of dy four times, a barrier, then gate and up and the codes, four times.
    barrier = barriers[-1]
    assert len([number for number in stores if number > barrier]) >= 8
    assert all("b32" in code[number] for number in stores if number < barrier), "only the scales"
    scales_written = max(number for number in stores if number < barrier)
    assert len([number for number in loads if scales_written < number < barrier]) >= 4
    assert report.spills == 0 and report.registers <= most_registers


@gpu
@needs_cuda
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("fp8_dtype", FP8_DTYPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape", [(1, 128), (17, 256), (303, 4096), (3, 5, 1792), (4096, 14336), (40, 28672), (9, 32768)]
)
def test_codes_are_those_of_the_kernel_with_a_buffer(shape, dtype, fp8_dtype, strided) -> None:
    both = make_input("normal", (*shape[:-1], 2 * shape[-1]), dtype, "cuda")
    gate, up = both.chunk(2, -1)
    if not strided:
        gate, up = gate.contiguous(), up.contiguous()
    dy = make_input("normal", shape, dtype, "cuda", seed=1)
    for power_of_two, eps in ((False, 0.0), (True, 1.0)):
        form = TensorForm(fp8_dtype, True, False, power_of_two, eps)
        expected = gated.gated_backward_quantize(dy, gate, up, "gelu", form, False, True)
        given = dy.clone()
        actual = kernels.gated_backward_quantize_in_place(given, gate, up, "gelu", form)
        assert_same_bits(actual, expected)
        assert actual[0].data_ptr() == given.data_ptr()


@gpu
@needs_cuda
@pytest.mark.parametrize("kind", ["zeros", "huge", "inf", "nan"])
def test_codes_of_special_values(kind: str) -> None:
    gate, up = (make_input("normal", (33, 1024), torch.bfloat16, "cuda", seed=seed) for seed in (1, 2))
    dy = make_input(kind, (33, 1024), torch.bfloat16, "cuda")
    expected = gated.gated_backward_quantize(dy, gate, up, "silu", ROWS, False, True)
    assert_same_bits(kernels.gated_backward_quantize_in_place(dy, gate, up, "silu", ROWS), expected)


@gpu
@needs_cuda
def test_no_rows_have_scales() -> None:
    empty = torch.empty(0, 128, dtype=torch.bfloat16, device="cuda")
    data, scale_inv = kernels.gated_backward_quantize_in_place(empty, empty, empty, "silu", ROWS)
    assert data.shape == (0, 256) and scale_inv.tolist() == [1.0, 1.0]
