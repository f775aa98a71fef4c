"""The warp-specialized block-scaled GEMM: when it is taken, its machine code, its call by Inductor, and on a GPU its bits."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from helpers.kernels.block_operands import BLOCKS, e8m0, in_float64, operands
from helpers.kernels.compiled_cases import SHARED_BYTES, compile_specialized
from helpers.kernels.gemm_operands import E4M3, E5M2, OUT, relative_error
from helpers.kernels.gemms import block_request, gemm_block, gemm_block_with_tile
from helpers.models.snapshot_models import kernels_everywhere
from torch import fx

from te_dynamo.dialect.gemm import values_of
from te_dynamo.kernels.gemm.choose import Choice, Product, choose, choose_for
from te_dynamo.kernels.gemm.multiply import choice_of, run
from te_dynamo.kernels.gemm.specialized.product import (
    gemm_specialized_out,
)
from te_dynamo.kernels.gemm.specialized.scales import decode_kernel
from te_dynamo.kernels.gemm.tiles import BLOCK_TILES, SPECIALIZED_BLOCK, SPECIALIZED_SMALL
from te_dynamo.kernels.layouts import block
from te_dynamo.kernels.runtime.compiled_code import compile_for
from te_dynamo.kernels.runtime.target import TARGETS
from te_dynamo.lowering.extern import gemm as extern_gemm
from te_dynamo.lowering.lower import lower
from te_dynamo.quantized.quantizers import Float8BlockQuantizer
from te_dynamo.testing import fake_cuda

H200 = TARGETS["h200"]


def scaling(b_two_d: bool) -> str:
    return f"1x128 {'128x128' if b_two_d else '1x128'}"


KINDS = ["1x128.128x128", "1x128.1x128", "e8m0.e8m0"]


def test_it_is_taken_for_large_products_whose_first_operand_is_1d() -> None:
    def taken(m: int, n: int, k: int) -> bool:
        return choose(Product(m, n, k, scaling="1x128"), H200).specialized

    assert taken(8192, 4096, 4096)
    assert not taken(8192, 14330, 4096), "rows of C that are not whole 16 bytes"
    assert not taken(16, 14336, 4096), "decoding"
    assert not taken(4096, 1024, 1024), "shorter than the CPU needs for a call"
    with fake_cuda():
        a = torch.empty(8192, 4096, dtype=E4M3, device="cuda")
        assert choose_for(a, a, scaling="1x128").specialized
        assert not choose_for(a, a, scaling="128x128").specialized


@pytest.mark.one_fast_case
@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize(
    ("mix", "out_dtype", "bias", "b_two_d"),
    [
        ("e4m3.e4m3", torch.bfloat16, False, True),
        ("e4m3.e4m3", torch.bfloat16, True, False),
        ("e5m2.e4m3", torch.float32, True, False),
    ],
)
def test_machine_code(mix: str, out_dtype: torch.dtype, bias: bool, b_two_d: bool, small: bool) -> None:
    report = compile_specialized(mix, out_dtype, bias, scaling(b_two_d), small=small)
    assert report.warnings == (), report.log
    assert report.spills == 0, report.log
    assert report.shared <= SHARED_BYTES
    assert f".f32.{mix}" in report.ptx and "setmaxnreg" in report.ptx
    # Two groups, two halves or one: 4 instructions of 32 k each, and one scaled addition for each of a thread's 64 sums.
    products = 2 if small else 2 * 2
    assert report.ptx.count("wgmma.mma_async") == products * 4
    assert report.ptx.count("fma.rn.f32") == products * 64
    assert report.ptx.count("mul.f32") == products * (2 if b_two_d else 64), "the scales' products"


def test_decoding_compiles_without_spills() -> None:
    report = compile_for(
        decode_kernel,
        {"codes": "*u8", "scale_inv": "*fp32", "M": "i32", "blocks": "i32"},
        {"ROWS": 128, "BLOCKS": 8},
        num_warps=4,
    )
    assert report.spills == 0


def graph_of_gemm(m: int, n: int, k: int, a_two_d: bool, b_two_d: bool) -> fx.Graph:
    graph = fx.Graph()
    one, two = ((k + 127) // 128, n), ((n + 127) // 128, (k + 511) // 512 * 4)
    shapes = {
        "a": ((m, k), E4M3),
        "sa": ((m // 128, k // 128) if a_two_d else (k // 128, m), torch.float32),
        "b": ((n, k), E4M3),
        "sb": (two if b_two_d else one, torch.float32),
    }
    for name, (shape, dtype) in shapes.items():
        graph.placeholder(name).meta["val"] = torch.empty(shape, dtype=dtype, device="cuda")
    a, sa, b, sb = graph.nodes
    one, other = (Float8BlockQuantizer(columnwise=False, block_dims=1 + two_d) for two_d in (a_two_d, b_two_d))
    args = ([a, sa], one, [b, sb], other, torch.bfloat16, False)
    product = graph.call_function(torch.ops.te.gemm.default, args)
    product.meta["val"] = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    graph.output(product)
    return graph


def test_lowering_leaves_a_large_gemm_to_be_called_and_launches_others() -> None:
    with fake_cuda(), kernels_everywhere():
        assert lower(graph_of_gemm(8192, 14336, 4096, False, True)) == [("te.gemm", "Gluon")]
        assert lower(graph_of_gemm(8192, 14336, 4096, False, False)) == [("te.gemm", "Gluon")]
        assert lower(graph_of_gemm(8192, 14336, 4096, True, False)) == [("te.gemm", "Triton")]
        assert lower(graph_of_gemm(256, 512, 128, False, True)) == [("te.gemm", "Triton")]


def test_a_small_tile_is_called_where_larger_ones_leave_much_of_the_gpu_idle() -> None:
    size = (512, 4096, 14336)
    assert choose(Product(*size, scaling="1x128"), H200) == Choice("specialized", SPECIALIZED_SMALL[2])
    with fake_cuda(), kernels_everywhere():
        graph = graph_of_gemm(*size, False, True)
        asked = values_of(next(node for node in graph.nodes if node.target is torch.ops.te.gemm.default))
        assert extern_gemm._of_gemm(asked) == {"fast": False, "scaling": "1x128 128x128", "small": True}
        assert lower(graph) == [("te.gemm", "Gluon")]


# -- on a GPU ----------------------------------------------------------------------------------------


def operands_of(kind: str, m: int, n: int, k: int, *dtypes: torch.dtype):
    """a, its scales, b, its scales, bias, and the two flags, on the GPU."""
    blocks = kind if kind in BLOCKS else "1x128.1x128"
    a, sa, b, sb, bias, *two_d = operands(m, n, k, blocks, *dtypes, device="cuda", power_of_two=kind == "e8m0.e8m0")
    if kind == "e8m0.e8m0":
        sa, sb = e8m0(sa, m), e8m0(sb, n)
    return a, sa, b, sb, bias, *two_d


def specialized(a, sa, b, sb, bias, two_d: list[bool], out_dtype: torch.dtype, small: bool = False) -> torch.Tensor:
    c = torch.full((a.shape[0], b.shape[0]), torch.nan, dtype=out_dtype, device=a.device)
    gemm_specialized_out(a, sa, b, sb, bias, scaling=scaling(two_d[1]), small=small, out=c)
    return c


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("out_dtype", OUT, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 8, 16), (300, 264, 1040), (1000, 1024, 4112), (8190, 136, 128), (257, 4096, 2064)], ids=str
)
def test_its_bits_are_the_other_kernels(shape, out_dtype: torch.dtype, kind: str) -> None:
    usual = next(tile for tile in BLOCK_TILES if tile.split_k == 1 and tile.fits(out_dtype.itemsize))
    for dtypes in ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)):
        a, sa, b, sb, bias, *two_d = operands_of(kind, *shape, *dtypes)
        for shift in (None, bias):
            expected = gemm_block_with_tile(usual, a, sa, b, sb, shift, out_dtype, *two_d)
            for small in (False, True):
                assert torch.equal(specialized(a, sa, b, sb, shift, two_d, out_dtype, small), expected)


def test_an_addend_waits_for_a_launch_beside_scales_of_bs_rows() -> None:
    """There are no registers for it."""
    for two_d in (True, False):
        with fake_cuda():
            a, b = (torch.empty(rows, 4096, dtype=E4M3, device="cuda") for rows in (8192, 14336))
            scales = [
                torch.empty(block.scale_shape(len(x), 4096, wide), device="cuda")
                for x, wide in ((a, False), (b, two_d))
            ]
            chosen = choice_of(block_request(a, scales[0], b, scales[1], None, torch.bfloat16, False, two_d), "add")
        assert chosen == Choice("specialized", SPECIALIZED_BLOCK, fused=two_d)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 8, 16), (300, 264, 1040), (8190, 136, 128), (8192, 4096, 1024)], ids=str)
def test_an_addend_is_an_addition_of_its_own(shape, dtype: torch.dtype) -> None:
    a, sa, b, sb, bias, *two_d = operands_of("1x128.128x128", *shape)
    for shift in (None, bias):
        plain = block_request(a, sa, b, sb, shift, dtype, *two_d)
        for tile in (SPECIALIZED_BLOCK, SPECIALIZED_SMALL[2]):
            addend, choice = torch.randn(shape[:2], device="cuda").to(dtype), Choice("specialized", tile)
            expected, added = run(choice, plain) + addend, dataclasses.replace(plain, addend=addend)
            assert torch.equal(run(choice, added), expected)
            assert torch.equal(run(choice, added, out=addend), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_large_product_is_right_and_repeats_itself(kind: str) -> None:
    a, sa, b, sb, bias, *two_d = operands_of(kind, 8192, 14336, 640)
    first = specialized(a, sa, b, sb, bias, two_d, torch.bfloat16)
    if kind != "e8m0.e8m0":
        want = in_float64(a[:300], sa[:, :300], b, sb, bias, *two_d)
        assert relative_error(first[:300], want) < 1e-2
    for i in range(20):
        assert torch.equal(specialized(a, sa, b, sb, bias, two_d, torch.bfloat16, small=i % 2 == 0), first)


@pytest.mark.gpu
def test_nan_and_infinity_stay_in_their_rows_and_the_codes_0_and_255_are_scales() -> None:
    a, sa, b, sb, _, *two_d = operands_of("e8m0.e8m0", 256, 128, 256, E5M2)
    a[3, 5], a[4, 6] = float("nan"), float("inf")
    sa[7], sa[8] = 255, 0
    got = specialized(a, sa, b, sb, None, two_d, torch.float32)
    assert torch.equal(
        got.isfinite().all(dim=1).nonzero().flatten().cpu(), torch.tensor([0, 1, 2, 5, 6, *range(8, 256)])
    )
    assert (got[8].abs() < 1e-30).all()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_gemm_block_takes_it(kind: str) -> None:
    a, sa, b, sb, _, *two_d = operands_of(kind, 8192, 8192, 1024)
    assert choose_for(a, b, scaling="128x128" if two_d[0] else "1x128").specialized
    got = gemm_block(a, sa, b, sb, None, torch.bfloat16, *two_d)
    assert torch.equal(got, specialized(a, sa, b, sb, None, two_d, torch.bfloat16))
