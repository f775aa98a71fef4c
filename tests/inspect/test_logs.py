"""What torch's own tools show: TORCH_LOGS, TORCH_TRACE, compile_times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from te_dynamo.inspect import logs
from te_dynamo.inspect.graphs import capture
from te_dynamo.report import MatchRecord, Report

PROGRAM = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 3)).bfloat16()
x = torch.randn(16, 32).bfloat16()
torch.compile(model, backend="te", options={"codegen": "eager"})(x).sum().backward()
"""


def run(**environment: str) -> str:
    """What the program writes to stderr."""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", **environment}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.slow
def test_torch_logs() -> None:
    told = run(TORCH_LOGS="+te_dynamo")
    assert "1 of 2 linears of this graph are in a recipe, 91.4% of their FLOPs" in told
    assert "linear 0 16 x 64 x 32: float8_current_scaling" in told
    assert "linear 2 16 x 3 x 64: left, N = 3" in told
    assert "forward: fuse_gemm_bias, 1 times" in told
    for stage in ("match", "joint", "forward", "backward"):
        assert f"graph after {stage}\n" in told
    assert "te.quantize(0.weight, e4m3[row" in told  # inputs have the user's names


def artifacts(folder: Path) -> dict[str, str]:
    """Name -> payload of each artifact in a trace: a record is a line, its payload follows, indented."""
    found, name = {}, ""
    (file,) = folder.iterdir()
    for line in file.read_text().splitlines():
        if line.startswith("\t"):
            found[name] = f"{found[name]}\n{line[1:]}" if name in found else line[1:]
        else:
            name = json.loads(line[line.index("{") :]).get("artifact", {}).get("name", "")
            found.pop(name, None)
    return found


@pytest.mark.slow
def test_torch_trace(tmp_path: Path) -> None:
    run(TORCH_TRACE=str(tmp_path))
    found = artifacts(tmp_path)
    decisions = json.loads(found["te_dynamo_decisions"])
    assert [(match["module"], match["matched"]) for match in decisions["matches"] if match["kind"] == "linear"] == [
        ("0", True), ("2", False),
    ]  # fmt: skip
    assert decisions["matches"][0]["flops"] == 2 * 16 * 64 * 32
    assert json.loads(found["te_dynamo_fusions_forward"])["fuse_gemm_bias"] == 1
    assert "te.gemm" in found["te_dynamo_graph_forward"]
    assert {f"te_dynamo_graph_{stage}" for stage in ("match", "joint", "forward", "backward")} <= set(found)


def test_compile_times() -> None:
    torch.compile(nn.Linear(32, 32), backend="te", options={"codegen": "eager"})(torch.randn(8, 32)).sum().backward()
    table = torch._dynamo.utils.compile_times()
    assert all(f"te_dynamo.{stage}" in table for stage in ("match", "joint", "forward", "backward"))


def test_nothing_is_made_into_text_when_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    def printed(*_: Any) -> str:
        raise AssertionError("printed")

    monkeypatch.setattr(logs, "is_traced", lambda: False)
    monkeypatch.setattr(capture, "graph_text", printed)
    monkeypatch.setattr(logs._Decision, "__str__", printed)
    logs.tell_decisions(Report([MatchRecord("linear")]))
    capture.record("match", torch.fx.Graph(), capture.GraphInProgress())
