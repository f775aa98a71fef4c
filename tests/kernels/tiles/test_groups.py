"""Groups of rows as kernels walk them, in Triton's interpreter: offsets that lie outside, that fall, groups without rows.

Run as a program, this file is the interpreted part: TRITON_INTERPRET must be set before Triton is imported.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from helpers.kernels.interpreter_process import run_in_interpreter

from te_dynamo.kernels.tiles.groups import in_padded_order, padded_order, padded_reference

COLUMNS = 4


@triton.jit
def padded_kernel(x, y, offs, x_rows, K: tl.constexpr, G, GROUPS: tl.constexpr):
    row = tl.program_id(0) * 128
    begin, end = in_padded_order(x, row, offs, x_rows, x_rows, K, G, GROUPS)
    rows, columns = row + tl.arange(0, 128)[:, None], tl.arange(0, K)[None, :]
    tl.store(y + rows * K + columns, tl.load(begin + rows * K + columns, mask=rows < end, other=0.0))


def test_the_padded_order_is_the_references() -> None:
    run_in_interpreter(__file__)


def main() -> None:
    x = torch.randn(300, COLUMNS)
    for offsets in ((130, 130, 300), (-3, 5, 200), (140, 20, 900)):
        offs = torch.tensor(offsets, dtype=torch.int32)
        order, rows = padded_order(x, x.shape[0], offs)
        y = torch.full((rows, COLUMNS), torch.nan)
        padded_kernel[(rows // 128,)](x, y, K=COLUMNS, **order)
        assert torch.equal(y, padded_reference(x, offs)), offsets


if __name__ == "__main__":
    main()
