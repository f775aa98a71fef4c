"""The shipped fusions of operations, one file each, in the order in which they run."""

from te_dynamo.fusion_registry import Fusion
from te_dynamo.operations.fused.activation_bias import BackwardActivationBias, fuse_activation_bias
from te_dynamo.operations.fused.backward_add_rms_norm import BackwardAddRMSNorm, fuse_backward_add_rms_norm
from te_dynamo.operations.fused.backward_linear_add import BackwardLinearAdd, fuse_backward_linear_add
from te_dynamo.operations.fused.backward_linear_scale import BackwardLinearScale, fuse_backward_linear_scale
from te_dynamo.operations.fused.grouped_mlp import GroupedMLP, fuse_grouped_mlp
from te_dynamo.operations.fused.layer_norm_linear import LayerNormLinear, fuse_layer_norm_linear
from te_dynamo.operations.fused.layer_norm_mlp import LayerNormMLP, layer_norm_mlp
from te_dynamo.operations.fused.linear_add import ForwardLinearBiasAdd, fuse_linear_bias_add
from te_dynamo.operations.fused.linear_bias_activation import ForwardLinearBiasActivation, fuse_linear_bias_activation
from te_dynamo.operations.fused.linear_scale_add import ForwardLinearScaleAdd, fuse_linear_scale_add

__all__ = [
    "SHIPPED",
    "BackwardActivationBias",
    "BackwardAddRMSNorm",
    "BackwardLinearAdd",
    "BackwardLinearScale",
    "ForwardLinearBiasActivation",
    "ForwardLinearBiasAdd",
    "ForwardLinearScaleAdd",
    "GroupedMLP",
    "LayerNormLinear",
    "LayerNormMLP",
    "layer_norm_mlp",
]

SHIPPED: dict[str, tuple[Fusion, ...]] = {
    "joint": (layer_norm_mlp(), fuse_layer_norm_linear, fuse_grouped_mlp),
    "forward": (fuse_linear_bias_add, fuse_linear_scale_add, fuse_linear_bias_activation),
    "backward": (
        fuse_activation_bias,
        fuse_backward_linear_scale,
        fuse_backward_linear_add,
        fuse_backward_add_rms_norm,
    ),
}
