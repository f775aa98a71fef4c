"""Quantizers: how a tensor is held in low precision, as values."""

from te_dynamo.quantizers.base import Quantizer
from te_dynamo.quantizers.float8_current_scaling import Float8CurrentScalingQuantizer

__all__ = ["Float8CurrentScalingQuantizer", "Quantizer"]
