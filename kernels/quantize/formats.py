"""Which launcher and which reference make the buffers of each form: a new format is one entry here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from te_dynamo.kernels.layouts.block import BlockForm
from te_dynamo.kernels.layouts.form import Form
from te_dynamo.kernels.layouts.mxfp8 import MXFP8Form
from te_dynamo.kernels.layouts.nvfp4 import NVFP4Form
from te_dynamo.kernels.layouts.row import GroupedRowForm, RowForm
from te_dynamo.kernels.layouts.tensor import GroupedForm, TensorForm
from te_dynamo.kernels.quantize import current, float8_block, float8_rowwise, mxfp8, nvfp4, rows_of_several
from te_dynamo.kernels.tiles.groups import padded_reference


class Format(NamedTuple):
    """Functions of x, the form and what the format takes beside it (random bits): launching Triton, and in plain PyTorch.

    columns, columns_reference: of x, offs and the form, columns alone, of groups of rows that end at offs; None where these are in the
    padded order of kernels/tiles/groups.py, which the kernel takes offs for.
    """

    kernel: Callable[..., list[torch.Tensor]]
    reference: Callable[..., list[torch.Tensor]]
    columns: Callable[..., list[torch.Tensor]] | None = None
    columns_reference: Callable[..., list[torch.Tensor]] | None = None


FORMATS: dict[type[Form], Format] = {
    TensorForm: Format(current.quantize, current.quantize_reference),
    GroupedForm: Format(current.quantize_grouped, current.quantize_grouped_reference),
    RowForm: Format(
        float8_rowwise.quantize_rowwise,
        float8_rowwise.quantize_rowwise_reference,
        rows_of_several.quantize_columns_of_groups,
        rows_of_several.quantize_columns_of_groups_reference,
    ),
    GroupedRowForm: Format(rows_of_several.quantize_grouped_rows, rows_of_several.quantize_grouped_rows_reference),
    BlockForm: Format(float8_block.quantize_block, float8_block.quantize_block_reference),
    MXFP8Form: Format(mxfp8.quantize_mxfp8, mxfp8.quantize_mxfp8_reference),
    NVFP4Form: Format(nvfp4.quantize_nvfp4, nvfp4.quantize_nvfp4_reference),
}


def reference_of(y: torch.Tensor, form: Form, *beside: Any) -> list[torch.Tensor]:
    """The buffers of y in plain PyTorch."""
    return FORMATS[type(form)].reference(y, form, *beside)


def columns_of_groups(x: torch.Tensor, offs: torch.Tensor, form: Form) -> list[torch.Tensor]:
    """The columns of groups of rows, by the kernels."""
    format = FORMATS[type(form)]
    return format.columns(x, offs, form) if format.columns else format.kernel(x, form, offs=offs)


def columns_of_groups_reference(x: torch.Tensor, offs: torch.Tensor, form: Form) -> list[torch.Tensor]:
    """The same in plain PyTorch."""
    format = FORMATS[type(form)]
    if format.columns_reference:
        return format.columns_reference(x, offs, form)
    return format.reference(padded_reference(x, offs), form)
