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
from te_dynamo.kernels.quantize import current, float8_block, float8_rowwise, grouped_rows, mxfp8, nvfp4


class Format(NamedTuple):
    """Functions of x, the form and what the format takes beside it (random bits): launching Triton, and in plain PyTorch."""

    kernel: Callable[..., list[torch.Tensor]]
    reference: Callable[..., list[torch.Tensor]]


FORMATS: dict[type[Form], Format] = {
    TensorForm: Format(current.quantize, current.quantize_reference),
    GroupedForm: Format(current.quantize_grouped, current.quantize_grouped_reference),
    RowForm: Format(float8_rowwise.quantize_rowwise, float8_rowwise.quantize_rowwise_reference),
    GroupedRowForm: Format(grouped_rows.quantize_grouped_rows, grouped_rows.quantize_grouped_rows_reference),
    BlockForm: Format(float8_block.quantize_block, float8_block.quantize_block_reference),
    MXFP8Form: Format(mxfp8.quantize_mxfp8, mxfp8.quantize_mxfp8_reference),
    NVFP4Form: Format(nvfp4.quantize_nvfp4, nvfp4.quantize_nvfp4_reference),
}


def reference_of(y: torch.Tensor, form: Form, *beside: Any) -> list[torch.Tensor]:
    """The buffers of y in plain PyTorch."""
    return FORMATS[type(form)].reference(y, form, *beside)
