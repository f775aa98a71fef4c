"""Both gradients of a gated unit as one tensor with one scale: what the linear wants whose result's halves gate and up are.

    grad [M, 2K] = [dgate, dup], or [dup, dgate], then `quantize`

As kernels/activation/gated.py has it, with one amax for both; grad itself is written only if it is asked for.
"""

from __future__ import annotations

import itertools

import torch

from te_dynamo.kernels.activation.gated import (
    gated_backward,
    gated_backward_reference,
    source_of_gradients,
)
from te_dynamo.kernels.layouts.form import Form
from te_dynamo.kernels.layouts.tensor import TensorForm
from te_dynamo.kernels.produce.produce import produce
from te_dynamo.kernels.quantize.current import Tile
from te_dynamo.kernels.quantize.formats import FORMATS, reference_of


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
    if isinstance(form, TensorForm) or gate.shape[-1] % 128 == 0:
        source = source_of_gradients(dy, gate, up, kind)
        produced = produce(source, form, keep_output, half=int(not gate_first), tile=tile, hint=hint)
        return [*itertools.chain(*produced)]
    dgate, dup = gated_backward(dy, gate, up, kind)  # blocks of columns would be of both
    grad = torch.cat([dgate, dup] if gate_first else [dup, dgate], -1)
    return [*([grad] if keep_output else []), *FORMATS[type(form)].kernel(grad, form)]
