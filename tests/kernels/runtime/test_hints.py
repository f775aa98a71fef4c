"""Hints of one-pass scaling beside CUDA graphs and streams: what a replay, or another run of the same graph, finds and leaves.

Run as a program, this file is the interpreted part: TRITON_INTERPRET must be set before Triton is imported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from helpers.kernels.interpreter_process import run_in_interpreter
from helpers.kernels.kernel_cases import assert_same_bits
from torch.utils._python_dispatch import TorchDispatchMode

from te_dynamo.kernels.layouts.tensor import TensorForm
from te_dynamo.kernels.quantize import current
from te_dynamo.kernels.runtime import hints

FORM = TensorForm(torch.float8_e4m3fn, True, True, True, 0.0)
LIKE = torch.empty(1)


def captures() -> Any:
    return mock.patch.object(hints, "is_captured", lambda device: True)


@contextlib.contextmanager
def launched_by(launch: Callable[..., None]) -> Iterator[None]:
    """Inside, what `quantize` launches is given to that function: (kernel, grid, **arguments)."""
    with mock.patch.object(current, "launch", launch):
        yield


class FakeCudaGraph(TorchDispatchMode):
    """What a CUDA graph does: records operations and launches with the tensors of one run, and does the same to the same memory again."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Callable[[], Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if function._schema.is_mutable:
            self.steps.append(lambda: function(*args, **kwargs))
        elif not function.is_view:
            self.steps.append(lambda: result.copy_(function(*args, **kwargs)))
        return result

    def launch(self, *args: Any, **kwargs: Any) -> None:
        self.steps.append(lambda: current_launch(*args, **kwargs))

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        with captures(), launched_by(self.launch), self:
            yield

    def replay(self) -> None:
        for step in self.steps:
            step()


current_launch = current.launch


def values(power: int) -> torch.Tensor:
    """[128, 128] that several programs quantize, rows and columns in one launch, with a scale of its own."""
    x = torch.randn(128, 128, generator=torch.Generator().manual_seed(power + 99))
    return (x * 2.0**power).bfloat16()


def scale_bits(x: torch.Tensor) -> int:
    return int((1 / current.quantize(x, FORM)[-1]).view(torch.int32))


def check_replays(graph: str, ran_before: bool) -> None:
    """The bits of two passes in each replay, which begins with what the last one left, or with zeros where no run came before the capture."""
    if ran_before:
        hints.copy_of_hints(LIKE, graph, 1)
    x, captured = values(0), FakeCudaGraph()
    with captured.capture():
        given = hints.copy_of_hints(LIKE, graph, 1)
        codes = current.quantize(x, FORM, hint=given)
    left = 0
    for power in (0, 0, 9, -9, -9):
        x.copy_(values(power))
        captured.replay()
        assert_same_bits(codes, current.quantize(x, FORM), (graph, power))
        assert given[0, 0] == left, "a replay guesses from what the last one left, and writes it nowhere"
        left = scale_bits(x) if ran_before else 0
    assert not ran_before or int(hints.copy_of_hints(LIKE, graph, 1)[0, 0]) == left


def check_two_streams() -> None:
    """Two runs that copy before either has written, then launch in turns, while a third changes the table before each launch."""
    waiting: list[Callable[[], None]] = []
    runs = []
    for power in (4, -4):
        given = hints.copy_of_hints(LIKE, "two streams", 1)
        with launched_by(lambda *args, **kwargs: waiting.append(lambda: current_launch(*args, **kwargs))):
            runs.append((values(power), given, current.quantize(values(power), FORM, hint=given)))
    (kept,) = (table for (_, graph, *_), table in hints._kept.items() if graph == "two streams")
    first_guess, first_mend, second_guess, second_mend = waiting
    scales = [scale_bits(x) for x, *_ in runs]
    for launch, other in zip((first_guess, second_guess, second_mend, first_mend), (*scales[::-1], 0, -1), strict=True):
        kept[0, 0] = other
        launch()
    for x, given, codes in runs:
        assert_same_bits(codes, current.quantize(x, FORM), "two streams")
        assert given[0, 0] == 0
    assert kept[0].tolist() == [scales[0], kept.data_ptr()], "the last to end has left its scale"


CHECKS: dict[str, Callable[[], None]] = {
    "replays": lambda: check_replays("replays", ran_before=True),
    "capture": lambda: check_replays("capture", ran_before=False),
    "streams": check_two_streams,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_hints_beside_graphs_and_streams(name: str) -> None:
    run_in_interpreter(__file__, name)


def test_a_table_is_static_and_each_copy_new() -> None:
    first, second = (hints.copy_of_hints(LIKE, "static", 2) for _ in range(2))
    assert torch.equal(first[:, 1], second[:, 1]) and first.data_ptr() != second.data_ptr()
    with captures():  # a run came before: the graph has the address of the table
        assert torch.equal(hints.copy_of_hints(LIKE, "static", 2), first)


def test_a_capture_without_a_run_before_has_a_table_of_its_own() -> None:
    with captures():
        given = hints.copy_of_hints(LIKE, "captured", 2)
    assert given.tolist() == [[0, given.data_ptr() + 32], [0, given.data_ptr() + 48]]
    assert given.untyped_storage().nbytes() == 64, "what is written lives as long as what is read"
    assert not any("captured" in key for key in hints._kept)


def test_first_runs_of_two_threads_have_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    lasting = hints._lasting
    others = lasting(LIKE.device, 2)

    def meanwhile(device: torch.device, count: int) -> torch.Tensor:
        hints._kept[device, "threads", count] = others
        return lasting(device, count)

    monkeypatch.setattr(hints, "_lasting", meanwhile)
    assert torch.equal(hints.copy_of_hints(LIKE, "threads", 2), others)


def test_graphs_of_one_name_and_unlike_sizes_have_their_own_tables() -> None:
    """A model that is compiled for other shapes may have the same operations, of which others guess."""
    assert [len(hints.copy_of_hints(LIKE, "shapes", count)) for count in (2, 3, 2)] == [2, 3, 2]


if __name__ == "__main__":
    import sys

    from helpers.kernels import interpreted

    interpreted.install()
    np.seterr(all="ignore")
    CHECKS[sys.argv[1]]()
