"""The GEMM of tensor cores with block scales, compiled for each of Blackwell's: their instruction, registers and shared memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
from helpers.kernels.compiled_cases import Case, HopperDriver, check_machine_code
from helpers.kernels.gemms import gemm_mxfp8, gemm_nvfp4
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from te_dynamo.kernels.gemm.block_scales import gemm_block_scales_kernel, multiplies_codes, tile
from te_dynamo.kernels.layouts.mxfp8 import MXFP8Form
from te_dynamo.kernels.layouts.nvfp4 import NVFP4Form
from te_dynamo.kernels.quantize.mxfp8 import quantize_mxfp8
from te_dynamo.kernels.quantize.nvfp4 import quantize_nvfp4
from te_dynamo.kernels.runtime.target import TARGETS, Target, acting_as, described

KB = 1024
THOR = described("Thor", (11, 0), 20, 227 * KB)
SPARK = described("GB10", (12, 1), 48, 99 * KB)
BLACKWELL = (TARGETS["b200"], TARGETS["gb300"], THOR, TARGETS["rtx5090"])

COPIES = "cp.async.bulk.tensor.5d"
"""How scales come."""


def case(target: Target, a: str, b: str, columnwise: tuple[bool, bool] = (False, False), c: str = "*bf16") -> Case:
    packed = a == "*u8"
    pointers = {"a": a, "a_scale_inv": "*u8", "a_amax": "*fp32", "b": b, "b_scale_inv": "*u8", "b_amax": "*fp32"}
    pointers |= {"bias": "*bf16", "c": c}
    if target.has_tensor_memory:
        kind = "mxf4nvf4.block_scale" if packed else "mxf8f6f4.block_scale"
        # Scales go from memory to the tensor core's own without a thread touching them.
        has = (f"tcgen05.mma.cta_group::1.kind::{kind}", "tcgen05.cp")
    else:
        kinds = {"*fp8e4nv": "e4m3", "*fp8e5": "e5m2"}
        has = (
            "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3"
            if packed
            else "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32."
            f"{kinds[a]}.{kinds[b]}.f32.ue8m0",
        )
    return Case(
        name=f"{target.arch} {a} {b} {columnwise} {c}",
        kernel=gemm_block_scales_kernel,
        args={**pointers, "M": "i32", "N": "i32", "K": "i32"},
        constants={
            **{"A_COLUMNWISE": columnwise[0], "B_COLUMNWISE": columnwise[1], "HAS_BIAS": c == "*fp32"},
            "addend": None,
            **tile(target, packed),
        },
        aligned=(*pointers, "N", "K"),
        has=(*has, COPIES),
        # What Triton makes of a kernel that asks for more tensor memory than there is.
        lacks=("trap;",),
        writes=("c",),
        capability=target.capability[0] * 10 + target.capability[1],
    )


def cases() -> Iterator[Any]:
    for target in BLACKWELL:
        yield pytest.param(target, case(target, "*u8", "*u8"), id=f"nvfp4 {target.arch}")
        yield pytest.param(target, case(target, "*u8", "*u8", c="*fp32"), id=f"nvfp4 bias {target.arch}")
        for columnwise in itertools.product((False, True), repeat=2):
            if multiplies_codes(target, columnwise[1]):
                yield pytest.param(
                    target, case(target, "*fp8e4nv", "*fp8e4nv", columnwise), id=f"mxfp8 {columnwise} {target.arch}"
                )
        yield pytest.param(target, case(target, "*fp8e5", "*fp8e4nv", c="*fp32"), id=f"mxfp8 e5m2 {target.arch}")


@pytest.mark.slow
@pytest.mark.parametrize("target, case", [*cases()])
def test_machine_code(target: Target, case: Case) -> None:
    report = check_machine_code(case, target.shared_bytes)
    # Of 16 or 32 values, as Triton 3.9 and as those before it write it.
    block = (".block16", "scale_vec::4X") if "*u8" in case.args["a"] else (".block32", "scale_vec::1X")
    assert any(text in report.ptx for text in block)


def test_who_multiplies_codes() -> None:
    """All four products on data centres' Blackwell; on consumers' those whose second operand is held by rows; none on Hopper."""
    assert all(multiplies_codes(target, columnwise) for target in BLACKWELL[:3] for columnwise in (False, True))
    assert multiplies_codes(TARGETS["rtx5090"], False) and not multiplies_codes(TARGETS["rtx5090"], True)
    assert not any(target.has_block_scales for target in (TARGETS["h200"], TARGETS["l40s"], SPARK))
    assert all(target.has_e2m1_casts for target in (*BLACKWELL, SPARK)) and not TARGETS["h200"].has_e2m1_casts


def products(scale_block: int, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """dy^T @ x in NVFP4 (scale_block=16) or MXFP8: the rows, of which there are any number, are contracted."""
    if scale_block == 16:
        operands = [t for v in (dy, x) for t in quantize_nvfp4(v, NVFP4Form(False, True, swizzled=True))]
        return [gemm_nvfp4(*operands, None, torch.bfloat16)]
    form = MXFP8Form(torch.float8_e4m3fn, False, True, scale_block, True)
    operands = [t for v in (dy, x) for t in quantize_mxfp8(v, form)]
    turned = scale_block == 32
    return [gemm_mxfp8(*operands, None, torch.bfloat16, turned, turned)]


@pytest.mark.parametrize("scale_block", [16, 32, 128])
def test_any_number_of_rows_is_one_graph(scale_block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A guard that a launcher adds in backward would never be checked."""
    environment = ShapeEnv()
    symbol = environment.create_symbol(8, ConstantSource("rows"), dynamic_dim=DimDynamic.DYNAMIC)
    rows = environment.create_symintnode(symbol, hint=8)
    monkeypatch.setattr(triton.runtime.driver, "_active", HopperDriver())
    with acting_as(TARGETS["b200"]), FakeTensorMode(shape_env=environment):
        inputs = [torch.empty(rows, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        function = dispatch_functionalize(lambda x, dy: products(scale_block, x, dy))
        graph = make_fx(function, tracing_mode="real")(*inputs)
    launches = [node for node in graph.graph.nodes if "triton_kernel_wrapper_functional" in str(node.target)]
    assert launches[-1].kwargs["tensors_to_clone"] == ["c"]
    assert not environment.guards
