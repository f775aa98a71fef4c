"""Stage 1 on nn.MultiheadAttention and nn.TransformerEncoderLayer: their parts take the place of the one call that Dynamo
makes of them, they compute the same, and their linears are matched."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from helpers.graphs.matching import FP8, Matched
from helpers.oracles.fp8_oracle import relative_error
from torch import Tensor, nn

import te_dynamo

E, HEADS = 32, 2
CAUSAL = torch.ones(8, 8).triu(1).bool()
PADDING = torch.arange(16).reshape(2, 8) % 8 > 5


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def tokens(*shape: int) -> Tensor:
    return torch.randn(*(shape or (2, 8, E)), requires_grad=True)


def attention(**fields: Any) -> nn.MultiheadAttention:
    module = nn.MultiheadAttention(E, HEADS, **{"batch_first": True, **fields})
    for name, parameter in module.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter)
    return module


def assert_same(compiled: Matched, *args: Any, bound: float = 0.0, **kwargs: Any) -> None:
    """The same results, gradients included, from the same random numbers; bound: of their relative errors, if not of each value's."""
    close = functools.partial(_assert_near, bound) if bound else torch.testing.assert_close
    torch.manual_seed(1)
    actual = compiled(*args, **kwargs)
    torch.manual_seed(1)
    expected = compiled.module(*args, **kwargs)
    pairs = [(a, e) for a, e in zip(_flat(actual), _flat(expected), strict=True) if e is not None]
    for one, other in pairs:
        close(one, other)
    if pairs[0][1].requires_grad:
        leaves = [a for a in args if isinstance(a, Tensor)][:1] + list(compiled.module.parameters())
        grads = [torch.autograd.grad(out.square().sum(), leaves) for out in pairs[0]]
        for one, other in zip(*grads, strict=True):
            close(one, other)


def _assert_near(bound: float, actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype and relative_error(actual, expected) <= bound


def _flat(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple) else [value]


def test_its_parts_take_its_place() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = attention()

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    compiled = Matched(Model())
    assert_same(compiled, tokens())
    assert compiled.text().count("te.linear(") == 2 and "multi_head_attention_forward" not in compiled.text()
    assert [(r.module, r.shape, r.matched) for r in compiled.records] == [
        ("attention.in_proj_weight", ("16", "96", "32"), True),
        ("attention.out_proj", ("16", "32", "32"), True),
    ]
    assert compiled.records[0].source.startswith("torch_ir/test_match_attention.py:")


CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "weights": ({}, {}),
    "weights of each head": ({}, {"average_attn_weights": False}),
    "masks": ({}, {"attn_mask": CAUSAL, "key_padding_mask": PADDING}),
    "causal": ({}, {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False}),
    "mask of each head": ({}, {"attn_mask": torch.randn(2 * HEADS, 8, 8), "need_weights": False}),
    "no bias": ({"bias": False}, {"need_weights": False}),
    "added keys": ({"add_bias_kv": True, "add_zero_attn": True}, {"attn_mask": CAUSAL, "key_padding_mask": PADDING}),
    "dropout": ({"dropout": 0.5}, {"need_weights": False}),
}


@pytest.mark.parametrize(
    ("fields", "given"),
    [pytest.param(*call, id=name, marks=[] if name == "masks" else pytest.mark.slow) for name, call in CALLS.items()],
)
def test_computes_what_torch_computes(fields: dict[str, Any], given: dict[str, Any]) -> None:
    x, compiled = tokens(), Matched(attention(**fields), run="aot")
    assert_same(compiled, x, x, x, **given)
    assert [record.matched for record in compiled.records] == [True, True]


@pytest.mark.slow
def test_queries_of_another_source_and_weights_of_their_own() -> None:
    query, memory = tokens(8, 2, E), tokens(5, 2, E)
    compiled = Matched(attention(batch_first=False))  # two products of parts of the packed weight
    assert_same(compiled, query, memory, memory)
    assert [record.shape for record in compiled.records] == [("16", "32", "32"), ("10", "64", "32"), ("16", "32", "32")]
    compiled = Matched(attention(batch_first=False, kdim=48, vdim=16))
    assert_same(compiled, query, tokens(5, 2, 48), tokens(5, 2, 16))
    assert [record.shape[2] for record in compiled.records] == ["32", "48", "16", "32"]
    assert all(record.matched for record in compiled.records)


@pytest.mark.slow
def test_without_a_batch() -> None:
    x, compiled = tokens(8, E), Matched(attention())
    assert_same(compiled, x, x, x)  # torch then multiplies by each third of the packed weight
    assert [record.matched for record in compiled.records] == [True] * 4


@pytest.mark.slow
def test_dynamic_lengths() -> None:
    compiled = Matched(attention(dropout=0.5), dynamic=True)
    for shape in ((2, 8, E), (3, 5, E)):
        x = tokens(*shape)
        assert_same(compiled, x, x, x)
    assert len(compiled.graphs) == 1 and [record.matched for record in compiled.records] == [True, True]


def test_autocast_around_and_inside() -> None:
    module, x = attention(), tokens()
    inside = Matched(module)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(inside, x, x, x, need_weights=False, bound=2**-6)

    def region(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = module(x, x, x, need_weights=False)[0]
        return y.float()

    around = Matched(region)
    _assert_near(2**-6, around(x), region(x))
    for compiled in (inside, around):
        assert [(record.matched, record.dtype) for record in compiled.records] == [(True, "bf16")] * 2


def test_rules_see_the_modules_inside() -> None:
    x = tokens()
    compiled = Matched(attention(), rules=[("out_proj", None)])
    compiled(x, x, x)
    assert [record.matched for record in compiled.records] == [True, False]
    compiled = Matched(attention(), recipe=None, rules=[("out_proj", FP8)])
    compiled(x, x, x)
    assert [record.matched for record in compiled.records] == [False, True]


def test_what_stays_one_call_says_why() -> None:
    x = tokens()
    compiled = Matched(attention(), recipe=None)
    compiled(x, x, x)
    assert compiled.reasons() == ["recipe is None"] * 4 and "multi_head_attention_forward" in compiled.text()
    assert [record.shape for record in compiled.records] == [("16", "32", "32")] * 4
    narrow = Matched(nn.MultiheadAttention(24, 2))
    narrow(*[torch.randn(8, 2, 24)] * 3)
    assert {reason.partition(":")[0] for reason in narrow.reasons()} == {"N = 72, K = 24", "N = 24, K = 24"}


def test_a_failed_attempt_leaves_the_graph_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from te_dynamo.passes.torch_ir.match.patterns import attention as pass_

    def reads_a_tensor_of_its_own(*args: Any, **kwargs: Any) -> Any:
        return pass_.F.linear(args[0], torch.ones(E, E)), None

    monkeypatch.setattr(pass_, "_attention", reads_a_tensor_of_its_own)
    x, compiled = tokens(), Matched(attention())
    assert_same(compiled, x, x, x)
    assert compiled.text().count("linear") == 0 and "multi_head_attention_forward" in compiled.text()
    assert all(reason.startswith("inside one call of torch's: ") for reason in compiled.reasons())


MASKS = [
    {},
    {"src_mask": CAUSAL},
    {"src_key_padding_mask": PADDING},
    {"src_mask": CAUSAL, "src_key_padding_mask": PADDING},
]


@pytest.mark.parametrize("given", [*(pytest.param(mask, marks=pytest.mark.slow) for mask in MASKS[:-1]), MASKS[-1]])
def test_encoder_layer_in_inference(given: dict[str, Any]) -> None:
    """Its fast path is one call of torch's, with all its weights."""
    fields = {"norm_first": "src_mask" in given, "activation": "relu" if given else "gelu", "batch_first": True}
    layer, x = nn.TransformerEncoderLayer(E, HEADS, 64, **fields).eval(), tokens()
    compiled = Matched(nn.Sequential(layer) if not given else layer)
    with torch.no_grad():
        assert_same(compiled, x, **given)
    prefix = "0." if not given else ""
    linears = [record for record in compiled.records if record.kind == "linear"]
    assert [record.module for record in linears] == [
        prefix + name for name in ("self_attn.in_proj_weight", "self_attn.out_proj", "linear1", "linear2")
    ]
    assert all(record.matched for record in linears)
    assert "_transformer_encoder_layer_fwd" not in compiled.text()


@pytest.mark.slow
def test_encoder_layer_in_training() -> None:
    layer, x = nn.TransformerEncoderLayer(E, HEADS, 64, dropout=0.5, batch_first=True), tokens()
    compiled = Matched(layer, run="aot")
    assert_same(compiled, x)
    assert [record.matched for record in compiled.records if record.kind == "linear"] == [True] * 4


def test_encoder_layer_left_by_a_rule() -> None:
    layer, x = nn.TransformerEncoderLayer(E, HEADS, 64, batch_first=True).eval(), tokens()
    compiled = Matched(layer, recipe=None)
    with torch.no_grad():
        assert_same(compiled, x)
    assert compiled.reasons() == ["recipe is None"] * 4
    assert [record.shape for record in compiled.records] == [
        ("16", *s) for s in (("96", "32"), ("32", "32"), ("64", "32"), ("32", "64"))
    ]


@pytest.mark.slow
def test_inside_a_checkpoint_under_autocast() -> None:
    """A body does not see the region around its node; the dtypes say what it is."""
    layer = nn.TransformerEncoderLayer(E, HEADS, 64, dropout=0.0, batch_first=True)

    def region(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)

    compiled, x = Matched(region, run="aot"), tokens()
    _assert_near(2**-6, compiled(x), region(x))
    linears = [record for record in compiled.records if record.kind == "linear"]
    assert [(record.matched, record.dtype) for record in linears] == [(True, "bf16")] * 4


def test_an_encoder_layers_fast_path_under_autocast_is_left() -> None:
    layer, x = nn.TransformerEncoderLayer(E, HEADS, 64, batch_first=True).eval(), tokens()
    compiled = Matched(layer)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert_same(compiled, x)
    assert [reason.partition(",")[0] for reason in compiled.reasons()] == [
        "inside one call of torch's that ignores autocast"
    ] * 4


@pytest.mark.parametrize("codegen", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_an_encoder_layer_trains_with_its_norms_and_activation_fused(codegen: str) -> None:
    """Batch first: the transposition for the projection, and dropout of nothing, stand between no fusion."""
    torch._dynamo.reset()
    layer = nn.TransformerEncoderLayer(E, HEADS, 64, 0.0, "gelu", batch_first=True, norm_first=True)
    x, results = tokens(), []
    with te_dynamo.capture() as graphs:
        for call in (layer, torch.compile(layer, backend="te", options={"codegen": codegen})):
            y = call(x)
            results.append([y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])])
    forward = graphs["forward"]
    assert forward.count("te.layer_norm_quantize(") == 2 and forward.count("te.activation_quantize(") == 1
    assert forward.count("te.quantize(") == 5, "of four weights and of attention's result"
    for plain, ours in zip(*results, strict=True):
        assert 0 < relative_error(ours, plain) < 0.15
