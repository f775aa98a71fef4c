"""Whole models through backend "te": forward and every gradient, against the same model in its own precision and
against FP8 written a second time (fp8_oracle.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.models.small_models import MODELS, SwiGLU
from helpers.oracles.fp8_oracle import fp8_linears, relative_error
from torch import Tensor, nn

import te_dynamo
from te_dynamo.recipe import Float8CurrentScaling

EAGER = {"codegen": "eager"}
SAME = 5e-3
"""Two formulations of FP8 in fp32 differ by the order of sums, and by the few values that pushes over an edge."""


def run(call: Callable[..., Any], model: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """The output of `call`, and the gradients of x and of every parameter of `model`."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = call(x)
    y.backward(dy)
    return {"y": y.detach(), "x": x.grad, **{name: p.grad for name, p in model.named_parameters()}}


def compiled(model: nn.Module, **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(model, backend="te", options={**EAGER, **options})


def example(name: str, dtype: torch.dtype) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return MODELS[name]().to(dtype), *(torch.randn(2, 24, 32).to(dtype) for _ in range(2))


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    errors = {name: relative_error(actual[name], value) for name, value in expected.items()}
    assert all(error <= bound for error in errors.values()), errors


def assert_fp8(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """FP8's distance from the model's own precision: e4m3 rounds by 2.6% (rms), e5m2 by 5%, and a gradient has been
    through several products. Not nothing either, so that something did run in FP8; but the last bias's gradient."""
    errors = {name: relative_error(actual[name], value) for name, value in expected.items()}
    assert 0.003 < errors["y"] < 0.1, errors
    assert all(error < 0.15 for error in errors.values()), errors
    assert all(error > 0.003 for name, error in errors.items() if not name.endswith("down.bias")), errors


@pytest.mark.one_fast_case
@pytest.mark.parametrize("name", MODELS)
def test_bf16_model_is_near_itself(name: str) -> None:
    model, x, dy = example(name, torch.bfloat16)
    assert_fp8(run(compiled(model), model, x, dy), run(model, model, x, dy))


@pytest.mark.one_fast_case
@pytest.mark.parametrize("name", MODELS)
def test_equals_fp8_written_a_second_time(name: str) -> None:
    """In fp32, so that nothing but FP8 rounds."""
    model, x, dy = example(name, torch.float32)
    actual = run(compiled(model), model, x, dy)
    with fp8_linears():
        expected = run(model, model, x, dy)
    assert_close(actual, expected, SAME)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama_block", "gpt_block"])
def test_equals_fp8_written_a_second_time_through_inductor(name: str) -> None:
    model, x, dy = example(name, torch.float32)
    actual = run(compiled(model, codegen="inductor"), model, x, dy)
    with fp8_linears():
        expected = run(model, model, x, dy)
    assert_close(actual, expected, SAME)


@pytest.mark.one_fast_case
@pytest.mark.parametrize("name", ["swiglu", "gpt_block", "llama_block"])
def test_fusions_change_no_bit(name: str) -> None:
    model, x, dy = example(name, torch.bfloat16)
    with te_dynamo.capture() as graphs:
        fused = run(compiled(model), model, x, dy)
    assert graphs.reports[0].fusions
    assert_close(fused, run(compiled(model, fusions=False), model, x, dy), 0.0)


# ---- recipes and rules


@pytest.mark.one_fast_case
@pytest.mark.parametrize(
    ("recipe", "oracle"),
    [
        (Float8CurrentScaling(power_of_two_scales=True), {"power_of_two": True}),
        (Float8CurrentScaling(backward_format="e4m3"), {"backward": torch.float8_e4m3fn}),
    ],
    ids=["power_of_two", "e4m3_backward"],
)
def test_recipe_fields_reach_every_operand(recipe: Float8CurrentScaling, oracle: dict[str, Any]) -> None:
    model, x, dy = example("gpt_block", torch.float32)
    actual = run(compiled(model, recipe=recipe), model, x, dy)
    with fp8_linears(**oracle):
        assert_close(actual, run(model, model, x, dy), SAME)
    with fp8_linears():  # the default recipe is another computation
        assert relative_error(actual["x"], run(model, model, x, dy)["x"]) > 2 * SAME


def test_an_epsilon_bounds_the_scale() -> None:
    """An epsilon far above an input's amax leaves most of e4m3's exponents unused: the values fall among its last steps."""
    torch.manual_seed(0)
    model, x = nn.Linear(32, 32, bias=False), torch.rand(64, 32) * 2.0**-12
    plain, bounded = (compiled(model, recipe=Float8CurrentScaling(amax_epsilon=e))(x) for e in (0.0, 16.0))
    assert relative_error(plain, model(x)) < 0.05 < relative_error(bounded, model(x)) < 0.5


@pytest.mark.one_fast_case
@pytest.mark.parametrize("name", ["llama_block", "gpt_block"])
def test_without_a_recipe_a_model_is_bit_equal_to_torchs_own_compilation(name: str) -> None:
    model, x, dy = example(name, torch.bfloat16)
    actual = run(compiled(model, recipe=None), model, x, dy)
    torch._dynamo.reset()
    assert_close(actual, run(torch.compile(model, backend="aot_eager"), model, x, dy), 0.0)


@pytest.mark.slow
def test_without_a_recipe_a_model_is_bit_equal_to_inductors() -> None:
    model, x, dy = example("llama_block", torch.bfloat16)
    actual = run(compiled(model, recipe=None, codegen="inductor"), model, x, dy)
    torch._dynamo.reset()
    assert_close(actual, run(torch.compile(model), model, x, dy), 0.0)


def test_the_first_rule_that_is_found_decides() -> None:
    model, x, dy = example("swiglu", torch.float32)
    rules = [("^gate$", None), ("gate|up", "float8_current_scaling"), ("", None)]
    actual = run(compiled(model, rules=rules), model, x, dy)
    with fp8_linears(skip=(model.gate.weight, model.down.weight)):
        assert_close(actual, run(model, model, x, dy), SAME)


def test_a_rule_chooses_another_recipe_for_one_linear() -> None:
    first, second = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
    model, x = nn.Sequential(first, second), torch.randn(8, 32)
    actual = compiled(model, rules=[("1", Float8CurrentScaling(power_of_two_scales=True))])(x)
    with fp8_linears():
        hidden = first(x)
        assert relative_error(actual, second(hidden)) > 1e-3
    with fp8_linears(power_of_two=True):
        assert relative_error(actual, second(hidden)) < 1e-3


# ---- Hugging Face's models


def language_model(name: str, **config: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = getattr(transformers, name)
    return model(model.config_class(**config))


def loss_and_gradients(call: Callable[..., Any], model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    tokens = torch.arange(48).reshape(2, 24) * 7 % 64
    loss = call(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_hugging_face_llama_and_gemma(family: str) -> None:
    model = language_model(
        f"{family}ForCausalLM", hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, vocab_size=64, use_cache=False, attn_implementation="eager",
    )  # fmt: skip
    actual, plain = loss_and_gradients(compiled(model), model), loss_and_gradients(model, model)
    with fp8_linears():
        expected = loss_and_gradients(model, model)
    assert_close(actual, expected, SAME)
    assert relative_error(actual["loss"], plain["loss"]) < 0.01


@pytest.mark.slow
def test_hugging_face_gpt2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Conv1D is torch.addmm by a weight [K, N]."""
    model = language_model(
        "GPT2LMHeadModel", n_embd=32, n_layer=1, n_head=2, vocab_size=64, n_positions=64, use_cache=False
    )
    model.eval()  # GPT-2's dropout is on by default
    actual = loss_and_gradients(compiled(model), model)
    explanation = te_dynamo.explain(model, torch.arange(8)[None], options=EAGER)
    assert [(row.module, row.matched) for row in explanation.linears] == [
        ("transformer.h.0.attn.c_attn", True),
        ("transformer.h.0.attn.c_proj", True),
        ("transformer.h.0.mlp.c_fc", True),
        ("transformer.h.0.mlp.c_proj", True),
        ("lm_head", True),
    ]
    conv1d = type(model.transformer.h[0].attn.c_attn)
    monkeypatch.setattr(conv1d, "forward", lambda self, x: F.linear(x, self.weight.t(), self.bias))
    with fp8_linears():
        assert_close(actual, loss_and_gradients(model, model), SAME)


def test_swiglu_of_one_row_and_of_many() -> None:
    """M may be anything: rows beside the tiles' and the transposes' multiples."""
    for rows in (1, 2, 15, 16, 17, 129):
        torch.manual_seed(0)
        model, x, dy = SwiGLU(), torch.randn(rows, 32), torch.randn(rows, 32)
        actual = run(compiled(model), model, x, dy)
        with fp8_linears():
            assert_close(actual, run(model, model, x, dy), SAME)
