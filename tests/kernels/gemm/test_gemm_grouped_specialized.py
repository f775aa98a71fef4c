"""The warp-specialized wgrad of a mixture's experts: when it is taken, its machine code, and on a GPU its numbers."""

from __future__ import annotations

import pytest
import torch
from helpers.kernels.compiled_cases import MIXES, SHARED_BYTES, TRITON_TYPES
from helpers.kernels.gemm_operands import OUT, relative_error
from helpers.kernels.gemms import gemm_grouped_columns, gemm_grouped_columns_reference, gemm_reference
from helpers.kernels.grouped_operands import column_operands, offsets
from helpers.models.snapshot_models import kernels_everywhere
from torch import fx

from te_dynamo.kernels.gemm.choose import Product, choose
from te_dynamo.kernels.gemm.specialized.grouped import (
    columns_specialized_options,
    columns_specialized_out,
    gemm_grouped_columns_specialized_kernel,
)
from te_dynamo.kernels.gemm.specialized.product import gemm_specialized_out
from te_dynamo.kernels.runtime.compiled_code import compile_for
from te_dynamo.kernels.runtime.target import TARGETS
from te_dynamo.lowering.lower import lower
from te_dynamo.testing import fake_cuda

H200 = TARGETS["h200"]


def taken(n: int, k: int, m: int, groups: int, fast: bool) -> bool:
    return choose(Product(n, k, m, fast, k_groups=groups), H200).specialized


def test_it_is_taken_for_large_experts() -> None:
    for fast in (False, True):
        assert taken(14336, 4096, 16384, 8, fast)
        assert not taken(14336 + 32, 4096, 16384, 8, fast), "a part of C in two groups"
        assert not taken(14336, 4090, 16384, 8, fast), "rows of C that are not whole 16 bytes"
        assert not taken(256, 128, 256, 4, fast), "shorter than the CPU needs for a call"


@pytest.mark.parametrize(
    ("mix", "out_dtype", "fast"),
    [
        ("e5m2.e4m3", torch.bfloat16, False),
        pytest.param("e4m3.e4m3", torch.float32, True, marks=pytest.mark.slow),
    ],
)
def test_machine_code(mix: str, out_dtype: torch.dtype, fast: bool) -> None:
    a, b = MIXES[mix]
    options = columns_specialized_options(out_dtype.itemsize, fast)
    warps = options.pop("num_warps")
    report = compile_for(
        gemm_grouped_columns_specialized_kernel,
        {
            **{"a": a, "a_scale_inv": "*fp32", "b": b, "b_scale_inv": "*fp32", "offs": "*i32"},
            **{"c": TRITON_TYPES[out_dtype], "M": "i32", "N": "i32", "K": "i32", "G": "i32"},
        },
        options,
        aligned=("a", "a_scale_inv", "b", "b_scale_inv", "offs", "c", "M", "N", "K"),
        num_warps=warps,
    )
    assert report.warnings == () and report.spills == 0, report.log
    assert report.shared <= SHARED_BYTES
    assert f".f32.{mix}" in report.ptx and "wgmma.mma_async" in report.ptx and "setmaxnreg" in report.ptx
    assert "fma." not in report.ptx


def test_lowering_leaves_it_to_be_called() -> None:
    def graph_of(n: int, k: int, m: int, groups: int) -> fx.Graph:
        graph = fx.Graph()
        shapes = {
            "a": ((n, m), torch.float8_e5m2),
            "s": ((1,), torch.float32),
            "b": ((k, m), torch.float8_e4m3fn),
            "offs": ((groups,), torch.int32),
        }
        nodes = {name: graph.placeholder(name) for name in shapes}
        for name, (shape, dtype) in shapes.items():
            nodes[name].meta["val"] = torch.empty(shape, dtype=dtype, device="cuda")
        args = (nodes["a"], nodes["s"], nodes["b"], nodes["s"], nodes["offs"], torch.bfloat16, False)
        product = graph.call_function(torch.ops.te.gemm_grouped_columns.default, args)
        product.meta["val"] = torch.empty(groups, n, k, dtype=torch.bfloat16, device="cuda")
        graph.output(product)
        return graph

    with fake_cuda(), kernels_everywhere():
        assert lower(graph_of(14336, 4096, 16384, 8)) == [("te.gemm_grouped_columns", "Gluon")]
        assert lower(graph_of(256, 128, 512, 4)) == [("te.gemm_grouped_columns", "Triton")]


# -- on a GPU ----------------------------------------------------------------------------------------

RAGGED = (
    [100, 0, 333, 1, 0, 78],  # begin anywhere, end anywhere, empty, of one column
    [512, 0, 0, 0, 0, 0],
    [0, 0, 0, 0, 15, 1],  # columns of nobody behind the last
    [7, 9, 128, 128, 113, 127],
)


def specialized(a, sa, b, sb, offs, fast: bool, out_dtype: torch.dtype) -> torch.Tensor:
    c = torch.full((offs.shape[0], a.shape[0], b.shape[0]), torch.nan, dtype=out_dtype, device=a.device)
    columns_specialized_out(a, sa, b, sb, offs, fast, out=c)
    return c


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("out_dtype", OUT, ids=str)
@pytest.mark.parametrize("sizes", RAGGED, ids=str)
def test_it_is_the_reference(sizes: list[int], out_dtype: torch.dtype, fast: bool) -> None:
    offs = offsets(sizes, device="cuda")
    for n, k in ((64, 8), (320, 136), (1024, 512)):
        a, sa, b, sb = column_operands(512, n, k, device="cuda")
        got = specialized(a, sa, b, sb, offs, fast, out_dtype)
        want = gemm_grouped_columns_reference(a, sa, b, sb, offs, out_dtype, fast)
        assert got.isfinite().all()
        assert relative_error(got, want.double()) < 1e-2
        empty = torch.tensor([size == 0 for size in sizes])
        assert not got[empty.cuda()].any()


@pytest.mark.gpu
def test_aligned_groups_have_the_bits_of_products_by_themselves() -> None:
    sizes = [256, 16, 0, 144, 96]
    a, sa, b, sb = column_operands(512, 320, 264, device="cuda")
    got = specialized(a, sa, b, sb, offsets(sizes, device="cuda"), False, torch.bfloat16)
    start = 0
    for group, size in enumerate(sizes):
        if size:
            x, y = (t[:, start : start + size].contiguous() for t in (a, b))
            alone = torch.empty_like(got[group])
            gemm_specialized_out(x, sa, y, sb, out=alone)
            assert torch.equal(got[group], alone)
        start += size


@pytest.mark.gpu
def test_nan_stays_in_its_group() -> None:
    sizes = [100, 33, 200, 179]
    a, sa, b, sb = column_operands(512, 320, 136, device="cuda")
    for poisoned in (a, b):
        poisoned.view(torch.uint8)[:, 100:133] = 0x7F  # NaN in both formats
    got = specialized(a, sa, b, sb, offsets(sizes, device="cuda"), False, torch.float32)
    assert got[1].isnan().all() and got[[0, 2, 3]].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [False, True])
def test_a_large_product_is_right_and_repeats_itself(fast: bool) -> None:
    sizes = [1900, 2300, 0, 2047, 1, 1944]
    a, sa, b, sb = column_operands(8192, 4096, 2048, device="cuda")
    offs = offsets(sizes, device="cuda")
    assert taken(4096, 2048, 8192, 6, fast)
    first = gemm_grouped_columns(a, sa, b, sb, offs, torch.bfloat16, fast)
    assert torch.equal(first, specialized(a, sa, b, sb, offs, fast, torch.bfloat16))
    want = gemm_reference(a[:, 1900:4188].contiguous(), sa, b[:, 1900:4188].contiguous(), sb, None, torch.float32, fast)
    alone = specialized(a, sa, b, sb, offsets([1900, 2288], device="cuda"), fast, torch.float32)[1]
    assert relative_error(alone, want.double()) < 1e-2
    for _ in range(20):
        assert torch.equal(specialized(a, sa, b, sb, offs, fast, torch.bfloat16), first)
