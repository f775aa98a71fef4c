"""The quantizing kernels, compiled for sm_90 and traced for Inductor without a GPU."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
import triton
from helpers.kernels.compiled_quantize import (
    NOT_BY_ROWS,
    POINTERS,
    TARGET,
    assert_no_spills,
    compile_kernel,
    reduction_layouts,
    source,
)
from helpers.slow import slow_but
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from triton.backends.compiler import GPUTarget

from te_dynamo.kernels.activation import activation, gated, gated_halves
from te_dynamo.kernels.layouts.block import BlockForm
from te_dynamo.kernels.layouts.tensor import TensorForm
from te_dynamo.kernels.norm import kernels as norm_kernels
from te_dynamo.kernels.norm import norm
from te_dynamo.kernels.produce import tensor, tensor_kernels
from te_dynamo.kernels.quantize import current as quantize
from te_dynamo.kernels.quantize import current_kernels
from te_dynamo.lowering.inductor.install import install
from te_dynamo.torch_private.private import compiling_ours

E4M3 = torch.float8_e4m3fn
FORM = TensorForm(E4M3, True, True)
POINTERS |= {f"{name}scale_inv" for name in ("", "second_")}  # fp32 whatever the model's dtype


# --- compilation --------------------------------------------------------------------------------------------


CAST = {"FMAX": 448.0, "EPS": 0.0, "POWER_OF_TWO": False}
BOTH = {**CAST, "ROWWISE": True, "COLUMNWISE": True}


GATES = ("silu", "gelu", "identity")
"""The kind that is used most and the one that takes the most registers; test_compiled_gated.py compiles every kind."""


SOURCES = [
    *itertools.product(("activation", "activation_backward"), activation.KINDS),
    *itertools.product(("gated", "gated_backward"), GATES),
]


def tiled(tile: quantize.Tile, **constants: Any) -> tuple[dict[str, Any], int]:
    return {**constants, "BLOCK_M": tile[0], "BLOCK_K": tile[1]}, tile[2]


def amax_cases():
    for group in (0, quantize.GROUP_PARTIALS):
        yield current_kernels.quantize_amax_kernel, *tiled(quantize.amax_tile(4096), GROUP=group, PARTS=0)
    yield current_kernels.quantize_amaxes_kernel, {"BLOCK": 4096}, 8
    for name, kind in SOURCES:
        for together in (False, True)[: 1 + (name == "gated_backward")]:
            flags = {**source(name, kind), "TOGETHER": together, "PARTS": 0}
            yield tensor_kernels.produce_amax_kernel, *tiled(quantize.amax_tile(4096), **flags)
        if name == "activation_backward":
            *tile, parts = quantize.stripes(4096)
            yield tensor_kernels.produce_amax_kernel, *tiled((*tile, 8), **flags | {"PARTS": parts})


def cast_cases(rows: int, columnwise: bool = True, dtype: str = "bf16"):
    norms = {**BOTH, "COLUMNWISE": columnwise, "PARTIALS": 1024}
    partials = {**norms, "PARTIALS": quantize.PARTIALS, "PASS": "known"}
    one = quantize.cast_tile(rows, 4096, columnwise)
    for groups in ({"GROUPED": False, "G": 1}, {"GROUPED": True, "PARTIALS": quantize.GROUP_PARTIALS}):
        yield current_kernels.quantize_cast_kernel, *tiled(one, EARLY=False, **partials | groups)
    for name, kind in SOURCES:
        itemsize, both = 4 if dtype == "fp32" else 2, name == "gated_backward"
        tile = tensor.write_tile(name, itemsize, (rows, 4096), columnwise, name == "gated", False)
        for stacked, half in ((False, -1), (True, -1), (False, 0), (False, 1))[: 4 if both else 1]:
            flags = {"KEEP_OUTPUT": True, "EARLY": False, "STACKED": stacked, "HALF": half}
            flags |= {**source(name, kind, dtype), "PARTS": 32 if name == "activation_backward" else 0}
            yield tensor_kernels.produce_write_kernel, *tiled(tile, **flags, **partials)
    # Under autocast fp32 is rounded to bf16, and the residual stream may read it in fp32.
    for layer, to in itertools.product((False, True), ("fp32", "bf16") if dtype == "fp32" else (dtype,)):
        flags = {"LAYER": layer, "HAS_WEIGHT": True, "HAS_BIAS": layer, "CAST_BEFORE_WEIGHT": not layer}
        flags |= {"ZERO_CENTERED": False, "KEEP_OUTPUT": True, "ROUNDED_TO": to, **norms}
        default = norm_kernels.CAST_TILE if to == dtype else norm_kernels.SMALL_CAST_TILE
        tile = quantize.cast_tile(rows, 4096, columnwise, default)
        yield norm_kernels.norm_cast_kernel, *tiled(tile, MODULATED=False, **flags)


def name_of(value: Any) -> str | None:
    if hasattr(value, "fn"):
        return value.fn.__name__.removesuffix("_kernel")
    if isinstance(value, dict):
        flags = [
            value.get("SOURCE", ""),
            value.get("KIND", ""),
            "layer" if value.get("LAYER") else "",
            "groups" if value.get("GROUP") or value.get("GROUPED") else "",
        ]
        return "-".join(filter(None, flags))
    return None


@pytest.mark.parametrize("kernel, constants, warps", slow_but(5, amax_cases()), ids=name_of)
def test_amax_kernel_has_wide_loads_and_no_spills(kernel, constants, warps, tmp_path):
    compiled = compile_kernel(kernel, constants, warps)
    assert set(re.findall(r"ld\.global\S*?\.(v4|v2|b16|b32|b64)\b", compiled.asm["ptx"])) == {"v4"}
    assert_no_spills(compiled, tmp_path)


@pytest.mark.one_fast_case
@pytest.mark.parametrize("kernel, constants, warps", slow_but(5, cast_cases(8192)), ids=name_of)
def test_cast_kernel_has_wide_loads_and_stores_and_no_spills(kernel, constants, warps, tmp_path):
    compiled = compile_kernel(kernel, constants, warps)
    ptx = compiled.asm["ptx"]
    assert "ld.global.v4" in ptx and "st.global.v4" in ptx
    assert not re.search(r"(ld|st)\.global\S*\.b(8|16)\b", ptx)
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx and "div.rn.f32" in ptx
    assert_no_spills(compiled, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("block", [32, 8192])
def test_the_kernel_of_few_values_compiles(block, dtype, tmp_path):
    for size in ({}, {"SIZE": 1}):  # Triton makes a constant of an integer argument that is 1
        constants = {**CAST, "BLOCK": block, **size}
        assert_no_spills(
            compile_kernel(current_kernels.quantize_few_kernel, constants, max(block // 1024, 1), dtype), tmp_path
        )


def one_pass_cases():
    stacked = {"BY_COLUMNS": True, **BOTH, "PARTIALS": quantize.PARTIALS, "PASS": "known"}
    cases = [*cast_cases(8192), (current_kernels.quantize_stacked_kernel, *tiled(quantize.CAST_TILE, **stacked))]
    for kernel, constants, warps in cases:
        if "PASS" in kernel.arg_names and not constants.get("GROUPED"):
            kept = {"KEEP_OUTPUT": False} if "KEEP_OUTPUT" in constants else {}
            sums = {"PARTS": 0} if "PARTS" in constants else {}
            guess = {**constants, **sums, "PASS": "guess", "POWER_OF_TWO": True, "PARTIALS": 2048}
            if constants.get("SOURCE") == "activation":
                guess["BLOCK_M"], _, _ = tensor.write_tile("activation", 2, (8192, 4096), True, True, True)
            yield kernel, guess, warps
            yield kernel, {**guess, **kept, "PASS": "mend"}, warps


@pytest.mark.one_fast_case
@pytest.mark.parametrize("kernel, constants, warps", slow_but(1, one_pass_cases()), ids=name_of)
def test_one_pass_has_no_spills(kernel, constants, warps, tmp_path):
    compiled = compile_kernel(kernel, constants, warps)
    assert "st.global.v4" in compiled.asm["ptx"] and "ld.global.v4" in compiled.asm["ptx"]
    assert_no_spills(compiled, tmp_path)


CASTS = (8192, True, "fp32"), (64, False, "fp16")
"""Those that hold most, and least."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "columnwise", "dtype"),
    [
        pytest.param(*tile, dtype, marks=() if (*tile, dtype) in CASTS else pytest.mark.exhaustive)
        for tile in ((8192, True), (64, True), (64, False))
        for dtype in ("fp16", "fp32")
    ],
)
def test_cast_kernels_compile_for_other_dtypes_and_tiles(rows, columnwise, dtype, tmp_path):
    itemsize = 4 if dtype == "fp32" else 2
    cases = list(cast_cases(rows, columnwise, dtype))
    for kernel, constants, warps in cases[:: 3 if dtype == "fp16" else 1]:  # fp16 is as wide as bf16, above
        for usage in TensorForm(torch.float8_e4m3fn, True, columnwise).launches(itemsize):
            launched = {**constants, **usage}
            # Triton 3.6 spills two words of a norm's fp32 rows.
            assert_no_spills(compile_kernel(kernel, launched, warps, dtype, "fp32"), tmp_path, allowed=8)


@pytest.mark.one_fast_case
@pytest.mark.parametrize("layer", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize(
    "dtype, weight, to",
    [("bf16", "bf16", "bf16"), ("bf16", "fp32", "bf16"), ("fp32", "fp32", "fp32"), ("fp32", "fp32", "bf16")],
)
@pytest.mark.parametrize("columns", slow_but(1, [4096, 300, 16384, 32768]))
def test_fused_and_unfused_norm_add_up_in_the_same_order(columns, dtype, weight, to, layer, tmp_path):
    block, warps = norm_kernels.row_block(columns, 4 if dtype == "fp32" else 2, layer)
    flags = {"LAYER": layer, "HAS_WEIGHT": True, "HAS_BIAS": layer, "CAST_BEFORE_WEIGHT": not layer}
    flags |= {"ZERO_CENTERED": False, "EPS_NORM": 1e-5, "ONE_BLOCK": columns <= block, "BLOCK": block}
    flags |= {"PARTIALS": 1024, "ADDS": False, "MODULATED": False, **NOT_BY_ROWS}
    # The result's dtype, whether it is stored, whether it is quantized, and the values of a row's scale.
    forms: list[tuple] = [(to, True, False), (to, dtype != to, True)]
    forms += [(to, False, True, group) for group in (block, 128) if columns <= block]
    if dtype != to:  # what reads the norm in its own dtype too has the statistics of the norm that gives nothing else
        forms += [(dtype, True, False), (to, False, True)]
    forms += [(to, False, False)]  # its statistics alone, of which blocks are made
    layouts, contractions = [], []
    for rounded_to, stores, quantizes, *groups in forms:
        launched = {**flags, "ROUNDED_TO": rounded_to, "STORES": stores, "QUANTIZE": quantizes}
        if groups:
            by_columns = groups[0] == block
            launched |= {"SCALE_BLOCK": groups[0], "ROWWISE": True, "BY_COLUMNS": by_columns, "QUANTIZE": by_columns}
        compiled = compile_kernel(norm_kernels.norm_rows_kernel, launched, warps, dtype, weight, y=rounded_to)
        layouts.append(reduction_layouts(compiled))
        contractions.append(compiled.asm["ptx"].count("fma.rn.f32"))
        # 16 warps have 128 registers a thread for a row of 16384 and the next one: from Triton 3.8 on a few words spill.
        assert_no_spills(compiled, tmp_path, allowed=0 if columns <= 8192 else 64)
    assert all(layout == layouts[0] for layout in layouts) and len(layouts[0]) == 1 + layer
    assert len(set(contractions[:-1])) == 1  # those that the source asks for


# --- tracing ------------------------------------------------------------------------------------------------


class Sm90Driver:
    """What tracing asks of the GPU's driver: only its name."""

    def get_current_target(self) -> GPUTarget:
        return TARGET


LAUNCHERS = {
    "quantize": (
        lambda x: quantize.quantize(x, FORM),
        [(8, 128)],
        [["partials"], ["data", "transpose", "scale_inv"]],
    ),
    "quantize_rowwise": (
        lambda x: quantize.quantize(x, TensorForm(E4M3, True, False)),
        [(8, 16384)],
        [["partials"], ["data", "scale_inv"]],
    ),
    "rms_norm": (
        lambda x, w: norm.rms_norm(x, w, 1e-5, True, False),
        [(8, 128), (128,)],
        [["y", "rstd"]],
    ),
    "layer_norm_quantize": (
        lambda x, w, b: norm.layer_norm_quantize(x, w, b, 1e-5, FORM, True),
        [(8, 128), (128,), (128,)],
        [["mean", "rstd", "partials"], ["y", "data", "transpose", "scale_inv"]],
    ),
    "rms_norm_quantize, rows of 1x128": (
        lambda x, w: norm.rms_norm_quantize(x, w, 1e-5, True, False, BlockForm(E4M3, True, False, False), False),
        [(8, 128), (128,)],
        [["rstd", "data", "scale_inv"]],
    ),
    "activation": (lambda x: activation.activation(x, "gelu"), [(8, 128)], [["y"]]),
    "activation_backward_quantize": (
        lambda dy, x: activation.activation_backward_quantize(dy, x, "gelu", FORM, False, True),
        [(8, 128), (8, 128)],
        [["partials", "sums"], ["dbias", "data", "transpose", "scale_inv"]],
    ),
    "gated_quantize": (
        lambda both: gated.gated_quantize(both.narrow(-1, 0, 64), both.narrow(-1, 64, 64), "gelu", FORM, False),
        [(2, 4, 128)],
        [["partials"], ["data", "transpose", "scale_inv"]],
    ),
    "gated_backward_quantize": (
        lambda dy, gate, up: gated.gated_backward_quantize(dy, gate, up, "gelu", FORM, True),
        [(8, 128)] * 3,
        [
            ["partials", "second_partials"],
            [f"{which}{name}" for which in ("", "second_") for name in ("y", "data", "transpose", "scale_inv")],
        ],
    ),
    "gated_backward_quantize_halves": (
        lambda dy, h: gated_halves.gated_backward_quantize_halves(dy, *h.chunk(2, -1), "gelu", FORM, False, False),
        [(8, 128), (8, 256)],
        [["partials"], ["data", "transpose", "scale_inv"]],
    ),
}


def written_without_guards(function, shapes, dynamic: bool) -> list[list[str]]:
    """What each launch of function, on bf16 tensors of those shapes, the first dimension a symbol if `dynamic`, writes."""
    install()
    environment = ShapeEnv()
    symbol = environment.create_symbol(8, ConstantSource("rows"), dynamic_dim=DimDynamic.DYNAMIC)
    rows = environment.create_symintnode(symbol, hint=8) if dynamic else 8
    previous = triton.runtime.driver._active
    triton.runtime.driver.set_active(Sm90Driver())
    try:
        # As a compiled graph's: torch alone cannot read a kernel that waits for its predecessor.
        with compiling_ours(), FakeTensorMode(shape_env=environment):
            shapes = [(rows, *shape[1:]) if len(shape) > 1 else shape for shape in shapes]
            inputs = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes]
            graph = make_fx(dispatch_functionalize(function), tracing_mode="real")(*inputs)
    finally:
        triton.runtime.driver._active = previous
    launches = [node for node in graph.graph.nodes if "triton_kernel_wrapper_functional" in str(node.target)]
    assert not environment.guards
    return [sorted(node.kwargs["tensors_to_clone"]) for node in launches]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", LAUNCHERS)
def test_launcher_traces_with_exact_mutations_and_no_guards(name, dynamic):
    function, shapes, expected = LAUNCHERS[name]
    assert written_without_guards(function, shapes, dynamic) == [sorted(names) for names in expected]


def test_few_values_are_one_launch_where_their_number_is_known():
    rows, _, _ = LAUNCHERS["quantize_rowwise"]
    assert written_without_guards(rows, [(8, 128)], dynamic=False) == [["data", "scale_inv"]]
    assert written_without_guards(rows, [(8, 128)], dynamic=True) == [["partials"], ["data", "scale_inv"]]
