"""A te.gemm with an addend in Inductor's code: into its addend's buffer where nothing reads that later, else into one of its own.

The kernel is stood in for on the CPU, so that the code runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.kernels.gemm_operands import operands
from helpers.kernels.gemms import arguments, gemm_reference
from helpers.models.snapshot_models import calls_to_gemms_everywhere
from helpers.slow import slow_but
from torch import Tensor

te = torch.ops.te
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def kernels_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from torch._inductor.select_algorithm import extern_kernels

    def te_gemm(a, sa, b, sb, *others: Tensor, name: str, fast: bool, adds: bool = False, out: Tensor) -> None:
        *bias, addend = others if adds else (*others, 0)
        out.copy_(gemm_reference(a, sa, b, sb, *(bias or (None,)), out.dtype, fast) + addend)

    calls_to_gemms_everywhere(monkeypatch)
    monkeypatch.setattr(extern_kernels, "te_gemm", te_gemm)
    with torch._inductor.config.patch(force_disable_caches=True):
        yield


def product(*w: Any, addend: Any = None) -> Any:
    return te.gemm(*arguments(*w, BF16, True, addend))


Function = Callable[..., Any]


def dead(*w: Any) -> Any:
    h = product(*w)
    return product(*w, addend=h) * 2


def three(*w: Any) -> Any:
    """Of linears with one input, say."""
    total = product(*w)
    for _ in range(2):
        total = product(*w, addend=total)
    return total


def through_views(*w: Any) -> Any:
    h = product(*w).view(2, -1, w[2].shape[0])
    return product(*w, addend=h.view(-1, w[2].shape[0])).view(h.shape) + 1


def read_before(*w: Any) -> Any:
    h = product(*w)
    before = h.float().sum()
    return before, product(*w, addend=h)


def read_by_what_inductor_puts_later(*w: Any) -> Any:
    h = product(*w)
    before = h * 2
    return product(*w, addend=h) + before


def read_later(*w: Any) -> Any:
    h = product(*w)
    return product(*w, addend=h) * h


def returned(*w: Any) -> Any:
    h = product(*w)
    return product(*w, addend=h), h


def an_input(*w: Any) -> Any:
    *w, x = w
    return product(*w, addend=x)


def inductors_own(*w: Any) -> Any:
    h = product(*w).sin()
    return product(*w, addend=h)


def run(function: Function, bias: bool = True, also: tuple[Tensor, ...] = ()) -> tuple[Any, str]:
    """(the results, which must be those without a compiler; Inductor's code)."""
    from torch._inductor.utils import run_and_get_code

    a, sa, b, sb, shift = operands(64, 96, 128)
    given = (a, sa, b, sb, shift if bias else None, *also)
    kept = [x.clone() for x in also]
    results, (code,) = run_and_get_code(torch.compile(function, fullgraph=True), *given)
    for got, expected in zip(*map(torch.utils._pytree.tree_leaves, (results, function(*given))), strict=True):
        assert torch.equal(got, expected)
    assert all(torch.equal(x, y) for x, y in zip(also, kept, strict=True))
    return results, code


def in_place(code: str) -> list[bool]:
    """Of each sum whether it writes its last tensor."""
    calls = [line.strip() for line in code.splitlines() if "adds=True" in line]
    return [line[:-1].split("out=")[1] in line.split("out=")[0] for line in calls]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "count"),
    [(dead, 1), (three, 2), (through_views, 1), (read_before, 1)],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_into_a_buffer_that_is_read_for_the_last_time(function: Function, count: int) -> None:
    for bias in (False, True):
        _, code = run(function, bias)
        assert in_place(code) == [True] * count, code


@pytest.mark.parametrize(
    "function", [returned, *slow_but(0, [read_later, read_by_what_inductor_puts_later, inductors_own])]
)
def test_into_a_buffer_of_its_own(function: Function) -> None:
    assert in_place(run(function)[1]) == [False]


def test_an_input_keeps_its_values() -> None:
    assert in_place(run(an_input, also=(torch.randn(64, 96).bfloat16(),))[1]) == [False]


def test_a_copy_that_inductor_makes_of_the_addend_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does where it has given the addend other strides than the graph's."""
    from torch._inductor import async_compile, ir
    from torch._inductor.utils import run_and_get_code

    monkeypatch.setattr(ir.ExternKernel, "require_contiguous", ir.ExternKernel.copy_input)
    # The code is looked at. To compile its copy in C++, and programs that find out which vectors there are, takes ten seconds.
    monkeypatch.setattr(async_compile.AsyncCompile, "cpp_pybinding", lambda *_: lambda *_: None)
    with torch._inductor.config.patch({"cpp.vec_isa_ok": False}):
        _, (code,) = run_and_get_code(torch.compile(dead, fullgraph=True), *operands(64, 96, 128))
    assert in_place(code) == [False]
