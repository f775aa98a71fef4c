"""Dynamo's limit of compilations is told once, where a function of ours meets it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit

LIMIT = 3


class Net(nn.Module):
    """What is behind its break is compiled for each scale."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.scale = nn.Linear(32, 32), 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        torch._dynamo.graph_break()
        return self.fc(y) * self.scale


def doubled(x: Tensor) -> Tensor:
    return x + x


def told(call: Callable[[int], Any]) -> list[str]:
    """The warnings of calls 2, 3, .. that are about the limit."""
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as caught, torch._dynamo.config.patch(recompile_limit=LIMIT):
        warnings.simplefilter("always")
        for size in range(2, LIMIT + 5):
            call(size)
    texts = [str(warning.message) for warning in caught]
    return [text for text in texts if text.startswith("te_dynamo: Dynamo has compiled")]


def compiled(model: Any, backend: str = "te", **given: Any) -> Any:
    options = {"codegen": "eager"} if backend == "te" else None
    return torch.compile(model, backend=backend, options=options, dynamic=False, **given)


def place(function: Callable[..., Any], line: int = 0) -> str:
    return f"test_recompile_limit.py:{function.__code__.co_firstlineno + line}"


HELPS = (
    "3 times, its limit, and runs it as it is for other inputs: call torch._dynamo.reset(), or set torch._dynamo.config.recompile_limit higher "
    "before the first call; TORCH_LOGS=recompiles says what differed, and fullgraph=True makes it an error. The last difference: "
)


@pytest.mark.parametrize(
    ("model", "name", "argument"),
    [
        (Net(), rf"Net.forward ({place(Net.forward)})", "x"),
        (nn.Sequential(nn.Linear(32, 32)), "Sequential.forward", "args[0]"),
        (doubled, f"doubled ({place(doubled)})", "x"),
    ],
    ids=["module", "torch's own", "function"],
)
def test_the_function_is_told_once(model: Any, name: str, argument: str) -> None:
    run = compiled(model)
    size = f"tensor '{argument}' size mismatch at index 0. expected 4, actual 5"
    (text,) = told(lambda size: run(torch.randn(size, 32)))
    assert text.replace("Net.forward", "forward").partition(" has compiled ")[2] == (
        f"{name} {HELPS}{size}".replace("Net.forward", "forward")  # Python 3.10's code has no class
    )


def test_what_is_behind_a_break_is_told() -> None:
    run = compiled(model := Net())

    def call(scale: int) -> None:
        model.scale = float(scale)
        run(torch.randn(16, 32))

    (text,) = told(call)
    start = f"te_dynamo: Dynamo has compiled the rest of forward behind {place(Net.forward, 2)} {HELPS}"
    assert text.startswith(start) and "scale == 4.0" in text


def test_nothing_is_told_of_another_backend() -> None:
    run = compiled(lambda x: doubled(x), "eager")
    assert told(lambda size: run(torch.randn(size, 32))) == []


def test_a_full_graph_is_torchs_error() -> None:
    run = compiled(doubled, fullgraph=True)
    with pytest.raises(FailOnRecompileLimitHit):
        told(lambda size: run(torch.randn(size, 32)))
