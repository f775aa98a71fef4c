"""A norm and the quantization of its result, in the launches that its form takes: those of kernels.py, or of kernels/produce."""

from __future__ import annotations

from typing import Any

import torch

from te_dynamo.kernels.layouts.block import BlockForm
from te_dynamo.kernels.layouts.form import Form
from te_dynamo.kernels.layouts.row import RowForm
from te_dynamo.kernels.layouts.sizes import rows_and_columns
from te_dynamo.kernels.layouts.tensor import TensorForm
from te_dynamo.kernels.norm.kernels import CAST_TILE, SMALL_CAST_TILE, launch_rows, norm_cast_kernel, row_block
from te_dynamo.kernels.produce.produce import NAMES, Source, produce
from te_dynamo.kernels.produce.rows import launch_columns
from te_dynamo.kernels.quantize.current import Tile, cast_tile
from te_dynamo.kernels.quantize.formats import FORMATS
from te_dynamo.kernels.runtime.launch import launch
from te_dynamo.kernels.tiles.fp8 import program_count


def norm_quantize(
    x: torch.Tensor,
    norm: dict[str, Any],
    eps: float,
    form: Form,
    keep_output: bool,
    tile: Tile | None = None,
    dtype: torch.dtype | None = None,
    quantized_dtype: torch.dtype | None = None,
    *,
    residual: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """[h?, y?, mean?, rstd, data?, transpose?, scale_inv]: h where a residual is given, a mean where the norm has one.

    x and residual are contiguous, of one shape; h has the wider of their dtypes.
    dtype: of y, by default that of what is normed. quantized_dtype: what y is rounded to before it is quantized, by default dtype.
    """
    rounded_to = quantized_dtype or dtype
    if isinstance(form, RowForm) or _rows_of_blocks(x, norm, form, residual):
        return _by_rows(x, norm, eps, form, keep_output, dtype, rounded_to, residual)
    halves = dtype in (torch.bfloat16, torch.float16) and quantized_dtype in (None, dtype)
    wide = max(t.element_size() for t in (x, residual) if t is not None) == 4
    narrow = torch.empty_like(x, dtype=dtype) if halves and wide else None
    tensorwise = isinstance(form, TensorForm)
    given: dict[str, Any] = {"residual": residual, "y": narrow, "rounded_to": rounded_to, "quantizes": tensorwise}
    h, mean, rstd, partials = launch_rows(x, norm, eps, **given)
    statistics = [mean, rstd] if norm["LAYER"] else [rstd]
    if narrow is not None:
        quantized = FORMATS[type(form)].kernel(narrow, form, *([partials] if tensorwise else []))
        return [*([] if residual is None else [h]), *([narrow] if keep_output else []), *statistics, *quantized]
    rows, columns = rows_and_columns(x.shape)
    if not tensorwise:
        source = _source(h, norm, mean, rstd, rounded_to, dtype or h.dtype if keep_output else None)
        kept, _, quantized = produce(source, form, keep_output)
        return [*([] if residual is None else [h]), *kept, *statistics, *quantized]
    buffers = form.allocate((rows, columns), x.device)
    y = [torch.empty_like(h, dtype=dtype)] if keep_output else []
    default = SMALL_CAST_TILE if norm["MODULATED"] or (keep_output and quantized_dtype is not None) else CAST_TILE
    block_m, block_k, warps = tile or cast_tile(rows, columns, form.columnwise, default)
    widest = max(each.itemsize for each in (h.dtype, dtype, rounded_to) if each is not None)
    for number, usage in enumerate(form.launches(widest)):
        launch(
            norm_cast_kernel,
            (program_count(rows, columns, block_m, block_k, x.device),),
            x=h,
            **norm,
            mean=mean,
            rstd=rstd,
            partials=partials,
            y=y[0] if y else h,
            M=rows,
            K=columns,
            ROUNDED_TO=NAMES[rounded_to or h.dtype],
            KEEP_OUTPUT=keep_output and number == 0,
            **form.pointers(buffers, unused=h),
            **form.constants(),
            **usage,
            PARTIALS=partials.shape[0],
            BLOCK_M=block_m,
            BLOCK_K=block_k,
            num_warps=warps,
        )
    return [*([] if residual is None else [h]), *y, *statistics, *buffers.values()]


def _held(x: torch.Tensor, norm: dict[str, Any], residual: torch.Tensor | None) -> tuple[bool, torch.dtype]:
    """(whether a program of the row launch holds a row, the dtype of what is normed)."""
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    block, _ = row_block(x.shape[-1], dtype.itemsize, norm["LAYER"])
    return x.shape[-1] <= block, dtype


def _rows_of_blocks(x: torch.Tensor, norm: dict[str, Any], form: Form, residual: torch.Tensor | None) -> bool:
    """Whether scales are for 1x128 values of rows alone, as in inference, and the launch of the statistics makes them too."""
    return isinstance(form, BlockForm) and not form.two_d and not form.columnwise and _held(x, norm, residual)[0]


def _by_rows(
    x: torch.Tensor,
    norm: dict[str, Any],
    eps: float,
    form: RowForm | BlockForm,
    keep_output: bool,
    dtype: torch.dtype | None,
    rounded_to: torch.dtype | None,
    residual: torch.Tensor | None,
) -> list[torch.Tensor]:
    """`norm_quantize` with one scale a row, or for 1x128: rows in the launch of their statistics, columns in another.

    A row longer than a program holds is written, and quantized from there.
    """
    rows, columns = rows_and_columns(x.shape)
    holds, of_h = _held(x, norm, residual)
    y = torch.empty_like(x, dtype=dtype or of_h) if keep_output or not holds else None
    given: dict[str, Any] = {"residual": residual, "y": y}
    if holds:
        held = form.allocate((rows, columns), x.device)
        given |= {"rounded_to": rounded_to or of_h, "quantizes": form.columnwise, "by_rows": form, "buffers": held}
    h, mean, rstd, maxima = launch_rows(x, norm, eps, **given)
    if holds:
        launch_columns(_source(h, norm, mean, rstd, rounded_to), form, [held], maxima)
        quantized = list(held.values())
    else:
        assert y is not None
        quantized = FORMATS[type(form)].kernel(y.to(rounded_to or of_h), form)
    statistics = [mean, rstd] if norm["LAYER"] else [rstd]
    return [*([] if residual is None else [h]), *([y] if keep_output else []), *statistics, *quantized]


def _source(
    h: torch.Tensor,
    norm: dict[str, Any],
    mean: torch.Tensor,
    rstd: torch.Tensor,
    rounded_to: torch.dtype | None,
    kept: torch.dtype | None = None,
) -> Source:
    """The norm of h, whose statistics are known."""
    strides = (h.shape[-1], norm["weight_stride"], norm["bias_stride"])
    inputs = (h, norm["weight"], norm["bias"])
    given = {"statistics": (mean, rstd), "dtype": rounded_to or h.dtype, "kept": kept}
    return Source("norm", inputs, strides, norm=norm, **given)
