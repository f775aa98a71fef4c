"""te_dynamo.freeze: weights quantized once, no stale product, state dicts, what is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.models.recipe_cases import BY_RECIPE
from helpers.models.small_models import SwiGLU
from helpers.weights.kept_weights import (
    CODEGENS,
    EAGER,
    SLOW,
    WIDTH,
    assert_same,
    block,
    linear,
    product,
    te,
    tokens,
)
from helpers.weights.weight_writes import HIDDEN_WRITES, WRITES
from torch import Tensor, nn

import te_dynamo
from te_dynamo.errors import InputError, InvalidOptionError, KeptWeightError
from te_dynamo.inspect.fake_cuda import move
from te_dynamo.testing import fake_cuda
from te_dynamo.weights import cache as weight_cache
from te_dynamo.weights import quantize_together
from te_dynamo.weights.freeze import _watched
from te_dynamo.weights.frozen import is_dropped

DROPS = pytest.mark.parametrize("drop", [pytest.param(False, id="kept", marks=SLOW), pytest.param(True, id="dropped")])


# ---- what it computes


@pytest.mark.slow
@BY_RECIPE
def test_every_recipe_has_the_bits_of_the_model_that_is_not_frozen(recipe, quantized) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(160, 96), nn.ReLU(), nn.Linear(96, 64, bias=False)).bfloat16(), tokens(160)
    with torch.no_grad():
        expected = te(model, recipe=recipe)(x)
        torch._dynamo.reset()
        compiled = te(te_dynamo.freeze(model, drop_weights=True), recipe=recipe)
        with te_dynamo.capture() as graphs:
            results = [compiled(x), compiled(x)]
    for result in results:
        assert_same(result, expected)
    assert len(quantized) == 2, "each weight once"
    assert "0.weight" not in graphs["inference"]


@pytest.mark.parametrize("codegen", CODEGENS)
@DROPS
def test_stacked_linears_have_one_workspace(codegen: str, drop: bool, quantized) -> None:
    model, x = block(), tokens()
    with torch.no_grad():
        expected = te(model, codegen=codegen)(x)
        torch._dynamo.reset()
        with te_dynamo.capture() as graphs:
            compiled = te(te_dynamo.freeze(model, drop_weights=drop), codegen=codegen)
            assert_same(compiled(x), expected)
        assert_same(compiled(x), expected)
    inputs = [n.meta["val"].shape for n in graphs.graph("inference").find_nodes(op="placeholder")]
    assert inputs.count((3 * WIDTH, WIDTH)) == 1 and inputs.count((4 * WIDTH, WIDTH)) == 1
    assert (WIDTH, WIDTH) in inputs and len(inputs) == 2 + 1 + 2 * 4, "norms, x, buffers of four; no weight"
    assert len(quantized) == 7


@pytest.mark.slow
def test_on_a_gpu_the_stacks_are_one_gemm_each() -> None:
    model = block(512)
    with te_dynamo.capture() as graphs, fake_cuda():
        move(model)
        te_dynamo.freeze(model)
        with torch.no_grad():
            torch.compile(model, backend="te")(torch.randn(1, 2048, 512, device="cuda", dtype=torch.bfloat16))
    text = graphs["inference"]
    assert text.count("along='N'") == text.count("te.gemm_gated(") == 1
    assert text.count("te.gemm(") == 3 and text.count("addend=") == 1, "the last residual sum is in its GEMM"
    assert "te.quantize_stacked(" not in text and "aten.slice(workspace" not in text


def test_autocast_casts_before_it_quantizes(quantized) -> None:
    model, x = linear(), tokens(32, torch.float32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = te(model)(x)
        torch._dynamo.reset()
        compiled = te(te_dynamo.freeze(model))
        for _ in range(2):
            assert_same(compiled(x), expected)
    assert quantized == [(48, 32)]


@pytest.mark.slow
def test_lengths_share_what_is_kept(quantized) -> None:
    compiled = te(te_dynamo.freeze(SwiGLU(WIDTH), drop_weights=True))
    with torch.no_grad():
        for rows in (1, 8, 24):
            compiled(torch.randn(2, rows, WIDTH))
    assert len(quantized) == 3


def test_layers_that_share_a_graph_have_buffers_of_their_own(quantized) -> None:
    layers, x = [linear(torch.bfloat16) for _ in range(3)], tokens(32)
    for seed, layer in enumerate(layers):
        layer.weight.data += seed
    te_dynamo.freeze(nn.ModuleList(layers))

    def layer_forward(layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x)

    compiled = te(layer_forward)
    with torch.no_grad():
        for _ in range(2):
            for layer in layers:
                assert_same(compiled(layer, x), product(x, layer.weight))
    assert len(quantized) == 3
    other = linear(torch.bfloat16)  # not frozen: the same graph, nothing kept
    with torch.no_grad():
        for _ in range(2):
            assert_same(compiled(other, x), product(x, other.weight))
            other.weight.data.mul_(3)
    assert len(quantized) == 5


@DROPS
def test_tied_weights(drop: bool) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(64, 32)
            self.one, self.two, self.head = (nn.Linear(32, n, bias=False) for n in (32, 32, 64))
            self.two.weight, self.head.weight = self.one.weight, self.embedding.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.two(F.relu(self.one(self.embedding(ids)))))

    torch.manual_seed(0)
    model, ids = Tied(), torch.arange(32).reshape(2, 16)
    with torch.no_grad():
        expected = te(model)(ids)
        torch._dynamo.reset()
        compiled = te(te_dynamo.freeze(model, drop_weights=drop))
        for _ in range(2):
            assert_same(compiled(ids), expected)
    assert is_dropped(model.one.weight) is drop
    assert not is_dropped(model.head.weight), "the embedding reads it"
    with torch.no_grad():
        torch.testing.assert_close(te(te_dynamo.unfreeze(model))(ids), expected, rtol=0.05, atol=0.05)


# ---- writes


def test_a_write_that_torch_shows_is_quantized(quantized) -> None:
    model, x = te_dynamo.freeze(linear()), tokens(32, torch.float32)
    compiled = te(model)
    with torch.no_grad():
        compiled(x)
    for name, write in WRITES.items():
        te_dynamo.freeze(model)  # a swapped parameter is another one
        with torch.no_grad():
            compiled(x)
        write(model, new := torch.randn(48, 32))
        quantized.clear()
        for _ in range(2):
            with torch.no_grad():
                torch.testing.assert_close(compiled(x), product(x, model.weight), rtol=0, atol=0, msg=name)
        torch.testing.assert_close(model.weight.detach(), new, msg=name)
        assert len(quantized) == (2 if name == "a swapped parameter" else 1), name


@pytest.mark.parametrize("write", HIDDEN_WRITES)
def test_a_hidden_write_is_missed_found_by_the_check_and_told(write: str) -> None:
    model, x, new = te_dynamo.freeze(linear()), tokens(32, torch.float32), torch.randn(48, 32)
    compiled, checked = te(model), te(model, weight_cache_check=True)
    with torch.no_grad():
        before = compiled(x)
        assert_same(checked(x), before)
        HIDDEN_WRITES[write](model, new)
        assert_same(compiled(x), before)
        with pytest.raises(KeptWeightError, match=r"weight was written in a way .* te_dynamo\.invalidate"):
            checked(x)
        te_dynamo.invalidate(model)
        assert_same(compiled(x), product(x, new))
        assert_same(checked(x), product(x, new))


def test_what_is_written_keeps_its_address() -> None:
    """A CUDA graph goes on reading it where it was."""
    model, x = te_dynamo.freeze(linear()), tokens(32, torch.float32)
    compiled = te(model)
    with torch.no_grad():
        compiled(x)
        (entry,) = weight_cache._entries[model.weight].values()
        places = {name: buffer.data_ptr() for name, buffer in entry.buffers.items()}
        model.weight.mul_(2)
        compiled(x)
    assert {name: buffer.data_ptr() for name, buffer in entry.buffers.items()} == places


def test_another_dtype_and_back() -> None:
    model = te_dynamo.freeze(linear())
    compiled = te(model)
    with torch.no_grad():
        for dtype in (torch.float32, torch.bfloat16, torch.float32):
            model.to(dtype)
            assert_same(compiled(tokens(32, dtype)), product(tokens(32, dtype), model.weight))


def test_an_error_while_quantizing_leaves_no_half_of_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)), tokens(32, torch.float32)
    with torch.no_grad():
        expected = te(model)(x)
        torch._dynamo.reset()
        compiled = te(te_dynamo.freeze(model, drop_weights=True))
        quantize, calls = quantize_together.quantize_tensor, []

        def fails_once(*args: Any) -> Any:
            calls.append(args)
            if len(calls) == 2:
                raise MemoryError("no room")
            return quantize(*args)

        monkeypatch.setattr(quantize_together, "quantize_tensor", fails_once)
        with pytest.raises(MemoryError):
            compiled(x)
        for _ in range(2):
            assert_same(compiled(x), expected)


def test_two_threads() -> None:
    model, x = te_dynamo.freeze(linear()), tokens(32, torch.float32)
    compiled, results = te(model), []

    def run() -> None:
        with torch.no_grad():
            results.extend(compiled(x) for _ in range(3))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 6
    for result in results:
        assert_same(result, product(x, model.weight))


# ---- before and after


def test_freezing_after_the_first_call_compiles_again(quantized) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = linear(torch.bfloat16), nn.Linear(48, 32, bias=False).bfloat16()

        def forward(self, x: Tensor) -> Tensor:
            y = self.one(x)
            torch._dynamo.graph_break()
            return self.two(y)

    model, x = Broken(), tokens(32)
    compiled = te(model)
    with torch.no_grad():
        expected = compiled(x)
        assert quantized == []
        te_dynamo.freeze(model)
        assert_same(compiled(x), expected)
        assert len(quantized) == 2
        assert_same(compiled(x), expected)
        assert len(quantized) == 2
        te_dynamo.unfreeze(model)
        model.one.weight.data.mul_(3)
        assert_same(compiled(x), product(product(x, model.one.weight), model.two.weight))
    assert len(quantized) == 2


def test_nothing_outlives_the_model() -> None:
    model, x = te_dynamo.freeze(linear()), tokens(32, torch.float32)
    with torch.no_grad():
        te(model)(x)
    before = len(weight_cache._entries)
    torch._dynamo.reset()
    del model
    assert len(weight_cache._entries) == before - 1


def test_unfreezing_a_dropped_model_trains_the_quantized_values() -> None:
    model, x = linear(), tokens(32, torch.float32)
    original = model.weight.detach().clone()
    with torch.no_grad():
        expected = te(te_dynamo.freeze(model, drop_weights=True))(x)
    te_dynamo.unfreeze(model)
    assert not is_dropped(model.weight)
    torch.testing.assert_close(model.weight, original, rtol=0.07, atol=1e-3)
    y = te(model)(x)
    torch.testing.assert_close(y, expected, rtol=0.05, atol=0.05)
    y.sum().backward()
    assert model.weight.grad is not None


# ---- training


@pytest.mark.parametrize("drop", [False, True])
def test_training_a_frozen_weight_is_refused_by_name(drop: bool) -> None:
    model = nn.Sequential(nn.LayerNorm(32), linear())
    compiled, x = te(te_dynamo.freeze(model, drop_weights=drop)), tokens(32, torch.float32)
    with pytest.raises(Exception, match=r"'1.weight' is frozen for inference .*torch.no_grad.*unfreeze"):
        compiled(x)
    with torch.no_grad():
        compiled(x)
    with pytest.raises(Exception, match=r"'1.weight' is frozen"):
        compiled(x)


@DROPS
@pytest.mark.parametrize("codegen", CODEGENS)
def test_adapters_beside_frozen_weights_learn(codegen: str, drop: bool, quantized) -> None:
    class LoRA(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = SwiGLU(WIDTH).requires_grad_(False)
            self.a, self.b = nn.Linear(WIDTH, 16, bias=False), nn.Linear(16, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x + self.b(self.a(x)))

    torch.manual_seed(0)
    model, x = LoRA(), tokens(dtype=torch.float32)

    def gradients(compiled: Callable[..., Any]) -> list[Tensor]:
        model.zero_grad()
        compiled(x).square().sum().backward()
        return [p.grad for p in model.parameters() if p.requires_grad]

    expected = gradients(te(model, codegen=codegen))
    torch._dynamo.reset()
    te_dynamo.freeze(model.base, drop_weights=drop)
    compiled = te(model, codegen=codegen)
    for _ in range(2):
        for ours, theirs in zip(gradients(compiled), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0.01, atol=0.01)
    assert sorted(quantized) == [(128, 256), (256, 128), (256, 128)]


# ---- what it says


def test_explain_says_what_is_kept() -> None:
    model, x = te_dynamo.freeze(block(), drop_weights=True), tokens()
    with torch.no_grad():
        explanation = te_dynamo.explain(model, x, options=EAGER)
    rows = explanation.to_dict()["weights"]
    assert [row["weight"] for row in rows] == [
        "parts.0.q.weight, parts.0.k.weight, parts.0.v.weight",
        "parts.1.gate.weight, parts.1.up.weight",
        "parts.0.o.weight",
        "parts.1.down.weight",
    ]
    assert {row["kept"] for row in rows} == {"in place of its values"}
    values = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    assert sum(row["nbytes"] for row in rows) == values + 4 * 7, "a byte each, and a scale a weight"
    assert "MiB of quantized weights kept" in explanation.headline and "in place of its values" in str(explanation)


def test_what_cannot_be_frozen() -> None:
    with torch.inference_mode():
        model = linear()
    with pytest.raises(KeptWeightError, match=r"'weight' was made under torch.inference_mode"):
        te_dynamo.freeze(model)
    for tool in (te_dynamo.freeze, te_dynamo.unfreeze, te_dynamo.invalidate):
        with pytest.raises(InputError, match=r"expected a torch\.nn\.Module, got function"):
            tool(lambda x: x)  # type: ignore[arg-type,return-value]
    with pytest.raises(InvalidOptionError, match="'drop_weights' takes True or False, got 'no'"):
        te_dynamo.freeze(linear(), drop_weights="no")  # type: ignore[arg-type]
    managed = linear()
    managed._is_fsdp_managed_module = True
    with pytest.raises(KeptWeightError, match=r"'weight' is a Parameter of a distributed or wrapped module"):
        te_dynamo.freeze(managed)


def test_a_mixtures_experts(quantized) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Parameter(torch.randn(2, 64, 32))
            self.two = nn.Parameter(torch.randn(2, 64, 32))

        def forward(self, x: Tensor, ends: Tensor) -> Tensor:
            h = F.grouped_mm(x, self.one.transpose(-2, -1), offs=ends)
            return F.grouped_mm(h, self.two, offs=ends)

    torch.manual_seed(0)
    model, x, ends = Experts().bfloat16(), tokens(32)[0], torch.tensor([3, 8], dtype=torch.int32)
    with torch.no_grad():
        expected = te(model)(x, ends)
        torch._dynamo.reset()
        compiled = te(te_dynamo.freeze(model))
        for _ in range(2):
            assert_same(compiled(x, ends), expected)
    assert quantized == [(2, 64, 32), (2, 64, 32)]
    te_dynamo.unfreeze(model)
    gradients = []
    for options in ({}, {"weight_cache": "step"}):
        torch._dynamo.reset()
        leaf = x.clone().requires_grad_()
        gradients.append(torch.autograd.grad(te(model, **options)(leaf, ends).sum(), (leaf, *model.parameters())))
    for ours, theirs in zip(*gradients, strict=True):
        assert_same(ours, theirs)


def test_what_is_watched_does_not_grow_with_compilations() -> None:
    def call(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)

    before = len(_watched)
    for _ in range(3):
        torch._dynamo.reset()
        model = linear()
        te(call)(model, tokens(32, torch.float32))
    assert len(_watched) <= before + 1
    te_dynamo.freeze(model).requires_grad_(False)
    assert len(_watched) <= before
