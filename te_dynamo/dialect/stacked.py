"""Linears that share an input: their weights or gradients quantized into one stack."""

from collections.abc import Callable, Sequence
from typing import Any, Optional, TypeVar

import torch

from te_dynamo.dialect.define import te_op
from te_dynamo.dialect.fakes import quantized_stack
from te_dynamo.dialect.quantize import takes_quantizer
from te_dynamo.errors import QuantizationError
from te_dynamo.kernels.gemm.choose import Product
from te_dynamo.kernels.gemm.choose import stacking_pays as product_pays
from te_dynamo.kernels.produce import stack
from te_dynamo.kernels.quantize import current as kernels
from te_dynamo.kernels.quantize import rows_of_several
from te_dynamo.kernels.runtime.launch import size_hint
from te_dynamo.kernels.runtime.margin import gemm_target
from te_dynamo.kernels.tiles.stacking import MOST_SEGMENTS, Stacking
from te_dynamo.kernels.tiles.stacking import SEGMENT_MULTIPLE as SEGMENT_MULTIPLE
from te_dynamo.quantized.quantizers import Quantizer

_T = TypeVar("_T")


def _stacks(**implementations: Callable[..., Any]) -> Callable[..., Any]:
    """By what has scales of its own (`Quantizer.stacks`)."""

    def run(xs: list[torch.Tensor], quantizer: Quantizer, by_columns: bool, **hint: torch.Tensor) -> list[torch.Tensor]:
        if not quantizer.stacks:
            raise QuantizationError(f"te.quantize_stacked: {quantizer.describe()}: no GEMM multiplies a stack of it")
        return implementations[quantizer.stacks](xs, quantizer.form(), by_columns, **hint)

    return run


@te_op(
    reference=_stacks(
        tensors=kernels.quantize_stacked_reference,
        rows=rows_of_several.quantize_stacked_rows_reference,
        blocks=stack.quantize_stacked_blocks_reference,
    ),
    kernel=_stacks(
        tensors=kernels.quantize_stacked,
        rows=rows_of_several.quantize_stacked_rows,
        blocks=stack.quantize_stacked_blocks,
    ),
)
def quantize_stacked(xs: list[torch.Tensor], quantizer: Quantizer, by_columns: bool) -> list[torch.Tensor]:
    """The buffers of one tensor that stacks xs, by rows or by columns, each as te.quantize makes it, with its own scales.

    data [M, K], transpose [K, M^16], scale_inv fp32 [len(xs)]. With a scale a block the buffers of the concatenated tensor, with one a row
    those too: of a stack by rows the rows, of one by columns the columns. The stacked sides are two or three multiples of 128.
    """
    if quantizer.stacks == "rows":
        rows_of_several.stacked_rows_size(xs, quantizer.rowwise, quantizer.columnwise, by_columns)
    return quantized_stack(xs[0], kernels.stacked_size(xs, by_columns), len(xs), quantizer)


@te_op(
    reference=takes_quantizer(kernels.quantize_stacked_reference, True),
    kernel=takes_quantizer(kernels.quantize_stacked, True),
)
def quantize_stacked_with_amaxes(
    xs: list[torch.Tensor], quantizer: Quantizer, by_columns: bool, amaxes: Sequence[Optional[torch.Tensor]]
) -> list[torch.Tensor]:
    """te.quantize_stacked where amaxes are known: of each tensor partial ones, fp32 [a power of two up to PARTIALS], or None."""
    return quantized_stack(xs[0], kernels.stacked_size(xs, by_columns), len(xs), quantizer)


def places_in_stack(quantizer: Quantizer, rows: Sequence[int], index: int) -> dict[str, tuple[int, int, int]]:
    """Buffer name -> (dimension, first, length) of what one tensor has of a stack by rows; rows: of each tensor."""
    first, length, total = sum(rows[:index]), rows[index], sum(rows)
    if quantizer.one_scale:
        return {"data": (0, first, length), "transpose": (1, first, length), "scale_inv": (0, index, 1)}
    places = {}
    own = quantizer.form().buffers((length, 1))
    for name, (shape, _) in quantizer.form().buffers((total, 1)).items():
        dim = next(dim for dim, sizes in enumerate(zip(shape, own[name][0], strict=True)) if len({*sizes}) > 1)
        places[name] = dim, first * shape[dim] // total, length * shape[dim] // total
    return places


def side_stacks(side: object) -> bool:
    """Whether the kernels take a stacked side of that length."""
    return isinstance(side, int) and side > 0 and side % SEGMENT_MULTIPLE == 0


def stacks_of(linears: Sequence[_T]) -> list[Sequence[_T]]:
    """Neighbours, two or three in each stack: of four 2 and 2, of seven 3, 2 and 2. One linear is alone."""
    stacks = []
    while linears:
        size = MOST_SEGMENTS - (len(linears) == MOST_SEGMENTS + 1)  # none stays alone
        stacks.append(linears[:size])
        linears = linears[size:]
    return stacks


def stacking_pays(
    m: int, n: int, k: int, device: torch.device, fast_accum: bool, along: str, segments: Sequence[int], scaling: Any
) -> bool:
    """Whether one GEMM of the whole stack has its parts' bits (those along K aside) and takes no longer, by the cost model.

    m, n, k: of the whole; a symbolic one counts as its hint. scaling: `Request.scaling`, what has one scale in either operand.
    """
    sizes = [size_hint(size) for size in (m, n, k)]
    stacking = Stacking(along, tuple(segments))
    product = Product(*sizes, fast_accum, scaling=scaling, stacking=stacking, m_known=isinstance(m, int))
    return product_pays(product, gemm_target(device))
