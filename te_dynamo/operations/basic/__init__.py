"""The basic operations, one file a family."""

from te_dynamo.operations.basic.activation import GELU, QGELU, ReLU, SiLU, SReLU
from te_dynamo.operations.basic.linear import BasicLinear, Bias

__all__ = ["GELU", "QGELU", "BasicLinear", "Bias", "ReLU", "SReLU", "SiLU"]
