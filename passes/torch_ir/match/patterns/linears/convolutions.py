"""Convolutions that are linears: of 1x1, and those whose windows lie side by side (patch embeddings, ConvNeXt's downsampling).

    F.conv2d(x, weight [N, C, 1, 1], bias)             F.linear(x.permute(0, 2, 3, 1), weight[:, :, 0, 0], bias).permute(0, 3, 1, 2)
    F.conv2d(x, weight [N, C, P, P], bias, stride=P)   F.linear(patches [B, H, W, C * P * P], weight.flatten(1), bias).permute(0, 3, 1, 2)

One of 1x1 is a linear where x lies in torch.channels_last, so that nothing is copied. Patches are copied in any layout, once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from te_dynamo.passes.torch_ir.match.patterns.linears.contractions import Contraction, Factor
from te_dynamo.passes.torch_ir.match.values import arguments, calls, fixed, tensor_of

_aten = torch.ops.aten
_CONVOLUTIONS = {
    torch.conv1d, torch.conv2d, torch.conv3d, _aten.conv1d.default, _aten.conv2d.default, _aten.conv3d.default,
}  # fmt: skip


def contraction_of_convolution(node: fx.Node) -> Contraction | None:
    """The product by letters that a convolution is; None for any other node, and for a convolution that is more than that."""
    given = _arguments(node)
    x, weight = (tensor_of(given.get(name)) for name in ("input", "weight"))
    if x is None or weight is None or x.dim() != weight.dim():
        return None
    kernel = [fixed(size) for size in weight.shape[2:]]
    if not _is_linear(given, kernel) or not _divides(x, kernel):
        return None
    rows, inner, steps, sizes = "hwd"[: len(kernel)], "", [], [*x.shape[:2]]
    letters = "bc"
    for i, (row, size, p) in enumerate(zip(rows, x.shape[2:], kernel, strict=True)):
        if p != 1:
            steps.append(("unflatten", len(letters), (fixed(size) // p, p)))  # type: ignore[operator]
            inner += "pqr"[i]
        letters += row + ("pqr"[i] if p != 1 else "")
        sizes += [size] if p == 1 else [fixed(size) // p, p]  # type: ignore[operator]
    ones = tuple(2 + i for i, p in enumerate(kernel) if p == 1)
    held = Factor(
        given["weight"],
        "nc" + inner,
        tuple(size for i, size in enumerate(weight.shape) if i not in ones),
        (("squeeze", ones),) if ones else (),
    )
    rest = Factor(given["input"], letters, tuple(sizes), tuple(steps))
    return Contraction((rest, held), "bn" + rows, "a convolution", given.get("bias"))


def _arguments(node: fx.Node) -> dict[str, Any]:
    names = ["input", "weight", "bias", "stride", "padding", "dilation"]
    if calls(node, {_aten.convolution.default}):
        return arguments(node, *names, "transposed", "output_padding", "groups") or {}
    return (arguments(node, *names, "groups") or {}) if calls(node, _CONVOLUTIONS) else {}


def _is_linear(given: dict[str, Any], kernel: list[int | None]) -> bool:
    """Whether its windows lie side by side, and each sees all channels."""

    def each(name: str, default: int) -> list[Any]:
        value = given.get(name, default)
        value = [value] if isinstance(value, int) else list(value)
        return value * len(kernel) if len(value) == 1 else value

    whole = given.get("groups", 1) == 1 and not given.get("transposed") and given.get("padding", 0) != "same"
    unpadded = given.get("padding", 0) == "valid" or (whole and not any(each("padding", 0)))
    spread = any(d != 1 for d, p in zip(each("dilation", 1), kernel, strict=True) if p != 1)
    return whole and unpadded and not spread and each("stride", 1) == kernel


def _divides(x: torch.Tensor, kernel: list[int | None]) -> bool:
    """Whether the windows cover x, and reading them costs no more than the copy that patches are."""
    if all(p == 1 for p in kernel):
        return x.movedim(1, -1).is_contiguous()
    sizes = [(fixed(size), p) for size, p in zip(x.shape[2:], kernel, strict=True) if p != 1]
    return all(size is not None and size % p == 0 for size, p in sizes)  # type: ignore[operator]
