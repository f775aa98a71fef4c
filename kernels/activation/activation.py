"""Activations, their backward, and both fused with quantization.

    gelu       x * Phi(x)                    gelu_tanh  x * sigmoid(2 * sqrt(2/pi) * (x + 0.044715 x^3))
    silu       x * sigmoid(x)                relu       max(x, 0)
    quick_gelu x * sigmoid(1.702 x), of CLIP    relu2      max(x, 0)^2, squared ReLU

All arithmetic is fp32 with one rounding, to the input's dtype, at the end. A fused function is two
launches: the amax of the rounded result, then the result again, cast (kernels/tiles/fp8.py); the cheap function
is computed twice and its result never read back. The same device functions (kernels/tiles/activations.py) serve fused
and unfused kernels: fused equals unfused plus `quantize`, bit for bit. Backward with a bias gradient sums columns in
the first launch, in parts, and adds up the parts in the second.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F

from te_dynamo.kernels.activation.activation_kernels import (
    activation_amax_kernel,
    activation_backward_sums_kernel,
    activation_write_kernel,
)
from te_dynamo.kernels.layouts.form import Form
from te_dynamo.kernels.layouts.sizes import rows_and_columns
from te_dynamo.kernels.produce.produce import FORMS, Source, produce
from te_dynamo.kernels.quantize.current import PARTIALS, Tile, amax_tile, cast_tile, stripes
from te_dynamo.kernels.quantize.formats import reference_of
from te_dynamo.kernels.runtime.launch import launch
from te_dynamo.kernels.tiles.fp8 import program_count
from te_dynamo.kernels.tiles.one_pass import partials_to_find, passes

__all__ = [
    "KINDS",
    "activation",
    "activation_backward",
    "activation_backward_quantize",
    "activation_backward_quantize_reference",
    "activation_backward_reference",
    "activation_quantize",
    "activation_quantize_reference",
    "activation_reference",
    "check_kind",
    "derivative_reference",
    "value_reference",
]

KINDS = ("gelu", "gelu_tanh", "quick_gelu", "silu", "relu", "relu2")


FORWARD_TILE: Tile = (128, 64, 4)
BACKWARD_TILE: Tile = (256, 64, 8)
"""Tiles of the cast launches: the fastest on an H200 for GELU."""


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
    return _write(x, x, kind, backward=False)


def activation_backward(dy: torch.Tensor, x: torch.Tensor, kind: str) -> torch.Tensor:
    """dx = dy * f'(x) in x's shape and dtype."""
    return _write(dy, x, kind, backward=True)


def activation_quantize(
    x: torch.Tensor,
    kind: str,
    form: Form,
    keep_output: bool,
    tile: Tile | None = None,
    hint: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """[f(x)?, data?, transpose?, scale_inv], equal to `activation` then `quantize`. hint: as `quantize`'s."""
    return _quantize(x, x, kind, False, form, keep_output, False, tile, hint)


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
    return _quantize(dy, x, kind, True, form, keep_output, bias_grad, tile, hint)


def _write(dy: torch.Tensor, x: torch.Tensor, kind: str, backward: bool) -> torch.Tensor:
    check_kind(kind)
    dy, x = dy.contiguous(), x.contiguous()
    rows, columns = rows_and_columns(x.shape)
    y = torch.empty_like(x)
    block_m, block_k, warps = amax_tile(columns)
    launch(
        activation_write_kernel,
        (program_count(rows, columns, block_m, block_k, x.device),),
        dy=dy,
        x=x,
        partials=x,
        hint=x,
        sums=x,
        y=y,
        dbias=x,
        data=x,
        transpose=x,
        scale_inv=x,
        M=rows,
        K=columns,
        KIND=kind,
        BACKWARD=backward,
        KEEP_OUTPUT=True,
        PASS="known",
        PARTS=0,
        FMAX=1.0,
        EPS=0.0,
        POWER_OF_TWO=False,
        ROWWISE=False,
        COLUMNWISE=False,
        PARTIALS=1,
        BLOCK_M=block_m,
        BLOCK_K=block_k,
        num_warps=warps,
    )
    return y


def _quantize(
    dy: torch.Tensor,
    x: torch.Tensor,
    kind: str,
    backward: bool,
    form: Form,
    keep_output: bool,
    bias_grad: bool,
    tile: Tile | None,
    hint: torch.Tensor | None,
) -> list[torch.Tensor]:
    check_kind(kind)
    dy, x = dy.contiguous(), x.contiguous()
    rows, columns = rows_and_columns(x.shape)
    if isinstance(form, FORMS):
        inputs = (dy, x) if backward else (x,)
        source = Source("activation_backward" if backward else "activation", inputs, (columns, columns), kind)
        return [*itertools.chain(*produce(source, form, keep_output, sums=bias_grad))]
    function = {"dy": dy, "x": x, "KIND": kind, "BACKWARD": backward}
    large = write_tile(backward, x.element_size(), keep_output and hint is not None)
    block_m, block_k, warps = tile or cast_tile(rows, columns, form.columnwise, large)
    programs = program_count(rows, columns, block_m, block_k, x.device)
    sums = x
    if bias_grad:
        partials, sums = _amaxes_and_sums(dy, x, kind)
    else:
        partials = _amaxes(function) if hint is None else partials_to_find(programs, x.device)
    dbias = [torch.empty(columns, dtype=torch.float32, device=x.device)] if bias_grad else []
    y = torch.empty_like(x) if keep_output else x
    buffers = form.allocate((rows, columns), x.device)
    for number, usage in enumerate(passes(form, x.element_size(), hint)):
        launch(
            activation_write_kernel,
            (programs,),
            **function,
            partials=partials,
            hint=x if hint is None else hint,
            sums=sums,
            y=y,
            dbias=dbias[0] if dbias else x,
            M=rows,
            K=columns,
            KEEP_OUTPUT=keep_output and number == 0,
            PARTS=sums.shape[0] if dbias and number == 0 else 0,
            **form.pointers(buffers, unused=x),
            **form.constants(),
            **usage,
            PARTIALS=partials.shape[0],
            BLOCK_M=block_m,
            BLOCK_K=block_k,
            num_warps=warps,
        )
    return [*([y] if keep_output else []), *dbias, *buffers.values()]


def write_tile(backward: bool, itemsize: int, keeps_and_guesses: bool = False) -> Tile:
    """The large tile of the launch that casts. Half of it fits in registers in backward with 4-byte elements, and in forward where the
    output is kept and the amax found beside."""
    rows, columns, warps = BACKWARD_TILE if backward else FORWARD_TILE
    halved = itemsize == 4 if backward else keeps_and_guesses
    return rows // (1 + halved), columns, warps


def _amaxes(function: dict[str, Any]) -> torch.Tensor:
    """fp32 [PARTIALS], whose maximum is the amax of the function's rounded result."""
    rows, columns = rows_and_columns(function["x"].shape)
    partials = torch.empty(PARTIALS, dtype=torch.float32, device=function["x"].device)
    block_m, block_k, warps = amax_tile(columns)
    tile = {"BLOCK_M": block_m, "BLOCK_K": block_k, "num_warps": warps}
    launch(activation_amax_kernel, (PARTIALS,), **function, partials=partials, M=rows, K=columns, **tile)
    return partials


def _amaxes_and_sums(dy: torch.Tensor, x: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(partial amaxes, partial sums [parts, K]) of the rounded dx, from one launch that reads both tensors."""
    rows, columns = rows_and_columns(x.shape)
    block_m, block_k, parts = stripes(columns)
    partials = torch.empty(PARTIALS, dtype=torch.float32, device=x.device)
    sums = torch.empty((parts, columns), dtype=torch.float32, device=x.device)
    launch(
        activation_backward_sums_kernel,
        (PARTIALS,),
        dy=dy,
        x=x,
        partials=partials,
        sums=sums,
        M=rows,
        K=columns,
        KIND=kind,
        PARTS=parts,
        BLOCK_M=block_m,
        BLOCK_K=block_k,
        num_warps=8,
    )
    return partials, sums
