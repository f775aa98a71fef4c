"""The shipped fusions of operations, one file each, in the order in which they run."""

from te_dynamo.fusion_registry import Fusion
from te_dynamo.operations.fused.activation_bias import BackwardActivationBias, fuse_activation_bias
from te_dynamo.operations.fused.linear_bias_activation import ForwardLinearBiasActivation, fuse_linear_bias_activation

__all__ = ["SHIPPED", "BackwardActivationBias", "ForwardLinearBiasActivation"]

SHIPPED: dict[str, tuple[Fusion, ...]] = {
    "joint": (),
    "forward": (fuse_linear_bias_activation,),
    "backward": (fuse_activation_bias,),
}
