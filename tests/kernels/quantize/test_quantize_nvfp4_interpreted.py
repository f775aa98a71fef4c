"""NVFP4's quantizing kernels in Triton's interpreter: equal to the reference without a GPU.

Run as a program, this file is the interpreted part: TRITON_INTERPRET must be set before Triton is imported.
"""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest
import torch
from helpers.kernels.interpreter_process import run_in_interpreter
from helpers.kernels.kernel_cases import DTYPES, assert_same_bits
from helpers.kernels.nvfp4_cases import BOTH, COLUMN, KINDS, OPTIONS, ROW, kernel, make, reference, special_inputs

from te_dynamo.kernels.quantize import current, nvfp4
from te_dynamo.kernels.runtime.target import TARGETS, acting_as
from te_dynamo.kernels.tiles import fp8

SHAPES = (
    (130, 16),  # scales' padding of more than a tile
    (128, 192),  # whole tiles
    (1, 32),
    (33, 1),
)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["h200", "b200"])
def test_kernels_equal_the_reference_in_the_interpreter(gpu: str) -> None:
    run_in_interpreter(__file__, gpu)


def main(gpu: str) -> None:
    from helpers.kernels import interpreted

    interpreted.install()
    np.seterr(all="ignore")
    fp8.multiprocessor_count = lambda device: 1  # type: ignore[assignment]
    nvfp4.PARTIALS = current.PARTIALS = 4  # type: ignore[assignment]
    inputs = dict(special_inputs())
    inputs |= {kind: make(kind, (35, 50), torch.bfloat16) for kind in KINDS}
    inputs |= {f"normal {dtype}": make("normal", (35, 50), dtype) for dtype in DTYPES[1:]}  # bf16 is "normal"
    inputs |= {f"normal {shape}": make("normal", shape, torch.bfloat16) for shape in SHAPES}
    swizzled = gpu == "b200"  # and its own instruction casts
    with acting_as(TARGETS[gpu]):
        for (name, x), options in itertools.product(inputs.items(), OPTIONS):
            for usages in (ROW, COLUMN, BOTH) if name == "normal" else (BOTH,):
                actual, expected = (quantize(x, usages, options, swizzled=swizzled) for quantize in (kernel, reference))
                assert_same_bits(actual, expected, (name, usages, options))


if __name__ == "__main__":
    main(sys.argv[1])
