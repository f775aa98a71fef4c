"""docs/writing-a-fusion.md: its code is the example, the example runs and prints what the page shows, its kernels compile."""

from __future__ import annotations

import importlib
import pathlib
import re
import subprocess
import sys

import pytest
import torch
from expecttest import assert_expected_inline
from helpers.models.snapshot_models import kernels_everywhere, launches

import te_dynamo
from te_dynamo.kernels.runtime.compiled_code import compile_for
from te_dynamo.testing import capture_on_fake_cuda

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "writing-a-fusion.md").read_text()
EXAMPLE = ROOT / "examples" / "custom_fusion.py"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_pages_blocks_are_the_whole_example() -> None:
    """In their order, and nothing but its docstring is missing."""
    code = EXAMPLE.read_text().split('"""', 2)[2]
    assert "".join(blocks("python")).split() == code.split()


@pytest.mark.slow
def test_the_example_runs_and_prints_what_the_page_shows() -> None:
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "runs LinearSquaredReLU" in done.stdout and "fused and unfused agree" in done.stdout
    for block in blocks("text"):
        assert block.strip() in done.stdout


@pytest.fixture(scope="module")
def example():
    sys.path.insert(0, str(EXAMPLE.parent))
    try:
        module = importlib.import_module("custom_fusion")
    finally:
        sys.path.remove(str(EXAMPLE.parent))
    te_dynamo.unregister_fusion(module.fuse_linear_squared_relu)
    return module


@pytest.mark.parametrize(
    ("kernel", "tensors"),
    [("bias_squared_relu_kernel", "h bias y"), ("bias_squared_relu_backward_kernel", "dy h bias dz")],
)
def test_kernels_compile_for_a_gpu_that_is_not_here(example, kernel: str, tensors: str) -> None:
    args = dict.fromkeys(tensors.split(), "*bf16") | {"size": "i32", "features": "i32"}
    report = compile_for(
        getattr(example, kernel), args, {"BLOCK": example.BLOCK}, aligned=(*tensors.split(), "size", "features")
    )
    assert report.spills == 0 and not report.warnings and report.registers <= 64


def test_the_kernels_are_launched_by_the_compiled_model(example) -> None:
    """On CUDA, without a GPU: the user's kernels between ours, forward and backward; none of ours writes h + bias."""
    torch._dynamo.reset()
    with te_dynamo.register_forward_backward_fusion(example.fuse_linear_squared_relu), kernels_everywhere():
        graphs = capture_on_fake_cuda(
            lambda: example.MLP(64, 256).bfloat16(),
            lambda device: (torch.empty(32, 64, dtype=torch.bfloat16, device=device),),
        )
    assert_expected_inline(
        launches(graphs["lower.forward"]),
        """\
quantize_amaxes_kernel -> partials
quantize_cast_kernel -> data, transpose, scale_inv
quantize_few_kernel -> data, scale_inv
gemm_kernel -> c
bias_squared_relu_kernel -> y
quantize_amax_kernel -> partials
quantize_cast_kernel -> data, transpose, scale_inv
quantize_cast_kernel -> data, transpose, scale_inv
gemm_kernel -> c""",
    )
    assert_expected_inline(
        launches(graphs["lower.backward"]),
        """\
quantize_amax_kernel -> partials, sums
quantize_cast_kernel -> data, transpose, scale_inv
gemm_kernel -> c
bias_squared_relu_backward_kernel -> dz
quantize_amax_kernel -> partials
quantize_cast_kernel -> transpose, scale_inv
gemm_kernel -> c
gemm_kernel -> c""",
    )


@pytest.mark.gpu
def test_the_example_runs_on_a_gpu() -> None:
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "fused and unfused agree" in done.stdout
