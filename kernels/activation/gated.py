"""gated(gate, up) = f(gate) * up for an activation f (its kind), its backward, and both fused with quantization (as
kernels/activation/activation.py).

    dgate = dy * up * f'(gate)        dup = dy * f(gate)

    silu  SwiGLU      gelu, gelu_tanh  GEGLU      relu  ReGLU      sigmoid  GLU      quick_gelu  QGEGLU      identity  bilinear

gate and up may be halves of one wider tensor: each has a row stride of its own. Backward quantizes dgate
and dup, each with its own scale, in one pair of launches, so that dy, gate and up are read twice and not
four times. Both as halves of one tensor, with one scale: kernels/activation/gated_halves.py.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from te_dynamo.kernels.activation import activation
from te_dynamo.kernels.activation.gated_kernels import (
    gated_amax_kernel,
    gated_backward_amax_kernel,
    gated_backward_write_kernel,
    gated_write_kernel,
)
from te_dynamo.kernels.layouts.form import Form
from te_dynamo.kernels.layouts.sizes import Size, allocate, rows_and_columns
from te_dynamo.kernels.layouts.tensor import TensorForm
from te_dynamo.kernels.produce.produce import FORMS, Source, produce
from te_dynamo.kernels.produce.stack import quantize_stacked_blocks, quantize_stacked_blocks_reference
from te_dynamo.kernels.quantize.current import PARTIALS, Tile, amax_tile, cast_tile, quantize_stacked_reference
from te_dynamo.kernels.quantize.formats import reference_of
from te_dynamo.kernels.runtime.dependent_launch import starts_early
from te_dynamo.kernels.runtime.launch import launch
from te_dynamo.kernels.tiles.fp8 import program_count
from te_dynamo.kernels.tiles.one_pass import partials_to_find, passes
from te_dynamo.kernels.tiles.stacking import check_segments

__all__ = [
    "BOUNDED_KINDS",
    "KINDS",
    "check_kind",
    "in_rows",
    "launch_gradients",
    "partial_amaxes_of_gradients",
    "sizes_of",
    "gated",
    "gated_backward",
    "gated_backward_quantize",
    "gated_backward_quantize_reference",
    "gated_backward_reference",
    "gated_partial_amaxes",
    "gated_quantize",
    "gated_quantize_reference",
    "gated_reference",
]

KINDS = (*(kind for kind in activation.KINDS if kind != "relu2"), "sigmoid", "identity")
"""What may gate: every activation, the sigmoid, which is no te.activation as it is not zero at zero, and the gate itself.
The square of a relu may not: it grows past the bound by which kernels/gemm/specialized/gated.py finds the largest product."""

BOUNDED_KINDS = KINDS[:-1]
"""Those that keep to this bound: all but the identity, which falls past it."""

FORWARD_TILE: Tile = (128, 64, 4)
BACKWARD_TILE: Tile = (128, 64, 8)
"""Tiles of the cast launches: the fastest on an H200 at 8192x14336 (benchmarks/quantize.py --sweep)."""


def write_tile(rows: Size, columns: int, columnwise: bool, keep_output: bool, large: Tile) -> Tile:
    """Tile of a write launch; of half the rows where it keeps its output too, for which there are no registers on sm_100a."""
    block_m, block_k, warps = cast_tile(rows, columns, columnwise, large)
    return (max(block_m // 2, 1) if keep_output else block_m), block_k, warps


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
    elif isinstance(form, TensorForm):
        buffers = quantize_stacked_reference(grads, form, by_columns=True)
    else:
        buffers = quantize_stacked_blocks_reference(grads, form, by_columns=True)
    return [*(grads if keep_output else ()), *buffers]


# --- launchers ----------------------------------------------------------------------------------------------

_NO_QUANTIZATION = {
    "PASS": "known",
    "FMAX": 1.0,
    "EPS": 0.0,
    "POWER_OF_TWO": False,
    "ROWWISE": False,
    "COLUMNWISE": False,
    "PARTIALS": 1,
}


def gated(gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
    """f(gate) * up, contiguous, in gate's shape and dtype.

    gate and up have rank >= 2. One whose rows are not contiguous, or not of one stride (in_rows), is copied. Raises ValueError
    for an unknown kind.
    """
    check_kind(kind)
    gate, up = in_rows(gate), in_rows(up)
    sizes = sizes_of(gate, up)
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    block_m, block_k, warps = amax_tile(sizes["K"])
    launch(
        gated_write_kernel,
        (program_count(sizes["M"], sizes["K"], block_m, block_k, gate.device),),
        gate=gate,
        up=up,
        partials=gate,
        hint=gate,
        y=y,
        data=gate,
        transpose=gate,
        scale_inv=gate,
        **sizes,
        KIND=kind,
        KEEP_OUTPUT=True,
        **_NO_QUANTIZATION,
        EARLY=False,
        BLOCK_M=block_m,
        BLOCK_K=block_k,
        num_warps=warps,
    )
    return y


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
    check_kind(kind)
    gate, up = in_rows(gate), in_rows(up)
    sizes = sizes_of(gate, up)
    if isinstance(form, FORMS):
        source = Source("gated", (gate, up), (sizes["gate_stride"], sizes["up_stride"]), kind)
        return [*itertools.chain(*produce(source, form, keep_output))]
    rows, columns = sizes["M"], sizes["K"]
    block_m, block_k, warps = tile or write_tile(rows, columns, form.columnwise, keep_output, FORWARD_TILE)
    programs = program_count(rows, columns, block_m, block_k, gate.device)
    if hint is not None:
        partials = partials_to_find(programs, gate.device)
    else:
        partials = gated_partial_amaxes(gate, up, kind) if amax is None else amax
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) if keep_output else gate
    buffers = form.allocate((rows, columns), gate.device)
    for number, usage in enumerate(passes(form, gate.element_size(), hint)):
        launch(
            gated_write_kernel,
            (programs,),
            gate=gate,
            up=up,
            partials=partials,
            hint=gate if hint is None else hint,
            y=y,
            **sizes,
            KIND=kind,
            KEEP_OUTPUT=keep_output and number == 0,
            **form.pointers(buffers, unused=gate),
            **form.constants(),
            **usage,
            PARTIALS=partials.shape[0],
            EARLY=starts_early(rows, gate.device),
            BLOCK_M=block_m,
            BLOCK_K=block_k,
            num_warps=warps,
        )
    return [*([y] if keep_output else []), *buffers.values()]


def gated_partial_amaxes(gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
    """fp32 [PARTIALS], whose maximum is the amax of `gated(gate, up)`."""
    check_kind(kind)
    sizes = sizes_of(gate, up)
    partials = torch.empty(PARTIALS, dtype=torch.float32, device=gate.device)
    block_m, block_k, warps = amax_tile(sizes["K"])
    launch(
        gated_amax_kernel,
        (PARTIALS,),
        gate=gate,
        up=up,
        partials=partials,
        **sizes,
        KIND=kind,
        BLOCK_M=block_m,
        BLOCK_K=block_k,
        num_warps=warps,
    )
    return partials


def gated_backward(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dgate, dup), contiguous, in gate's shape and dtype."""
    check_kind(kind)
    dy, gate, up = dy.contiguous(), in_rows(gate), in_rows(up)
    sizes = sizes_of(gate, up)
    dgate, dup = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
    block_m, block_k, warps = amax_tile(sizes["K"])
    unused = {f"{grad}_{name}": gate for grad in ("gate", "up") for name in ("data", "transpose", "scale_inv")}
    launch(
        gated_backward_write_kernel,
        (program_count(sizes["M"], sizes["K"], block_m, block_k, gate.device),),
        dy=dy,
        gate=gate,
        up=up,
        gate_partials=gate,
        up_partials=gate,
        hint=gate,
        dgate=dgate,
        dup=dup,
        **unused,
        **sizes,
        KIND=kind,
        KEEP_OUTPUT=True,
        STACKED=False,
        GATE_HALF=-1,
        **_NO_QUANTIZATION,
        BLOCK_M=block_m,
        BLOCK_K=block_k,
        num_warps=warps,
    )
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
    dy, gate, up = dy.contiguous(), in_rows(gate), in_rows(up)
    if isinstance(form, FORMS) and not (stacked and keep_output):
        if stacked:
            check_segments(2 * (gate.shape[-1],))
        source = source_of_gradients(dy, gate, up, kind)
        return [*itertools.chain(*produce(source, form, keep_output, half=0 if stacked else -1))]
    if isinstance(form, FORMS):  # halves of one tensor would be kept so too
        both = gated_backward(dy, gate, up, kind)
        return [*both, *quantize_stacked_blocks(both, form, by_columns=True)]
    assert isinstance(form, TensorForm)
    rows, columns = rows_and_columns(gate.shape)
    grads = [torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2 * keep_output)]
    dgate, dup = grads or (gate, gate)
    sizes = [(2 * columns, 2)] if stacked else [(columns, 1), (columns, 1)]
    buffers = [allocate(form.buffers((rows, width), scales), gate.device) for width, scales in sizes]
    pointers = {} if stacked else form.pointers(buffers[1], unused=gate, prefix="up_")
    launch_gradients(
        {"dy": dy, "gate": gate, "up": up, "dgate": dgate, "dup": dup, **pointers},
        form,
        buffers[0],
        {"KIND": kind, "STACKED": stacked, "GATE_HALF": -1},
        keep_output,
        tile,
        hint,
    )
    return [*grads, *itertools.chain.from_iterable(each.values() for each in buffers)]


def partial_amaxes_of_gradients(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, kind: str, together: bool = False
) -> dict[str, torch.Tensor]:
    """gate_partials and up_partials, fp32 [PARTIALS], whose maxima are the amaxes of dgate and dup; dy is contiguous.

    together: the amax of both in gate_partials, and a stand-in for up_partials.
    """
    check_kind(kind)
    sizes = sizes_of(gate, up)
    gate_partials = torch.empty(PARTIALS, dtype=torch.float32, device=gate.device)
    partials = {"gate_partials": gate_partials, "up_partials": gate if together else torch.empty_like(gate_partials)}
    block_m, block_k, warps = amax_tile(sizes["K"])
    launch(
        gated_backward_amax_kernel,
        (PARTIALS,),
        dy=dy,
        gate=gate,
        up=up,
        **partials,
        **sizes,
        KIND=kind,
        ONE_AMAX=together,
        BLOCK_M=block_m,
        BLOCK_K=block_k,
        num_warps=warps,
    )
    return partials


def launch_gradients(
    tensors: dict[str, torch.Tensor],
    form: TensorForm,
    buffers: dict[str, torch.Tensor],
    constants: dict[str, Any],
    keep_output: bool,
    tile: Tile | None,
    hint: torch.Tensor | None,
) -> None:
    """The amaxes, and the launches of `gated_backward_write_kernel` that write `buffers`, gate's. tensors: its other ones by name, gate for
    those not used."""
    gate, kind, together = tensors["gate"], constants["KIND"], constants["GATE_HALF"] != -1
    sizes = sizes_of(gate, tensors["up"])
    rows, columns = sizes["M"], sizes["K"]
    block_m, block_k, warps = tile or write_tile(rows, columns, form.columnwise, keep_output, BACKWARD_TILE)
    programs = program_count(rows, columns, block_m, block_k, gate.device)
    if hint is None:
        partials = partial_amaxes_of_gradients(tensors["dy"], gate, tensors["up"], kind, together)
    else:
        gate_partials = partials_to_find(programs, gate.device)
        up_partials = gate if together else torch.empty_like(gate_partials)
        partials = {"gate_partials": gate_partials, "up_partials": up_partials}
    unused = {**form.pointers({}, unused=gate, prefix="up_"), "dup": gate}
    for number, usage in enumerate(passes(form, gate.element_size(), hint)):
        launch(
            gated_backward_write_kernel,
            (programs,),
            **unused | tensors | partials,
            hint=gate if hint is None else hint,
            **sizes,
            KEEP_OUTPUT=keep_output and number == 0,
            **form.pointers(buffers, unused=gate, prefix="gate_"),
            **form.constants(),
            **constants,
            **usage,
            PARTIALS=partials["gate_partials"].shape[0],
            BLOCK_M=block_m,
            BLOCK_K=block_k,
            num_warps=warps,
        )


def source_of_gradients(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, kind: str) -> Source:
    """dgate and dup, for kernels/produce; dy is contiguous."""
    check_kind(kind)
    sizes = sizes_of(gate, up)
    return Source("gated_backward", (dy, gate, up), (sizes["K"], sizes["gate_stride"], sizes["up_stride"]), kind)


def sizes_of(gate: torch.Tensor, up: torch.Tensor) -> dict[str, Size]:
    """M, K and the row strides as kernel arguments."""
    rows, columns = rows_and_columns(gate.shape)
    return {
        "M": rows,
        "K": columns,
        "gate_stride": _row_stride(gate, "gate"),
        "up_stride": _row_stride(up, "up"),
    }


def in_rows(x: torch.Tensor) -> torch.Tensor:
    """x where its rows are contiguous and of one stride, as the kernels read them; else a copy."""
    return x if x.is_contiguous() or _rows_collapse(x) else x.contiguous()


def _rows_collapse(x: torch.Tensor) -> bool:
    dims = _leading(x)
    collapse = all(x.stride(a) == x.stride(b) * x.shape[b] for a, b in itertools.pairwise(dims))
    return bool(x.stride(-1) == 1 and collapse)


def _leading(x: torch.Tensor) -> list[int]:
    """The dimensions before the last whose strides matter."""
    return [d for d in range(x.dim() - 1) if x.shape[d] != 1]


def _row_stride(x: torch.Tensor, name: str) -> Size:
    """Elements from one row of x read as [M, K] to the next."""
    if x.is_contiguous():
        return x.shape[-1]
    if not _rows_collapse(x):
        raise ValueError(
            f"gated: {name} of shape {tuple(x.shape)} and strides {x.stride()} is not rows of one stride; "
            "make it contiguous"
        )
    dims = _leading(x)
    return x.stride(dims[-1]) if dims else x.shape[-1]
