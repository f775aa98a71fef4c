"""te_dynamo: FP8 training and inference for unmodified PyTorch models, through `torch.compile(model, backend="te")`."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

if (
    __name__ != "te_dynamo"
):  # what walks through a checkout's packages, as TORCH_LOGS="te_dynamo" does, finds this one in itself
    raise ImportError("te_dynamo: this package has one name, te_dynamo")
if not (Path(__file__).parent / "kernels").is_dir():  # in a checkout, whose other code folders lie beside this one
    __path__.append(str(Path(__file__).parents[1]))

from te_dynamo import distributed, nn, ops, recipe, testing
from te_dynamo.accuracy.compare import compare, compare_recipes
from te_dynamo.entry import compile
from te_dynamo.fusion_registry import (
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
    register_graph_fusion,
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

try:
    __version__ = version("te-dynamo")
except PackageNotFoundError:  # a checkout that nobody has installed
    __version__ = "0"

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
    "compare",
    "compare_recipes",
    "compile",
    "distributed",
    "explain",
    "freeze",
    "invalidate",
    "nn",
    "ops",
    "recipe",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
    "register_graph_fusion",
    "testing",
    "to_tensor_proto",
    "unfreeze",
    "unregister_fusion",
]
