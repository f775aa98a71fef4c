"""`te.quantize`: a tensor into the buffers of its quantizer; `te.quantize_bias_grad` with column sums beside them; `te.transpose` of its codes;
`te.amax` and `te.amaxes`, what decides its one scale; `te.amax_bits_of_parts` and `te.quantize_parts` of rows that go to several receivers.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch

from te_dynamo.dialect.define import kernel_or_reference, te_op
from te_dynamo.dialect.fakes import column_sums, plain, quantized
from te_dynamo.dialect.memory import byte_hint
from te_dynamo.errors import InputError, QuantizationError
from te_dynamo.kernels.layouts.form import Form
from te_dynamo.kernels.layouts.sizes import rows_and_columns, transposed
from te_dynamo.kernels.quantize import current as kernels
from te_dynamo.kernels.quantize import parts, several
from te_dynamo.kernels.quantize import transpose as transpose_kernels
from te_dynamo.kernels.quantize.current import amax_by_rows
from te_dynamo.kernels.quantize.formats import FORMATS, Format
from te_dynamo.kernels.runtime import availability
from te_dynamo.kernels.runtime.hints import copy_of_hints
from te_dynamo.quantized.quantizers import Quantizer

MOST_AMAXES = kernels.MOST_TENSORS
"""Tensors of one te.amaxes."""

MOST_BYTES = 2**28
"""Of one te.amaxes beside casts: what is read for an amax is read again by its cast, faster if that follows at once. Two weights of a
Llama-8B block's MLP have almost as many."""

INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def takes_quantizer(implementation: Callable[..., Any], one_scale: bool = False) -> Callable[..., Any]:
    """A fused kernel's launcher or reference as an operation calls it: a quantizer in the place of its form. Lowering may give a hint.

    one_scale: it is for formats with one scale a tensor, and else for all with fused producers; QuantizationError for another.
    """

    @functools.wraps(implementation)
    def run(*args: Any, **hint: torch.Tensor) -> Any:
        return implementation(*(_form_of(a, one_scale) if isinstance(a, Quantizer) else a for a in args), **hint)

    return run


def _form_of(quantizer: Quantizer, one_scale: bool) -> Form:
    if not (quantizer.one_scale if one_scale else quantizer.fused_producers):
        scales = "" if one_scale else " or a block"
        raise QuantizationError(f"{quantizer.describe()}: the fused kernels write FP8 with one scale a tensor{scales}")
    return quantizer.form()


def _runs(implementation: Callable[[Format], Callable[..., list[torch.Tensor]]]) -> Callable[..., list[torch.Tensor]]:
    """`te.quantize` by the kernels or by the references of the quantizers' formats."""

    def run(
        x: torch.Tensor, quantizer: Quantizer, random: Optional[torch.Tensor] = None, **hint: torch.Tensor
    ) -> list[torch.Tensor]:
        quantizer.value()
        quantizer.check_shape(tuple(x.shape))
        if x.dtype not in INPUT_DTYPES:
            raise InputError(f"{quantizer.describe()}: expected bf16, fp16 or fp32 values, got {x.dtype}")
        if quantizer.needs_random() and random is None:
            raise InputError(
                f"{quantizer.describe()}: te.quantize rounds stochastically by random bits that it is given; "
                "quantizer.quantize(x, generator) draws them"
            )
        form = quantizer.form()
        return implementation(FORMATS[type(form)])(x, form, *([random] if quantizer.needs_random() else []), **hint)

    return run


@te_op(reference=_runs(lambda format: format.reference), kernel=_runs(lambda format: format.kernel))
def quantize(x: torch.Tensor, quantizer: Quantizer, random: Optional[torch.Tensor] = None) -> list[torch.Tensor]:
    """x (any rank, read as [M, K], contiguous, bf16, fp16 or fp32) into its quantizer's buffers.

    random: the bits of stochastic rounding, an argument so that the operation is a function of what it is given.
    """
    return quantized(x, quantizer)


@te_op(reference=takes_quantizer(kernels.quantize_reference, True), kernel=takes_quantizer(kernels.quantize, True))
def quantize_with_amax(x: torch.Tensor, quantizer: Quantizer, amax: torch.Tensor) -> list[torch.Tensor]:
    """te.quantize with one scale a tensor, in one pass over x: amax, fp32 [a power of two], are partial ones of x."""
    return quantized(x, quantizer)


quantize_several = kernel_or_reference(several.quantize_several, several.quantize_several_reference)
"""(tensors, dtype, form[, amaxes]) -> te.quantize of each tensor in that dtype, with amaxes te.quantize_with_amax. No operation: no graph holds it."""


@te_op(reference=amax_by_rows)
def amax(x: torch.Tensor) -> torch.Tensor:
    """max|x| of a tensor of any rank >= 1, fp32 [1]: what te.quantize_with_amax takes. NaN propagates, no values give 0."""
    return plain((1,), torch.float32, x)


def finds_amax(x: torch.Tensor, quantizer: Quantizer) -> bool:
    """Whether `te.quantize` finds the amax in a launch of its own."""
    apart = quantizer.one_scale and not kernels.in_one_launch(x, quantizer.columnwise)
    return apart and availability.kernels_available(x.device).ok


@te_op(reference=kernels.partial_amaxes_of_reference, kernel=kernels.partial_amaxes_of)
def amaxes(xs: list[torch.Tensor]) -> torch.Tensor:
    """fp32 [len(xs), PARTIALS]: a row has partial amaxes of its tensor, as te.quantize_with_amax takes them. Contiguous, of one dtype."""
    return plain((len(xs), kernels.PARTIALS), torch.float32, xs[0])


def share_amaxes_launch(xs: Sequence[torch.Tensor]) -> bool:
    """Whether one te.amaxes may read those tensors, fakes too, before they are cast."""
    alike = len({(x.dtype, x.device) for x in xs}) == 1
    return alike and len(xs) <= MOST_AMAXES and sum(map(byte_hint, xs)) <= MOST_BYTES


@te_op(reference=parts.amax_bits_of_parts)
def amax_bits_of_parts(x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """[P]: max|x| of the first sizes[0] rows, of the sizes[1] next ones and so on, each as the int32 that its fp32 bits are."""
    return plain((len(sizes),), torch.int32, x)


@te_op(reference=takes_quantizer(parts.quantize_parts, True))
def quantize_parts(
    x: torch.Tensor, sizes: Sequence[int], amaxes: torch.Tensor, own_amax: torch.Tensor, quantizer: Quantizer
) -> list[torch.Tensor]:
    """[codes in x's shape, scale_inv [1] by own_amax]: the rows of each part with one scale, by its amax in amaxes [P]."""
    return [plain(tuple(x.shape), quantizer.dtype, x), plain((1,), torch.float32, x)]  # type: ignore[attr-defined]


@te_op(
    reference=takes_quantizer(kernels.quantize_bias_grad_reference, True),
    kernel=takes_quantizer(kernels.quantize_bias_grad, True),
)
def quantize_bias_grad(dy: torch.Tensor, quantizer: Quantizer) -> list[torch.Tensor]:
    """[te.bias_grad(dy), *te.quantize(dy)]: the sums in another order than te.bias_grad's, the buffers the same bits."""
    return [column_sums(dy), *quantized(dy, quantizer)]


@te_op(reference=transpose_kernels.transpose_reference, kernel=transpose_kernels.transpose)
def transpose(data: torch.Tensor) -> torch.Tensor:
    """[K, M^16] of float8 data, read as [M, K]; padding is zero. The bits that te.quantize writes with both usages on."""
    rows, columns = rows_and_columns(data.shape)
    return plain(transposed(rows, columns), data.dtype, data)


@te_op(reference=copy_of_hints, kernel=copy_of_hints)
def hints(like: torch.Tensor, graph: str, count: int) -> torch.Tensor:
    """int64 [count, 2] on like's device: a copy of what the sites of that graph guess their scales from. Lowering puts it at the beginning."""
    return plain((count, 2), torch.int64, like)
