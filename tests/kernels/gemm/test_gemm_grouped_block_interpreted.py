"""The products and columns of groups with scales of blocks in Triton's interpreter: near the references, whose order of sums is another.

Run as a program, this file is the interpreted part: TRITON_INTERPRET must be set before Triton is imported.
"""

from __future__ import annotations

import numpy as np
import pytest
from helpers.kernels import grouped_scaled_checks
from helpers.kernels.interpreter_process import run_in_interpreter

from te_dynamo.kernels.gemm import grouped_mxfp8, multiply
from te_dynamo.kernels.gemm.tiles import Tile

TILES = [Tile(64, 64, 128, 4, 3, fast=False, tflops=1, halves=halves) for halves in (False, True)]


@pytest.mark.slow
@pytest.mark.parametrize("part", ["block", "mxfp8", "columns"])
def test_kernels_are_the_references(part: str) -> None:
    run_in_interpreter(__file__, part)


def main(part: str) -> None:
    from helpers.kernels import interpreted

    interpreted.install()
    np.seterr(all="ignore")
    for module in (multiply, grouped_mxfp8):
        module.gemm_multiprocessors = lambda device: 3  # type: ignore[assignment]
    grouped_scaled_checks.check(part, lambda two_d: TILES, "cpu")


if __name__ == "__main__":
    import sys

    main(sys.argv[1])
