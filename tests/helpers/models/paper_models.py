"""Blocks of published models outside of transformers, as their authors write them: width 64, four heads.

Each says what no other has.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS = 64, 4


def heads_of(*tensors: Tensor) -> list[Tensor]:
    return [tensor.unflatten(-1, (HEADS, -1)).transpose(1, 2) for tensor in tensors]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)


def mlp(width: int = WIDTH, approximate: str = "tanh") -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate), nn.Linear(4 * width, width))


class ViTBlock(nn.Module):
    """timm's. Under autocast: a norm in fp32 that gives bf16, a bf16 linear added to a stream in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out, self.mlp = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), mlp(approximate="none")

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(attend(*heads_of(*self.qkv(self.norm1(x)).chunk(3, -1))))
        return x + self.mlp(self.norm2(x))


class DiTBlock(nn.Module):
    """DiT (Peebles and Xie): adaLN-Zero around attention and around an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.ada, self.qkv = nn.Linear(WIDTH, 6 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.mlp = nn.Linear(WIDTH, WIDTH), mlp()

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.ada(F.silu(c)).chunk(6, dim=1)
        h = self.norm1(x) * (1 + scale1.unsqueeze(1)) + shift1.unsqueeze(1)
        x = x + gate1.unsqueeze(1) * self.out(attend(*heads_of(*self.qkv(h).chunk(3, -1))))
        h = self.norm2(x) * (1 + scale2.unsqueeze(1)) + shift2.unsqueeze(1)
        return x + gate2.unsqueeze(1) * self.mlp(h)


class FluxBlock(nn.Module):
    """Flux and Stable Diffusion 3: two streams with weights of their own meet in one attention, q and k normed by head."""

    def __init__(self) -> None:
        super().__init__()
        self.ada, self.qkv, self.out = (nn.ModuleList(nn.Linear(WIDTH, n * WIDTH) for _ in range(2)) for n in (6, 3, 1))
        self.q, self.k = (nn.RMSNorm(WIDTH // HEADS) for _ in range(2))
        self.mlps = nn.ModuleList(mlp() for _ in range(2))

    def forward(self, image: Tensor, text: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        streams, parts, given = (image, text), [], F.silu(c)
        factors = [[part[:, None] for part in ada(given).chunk(6, dim=-1)] for ada in self.ada]
        for x, (shift, scale, *_), qkv in zip(streams, factors, self.qkv, strict=True):
            h = F.layer_norm(x, (WIDTH,), eps=1e-6) * (1 + scale) + shift
            q, k, v = heads_of(*qkv(h).chunk(3, -1))
            parts.append((self.q(q), self.k(k), v))
        joint = attend(*(torch.cat(pair, 2) for pair in zip(*parts, strict=True)))
        attended = joint.split([x.shape[1] for x in streams], 1)
        results = []
        for i, (x, (*_, gate1, shift, scale, gate2)) in enumerate(zip(streams, factors, strict=True)):
            x = x + gate1 * self.out[i](attended[i])
            h = F.layer_norm(x, (WIDTH,), eps=1e-6) * (1 + scale) + shift
            results.append(x + gate2 * self.mlps[i](h))
        return tuple(results)


class WanBlock(nn.Module):
    """Wan: modulated norms all in fp32 with one cast at the end, and text by cross-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, 6, WIDTH) / WIDTH**0.5)
        self.norm, self.mlp = nn.LayerNorm(WIDTH), mlp()
        self.qkv, self.q, self.kv = (nn.Linear(WIDTH, n * WIDTH) for n in (3, 1, 2))
        self.out1, self.out2 = (nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, text: Tensor, time: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = (self.table + time.float()).chunk(6, dim=1)
        h = (F.layer_norm(x.float(), (WIDTH,)) * (1 + scale1) + shift1).type_as(x)
        x = (x.float() + self.out1(attend(*heads_of(*self.qkv(h).chunk(3, -1)))) * gate1).type_as(x)
        q, k, v = heads_of(self.q(self.norm(x.float()).type_as(x)), *self.kv(text).chunk(2, -1))
        x = x + self.out2(attend(q, k, v))
        h = (F.layer_norm(x.float(), (WIDTH,)) * (1 + scale2) + shift2).type_as(x)
        return (x.float() + self.mlp(h).float() * gate2).type_as(x)


class XBlock(nn.Module):
    """x-transformers': a row on the sphere times sqrt(d) and a gain for its RMSNorm, GEGLU as halves of one linear."""

    def __init__(self) -> None:
        super().__init__()
        self.gains = nn.ParameterList(torch.ones(WIDTH) for _ in range(2))
        self.qkv, self.out = (nn.Linear(WIDTH, n * WIDTH, bias=False) for n in (3, 1))
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = F.normalize(x, dim=-1) * WIDTH**0.5 * self.gains[0]
        x = x + self.out(attend(*heads_of(*self.qkv(h).chunk(3, -1))))
        up, gate = self.up(F.normalize(x, dim=-1) * WIDTH**0.5 * self.gains[1]).chunk(2, -1)
        return x + self.down(up * F.gelu(gate))


class NGPTBlock(nn.Module):
    """nGPT (Loshchilov et al.): each weight's rows on the sphere in each call, and each sum of the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.up, self.down = (
            nn.Parameter(torch.randn(n * WIDTH, k * WIDTH)) for n, k in ((3, 1), (1, 1), (8, 1), (1, 4))
        )
        self.rates = nn.Parameter(torch.full((2, WIDTH), 0.2))

    def forward(self, x: Tensor) -> Tensor:
        def linear(x: Tensor, weight: Tensor) -> Tensor:
            return F.linear(x, F.normalize(weight, dim=-1))

        h = linear(attend(*heads_of(*linear(x, self.qkv).chunk(3, -1))), self.out)
        x = F.normalize(x + self.rates[0] * (F.normalize(h, dim=-1) - x), dim=-1)
        up, gate = (linear(x, self.up) * WIDTH**0.5).chunk(2, -1)
        h = linear(up * F.silu(gate), self.down)
        return F.normalize(x + self.rates[1] * (F.normalize(h, dim=-1) - x), dim=-1)


class FTTransformer(nn.Module):
    """FT-Transformer (Gorishniy et al.): a token of each number, ReGLU, a head that reads one token through norm and relu."""

    def __init__(self, columns: int = 31) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.randn(columns + 1, WIDTH) / 8) for _ in range(2))
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.qkv, self.out = (nn.Linear(WIDTH, n * WIDTH) for n in (3, 1))
        self.up, self.down, self.head = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, 16)

    def forward(self, numbers: Tensor) -> Tensor:
        x = F.pad(numbers, (1, 0), value=1.0)[..., None] * self.weight + self.bias
        x = x + self.out(attend(*heads_of(*self.qkv(self.norm1(x)).chunk(3, -1))))
        up, gate = self.up(self.norm2(x)).chunk(2, -1)
        x = x + self.down(up * F.relu(gate))
        return self.head(F.relu(self.norm3(x[:, 0])))


class Monarch(nn.Module):
    """Monarch (Dao et al.): each linear is two of blocks on the diagonal, with a transposition between."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            torch.randn(blocks, *2 * (WIDTH // blocks,)) / math.sqrt(WIDTH // blocks) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        blocks = self.weights[0].shape[0]
        for i, weight in enumerate(self.weights):
            h = torch.einsum("bkp,kqp->bkq", x.unflatten(-1, (blocks, -1)), weight)
            x = h.transpose(1, 2).flatten(1)
            x = F.gelu(x) if i == 1 else x
        return x


class MLA(nn.Module):
    """Multi-head latent attention (DeepSeek-V2) with the keys' and values' weights absorbed: each head multiplies by its own."""

    def __init__(self, latent: int = 32, head: int = 16) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(WIDTH, HEADS * head), nn.Linear(WIDTH, latent), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = (nn.Parameter(torch.randn(HEADS, *s) / 4) for s in ((head, latent), (latent, head)))

    def forward(self, x: Tensor) -> Tensor:
        latent = self.kv(x)
        q = torch.einsum("bthd,hdc->bthc", self.q(x).unflatten(-1, (HEADS, -1)), self.key)
        scores = torch.einsum("bthc,bsc->bhts", q, latent).div(4).softmax(-1)
        attended = torch.einsum("bhts,bsc->bthc", scores, latent)
        return self.out(torch.einsum("bthc,hcd->bthd", attended, self.value).flatten(-2))
