"""Tiny checkpoints by the formulas of the libraries that write them, with the values that they mean: codes are random, scales too."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

N, K = 384, 256
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


class Net(nn.Module):
    """Two linears around an activation, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(K)
        self.mlp = nn.Sequential(nn.Linear(K, N), nn.GELU(), nn.Linear(N, K, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm(x))  # type: ignore[no-any-return]


def net(dtype: torch.dtype = torch.bfloat16) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


Weight = tuple[dict[str, Tensor], Tensor]
"""(suffix of "mlp.0." -> tensor, the fp32 values that they mean)"""


def codes(n: int, k: int) -> Tensor:
    return (torch.randn(n, k) * 40).to(torch.float8_e4m3fn)


def packed(n: int, k: int) -> tuple[Tensor, Tensor]:
    """(bytes of two e2m1 codes, their values)"""
    nibbles = torch.randint(16, (n, k), dtype=torch.uint8)
    values = torch.where(nibbles > 7, -1.0, 1.0) * E2M1[(nibbles & 7).long()]
    return nibbles[:, 0::2] | nibbles[:, 1::2] << 4, values


def spread(scale: Tensor, rows: int, columns: int, n: int, k: int) -> Tensor:
    return scale.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:n, :k]


def scales(*shape: int) -> Tensor:
    return torch.rand(shape) / 64 + 1e-3


def exponents(*shape: int) -> Tensor:
    return torch.randint(115, 125, shape, dtype=torch.uint8)


def power(exponent: Tensor) -> Tensor:
    return torch.exp2(exponent.float() - 127)


def tensorwise(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Callable[[int, int], Weight]:
    def make(n: int, k: int) -> Weight:
        data, scale = codes(n, k), scales(*shape).to(dtype)
        return {"weight": data, name: scale}, data.float() * scale.float()

    return make


def rowwise(name: str, ones: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Callable[[int, int], Weight]:
    def make(n: int, k: int) -> Weight:
        data, scale = codes(n, k), scales(n, *ones).to(dtype)
        return {"weight": data, name: scale}, data.float() * scale.float().reshape(n, 1)

    return make


def blocks(name: str, dtype: torch.dtype = torch.float32, between: bool = False) -> Callable[[int, int], Weight]:
    def make(n: int, k: int) -> Weight:
        data, scale = codes(n, k), scales(-(-n // 128), -(-k // 128)).to(dtype)
        stored = scale[:, None, :, None] if between else scale
        return {"weight": data, name: stored}, data.float() * spread(scale, 128, 128, n, k)

    return make


def e8m0_blocks(name: str) -> Callable[[int, int], Weight]:
    def make(n: int, k: int) -> Weight:
        data, scale = codes(n, k), exponents(-(-n // 128), -(-k // 128))
        return {"weight": data, name: scale}, data.float() * spread(power(scale), 128, 128, n, k)

    return make


def mxfp8(name: str) -> Callable[[int, int], Weight]:
    def make(n: int, k: int) -> Weight:
        data, scale = codes(n, k), exponents(n, k // 32)
        return {"weight": data, name: scale}, data.float() * spread(power(scale), 1, 32, n, k)

    return make


def mxfp4(n: int, k: int) -> Weight:
    (data, values), scale = packed(n, k), exponents(n, k // 32)
    return {"weight_packed": data, "weight_scale": scale}, values * spread(power(scale), 1, 32, n, k)


def gpt_oss(experts: int, n: int, k: int, name: str = "gate_up_proj") -> Weight:
    """(tensors of its experts, the values [E, N, K] that they mean)"""
    bytes_ = torch.randint(256, (experts, n, k // 32, 16), dtype=torch.uint8)
    scale = torch.randint(115, 125, (experts, n, k // 32), dtype=torch.uint8)
    nibbles = torch.stack((bytes_ & 15, bytes_ >> 4), -1).flatten(-2)
    values = E2M1[(nibbles & 7).long()] * torch.where(nibbles > 7, -1, 1)
    meant = (values * power(scale)[..., None]).reshape(experts, n, k).bfloat16()
    return {f"{name}_blocks": bytes_, f"{name}_scales": scale}, meant


def nvfp4(weight: str, tensor_scale: str, divides: bool) -> Callable[[int, int], Weight]:
    def make(n: int, k: int) -> Weight:
        (data, values), scale = packed(n, k), (torch.rand(n, k // 16) * 400).to(torch.float8_e4m3fn)
        factor = torch.rand(1) / 4096 + 1e-5
        stored, factor = (1 / factor, 1 / (1 / factor)) if divides else (factor.reshape(()), factor)
        return {weight: data, "weight_scale": scale, tensor_scale: stored}, values * spread(scale, 1, 16, n, k) * factor

    return make


def _group(num_bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": num_bits, "type": "float", "strategy": strategy, "group_size": None, **more}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": []}


@dataclasses.dataclass(frozen=True)
class File:
    """config: the quantization's. make: (n, k) -> a weight. recipe: what multiplies by it. beside: further tensors of each linear."""

    config: dict[str, Any]
    make: Callable[[int, int], Weight]
    recipe: str
    beside: tuple[str, ...] = ()

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(what the file has for `Net`, name of a weight -> the values that it means)"""
        torch.manual_seed(1)
        made = {
            "norm.weight": torch.rand(K).bfloat16(),
            "norm.bias": torch.rand(K).bfloat16(),
            "mlp.0.bias": torch.rand(N).bfloat16(),
        }
        meant = {}
        for module, n, k in (("mlp.0", N, K), ("mlp.2", K, N)):
            tensors, meant[f"{module}.weight"] = self.make(n, k)
            made |= {f"{module}.{name}": tensor for name, tensor in tensors.items()}
            made |= {f"{module}.{name}": scales(1) for name in self.beside}
        return made, meant


_BLOCKS = "float8_block_scaling(power_of_two_scales=False)"
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_STATIC = {**_FP8, "activation_scheme": "static", "weight_block_size": None}
_MODELOPT = {"quant_method": "modelopt", "exclude_modules": ["lm_head*"]}
FILES = {
    "fp8": File(_FP8, blocks("weight_scale_inv"), _BLOCKS),
    "fp8 ue8m0": File({**_FP8, "scale_fmt": "ue8m0"}, e8m0_blocks("weight_scale_inv"), "float8_block_scaling"),
    "fp8 .scale": File(_FP8, blocks("scale"), _BLOCKS),
    "fp8 tensor": File(_STATIC, tensorwise("weight_scale_inv", ()), "float8_current_scaling", ("activation_scale",)),
    "ct tensor": File(
        _group(8, "tensor"),
        tensorwise("weight_scale", (1,), torch.bfloat16),
        "float8_current_scaling",
        ("input_scale",),
    ),
    "ct row": File(_group(8, "channel"), rowwise("weight_scale", (1,), torch.bfloat16), "float8_rowwise"),
    "ct block": File(_group(8, "block", block_structure=[128, 128]), blocks("weight_scale", torch.bfloat16), _BLOCKS),
    "ct mxfp8": File(_group(8, "group", group_size=32), mxfp8("weight_scale"), "mxfp8"),
    "ct mxfp4": File(_group(4, "group", group_size=32), mxfp4, "mxfp8"),
    "ct nvfp4": File(
        _group(4, "tensor_group", group_size=16),
        nvfp4("weight_packed", "weight_global_scale", True),
        "nvfp4(weight_block_dims=1)",
        ("input_global_scale",),
    ),
    "modelopt": File(
        {**_MODELOPT, "quant_algo": "FP8"}, tensorwise("weight_scale", ()), "float8_current_scaling", ("input_scale",)
    ),
    "modelopt row": File(
        {**_MODELOPT, "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, rowwise("weight_scale", ()), "float8_rowwise"
    ),
    "modelopt block": File(
        {"quantization": {"quant_algo": "FP8_PB_WO"}}, blocks("weight_scale", between=True), _BLOCKS
    ),
    "modelopt mxfp8": File({**_MODELOPT, "quant_algo": "MXFP8"}, mxfp8("weight_scale"), "mxfp8"),
    "modelopt nvfp4": File(
        {**_MODELOPT, "quant_algo": "NVFP4"},
        nvfp4("weight", "weight_scale_2", False),
        "nvfp4(weight_block_dims=1)",
        ("input_scale",),
    ),
}


def write(folder: Path, file: File, tensors: dict[str, Tensor] | None = None) -> Path:
    """The folder, with the file's tensors, or these, and its configuration."""
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in (tensors or file.tensors()[0]).items()},
        folder / "model.safetensors",
    )
    older = "quantization" in file.config
    name, content = (
        ("hf_quant_config.json", file.config) if older else ("config.json", {"quantization_config": file.config})
    )
    (folder / name).write_text(json.dumps(content))
    return folder
