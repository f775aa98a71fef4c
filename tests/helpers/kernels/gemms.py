"""Products of flat arguments, as the operations take them, by the kernels, by the references and by a tile of the test's choice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from te_dynamo.kernels.gemm.choose import Choice
from te_dynamo.kernels.gemm.multiply import multiply, multiply_gated, multiply_with_amax, run
from te_dynamo.kernels.gemm.reference import reference, reference_gated, reference_with_amax
from te_dynamo.kernels.gemm.request import Operand, Request
from te_dynamo.kernels.gemm.tiles import DecodeTile, Tile
from te_dynamo.kernels.tiles.stacking import Stacking
from te_dynamo.quantized.quantizers import Float8CurrentScalingQuantizer


def tensor_request(
    a: Any, sa: Any, b: Any, sb: Any, bias: Any, dtype: Any, fast: bool, along: str = "", segments: Sequence[int] = ()
) -> Request:
    return Request(Operand(a, sa), Operand(b, sb), dtype, fast, bias, stacking=Stacking(along, tuple(segments)))


def sum_request(a: Any, sa: Any, b: Any, sb: Any, bias: Any, addend: Any, dtype: Any, fast: bool) -> Request:
    return Request(Operand(a, sa), Operand(b, sb), dtype, fast, bias, addend)


def block_request(a: Any, sa: Any, b: Any, sb: Any, bias: Any, dtype: Any, a_two_d: bool, b_two_d: bool) -> Request:
    return Request(Operand(a, sa, _blocks(a_two_d)), Operand(b, sb, _blocks(b_two_d)), dtype, bias=bias)


def _blocks(two_d: bool) -> Any:
    return "128x128" if two_d else "1x128"


def mxfp8_request(a: Any, sa: Any, b: Any, sb: Any, bias: Any, dtype: Any, a_turned: bool, b_turned: bool) -> Request:
    return Request(Operand(a, sa, "1x32", a_turned), Operand(b, sb, "1x32", b_turned), dtype, bias=bias)


def nvfp4_request(a: Any, sa: Any, a_amax: Any, b: Any, sb: Any, b_amax: Any, bias: Any, dtype: Any) -> Request:
    return Request(Operand(a, sa, "1x16", amax=a_amax), Operand(b, sb, "1x16", amax=b_amax), dtype, bias=bias)


def rows_request(a: Any, sa: Any, b: Any, sb: Any, offs: Any, dtype: Any, fast: bool) -> Request:
    return Request(Operand(a, sa), Operand(b, sb), dtype, fast, groups="rows", offs=offs)


def columns_request(a: Any, sa: Any, b: Any, sb: Any, offs: Any, dtype: Any, fast: bool) -> Request:
    return Request(Operand(a, sa), Operand(b, sb), dtype, fast, groups="columns", offs=offs)


def block_rows_request(a: Any, sa: Any, b: Any, sb: Any, offs: Any, dtype: Any, b_two_d: bool, deep: bool) -> Request:
    sides = Operand(a, sa, "1x128"), Operand(b, sb, _blocks(b_two_d))
    return Request(*sides, dtype, groups="rows", offs=offs, deep=deep)


def block_columns_request(a: Any, sa: Any, b: Any, sb: Any, offs: Any, dtype: Any) -> Request:
    return Request(Operand(a, sa, "1x128"), Operand(b, sb, "1x128"), dtype, groups="columns", offs=offs)


def mxfp8_rows_request(a: Any, sa: Any, b: Any, sb: Any, offs: Any, dtype: Any, deep: bool) -> Request:
    sides = Operand(a, sa, "1x32"), Operand(b, sb, "1x32", deep)
    return Request(*sides, dtype, groups="rows", offs=offs, deep=deep)


def mxfp8_columns_request(a: Any, sa: Any, b: Any, sb: Any, offs: Any, dtype: Any) -> Request:
    return Request(Operand(a, sa, "1x32", True), Operand(b, sb, "1x32", True), dtype, groups="columns", offs=offs)


ROWS = Float8CurrentScalingQuantizer(columnwise=False)


def arguments(a: Any, sa: Any, b: Any, sb: Any, bias: Any, dtype: Any, fast: bool, *others: Any) -> tuple[Any, ...]:
    """Those of te.gemm, of operands with one scale a tensor. others: addend, along, segments."""
    return [a, sa], ROWS, [b, sb], ROWS, dtype, fast, bias, *others


def _both(request: Callable[..., Request]) -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
    return lambda *args: multiply(request(*args)), lambda *args: reference(request(*args))


gemm, gemm_reference = _both(tensor_request)
gemm_stacked, gemm_stacked_reference = _both(tensor_request)
gemm_add, gemm_add_reference = _both(sum_request)
gemm_block, gemm_block_reference = _both(block_request)
gemm_mxfp8, gemm_mxfp8_reference = _both(mxfp8_request)
gemm_nvfp4, gemm_nvfp4_reference = _both(nvfp4_request)
gemm_grouped, gemm_grouped_reference = _both(rows_request)
gemm_grouped_columns, gemm_grouped_columns_reference = _both(columns_request)
gemm_grouped_block, gemm_grouped_block_reference = _both(block_rows_request)
gemm_grouped_block_columns, gemm_grouped_block_columns_reference = _both(block_columns_request)
gemm_grouped_mxfp8, gemm_grouped_mxfp8_reference = _both(mxfp8_rows_request)
gemm_grouped_mxfp8_columns, gemm_grouped_mxfp8_columns_reference = _both(mxfp8_columns_request)


def gemm_add_in_place(*args: Any) -> torch.Tensor:
    request = sum_request(*args)
    return multiply(request, out=request.addend)


def gemm_amax(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return multiply_with_amax(tensor_request(*args))


def gemm_amax_reference(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return reference_with_amax(tensor_request(*args))


def _of_gate_and_up(a: Any, a_scale: Any, b: Any, b_scale: Any, fast_accum: bool) -> Request:
    return tensor_request(a, a_scale, b, b_scale, None, torch.bfloat16, fast_accum, "N", 2 * (b.shape[0] // 2,))


def gemm_gated(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return multiply_gated(_of_gate_and_up(*args[:5]), *args[5:])


def gemm_gated_reference(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return reference_gated(_of_gate_and_up(*args[:5]), *args[5:])


def with_tile(
    tile: Tile | DecodeTile, request: Request, out: torch.Tensor | None = None, partials: torch.Tensor | None = None
) -> torch.Tensor:
    """A request by a tile, which decides fast or slow accumulation; checks nothing."""
    kernel = "decode" if isinstance(tile, DecodeTile) else "usual"
    return run(Choice(kernel, tile), request, out, partials)


def gemm_with_tile(
    tile: Tile | DecodeTile,
    *args: Any,
    partials: torch.Tensor | None = None,
    addend: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
) -> torch.Tensor:
    request = dataclasses.replace(tensor_request(*args, tile.fast), addend=addend)
    return with_tile(tile, request, c, partials)


def gemm_stacked_with_tile(tile: Tile | DecodeTile, *args: Any) -> torch.Tensor:
    *plain, stacking = args
    return with_tile(tile, dataclasses.replace(tensor_request(*plain, tile.fast), stacking=stacking))


def gemm_block_with_tile(tile: Tile | DecodeTile, *args: Any) -> torch.Tensor:
    return with_tile(tile, block_request(*args))


def gemm_grouped_with_tile(tile: Tile, *args: Any) -> torch.Tensor:
    return with_tile(tile, rows_request(*args, tile.fast))


def gemm_grouped_columns_with_tile(tile: Tile, *args: Any) -> torch.Tensor:
    return with_tile(tile, columns_request(*args, tile.fast))


def gemm_grouped_block_with_tile(tile: Tile, *args: Any) -> torch.Tensor:
    return with_tile(tile, block_rows_request(*args))


def gemm_grouped_block_columns_with_tile(tile: Tile, *args: Any) -> torch.Tensor:
    return with_tile(tile, block_columns_request(*args))
