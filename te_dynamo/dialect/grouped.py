"""How the operands of te.grouped_gemm are held: `quantize_groups`, for every format.

Group g is offs[g - 1] <= m < offs[g], offs int32 [G], ascending. Scales for parts of a row are of one group each: rows as te.quantize makes them,
weights [G, N, K] as [G N, K], and columns, in blocks of 32 or 128 tokens, by `te.quantize_group_columns`, which quantizes the tokens in
their padded order, of P = padded_rows(M, G) rows (kernels/tiles/groups.py). With a scale a row, tokens stay in their order, and columns have a
scale for each group.
"""

import torch

from te_dynamo.dialect.define import te_op
from te_dynamo.errors import QuantizationError
from te_dynamo.kernels.layouts.form import Form
from te_dynamo.kernels.quantize.formats import columns_of_groups, columns_of_groups_reference
from te_dynamo.kernels.tiles.groups import padded_rows
from te_dynamo.quantized.quantize import quantize_tensor
from te_dynamo.quantized.quantizers import Float8RowwiseQuantizer, Quantizer
from te_dynamo.quantized.quantizers.float8_grouped_rowwise import GroupColumnsQuantizer
from te_dynamo.quantized.tensor_proto import TensorProto


def quantize_groups(x: torch.Tensor, offs: torch.Tensor, quantizer: Quantizer) -> list[torch.Tensor]:
    """The buffers of x [M, K], contiguous, in the order of its quantizer, its columns as products by groups read them."""
    if quantizer.one_scale:
        return quantize_tensor(x, quantizer)
    buffers = quantize_tensor(x, quantizer.with_usage(columnwise=False)) if quantizer.rowwise else []
    if quantizer.columnwise:
        buffers = [*buffers, *quantize_group_columns(x, offs, quantizer.with_usage(False, True))]
    return buffers


def columns_proto(x: TensorProto, groups: int, quantizer: Quantizer) -> TensorProto:
    """What `quantize_groups` makes of x's columns."""
    if isinstance(quantizer, Float8RowwiseQuantizer):
        rule = quantizer.fp8_format, quantizer.power_of_two_scale, quantizer.amax_epsilon
        quantizer = GroupColumnsQuantizer(False, True, *rule, groups)
    padded = not quantizer.one_scale and quantizer.scaling() != "row"
    rows = padded_rows(x.shape[0], groups) if padded else x.shape[0]
    return TensorProto((rows, x.shape[1]), x.dtype, quantizer.with_usage(False, True), device=x.device)


def _columns_form(quantizer: Quantizer) -> Form:
    if quantizer.one_scale or quantizer.no_groups_reason() or quantizer.rowwise:
        raise QuantizationError(
            f"te.quantize_group_columns: {quantizer.describe()}: expected columns by rows, in 1x128 blocks or MXFP8"
        )
    return quantizer.form()


def _columns_kernel(x: torch.Tensor, offs: torch.Tensor, quantizer: Quantizer) -> list[torch.Tensor]:
    return columns_of_groups(x, offs, _columns_form(quantizer))


def _columns_reference(x: torch.Tensor, offs: torch.Tensor, quantizer: Quantizer) -> list[torch.Tensor]:
    return columns_of_groups_reference(x, offs, _columns_form(quantizer))


@te_op(reference=_columns_reference, kernel=_columns_kernel)
def quantize_group_columns(x: torch.Tensor, offs: torch.Tensor, quantizer: Quantizer) -> list[torch.Tensor]:
    """te.quantize's columns of x [M, K] in the padded order of its groups: zero rows behind each, to a multiple of 128. With a scale a row
    in the order of x, [K, M^16] and [G, K].

    x: contiguous, bf16, fp16 or fp32. quantizer: of blocks or rows, columnwise alone.
    """
    _columns_form(quantizer)
    proto = TensorProto(tuple(x.shape), x.dtype, device=x.device)
    return columns_proto(proto, offs.shape[0], quantizer).create_buffers()
