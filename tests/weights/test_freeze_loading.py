"""Loads into models with dropped weights: each parameter has what was loaded, or what it had before, whatever happens."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.models.small_models import Attention
from helpers.slow import slow_but
from helpers.weights.kept_weights import WIDTH, assert_same, block, linear, product, te, tokens
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import prune

import te_dynamo
from te_dynamo.errors import KeptWeightError
from te_dynamo.weights import cache as weight_cache
from te_dynamo.weights.frozen import is_dropped

State = dict[str, Any]


def two_linears() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64, bias=False), nn.ReLU(), nn.Linear(64, 32, bias=False)).bfloat16()


def dropped(model: nn.Module, x: Tensor) -> Callable[..., Any]:
    """Compiled, and called once: the high-precision values are gone."""
    compiled = te(te_dynamo.freeze(model, drop_weights=True))
    compiled(x)
    return compiled


def other(model: nn.Module) -> State:
    """Another state of the model."""
    return {name: value.clone() * 3 for name, value in model.state_dict().items()}


def raising(*_: Any) -> None:
    raise KeyError("a hook's own")


def _wrong_shape(model: nn.Module) -> None:
    model.load_state_dict({**other(model), "0.weight": torch.randn(3, 3), "2.weight": torch.randn(3, 3)})


def _wrong_shape_assigned(model: nn.Module) -> None:
    model.load_state_dict({"0.weight": torch.randn(3, 3), "2.weight": torch.randn(64)}, assign=True)


def _no_tensor(model: nn.Module) -> None:
    model.load_state_dict({"0.weight": [1.0], "2.weight": None})


def _swapped(model: nn.Module) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict(other(model), assign=True)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def _hook_before(model: nn.Module) -> None:
    model[0].register_load_state_dict_pre_hook(raising)
    model.load_state_dict(other(model))


def _hook_after(model: nn.Module) -> None:
    model.load_state_dict({"0.weight": torch.randn(3, 3)}, strict=False)


def _child(model: nn.Module) -> None:
    model[0].child = nn.Identity()
    model[0].child.register_load_state_dict_pre_hook(raising)
    model.load_state_dict({"0.weight": torch.randn(3, 3)})


FAILING = [_wrong_shape, _wrong_shape_assigned, _no_tensor, _swapped, _hook_before, _hook_after, _child]


@pytest.mark.one_fast_case
@torch.no_grad()
@pytest.mark.parametrize("called", slow_but(1, [True, False]), ids=["quantized", "not quantized yet"])
@pytest.mark.parametrize("load", FAILING)
def test_a_load_that_fails_changes_nothing(load: Callable[[nn.Module], None], called: bool, quantized) -> None:
    model, x = two_linears(), tokens(32)
    if load is _hook_after:  # registered first, called first: before the load is over for te_dynamo
        model[0].register_load_state_dict_post_hook(raising)
    expected = te(model)(x)
    torch._dynamo.reset()
    compiled = te(te_dynamo.freeze(model, drop_weights=True))
    if called:
        compiled(x)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    quantized.clear()
    for _ in range(2):
        with pytest.raises((RuntimeError, KeyError)):
            load(model)
        for name, value in model.state_dict().items():
            assert_same(value, saved[name])
    for _ in range(2):
        assert_same(compiled(x), expected)
    assert all(is_dropped(p) and p.untyped_storage().nbytes() == 2 for p in model.parameters()), "one NaN each"
    assert len(quantized) == (0 if called else 2)


@torch.no_grad()
def test_a_load_that_fails_half_way_has_loaded_what_came_before() -> None:
    model, x = two_linears(), tokens(32)
    compiled, state, before = dropped(model, x), other(model), model.state_dict()
    model[2].register_load_state_dict_pre_hook(raising)
    with pytest.raises(KeyError):
        model.load_state_dict(state)
    after = model.state_dict()
    assert_same(after["0.weight"], state["0.weight"])
    assert_same(after["2.weight"], before["2.weight"])
    reference = two_linears()
    reference[0].weight.copy_(state["0.weight"])
    for _ in range(2):
        assert_same(compiled(x), te(reference)(x))
        assert all(map(is_dropped, model.parameters()))


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("given", [[], ["parts.0.q"], ["parts.0.v", "parts.1.up"], ["parts.0.o"]], ids="+".join)
def test_a_partial_load_quantizes_what_is_loaded(given: list[str], assign: bool) -> None:
    """q, k and v are in one stack, and so are gate and up: what is not loaded keeps its bits."""
    model, reference, x = block(), block(), tokens()
    compiled = dropped(model, x)
    state = {f"{name}.weight": torch.randn(reference.get_submodule(name).weight.shape) for name in given}
    state = {name: value.to(torch.bfloat16) / 8 for name, value in state.items()}
    reference.load_state_dict(state, strict=False)
    kept = {name: value for name, value in model.state_dict().items() if name not in state}
    for _ in range(2):
        model.load_state_dict({name: value.clone() for name, value in state.items()}, strict=False, assign=assign)
        for _ in range(2):
            saved = model.state_dict()
            for name, value in kept.items():
                assert_same(saved[name], value)
            assert_same(compiled(x), te(reference)(x))
    assert all(is_dropped(p) for p in model.parameters() if p.dim() == 2)


@torch.no_grad()
def test_adapters_are_loaded_beside_dropped_weights(quantized) -> None:
    class LoRA(nn.Linear):
        pass

    torch.manual_seed(0)
    model, x = nn.Sequential(linear(torch.bfloat16), LoRA(48, 16, bias=False).bfloat16()), tokens(32)
    compiled = dropped(model, x)
    quantized.clear()
    model.load_state_dict({"1.weight": torch.randn(16, 48)}, strict=False)
    assert_same(compiled(x), product(product(x, linear(torch.bfloat16).weight), model[1].weight))
    assert quantized == [(16, 48)]


@torch.no_grad()
def test_a_loader_that_runs_no_hooks_after_it() -> None:
    """As loaders that walk the modules themselves."""
    model, x = two_linears(), tokens(32)
    compiled, state, errors = dropped(model, x), other(model), []
    for index in (0, 2):
        model[index]._load_from_state_dict(state, f"{index}.", {}, True, [], [], errors)
    assert errors == []
    for name, value in model.state_dict().items():
        assert_same(value, state[name])
    reference = two_linears()
    reference.load_state_dict(state)
    for _ in range(2):
        assert_same(compiled(x), te(reference)(x))
    assert all(map(is_dropped, model.parameters()))


@torch.no_grad()
@pytest.mark.parametrize("hooked", [True, False])
def test_a_loader_that_writes_through_data(hooked: bool) -> None:
    """No version counter shows it."""
    model, x, new = linear(), tokens(32, torch.float32), torch.randn(48, 32)
    compiled = dropped(model, x)

    def load(module: nn.Module, state: State, prefix: str, *_: Any) -> None:
        module.weight.data.copy_(state.pop(f"{prefix}weight"))

    model.register_load_state_dict_pre_hook(load)
    if hooked:
        model.load_state_dict({"weight": new}, strict=False)
    else:
        model._load_from_state_dict({"weight": new}, "", {}, False, [], [], [])
    for _ in range(2):
        assert_same(compiled(x), product(x, new))
    assert is_dropped(model.weight)


@torch.no_grad()
def test_a_submodules_state() -> None:
    model, x = two_linears(), tokens(32)
    compiled, state = dropped(model, x), {"weight": torch.randn(32, 64).bfloat16()}
    model[2].load_state_dict(state)
    assert_same(compiled(x), product(product(x, two_linears()[0].weight).relu(), state["weight"]))


@torch.no_grad()
@pytest.mark.parametrize("given", ["one.weight", "two.weight"])
@pytest.mark.parametrize("assign", [False, True])
def test_a_weight_of_two_modules(given: str, assign: bool) -> None:
    torch.manual_seed(0)
    model, x = nn.ModuleDict({name: nn.Linear(32, 32, bias=False).bfloat16() for name in ("one", "two")}), tokens(32)
    model.two.weight = model.one.weight
    first, new = model.one.weight.clone(), torch.randn(32, 32).bfloat16()
    te_dynamo.freeze(model, drop_weights=True)
    compiled = {name: te(model[name]) for name in ("one", "two")}
    for call in compiled.values():
        assert_same(call(x), product(x, first))
    model.load_state_dict({given: new.clone()}, strict=False, assign=assign)
    for name, call in compiled.items():
        assert_same(call(x), product(x, first if assign and given != f"{name}.weight" else new))
        assert is_dropped(model[name].weight)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({"one.weight": new * 2, "two.weight": torch.zeros(3, 3)})
    assert_same(compiled["one"](x), product(x, new * 2))


@torch.no_grad()
def test_one_weight_at_a_time_has_its_values_while_it_is_loaded() -> None:
    model, x, held = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(4))), tokens(32, torch.float32), []
    dropped(model, x)
    te_dynamo.freeze(model, drop_weights=True)
    for module in model:
        hook = lambda *_: held.append(sum(p.untyped_storage().nbytes() for p in model.parameters()))  # noqa: E731
        module.register_load_state_dict_pre_hook(hook)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({f"{index}.weight": torch.zeros(3, 3) for index in range(4)})
    assert held == [4 * (32 * 32 + 3)] * 4


@torch.no_grad()
def test_calls_of_another_thread_during_a_load() -> None:
    """They see old values or new ones, and the load does not fail for them."""
    model, x, results = two_linears(), tokens(32), []
    compiled, state = dropped(model, x), other(model)
    before = compiled(x)

    def call(*_: Any) -> None:
        @torch.no_grad()
        def run() -> None:
            results.append(compiled(x))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    handle = model[0].register_load_state_dict_pre_hook(call)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({"0.weight": torch.zeros(3, 3)})
    model.load_state_dict(state)
    assert len(results) == 2
    for result in results:
        assert_same(result, before)
    handle.remove()
    reference = two_linears()
    reference.load_state_dict(state)
    assert_same(compiled(x), te(reference)(x))
    assert all(map(is_dropped, model.parameters()))


def test_under_inference_mode(quantized) -> None:
    model, x, new = linear(), tokens(32, torch.float32), torch.randn(48, 32)
    with torch.inference_mode():
        compiled = dropped(model, x)
        for _ in range(2):
            model.load_state_dict({"weight": new})
            for _ in range(2):
                assert_same(compiled(x), product(x, new))
    assert len(quantized) == 3 and is_dropped(model.weight) and not model.weight.is_inference()
    te_dynamo.unfreeze(model)
    assert not model.weight.is_inference()


@torch.no_grad()
def test_values_that_are_assigned_must_show_writes() -> None:
    model, x = linear().requires_grad_(False), tokens(32, torch.float32)
    dropped(model, x)
    with torch.inference_mode():
        new = torch.randn(48, 32)
    with pytest.raises(KeptWeightError, match=r"'weight' was made under torch.inference_mode"):
        model.load_state_dict({"weight": new}, assign=True)


# ---- what else ends or moves what is kept


@torch.no_grad()
def test_a_stack_outlives_its_members() -> None:
    """The values of k and v are kept with q's alone."""
    torch.manual_seed(0)
    model, reference, x = Attention(WIDTH).bfloat16(), Attention(WIDTH).bfloat16(), tokens()
    reference.load_state_dict(model.state_dict())
    compiled = dropped(model, x)
    saved = model.state_dict()
    te_dynamo.unfreeze(model.q)
    assert_same(model.q.weight, saved["q.weight"])
    reference.q.weight.copy_(model.q.weight)
    for _ in range(2):
        assert_same(compiled(x), te(reference)(x))
    model.q.weight = nn.Parameter(torch.zeros_like(model.q.weight))
    for name, value in model.state_dict().items():
        assert_same(value, saved[name] * (name != "q.weight"))
    te_dynamo.unfreeze(model)
    assert_same(model.k.weight, saved["k.weight"])


@torch.no_grad()
def test_a_stack_lives_until_the_last_of_its_members() -> None:
    torch.manual_seed(0)
    model = Attention(WIDTH).bfloat16()
    dropped(model, tokens())
    saved = model.state_dict()
    torch._dynamo.reset()
    (entry,) = {weakref.ref(entry) for entry in weight_cache._entries[model.k.weight].values()}
    del model.q, model.v
    assert entry() is not None
    for name, value in model.state_dict().items():
        assert_same(value, saved[name])
    del model
    gc.collect()
    assert entry() is None


@torch.no_grad()
def test_what_is_saved_is_what_was_loaded_last() -> None:
    """Not what another graph quantized before that, in its own recipe."""
    model, x, new = te_dynamo.freeze(linear()), tokens(32, torch.float32), torch.full((48, 32), 0.5)
    one, two = te(model), te(model, recipe="float8_block_scaling")
    for compiled in (two, one, two):
        compiled(x)
    te_dynamo.freeze(model, drop_weights=True)
    for compiled in (one, two):
        torch._dynamo.reset()
        model.load_state_dict({"weight": new})
        compiled(x)
        assert_same(model.state_dict()["weight"], new)
        new = new * 2


@torch.no_grad()
def test_nothing_of_a_dropped_weight_can_be_invalid(quantized) -> None:
    model, x = linear(), tokens(32, torch.float32)
    compiled = dropped(model, x)
    before = compiled(x)
    te_dynamo.invalidate(model)
    assert_same(compiled(x), before)
    assert len(quantized) == 1


@torch.no_grad()
def test_a_dropped_weight_under_another_name_is_saved() -> None:
    model, x = linear(), tokens(32, torch.float32)
    dropped(model, x)
    saved = model.state_dict()["weight"]
    prune.identity(model, "weight")
    assert_same(model.state_dict()["weight_orig"], saved)


@torch.no_grad()
def test_a_place_holder_that_is_cast_is_an_error_until_there_are_values() -> None:
    model, x, new = linear(), tokens(32), torch.randn(48, 32).bfloat16()
    compiled = dropped(model, x.float())
    model.bfloat16()
    for read in (lambda: compiled(x), model.state_dict, lambda: te_dynamo.unfreeze(model)):
        with pytest.raises(
            KeptWeightError, match=r"'weight' were dropped .* torch.bfloat16 on cpu.*unfreeze.*before Module.to"
        ):
            read()
    model.load_state_dict({"weight": new})
    for _ in range(2):
        assert_same(compiled(x), product(x, new))
    model.weight.data = torch.full((48, 32), 0.5, dtype=torch.bfloat16)
    assert_same(compiled(x), product(x, model.weight))


@torch.no_grad()
def test_no_other_memory_is_taken_for_a_place_holder() -> None:
    """The allocator gives an address again once its memory is free."""
    model, x = linear(), tokens(32, torch.float32)
    compiled = dropped(model, x)
    place_holder = StorageWeakRef(model.weight.untyped_storage())
    model.weight.data = torch.randn(48, 32)
    assert not place_holder.expired()
    assert_same(compiled(x), product(x, model.weight))


@torch.no_grad()
def test_a_model_without_memory() -> None:
    with torch.device("meta"):
        model = linear()
    te_dynamo.freeze(model, drop_weights=True)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({"weight": torch.empty(3, 3, device="meta")})
    new, x = torch.randn(48, 32), tokens(32, torch.float32)
    model.load_state_dict({"weight": new}, assign=True)
    for _ in range(2):
        assert_same(te(model)(x), product(x, new))
    with FakeTensorMode():
        fake = te_dynamo.freeze(nn.Linear(32, 48, bias=False), drop_weights=True)
        fake.load_state_dict(fake.state_dict())
        assert fake.state_dict()["weight"].shape == (48, 32)
