"""Model families of transformers, tiny, with random weights of the library's own initialisation; no file is fetched."""

from __future__ import annotations

from typing import Any

import torch
import transformers

COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED = {**COMMON, "num_key_value_heads": 2}

MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    **COMMON,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}

LAYERS = {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4}
TWO_STACKS = {
    "vocab_size": 128,
    "d_model": 64,
    **{f"{stack}_layers": 2 for stack in ("encoder", "decoder")},
    **{f"{stack}_attention_heads": 4 for stack in ("encoder", "decoder")},
    **{f"{stack}_ffn_dim": 128 for stack in ("encoder", "decoder")},
}
T5 = {
    "vocab_size": 128,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "feed_forward_proj": "gated-gelu",
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}
TOWER = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TOWERS = {
    "text_config": {
        **TOWER,
        "vocab_size": 128,
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "projection_size": 64,
    },
    "vision_config": {**TOWER, "image_size": 32, "patch_size": 8},
}

# Family -> (model class, configuration, share of linear FLOPs in FP8).
FAMILIES: dict[str, tuple[str, dict[str, Any], float]] = {
    "Llama": ("LlamaForCausalLM", GROUPED, 1.0),
    "Mistral": ("MistralForCausalLM", GROUPED, 1.0),
    "Qwen2": ("Qwen2ForCausalLM", GROUPED, 1.0),
    "Qwen3": ("Qwen3ForCausalLM", {**GROUPED, "head_dim": 16}, 1.0),
    "Gemma": ("GemmaForCausalLM", {**GROUPED, "head_dim": 16}, 1.0),
    "Gemma2": ("Gemma2ForCausalLM", {**GROUPED, "head_dim": 16, "query_pre_attn_scalar": 16}, 1.0),
    "Phi3": ("Phi3ForCausalLM", {**GROUPED, "pad_token_id": 0}, 1.0),
    "GPTNeoX": ("GPTNeoXForCausalLM", COMMON, 1.0),
    "Bert": ("BertForMaskedLM", COMMON, 1.0),
    # gelu written out by tanh.
    "Phi": ("PhiForCausalLM", COMMON, 1.0),
    "Albert": ("AlbertForMaskedLM", {**COMMON, "embedding_size": 64}, 1.0),
    # LayerNorm written out in fp32; of what was cast to fp32; with a weight around zero.
    "Cohere": ("CohereForCausalLM", {**COMMON, "pad_token_id": 0}, 1.0),
    "Olmo": ("OlmoForCausalLM", {**COMMON, "pad_token_id": 0}, 1.0),
    # Its activation is relu squared.
    "Nemotron": ("NemotronForCausalLM", GROUPED, 1.0),
    # Its layers are Conv1D, written as addmm.
    "GPT2": ("GPT2LMHeadModel", {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}, 1.0),
    # The router is four columns wide: left, with that reason.
    "Mixtral": ("MixtralForCausalLM", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}, 0.99),
    # Queries and keys through low ranks, a shared expert, a router four columns wide.
    "DeepseekV3": ("DeepseekV3ForCausalLM", LATENT, 0.99),
    # The same, whose router asks no bias of each expert.
    "DeepseekV2": ("DeepseekV2ForCausalLM", {**LATENT, "topk_method": "greedy"}, 0.99),
    # Experts with biases and gate and up interleaved.
    "GptOss": ("GptOssForCausalLM", {**GROUPED, **MIXTURE, "head_dim": 16, "sliding_window": 16}, 0.99),
    # Experts by torch.bmm.
    "Llama4Text": (
        "Llama4ForCausalLM",
        {**GROUPED, "head_dim": 16, "intermediate_size_mlp": 128, "num_local_experts": 4, "attention_chunk_size": 16},
        0.99,
    ),
    # LayerNorm behind the embedding, a GELU of its own, q, k and v in one.
    "Bloom": ("BloomForCausalLM", {"vocab_size": 128, "hidden_size": 64, "n_layer": 2, "n_head": 4}, 1.0),
    # A short convolution between two linears.
    "Lfm2": ("Lfm2ForCausalLM", {**GROUPED, "layer_types": ["conv", "full_attention"], "block_multiple_of": 16}, 0.99),
    # Projections by einsums with weights of three dimensions. Scores by positions, which parameters alone make, are left.
    "XLNet": (
        "XLNetLMHeadModel",
        {"vocab_size": 128, "d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 128},
        0.9,
    ),
    "OPT": ("OPTForCausalLM", {**COMMON, "ffn_dim": 128, "word_embed_proj_dim": 64}, 1.0),
    "Falcon": ("FalconForCausalLM", COMMON, 1.0),
    "StableLm": ("StableLmForCausalLM", GROUPED, 1.0),
    "Cohere2": ("Cohere2ForCausalLM", {**GROUPED, "pad_token_id": 0}, 1.0),
    "Olmo2": ("Olmo2ForCausalLM", {**GROUPED, "pad_token_id": 0}, 1.0),
    "Olmo3": ("Olmo3ForCausalLM", {**GROUPED, "pad_token_id": 0}, 1.0),
    "Gemma3Text": ("Gemma3ForCausalLM", {**GROUPED, "head_dim": 16}, 1.0),
    # Its routers and predictions are four columns wide.
    "Gemma3nText": (
        "Gemma3nForCausalLM",
        {
            **GROUPED,
            "head_dim": 16,
            "num_kv_shared_layers": 0,
            "laurel_rank": 16,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 128,
            "activation_sparsity_pattern": [0.0, 0.0],
        },
        0.98,
    ),
    "Glm4": ("Glm4ForCausalLM", {**GROUPED, "head_dim": 16, "pad_token_id": 0}, 1.0),
    "Granite": ("GraniteForCausalLM", {**GROUPED, "pad_token_id": 0}, 1.0),
    "SmolLM3": ("SmolLM3ForCausalLM", {**GROUPED, "pad_token_id": 0}, 1.0),
    "Exaone4": ("Exaone4ForCausalLM", {**GROUPED, "pad_token_id": 0}, 1.0),
    "Starcoder2": ("Starcoder2ForCausalLM", GROUPED, 1.0),
    "GPTJ": ("GPTJForCausalLM", {**LAYERS, "rotary_dim": 8, "n_positions": 64}, 1.0),
    "GPTNeo": (
        "GPTNeoForCausalLM",
        {
            "vocab_size": 128,
            "hidden_size": 64,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 64,
        },
        1.0,
    ),
    "GPTBigCode": ("GPTBigCodeForCausalLM", {**LAYERS, "n_positions": 64}, 1.0),
    "Mpt": (
        "MptForCausalLM",
        {"vocab_size": 128, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
        1.0,
    ),
    "Persimmon": ("PersimmonForCausalLM", COMMON, 1.0),
    "NanoChat": ("NanoChatForCausalLM", GROUPED, 1.0),
    "Rwkv": (
        "RwkvForCausalLM",
        {
            "vocab_size": 128,
            "hidden_size": 64,
            "attention_hidden_size": 64,
            "num_hidden_layers": 2,
            "context_length": 64,
            "intermediate_size": 128,
        },
        1.0,
    ),
    "DistilBert": (
        "DistilBertForMaskedLM",
        {"vocab_size": 128, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128, "max_position_embeddings": 64},
        1.0,
    ),
    "Electra": ("ElectraForMaskedLM", {**COMMON, "embedding_size": 64}, 1.0),
    "Roberta": ("RobertaForMaskedLM", COMMON, 1.0),
    "ModernBert": ("ModernBertForMaskedLM", {**COMMON, "pad_token_id": 0, "global_attn_every_n_layers": 2}, 1.0),
    "DebertaV2": (
        "DebertaV2ForMaskedLM",
        {**COMMON, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
        0.76,
    ),
    "Bart": ("BartForConditionalGeneration", {**TWO_STACKS, "max_position_embeddings": 64}, 1.0),
    "T5": ("T5ForConditionalGeneration", T5, 1.0),
    "MT5": ("MT5ForConditionalGeneration", T5, 1.0),
    "Qwen3Moe": (
        "Qwen3MoeForCausalLM",
        {**GROUPED, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        0.99,
    ),
    "Olmoe": ("OlmoeForCausalLM", {**GROUPED, "pad_token_id": 0, "num_experts": 4, "num_experts_per_tok": 2}, 0.99),
    "Phimoe": ("PhimoeForCausalLM", {**GROUPED, "pad_token_id": 0, "num_local_experts": 4}, 0.99),
    "MiniMax": (
        "MiniMaxForCausalLM",
        {**GROUPED, **MIXTURE, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"]},
        0.99,
    ),
    "Glm4Moe": (
        "Glm4MoeForCausalLM",
        {
            **GROUPED,
            "head_dim": 16,
            "pad_token_id": 0,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
        0.99,
    ),
    # State-space models: convolutions and projections of 36 columns are left.
    "Mamba": ("MambaForCausalLM", {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2}, 0.83),
    "Mamba2": (
        "Mamba2ForCausalLM",
        {
            "vocab_size": 128,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 16,
            "n_groups": 1,
            "state_size": 16,
        },
        0.97,
    ),
    "Jamba": (
        "JambaForCausalLM",
        {
            **GROUPED,
            "pad_token_id": 0,
            "use_mamba_kernels": False,
            "num_experts": 4,
            "attn_layer_offset": 1,
            "attn_layer_period": 2,
            "expert_layer_offset": 1,
            "expert_layer_period": 2,
        },
        0.95,
    ),
    "RecurrentGemma": (
        "RecurrentGemmaForCausalLM",
        {**COMMON, "num_hidden_layers": 3, "num_key_value_heads": 1, "lru_width": 64, "attention_window_size": 16},
        0.94,
    ),
    "Zamba2": (
        "Zamba2ForCausalLM",
        {
            **COMMON,
            "pad_token_id": 0,
            "layers_block_type": ["mamba", "hybrid"],
            "num_key_value_heads": 4,
            "mamba_d_state": 16,
            "mamba_ngroups": 1,
            "n_mamba_heads": 8,
            "num_mem_blocks": 1,
            "use_mamba_kernels": False,
        },
        0.99,
    ),
    "FalconH1": (
        "FalconH1ForCausalLM",
        {
            **GROUPED,
            "pad_token_id": 0,
            "mamba_d_ssm": 64,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_n_groups": 1,
            "mamba_d_state": 16,
            "head_dim": 16,
        },
        0.8,
    ),
    "Bamba": (
        "BambaForCausalLM",
        {
            **GROUPED,
            "pad_token_id": 0,
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_n_groups": 1,
            "mamba_d_state": 16,
        },
        0.99,
    ),
    # A mixture and a shared MLP behind each state-space layer too.
    "GraniteMoeHybrid": (
        "GraniteMoeHybridForCausalLM",
        {
            **GROUPED,
            **MIXTURE,
            "pad_token_id": 0,
            "layer_types": ["mamba", "attention"],
            "shared_intermediate_size": 64,
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_n_groups": 1,
            "mamba_d_state": 16,
        },
        0.99,
    ),
    # Images and sounds: what is left are convolutions that are no patches, and patches of few values.
    "CLIP": ("CLIPModel", {**TOWERS, "projection_dim": 64}, 0.94),
    "Siglip": ("SiglipModel", TOWERS, 0.94),
    "Whisper": (
        "WhisperForConditionalGeneration",
        {
            **TWO_STACKS,
            "num_mel_bins": 16,
            "max_source_positions": 32,
            "max_target_positions": 64,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
        0.9,
    ),
    "ViT": ("ViTForImageClassification", {**TOWER, "image_size": 32, "patch_size": 8, "num_labels": 16}, 0.84),
    "Dinov2": ("Dinov2ForImageClassification", {**TOWER, "image_size": 32, "patch_size": 8, "num_labels": 16}, 0.88),
    "Segformer": (
        "SegformerForImageClassification",
        {
            "hidden_sizes": [16, 32, 64, 64],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 4, 4],
            "num_labels": 16,
        },
        0.54,
    ),
    "ConvNext": (
        "ConvNextForImageClassification",
        {"hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 1, 1], "num_labels": 16},
        0.68,
    ),
    "Wav2Vec2": (
        "Wav2Vec2ForCTC",
        {
            **TOWER,
            "vocab_size": 32,
            "conv_dim": [32, 32],
            "conv_stride": [5, 2],
            "conv_kernel": [10, 3],
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
            "mask_time_prob": 0.0,
        },
        0.77,
    ),
}


def build(family: str) -> torch.nn.Module:
    """The model of a family, in bf16, with the same values each time."""
    name, fields, _ = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**fields)
    config.use_cache = False
    return getattr(transformers, name)(config).bfloat16().eval()


def inputs(family: str) -> dict[str, Any]:
    """Keyword arguments of a step, with which a family's model gives a loss."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 128, (2, 33), generator=generator)
    labels = torch.tensor([1, 2])

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    if family in ("CLIP", "Siglip"):
        return {"input_ids": tokens, "pixel_values": noise(2, 3, 32, 32), "return_loss": True}
    if family == "Whisper":
        return {"input_features": noise(2, 16, 64), "labels": tokens}
    if family in ("ViT", "Dinov2", "ConvNext"):
        return {"pixel_values": noise(2, 3, 32, 32), "labels": labels}
    if family == "Segformer":
        return {"pixel_values": noise(2, 3, 64, 64), "labels": labels}
    if family == "Wav2Vec2":
        return {"input_values": noise(2, 640), "labels": torch.randint(1, 30, (2, 8), generator=generator)}
    if family == "Rwkv":  # unrolls its tokens
        tokens = tokens[:, :9]
    return {"input_ids": tokens, "labels": tokens}
