"""What a kernel writes is analysed once for its constants, however often a graph launches it."""

import itertools
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from snapshot_models import kernels_everywhere
from torch import nn
from torch._higher_order_ops import triton_kernel_wrap

from te_dynamo.fake_cuda import capture_on_fake_cuda
from te_dynamo.kernels._triton import INSTALLED
from te_dynamo.lowering.mutation import _remembered

pytestmark = pytest.mark.skipif(not INSTALLED, reason="launches need Triton")


def _analyses(sizes: list[int]) -> int:
    """How many kernels torch compiles to see what they write, for a chain of linears between those sizes."""
    torch._dynamo.reset()
    layers = [nn.Linear(k, n, bias=False, device="meta") for k, n in itertools.pairwise(sizes)]
    compile_kernel = mock.Mock(wraps=triton_kernel_wrap.generate_ttir)
    with kernels_everywhere(), mock.patch.object(triton_kernel_wrap, "generate_ttir", compile_kernel):
        capture_on_fake_cuda(
            lambda: nn.Sequential(*layers).bfloat16(),
            lambda device: (torch.empty(512, sizes[0], dtype=torch.bfloat16, device=device),),
            options={"recipe": "float8_block_scaling"},
        )
    return compile_kernel.call_count


def test_more_layers_need_no_more_analyses() -> None:
    _analyses([512, 768, 512])
    assert _analyses([512, 768, 512, 768, 512, 768]) == 0


def _kernel(module: str, parameters: list[SimpleNamespace]) -> mock.Mock:
    return mock.Mock(spec=["fn", "params"], fn=SimpleNamespace(__module__=module), params=parameters)


def test_kernels_of_others_are_analysed_as_before() -> None:
    analyse = mock.Mock(return_value=["y"])
    answer = _remembered(analyse)
    theirs = _kernel("a_model", [])
    assert [answer(theirs, {"x": 1}, {}), answer(theirs, {"x": 1}, {})] == [["y"], ["y"]]
    assert analyse.call_count == 2


def test_what_the_analysis_can_see_decides() -> None:
    analyse = mock.Mock(side_effect=lambda kernel, kwargs, _: sorted(kwargs))
    answer = _remembered(analyse)
    parameters = [SimpleNamespace(name="SIZE", is_constexpr=True), SimpleNamespace(name="m", is_constexpr=False)]
    kernel = _kernel("te_dynamo.kernels.quantize", parameters)
    bf16, fp32 = torch.empty(2, dtype=torch.bfloat16), torch.empty(2)
    for arguments in (
        {"x": bf16, "m": 32, "SIZE": 128},
        {"x": bf16, "m": 48, "SIZE": 128},  # another multiple of 16: the same
        {"x": fp32, "m": 32, "SIZE": 128},
        {"x": bf16, "m": 1, "SIZE": 128},
        {"x": bf16, "m": 32, "SIZE": 64},
    ):
        assert answer(kernel, arguments, {}) == ["SIZE", "m", "x"]
    assert analyse.call_count == 4
