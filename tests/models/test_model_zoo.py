"""Model families of transformers, unmodified and tiny, and blocks of other papers: what share of their linears runs in FP8, and that they train.

Random weights of the library's own initialisation; no file is fetched.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.models.paper_models import (
    MLA,
    DiTBlock,
    FluxBlock,
    FTTransformer,
    Monarch,
    NGPTBlock,
    ViTBlock,
    WanBlock,
    XBlock,
)
from torch.utils._pytree import tree_leaves

import te_dynamo
from te_dynamo.inspect.dynamo import Seen, dynamo_untouched
from te_dynamo.inspect.explain import Explanation
from te_dynamo.inspect.flops import count_matrix_flops
from te_dynamo.inspect.left_out import rows_left_out
from te_dynamo.report import Report

transformers = pytest.importorskip("transformers")

from helpers.models.families import FAMILIES, build, inputs  # noqa: E402  needs transformers

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

WRITTEN: dict[str, dict[str, int]] = {
    "GPT2": {"layer_norm": 5, "gelu": 2},
    "Phi": {"layer_norm": 3, "gelu": 2},
    "Albert": {"layer_norm": 6, "gelu": 3},
    "Cohere": {"layer_norm": 3, "gated silu": 2},
    "Olmo": {"layer_norm": 5, "gated silu": 2},
    "Nemotron": {"layer_norm": 5, "relu2": 2},
    "OPT": {"layer_norm": 5, "relu": 2},
    "GPTJ": {"layer_norm": 3, "gelu": 2},
    "ModernBert": {"layer_norm": 6, "gated gelu": 2, "gelu": 1},
}
"""Of families that write their norms and activations as formulas, or gate them: how many of each are te operations, that is all."""

EACH_CHANGE = {
    *WRITTEN,
    *("Llama", "Qwen3", "Gemma2", "Phi3", "Bloom", "GPTNeoX", "Mixtral", "DeepseekV3", "GptOss", "Llama4Text"),
    *("Bert", "XLNet", "T5", "Mamba2", "CLIP", "Whisper", "ViT"),
}
"""Each is written in a way of its own. The others are like one of these."""

LARGEST_ERROR = {"Gemma3nText": 0.4}
"""Of all gradients together, beside bf16's; it multiplies by predictions of its own gradient's size."""


def explanation_of(model: Any, kwargs: dict[str, Any], reports: list[Report]) -> Explanation:
    """What te_dynamo.explain says of the model, from a compilation that there was already: its own takes as long again."""
    flops = count_matrix_flops(model, (), kwargs)
    linears = [match for report in reports for match in report.matches if match.kind == "linear"]
    return Explanation(reports, [], flops, list(rows_left_out(model, flops, linears, Seen())))


def loss_and_gradient(model: Any, run: Any, kwargs: dict[str, Any]) -> tuple[float, torch.Tensor]:
    model.zero_grad()
    loss = run(**kwargs).loss
    loss.backward()
    gradients = [p.grad.double().flatten() for p in model.parameters() if p.grad is not None]
    return loss.item(), torch.cat(gradients)


@pytest.mark.parametrize(
    "family", [name if name in EACH_CHANGE else pytest.param(name, marks=pytest.mark.exhaustive) for name in FAMILIES]
)
def test_trains_unmodified(family: str) -> None:
    model, kwargs = build(family), inputs(family)
    compiled = torch.compile(model, backend="te", options={"codegen": "eager"})
    expected_loss, expected = loss_and_gradient(model, model, kwargs)
    with te_dynamo.capture() as graphs:
        actual_loss, actual = loss_and_gradient(model, compiled, kwargs)
    assert actual_loss == pytest.approx(expected_loss, rel=0.02)
    assert 0 < (actual - expected).norm() / expected.norm() < LARGEST_ERROR.get(family, 0.2)

    explanation = explanation_of(model, kwargs, graphs.reports)
    assert explanation.coverage >= FAMILIES[family][2]
    assert all(row.matched or row.reason for row in explanation.linears)
    if family in WRITTEN:
        assert Counter(row.kind for row in explanation.norms_activations if row.matched) == WRITTEN[family]
        assert all(row.matched for row in explanation.norms_activations)
    flops = explanation.to_dict()["matrix_flops"]
    assert flops["has_a_row"] >= 0.99
    assert sum(row.flops for report in explanation.reports for row in report.matches) == pytest.approx(
        flops["by_weight"], rel=0.01
    )


def test_experts_that_are_not_bf16() -> None:
    """transformers then calls an operation of its own in a compiled model, since torch's takes bf16 alone."""
    model = build("Mixtral").float()
    tokens = torch.randint(0, 128, (2, 33), generator=torch.Generator().manual_seed(1))
    explanation = te_dynamo.explain(model, options={"codegen": "eager"}, input_ids=tokens, labels=tokens)
    assert explanation.coverage >= FAMILIES["Mixtral"][2] and {row.groups for row in explanation.linears} == {0, 4}


def test_swin() -> None:
    """All but the convolution that cuts patches. The norm before attention is cut into windows, each with its reason; the one before the MLP is fused."""
    fields = {
        "image_size": 32,
        "patch_size": 2,
        "embed_dim": 32,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 4,
    }
    torch.manual_seed(0)
    model = transformers.SwinModel(transformers.SwinConfig(**fields)).bfloat16().eval()
    pixels = torch.randn(2, 3, 32, 32, dtype=torch.bfloat16)
    compiled = torch.compile(model, backend="te", options={"codegen": "eager"})
    expected, actual = (run(pixel_values=pixels).last_hidden_state.float() for run in (model, compiled))
    assert (actual - expected).norm() / expected.norm() < 0.2
    explanation = te_dynamo.explain(model, options={"codegen": "eager"}, pixel_values=pixels)
    assert [row.module for row in explanation.linears if not row.matched] == ["embeddings.patch_embeddings.projection"]
    before_mlp = [row for row in explanation.norms_activations if row.module.endswith("layernorm_after")]
    before_windows = [row for row in explanation.norms_activations if row.module.endswith("layernorm_before")]
    assert len(before_mlp) == len(before_windows) == 4 and all(row.matched for row in before_mlp)
    assert all(row.reason.startswith("the FP8 linear reads it permuted or padded") for row in before_windows)


def test_a_rule_for_one_layer_of_dora() -> None:
    """Its adapters run behind graph breaks of their own, in code that all layers share."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(build("Llama"), peft.LoraConfig(r=16, use_dora=True, target_modules=["down_proj"]))
    options = {"codegen": "eager", "rules": [(r"layers\.0\..*down_proj", None)]}
    explanation = te_dynamo.explain(model, options=options, **inputs("Llama"))
    rows = [
        (*row.module.rpartition("layers.")[2].split(".", 1), row)
        for row in explanation.linears
        if "layers." in row.module
    ]
    of_dora = [(layer, path, row) for layer, path, row in rows if path.startswith("mlp.down_proj.")]
    in_graphs = {(layer, path.split(".")[2], row.matched) for layer, path, row in of_dora if row.shape}
    assert in_graphs == {("0", "lora_A", False), ("0", "lora_B", False), ("1", "lora_A", True), ("1", "lora_B", True)}
    assert all("Dynamo skips" in row.reason for _, path, row in of_dora if ".base_layer" in path)  # PEFT's forward does


def test_breaks_of_a_detector_are_those_of_the_run() -> None:
    """RTDetrV2 asks for values on its way. What Dynamo skips comes behind what it breaks."""
    names = ("hidden_sizes", "depths", "embedding_size", "layer_type", "out_features")
    stages = ["stage2", "stage3", "stage4"]
    backbone = dict(zip(names, ([16, 32, 64, 64], [1] * 4, 16, "basic", stages), strict=True))
    config = transformers.RTDetrV2Config(
        backbone_config=transformers.RTDetrResNetConfig(**backbone),
        encoder_in_channels=[32, 64, 64],
        decoder_in_channels=[32, 32, 32],
        **dict.fromkeys(("encoder_hidden_dim", "d_model"), 32),
        **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 64),
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
        num_queries=8,
        decoder_layers=1,
        num_denoising=0,
    )
    model, pixels = transformers.RTDetrV2Model(config).bfloat16().eval(), torch.randn(1, 3, 64, 64).bfloat16()
    found = te_dynamo.explain(model, options={"codegen": "eager"}, pixel_values=pixels).graph_breaks
    breaks = [stop.reason for stop in found if not stop.reason.startswith("Dynamo skips all of")]
    with dynamo_untouched() as seen:
        torch.compile(model, backend="te", options={"codegen": "eager"})(pixel_values=pixels)
    assert breaks and breaks == [stop.reason for stop in seen.breaks] and len(found) > len(breaks)


PAPERS: dict[str, tuple[Any, tuple[tuple[int, ...], ...], bool, dict[str, int]]] = {
    "ViT": (ViTBlock, ((4, 32, 64),), True, {"layer_norm": 2, "gelu": 1}),
    "DiT": (DiTBlock, ((4, 32, 64), (4, 64)), False, {"silu": 1, "layer_norm_modulate": 2, "gelu": 1}),
    "Flux": (FluxBlock, ((4, 32, 64), (4, 16, 64), (4, 64)), False, {"silu": 1, "layer_norm_modulate": 4, "gelu": 2}),
    "Wan": (WanBlock, ((4, 32, 64), (4, 16, 64), (4, 6, 64)), True, {"layer_norm_modulate": 2, "layer_norm": 1, "gelu": 1}),
    "x-transformers": (XBlock, ((4, 32, 64),), True, {"rms_norm": 2, "gated gelu": 1}),
    "nGPT": (NGPTBlock, ((4, 32, 64),), False, {"gated silu": 1}),
    "FT-Transformer": (FTTransformer, ((64, 31),), False, {"layer_norm": 2, "gated relu": 1, "relu": 1}),
    "Monarch": (Monarch, ((64, 64),), False, {}),
    "MLA": (MLA, ((4, 32, 64),), False, {}),
}  # fmt: skip
"""Blocks, their inputs' shapes, whether they are fp32 under autocast, and which of their norms and activations are te operations. All of
their linears are."""


@pytest.mark.parametrize("name", PAPERS)
def test_a_block_of_a_paper(name: str) -> None:
    make, shapes, autocast, kinds = PAPERS[name]
    dtype = torch.float32 if autocast else torch.bfloat16
    torch.manual_seed(0)
    model, args = make().to(dtype), [torch.randn(shape, dtype=dtype) for shape in shapes]

    def gradients(model: Any, run: Any, args: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        args = [x.detach().requires_grad_() for x in args]
        loss = sum((y - 1).pow(4).mean() for y in tree_leaves(run(*args)))
        return torch.autograd.grad(loss, [*args, *model.parameters()])

    exact = copy.deepcopy(model).float()  # bf16's own gradient of FT-Transformer's first bias is 60% off
    expected = gradients(exact, exact, [x.float() for x in args])
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        compiled = torch.compile(model, backend="te", options={"codegen": "eager"})
        actual = gradients(model, compiled, args)
        explanation = te_dynamo.explain(model, *args, options={"codegen": "eager"})
    for ours, true in zip(actual, expected, strict=True):
        assert 0 < (ours - true).norm() / true.norm() < 0.3
    assert explanation.coverage == 1.0 and explanation.to_dict()["matrix_flops"]["has_a_row"] == 1.0
    assert Counter(row.kind for row in explanation.norms_activations if row.matched) == kinds


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("ViT", {"apart": (15, 21, 2693), "fused": (13, 21, 2629)}),
        ("Wan", {"apart": (25, 41, 3926), "fused": (22, 39, 3702)}),
    ],
)
def test_a_norm_under_autocast_that_writes_fp8_saves_launches_and_bytes(
    name: str, counts: dict[str, tuple[int, int, int]], import_benchmark: Callable[[str], ModuleType]
) -> None:
    """(te operations that are no GEMM, kernels that Inductor makes at best, KiB that a step reads and writes)"""
    make, shapes, _, _ = PAPERS[name]
    traffic, found = import_benchmark("graph_traffic"), {}
    for form, fusions in (("apart", ["-fuse_norm_quantize", "-fuse_norm_add_quantize"]), ("fused", True)):
        torch._dynamo.reset()
        args = [torch.randn(shape, requires_grad=True) for shape in shapes]
        with te_dynamo.capture() as graphs, torch.autocast("cpu", torch.bfloat16):
            compiled = torch.compile(make(), backend="te", options={"codegen": "eager", "fusions": fusions})
            compiled(*args).float().sum().backward()
        counted = [traffic.count(graphs.graph(phase)) for phase in ("forward", "backward")]
        _, te, others, nbytes = map(sum, zip(*counted, strict=True))
        found[form] = te, others, nbytes // 1024
    assert found == counts
