"""kernels/runtime/known_launches.py: what Triton is asked once, and what it is asked again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from te_dynamo.kernels.runtime import known_launches
from te_dynamo.kernels.runtime.known_launches import launch_known


class Compiled(CompiledKernel):
    def __init__(self) -> None:
        self.launched: list[Any] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args: self.launched.append((grid, args))


class Kernel(JITFunction[Any]):
    """Takes x, N, SIZE and options."""

    def __init__(self) -> None:
        self.arg_names = ["x", "N", "SIZE"]
        self.compiled: list[Compiled] = []
        self.asked: list[Any] = []

    def __getitem__(self, grid: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Compiled:
            self.asked.append((grid, args, kwargs))
            self.compiled.append(Compiled())
            return self.compiled[-1]

        return run


@pytest.fixture(autouse=True)
def _without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_device=lambda: 0))
    monkeypatch.setattr(known_launches, "_known", {})


def test_the_second_launch_is_of_what_was_compiled() -> None:
    kernel, x, y = Kernel(), torch.empty(16), torch.empty(16)
    launch_known(kernel, (3,), (x,), {"SIZE": 8, "num_warps": 4, "N": 16})
    launch_known(kernel, (5, 2), (y,), {"SIZE": 8, "num_warps": 4, "N": 16})
    assert len(kernel.asked) == 1
    ((grid, arguments),) = kernel.compiled[0].launched
    assert (
        grid == (5, 2, 1) and arguments[0] is y and arguments[1:] == (16, 8)
    )  # in the kernel's order, without options


@pytest.mark.parametrize(
    ("x", "kwargs"),
    [
        (torch.empty(17)[1:], {"N": 16, "SIZE": 8, "num_warps": 4}),  # not aligned
        (torch.empty(16, dtype=torch.bfloat16), {"N": 16, "SIZE": 8, "num_warps": 4}),
        (torch.empty(16), {"N": 1, "SIZE": 8, "num_warps": 4}),
        (torch.empty(16), {"N": 16.0, "SIZE": 8, "num_warps": 4}),
        (torch.empty(16), {"N": 16, "SIZE": 32, "num_warps": 4}),
        (torch.empty(16), {"N": 16, "SIZE": 8, "num_warps": 8}),
        (None, {"N": 16, "SIZE": 8, "num_warps": 4}),
    ],
)
def test_another_kind_is_asked_for(x: Any, kwargs: dict[str, Any]) -> None:
    kernel = Kernel()
    launch_known(kernel, (3,), (torch.empty(16),), {"N": 16, "SIZE": 8, "num_warps": 4})
    launch_known(kernel, (3,), (x,), kwargs)
    assert len(kernel.asked) == 2 and not kernel.compiled[0].launched


def test_another_device_is_asked_for() -> None:
    kernel = Kernel()
    for device in (0, 1, 0):
        with mock.patch.object(driver.active, "get_current_device", lambda device=device: device):
            launch_known(kernel, (3,), (torch.empty(16), 16, 8), {})
    assert len(kernel.asked) == 2 and len(kernel.compiled[0].launched) == 1


def test_ever_new_shapes_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_launches, "_MOST", 2)
    kernel = Kernel()
    for n in (16, 32, 48, 48):
        launch_known(kernel, (3,), (torch.empty(16), n, 8), {})
    assert len(kernel.asked) == 3 and len(known_launches._known) == 1


def test_what_triton_is_still_compiling_is_not_kept() -> None:
    kernel = Kernel()
    with mock.patch.object(Kernel, "__getitem__", lambda self, grid: lambda *args, **kwargs: self.asked.append(grid)):
        for _ in range(2):
            launch_known(kernel, (3,), (torch.empty(16), 16, 8), {})
    assert len(kernel.asked) == 2
