"""The launch that places the codes of large MXFP8 tensors, in Triton's interpreter.

Run as a program, this file is the interpreted half: TRITON_INTERPRET must be set before Triton is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from te_dynamo.kernels import mxfp8


@pytest.mark.slow
def test_codes_are_placed_in_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, __file__]
    result = subprocess.run(command, env=environment, cwd=Path(__file__).parent, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def main() -> None:
    for rows, columns in ((256, 640), (130, 144), (300, 5000)):
        tall, wide = -(-rows // 128), -(-columns // 128)
        codes = mxfp8.staged_codes(rows, columns, torch.device("cpu"))
        for words in codes.values():
            words.random_(-(2**31), 2**31)
        by_rows = torch.empty(tall * 128, wide * 4, dtype=torch.uint8)
        by_columns = torch.empty(wide * 128, tall * 4, dtype=torch.uint8)
        mxfp8.place_codes(codes, [by_rows, by_rows, by_columns, by_columns], rows, columns)
        for scales, words, r, c in (
            (by_rows, "scale_inv", tall, wide),
            (by_columns, "columnwise_scale_inv", wide, tall),
        ):
            expected = codes[words].reshape(r, c, 128).transpose(1, 2).reshape(r * 128, c)
            assert torch.equal(scales.view(torch.int32), expected)


if __name__ == "__main__":
    main()
