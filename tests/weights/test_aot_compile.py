"""torch's aot_compile of a model whose weights are kept: what it saves another model, frozen too, runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.aot_compile import AOTCompiledFunction

import te_dynamo
from te_dynamo.errors import KeptWeightError, UnsupportedError


def frozen(state: Any = None) -> nn.Module:
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)).bfloat16().requires_grad_(False)
    if state is not None:
        model.load_state_dict(state)
    return te_dynamo.freeze(model)


@torch._dynamo.config.patch(enable_aot_compile=True)  # off in torch 2.11
def aot_compiled(model: nn.Module, x: torch.Tensor, **options: Any) -> Any:
    return torch.compile(model, backend="te", fullgraph=True, options=options).forward.aot_compile(((x,), {}))


@pytest.mark.slow
@pytest.mark.parametrize("grad", [False, True])
def test_a_frozen_model_is_saved_and_runs_with_another_models_weights(grad: bool, tmp_path: Path) -> None:
    model, x = frozen(), torch.randn(32, 128, dtype=torch.bfloat16)
    path = tmp_path / "compiled"
    with torch.set_grad_enabled(grad):
        compiled = aot_compiled(model, x)
        expected = compiled(x)
        compiled.save_compiled_function(str(path), external_data={"model": model})
        for state, same in ((model.state_dict(), True), (None, False)):
            loaded = AOTCompiledFunction.deserialize(path.read_bytes(), None, {"model": frozen(state)})
            assert [torch.equal(loaded(x), expected) for _ in range(2)] == [same, same]


@pytest.mark.slow
def test_what_another_version_saved_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, path = frozen(), tmp_path / "compiled"
    with torch.no_grad():
        compiled = aot_compiled(model, torch.randn(32, 128, dtype=torch.bfloat16))
    compiled.save_compiled_function(str(path), external_data={"model": model})
    monkeypatch.setattr("te_dynamo.weights.saved_supply.sources_digest", lambda: "another")
    with pytest.raises(KeptWeightError, match="another version of te_dynamo"):
        AOTCompiledFunction.deserialize(path.read_bytes(), None, {"model": model})


def test_a_graph_that_runs_as_it_is_cannot_be_saved() -> None:
    with pytest.raises(UnsupportedError, match='codegen="inductor"'):
        aot_compiled(frozen(), torch.randn(32, 128, dtype=torch.bfloat16), codegen="eager")
