"""One training step of a small model as each kind of GPU would run it: its kernels in order, and the tiles of its GEMMs."""

from __future__ import annotations

import re

import pytest
import torch
from expecttest import assert_expected_inline
from helpers.models.snapshot_models import kernels_everywhere
from torch import Tensor, nn
from torch.nn import functional as F

from te_dynamo.testing import capture_on_fake_cuda

ROWS, HIDDEN, FFN = 4096, 4096, 8192


class SwigluMLP(nn.Module):
    """RMSNorm, gate and up, silu(gate) * up, down."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-5)
        self.gate, self.up = (nn.Linear(HIDDEN, FFN, bias=False) for _ in range(2))
        self.down = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return self.down(F.silu(self.gate(h)) * self.up(h))


def step(gpu: str) -> str:
    """A line for each launch of forward and backward: the kernel, and of a GEMM the tile."""
    torch._dynamo.reset()
    with kernels_everywhere():
        graphs = capture_on_fake_cuda(
            lambda: SwigluMLP().bfloat16(),
            lambda device: (torch.empty(ROWS, HIDDEN, dtype=torch.bfloat16, device=device, requires_grad=True),),
            device=gpu,
            options={"codegen": "inductor"},
        )
    lines = []
    for stage in graphs.stages:
        if stage.startswith("lower"):
            lines.append(f"{stage}:")
            lines += [line for text in graphs[stage].splitlines() if (line := launch(text))]
    return "\n".join(lines)


def launch(text: str) -> str:
    """ "gemm_kernel 8x4x2 fast 128x128x128" of a line that launches a kernel or calls one of Gluon, "" of another."""
    called = re.match(r"\S+: .* = te\.(gemm\w*)\(", text)
    if called:
        return f"  {called[1]} in Gluon"
    launched = re.match(r"\{.*\} = triton\.(\w+)\[\((\d+), ", text)
    if launched is None:
        return ""
    given = dict(re.findall(r"(\w+)=([\w.]+)", text))
    if "FAST" not in given:
        return f"  {launched[1]}"
    tile = "x".join(given[f"BLOCK_{side}"] for side in "MNK")
    how = "fast" if given["FAST"] == "True" else "slow"
    halves = ", in halves" if given.get("HALVES") == "True" else ""
    return f"  {launched[1]}: {'x'.join(given[side] for side in 'MNK')} by {launched[2]} programs, {how} {tile}{halves}"


def test_h200() -> None:
    assert_expected_inline(
        step("h200"),
        """\
lower.forward:
  norm_rows_kernel
  norm_cast_kernel
  quantize_amaxes_kernel
  quantize_stacked_kernel
  gemm_gated in Gluon
  produce_write_kernel
  quantize_cast_kernel
  gemm in Gluon
lower.backward:
  quantize_amaxes_kernel
  quantize_cast_kernel
  gemm in Gluon
  quantize_stacked_kernel
  gemm in Gluon
  transpose_kernel
  gemm in Gluon
  gemm in Gluon""",
    )


def test_b200() -> None:
    assert_expected_inline(
        gemms(step("b200")),
        """\
  gemm_kernel: 4096x16384x4096 by 148 programs, fast 256x128x128
  gemm_kernel: 4096x4096x8192 by 148 programs, fast 128x128x128
  gemm_kernel: 4096x8192x4096 by 148 programs, fast 256x128x128
  gemm_kernel: 4096x4096x16384 by 148 programs, fast 128x128x128
  gemm_kernel: 16384x4096x4096 by 148 programs, fast 256x128x128
  gemm_kernel: 4096x8192x4096 by 148 programs, fast 256x128x128""",
    )


@pytest.mark.slow
def test_rtx5090() -> None:
    """No other test finds a tile or a number of programs that changes on this GPU alone."""
    assert_expected_inline(
        gemms(step("rtx5090")),
        """\
  gemm_kernel: 4096x8192x4096 by 170 programs, slow 128x128x128
  gemm_kernel: 4096x8192x4096 by 170 programs, slow 128x128x128
  gemm_kernel: 4096x4096x8192 by 170 programs, slow 128x128x128
  gemm_kernel: 4096x8192x4096 by 170 programs, slow 128x128x128
  gemm_kernel: 4096x4096x8192 by 170 programs, slow 128x128x128
  gemm_kernel: 4096x4096x8192 by 170 programs, slow 128x128x128
  gemm_kernel: 8192x4096x4096 by 170 programs, slow 128x128x128
  gemm_kernel: 8192x4096x4096 by 170 programs, slow 128x128x128
  gemm_kernel: 4096x8192x4096 by 170 programs, slow 128x128x128""",
    )


def test_l40s() -> None:
    assert_expected_inline(
        step("l40s"),
        """\
lower.forward:
  norm_rows_kernel
  norm_cast_kernel
  quantize_amaxes_kernel
  quantize_stacked_kernel
  gemm_kernel: 4096x16384x4096 by 142 programs, slow 128x128x128
  produce_amax_kernel
  produce_write_kernel
  quantize_cast_kernel
  gemm_kernel: 4096x4096x8192 by 142 programs, slow 128x128x128
lower.backward:
  quantize_amaxes_kernel
  quantize_cast_kernel
  gemm_kernel: 4096x8192x4096 by 142 programs, slow 128x128x128
  quantize_stacked_kernel
  gemm_kernel: 4096x4096x16384 by 142 programs, slow 128x128x128
  transpose_kernel
  gemm_kernel: 16384x4096x4096 by 142 programs, slow 128x128x128
  gemm_kernel: 4096x8192x4096 by 142 programs, slow 128x128x128""",
    )


def gemms(text: str) -> str:
    """The lines of GEMMs."""
    return "\n".join(line for line in text.splitlines() if "programs" in line)
