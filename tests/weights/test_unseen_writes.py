"""Kept weights and writes that raise no version counter: each is told of, shown otherwise, or no write to a weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.weights.kept_weights import assert_same, linear, product, te, tokens
from torch import Tensor, nn

import te_dynamo
from te_dynamo.weights import unseen_writes

STEP = {"weight_cache": "step"}
_aten = torch.ops.aten


# ---- optimizers


OPTIMIZERS = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad]


def losses(optimizer: Callable[..., torch.optim.Optimizer], compiled: bool, **options: Any) -> list[float]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    x, wanted = torch.randn(2, 64, 32)
    call, optimizing = te(model, **options), optimizer(model.parameters())
    step = torch.compile(optimizing.step, backend="aot_eager") if compiled else optimizing.step
    found = []
    for _ in range(5):
        loss = (call(x) - wanted).square().mean()
        loss.backward()
        step()
        optimizing.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.one_fast_case
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "foreach"])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["called", "compiled"])
@pytest.mark.parametrize("cls", OPTIMIZERS, ids=lambda cls: cls.__name__)
def test_training_has_the_losses_it_has_without_the_cache(
    cls: type[torch.optim.Optimizer], compiled: bool, fused: bool
) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return cls(parameters, lr=1e-2, fused=fused)

    expected = losses(make, compiled)
    assert losses(make, compiled, **STEP) == expected
    assert expected[-1] < expected[0]


def test_the_step_of_an_optimizer_with_a_kernel_of_its_own_is_seen() -> None:
    class Own(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.numpy()[:] -= 0.1 * parameter.grad.numpy()
                    parameter.grad = None

    def make(parameters: Any) -> torch.optim.Optimizer:
        return Own(parameters, {})

    assert losses(make, False, **STEP) == losses(make, False)


def test_a_step_leaves_what_is_kept_of_weights_that_learn_nothing() -> None:
    model, x = linear().requires_grad_(False), tokens(32, torch.float32)
    call = te(model, **STEP)
    call(x)
    (entry,) = unseen_entries(model.weight)
    states = entry.states
    torch.optim.SGD([nn.Parameter(torch.ones(1)), model.weight], lr=0.1).step()
    assert states is not None and entry.states is states


def unseen_entries(weight: Tensor) -> list[Any]:
    from te_dynamo.weights import cache as weight_cache

    return list(weight_cache._entries[weight].values())


# ---- operators


def fused(name: str, overload: str, weight: Tensor) -> Callable[[], Any]:
    """A call of one of torch's fused optimizers on `weight`."""

    def state(value: float = 0.5) -> list[Tensor]:
        return [torch.full_like(weight, value)]

    rate = torch.tensor(0.1) if overload.startswith("tensor_lr") else 0.1
    common = {"lr": rate, "weight_decay": 0.0, "maximize": False}
    adam = {"beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "amsgrad": False}
    steps = [torch.ones(())]
    arguments: dict[str, tuple[list[Any], dict[str, Any]]] = {
        "sgd": ([state()], {"momentum": 0.5, "dampening": 0.0, "nesterov": False, "is_first_step": True}),
        "adam": ([state(), state(), [], steps], adam),
        "adamw": ([state(), state(), [], steps], adam),
        "adagrad": ([state(), steps], {"lr_decay": 0.0, "eps": 1e-8}),
    }
    states, own = arguments[name.strip("_")]
    call = getattr(getattr(_aten, f"_fused_{name}"), overload or "default")
    if overload.endswith("out"):
        return lambda: call(state(2.0), state(), *states, **common, **own, out=[weight])
    return lambda: call([weight], state(), *states, **common, **own)


FUSED = [
    *((f"{name}_", overload) for name in ("sgd", "adam", "adamw", "adagrad") for overload in ("", "tensor_lr")),
    *((name, overload) for name in ("sgd", "adam", "adamw", "adagrad") for overload in ("out", "tensor_lr_out")),
]
TOLD = {f"aten::_fused_{name}{'.' * bool(overload)}{overload}" for name, overload in FUSED}


@pytest.mark.slow
@pytest.mark.parametrize("through", ["weight", "detach", "data"])
@pytest.mark.parametrize(("name", "overload"), FUSED, ids=lambda part: part)
def test_a_fused_optimizer_called_by_hand_is_seen(name: str, overload: str, through: str) -> None:
    model, x = linear(), tokens(32, torch.float32)
    call = te(model, **STEP)
    call(x)
    version, before = model.weight._version, model.weight.detach().clone()
    views = {"weight": model.weight, "detach": model.weight.detach(), "data": model.weight.data}
    with torch.no_grad():
        fused(name, overload, views[through])()
    assert not torch.equal(model.weight, before)
    assert_same(call(x).detach(), product(x, model.weight))
    if not overload.endswith("out"):
        assert model.weight._version == version, "nobody but us has changed its meaning"


def test_an_operator_of_an_extension_that_declares_its_write_is_seen() -> None:
    def implementation(x: Tensor, other: Tensor | None = None) -> None:
        for tensor in (x, other):
            if tensor is not None:
                tensor.numpy()[:] *= 0.5

    library = torch.library.Library("te_test_extension", "DEF")
    library.define("halve_(Tensor(a!) x, *, Tensor(b!)? other=None) -> ()")
    library.impl("halve_", implementation, "CPU")
    model, x = linear(), tokens(32, torch.float32)
    call = te(model, **STEP)
    call(x)
    halve, spare = torch.ops.te_test_extension.halve_, torch.ones(2)
    for write in (
        lambda weight: halve(weight),
        lambda weight: halve(x=weight),
        lambda weight: halve(spare, other=weight),
    ):
        before = model.weight.detach().clone()
        write(model.weight.detach())
        assert_same(model.weight.detach(), before * 0.5)
        assert_same(call(x).detach(), product(x, model.weight))


def test_a_compiled_call_of_a_fused_optimizer_is_seen() -> None:
    model, x = linear(), tokens(32, torch.float32)
    call = te(model, **STEP)
    torch.compile(lambda: fused("sgd_", "", model.weight)(), backend="eager")()
    call(x)
    with torch.no_grad():
        torch.compile(lambda: fused("sgd_", "", model.weight)(), backend="eager")()
    assert_same(call(x).detach(), product(x, model.weight))


# ---- every other operator

NO_WEIGHT = {
    "aten::_amp_foreach_non_finite_check_and_unscale_": "gradients",
    "aten::_amp_foreach_non_finite_check_and_unscale.out": "gradients",
    "aten::_batch_norm_with_update": "running statistics",
    "aten::_native_batch_norm_legit": "running statistics",
    "aten::_cummax_helper": "a result of cummax",
    "aten::_cummin_helper": "a result of cummin",
    "aten::_cudnn_rnn_backward.out": "gradients of a recurrent net",
    "aten::lstm_mps_backward.out": "gradients of a recurrent net",
    "aten::miopen_rnn_backward.out": "gradients of a recurrent net",
    "aten::_flash_attention_forward_no_dropout_inplace": "a result of attention",
    "aten::_cudnn_attention_forward_no_dropout_inplace": "a result of attention",
    "aten::shallow_copy_data_": "gives a tensor other memory, which is seen by its address",
    "aten::_fused_moving_avg_obs_fq_helper": "statistics of an observer",
    "aten::rrelu_with_noise": "noise",
    "aten::detach_": "no values",
    "aten::record_stream": "no values",
    "aten::quantize_per_tensor.tensors_out": "tensors of 8 bits",
    "aten::dequantize.tensors_out": "has no implementation on tensors of a weight's dtype",
}
"""Operators that raise no counter, and what they write."""


def test_every_operator_that_raises_no_counter_is_told_of_or_writes_no_weight() -> None:
    te(linear(), **STEP)(tokens(32, torch.float32))
    silent = [
        name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::") and writes_in_silence(name)
    ]
    told = set(unseen_writes.silent_operators(set()))
    assert len(silent) > 150 and not told & set(silent)  # ours have a kernel there
    left = []
    for name in silent:
        if name not in TOLD and name not in NO_WEIGHT and not raises_the_counter(name):
            left.append(name)
    assert not left, "raise no counter, or the sample arguments do not fit"


def test_an_operator_with_a_kernel_and_no_schema_is_looked_at_again() -> None:
    name, known = "te_dynamo_tests::written_later", set()
    library = torch.library.Library("te_dynamo_tests", "FRAGMENT")
    library.impl("written_later", lambda x: x.zero_(), "CPU")
    assert name not in unseen_writes.silent_operators(known) and name not in known
    library.define("written_later(Tensor(a!) x) -> Tensor(a!)")
    assert name in unseen_writes.silent_operators(known) and name in known


def writes_in_silence(name: str) -> bool:
    """Whether it writes an argument and torch has no kernel for it where counters are raised."""
    if name in TOLD or torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
        return False
    if torch._C._dispatch_has_kernel_for_dispatch_key(name, "ADInplaceOrView"):
        return False
    return any(map(unseen_writes._is_written, unseen_writes._schema(name).arguments))


SAMPLES: dict[str, dict[str, Any]] = {
    "aten::_histogramdd_bin_edges.out": {"self": torch.rand(4, 2), "bins": [2, 2], "out": [torch.rand(3), torch.rand(3)]},
    "aten::adaptive_avg_pool1d.out": {"output_size": [2], "out": torch.rand(4, 2)},
    "aten::avg_pool1d.out": {"kernel_size": [2], "stride": [], "padding": [0], "out": torch.rand(4, 2)},
    "aten::split_copy.Tensor_out": {"split_size": 2, "dim": 0, "out": [torch.rand(2, 4), torch.rand(2, 4)]},
    "aten::split_with_sizes_copy.out": {"dim": 0, "out": [torch.rand(2, 4), torch.rand(2, 4)]},
    "aten::unbind_copy.int_out": {"dim": 0, "out": [torch.rand(4) for _ in range(4)]},
    "aten::unsafe_split.Tensor_out": {"split_size": 2, "dim": 0, "out": [torch.rand(2, 4), torch.rand(2, 4)]},
    "aten::unsafe_split_with_sizes.out": {"dim": 0, "out": [torch.rand(2, 4), torch.rand(2, 4)]},
    "aten::upsample_bilinear2d.vec_out": {"input": torch.rand(1, 1, 4, 4), "output_size": [4, 4], "scale_factors": None, "out": torch.rand(1, 1, 4, 4)},
    "aten::upsample_nearest2d.vec_out": {"input": torch.rand(1, 1, 4, 4), "output_size": [4, 4], "scale_factors": None, "out": torch.rand(1, 1, 4, 4)},
}  # fmt: skip
"""What differs from the arguments that suit most."""


def raises_the_counter(name: str) -> bool:
    """Calls it, and compares the counters of what it writes."""
    arguments = unseen_writes._schema(name).arguments
    given = {a.name: sample(a) for a in arguments} | SAMPLES.get(name, {})
    if name.startswith("aten::_foreach_"):  # a tensor there is a number for all, or a number for each
        shapes = {"other": (), "scalars": (1,)}
        given |= {a.name: torch.ones(shapes[a.name]) for a in arguments if str(a.type) == "Tensor"}
    values = [given[a.name] for a in arguments if unseen_writes._is_written(a)]
    written = [t for value in values for t in (value if isinstance(value, list) else [value])]
    before = [t._version for t in written]
    packet, _, overload = name.removeprefix("aten::").partition(".")
    positional = [given[a.name] for a in arguments if not a.kwarg_only]
    try:
        with torch.no_grad():
            getattr(getattr(_aten, packet), overload or "default")(
                *positional, **{a.name: given[a.name] for a in arguments if a.kwarg_only}
            )
    except RuntimeError:
        return False
    return all(t._version > version for t, version in zip(written, before, strict=True))


def sample(argument: Any) -> Any:
    kind = str(argument.type)
    if kind.startswith("Optional["):
        return None
    return {
        "Tensor": torch.rand(4, 4) + 1,
        "List[Tensor]": [torch.rand(4, 4) + 1],
        "List[int]": [2, 2],
        "List[number]": [1.0],
        "List[float]": [1.0],
        "List[Optional[Tensor]]": [None],
        "int": 1,
        "float": 1.0,
        "number": 1.0,
        "bool": False,
    }.get(kind)


# ---- flat buffers


def flattened(model: nn.Module) -> Tensor:
    """What DeepSpeed, apex and Megatron make of parameters: views of one buffer, without its version counter."""
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    for parameter, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
        parameter.data = part.view_as(parameter)
    return flat


@pytest.mark.one_fast_case
@pytest.mark.parametrize("frozen", [False, True], ids=["for a step", "frozen"])
@pytest.mark.parametrize("late", [False, True], ids=["before the first call", "after it"])
def test_a_write_to_the_flat_buffer_of_parameters_is_seen(late: bool, frozen: bool) -> None:
    model, x = nn.Sequential(linear(), nn.Linear(48, 32)).requires_grad_(not frozen), tokens(32, torch.float32)
    if frozen:
        te_dynamo.freeze(model)
    compiled = te(model, **({} if frozen else STEP))
    if late:
        compiled(x)
    flat = flattened(model)
    compiled(x)
    flat.mul_(-3.0)
    assert_same(compiled(x), te(te_dynamo.unfreeze(model))(x))


def test_explain_says_that_parts_of_larger_memory_are_not_kept() -> None:
    model = nn.Sequential(linear(), nn.Linear(48, 32))
    flattened(model)
    options = {**STEP, "codegen": "eager"}
    found = te_dynamo.explain(model, tokens(32, torch.float32), options=options)
    (note,) = (note for note in found.to_dict()["notes"] if "parts of larger memory" in note)
    assert (
        note.startswith("the weights of 2 linears ('0.weight' first) are quantized in each call")
        and not found.to_dict()["weights"]
    )
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    assert len(te_dynamo.explain(model, tokens(32, torch.float32), options=options).to_dict()["weights"]) == 2
