"""Which two quantized tensors a GEMM multiplies: asked where a recipe or a linear is configured, not at the first step."""

from __future__ import annotations

from te_dynamo.errors import QuantizationError
from te_dynamo.quantized.quantizers.base import Quantizer


def check_linear(x: Quantizer, weight: Quantizer, dy: Quantizer | None) -> None:
    """Raises QuantizationError, naming the GEMM, unless the GEMMs of a linear can multiply their operands.

    dy: None for gradients computed in high precision, where there is only fprop.
    """
    gemms = [("fprop", x, False, weight, False)]
    if dy is not None:
        gemms += [("dgrad", dy, False, weight, True), ("wgrad", dy, True, x, True)]
    for gemm, a, a_columnwise, b, b_columnwise in gemms:
        try:
            check_product(a, a_columnwise, b, b_columnwise)
        except QuantizationError as error:
            raise QuantizationError(f"{gemm}: {error}") from None


def check_grouped_linear(x: Quantizer, weight: Quantizer, dy: Quantizer | None) -> None:
    """Raises QuantizationError unless grouped GEMMs multiply the operands of a grouped linear, weight [G, N, K].

    dy: None for a dgrad in high precision, and no wgrad.
    """
    given = ", ".join(q.describe() if q else "None" for q in (x, weight, dy))
    tokens = [x] if dy is None else [x, dy]
    for quantizer in tokens:
        if reason := quantizer.no_groups_reason():
            raise QuantizationError(f"grouped linear: {quantizer.describe()}: {reason}; got {given}")
    if (
        type(tokens[-1]) is not type(x)
        or type(weight) is not type(x.for_groups(True, True))
        or _scale_blocks(*tokens, weight) > 1
    ):
        raise QuantizationError(f"grouped linear: expected x, the weight and dy in one format, got {given}")
    for gemm, a, b in (("fprop", x, weight), ("dgrad", tokens[-1], weight), ("wgrad", tokens[-1], x)):
        if _both_e5m2(a, b):
            raise QuantizationError(f"{gemm}: e5m2 x e5m2: FP8 tensor cores do not multiply it; hold one in e4m3")


def _scale_blocks(*quantizers: Quantizer) -> int:
    """How many sizes of scale blocks of MXFP8 there are."""
    return len({getattr(quantizer, "scale_block", 0) for quantizer in quantizers})


def _both_e5m2(a: Quantizer, b: Quantizer) -> bool:
    return getattr(a, "fp8_format", "") == getattr(b, "fp8_format", "") == "e5m2"


def check_product(a: Quantizer, a_columnwise: bool, b: Quantizer, b_columnwise: bool) -> None:
    """Raises QuantizationError unless a GEMM multiplies a tensor of `a` by one of `b`, each read columnwise or rowwise."""
    if type(a) is not type(b):
        raise QuantizationError(f"no GEMM multiplies {type(a).__name__} by {type(b).__name__}")
    if _both_e5m2(a, b):
        raise QuantizationError("e5m2 x e5m2: FP8 tensor cores do not multiply it; hold one operand in e4m3")
    if a.scaling() == b.scaling() == "128x128":
        raise QuantizationError("2D x 2D: no GEMM multiplies two operands in 128x128 blocks; hold one in 1x128")
    blocks = [getattr(quantizer, "scale_block", 0) for quantizer in (a, b)]
    if blocks[0] != blocks[1]:
        raise QuantizationError(f"scale blocks of {blocks[0]} and {blocks[1]}: expected equal ones")
    if (_rotated(a) and a_columnwise) != (_rotated(b) and b_columnwise):
        raise QuantizationError("one operand is rotated by the Hadamard transform and the other is not")


def _rotated(quantizer: Quantizer) -> bool:
    """Whether its columns are rotated."""
    return getattr(quantizer, "hadamard", False)
