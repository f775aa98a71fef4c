"""te_dynamo.freeze(model, drop_weights=True): memory, state dicts, who still may read the values."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from helpers.models.small_models import SwiGLU
from helpers.weights.kept_weights import SLOW, WIDTH, assert_same, block, linear, te, tokens
from torch import nn

import te_dynamo
from te_dynamo.errors import KeptWeightError
from te_dynamo.weights.frozen import is_dropped


def test_dropping_frees_the_values_and_state_dicts_stay() -> None:
    model, x = block(), tokens()
    shapes = {name: (p.shape, p.dtype) for name, p in model.state_dict().items()}
    originals = {name: p.clone() for name, p in model.state_dict().items()}
    with torch.no_grad():
        compiled = te(te_dynamo.freeze(model, drop_weights=True))
        early = model.state_dict()
        result = compiled(x)
    assert all(torch.equal(early[name], originals[name]) for name in originals), "not quantized yet: exact"
    held = sum(p.untyped_storage().nbytes() for p in model.parameters())
    assert held <= 2 * (7 + 2 * WIDTH), "a place holder each, and the norms"
    saved = model.state_dict()
    assert {name: (p.shape, p.dtype) for name, p in saved.items()} == shapes
    for name, value in saved.items():
        torch.testing.assert_close(value, originals[name], rtol=0.07, atol=1e-3)
    torch._dynamo.reset()
    other = block()
    other.load_state_dict(saved)
    with torch.no_grad():
        torch.testing.assert_close(te(other)(x), result, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("assign", [pytest.param(False, marks=SLOW), True])
def test_loading_into_a_dropped_model_quantizes_what_is_loaded(assign: bool, quantized) -> None:
    model, x = te_dynamo.freeze(SwiGLU(WIDTH), drop_weights=True), tokens(dtype=torch.float32)
    compiled, other = te(model), SwiGLU(WIDTH)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
        compiled(x)
        torch._dynamo.utils.counters.clear()
        model.load_state_dict({k: v.clone() for k, v in other.state_dict().items()}, assign=assign)
        results = [compiled(x), compiled(x)]
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0, "the same graph"
        for result in results:
            assert_same(result, te(other)(x))
    assert len(quantized) == 6
    assert all(is_dropped(p) for p in model.parameters())


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved_and_loaded,
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_of_a_dropped_model_have_the_values(how: str) -> None:
    tied, x = linear().requires_grad_(False), tokens(32, torch.float32)
    tied.weight.of = "the user"
    model = te_dynamo.freeze(nn.Sequential(tied, nn.Linear(48, 32).requires_grad_(False), tied), drop_weights=True)
    exact = COPIES[how](model)
    with torch.no_grad():
        te(model)(x)
    copied = COPIES[how](model)
    for weight, name in ((copied[0].weight, "0.weight"), (copied[1].weight, "1.weight")):
        assert torch.equal(weight, model.state_dict()[name]) and not weight.requires_grad and not is_dropped(weight)
    assert copied[0].weight is copied[2].weight and copied[0].weight.of == "the user"
    torch.testing.assert_close(copied[1].weight, exact[1].weight, rtol=0.07, atol=1e-3)
    assert all(map(is_dropped, (model[0].weight, model[1].weight)))
    te_dynamo.unfreeze(model)
    assert torch.equal(COPIES[how](model)[0].weight, copied[0].weight)


def test_a_copy_of_a_place_holder_that_was_cast_is_refused() -> None:
    model = te_dynamo.freeze(linear().requires_grad_(False), drop_weights=True)
    with torch.no_grad():
        te(model)(tokens(32, torch.float32))
    with pytest.raises(KeptWeightError, match="was moved or cast"):
        copy.deepcopy(model.half())


def test_a_dropped_weight_that_the_graph_reads_otherwise_keeps_its_values() -> None:
    model, x = (
        nn.Sequential(linear(), nn.Linear(48, 10, bias=False), nn.Linear(10, 16, bias=False)),
        tokens(32, torch.float32),
    )
    with torch.no_grad():
        expected = te(model)(x)
        torch._dynamo.reset()
        compiled = te(te_dynamo.freeze(model, drop_weights=True))
        for _ in range(2):
            assert_same(compiled(x), expected)
        assert [is_dropped(p) for p in model.parameters()] == [True, False, False], "N = 10 is left in fp32"
        # Another graph, once the values are gone: refused by name.
        with pytest.raises(Exception, match=r"'0.weight' were dropped .*drop_weights=False"):
            te(model, recipe=None)(x)
        with pytest.raises(KeptWeightError, match=r"'0.weight' were dropped .*load_state_dict"):
            te(model, recipe="float8_block_scaling")(x)


def test_values_that_a_backward_of_high_precision_reads() -> None:
    model, x = linear().requires_grad_(False), tokens(32, torch.float32).requires_grad_()
    recipe = te_dynamo.recipe.Float8CurrentScaling(backward="high_precision")
    compiled = te(te_dynamo.freeze(model), recipe=recipe)
    (ours,) = torch.autograd.grad(compiled(x).sum(), x)
    assert_same(ours, torch.ones(2, 8, 48) @ model.weight)
    torch._dynamo.reset()
    te_dynamo.freeze(model, drop_weights=True)
    with pytest.raises(Exception, match=r"'weight' were dropped, .*drop_weights=False"):
        te(model, recipe=recipe)(x)
