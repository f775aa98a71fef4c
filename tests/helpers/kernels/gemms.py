"""Products of flat arguments, as the operations take them, by the kernels, by the references and by a tile of the test's choice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from te_dynamo.dialect.gemm import block_request, mxfp8_request, nvfp4_request, sum_request, tensor_request
from te_dynamo.dialect.grouped import (
    block_columns_request,
    block_rows_request,
    columns_request,
    mxfp8_columns_request,
    mxfp8_rows_request,
    rows_request,
)
from te_dynamo.kernels.gemm.choose import Choice
from te_dynamo.kernels.gemm.multiply import multiply, multiply_gated, multiply_with_amax, run
from te_dynamo.kernels.gemm.reference import reference, reference_gated, reference_with_amax
from te_dynamo.kernels.gemm.request import Request
from te_dynamo.kernels.gemm.tiles import DecodeTile, Tile


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
    return tensor_request(a, a_scale, b, b_scale, None, torch.bfloat16, fast_accum)


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


def gemm_block_with_tile(tile: Tile, *args: Any) -> torch.Tensor:
    return with_tile(tile, block_request(*args))


def gemm_grouped_with_tile(tile: Tile, *args: Any) -> torch.Tensor:
    return with_tile(tile, rows_request(*args, tile.fast))


def gemm_grouped_columns_with_tile(tile: Tile, *args: Any) -> torch.Tensor:
    return with_tile(tile, columns_request(*args, tile.fast))


def gemm_grouped_block_with_tile(tile: Tile, *args: Any) -> torch.Tensor:
    return with_tile(tile, block_rows_request(*args))


def gemm_grouped_block_columns_with_tile(tile: Tile, *args: Any) -> torch.Tensor:
    return with_tile(tile, block_columns_request(*args))
