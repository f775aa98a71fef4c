"""The emulated product of NVFP4 in parts, in Triton's interpreter: the references' values, whichever operand is divided.

Run as a program, this file is the interpreted part: TRITON_INTERPRET must be set before Triton is imported.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from helpers.kernels.gemms import gemm_nvfp4, gemm_nvfp4_reference
from helpers.kernels.interpreter_process import run_in_interpreter

from te_dynamo.kernels.gemm import emulated
from te_dynamo.kernels.layouts.nvfp4 import NVFP4Form
from te_dynamo.kernels.quantize.nvfp4 import quantize_nvfp4_reference
from te_dynamo.kernels.runtime.target import TARGETS, acting_as


@pytest.mark.slow
def test_parts_are_those_of_the_whole() -> None:
    run_in_interpreter(__file__)


def main() -> None:
    from helpers.kernels import interpreted

    interpreted.install()
    shapes = {"by rows": (300, 128, 64), "by columns": (130, 304, 32), "whole": (48, 32, 32)}
    with (
        acting_as(TARGETS["h200"]),
        mock.patch.object(emulated, "LEAST_BYTES", 2**15),
        mock.patch("torch.mm", side_effect=lambda a, b, out_dtype: a.float() @ b.float()) as multiply,
    ):
        for how, (m, n, k) in shapes.items():
            a, b, bias = (torch.randn(size).bfloat16() for size in ((m, k), (n, k), (n,)))
            for given in (bias, None):
                operands = [
                    *quantize_nvfp4_reference(a, NVFP4Form(True, False)),
                    *quantize_nvfp4_reference(b, NVFP4Form(True, False)),
                ]
                multiply.reset_mock()
                actual = gemm_nvfp4(*operands, given, torch.float32)
                expected = gemm_nvfp4_reference(*operands, given, torch.float32)
                assert multiply.call_count == (1 if how == "whole" else 3), how
                torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)


if __name__ == "__main__":
    main()
