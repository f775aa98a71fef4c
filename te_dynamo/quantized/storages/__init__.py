"""The storages, one a format. Importing this registers them by name."""

from te_dynamo.quantized.storages.float8 import Float8TensorStorage
from te_dynamo.quantized.storages.float8_block import Float8BlockTensorStorage
from te_dynamo.quantized.storages.float8_grouped import Float8GroupedTensorStorage
from te_dynamo.quantized.storages.float8_grouped_rowwise import Float8GroupedRowwiseTensorStorage
from te_dynamo.quantized.storages.float8_rowwise import Float8RowwiseTensorStorage
from te_dynamo.quantized.storages.mxfp8 import MXFP8TensorStorage
from te_dynamo.quantized.storages.nvfp4 import NVFP4TensorStorage

__all__ = [
    "Float8BlockTensorStorage",
    "Float8GroupedTensorStorage",
    "Float8GroupedRowwiseTensorStorage",
    "Float8RowwiseTensorStorage",
    "Float8TensorStorage",
    "MXFP8TensorStorage",
    "NVFP4TensorStorage",
]
