"""The fusions that te_dynamo ships, one file each, and the order in which they run."""

from te_dynamo.passes.dialect.collectives.all_to_all_quantize import fuse_all_to_all_quantize
from te_dynamo.passes.dialect.collectives.gather_quantize import fuse_gather_quantize
from te_dynamo.passes.dialect.fusions.activation_backward_quantize import (
    fuse_activation_backward_quantize,
    fuse_gated_backward_quantize,
)
from te_dynamo.passes.dialect.fusions.activation_quantize import fuse_activation_quantize
from te_dynamo.passes.dialect.fusions.gated_backward_quantize_halves import fuse_gated_backward_quantize_halves
from te_dynamo.passes.dialect.fusions.gemm_add import fuse_gemm_add
from te_dynamo.passes.dialect.fusions.gemm_amax import fuse_gemm_amax
from te_dynamo.passes.dialect.fusions.gemm_bias import fuse_gemm_bias
from te_dynamo.passes.dialect.fusions.gemm_gated import fuse_gemm_gated
from te_dynamo.passes.dialect.fusions.norm_add_quantize import fuse_norm_add_quantize
from te_dynamo.passes.dialect.fusions.norm_quantize import fuse_norm_quantize
from te_dynamo.passes.dialect.fusions.quantize_bias_grad import fuse_quantize_bias_grad
from te_dynamo.passes.dialect.fusions.shared_input import fuse_shared_input

__all__ = ["SHIPPED"]

SHIPPED = {
    "joint": (fuse_shared_input, fuse_all_to_all_quantize),
    "forward": (
        fuse_shared_input,
        fuse_gather_quantize,
        fuse_all_to_all_quantize,
        fuse_gemm_bias,
        fuse_norm_quantize,
        fuse_norm_add_quantize,
        fuse_activation_quantize,
        fuse_gemm_gated,
        fuse_gemm_amax,
        fuse_gemm_add,
    ),
    "backward": (
        fuse_activation_backward_quantize,
        fuse_gated_backward_quantize,
        fuse_gated_backward_quantize_halves,
        fuse_quantize_bias_grad,
    ),
}
