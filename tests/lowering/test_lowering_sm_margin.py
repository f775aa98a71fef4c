"""The option "sm_margin": persistent GEMMs leave multiprocessors to other kernels, in graphs that are compiled with it alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.kernels.gemms import gemm_reference
from helpers.models.snapshot_models import SwigluMLP, calls_to_gemms_everywhere, capture_training, kernels_everywhere
from torch import Tensor, nn

from te_dynamo import backend
from te_dynamo.errors import InvalidOptionError
from te_dynamo.kernels.gemm.choose import Product, choose
from te_dynamo.kernels.runtime.margin import current_sm_margin, gemm_multiprocessors, gemm_target, sm_margin
from te_dynamo.kernels.runtime.target import TARGETS
from te_dynamo.lowering.extern import gemm as extern_gemm
from te_dynamo.options import Options
from te_dynamo.testing import fake_cuda

CUDA = torch.device("cuda")
PERSISTENT = {"gemm_kernel"}


def grids(**options: Any) -> list[tuple[str, int]]:
    """(kernel, programs) of every launch of a training step."""
    with kernels_everywhere():
        graphs = capture_training(SwigluMLP, (32, 64), "cuda", codegen="inductor", **options)
    text = "\n".join(graphs[f"lower.{phase}"] for phase in ("forward", "backward"))
    return [(kernel, int(programs)) for kernel, programs in re.findall(r"triton\.(\w+)\[\(?(\d+)", text)]


def test_products_have_fewer_programs_and_nothing_else_has() -> None:
    """A persistent kernel launches one program, or two, for each multiprocessor of the H200's 132."""
    whole, left = grids(), grids(sm_margin=20)
    assert {kernel for kernel, _ in whole} >= PERSISTENT
    for (kernel, before), (same, after) in zip(whole, left, strict=True):
        assert kernel == same
        assert after == (before * 112 / 132 if kernel in PERSISTENT else before), kernel


def test_without_the_option_torchs_own_setting_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_get_sm_carveout_experimental", lambda: 20)
    assert Options.parse().sm_margin == 20 and Options.parse({"sm_margin": 3}).sm_margin == 3
    assert {programs for kernel, programs in grids() if kernel in PERSISTENT} == {112}
    monkeypatch.delattr(torch._C, "_get_sm_carveout_experimental")
    assert Options.parse().sm_margin == 0


def test_the_cost_model_counts_what_is_left() -> None:
    """132 tiles are one wave of an H200 and two of one with a multiprocessor less."""
    product, h200 = Product(256 * 11, 128 * 12, 65536), TARGETS["h200"]
    with fake_cuda(), sm_margin(1):
        left = gemm_target(CUDA)
        assert (left.multiprocessors, left.name) == (131, "H200") and gemm_multiprocessors(CUDA) == 131
    assert choose(product, h200) != choose(product, left)
    assert current_sm_margin() == 0


@pytest.mark.parametrize("codegen", ["inductor", "eager"])
def test_a_margin_as_large_as_the_gpu_is_refused(codegen: str) -> None:
    with pytest.raises(Exception, match=r"sm_margin leaves 132 multiprocessors .* cuda.* has 132 in all: at most 131"):
        capture_training(SwigluMLP, (32, 64), "cuda", codegen=codegen, sm_margin=132)


@pytest.mark.parametrize("value", [-1, 0.5, "all", True])
def test_what_is_no_number_of_multiprocessors_is_refused(value: Any) -> None:
    with pytest.raises(InvalidOptionError, match="'sm_margin' takes a number of multiprocessors or None"):
        Options.parse({"sm_margin": value})


@pytest.fixture
def margins_of_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The margin in every call of the specialized kernel, which the reference stands in for."""
    from torch._inductor.select_algorithm import extern_kernels

    margins = []

    def te_gemm(
        a: Tensor, sa: Tensor, b: Tensor, sb: Tensor, *bias: Tensor, fast: bool, name: str, out: Tensor
    ) -> None:
        margins.append(current_sm_margin())
        out.copy_(gemm_reference(a, sa, b, sb, *(bias or (None,)), out.dtype, fast))

    calls_to_gemms_everywhere(monkeypatch)
    monkeypatch.setattr(extern_kernels, "te_gemm", extern_gemm._with_margin(te_gemm))
    with torch._inductor.config.patch(force_disable_caches=True):
        yield margins


def test_calls_of_gluon_kernels_are_told(margins_of_calls: list[int]) -> None:
    x = torch.randn(16, 32, requires_grad=True)
    for margin in (0, 8):
        torch._dynamo.reset()
        torch.compile(nn.Linear(32, 64), backend="te", options={"sm_margin": margin})(x).sum().backward()
    assert margins_of_calls == [0, 0, 0, 8, 8, 8]


def test_graphs_that_run_as_they_are_leave_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    margins = []
    monkeypatch.setattr("te_dynamo.kernels.gemm.reference.check", lambda *_: margins.append(current_sm_margin()))
    x = torch.randn(16, 32, requires_grad=True)
    torch.compile(nn.Linear(32, 64), backend="te", options={"codegen": "eager", "sm_margin": 8})(x).sum().backward()
    assert margins and set(margins) == {8}


def test_the_option_is_part_of_the_key_of_caches() -> None:
    keys = {backend.cache_key(Options.parse({"sm_margin": margin}), "") for margin in (0, 8)}
    assert len(keys) == 2
