"""te_dynamo: FP8 training and inference for unmodified PyTorch models, through `torch.compile(model, backend="te")`."""

from te_dynamo import nn, ops, recipe, testing
from te_dynamo.fusion_registry import (
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
    unregister_fusion,
)
from te_dynamo.inspect.capture import capture
from te_dynamo.inspect.explain import explain
from te_dynamo.operations import BasicOperation, FusedOperation, FusibleOperation, OperationFuser, Sequential
from te_dynamo.quantized.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8GroupedQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from te_dynamo.quantized.storage import QuantizedTensorStorage
from te_dynamo.quantized.storages import (
    Float8BlockTensorStorage,
    Float8GroupedTensorStorage,
    Float8TensorStorage,
    MXFP8TensorStorage,
    NVFP4TensorStorage,
)
from te_dynamo.quantized.tensor import QuantizedTensor
from te_dynamo.quantized.tensor_proto import TensorProto, to_tensor_proto
from te_dynamo.weights.freeze import freeze, invalidate, unfreeze

__all__ = [
    "Sequential",
    "OperationFuser",
    "FusibleOperation",
    "FusedOperation",
    "BasicOperation",
    "Float8BlockQuantizer",
    "Float8BlockTensorStorage",
    "Float8CurrentScalingQuantizer",
    "Float8GroupedQuantizer",
    "Float8GroupedTensorStorage",
    "Float8TensorStorage",
    "MXFP8Quantizer",
    "MXFP8TensorStorage",
    "NVFP4Quantizer",
    "NVFP4TensorStorage",
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "Quantizer",
    "TensorProto",
    "capture",
    "explain",
    "freeze",
    "invalidate",
    "nn",
    "ops",
    "recipe",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
    "testing",
    "to_tensor_proto",
    "unfreeze",
    "unregister_fusion",
]
