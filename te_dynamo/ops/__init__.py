"""The `te::` operations. Importing this registers them. The classes of `te_dynamo.operations` are here too."""

from te_dynamo.ops import activation, gemm, linear, norm, quantize, swiglu
from te_dynamo.ops.define import KERNELS, is_te
from te_dynamo.ops.linear import LinearConfig

# isort: split
from te_dynamo import operations  # on top of the above
from te_dynamo.operations import *  # noqa: F403

__all__ = ["KERNELS", "LinearConfig", "activation", "gemm", "is_te", "linear", "norm", "quantize", "swiglu"]
__all__ += operations.__all__
