"""The basic operations, one file a family."""

from te_dynamo.operations.basic.activation import GELU, QGELU, ReLU, SiLU, SReLU
from te_dynamo.operations.basic.collective import AllGather, AllReduce, ReduceScatter
from te_dynamo.operations.basic.dropout import Dropout
from te_dynamo.operations.basic.extra import AddExtraInput, MakeExtraOutput
from te_dynamo.operations.basic.gated import GEGLU, GLU, QGEGLU, ClampedSwiGLU, ReGLU, SReGLU, SwiGLU
from te_dynamo.operations.basic.grouped_linear import GroupedLinear
from te_dynamo.operations.basic.linear import BasicLinear, Bias
from te_dynamo.operations.basic.norm import L2Normalization, LayerNorm, RMSNorm
from te_dynamo.operations.basic.quantize import Quantize
from te_dynamo.operations.basic.scaled import ScaledSReLU, ScaledSwiGLU
from te_dynamo.operations.basic.shape import ConstantScale, Identity, Reshape

__all__ = [
    "GEGLU",
    "GELU",
    "GLU",
    "QGEGLU",
    "QGELU",
    "AddExtraInput",
    "AllGather",
    "AllReduce",
    "BasicLinear",
    "Bias",
    "ClampedSwiGLU",
    "ConstantScale",
    "Dropout",
    "GroupedLinear",
    "Identity",
    "L2Normalization",
    "LayerNorm",
    "MakeExtraOutput",
    "Quantize",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "ReduceScatter",
    "Reshape",
    "SReGLU",
    "SReLU",
    "ScaledSReLU",
    "ScaledSwiGLU",
    "SiLU",
    "SwiGLU",
]
