"""Quantizers: how a tensor is held in low precision, as values."""

from te_dynamo.quantized.quantizers.base import Quantizer
from te_dynamo.quantized.quantizers.float8_block import Float8BlockQuantizer
from te_dynamo.quantized.quantizers.float8_current_scaling import Float8CurrentScalingQuantizer
from te_dynamo.quantized.quantizers.float8_grouped import Float8GroupedQuantizer
from te_dynamo.quantized.quantizers.float8_grouped_rowwise import Float8GroupedRowwiseQuantizer
from te_dynamo.quantized.quantizers.float8_rowwise import Float8RowwiseQuantizer
from te_dynamo.quantized.quantizers.mxfp8 import MXFP8Quantizer
from te_dynamo.quantized.quantizers.nvfp4 import NVFP4Quantizer
from te_dynamo.quantized.quantizers.product import check_grouped_linear, check_linear, check_product

__all__ = [
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "Float8GroupedQuantizer",
    "Float8GroupedRowwiseQuantizer",
    "Float8RowwiseQuantizer",
    "MXFP8Quantizer",
    "NVFP4Quantizer",
    "Quantizer",
    "check_grouped_linear",
    "check_linear",
    "check_product",
]
