"""The public names, and where each is defined: read by type checkers, and by `__init__.py`, which imports a name when it is first used."""

from te_dynamo import (
    distributed as distributed,
    errors as errors,
    nn as nn,
    ops as ops,
    recipe as recipe,
    testing as testing,
)
from te_dynamo.accuracy.compare import (
    compare as compare,
    compare_recipes as compare_recipes,
)
from te_dynamo.entry import (
    Exported as Exported,
    compile as compile,
    export as export,
    set_recipe as set_recipe,
)
from te_dynamo.fusion_registry import (
    register_backward_fusion as register_backward_fusion,
    register_forward_backward_fusion as register_forward_backward_fusion,
    register_forward_fusion as register_forward_fusion,
    register_graph_fusion as register_graph_fusion,
    unregister_fusion as unregister_fusion,
)
from te_dynamo.inspect.graphs.capture import capture as capture
from te_dynamo.inspect.explain import explain as explain
from te_dynamo.operations import (
    BasicOperation as BasicOperation,
    FusedOperation as FusedOperation,
    FusibleOperation as FusibleOperation,
    OperationFuser as OperationFuser,
    Sequential as Sequential,
)
from te_dynamo.quantized.quantizers import (
    Float8BlockQuantizer as Float8BlockQuantizer,
    Float8CurrentScalingQuantizer as Float8CurrentScalingQuantizer,
    Float8GroupedQuantizer as Float8GroupedQuantizer,
    Float8GroupedRowwiseQuantizer as Float8GroupedRowwiseQuantizer,
    Float8RowwiseQuantizer as Float8RowwiseQuantizer,
    MXFP8Quantizer as MXFP8Quantizer,
    NVFP4Quantizer as NVFP4Quantizer,
    Quantizer as Quantizer,
)
from te_dynamo.quantized.storage import QuantizedTensorStorage as QuantizedTensorStorage
from te_dynamo.quantized.storages import (
    Float8BlockTensorStorage as Float8BlockTensorStorage,
    Float8GroupedTensorStorage as Float8GroupedTensorStorage,
    Float8GroupedRowwiseTensorStorage as Float8GroupedRowwiseTensorStorage,
    Float8RowwiseTensorStorage as Float8RowwiseTensorStorage,
    Float8TensorStorage as Float8TensorStorage,
    MXFP8TensorStorage as MXFP8TensorStorage,
    NVFP4TensorStorage as NVFP4TensorStorage,
)
from te_dynamo.quantized.tensor import QuantizedTensor as QuantizedTensor
from te_dynamo.quantized.tensor_proto import (
    TensorProto as TensorProto,
    to_tensor_proto as to_tensor_proto,
)
from te_dynamo.weights.checkpoint.load import (
    load_checkpoint as load_checkpoint,
    load_quantized as load_quantized,
    register_in_transformers as register_in_transformers,
)
from te_dynamo.weights.checkpoint.save import save_checkpoint as save_checkpoint
from te_dynamo.weights.freeze import (
    freeze as freeze,
    invalidate as invalidate,
    unfreeze as unfreeze,
)

__version__: str
