"""The product of MXFP8 by torch's own GEMM, with the formulas of its two launches in PyTorch."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch
from helpers.kernels.gemms import gemm_mxfp8_reference, mxfp8_request

from te_dynamo.kernels.gemm import emulated
from te_dynamo.kernels.gemm.multiply import multiply
from te_dynamo.kernels.layouts.mxfp8 import MXFP8Form
from te_dynamo.kernels.quantize.mxfp8 import dequantize_mxfp8_reference, quantize_mxfp8_reference


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columnwise", [False, True])
def test_mxfp8_is_the_reference(columnwise: bool, out_dtype: torch.dtype, biased: bool) -> None:
    a, b = torch.randn(64, 32), torch.randn(32, 96).t()
    operands = [
        *quantize_mxfp8_reference(a, MXFP8Form(torch.float8_e4m3fn, True, False, 32, False)),
        *quantize_mxfp8_reference(
            b.t() if columnwise else b, MXFP8Form(torch.float8_e4m3fn, not columnwise, columnwise, 32, False)
        ),
    ]
    request = *operands, torch.randn(96).bfloat16() if biased else None, out_dtype, False, columnwise
    with (
        mock.patch.object(emulated, "dequantize_mxfp8", dequantize_mxfp8_reference),
        mock.patch("torch.mm", lambda a, b, out_dtype=None: (a.float() @ b.float()).to(out_dtype or a.dtype)),
    ):
        actual = emulated.multiply_mxfp8(mxfp8_request(*request))
        addend = torch.randn(64, 96).to(out_dtype)
        added = multiply(dataclasses.replace(mxfp8_request(*request), addend=addend))
    torch.testing.assert_close(actual, gemm_mxfp8_reference(*request))
    assert torch.equal(added, actual + addend)
