"""NVFP4's quantizing kernels in Triton's interpreter: equal to the reference without a GPU.

Run as a program, this file is the interpreted half: TRITON_INTERPRET must be set before Triton is imported.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from kernel_cases import DTYPES, assert_same_bits
from test_kernels_nvfp4 import BOTH, COLUMN, KINDS, OPTIONS, ROW, kernel, make, reference

from te_dynamo.kernels.quantize import current, nvfp4
from te_dynamo.kernels.tiles import fp8

SHAPES = (
    (35, 50),  # no whole block by columns, nor by rows
    (130, 16),  # more than 128 rows by little: padding of scales
    (128, 192),  # whole tiles
)


def ties() -> torch.Tensor:
    """fp32 [256, 64] whose blocks have scales that make v of x: the middles between codes, their neighbours, and others from 0 to 6."""
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    near = torch.cat([middles, *(middles.nextafter(torch.tensor(towards)) for towards in (0.0, 9.0))])
    values = torch.cat([near, torch.linspace(0, 6, 256 * 64 - len(near))]).reshape(256, 64)
    values[torch.arange(256), torch.arange(256) % 64] = 6.0
    values[:, ::16] = 6.0
    values[::16] = 6.0
    return values * torch.where(torch.arange(64) % 2 == 0, 1.0, -1.0)


@pytest.mark.parametrize("kinds", ["values", "special", "dtypes", "options"])
def test_kernels_equal_the_reference_in_the_interpreter(kinds: str) -> None:
    command = [sys.executable, __file__, kinds]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run(command, env=environment, cwd=Path(__file__).parent, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
