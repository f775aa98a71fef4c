"""te_dynamo.nn: Transformer Engine's names, microbatches, state, and the numbers of the operations they are made of."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import te_dynamo
from te_dynamo import nn as te_nn
from te_dynamo.errors import InputError, InvalidOptionError
from te_dynamo.recipe import Float8BlockScaling

MODULES: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "Linear": (lambda: te_nn.Linear(32, 48), {"weight", "bias"}),
    "LayerNormLinear": (
        lambda: te_nn.LayerNormLinear(32, 48),
        {"layer_norm_weight", "layer_norm_bias", "weight", "bias"},
    ),
    "LayerNormMLP": (
        lambda: te_nn.LayerNormMLP(32, 64),
        {"layer_norm_weight", "layer_norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"},
    ),
    "LayerNormMLP swiglu": (
        lambda: te_nn.LayerNormMLP(32, 64, bias=False, normalization="RMSNorm", activation="swiglu"),
        {"layer_norm_weight", "fc1_weight", "fc2_weight"},
    ),
    "GroupedLinear": (lambda: te_nn.GroupedLinear(2, 32, 48), {"weight0", "weight1"}),
}
BY_MODULE = pytest.mark.parametrize("name", MODULES)


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODULES[name][0]()


def call(module: nn.Module, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
    splits = ([3, 5],) if isinstance(module, te_nn.GroupedLinear) else ()
    return module(x, *splits, is_first_microbatch=is_first_microbatch)


def tokens(seed: int = 1) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(8, 32, requires_grad=True)


@BY_MODULE
def test_state_has_transformer_engines_names(name: str) -> None:
    module = made(name)
    state = module.state_dict()
    assert set(state) == MODULES[name][1]
    other = MODULES[name][0]()
    other.load_state_dict({**state, "_extra_state": torch.empty(0)})
    torch.testing.assert_close(call(other, tokens()), call(module, tokens()), rtol=0, atol=0)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*wieght"):
        other.load_state_dict({**state, "wieght": torch.empty(0)})


@BY_MODULE
def test_microbatches_share_one_quantization(name: str) -> None:
    gradients = []
    for cached in (False, True):
        module = made(name)
        for step in range(2):
            for micro in range(3):
                first = micro == 0 if cached else None
                call(module, tokens(micro), first).square().sum().backward()
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.sub_(parameter.grad, alpha=1e-3 * (step + 1))
        gradients.append([p.grad for p in module.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_what_is_kept_is_taken_until_the_next_first_microbatch() -> None:
    module, x = made("Linear"), tokens()
    before = call(module, x, True)
    with torch.no_grad():
        module.weight.mul_(2)
    torch.testing.assert_close(call(module, x, False), before, rtol=0, atol=0)
    torch.testing.assert_close(call(module, x, True), call(module, x), rtol=0, atol=0)
    assert not torch.equal(call(module, x, False), before)


def test_inference_then_training_quantizes_the_columns_too() -> None:
    module, x = made("Linear"), tokens()
    with torch.no_grad():
        y, config = call(module, x, True), module._config_for(x, module.weight)
    assert not config.input_requires_grad and not config.weight_requires_grad
    trained = call(module, x, False)
    torch.testing.assert_close(trained, y, rtol=0, atol=0)
    trained.sum().backward()
    torch.testing.assert_close(x.grad, torch.autograd.grad(call(module, x).sum(), x)[0], rtol=0, atol=0)


@BY_MODULE
def test_what_inference_mode_kept_does_not_stop_training(name: str) -> None:
    """Its buffers can neither be written nor saved for backward outside of it."""
    module, x = made(name), tokens().detach()
    with torch.inference_mode():
        call(module, x, True)
    for first in (True, False, True):
        y = call(module, x, first)
        torch.testing.assert_close(y, call(module, x), rtol=0, atol=0)
        y.sum().backward()
    with torch.inference_mode():
        torch.testing.assert_close(call(module, x, False), y, rtol=0, atol=0)


@BY_MODULE
def test_copies_pickles_and_loads_keep_no_workspace(name: str) -> None:
    module, x = made(name), tokens()
    call(module, x, True)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for other in (copy.deepcopy(module), torch.load(file, weights_only=False)):
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(2)
        torch.testing.assert_close(call(other, x, False), call(other, x), rtol=0, atol=0)
    module.load_state_dict({k: v * 2 for k, v in module.state_dict().items()})
    torch.testing.assert_close(call(module, x, False), call(module, x), rtol=0, atol=0)
    module._load_from_state_dict({k: v * 2 for k, v in module.state_dict().items()}, "", {}, True, [], [], [])
    torch.testing.assert_close(call(module, x, False), call(module, x), rtol=0, atol=0)


@BY_MODULE
def test_files_and_their_tensors_leave_no_workspace(name: str, tmp_path: Path) -> None:
    module, x = made(name), tokens()
    doubled = {k: v * 2 for k, v in module.state_dict().items()}
    save_file(doubled, tmp_path / "model.safetensors")
    for load in (
        lambda: te_dynamo.load_checkpoint(module, tmp_path),
        lambda: te_dynamo.load_quantized(module, {k: v * 2 for k, v in doubled.items()}, {}),
    ):
        call(module, x, True)
        load()
        torch.testing.assert_close(call(module, x, False), call(module, x), rtol=0, atol=0)


def test_codes_of_a_file_leave_no_workspace(tmp_path: Path) -> None:
    module, x = te_nn.Linear(32, 48, params_dtype=torch.bfloat16), tokens().bfloat16()
    te_dynamo.save_checkpoint(
        nn.Sequential(nn.Linear(32, 48, dtype=torch.bfloat16)), tmp_path, "compressed-tensors", recipe="float8_rowwise"
    )
    with torch.no_grad():
        call(module, x, True)
        te_dynamo.load_checkpoint(nn.Sequential(module), tmp_path)
        torch.testing.assert_close(call(module, x, False), call(module, x), rtol=0, atol=0)


def test_a_weight_of_another_form_is_quantized_anew() -> None:
    module, x = made("Linear"), tokens()
    call(module, x, True)
    for weight in (torch.randn(96, 32), torch.randn(32, 96).t(), torch.randn(96, 32).bfloat16(), torch.randn(64, 32)):
        module.weight.data, module.bias = weight, None
        x = tokens().to(weight.dtype)
        torch.testing.assert_close(call(module, x, weight.shape[0] == 96), call(module, x), rtol=0, atol=0)


def test_numbers_are_those_of_the_plain_modules() -> None:
    x = tokens()
    mlp = te_nn.LayerNormMLP(32, 64, zero_centered_gamma=True)
    h = F.layer_norm(x, (32,), 1 + mlp.layer_norm_weight, mlp.layer_norm_bias)
    plain = F.linear(
        F.gelu(F.linear(h, mlp.fc1_weight, mlp.fc1_bias), approximate="tanh"), mlp.fc2_weight, mlp.fc2_bias
    )
    torch.testing.assert_close(mlp(x), plain, rtol=0.1, atol=0.05)
    gated = made("LayerNormMLP swiglu")
    gate, up = F.linear(F.rms_norm(x, (32,), eps=1e-5), gated.fc1_weight).chunk(2, -1)
    torch.testing.assert_close(gated(x), F.linear(F.silu(gate) * up, gated.fc2_weight), rtol=0.1, atol=0.05)
    grouped = made("GroupedLinear")
    plain = torch.cat([x[:3] @ grouped.weight0.t(), x[3:] @ grouped.weight1.t()])
    torch.testing.assert_close(call(grouped, x), plain, rtol=0.1, atol=0.05)


@pytest.mark.parametrize("backend", ["eager", "te"])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("kind", [te_nn.LayerNormLinear, te_nn.LayerNormMLP])
def test_one_is_added_to_a_zero_centered_gamma_in_fp32(kind: type, normalization: str, backend: str) -> None:
    torch._dynamo.reset()
    modules = [
        kind(32, 48, normalization=normalization, zero_centered_gamma=centered, params_dtype=torch.bfloat16)
        for centered in (True, False)
    ]
    state = {**modules[0].state_dict(), "layer_norm_weight": torch.randn(32).bfloat16() / 64}
    modules[0].load_state_dict(state)
    state["layer_norm_weight"] = modules[0].layer_norm_weight.detach().float() + 1
    modules[1].load_state_dict(state, assign=True)
    found = []
    for module in modules:
        x = tokens().detach().bfloat16().requires_grad_()
        with te_dynamo.capture() as graphs:
            y = torch.compile(module, backend=backend, options={"codegen": "eager"} if backend == "te" else None)(x)
        if backend == "te":
            assert (
                graphs["forward"].count(f"te.{'layer' if normalization == 'LayerNorm' else 'rms'}_norm_quantize") == 1
            )
        y.sum().backward()
        found.append([y, x.grad, *(p.grad.bfloat16() for p in module.parameters())])
        assert all(p.grad.dtype == p.dtype for p in module.parameters())
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_compiled_they_are_one_graph() -> None:
    torch._dynamo.reset()
    module, x = made("LayerNormLinear"), tokens()
    compiled = torch.compile(module, backend="te", fullgraph=True, options={"codegen": "eager"})
    torch.testing.assert_close(compiled(x), module(x), rtol=0, atol=0)


def test_explain_shows_their_linears() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(te_nn.LayerNormMLP(32, 64, recipe="mxfp8"), te_nn.Linear(32, 32), nn.Linear(32, 16))
    for microbatch in (None, True):
        told = te_dynamo.explain(lambda x, m=microbatch: model[2](model[1](model[0](x, m), m)), tokens()).to_dict()
        rows = [(row["module"].removeprefix("model."), row["recipe"], row["shape"]) for row in told["linears"]]
        assert rows == [
            ("0.fc1_weight", "mxfp8", ("8", "64", "32")),
            ("0.fc2_weight", "mxfp8", ("8", "32", "64")),
            ("1", "float8_current_scaling", ("8", "32", "32")),
            ("2", "float8_current_scaling", ("8", "16", "32")),
        ]
    (row,) = te_dynamo.explain(made("GroupedLinear"), tokens(), [3, 5]).to_dict()["linears"]
    assert (row["matched"], row["groups"], row["shape"]) == (True, 2, ("8", "48", "32"))


def test_what_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match="did you mean 'RMSNorm'"):
        te_nn.LayerNormLinear(32, 32, normalization="RMSnorm")
    with pytest.raises(InvalidOptionError, match="unknown activation 'mish'"):
        te_nn.LayerNormMLP(32, 32, activation="mish")
    with pytest.raises(InvalidOptionError, match="a recipe is a name"):
        te_nn.Linear(32, 32, recipe=None)
    with pytest.raises(InvalidOptionError, match="nvfp4: there is no grouped GEMM for it; float8_current_scaling, "):
        te_nn.GroupedLinear(2, 32, 32, recipe="nvfp4")
    with pytest.raises(InvalidOptionError, match="blocks of 128 rows would be two experts'; "):
        te_nn.GroupedLinear(2, 32, 128, recipe=Float8BlockScaling(weight_block_dims=1, grad_block_dims=2))
    with pytest.raises(InputError, match=r"m_splits \[3, 4\] are not the 8 rows in 2 groups"):
        te_nn.GroupedLinear(2, 32, 32)(tokens(), [3, 4])
    with pytest.raises(InputError, match=r"m_splits \[-1, 9\] are not the 8 rows in 2 groups"):
        te_nn.GroupedLinear(2, 32, 32)(tokens(), [-1, 9])


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_an_input_of_another_width(normalization: str) -> None:
    """A norm broadcast one of a single column."""
    for module in (
        te_nn.Linear(32, 32),
        te_nn.LayerNormLinear(32, 32, normalization=normalization),
        te_nn.LayerNormMLP(32, 32, normalization=normalization),
    ):
        for x, there in ((torch.ones(8, 1), r"\[8, 1\]"), (torch.ones(()), r"\[\]"), (None, "a NoneType")):
            with pytest.raises(
                InputError, match=rf"{type(module).__name__}: expected an input \[\.\.\., 32\], got {there}"
            ):
                module(x)
    with pytest.raises(InputError, match=r"GroupedLinear: expected an input \[\.\.\., 32\], got \[8, 16\]"):
        te_nn.GroupedLinear(2, 32, 32)(torch.ones(8, 16), [4, 4])
