"""What the processes of test_check_ranks.py do: a step of a small model, each rank with options of its own. Errors go back as texts."""

from __future__ import annotations

import contextlib
import os
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from helpers.models.small_models import GeluMLP
from torch.optim.optimizer import register_optimizer_step_pre_hook

import te_dynamo
from te_dynamo.distributed import check_ranks, fp8_all_gather
from te_dynamo.distributed.check_ranks import _watches
from te_dynamo.errors import InputError, RanksDifferError
from te_dynamo.testing import count_wire


def step(rank: int, *options: dict[str, Any] | None, alone: str = "", rows: tuple[int, ...] = (32, 32)) -> str:
    """options: of each rank; None is eager. alone: what the first rank compiles by itself before. rows: of each rank's batch."""
    check_ranks()
    behind = register_optimizer_step_pre_hook(lambda *_: None)  # as a profiler's
    model = torch.nn.Sequential(GeluMLP(), GeluMLP()).bfloat16()
    mine, x = options[rank], torch.randn(rows[rank], 32, dtype=torch.bfloat16)
    call = model if mine is None else torch.compile(model, backend="te", options={"codegen": "eager", **mine})
    if rank == 0 and alone == "explain":
        te_dynamo.explain(model, x, options={"recipe": "mxfp8"})
    if rank == 0 and alone == "inference":
        with torch.no_grad():
            torch.compile(model, backend="te", options={"codegen": "eager", "recipe": "mxfp8"})(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.clone() for p in model.parameters()]
    call(x).square().sum().backward()
    error = _error(optimizer.step)
    changed = any((p != b).any() for p, b in zip(model.parameters(), before, strict=True))
    assert changed == (not error), "the check comes before the step"
    with count_wire() as wire:
        optimizer.step()
    assert not wire.bytes, "once"
    behind.remove()
    return error


def inference(rank: int, *recipes: str) -> str:
    """Checked by a second call."""
    check_ranks()
    model = GeluMLP().bfloat16()
    with torch.no_grad():
        torch.compile(model, backend="te", options={"codegen": "eager", "recipe": recipes[rank]})(
            torch.randn(32, 32, dtype=torch.bfloat16)
        )
    with contextlib.ExitStack() as stack:
        stack.callback(_forget)
        return _error(check_ranks)


def environment(rank: int, fusion: bool) -> str:
    def fuses_nothing(graph: torch.fx.Graph) -> int:
        return 0

    with contextlib.ExitStack() as stack:
        stack.callback(_forget)
        if rank == 1 and fusion:
            stack.enter_context(te_dynamo.register_graph_fusion(fuses_nothing, phase="forward"))
        elif rank == 1:
            stack.enter_context(mock.patch.dict(os.environ, {"TORCHDYNAMO_DISABLE": "1"}))
            stack.enter_context(mock.patch("te_dynamo.__version__", "9.9"))
        return _error(check_ranks)


def gathered(rank: int, *recipes: str | None) -> str:
    """Ranks that give fp8_all_gather other recipes."""
    with contextlib.ExitStack() as stack:
        stack.callback(_forget)
        check_ranks()
        return _error(lambda: fp8_all_gather(GeluMLP().bfloat16(), options={"recipe": recipes[rank]}))


def groups(rank: int) -> str:
    """Two stages of two ranks: stages differ, and the second stage's ranks among themselves too."""
    stages = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    check_ranks(stages[rank // 2])
    model = GeluMLP().bfloat16()
    options = {"recipe": ["mxfp8", "mxfp8", None, "float8_block_scaling"][rank], "codegen": "eager"}
    torch.compile(model, backend="te", options=options)(torch.randn(32, 32, dtype=torch.bfloat16)).sum().backward()
    return _error(torch.optim.SGD(model.parameters(), lr=0.1).step)


def other_group(rank: int) -> str:
    first = dist.new_group([0])
    try:
        check_ranks(first)
    except InputError as error:
        return str(error)
    finally:
        _forget()
    return ""


def _error(call: Any) -> str:
    try:
        call()
    except RanksDifferError as error:
        return str(error)
    return ""


def _forget() -> None:
    """No step comes: the next body's is not this one's."""
    for watch in _watches.values():
        watch.before_step.remove()
    _watches.clear()
