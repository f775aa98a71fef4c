"""Models whose FLOPs lie in products of unusual forms, in the sizes of their papers and with few layers."""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) / math.sqrt(shape[-2]))


class GShard(nn.Module):
    """A mixture of GShard (Lepikhin et al., algorithm 1): top-2 gating, dispatch and combine by one-hot masks, experts by einsum."""

    def __init__(self, width: int = 1024, inner: int = 8192, experts: int = 8) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.up, self.down = _weight(experts, width, inner), _weight(experts, inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """x [G, S, D]: groups of tokens, each with a capacity of two times its share."""
        experts, capacity = self.up.shape[0], 2 * x.shape[1] // self.up.shape[0]
        gates = self.gate(x).float().softmax(-1)
        weight, index = gates.topk(2, -1)
        chosen = F.one_hot(index, experts).sum(-2)
        place = chosen.cumsum(1) * chosen - 1
        slots = (place.unsqueeze(-1) == torch.arange(capacity, device=x.device)).to(x.dtype)  # [G, S, E, C]
        combine = slots * (gates * chosen).unsqueeze(-1).to(x.dtype)
        tokens = torch.einsum("gsec,gsd->egcd", slots, x)
        h = F.relu(torch.einsum("egcd,edf->egcf", tokens, self.up))
        return torch.einsum("gsec,egcd->gsd", combine, torch.einsum("egcf,efd->egcd", h, self.down)) + weight.sum() * 0


class SoftMoE(nn.Module):
    """A layer of Soft MoE (Puigcerver et al.), S/16's sizes: slots are mixtures of all tokens, experts add their biases in baddbmm."""

    def __init__(self, width: int = 384, inner: int = 1536, experts: int = 32, slots: int = 8) -> None:
        super().__init__()
        self.phi = _weight(width, experts * slots)
        self.up, self.down = _weight(experts, width, inner), _weight(experts, inner, width)
        self.up_bias, self.down_bias = (
            nn.Parameter(torch.zeros(experts, 1, inner)),
            nn.Parameter(torch.zeros(experts, 1, width)),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, _, width = x.shape
        experts = self.up.shape[0]
        logits = x @ self.phi
        slots = logits.softmax(1).transpose(1, 2) @ x
        each = slots.view(batch, experts, -1, width).transpose(0, 1).reshape(experts, -1, width)
        h = F.gelu(torch.baddbmm(self.up_bias, each, self.up))
        y = torch.baddbmm(self.down_bias, h, self.down).view(experts, batch, -1, width)
        return logits.softmax(-1) @ y.transpose(0, 1).reshape(batch, -1, width)


class DLRM(nn.Module):
    """DLRM (Naumov et al.) with the MLPs of MLPerf: 26 tables of 128 columns, 13 dense features, 479 into the upper MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(64, 128) for _ in range(26))
        self.bottom, self.top = self._mlp(13, 512, 256, 128), self._mlp(479, 1024, 1024, 512, 256, 1)

    @staticmethod
    def _mlp(*sizes: int) -> nn.Sequential:
        layers = [(nn.Linear(k, n), nn.ReLU()) for k, n in itertools.pairwise(sizes)]
        return nn.Sequential(*(part for layer in layers for part in layer))

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        x = self.bottom(dense)
        rows = torch.stack([x, *(table(sparse[:, i]) for i, table in enumerate(self.tables))], 1)
        i, j = torch.tril_indices(27, 27, offset=-1, device=x.device)
        return self.top(torch.cat([x, (rows @ rows.mT)[:, i, j]], 1))


class TabTransformer(nn.Module):
    """TabTransformer (Huang et al.) on the columns of Adult and their like: width 32, a head MLP of 4 and 2 times its 424 inputs."""

    def __init__(self, columns: int = 13, continuous: int = 8, width: int = 32, depth: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, batch_first=True, activation="gelu")
        self.blocks, self.norm = nn.ModuleList([layer] * depth), nn.LayerNorm(continuous)
        inputs = columns * width + continuous
        self.head = nn.Sequential(
            nn.Linear(inputs, 4 * inputs),
            nn.SELU(),
            nn.Linear(4 * inputs, 2 * inputs),
            nn.SELU(),
            nn.Linear(2 * inputs, 1),
        )

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        x = self.embed(categories)
        for block in self.blocks:
            x = block(x)
        return self.head(torch.cat([x.flatten(1), self.norm(numbers)], -1))


class Mixer(nn.Module):
    """Mixer-B/16 (Tolstikhin et al.): 196 patches of 768 channels, 384 and 3072 inside."""

    def __init__(self, depth: int = 1, width: int = 768, patches: int = 196) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, 16, stride=16)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth))
        self.tokens = nn.ModuleList(self._mlp(patches, width // 2) for _ in range(depth))
        self.channels = nn.ModuleList(self._mlp(width, 4 * width) for _ in range(depth))
        self.head = nn.Linear(width, 1000)

    @staticmethod
    def _mlp(width: int, inner: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))

    def forward(self, image: Tensor) -> Tensor:
        x = self.embed(image).flatten(2).transpose(1, 2)
        for i, (tokens, channels) in enumerate(zip(self.tokens, self.channels, strict=True)):
            x = x + tokens(self.norms[2 * i](x).transpose(1, 2)).transpose(1, 2)
            x = x + channels(self.norms[2 * i + 1](x))
        return self.head(x.mean(1))
