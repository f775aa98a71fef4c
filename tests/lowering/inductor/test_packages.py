"""te_dynamo.export(kernels="triton"): what AOTInductor writes in C++ for an H200, and what it runs to choose each kernel's configuration."""

from __future__ import annotations

import ast
import builtins
import functools
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from expecttest import assert_expected_inline
from helpers.models.snapshot_models import kernels_everywhere
from torch import nn
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch.nn import functional as F

import te_dynamo
from te_dynamo.inspect.fake_cuda import move
from te_dynamo.kernels.runtime._triton import INSTALLED
from te_dynamo.recipe import Float8CurrentScaling
from te_dynamo.testing import fake_cuda

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
import generated_code

pytestmark = pytest.mark.skipif(not INSTALLED, reason="launches are Triton's")

RECIPES = ["float8_current_scaling", "float8_rowwise", "float8_block_scaling", "mxfp8", "nvfp4"]


class Swiglu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(4096)
        self.gate, self.up = (nn.Linear(4096, 14336, bias=False) for _ in range(2))
        self.down = nn.Linear(14336, 4096, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Written(BaseException):
    """Ends a compilation whose code is written. Not an Exception: Inductor wraps those into its own."""


@functools.cache
def written(recipe: Any) -> tuple[str, str]:
    """(the model's forward in C++, the Python that AOTInductor runs beforehand)"""
    from torch._inductor.codegen.cpp_wrapper_gpu import DeferredTritonCallWrapper
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.graph import GraphLowering

    write, ran = GraphLowering.codegen_with_cpp_wrapper, []

    def stop(graph: Any) -> None:
        raise Written(write(graph)[0].value, *ran)

    def tune(wrapper: Any) -> None:
        ran.append(wrapper.kernel_autotune_defs.getvalue() + wrapper.kernel_autotune_calls.getvalue())

    with torch.device("meta"):
        model = Swiglu().bfloat16().eval()
    with (
        kernels_everywhere(),
        generated_code.generated_code(),
        fake_cuda(),
        mock.patch.object(GraphLowering, "codegen_with_cpp_wrapper", stop),
        mock.patch.object(PythonWrapperCodegen, "generate_and_run_autotune_block", tune),
        mock.patch.object(DeferredTritonCallWrapper, "generate", lambda self, wrapper: None),  # has no compiled kernel
        pytest.raises(Written) as found,
    ):
        move(model)
        x = torch.empty(8192, 4096, dtype=torch.bfloat16, device="cuda")
        mode = detect_fake_mode([x])
        assert mode is not None
        assert mode.shape_env is not None
        mode.shape_env.tracked_fakes = []
        with tracing(TracingContext(mode)):
            te_dynamo.export(model, (x,), recipe=recipe, path="model.pt2", kernels="triton")
    text, tuned = found.value.args
    return text[text.index("AOTInductorModel::run_impl") :], tuned


def calls(text: str) -> list[str]:
    """The kernels that are launched, in order, without the numbers behind their names."""
    return re.findall(r"^ *call_(\w+?)_\d+\(", text, re.MULTILINE)


def test_the_kernels_of_a_swiglu() -> None:
    text, _ = written("float8_current_scaling")
    assert_expected_inline(
        "\n".join(calls(text)),
        """\
norm_rows_kernel
norm_cast_kernel
gemm_kernel
gemm_kernel
produce_amax_kernel
produce_write_kernel
gemm_kernel""",
    )
    assert re.findall(r"& (\w+) = constants_->at", text) == [
        "norm_weight",
        "quantized_0_data",
        "quantized_0_scale_inv",
        "quantized_1_data",
        "quantized_1_scale_inv",
    ]


@pytest.mark.one_fast_case
@pytest.mark.parametrize("recipe", RECIPES)
def test_nothing_of_ours_is_called_but_kernels(recipe: str) -> None:
    text, tuned = written(recipe)
    assert any(name.endswith("_kernel") for name in calls(text))
    assert not re.search(r"\bte_\w+\(|torch\.ops\.te|proxy_executor,|custom_op_wrapper", text)
    assert undefined(tuned) == set()


@pytest.mark.slow
def test_no_scale_is_guessed() -> None:
    """Hints are in this process."""
    text, _ = written(Float8CurrentScaling(power_of_two_scales=True, one_pass=True))
    assert calls(text) == calls(written(Float8CurrentScaling(power_of_two_scales=True))[0])


def undefined(code: str) -> set[str]:
    """Names that a module reads and nothing in it writes."""
    names = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)]
    imported = {
        alias.asname or alias.name.partition(".")[0]
        for node in ast.walk(ast.parse(code))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    stored = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    return {node.id for node in names} - stored - imported - set(vars(builtins))
