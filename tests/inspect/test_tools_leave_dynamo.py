"""Every tool that compiles a model leaves Dynamo's tables and the process as they were, however often it runs, and finds the same each time."""

from __future__ import annotations

import ast
import concurrent.futures
import copy
import random
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo import pgo
from torch._dynamo.utils import counters, graph_break_reasons

import te_dynamo
from te_dynamo.errors import InputError
from te_dynamo.inspect.dynamo import one_at_a_time
from te_dynamo.testing import capture_on_fake_cuda

OPTIONS = {"codegen": "eager"}
PACKAGE = Path(te_dynamo.__file__).parent
ALL_THE_USERS = {"entry.py", "command_line/bench.py", "command_line/calibrate.py", "command_line/generate.py"}
"""What is compiled for the user to call, and what runs a model in a process of its own, outside of any tool."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Breaks(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        torch._dynamo.graph_break()
        return self.down(x.relu())


class Skipped(Block):
    """Dynamo gives its forward up: data decides the shape of what the loop takes."""

    def forward(self, x: Tensor) -> Tensor:
        for sign in (1, -1):
            x = x.index_add(0, rows := torch.where(x[:, 0] * sign > 0)[0], self.down(self.up(x[rows])))
        return x


def on_fake_cuda(model: nn.Module, x: Tensor) -> list[str]:
    graphs = capture_on_fake_cuda(
        lambda: copy.deepcopy(model), lambda device: (torch.empty(x.shape, device=device),), options=OPTIONS
    )
    return list(graphs.stages)


def compared(model: nn.Module, x: Tensor) -> list[str]:
    try:
        return [row.module for row in te_dynamo.compare(model, x, options=OPTIONS).rows]
    except InputError as error:
        return [str(error)]


TOOLS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "explain": lambda model, x: str(te_dynamo.explain(model, x, options=OPTIONS)),
    "explain on another GPU": lambda model, x: (
        [] if isinstance(model, Skipped) else str(te_dynamo.explain(model, x, options=OPTIONS, device="b200"))
    ),
    "compare": compared,
    "compare_recipes": lambda model, x: (
        [] if isinstance(model, Skipped) else str(te_dynamo.compare_recipes(model, x, recipes=["mxfp8", "nvfp4"]))
    ),
    "capture_on_fake_cuda": lambda model, x: [] if isinstance(model, Skipped) else on_fake_cuda(model, x),
}  # fmt: skip


def codes(model: nn.Module) -> dict[str, Any]:
    return {cls.__qualname__: cls.forward.__code__ for cls in (type(model), nn.Linear)}


def state(model: nn.Module) -> dict[str, Any]:
    """All that a tool could leave behind."""
    return {
        "compiled": {
            name: [entry.compile_id for entry in _debug_get_cache_entry_list(code) if entry.code is not None]
            for name, code in codes(model).items()
        },
        "sizes": dict(pgo.get_code_state()),
        "counts": {kind: dict(counts) for kind, counts in counters.items() if counts},
        "breaks": len(graph_break_reasons),
        "config": torch._dynamo.config.save_config(),
        "random": (torch.get_rng_state().tolist(), random.getstate()),
        "modes": (torch.is_grad_enabled(), torch.get_default_dtype(), torch.compiler.is_compiling()),
        "model": {name: value.tolist() for name, value in model.state_dict().items()},
        "filters": list(warnings.filters),
    }


def names(tree: ast.AST) -> set[str]:
    return {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


def test_whatever_compiles_a_model_does_so_in_the_one_isolation() -> None:
    called = {str(path.relative_to(PACKAGE)): names(ast.parse(path.read_text())) for path in PACKAGE.rglob("*.py")}
    compiling = {path for path, found in called.items() if found & {"torch.compile", "compiled_afresh"}}
    compiling.remove("inspect/target.py")  # where compiled_afresh is
    assert compiling >= ALL_THE_USERS | {"inspect/explain.py", "accuracy/compare.py"}
    assert [path for path in compiling - ALL_THE_USERS if "dynamo_untouched" not in called[path]] == []
    assert [path for path in compiling - ALL_THE_USERS if "@one_at_a_time" not in (PACKAGE / path).read_text()] == []


@pytest.mark.one_fast_case
@pytest.mark.parametrize("compiled_before", [False, True])
@pytest.mark.parametrize("make", [Block, Breaks, Skipped])
@pytest.mark.parametrize(
    "tool", [pytest.param(tool, marks=() if tool in ("explain", "compare") else pytest.mark.slow) for tool in TOOLS]
)
def test_a_tool_leaves_all_as_it_was(tool: str, make: type[Block], compiled_before: bool) -> None:
    torch._dynamo.reset()
    counters.clear()
    model, x = make(), torch.randn(16, 32)
    made: list[int] = []

    def backend(gm: Any, example_inputs: Any) -> Any:
        made.append(1)
        return gm.forward

    compiled = torch.compile(model, backend=backend, dynamic=False)
    if compiled_before:
        compiled(x)
    mine, before = len(made), state(model)
    first = TOOLS[tool](model, x)
    assert state(model) == before
    for _ in range(8 if make is Block and compiled_before else 1):  # Dynamo compiles a function eight times
        assert TOOLS[tool](model, x) == first
    assert state(model) == before
    if compiled_before:
        compiled(x)
        assert len(made) == mine, "what was compiled stays, and is not tried again"
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=not compiled_before):
        for size in range(17, 24):
            compiled(torch.randn(size, 32))
    assert len(made) == 0 if make is Skipped and compiled_before else len(made) >= 7, "all eight are the user's"


def test_threads_wait_for_each_other() -> None:
    """They changed the tables of one Dynamo at a time, and the process ended."""
    model, x = nn.Sequential(nn.Linear(32, 32)), torch.randn(32, 32)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(ask, model, x) for ask in (te_dynamo.explain, te_dynamo.compare, te_dynamo.explain)]
    first, compared, second = (each.result() for each in asked)
    assert first.coverage == second.coverage == 1 and len(compared.rows) == 1


def test_a_compilation_does_not_wait_for_another_threads_explain() -> None:
    """That one may wait for the compilation, which holds a lock of torch's."""
    inside, done = threading.Event(), threading.Event()

    @one_at_a_time
    def explains() -> None:
        inside.set()
        done.wait(60)

    def backend(gm: Any, example_inputs: Any) -> Any:
        return te_dynamo.explain(nn.Linear(32, 32), torch.randn(16, 32))

    thread = threading.Thread(target=explains)
    thread.start()
    assert inside.wait(60)
    try:
        with pytest.raises(
            torch._dynamo.exc.BackendCompilerFailed, match="runs in another thread: call it outside of a compilation"
        ):
            torch.compile(nn.Linear(32, 32), backend=backend)(torch.randn(16, 32))
    finally:
        done.set()
        thread.join()
