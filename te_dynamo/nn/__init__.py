"""Modules with the names and arguments of Transformer Engine's, for eager use and for those who come from there.

Each is a few operations of this package; under torch.compile they trace into them. `is_first_microbatch` keeps the quantized
weight between microbatches, as there: True quantizes it and keeps the result, False takes what is kept, None keeps nothing.
An unmodified model needs none of this: torch.compile(model, backend="te") does the same.
"""

from te_dynamo.nn.grouped_linear import GroupedLinear
from te_dynamo.nn.layer_norm_linear import LayerNormLinear
from te_dynamo.nn.layer_norm_mlp import LayerNormMLP
from te_dynamo.nn.linear import Linear

__all__ = ["GroupedLinear", "LayerNormLinear", "LayerNormMLP", "Linear"]
