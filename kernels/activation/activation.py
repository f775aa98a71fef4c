"""Activations, their backward, and both fused with quantization.

    gelu       x * Phi(x)                    gelu_tanh  x * sigmoid(2 * sqrt(2/pi) * (x + 0.044715 x^3))
    silu       x * sigmoid(x)                relu       max(x, 0)
    quick_gelu x * sigmoid(1.702 x), of CLIP    relu2      max(x, 0)^2, squared ReLU

All arithmetic is fp32 with one rounding, to the input's dtype, at the end. The same device functions (kernels/tiles/activations.py) serve fused
and unfused kernels (kernels/produce): fused equals unfused plus `quantize`, bit for bit.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F

from te_dynamo.kernels.layouts.form import Form
from te_dynamo.kernels.produce.produce import Source, produce
from te_dynamo.kernels.produce.tensor import made
from te_dynamo.kernels.quantize.current import Tile
from te_dynamo.kernels.quantize.formats import reference_of

KINDS = ("gelu", "gelu_tanh", "quick_gelu", "silu", "relu", "relu2")


# --- reference ----------------------------------------------------------------------------------------------


def check_kind(kind: str) -> None:
    """Raises ValueError for an activation that does not exist."""
    if kind not in KINDS:
        raise ValueError(f"activation: expected one of {', '.join(KINDS)}, got {kind!r}")


def value_reference(x: torch.Tensor, kind: str) -> torch.Tensor:
    """f(x) of fp32 x in plain PyTorch: of a kind in KINDS, or "sigmoid" or "identity"."""
    if kind == "identity":
        return x
    if kind == "relu":
        return F.relu(x)
    if kind == "relu2":
        return F.relu(x).square()
    if kind == "sigmoid":
        return torch.sigmoid(x)
    if kind == "silu":
        return F.silu(x)
    if kind == "quick_gelu":
        return x * torch.sigmoid(1.702 * x)
    return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def derivative_reference(dy: torch.Tensor, x: torch.Tensor, kind: str) -> torch.Tensor:
    """dy * f'(x) of fp32 dy and x in plain PyTorch, of the same kinds."""
    if kind == "identity":
        return dy
    if kind == "relu":
        return torch.ops.aten.threshold_backward(dy, x, 0)
    if kind == "relu2":
        return torch.ops.aten.threshold_backward(dy * (x + x), x, 0)
    if kind == "sigmoid":
        return torch.ops.aten.sigmoid_backward(dy, torch.sigmoid(x))
    if kind == "silu":
        return torch.ops.aten.silu_backward(dy, x)
    if kind == "quick_gelu":
        s = torch.sigmoid(1.702 * x)
        return dy * s + torch.ops.aten.sigmoid_backward(dy * x, s) * 1.702
    return torch.ops.aten.gelu_backward(dy, x, approximate="tanh" if kind == "gelu_tanh" else "none")


def activation_reference(x: torch.Tensor, kind: str) -> torch.Tensor:
    """`activation` in plain PyTorch."""
    check_kind(kind)
    return value_reference(x.to(torch.float32), kind).to(x.dtype)


def activation_backward_reference(dy: torch.Tensor, x: torch.Tensor, kind: str) -> torch.Tensor:
    """`activation_backward` in plain PyTorch."""
    check_kind(kind)
    return derivative_reference(dy.to(torch.float32), x.to(torch.float32), kind).to(x.dtype)


def activation_quantize_reference(x: torch.Tensor, kind: str, form: Form, keep_output: bool) -> list[torch.Tensor]:
    """`activation_quantize` in plain PyTorch."""
    y = activation_reference(x, kind)
    return [*([y] if keep_output else []), *reference_of(y, form)]


def activation_backward_quantize_reference(
    dy: torch.Tensor, x: torch.Tensor, kind: str, form: Form, keep_output: bool, bias_grad: bool
) -> list[torch.Tensor]:
    """`activation_backward_quantize` in plain PyTorch."""
    dx = activation_backward_reference(dy, x, kind)
    result = [dx] if keep_output else []
    if bias_grad:
        result.append(dx.reshape(-1, dx.shape[-1]).sum(0, dtype=torch.float32))
    return [*result, *reference_of(dx, form)]


# --- launchers ----------------------------------------------------------------------------------------------


def activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    """f(x) in x's shape and dtype (bf16, fp16 or fp32). Raises ValueError for an unknown kind."""
    return made(_source((x,), kind))[0]


def activation_backward(dy: torch.Tensor, x: torch.Tensor, kind: str) -> torch.Tensor:
    """dx = dy * f'(x) in x's shape and dtype."""
    return made(_source((dy, x), kind))[0]


def activation_quantize(
    x: torch.Tensor,
    kind: str,
    form: Form,
    keep_output: bool,
    tile: Tile | None = None,
    hint: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """[f(x)?, data?, transpose?, scale_inv], equal to `activation` then `quantize`. hint: as `quantize`'s."""
    return [*itertools.chain(*produce(_source((x,), kind), form, keep_output, tile=tile, hint=hint))]


def activation_backward_quantize(
    dy: torch.Tensor,
    x: torch.Tensor,
    kind: str,
    form: Form,
    keep_output: bool,
    bias_grad: bool,
    tile: Tile | None = None,
    hint: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """[dx?, dbias?, data?, transpose?, scale_inv], equal to `activation_backward` then `quantize`.

    dbias (fp32 [K]) is the sum of the rounded dx over its rows. hint: as `quantize`'s, without dbias.
    """
    source = _source((dy, x), kind)
    return [*itertools.chain(*produce(source, form, keep_output, sums=bias_grad, tile=tile, hint=hint))]


def _source(inputs: tuple[torch.Tensor, ...], kind: str) -> Source:
    """f(x) of (x,), or dy f'(x) of (dy, x)."""
    check_kind(kind)
    name = "activation" if len(inputs) == 1 else "activation_backward"
    return Source(name, [x.contiguous() for x in inputs], [inputs[0].shape[-1]] * len(inputs), kind)
