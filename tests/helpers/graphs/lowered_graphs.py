"""One graph for each te operation on fake CUDA tensors: what lowering is tested with."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_flatten

from te_dynamo.dialect.grouped_linear import GroupedLinearConfig
from te_dynamo.dialect.linear import LinearConfig
from te_dynamo.quantized.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8GroupedQuantizer,
    Float8GroupedRowwiseQuantizer,
    Float8RowwiseQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from te_dynamo.recipe import Float8CurrentScaling

te, aten = torch.ops.te, torch.ops.aten

BOTH = Float8CurrentScalingQuantizer()

ROWS = Float8CurrentScalingQuantizer(columnwise=False)

COLUMNS = Float8CurrentScalingQuantizer(rowwise=False)

BLOCKS, BLOCKS_2D = (Float8BlockQuantizer(columnwise=False, block_dims=dims) for dims in (1, 2))

BY_ROWS = Float8RowwiseQuantizer(columnwise=False)

PRODUCED_BY_ROWS = Float8RowwiseQuantizer()

MXFP8_128 = MXFP8Quantizer(columnwise=False, scale_block=128)

LINEAR = LinearConfig.from_recipe(Float8CurrentScaling(), input_requires_grad=True, weight_requires_grad=True)

GROUPED_LINEAR = GroupedLinearConfig.from_recipe(
    Float8CurrentScaling(), weight_transposed=False, input_requires_grad=True, weight_requires_grad=True
)


def bf16(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device="cuda")


def f32(*shape: int) -> Tensor:
    return torch.empty(*shape, device="cuda")


def f8(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.float8_e4m3fn, device="cuda")


def u8(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.uint8, device="cuda")


def offsets() -> Tensor:
    return torch.empty(3, dtype=torch.int32, device="cuda")


def key() -> Tensor:
    return torch.empty(2, dtype=torch.int32, device="cuda")


def call(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    """A call with its fake result, from line 17 of the user's model."""
    node = graph.call_function(target, args)
    node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]))
    node.meta["stack_trace"] = '  File "model.py", line 17, in forward\n    y = f(x)'
    return node


def inputs(graph: fx.Graph, *values: Tensor) -> list[fx.Node]:
    """Placeholders for `values`."""
    nodes = []
    for number, value in enumerate(values):
        nodes.append(graph.placeholder(f"x{number}"))
        nodes[-1].meta["val"] = value
    return nodes


def finish(graph: fx.Graph, result: fx.Node) -> fx.Graph:
    """Returns every tensor of `result`."""
    values = result.meta["val"]
    items: list[fx.Node] = [result]
    if not isinstance(values, Tensor):
        items = [call(graph, operator.getitem, result, index) for index in range(len(values))]
    graph.output(tuple(items))
    return graph


def graph_of(target: Any, *args: Any) -> fx.Graph:
    """A graph of one operation; its tensors among `args` are the inputs."""
    graph = fx.Graph()
    leaves, spec = tree_flatten(args)
    nodes = iter(inputs(graph, *(leaf for leaf in leaves if isinstance(leaf, Tensor))))
    given = spec.unflatten([next(nodes) if isinstance(leaf, Tensor) else leaf for leaf in leaves])
    return finish(graph, call(graph, target, *given))


Case = tuple[Any, Callable[[], tuple[Any, ...]], str]

CASES: dict[str, Case] = {
    "quantize": (
        te.quantize,
        lambda: (bf16(19, 64), BOTH),
        "quantize_amax_kernel -> partials\nquantize_cast_kernel -> data, transpose, scale_inv",
    ),
    "quantize rows": (
        te.quantize,
        lambda: (bf16(1024, 128), ROWS),
        "quantize_amax_kernel -> partials\nquantize_cast_kernel -> data, scale_inv",
    ),
    "quantize a few rows": (
        te.quantize,
        lambda: (bf16(19, 64), ROWS),
        "quantize_few_kernel -> data, scale_inv",
    ),
    "quantize columns": (
        te.quantize,
        lambda: (bf16(19, 64), COLUMNS),
        "quantize_amax_kernel -> partials\nquantize_cast_kernel -> transpose, scale_inv",
    ),
    "gemm": (
        te.gemm,
        lambda: ([f8(16, 64), f32(1)], ROWS, [f8(32, 64), f32(1)], ROWS, torch.bfloat16, True),
        "gemm_kernel -> c",
    ),
    "gemm with bias": (
        te.gemm,
        lambda: ([f8(16, 64), f32(1)], ROWS, [f8(32, 64), f32(1)], ROWS, torch.bfloat16, True, bf16(32)),
        "gemm_kernel -> c",
    ),
    "rms_norm": (te.rms_norm, lambda: (bf16(19, 64), bf16(64), 1e-5, False, False), "norm_rows_kernel -> y, rstd"),
    "rms_norm without weight": (
        te.rms_norm,
        lambda: (bf16(19, 64), None, 1e-5, False, False),
        "norm_rows_kernel -> y, rstd",
    ),
    "layer_norm": (
        te.layer_norm,
        lambda: (bf16(19, 64), bf16(64), bf16(64), 1e-5),
        "norm_rows_kernel -> y, mean, rstd",
    ),
    "rms_norm_quantize": (
        te.rms_norm_quantize,
        lambda: (bf16(19, 64), bf16(64), 1e-5, False, False, BOTH, False),
        "norm_rows_kernel -> rstd, partials\nnorm_cast_kernel -> data, transpose, scale_inv",
    ),
    "rms_norm_quantize keeping y": (
        te.rms_norm_quantize,
        lambda: (bf16(19, 64), bf16(64), 1e-5, False, False, ROWS, True),
        "norm_rows_kernel -> rstd, partials\nnorm_cast_kernel -> y, data, scale_inv",
    ),
    "rms_norm_quantize by rows": (
        te.rms_norm_quantize,
        lambda: (bf16(19, 64), bf16(64), 1e-5, False, False, PRODUCED_BY_ROWS, False),
        "norm_rows_kernel -> rstd, partials, data, scale_inv\nproduce_columns_kernel -> transpose, columnwise_scale_inv",
    ),
    "gated_backward_quantize by rows": (
        te.gated_backward_quantize,
        lambda: (bf16(19, 64), bf16(19, 64), bf16(19, 64), "silu", PRODUCED_BY_ROWS, False),
        "produce_rows_kernel -> data, scale_inv, second_data, second_scale_inv, maxima\n"
        "produce_columns_kernel -> transpose, columnwise_scale_inv, second_transpose, second_columnwise_scale_inv",
    ),
    "activation_backward_quantize by rows alone": (
        te.activation_backward_quantize,
        lambda: (bf16(19, 64), bf16(19, 64), "gelu", PRODUCED_BY_ROWS.with_usage(columnwise=False), True, True),
        "produce_rows_kernel -> y, data, scale_inv\nproduce_columns_kernel -> sums",
    ),
    "layer_norm_quantize": (
        te.layer_norm_quantize,
        lambda: (bf16(19, 64), bf16(64), None, 1e-5, BOTH, False),
        "norm_rows_kernel -> mean, rstd, partials\nnorm_cast_kernel -> data, transpose, scale_inv",
    ),
    "layer_norm_quantize of fp32 that reads in both": (
        te.layer_norm_quantize,
        lambda: (f32(19, 64), f32(64), None, 1e-5, ROWS, True, None, torch.bfloat16),
        "norm_rows_kernel -> mean, rstd, partials\nnorm_cast_kernel -> y, data, scale_inv",
    ),
    "layer_norm_modulate": (
        te.layer_norm_modulate,
        lambda: (bf16(2, 19, 64), bf16(2, 1, 64), bf16(2, 1, 64), 1e-5, True),
        "norm_rows_kernel -> y, mean, rstd",
    ),
    "layer_norm_modulate_quantize": (
        te.layer_norm_modulate_quantize,
        lambda: (bf16(2, 19, 64), bf16(2, 1, 64), bf16(2, 1, 64), 1e-5, True, BOTH, True),
        "norm_rows_kernel -> mean, rstd, partials\nnorm_cast_kernel -> y, data, transpose, scale_inv",
    ),
    "activation": (te.activation, lambda: (bf16(19, 64), "gelu"), "produce_write_kernel -> y"),
    "activation_backward": (
        te.activation_backward,
        lambda: (bf16(19, 64), bf16(19, 64), "silu"),
        "produce_write_kernel -> y",
    ),
    "activation_quantize": (
        te.activation_quantize,
        lambda: (bf16(19, 64), "relu", BOTH, True),
        "produce_amax_kernel -> partials\nproduce_write_kernel -> y, data, transpose, scale_inv",
    ),
    "add_rms_norm_quantize": (
        te.add_rms_norm_quantize,
        lambda: (bf16(19, 64), bf16(19, 64), bf16(64), 1e-5, False, False, BOTH, False),
        "norm_rows_kernel -> h, rstd, partials\nnorm_cast_kernel -> data, transpose, scale_inv",
    ),
    "add_rms_norm_quantize of fp32 and bf16": (
        te.add_rms_norm_quantize,
        lambda: (f32(19, 64), bf16(19, 64), f32(64), 1e-5, False, False, ROWS, True, torch.bfloat16),
        "norm_rows_kernel -> h, y, rstd, partials\nquantize_cast_kernel -> data, scale_inv",
    ),
    "add_layer_norm_quantize keeping y": (
        te.add_layer_norm_quantize,
        lambda: (bf16(19, 64), bf16(19, 64), bf16(64), bf16(64), 1e-5, ROWS, True),
        "norm_rows_kernel -> h, mean, rstd, partials\nnorm_cast_kernel -> y, data, scale_inv",
    ),
    "quantize_stacked": (
        te.quantize_stacked,
        lambda: ([bf16(128, 64), bf16(256, 64)], BOTH, False),
        "quantize_amaxes_kernel -> partials\nquantize_stacked_kernel -> data, transpose, scale_inv",
    ),
    "quantize_stacked_rowwise": (
        te.quantize_stacked,
        lambda: ([bf16(128, 64), bf16(256, 64)], BY_ROWS, False),
        "quantize_stacked_rows_kernel -> data, scale_inv",
    ),
    "quantize_stacked_rowwise_columns": (
        te.quantize_stacked,
        lambda: ([bf16(19, 128), bf16(19, 256)], Float8RowwiseQuantizer(rowwise=False), True),
        "quantize_stacked_rows_kernel -> data, scale_inv",
    ),
    "quantize_stacked_blocks": (
        te.quantize_stacked,
        lambda: ([bf16(128, 64), bf16(256, 64)], Float8BlockQuantizer(), False),
        "produce_kernel -> data, scale_inv, transpose, columnwise_scale_inv",
    ),
    "quantize_stacked_blocks_columns": (
        te.quantize_stacked,
        lambda: ([bf16(19, 128), bf16(19, 256)], MXFP8Quantizer(), True),
        "produce_kernel -> data, scale_inv, transpose, columnwise_scale_inv",
    ),
    "quantize_stacked_with_amaxes": (
        te.quantize_stacked_with_amaxes,
        lambda: ([bf16(128, 64), bf16(256, 64)], ROWS, False, [f32(512), f32(1)]),
        "quantize_stacked_kernel -> data, scale_inv",
    ),
    "amaxes": (te.amaxes, lambda: ([bf16(128, 64), bf16(64)],), "quantize_amaxes_kernel -> partials"),
    "gemm_stacked": (
        te.gemm,
        lambda: (
            [f8(16, 64), f32(1)],
            ROWS,
            [f8(384, 64), f32(2)],
            ROWS,
            torch.bfloat16,
            True,
            None,
            None,
            "N",
            [128, 256],
        ),
        "gemm_kernel -> c",
    ),
    "gemm_gated": (
        te.gemm_gated,
        lambda: ([f8(16, 64), f32(1)], ROWS, [f8(256, 64), f32(2)], ROWS, True, 1, "silu"),
        "gemm_kernel -> c\nproduce_amax_kernel -> partials",
    ),
    "gemm_grouped": (
        te.grouped_gemm,
        lambda: (
            [f8(19, 64), f32(1)],
            ROWS,
            [f8(3, 32, 64), f32(3)],
            Float8GroupedQuantizer(columnwise=False),
            offsets(),
            torch.bfloat16,
            True,
        ),
        "gemm_grouped_kernel -> c",
    ),
    "gemm_grouped_columns": (
        te.grouped_gemm,
        lambda: ([f8(64, 32), f32(1)], COLUMNS, [f8(128, 32), f32(1)], COLUMNS, offsets(), torch.bfloat16, False),
        "gemm_grouped_kernel -> c",
    ),
    "gemm_grouped_rowwise": (
        te.grouped_gemm,
        lambda: (
            [f8(19, 64), f32(19)],
            BY_ROWS,
            [f8(3, 32, 64), f32(3, 32)],
            Float8GroupedRowwiseQuantizer(columnwise=False),
            offsets(),
            torch.bfloat16,
            False,
        ),
        "gemm_grouped_kernel -> c",
    ),
    "quantize_grouped_rowwise": (
        te.quantize,
        lambda: (bf16(3, 32, 64), Float8GroupedRowwiseQuantizer()),
        "quantize_rows_kernel -> data, scale_inv\nquantize_rows_kernel -> data, scale_inv",
    ),
    "quantize_group_columns rowwise": (
        te.quantize_group_columns,
        lambda: (bf16(19, 64), offsets(), Float8RowwiseQuantizer(rowwise=False)),
        "quantize_columns_of_groups_kernel -> data, scale_inv",
    ),
    "gemm_grouped_block": (
        te.grouped_gemm,
        lambda: (
            [f8(19, 64), f32(1, 20)],
            BLOCKS,
            [f8(384, 64), f32(3, 4)],
            BLOCKS_2D,
            offsets(),
            torch.bfloat16,
            False,
        ),
        "gemm_grouped_kernel -> c",
    ),
    "gemm_grouped_block_columns": (
        te.grouped_gemm,
        lambda: (
            [f8(64, 384), f32(3, 64)],
            Float8BlockQuantizer(rowwise=False),
            [f8(128, 384), f32(3, 128)],
            Float8BlockQuantizer(rowwise=False),
            offsets(),
            torch.bfloat16,
            False,
        ),
        "gemm_grouped_kernel -> c",
    ),
    "gemm_grouped_mxfp8": (
        te.grouped_gemm,
        lambda: (
            [f8(19, 64), u8(128, 4)],
            MXFP8Quantizer(columnwise=False),
            [f8(384, 64), u8(384, 4)],
            MXFP8Quantizer(columnwise=False),
            offsets(),
            torch.bfloat16,
            False,
        ),
        "gemm_grouped_mxfp8_kernel -> c",
    ),
    "gemm_grouped_mxfp8_columns": (
        te.grouped_gemm,
        lambda: (
            [f8(384, 64), u8(12, 128)],
            MXFP8Quantizer(rowwise=False),
            [f8(384, 128), u8(12, 128)],
            MXFP8Quantizer(rowwise=False),
            offsets(),
            torch.bfloat16,
            False,
        ),
        "gemm_grouped_mxfp8_kernel -> c",
    ),
    "amax_bits_of_parts": (te.amax_bits_of_parts, lambda: (bf16(19, 64), [7, 12]), ""),
    "quantize_parts": (te.quantize_parts, lambda: (bf16(19, 64), [7, 12], f32(2), f32(1), ROWS), ""),
    "quantize_group_columns 1x128": (
        te.quantize_group_columns,
        lambda: (bf16(19, 64), offsets(), Float8BlockQuantizer(rowwise=False)),
        "quantize_block_kernel -> transpose, columnwise_scale_inv",
    ),
    "quantize_group_columns mxfp8": (
        te.quantize_group_columns,
        lambda: (bf16(19, 64), offsets(), MXFP8Quantizer(rowwise=False)),
        "quantize_mxfp8_kernel -> columnwise_data, columnwise_scale_inv",
    ),
    "quantize_group_columns mxfp8 128": (
        te.quantize_group_columns,
        lambda: (bf16(19, 64), offsets(), MXFP8Quantizer(rowwise=False, scale_block=128)),
        "quantize_block_kernel -> transpose, columnwise_scale_inv",
    ),
    "grouped_linear": (
        te.grouped_linear,
        lambda: (bf16(19, 64), bf16(3, 32, 64), offsets(), GROUPED_LINEAR),
        "quantize_amax_kernel -> partials\nquantize_cast_kernel -> data, transpose, scale_inv\n"
        "quantize_amax_kernel -> partials\nquantize_cast_kernel -> data, transpose, scale_inv\n"
        "gemm_grouped_kernel -> c",
    ),
    "grouped_linear_with_workspace": (
        te.grouped_linear_with_workspace,
        lambda: (bf16(19, 64), None, offsets(), GROUPED_LINEAR, [f8(3, 32, 64), f8(3, 64, 32), f32(3)]),
        "quantize_amax_kernel -> partials\nquantize_cast_kernel -> data, transpose, scale_inv\ngemm_grouped_kernel -> c",
    ),
    "quantize_bias_grad": (
        te.quantize_bias_grad,
        lambda: (bf16(19, 64), BOTH),
        "quantize_amax_kernel -> partials, sums\nquantize_cast_kernel -> data, transpose, scale_inv",
    ),
    "activation_backward_quantize": (
        te.activation_backward_quantize,
        lambda: (bf16(19, 64), bf16(19, 64), "gelu", BOTH, False, True),
        "produce_amax_kernel -> partials, sums\nproduce_write_kernel -> dbias, data, transpose, scale_inv",
    ),
    "gated": (te.gated, lambda: (bf16(19, 64), bf16(19, 64), "gelu"), "produce_write_kernel -> y"),
    "gated_quantize": (
        te.gated_quantize,
        lambda: (bf16(19, 64), bf16(19, 64), "gelu", BOTH, False),
        "produce_amax_kernel -> partials\nproduce_write_kernel -> data, transpose, scale_inv",
    ),
    "gated_quantize with amax": (
        te.gated_quantize,
        lambda: (bf16(19, 64), bf16(19, 64), "gelu", BOTH, False, f32(512)),
        "produce_write_kernel -> data, transpose, scale_inv",
    ),
    "gated_backward": (
        te.gated_backward,
        lambda: (bf16(19, 64), bf16(19, 64), bf16(19, 64), "gelu"),
        "produce_write_kernel -> y, second_y",
    ),
    "gated_backward_quantize": (
        te.gated_backward_quantize,
        lambda: (bf16(19, 64), bf16(19, 64), bf16(19, 64), "gelu", ROWS, False),
        "produce_amax_kernel -> partials, second_partials\n"
        "produce_write_kernel -> data, scale_inv, second_data, second_scale_inv",
    ),
    "gated_backward_quantize_halves": (
        te.gated_backward_quantize_halves,
        lambda: (bf16(19, 64), bf16(19, 64), bf16(19, 64), "gelu", BOTH, True, True),
        "produce_amax_kernel -> partials\nproduce_write_kernel -> y, data, transpose, scale_inv",
    ),
    "transpose": (te.transpose, lambda: (f8(19, 64),), "transpose_kernel -> transpose"),
    "quantize_rowwise": (
        te.quantize,
        lambda: (bf16(19, 64), Float8RowwiseQuantizer()),
        "quantize_rows_kernel -> data, scale_inv\nquantize_rows_kernel -> data, scale_inv",
    ),
    "gemm_rowwise": (
        te.gemm,
        lambda: ([f8(32, 64), f32(32)], BY_ROWS, [f8(48, 64), f32(48)], BY_ROWS, torch.bfloat16, False, None),
        "gemm_kernel -> c",
    ),
    "quantize_block": (
        te.quantize,
        lambda: (bf16(19, 64), Float8BlockQuantizer()),
        "quantize_block_kernel -> data, scale_inv, transpose, columnwise_scale_inv",
    ),
    "quantize_block_2d_rows": (
        te.quantize,
        lambda: (bf16(19, 64), Float8BlockQuantizer(columnwise=False, block_dims=2)),
        "quantize_block_kernel -> data, scale_inv",
    ),
    "quantize_mxfp8_columns": (
        te.quantize,
        lambda: (bf16(19, 64), MXFP8Quantizer(rowwise=False)),
        "quantize_mxfp8_kernel -> columnwise_data, columnwise_scale_inv",
    ),
    "quantize_mxfp8_128": (
        te.quantize,
        lambda: (bf16(19, 64), MXFP8Quantizer(scale_block=128)),
        "quantize_block_kernel -> data, scale_inv, transpose, columnwise_scale_inv",
    ),
    "quantize_mxfp8_swizzled": (
        te.quantize,
        lambda: (bf16(19, 64), MXFP8Quantizer(swizzled=True)),
        "quantize_mxfp8_kernel -> data, scale_inv, columnwise_data, columnwise_scale_inv",
    ),
    "quantize_mxfp8_128_swizzled": (
        te.quantize,
        lambda: (bf16(19, 64), MXFP8Quantizer(scale_block=128, swizzled=True)),
        "quantize_block_kernel -> data, scale_inv, transpose, columnwise_scale_inv",
    ),
    "quantize_nvfp4_swizzled": (
        te.quantize,
        lambda: (bf16(19, 48), NVFP4Quantizer(swizzled=True)),
        "quantize_amax_kernel -> partials\n"
        "quantize_nvfp4_kernel -> data, scale_inv, amax, columnwise_data, columnwise_scale_inv, columnwise_amax",
    ),
    "quantize_nvfp4": (
        te.quantize,
        lambda: (bf16(19, 64), NVFP4Quantizer(hadamard=True, stochastic_rounding=True), key()),
        "hadamard_amax_kernel -> partials, columnwise_partials\n"
        "quantize_nvfp4_kernel -> data, scale_inv, amax, columnwise_data, columnwise_scale_inv, columnwise_amax",
    ),
    "gemm_block": (
        te.gemm,
        lambda: ([f8(19, 64), f32(1, 20)], BLOCKS, [f8(32, 64), f32(1, 4)], BLOCKS_2D, torch.bfloat16, False, bf16(32)),
        "gemm_kernel -> c",
    ),
    "gemm_block_e8m0": (
        te.gemm,
        lambda: ([f8(19, 64), u8(128, 4)], MXFP8_128, [f8(32, 64), u8(128, 4)], MXFP8_128, torch.bfloat16, False),
        "gemm_kernel -> c",
    ),
    "gemm_mxfp8": (
        te.gemm,
        lambda: (
            [f8(64, 32), u8(4, 128)],
            MXFP8Quantizer(rowwise=False),
            [f8(64, 32), u8(4, 128)],
            MXFP8Quantizer(rowwise=False),
            torch.bfloat16,
            False,
        ),
        "dequantize_mxfp8_kernel -> values\ndequantize_mxfp8_kernel -> values",
    ),
    "gemm_nvfp4": (
        te.gemm,
        lambda: (
            [u8(19, 32), u8(128, 4), f32(1)],
            NVFP4Quantizer(columnwise=False),
            [u8(32, 32), u8(128, 4), f32(1)],
            NVFP4Quantizer(columnwise=False),
            torch.bfloat16,
            False,
            bf16(32),
        ),
        "dequantize_nvfp4_kernel -> y\ndequantize_nvfp4_kernel -> y\nnvfp4_epilogue_kernel -> c",
    ),
    "add_bias": (te.add_bias, lambda: (f32(19, 64), bf16(64), torch.bfloat16), ""),
    "bias_grad": (te.bias_grad, lambda: (bf16(19, 64),), ""),
    "amax": (te.amax, lambda: (bf16(19, 64),), ""),
    # These are expanded before autograd ends; one that slipped through must still become kernels.
    "gelu": (te.gelu, lambda: (bf16(19, 64), "none"), "produce_write_kernel -> y"),
    "quick_gelu": (te.quick_gelu, lambda: (bf16(19, 64),), "produce_write_kernel -> y"),
    "silu": (te.silu, lambda: (bf16(19, 64),), "produce_write_kernel -> y"),
    "relu": (te.relu, lambda: (bf16(19, 64),), "produce_write_kernel -> y"),
    "relu2": (te.relu2, lambda: (bf16(19, 64),), "produce_write_kernel -> y"),
    "linear": (
        te.linear,
        lambda: (bf16(2, 8, 64), bf16(32, 64), bf16(32), LINEAR),
        "quantize_amax_kernel -> partials\nquantize_cast_kernel -> data, transpose, scale_inv\n"
        "quantize_amax_kernel -> partials\nquantize_cast_kernel -> data, transpose, scale_inv\ngemm_kernel -> c",
    ),
    "linear_with_workspace": (
        te.linear_with_workspace,
        lambda: (bf16(2, 8, 64), None, bf16(32), LINEAR, [f8(32, 64), f8(64, 32), f32(1)]),
        "quantize_amax_kernel -> partials\nquantize_cast_kernel -> data, transpose, scale_inv\ngemm_kernel -> c",
    ),
    "gemm of a few rows": (
        te.gemm,
        lambda: ([f8(16, 8192), f32(1)], ROWS, [f8(1024, 8192), f32(1)], ROWS, torch.bfloat16, True),
        "gemm_decode_kernel -> c\ngemm_reduce_kernel -> c",
    ),
    "gemm_add": (
        te.gemm,
        lambda: ([f8(19, 64), f32(1)], ROWS, [f8(32, 64), f32(1)], ROWS, torch.bfloat16, True, bf16(32), bf16(19, 32)),
        "gemm_kernel -> c",
    ),
    "gemm_add, K in parts": (
        te.gemm,
        lambda: (
            [f8(128, 8192), f32(1)],
            ROWS,
            [f8(256, 8192), f32(1)],
            ROWS,
            torch.bfloat16,
            True,
            None,
            bf16(128, 256),
        ),
        "gemm_kernel -> c\ngemm_reduce_kernel -> c",
    ),
    "gemm_add of a few rows": (
        te.gemm,
        lambda: (
            [f8(16, 1024), f32(1)],
            ROWS,
            [f8(4096, 1024), f32(1)],
            ROWS,
            torch.bfloat16,
            True,
            None,
            bf16(16, 4096),
        ),
        "gemm_decode_kernel -> c",
    ),
    "gemm_add of rows that are no vectors": (
        te.gemm,
        lambda: ([f8(19, 64), f32(1)], ROWS, [f8(33, 64), f32(1)], ROWS, torch.bfloat16, True, None, bf16(19, 33)),
        "gemm_kernel -> c",
    ),
    "gemm_amax of a few rows": (
        te.gemm_amax,
        lambda: ([f8(16, 1024), f32(1)], ROWS, [f8(4096, 1024), f32(1)], ROWS, torch.bfloat16, True, bf16(4096)),
        "gemm_decode_kernel -> c, partials",
    ),
    "gemm_amax of a few rows, K in parts": (
        te.gemm_amax,
        lambda: ([f8(16, 8192), f32(1)], ROWS, [f8(1024, 8192), f32(1)], ROWS, torch.bfloat16, True),
        "gemm_decode_kernel -> c\ngemm_reduce_kernel -> c, partials",
    ),
    "gemm_amax": (
        te.gemm_amax,
        lambda: ([f8(16, 64), f32(1)], ROWS, [f8(32, 64), f32(1)], ROWS, torch.bfloat16, True),
        "gemm_kernel -> c\nquantize_amax_kernel -> partials",
    ),
    "gemm_gated of a few rows": (
        te.gemm_gated,
        lambda: ([f8(16, 512), f32(1)], ROWS, [f8(28672, 512), f32(2)], ROWS, True, 0, "silu"),
        "gemm_decode_gated_kernel -> c, partials",
    ),
    "quantize_with_amax": (
        te.quantize_with_amax,
        lambda: (bf16(16, 64), BOTH.with_usage(columnwise=False), f32(512)),
        "quantize_cast_kernel -> data, scale_inv",
    ),
    "gemm_stacked of a few rows": (
        te.gemm,
        lambda: (
            [f8(16, 512), f32(1)],
            ROWS,
            [f8(28672, 512), f32(2)],
            ROWS,
            torch.bfloat16,
            True,
            None,
            None,
            "N",
            [14336, 14336],
        ),
        "gemm_decode_kernel -> c",
    ),
}
