"""What becomes of the linears, norms and activations of known architectures on an H200, by `te_dynamo.explain(device="h200")`.

    python benchmarks/coverage.py                          # all, some 20 minutes on two cores; no GPU
    python benchmarks/coverage.py --models Llama,Whisper

Each is transformers' own class with two layers, at the widths of a released model: those of its configuration's defaults where no others
are named here. It is compiled as it is trained: in bf16, forward and backward, with dropout where it has it. Models are on the device `meta` and have no values.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import warnings
from collections import Counter
from typing import Any

import report
import torch
from environment import collect
from rich.progress import track

TOKENS = 8192


@dataclasses.dataclass(frozen=True)
class Architecture:
    """name: prefix of transformers' configuration class. model: the rest of its model class's name. fields: of the configuration, beside
    two layers. inputs: which arguments it takes, a key of `_INPUTS`."""

    name: str
    model: str = "ForCausalLM"
    inputs: str = "text"
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Row:
    """width: columns of the residual stream. in_recipe, has_a_row: percent, of the linears' FLOPs and of all matrix FLOPs. linears, norms, activations: "matched of all".
    left: reasons, with the percent of the linears' FLOPs that each explains."""

    model: str
    width: int | None = None
    in_recipe: float | None = None
    has_a_row: float | None = None
    linears: str = ""
    norms: str = ""
    activations: str = ""
    breaks: int | None = None
    left: str = ""


ENCODER = {"model": "ForMaskedLM", "inputs": "short text"}
LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
ARCHITECTURES = [
    Architecture("Llama"),
    Architecture("Mistral"),
    Architecture("Qwen2"),
    Architecture("Qwen3"),
    Architecture("Gemma"),
    Architecture("Gemma2"),
    Architecture("Gemma3Text", "", fields={"model_class": "Gemma3ForCausalLM"}),
    Architecture(
        "Gemma3nText",
        "",
        fields={
            "model_class": "Gemma3nForCausalLM",
            "num_kv_shared_layers": 0,
            "activation_sparsity_pattern": [0.95, 0.95],
        },
    ),
    Architecture("Phi"),
    Architecture("Phi3"),
    Architecture("GPTNeoX"),
    Architecture("GPT2", "LMHeadModel", fields={"n_embd": 1600, "n_head": 25}),
    Architecture("GPTJ"),
    Architecture("GPTNeo", fields={"attention_types": [[["global", "local"], 1]]}),
    Architecture("GPTBigCode"),
    Architecture("Mpt"),
    Architecture("OPT"),
    Architecture("Falcon"),
    Architecture("StableLm"),
    Architecture("Cohere"),
    Architecture("Cohere2"),
    Architecture("Olmo"),
    Architecture("Olmo2"),
    Architecture("Olmo3"),
    Architecture("Glm4"),
    Architecture("Granite"),
    Architecture("SmolLM3"),
    Architecture("Exaone4"),
    Architecture("Nemotron", fields={"num_key_value_heads": 8}),
    Architecture("Starcoder2"),
    Architecture("Persimmon"),
    Architecture("NanoChat"),
    Architecture("Bloom", fields={"hidden_size": 4096, "n_head": 32}),
    Architecture("XLNet", "LMHeadModel"),
    Architecture("Bert", **ENCODER, fields=LARGE),
    Architecture("DistilBert", **ENCODER),
    Architecture("Electra", **ENCODER, fields={**LARGE, "embedding_size": 1024}),
    Architecture("Roberta", **ENCODER, fields=LARGE),
    Architecture("Albert", **ENCODER),
    Architecture("ModernBert", **ENCODER),
    Architecture("DebertaV2", **ENCODER),
    Architecture("Bart", "ForConditionalGeneration", "two texts"),
    Architecture("T5", "ForConditionalGeneration", "two texts", {"d_model": 1024, "d_ff": 4096, "num_heads": 16}),
    Architecture("MT5", "ForConditionalGeneration", "two texts", {"d_model": 2048, "d_ff": 5120, "num_heads": 32}),
    Architecture("Mixtral"),
    Architecture("Qwen3Moe"),
    Architecture("Qwen3Next", fields={"layer_types": ["linear_attention", "full_attention"]}),
    Architecture("Olmoe"),
    Architecture("Phimoe"),
    Architecture("Glm4Moe"),
    Architecture("DeepseekV3"),
    Architecture("MiniMax", fields={"layer_types": ["linear_attention", "full_attention"]}),
    Architecture("GptOss"),
    Architecture("Llama4Text", "", fields={"model_class": "Llama4ForCausalLM"}),
    Architecture("Lfm2"),
    Architecture("Mamba", fields={"hidden_size": 2560}),
    Architecture("Mamba2"),
    Architecture("Jamba"),
    Architecture("RecurrentGemma", inputs="short loops"),
    Architecture("Zamba2", fields={"layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1}),
    Architecture("FalconH1"),
    Architecture("Bamba"),
    Architecture("GraniteMoeHybrid", fields={"layer_types": ["mamba", "attention"]}),
    Architecture("Rwkv", inputs="short loops"),
    Architecture(
        "CLIP",
        "Model",
        "image and text",
        {
            "vision_config": {**LARGE, "patch_size": 14},
            "text_config": {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12},
        },
    ),
    Architecture(
        "Siglip", "Model", "image and text", {"vision_config": {**LARGE, "image_size": 256}, "text_config": LARGE}
    ),
    Architecture(
        "Whisper",
        "ForConditionalGeneration",
        "speech and text",
        {
            "d_model": 1280,
            "encoder_ffn_dim": 5120,
            "decoder_ffn_dim": 5120,
            "encoder_attention_heads": 20,
            "decoder_attention_heads": 20,
        },
    ),
    Architecture("ViT", "Model", "image", LARGE),
    Architecture("Dinov2", "Model", "image", {"hidden_size": 1536, "num_attention_heads": 24}),
    Architecture("DINOv3ViT", "Model", "image", LARGE),
    Architecture("Swin", "Model", "image", {"embed_dim": 192, "num_heads": [6, 12, 24, 48], "depths": [2, 2, 2, 2]}),
    Architecture("Segformer", "Model", "image"),
    Architecture("ConvNext", "Model", "image", {"num_hidden_layers": 4}),  # its stages
    Architecture("Wav2Vec2", "Model", "wave", {**LARGE, "apply_spec_augment": False, "layerdrop": 0.0}),
]


def main() -> None:
    known = {found.name: found for found in ARCHITECTURES}
    parser = report.parser(__doc__)
    parser.add_argument("--models", default=",".join(known), help="of: %(default)s")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    report.split_choices(parser, args, models=known)
    with concurrent.futures.ProcessPoolExecutor(args.workers, max_tasks_per_child=1) as pool:
        rows = list(track(pool.map(row_of, [known[name] for name in args.models]), total=len(args.models)))
    report.write(args.out, "coverage", {**collect("cpu"), "device": "H200, simulated"}, rows, tokens=TOKENS, layers=2)


def row_of(architecture: Architecture) -> Row:
    """Of one architecture; with the error in `left` where it cannot be explained."""
    import te_dynamo

    warnings.simplefilter("ignore")
    try:
        model, kwargs = build(architecture)
        found = te_dynamo.explain(model, device="h200", **kwargs)
    except Exception as error:
        return Row(architecture.name, left=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
    flops = found.to_dict()["matrix_flops"]
    norms = [row for row in found.norms_activations if "norm" in row.kind]
    others = [row for row in found.norms_activations if "norm" not in row.kind]
    return Row(
        architecture.name,
        width_of(model.config),
        100 * found.coverage,
        100 * flops["has_a_row"] if flops else None,
        of(found.linears),
        of(norms),
        of(others),
        len(found.graph_breaks),
        reasons(found.linears),
    )


def build(architecture: Architecture, layers: int = 2) -> tuple[Any, dict[str, Any]]:
    """(the model, its keyword arguments), on the device meta."""
    import transformers

    fields = {"num_hidden_layers": layers, **architecture.fields}
    whole = fields.pop("model_class", architecture.name + architecture.model)
    config = getattr(transformers, f"{architecture.name}Config")(**fields)
    for part in (config, *(getattr(config, name, None) for name in ("text_config", "vision_config"))):
        for name in ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_decoder_layers"):
            if part is not None and getattr(part, name, None) and name not in architecture.fields:
                with contextlib.suppress(AttributeError, NotImplementedError):
                    setattr(part, name, layers)
    config.use_cache = False
    with torch.device("meta"):
        model = getattr(transformers, whole)(config).to(torch.bfloat16).train()
        return model, _INPUTS[architecture.inputs](config)


def _text(config: Any, longest: int = 2048, prefix: str = "") -> dict[str, torch.Tensor]:
    length = min(longest, max(getattr(config, "max_position_embeddings", None) or 0, 0) or longest)  # XLNet has -1
    return {f"{prefix}input_ids": torch.zeros(TOKENS // length, length, dtype=torch.int64)}


def _image(config: Any) -> dict[str, torch.Tensor]:
    config = getattr(config, "vision_config", config)
    size, patch = getattr(config, "image_size", 224) or 224, getattr(config, "patch_size", 16) or 16
    patch = patch if isinstance(patch, int) else 4
    return {
        "pixel_values": torch.zeros(max(8, TOKENS * patch**2 // size**2 // 8 * 8), 3, size, size, dtype=torch.bfloat16)
    }


_INPUTS: dict[str, Any] = {
    "text": _text,
    "short text": lambda config: _text(config, 512),
    "short loops": lambda config: _text(
        config, 16
    ),  # without kernels of their own a graph has a copy of the loop's body for each token
    "two texts": lambda config: {**_text(config, 1024), **_text(config, 1024, "decoder_")},
    "image": _image,
    "image and text": lambda config: {**_image(config), "input_ids": torch.zeros(128, 64, dtype=torch.int64)},
    "speech and text": lambda config: {
        "input_features": torch.zeros(8, config.num_mel_bins, 3000, dtype=torch.bfloat16),
        "decoder_input_ids": torch.zeros(8, 448, dtype=torch.int64),
    },
    "wave": lambda config: {"input_values": torch.zeros(8, 160_000, dtype=torch.bfloat16)},
}


def width_of(config: Any) -> int | None:
    config = getattr(config, "vision_config", config)
    return next((getattr(config, name) for name in ("hidden_size", "d_model") if getattr(config, name, None)), None)


def of(rows: list[Any]) -> str:
    return f"{sum(row.matched for row in rows)} of {len(rows)}" if rows else ""


_SHORT = {" us, FP8 ": "bf16 is faster at its size", "the graph is CPU-bound": "the graph is CPU-bound"}
"""Part of a reason with numbers -> the reason without."""


def reasons(linears: list[Any]) -> str:
    """The reasons of the linears that are left, by the FLOPs that they explain."""
    total, by_reason = sum(row.flops for row in linears) or 1, Counter[str]()
    for row in linears:
        if not row.matched:
            short = next((name for part, name in _SHORT.items() if part in row.reason), None)
            by_reason[short or row.reason.partition(";")[0].partition(" (")[0]] += row.flops
    shares = ((100 * flops / total, reason) for reason, flops in by_reason.most_common())
    return "; ".join(f"{share:.2g}%: {reason}" if share < 99.5 else f"100%: {reason}" for share, reason in shares)


if __name__ == "__main__":
    main()
