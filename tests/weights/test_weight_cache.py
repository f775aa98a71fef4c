"""options={"weight_cache": "step"}: one quantization a weight an optimizer step; without it nothing is kept."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.models.recipe_cases import BY_RECIPE
from helpers.models.small_models import SwiGLU
from helpers.weights.kept_weights import (
    CODEGENS,
    STEP,
    WIDTH,
    assert_same,
    linear,
    product,
    te,
    tokens,
    train,
)
from helpers.weights.weight_writes import HIDDEN_WRITES, WRITES
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import te_dynamo
from te_dynamo.errors import InvalidOptionError, KeptWeightError
from te_dynamo.options import Options
from te_dynamo.passes.torch_ir.fsdp import is_from_fsdp
from te_dynamo.testing import capture_on_fake_cuda
from te_dynamo.weights import cache as weight_cache


@pytest.mark.parametrize("codegen", CODEGENS)
def test_one_quantization_a_weight_a_step_and_the_same_bits(codegen: str, quantized) -> None:
    batches = [tokens(), tokens() * 2, tokens() * 3]
    results = []
    for options in ({}, STEP):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = SwiGLU(WIDTH).bfloat16()
        with te_dynamo.capture() as graphs:
            results.append(train(model, te(model, codegen=codegen, **options), batches, steps=2))
    for ours, theirs in zip(*results, strict=True):
        assert_same(ours, theirs)
    assert len(quantized) == 2 * 3
    sources = [n.args[0] for n in graphs.graph("forward").nodes if str(n.target).startswith("te.quantize")]
    weights = {parameter.shape for parameter in model.parameters()}
    assert sources and not any(isinstance(s, list) or s.meta["val"].shape in weights for s in sources)


@pytest.mark.slow
@BY_RECIPE
def test_every_recipe_trains_with_the_bits_it_has_without(recipe, quantized) -> None:
    torch.manual_seed(0)
    model, batches = nn.Linear(160, 96).bfloat16(), [tokens(160), tokens(160) * 2]
    state = {k: v.clone() for k, v in model.state_dict().items()}
    expected = train(model, te(model, recipe=recipe), batches, 2)
    torch._dynamo.reset()
    model.load_state_dict(state)
    for ours, theirs in zip(train(model, te(model, recipe=recipe, **STEP), batches, 2), expected, strict=True):
        assert_same(ours, theirs)
    assert len(quantized) == 2


def test_a_forward_without_gradients_shares_what_training_made(quantized) -> None:
    model, x = SwiGLU(WIDTH), tokens(dtype=torch.float32)
    compiled = te(model, **STEP)
    for _ in range(2):
        y = compiled(x)
        with torch.no_grad():
            assert_same(compiled(x), y)
    assert len(quantized) == 3
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
        compiled(x)  # rows alone would do here, but training wants both
        held = [
            buffer.data_ptr()
            for table in weight_cache._entries.values()
            for e in table.values()
            for buffer in e.buffers.values()
        ]
    compiled(x)
    assert len(quantized) == 6
    after = [
        buffer.data_ptr()
        for table in weight_cache._entries.values()
        for e in table.values()
        for buffer in e.buffers.values()
    ]
    assert sorted(after) == sorted(held), "no second copy"


@pytest.mark.parametrize("options", [{}, STEP], ids=["default", "step"])
def test_no_write_that_torch_shows_is_missed(options: dict[str, str]) -> None:
    model, x = linear(), tokens(32, torch.float32)
    compiled = te(model, **options)
    for name, write in WRITES.items():
        compiled(x).sum().backward()
        write(model, new := torch.randn(48, 32))
        for _ in range(2):
            torch.testing.assert_close(compiled(x).detach(), product(x, model.weight), rtol=0, atol=0, msg=name)
        torch.testing.assert_close(model.weight.detach(), new, msg=name)


def _scaled_between(linear: nn.Module, x: Tensor) -> Tensor:
    y = linear(x)
    with torch.no_grad():
        linear.weight.mul_(2)
    return y + linear(x)


@torch.no_grad()
def _scaled(linear: nn.Module, x: Tensor) -> Tensor:
    linear.weight.mul_(2)
    return linear(x)


def _scaled_by_data(linear: nn.Module, x: Tensor) -> Tensor:
    linear.weight.data.mul_(2)
    return linear(x)


def _scaled_by_views(linear: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        linear.weight.detach()[:10].view(-1).mul_(2)
        torch._foreach_mul_([linear.weight[10:]], 2.0)
    return linear(x)


@pytest.mark.one_fast_case
@pytest.mark.parametrize("freezes", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["step", "frozen"])
@pytest.mark.parametrize("call", [_scaled_between, _scaled, _scaled_by_data, _scaled_by_views])
def test_a_graph_that_writes_its_weight_quantizes_it_itself(call: Callable[..., Tensor], freezes: bool) -> None:
    """What is supplied was quantized before the graph runs. A region that writes its own tensors keeps its weights."""
    model, other, x = linear().requires_grad_(not freezes), nn.Linear(48, 32, bias=False), tokens(32, torch.float32)

    def forward(x: Tensor) -> Tensor:
        return checkpoint(lambda y: other(y.mul(1).relu_()), call(model, x), use_reentrant=False)

    other.requires_grad_(False)
    results = []
    for keeps in (False, True):
        torch._dynamo.reset()
        model.load_state_dict(linear().state_dict())
        if keeps and freezes:
            te_dynamo.freeze(nn.ModuleList([model, other]))
        compiled = te(forward, **STEP if keeps and not freezes else {})
        with te_dynamo.capture() as graphs:
            results.append([compiled(x) for _ in range(3)])
    for ours, theirs in zip(results[1], results[0], strict=True):
        assert_same(ours, theirs)
    assert len(graphs.reports[0].workspaces) == 1, "the other's"


def test_a_write_to_what_shares_a_weights_memory() -> None:
    flat, x = torch.randn(48 * 32), tokens(32, torch.float32)
    model = linear()
    model.weight = nn.Parameter(flat.view(48, 32))

    @torch.no_grad()
    def forward(x: Tensor, flat: Tensor) -> Tensor:
        flat.mul_(2)
        return model(x)

    compiled = te(forward, **STEP)
    for _ in range(3):
        expected = product(x, model.weight * 2)
        assert_same(compiled(x, flat), expected)


def test_other_memory_at_the_same_address() -> None:
    """As after a stay in another memory, where the allocator gives what it had given before."""
    model, x, memory = linear(), tokens(32, torch.float32), bytearray(48 * 32 * 4)
    compiled = te(model, **STEP)
    for _ in range(2):
        model.weight.data = torch.empty(0)
        memory[:] = torch.randn(48, 32).numpy().tobytes()
        model.weight.data = torch.frombuffer(memory, dtype=torch.float32).view(48, 32)
        for _ in range(2):
            assert_same(compiled(x).detach(), product(x, model.weight))


def test_other_strides_at_the_same_address() -> None:
    model, x = nn.Linear(32, 32, bias=False), tokens(32, torch.float32)
    te(model, **STEP)(x)
    model.weight.data = model.weight.data.t()
    torch._dynamo.reset()  # torch 2.11 has no guard that sees it
    assert_same(te(model, **STEP)(x).detach(), product(x, model.weight))


def test_swapped_tensors() -> None:
    """torch.utils.swap_tensors refuses tensors with weak references: none are left by default, nor after invalidate."""
    model, x = linear(), tokens(32, torch.float32)
    for options in ({}, STEP):
        compiled = te(model, **options)
        for _ in range(2):
            with torch.no_grad():
                assert_same(compiled(x), product(x, model.weight))
            te_dynamo.invalidate(model)
            torch.utils.swap_tensors(model.weight, nn.Parameter(torch.randn(48, 32)))


@pytest.mark.parametrize("write", HIDDEN_WRITES)
def test_writes_that_torch_hides(write: str, quantized) -> None:
    """Never missed by default; with the cache found by the check, and right again once they are told."""
    model, x, new = linear().requires_grad_(False), tokens(32, torch.float32), torch.randn(48, 32)
    default, kept, checked = (te(model, **o) for o in ({}, STEP, {**STEP, "weight_cache_check": True}))
    before = product(x, model.weight)
    for compiled in (default, kept, checked):
        assert_same(compiled(x), before)
    HIDDEN_WRITES[write](model, new)
    assert_same(default(x), product(x, new))
    assert_same(kept(x), before)
    with pytest.raises(KeptWeightError, match=r"weight was written in a way .* te_dynamo\.invalidate"):
        checked(x)
    te_dynamo.invalidate(model)
    for compiled in (kept, checked):
        assert_same(compiled(x), product(x, new))


def test_a_backward_reads_what_its_forward_read() -> None:
    """Two forwards around a write, then both backwards: the kept buffers are not overwritten below the first."""
    model, x = linear(), tokens(32, torch.float32).requires_grad_()
    gradients = []
    for options in ({}, STEP):
        torch._dynamo.reset()
        model.load_state_dict(linear().state_dict())
        compiled = te(model, **options)
        one = compiled(x)
        with torch.no_grad():
            model.weight.mul_(-3)
        two = compiled(x)
        te_dynamo.invalidate(model)
        compiled(x)
        gradients.append([torch.autograd.grad(y.sum(), (x, model.weight)) for y in (one, two)])
    for ours, theirs in zip(gradients[1], gradients[0], strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)


def test_a_second_backward_under_retain_graph() -> None:
    model, x = linear(), tokens(32, torch.float32)
    loss = te(model, **STEP)(x).sum()
    first, second = (torch.autograd.grad(loss, model.weight, retain_graph=True) for _ in range(2))
    assert_same(*first, *second)


def test_what_another_stream_made_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By every graph that reads it, not by the one alone that made it."""
    model, x = te_dynamo.freeze(linear()), tokens(32, torch.float32)
    recorded: list[Any] = []
    stream = SimpleNamespace(cuda_stream=2, wait_event=recorded.append)
    with torch.no_grad():
        te(model)(x)
        (entry,) = weight_cache._entries[model.weight].values()
        entry.made = 1, "the event"
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(Tensor, "record_stream", lambda _, user: recorded.append(user))
        te(nn.Sequential(model, nn.ReLU()))(x)
    assert recorded == ["the event", *[stream] * len(entry.buffers)]


def test_parameters_without_a_version_counter_are_not_kept(quantized) -> None:
    with torch.inference_mode():
        model, x = linear(), tokens(32, torch.float32)
        compiled = te(model, **STEP)
        for _ in range(2):
            assert_same(compiled(x), product(x, model.weight))
            model.weight.mul_(2)
    assert len(quantized) == 2


def test_an_exception_in_the_middle_of_a_step() -> None:
    model, x = linear(), tokens(32, torch.float32)
    compiled = te(model, **STEP)

    def fails(_: Tensor) -> None:
        raise KeyboardInterrupt

    y = compiled(x)
    handle = model.weight.register_hook(fails)
    with pytest.raises(KeyboardInterrupt):
        y.sum().backward()
    handle.remove()
    with torch.no_grad():
        model.weight.mul_(2)
    model.weight.grad = None
    y = compiled(x)
    assert_same(y.detach(), product(x, model.weight))
    y.sum().backward()
    assert model.weight.grad is not None


def test_weights_of_fsdp_are_never_kept() -> None:
    """Dynamo takes a managed module's parameters through a source of FSDP's."""
    from torch._dynamo.source import AttrSource, FSDPNNModuleSource, LocalSource

    def placeholder(source: Any) -> torch.fx.Node:
        node = torch.fx.Graph().placeholder("w")
        node._dynamo_source = source
        return node

    module = LocalSource("self")
    assert is_from_fsdp(placeholder(AttrSource(AttrSource(FSDPNNModuleSource(module), "fc"), "weight")))
    assert not is_from_fsdp(placeholder(AttrSource(module, "weight")))
    assert not is_from_fsdp(placeholder(None))


def test_graphs_on_a_gpu_hold_references_to_the_stack() -> None:
    graphs = capture_on_fake_cuda(
        lambda: SwiGLU(512).bfloat16(),
        lambda device: (torch.randn(2048, 512, device=device, dtype=torch.bfloat16, requires_grad=True),),
        options=STEP,
    )
    forward, backward = graphs["forward"], graphs["backward"]
    assert "te.quantize_stacked(" not in forward and forward.count("te.gemm_gated(") == 1
    assert "workspace_0_transpose: f8e4m3[512, 2048] = input" in backward
    assert backward.count(", along='") == 2 and "aten.clone(" not in backward
    rows = [(row.weight, row.kept, row.nbytes) for row in graphs.reports[0].workspaces]
    assert rows == [
        ("gate.weight, up.weight", "for a step", 2 * 2048 * 512 + 8),
        ("down.weight", "for a step", 2 * 512 * 1024 + 4),
    ]


class Normalized(nn.Linear):
    """EDM2's: the weight is brought back to unit rows in each forward."""

    def __init__(self) -> None:
        super().__init__(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.copy_(nn.functional.normalize(self.weight, dim=-1))
        return super().forward(x)


class NormalizedByData(Normalized):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = nn.functional.normalize(self.weight.data, dim=-1)
        return nn.functional.linear(x, self.weight)


class Reads(Normalized):
    """Reads the weight before it is written, and after."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight) + super().forward(x)


@pytest.mark.parametrize("keep", ["by step", "frozen"])
@pytest.mark.parametrize("made", [Normalized, NormalizedByData, Reads])
def test_a_weight_that_the_model_writes_is_read_as_written(made: type[Normalized], keep: str) -> None:
    torch.manual_seed(0)
    model, reference = made(), made()
    calls = te(model, **(STEP if keep == "by step" else {})), te(reference)
    if keep == "frozen":
        te_dynamo.freeze(model)
    with torch.no_grad():
        for scale in (3, 5):
            for each in (model, reference):
                each.weight.copy_(torch.full((32, 32), scale).triu() + torch.eye(32))
            ours, theirs = (call(tokens(32, torch.float32)) for call in calls)
            assert_same(ours, theirs)


@pytest.mark.parametrize("options", [{"weight_cache": "forever"}, {"weight_cache_check": "yes"}])
def test_wrong_values_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(InvalidOptionError, match=next(iter(options))):
        Options.parse(options)


@pytest.mark.parametrize("kept", [pytest.param("freeze", marks=pytest.mark.slow), "step"])
def test_weights_that_are_stored_transposed_and_those_of_attention(kept: str, quantized) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(64, 2, batch_first=True)
            self.conv1d, self.bias = nn.Parameter(torch.randn(64, 96)), nn.Parameter(torch.randn(96))
            self.back = nn.Linear(64, 96)

        def forward(self, x: Tensor) -> Tensor:
            x = self.attention(x, x, x, need_weights=False)[0]
            return (x @ self.conv1d + self.bias) @ self.back.weight

    torch.manual_seed(0)
    model, x = Model().bfloat16(), tokens(64)
    gradients = kept == "step"
    results = []
    for keep in (False, True):
        torch._dynamo.reset()
        if keep and kept == "freeze":
            te_dynamo.freeze(model, drop_weights=True)
        call = te(model, **(STEP if keep and gradients else {}))
        for _ in range(2):
            with torch.set_grad_enabled(gradients):
                y = call(x)
            leaves = list(model.parameters())[:-1] if gradients else []
            results.append([y, *(torch.autograd.grad(y.sum(), leaves) if gradients else ())])
    for result in results[1:]:
        for ours, theirs in zip(result, results[0], strict=True):
            assert_same(ours, theirs)
    assert sorted(quantized) == sorted([(192, 64), (64, 64), (64, 96), (96, 64)])
    if kept == "freeze":
        before = results[0][0]
        te_dynamo.unfreeze(model)  # back.weight has its columns alone
        torch._dynamo.reset()
        with torch.no_grad():
            torch.testing.assert_close(te(model)(x), before, rtol=0.05, atol=0.5)
