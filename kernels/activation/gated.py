"""gated(gate, up) = f(gate) * up for an activation f (its kind), its backward, and both fused with quantization (as
kernels/activation/activation.py).

    dgate = dy * up * f'(gate)        dup = dy * f(gate)

    silu  SwiGLU      gelu, gelu_tanh  GEGLU      relu  ReGLU      sigmoid  GLU      quick_gelu  QGEGLU      identity  bilinear

gate and up may be halves of one wider tensor: each has a row stride of its own. Backward quantizes dgate
and dup, each with its own scale, together, so that dy, gate and up are read twice and not four times. Both as halves of one tensor, with one scale: kernels/activation/gated_halves.py.
"""

from __future__ import annotations

import itertools

import torch
from torch.fx.experimental.symbolic_shapes import guard_or_true

from te_dynamo.kernels.activation import activation
from te_dynamo.kernels.layouts.form import Form
from te_dynamo.kernels.layouts.sizes import Size
from te_dynamo.kernels.produce.produce import Source, produce
from te_dynamo.kernels.produce.tensor import made, partial_amaxes
from te_dynamo.kernels.quantize.current import Tile, quantize_stacked_reference
from te_dynamo.kernels.quantize.formats import reference_of

KINDS = (*(kind for kind in activation.KINDS if kind != "relu2"), "sigmoid", "identity")
"""What may gate: every activation, the sigmoid, which is no te.activation as it is not zero at zero, and the gate itself.
The square of a relu may not: it grows past the bound by which kernels/gemm/specialized/gated.py finds the largest product."""

BOUNDED_KINDS = KINDS[:-1]
"""Those that keep to this bound: all but the identity, which falls past it."""

# --- reference ----------------------------------------------------------------------------------------------


def check_kind(kind: str, kinds: tuple[str, ...] = KINDS) -> None:
    """Raises ValueError for a gate that is none of `kinds`."""
    if kind not in kinds:
        raise ValueError(f"gated: expected a kind of {', '.join(kinds)}, got {kind!r}")


def gated_reference(gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
    """`gated` in plain PyTorch."""
    check_kind(kind)
    return (activation.value_reference(gate.to(torch.float32), kind) * up.to(torch.float32)).to(gate.dtype)


def gated_backward_reference(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gated_backward` in plain PyTorch."""
    check_kind(kind)
    grad, gate32 = dy.to(torch.float32), gate.to(torch.float32)
    dgate = activation.derivative_reference(grad * up.to(torch.float32), gate32, kind)
    return dgate.to(gate.dtype), (grad * activation.value_reference(gate32, kind)).to(gate.dtype)


def gated_quantize_reference(
    gate: torch.Tensor,
    up: torch.Tensor,
    kind: str,
    form: Form,
    keep_output: bool,
    amax: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """`gated_quantize` in plain PyTorch."""
    y = gated_reference(gate, up, kind)
    return [*([y] if keep_output else []), *reference_of(y, form, *([] if amax is None else [amax]))]


def gated_backward_quantize_reference(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    kind: str,
    form: Form,
    keep_output: bool,
    stacked: bool = False,
) -> list[torch.Tensor]:
    """`gated_backward_quantize` in plain PyTorch."""
    grads = gated_backward_reference(dy, gate, up, kind)
    if not stacked:
        buffers = [buffer for grad in grads for buffer in reference_of(grad, form)]
    else:
        buffers = quantize_stacked_reference(grads, form, by_columns=True)
    return [*(grads if keep_output else ()), *buffers]


# --- launchers ----------------------------------------------------------------------------------------------


def gated(gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
    """f(gate) * up, contiguous, in gate's shape and dtype.

    gate and up have rank >= 2. One whose rows are not contiguous, or not of one stride (in_rows), is copied. Raises ValueError
    for an unknown kind.
    """
    return made(_source(gate, up, kind))[0]


def gated_quantize(
    gate: torch.Tensor,
    up: torch.Tensor,
    kind: str,
    form: Form,
    keep_output: bool,
    amax: torch.Tensor | None = None,
    tile: Tile | None = None,
    hint: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """[gated(gate, up)?, data?, transpose?, scale_inv], equal to `gated` then `quantize`.

    amax (fp32, a power of two of partial ones), where the caller knows it, saves a launch and a read of both. `tile`
    overrides the cast's. hint: as `quantize`'s.
    """
    source = _source(gate, up, kind)
    return [*itertools.chain(*produce(source, form, keep_output, amax=amax, tile=tile, hint=hint))]


def gated_partial_amaxes(gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
    """fp32 [PARTIALS], whose maximum is the amax of `gated(gate, up)`."""
    [partials], _ = partial_amaxes(_source(gate, up, kind))
    return partials


def gated_backward(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, kind: str, over_dy: bool = False, over_up: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dgate, dup), contiguous, in gate's shape and dtype. over_dy, over_up: dgate, dup in the memory of dy, up, which is such a tensor too."""
    [dgate, dup] = made(source_of_gradients(dy, gate, up, kind), dy if over_dy else None, up if over_up else None)
    return dgate, dup


def gated_backward_quantize(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    kind: str,
    form: Form,
    keep_output: bool,
    stacked: bool = False,
    tile: Tile | None = None,
    hint: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """[dgate?, dup?, *buffers of dgate, *buffers of dup]: `gated_backward`, then `quantize` of each.

    stacked: in place of two tensors' buffers those of `quantize_stacked([dgate, dup], by_columns=True)`. hint: as there, of two scales.
    """
    source = source_of_gradients(dy, gate, up, kind)
    return [*itertools.chain(*produce(source, form, keep_output, stacked=stacked, tile=tile, hint=hint))]


def _source(gate: torch.Tensor, up: torch.Tensor, kind: str) -> Source:
    """f(gate) * up."""
    check_kind(kind)
    gate, up = in_rows(gate), in_rows(up)
    return Source("gated", (gate, up), (_row_stride(gate), _row_stride(up)), kind)


def source_of_gradients(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, kind: str) -> Source:
    """dgate and dup."""
    check_kind(kind)
    dy, gate, up = dy.contiguous(), in_rows(gate), in_rows(up)
    return Source("gated_backward", (dy, gate, up), (dy.shape[-1], _row_stride(gate), _row_stride(up)), kind)


def in_rows(x: torch.Tensor) -> torch.Tensor:
    """x where its rows are contiguous and of one stride, as the kernels read them; else a copy."""
    return x if _rows_collapse(x) or x.is_contiguous() else x.contiguous()


def _rows_collapse(x: torch.Tensor) -> bool:
    dims = _leading(x)
    collapse = all(x.stride(a) == x.stride(b) * x.shape[b] for a, b in itertools.pairwise(dims))
    return bool(x.stride(-1) == 1 and collapse)


def _leading(x: torch.Tensor) -> list[int]:
    """The dimensions before the last whose strides matter: one of a size that data decides counts as well."""
    return [d for d in range(x.dim() - 1) if guard_or_true(x.shape[d] != 1)]


def _row_stride(x: torch.Tensor) -> Size:
    """Elements from one row of x, as `in_rows` leaves it, read as [M, K], to the next."""
    dims = _leading(x)
    return x.stride(dims[-1]) if dims else x.shape[-1]
