"""The MXFP8 kernels' machine code for Hopper and Blackwell, and what torch reads of them, without a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
from helpers.kernels.compiled_cases import (
    Case,
    HopperDriver,
    check_machine_code,
    compile_case,
    padded_order_arguments,
    written,
)
from helpers.kernels.gemms import gemm_mxfp8
from helpers.slow import slow_but
from torch._dynamo.source import ConstantSource
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from te_dynamo.kernels.layouts.mxfp8 import SCALE_BLOCKS, MXFP8Form
from te_dynamo.kernels.quantize import mxfp8
from te_dynamo.kernels.runtime.target import TARGETS

H200 = TARGETS["h200"]

USAGES = ((True, True), (True, False), (False, True))
INPUTS = {"*bf16": 2, "*fp16": 2, "*fp32": 4}
"""Type -> bytes of an element."""


# --- machine code -------------------------------------------------------------------------------------------


def quantize_case(
    scale_block: int,
    usage: tuple[bool, bool],
    x: str = "*bf16",
    fp8: str = "*fp8e4nv",
    capability: int = 90,
    aligned_k: bool = True,
    whole: bool = True,
    swizzled: bool = False,
    groups: int = 0,
    two_d: bool = False,
) -> Case:
    packed = x == "*bf16" and aligned_k
    turned = scale_block == 128 and (usage[1] or two_d)
    order, constant_order = padded_order_arguments(groups)
    columnwise_data = "transpose" if turned else "columnwise_data"
    pointers = {"x": x, "data": fp8, "scale_inv": "*u8", columnwise_data: fp8, "columnwise_scale_inv": "*u8"}
    constants: dict[str, Any] = {"FMAX": 448.0 if fp8 == "*fp8e4nv" else 57344.0}
    constants |= {"ROWWISE": usage[0], "COLUMNWISE": usage[1], "PACKED": packed, "WHOLE": packed and whole}
    constants |= constant_order
    if turned:
        _, group, warps = mxfp8.tile_128(packed)
        constants |= {
            "SCALING": f"e8m0{' 128x128' * two_d}{' swizzled' * swizzled}",
            "EPS": 0.0,
            "POWER_OF_TWO": True,
            "LARGEST": 0.0,
        }
        constants |= {"ROWS": 128, "GROUP_M": group, "num_warps": warps}
    else:
        columns = 4096 if aligned_k else 4095
        block_m, block_k, warps = (
            mxfp8.tile_32(columns) if usage[1] or two_d else mxfp8.row_tile(columns, packed, swizzled)
        )
        constants |= {"SCALE_BLOCK": scale_block, "BLOCK_M": block_m, "BLOCK_K": block_k, "num_warps": warps}
        constants |= {"SWIZZLED": swizzled, "TWO_D": two_d, "GROUP_M": 1}
    kind = "e4m3x2" if fp8 == "*fp8e4nv" else "e5m2x2"
    form = MXFP8Form(torch.float8_e4m3fn, *usage, scale_block, two_d=two_d)
    writes = (columnwise_data if name == "columnwise_data" else name for name in form.buffers((1, 1)))
    return Case(
        name=f"quantize {scale_block} {usage} {x} {fp8} {aligned_k=} {whole=} {swizzled=} {groups=} {two_d=} sm_{capability}",
        kernel=mxfp8.quantize_block_kernel if turned else mxfp8.quantize_mxfp8_kernel,
        args={**pointers, "M": "i32", "K": "i32", **order},
        constants=constants,
        aligned=(*pointers, "K") if aligned_k else tuple(pointers),
        has=(
            f"cvt.rn.satfinite.{kind}.f32",
            *(
                ("ld.global.v4", "st.global.v4" if (turned and usage[1]) or not packed else "st.global.v2")
                if aligned_k
                else ()
            ),
            # Two values an instruction.
            *(("mul.rn.bf16x2", "max.u16x2") if packed else ()),
            # Words of codes wait in the cache for those beside them.
            *(("L2::cache_hint",) if turned else ()),
        ),
        # A scale of 2^-127 and values near it are denormals.
        lacks=(".ftz", "div.full", "div.rn"),
        writes=tuple(sorted(writes)),
        capability=capability,
    )


def cases() -> Iterator[Case]:
    for scale_block in SCALE_BLOCKS:
        for x, itemsize in INPUTS.items():
            forms = [MXFP8Form(torch.float8_e4m3fn, *usage, scale_block) for usage in USAGES]
            usages = {tuple(usage.values()) for form in forms for usage in form.launches(itemsize)}
            for usage in sorted(usages):
                yield quantize_case(scale_block, usage, x)
        yield quantize_case(scale_block, (True, True), fp8="*fp8e5")
        yield quantize_case(scale_block, (True, True), whole=False)
        yield quantize_case(scale_block, (True, True), aligned_k=False)
        yield quantize_case(scale_block, (False, True), whole=False, groups=8)
        for usage in ((True, True), (True, False)):
            yield quantize_case(scale_block, usage, capability=100, swizzled=True)
            for x in INPUTS if scale_block == 32 or not all(usage) else ("*bf16", "*fp16"):
                yield quantize_case(scale_block, usage, x, two_d=True)
            yield quantize_case(scale_block, usage, whole=False, two_d=True)
            yield quantize_case(scale_block, usage, capability=100, swizzled=True, two_d=True)
        yield quantize_case(scale_block, (False, True), two_d=True)
    for columnwise in (False, True):
        for values in ("*bf16", "*fp32"):
            yield Case(
                name=f"dequantize {columnwise=} {values}",
                kernel=mxfp8.dequantize_mxfp8_kernel,
                args={"data": "*fp8e4nv", "scale_inv": "*u8", "values": values, "M": "i32", "K": "i32"},
                constants={"COLUMNWISE": columnwise, "BLOCK_M": 32, "BLOCK_K": 128, "num_warps": 4},
                aligned=("data", "scale_inv", "values", "K"),
                has=("ld.global.v4", "st.global.v4"),
                lacks=(".ftz",),
                writes=("values",),
            )


CASES = list(cases())


@pytest.mark.one_fast_case
@pytest.mark.parametrize("case", slow_but(4, CASES), ids=lambda case: case.name)
def test_machine_code(case: Case) -> None:
    check_machine_code(case)


@pytest.mark.parametrize("case", [case for case in CASES if case.capability == 90], ids=lambda case: case.name)
def test_torch_sees_what_the_kernel_writes(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tuple(sorted(written(case, monkeypatch))) == case.writes


@pytest.mark.one_fast_case
@pytest.mark.parametrize("scale_block", SCALE_BLOCKS)
def test_one_row_is_no_special_case(scale_block: int) -> None:
    """Triton makes a constant of an integer argument that is 1."""
    case = quantize_case(scale_block, (True, True))
    constant = dataclasses.replace(
        case,
        args={name: kind for name, kind in case.args.items() if name != "M"},
        constants={**case.constants, "M": 1},
    )
    assert compile_case(constant).spills == 0


# --- tracing ------------------------------------------------------------------------------------------------


def quantize_both(x: torch.Tensor, scale_block: int) -> list[torch.Tensor]:
    return mxfp8.quantize_mxfp8(x, MXFP8Form(torch.float8_e4m3fn, True, True, scale_block))


def linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> list[torch.Tensor]:
    a, b = (mxfp8.quantize_mxfp8(t, MXFP8Form(torch.float8_e4m3fn, True, False, 32)) for t in (x, w))
    return [gemm_mxfp8(*a, *b, bias, torch.bfloat16, False, False)]


WRITES = {
    "32": ["columnwise_data", "columnwise_scale_inv", "data", "scale_inv"],
    "128": ["columnwise_scale_inv", "data", "scale_inv", "transpose"],
    "row": ["data", "scale_inv"],
}
LAUNCHERS = {
    "quantize 32": (lambda x, w, bias: quantize_both(x, 32), [WRITES["32"]]),
    "quantize 128": (lambda x, w, bias: quantize_both(x, 128), [WRITES["128"]]),
    "gemm": (lambda x, w, bias: linear(x, w, None), [WRITES["row"], WRITES["row"], ["values"], ["values"]]),
    "gemm with bias": (lambda x, w, bias: linear(x, w, bias), [WRITES["row"], WRITES["row"], ["values"], ["values"]]),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", LAUNCHERS)
def test_launcher_traces_with_exact_mutations_and_no_guards(name, dynamic, monkeypatch):
    function, expected = LAUNCHERS[name]
    environment = ShapeEnv()
    symbol = environment.create_symbol(8, ConstantSource("rows"), dynamic_dim=DimDynamic.DYNAMIC)
    rows = environment.create_symintnode(symbol, hint=8) if dynamic else 8
    if not torch.cuda.is_available():
        monkeypatch.setattr(triton.runtime.driver, "_active", HopperDriver())
    with FakeTensorMode(shape_env=environment):
        shapes = [(rows, 128), (256, 128), (256,)]
        inputs = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes]
        graph = make_fx(dispatch_functionalize(function), tracing_mode="real")(*inputs)
    launches = [node for node in graph.graph.nodes if "triton_kernel_wrapper_functional" in str(node.target)]
    assert [sorted(node.kwargs["tensors_to_clone"]) for node in launches] == expected
    assert not environment.guards


def test_hopper_multiplies_bf16(monkeypatch):
    """The emulation: two dequantizations and a product of aten, none of it `dot_scaled`."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(triton.runtime.driver, "_active", HopperDriver())
    monkeypatch.setattr("te_dynamo.kernels.gemm.multiply.target_of", lambda device: H200)
    with FakeTensorMode():
        x, w = (torch.empty(256, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        graph = make_fx(dispatch_functionalize(lambda x, w: linear(x, w, None)), tracing_mode="real")(x, w)
    launches = [node for node in graph.graph.nodes if "triton_kernel_wrapper" in str(node.target)]
    kernels = [kernel_side_table.get_kernel(node.kwargs["kernel_idx"]) for node in launches]
    names = {getattr(kernel, "fn", kernel).__name__ for kernel in kernels}
    assert names == {"quantize_mxfp8_kernel", "dequantize_mxfp8_kernel"}
    assert [str(node.target) for node in graph.graph.nodes if "aten.mm" in str(node.target)] == ["aten.mm.default"]
