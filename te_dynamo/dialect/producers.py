"""Which operation writes the quantized result of another: what fusions, of graphs and of operations, put in the place of both."""

from te_dynamo.dialect.activation import activation, activation_quantize
from te_dynamo.dialect.gated import gated, gated_quantize
from te_dynamo.dialect.norm import layer_norm, layer_norm_quantize, rms_norm, rms_norm_quantize
from te_dynamo.dialect.norm_modulate import layer_norm_modulate, layer_norm_modulate_quantize

NORMS = {
    rms_norm: rms_norm_quantize,
    layer_norm: layer_norm_quantize,
    layer_norm_modulate: layer_norm_modulate_quantize,
}
"""f -> g: g(*args, quantizer, keep_output) = [y if keep_output, *statistics, *te.quantize(y)] of (y, *statistics) = f(*args)."""

ACTIVATIONS = {activation: activation_quantize, gated: gated_quantize}
"""The same of y = f(*args), without statistics."""
