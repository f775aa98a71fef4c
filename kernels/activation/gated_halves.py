"""Both gradients of a gated unit as one tensor with one scale: what the linear wants whose result's halves gate and up are.

    grad [M, 2K] = [dgate, dup], or [dup, dgate], then `quantize`

The launches of kernels/activation/gated.py, with one amax for both; grad itself is written only if it is asked for.
"""

from __future__ import annotations

import itertools

import torch

from te_dynamo.kernels.activation.gated import (
    gated_backward,
    gated_backward_reference,
    in_rows,
    launch_gradients,
    source_of_gradients,
)
from te_dynamo.kernels.layouts.form import Form
from te_dynamo.kernels.layouts.sizes import rows_and_columns
from te_dynamo.kernels.layouts.tensor import TensorForm
from te_dynamo.kernels.produce.produce import FORMS, produce
from te_dynamo.kernels.quantize.current import Tile
from te_dynamo.kernels.quantize.formats import FORMATS, reference_of

__all__ = ["gated_backward_quantize_halves", "gated_backward_quantize_halves_reference"]


def gated_backward_quantize_halves_reference(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    kind: str,
    form: Form,
    keep_output: bool,
    gate_first: bool,
) -> list[torch.Tensor]:
    """`gated_backward_quantize_halves` in plain PyTorch."""
    dgate, dup = gated_backward_reference(dy, gate, up, kind)
    grad = torch.cat([dgate, dup] if gate_first else [dup, dgate], -1)
    return [*([grad] if keep_output else []), *reference_of(grad, form)]


def gated_backward_quantize_halves(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    kind: str,
    form: Form,
    keep_output: bool,
    gate_first: bool,
    tile: Tile | None = None,
    hint: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """[grad?, data?, transpose?, scale_inv]: `gated_backward`, its results side by side, then `quantize`.

    grad [..., 2K] = [dgate, dup] with gate_first, else [dup, dgate]. hint: as `quantize`'s.
    """
    dy, gate, up = dy.contiguous(), in_rows(gate), in_rows(up)
    rows, columns = rows_and_columns(gate.shape)
    if isinstance(form, FORMS) and columns % 128 == 0:
        source = source_of_gradients(dy, gate, up, kind)
        return [*itertools.chain(*produce(source, form, keep_output, half=int(not gate_first)))]
    if not isinstance(form, TensorForm):  # blocks of columns that are of both
        dgate, dup = gated_backward(dy, gate, up, kind)
        grad = torch.cat([dgate, dup] if gate_first else [dup, dgate], -1)
        return [*([grad] if keep_output else []), *FORMATS[type(form)].kernel(grad, form)]
    shape = (*gate.shape[:-1], 2 * columns)
    grad = torch.empty(shape, dtype=gate.dtype, device=gate.device) if keep_output else gate
    buffers = form.allocate((rows, 2 * columns), gate.device)
    launch_gradients(
        {"dy": dy, "gate": gate, "up": up, "dgate": grad},
        form,
        buffers,
        {"KIND": kind, "STACKED": False, "GATE_HALF": int(not gate_first)},
        keep_output,
        tile,
        hint,
    )
    return [*([grad] if keep_output else []), *buffers.values()]
