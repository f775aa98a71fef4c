"""What sources.py makes, quantized with one scale a tensor: its amax has to be known before the cast.

    produce_amax_kernel     the result -> partial amaxes [, partial sums of its columns]
    produce_write_kernel    these, the result again -> data, transpose, scale_inv [, the result] [, the sums of its columns]

The cheap function is computed twice and its result never read back. The second kernel alone is the unfused function, and, where the scale is
guessed (kernels/tiles/one_pass.py), the quantization. A norm has kernels of its own (kernels/norm/kernels.py): its amax comes from the
launch that finds the statistics of rows, and what its tiles are made of would be five more arguments and as many constants of every launch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from te_dynamo.kernels.layouts.sizes import Size, allocate, rows_and_columns
from te_dynamo.kernels.layouts.tensor import TensorForm
from te_dynamo.kernels.produce.tensor_kernels import produce_amax_kernel, produce_write_kernel
from te_dynamo.kernels.quantize.current import PARTIALS, Tile, amax_tile, cast_tile, stripes
from te_dynamo.kernels.runtime.dependent_launch import starts_early
from te_dynamo.kernels.runtime.launch import launch
from te_dynamo.kernels.tiles.fp8 import program_count
from te_dynamo.kernels.tiles.one_pass import partials_to_find, passes

if TYPE_CHECKING:
    from te_dynamo.kernels.produce.produce import Source

LARGE_TILES: dict[str, Tile] = {
    "activation": (128, 64, 4),
    "activation_backward": (256, 64, 8),
    "gated": (128, 64, 4),
    "gated_backward": (128, 64, 8),
}
"""Tiles of the launches that cast: the fastest on an H200 for GELU, and for gated units at 8192x14336 (benchmarks/quantize.py --sweep)."""


def write_tile(name: str, itemsize: int, size: tuple[Size, Size], columnwise: bool, keeps: bool, guesses: bool) -> Tile:
    """Tile of the launch that casts; of half the rows where a thread has no registers for all: of a gated unit that keeps its output (on
    sm_100a), of an activation that guesses besides, of a gradient with 4-byte elements."""
    rows, columns, warps = LARGE_TILES[name]
    if "gated" in name:
        rows, columns, warps = cast_tile(*size, columnwise, (rows, columns, warps))
        return max(rows // (1 + keeps), 1), columns, warps
    halved = itemsize == 4 if "backward" in name else keeps and guesses
    return cast_tile(*size, columnwise, (rows // (1 + halved), columns, warps))


def made(source: Source, *into: torch.Tensor | None) -> list[torch.Tensor]:
    """The result, or both gradients: the unfused function. into: what each is written to, perhaps an input; None is new."""
    x, (_, columns) = source.like, rows_and_columns(source.like.shape)
    given = into or (None,) * (1 + source.is_pair)
    kept = [torch.empty(x.shape, dtype=x.dtype, device=x.device) if y is None else y for y in given]
    _write(source, amax_tile(columns), kept, {})
    return kept


def produce_tensor(
    source: Source,
    form: TensorForm,
    keep_output: bool,
    sums: bool = False,
    half: int = -1,
    *,
    stacked: bool = False,
    amax: torch.Tensor | None = None,
    hint: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """`produce` of kernels/produce/produce.py, of a source that is no norm.

    stacked: in place of two tensors' buffers those of `quantize_stacked` of both, by columns. amax (fp32, a power of two of partial ones), where
    the caller knows it, saves a launch and a read of all inputs. hint: as `quantize`'s, of two scales where two tensors have one each.
    tile: overrides that of the launches that cast.
    """
    x, (rows, columns) = source.like, rows_and_columns(source.like.shape)
    itemsize, one = x.element_size(), half != -1
    count = 1 + (source.is_pair and not one)
    shape = (*x.shape[:-1], 2 * columns if one else columns)
    kept = [torch.empty(shape, dtype=x.dtype, device=x.device) for _ in range(count * keep_output)]
    widths = [(2 * columns, count)] if stacked or one else [(columns, 1)] * count
    held = [allocate(form.buffers((rows, width), scales), x.device) for width, scales in widths]
    tile = tile or write_tile(
        source.name, itemsize, (rows, columns), form.columnwise, keep_output, guesses=hint is not None
    )
    partial = None
    if hint is not None:
        assert not sums  # they come with the amax
        found = [partials_to_find(_programs(source, tile), x.device) for _ in range(count)]
    elif amax is not None:
        found = [amax]
    else:
        found, partial = partial_amaxes(source, one, sums)
    given = {"hint": hint, "STACKED": stacked, "HALF": half, "PARTIALS": found[0].shape[0], **form.constants()}
    given["EARLY"] = source.name == "gated" and starts_early(rows, x.device)
    given |= dict(zip(("partials", "second_partials"), found, strict=False))
    for prefix, each in zip(("", "second_"), held, strict=False):
        given |= {f"{prefix}{name}": buffer for name, buffer in each.items()}
    summed, once = [], {}
    if partial is not None:
        summed = [torch.empty(columns, dtype=torch.float32, device=x.device)]
        once = {"sums": partial, "dbias": summed[0], "PARTS": partial.shape[0]}
    for number, usage in enumerate(passes(form, itemsize, hint)):
        _write(source, tile, kept if number == 0 else [], {**given, **usage, **(once if number == 0 else {})})
    return kept, summed, [buffer for each in held for buffer in each.values()]


_POINTERS = ("partials", "second_partials", "hint", "sums", "y", "second_y", "dbias") + tuple(
    f"{prefix}{name}" for prefix in ("", "second_") for name in TensorForm.NAMES
)

_NOTHING = {
    **dict.fromkeys(_POINTERS),
    **{"PASS": "known", "PARTS": 0, "STACKED": False, "HALF": -1, "FMAX": 1.0, "EPS": 0.0, "POWER_OF_TWO": False},
    **{"ROWWISE": False, "COLUMNWISE": False, "PARTIALS": 1, "EARLY": False},
}
"""The arguments of a launch that writes nothing."""


def _write(source: Source, tile: Tile, kept: list[torch.Tensor], given: dict[str, Any]) -> None:
    block_m, block_k, warps = tile
    launch(
        produce_write_kernel,
        (_programs(source, tile),),
        **_arguments(source),
        **_NOTHING | dict(zip(("y", "second_y"), kept, strict=False)) | given,
        KEEP_OUTPUT=bool(kept),
        BLOCK_M=block_m,
        BLOCK_K=block_k,
        num_warps=warps,
    )


def _programs(source: Source, tile: Tile) -> int:
    return program_count(*rows_and_columns(source.like.shape), *tile[:2], source.like.device)


def partial_amaxes(
    source: Source, together: bool = False, sums: bool = False
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """(fp32 [PARTIALS] whose maximum is the amax of the result, of each gradient or of both together; the sums [parts, K] of the rounded
    result's columns, in parts, if asked for), from one launch."""
    x, (_, columns) = source.like, rows_and_columns(source.like.shape)
    count = 1 + (source.is_pair and not together)
    found = [torch.empty(PARTIALS, dtype=torch.float32, device=x.device) for _ in range(count)]
    (block_m, block_k, warps), parts, summed = amax_tile(columns), 0, None
    if sums:
        block_m, block_k, parts = stripes(columns)
        warps, summed = 8, torch.empty((parts, columns), dtype=torch.float32, device=x.device)
    launch(
        produce_amax_kernel,
        (PARTIALS,),
        **_arguments(source),
        partials=found[0],
        second_partials=found[1] if count == 2 else None,
        sums=summed,
        TOGETHER=together,
        PARTS=parts,
        BLOCK_M=block_m,
        BLOCK_K=block_k,
        num_warps=warps,
    )
    return found, summed


def _arguments(source: Source) -> dict[str, Any]:
    """The source's, of both kernels. None stands for an input that there is not, and for the stride of one that is contiguous whatever is
    given: it is no argument of the compiled kernel."""
    rows, columns = rows_and_columns(source.like.shape)
    a, b, c = (*source.inputs, None, None)[:3]
    strides: tuple[Size | None, ...] = ()
    if "gated" in source.name:
        strides = (None, *source.strides[1:]) if source.is_pair else tuple(source.strides)
    a_stride, b_stride, c_stride = (*strides, None, None, None)[:3]
    return {
        "a": a,
        "b": b,
        "c": c,
        "M": rows,
        "K": columns,
        "a_stride": a_stride,
        "b_stride": b_stride,
        "c_stride": c_stride,
        "SOURCE": source.name,
        "KIND": source.kind,
        "ROUNDED_TO": source.rounded_to,
    }
