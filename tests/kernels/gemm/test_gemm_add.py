"""The GEMM that adds a tensor to its result: its reference, its machine code, its numbers in Triton's interpreter, its bits on a GPU.

Run as a program, this file is the interpreted part: TRITON_INTERPRET must be set before Triton is imported.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import types

import pytest
import torch
from helpers.kernels import interpreted
from helpers.kernels.block_operands import BLOCKS, e8m0
from helpers.kernels.block_operands import operands as block_operands
from helpers.kernels.gemm_operands import E4M3, E5M2, OUT, operands
from helpers.kernels.gemms import (
    block_request,
    gemm,
    gemm_add,
    gemm_add_in_place,
    gemm_add_reference,
    gemm_reference,
    gemm_with_tile,
    with_tile,
)
from helpers.kernels.interpreter_process import run_in_interpreter
from hypothesis import given, settings
from hypothesis import strategies as st

from te_dynamo.kernels.gemm import decode as decode_kernels
from te_dynamo.kernels.gemm import product as gemm_kernels
from te_dynamo.kernels.gemm.choose import choose_for
from te_dynamo.kernels.gemm.decode import decode_options
from te_dynamo.kernels.gemm.multiply import gemm_options
from te_dynamo.kernels.gemm.specialized.product import (
    gemm_specialized_kernel,
    gemm_specialized_out,
    specialized_options,
)
from te_dynamo.kernels.gemm.tiles import TILES, DecodeTile, Tile, choose_decode_tile, choose_tile
from te_dynamo.kernels.runtime.target import TARGETS
from te_dynamo.kernels.tiles.stacking import NOT_STACKED


def addend_of(m: int, n: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    return torch.randn(m, n, generator=torch.Generator().manual_seed(1)).to(device, dtype)


# -- the reference and its errors --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", OUT, ids=str)
def test_reference_rounds_the_product_first(dtype: torch.dtype) -> None:
    a, sa, b, sb, bias = operands(96, 64, 128)
    addend = addend_of(96, 64, dtype)
    product = gemm_reference(a, sa, b, sb, bias, dtype, True)
    expected = (product.float() + addend.float()).to(dtype)
    assert torch.equal(gemm_add_reference(a, sa, b, sb, bias, addend, dtype, True), expected)


@pytest.mark.parametrize("addend", [torch.ones(64).bfloat16(), torch.ones(1, 64).bfloat16(), torch.ones(96, 64)])
def test_an_addend_of_another_shape_or_dtype_is_an_error(addend: torch.Tensor) -> None:
    a, sa, b, sb, _ = operands(96, 64, 128)
    for function in (gemm_add, gemm_add_in_place, gemm_add_reference):
        with pytest.raises(ValueError, match=r"te gemm: expected addend \(96, 64\) of torch.bfloat16, got"):
            function(a, sa, b, sb, None, addend, torch.bfloat16, True)


def adds_in_launch(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, fast: bool) -> bool:
    return choose_for(a, b, fast, dtype, epilogue="add").fused


def test_large_sums_in_fp32_are_a_pass_of_their_own() -> None:
    large, small = (torch.empty(rows, 4096, dtype=E4M3) for rows in (8192, 256))
    assert adds_in_launch(large, large, torch.bfloat16, True) and adds_in_launch(small, large, torch.float32, True)
    assert not adds_in_launch(large, large, torch.float32, True)


def test_sums_whose_rows_are_not_whole_vectors_are_a_pass_of_their_own() -> None:
    a, b = (torch.empty(rows, 4096, dtype=E4M3) for rows in (256, 1021))
    assert not adds_in_launch(a, b, torch.bfloat16, True)


def test_a_symbolic_number_of_rows_is_not_guarded_on() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    shape_env = ShapeEnv()
    real = torch.empty(300)  # a fake one has its own sizes already
    with FakeTensorMode(shape_env=shape_env) as mode:
        rows = mode.from_tensor(real, static_shapes=False).shape[0]
        a, b, one = (torch.empty(s, dtype=E4M3, device="cuda") for s in ((rows, 512), (256, 512), (1,)))
        addend = torch.empty((rows, 256), dtype=torch.bfloat16, device="cuda")
        for function in (gemm_add, gemm_add_in_place):
            traced = make_fx(lambda *tensors, f=function: f(*tensors[:4], None, tensors[4], torch.bfloat16, True))(
                a, one, b, one, addend
            )
            assert sum("triton" in str(node.target) for node in traced.graph.nodes) == 1
    assert not shape_env.guards


# -- machine code -----------------------------------------------------------------------------------

BASE = {"a": "*fp8e4nv", "a_scale_inv": "*fp32", "b": "*fp8e4nv", "b_scale_inv": "*fp32", "bias": "*bf16"}
SIZES = {"M": "i32", "N": "i32", "K": "i32"}
ALIGNED = ("a", "a_scale_inv", "b", "b_scale_inv", "bias", "c", "addend", "K")
TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


@pytest.mark.slow
@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("scaling, fast", [("tensor", False), ("tensor", True), ("1x128 128x128", False)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_machine_code_for_large_products(dtype: torch.dtype, scaling: str, fast: bool, small: bool) -> None:
    """As deep a ring as without an addend, and no result waits for memory but through it."""
    from te_dynamo.kernels.runtime.compiled_code import compile_for

    options = specialized_options(dtype.itemsize, scaling, fast, small=small)
    warps = options.pop("num_warps")
    types_ = {**BASE, "c": TYPES[dtype], "addend": TYPES[dtype], **SIZES}
    report = compile_for(gemm_specialized_kernel, types_, options, aligned=(*ALIGNED, "N"), num_warps=warps)
    assert report.warnings == () and report.spills == 0 and report.shared <= 227 * 1024, report.log
    assert options["STAGES"] == (6 if small else 4)
    loads = len(re.findall(r"cp\.async\.bulk\.tensor\.2d\.shared::\w+\.global", report.ptx))
    wide = 1 if small else 2  # a part's rows are that many swizzled ones
    assert loads == 2 + 2 * 2 * wide, "A and B, and twice a part for each group"
    assert scaling != "tensor" or "fma." not in report.ptx


def tiles(dtype: torch.dtype) -> list[Tile]:
    shapes = [(8192, 1024, 4096), (1024, 1024, 2048), (512, 4096, 4096), (128, 256, 96), (300, 2048, 1024)]
    chosen = (choose_tile(*shape, fast, out_bytes=2 * dtype.itemsize) for shape in shapes for fast in (True, False))
    return list(dict.fromkeys(tile for tile in chosen if tile.split_k == 1))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_machine_code_of_the_tiles(dtype: torch.dtype) -> None:
    from te_dynamo.kernels.runtime.compiled_code import compile_for

    for tile in tiles(dtype):
        options = gemm_options(tile, 1024, "tensor", NOT_STACKED)
        how = {name: options.pop(name) for name in ("num_warps", "num_stages")}
        types_ = {**BASE, "c": TYPES[dtype], "addend": TYPES[dtype], **SIZES}
        report = compile_for(gemm_kernels.gemm_kernel, types_, options, aligned=(*ALIGNED, "N"), **how)
        assert report.warnings == () and report.spills == 0, (tile.name, report.log)
        assert (report.shared + 1024) * tile.ctas_per_sm <= 228 * 1024, (tile.name, report.shared)
        assert "fma." not in report.ptx


@pytest.mark.parametrize("fast", [False, True])
def test_machine_code_of_a_few_rows(fast: bool) -> None:
    from te_dynamo.kernels.runtime.compiled_code import compile_for

    tile = choose_decode_tile(16, 14336, 4096, fast, TARGETS["h200"])
    options = decode_options(tile, 14336, 4096, True, None, 0, True)
    constants = {name: value for name, value in options.items() if name != "num_warps"}
    report = compile_for(
        decode_kernels.gemm_decode_kernel,
        {**BASE, "c": "*bf16", "addend": "*bf16", "partials": "*fp32", **SIZES},
        constants,
        aligned=(*ALIGNED, "N"),
        num_warps=tile.num_warps,
    )
    assert report.warnings == () and report.spills == 0 and "fma." not in report.ptx


# -- in Triton's interpreter -------------------------------------------------------------------------


@pytest.mark.slow
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


def main() -> None:
    """Bit for bit the same kernels' product and an addition, into a buffer and into the addend."""
    interpreted.install()
    interpreted.install_products()
    decode_kernels.libdevice = types.SimpleNamespace(mul_rn=lambda x, y: x * y)  # type: ignore[assignment]
    decode = DecodeTile(16, 64, 64, 4, 3, True, 1)
    usual = Tile(64, 64, 64, 4, 3, fast=True, tflops=1.0)
    for m, n, k in ((1, 64, 128), (5, 72, 144), (70, 72, 144)):
        a, sa, b, sb, bias = operands(m, n, k)
        for tile in (usual, decode) if m <= 16 else (usual, dataclasses.replace(usual, fast=False, halves=True)):
            for split in (1, 2):
                for shift in (None, bias):
                    cut = dataclasses.replace(tile, split_k=split)  # type: ignore[type-var]
                    check(cut, a, sa, b, sb, shift)

    sums_of_blocks_are_two_steps()


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from([*BLOCKS, "e8m0"]),
    sizes=st.tuples(
        st.integers(1, 80), st.integers(1, 10).map(lambda n: 8 * n), st.integers(1, 20).map(lambda k: 16 * k)
    ),
    dtype=st.sampled_from(OUT),
    form=st.sampled_from([{}, {"halves": True}, {"split_k": 2}]),
    biased=st.booleans(),
)
def sums_of_blocks_are_two_steps(
    kind: str, sizes: tuple[int, int, int], dtype: torch.dtype, form, biased: bool
) -> None:
    a, sa, b, sb, bias, *two_d = block_operands(*sizes, kind if kind in BLOCKS else "1x128.1x128")
    if kind == "e8m0":
        sa, sb = e8m0(sa, sizes[0]), e8m0(sb, sizes[1])
    r = block_request(a, sa, b, sb, bias if biased else None, dtype, *two_d)
    tile = Tile(64, 64, 128, 4, 3, fast=False, tflops=1.0, **form)
    addend = addend_of(*r.shape, dtype)
    expected = with_tile(tile, r) + addend
    added = dataclasses.replace(r, addend=addend)
    assert torch.equal(with_tile(tile, added), expected)
    assert with_tile(tile, added, addend) is addend and torch.equal(addend, expected)


def check(tile: Tile | DecodeTile, a, sa, b, sb, bias) -> None:
    dtype = torch.float32
    product = gemm_with_tile(tile, a, sa, b, sb, bias, dtype)
    addend = addend_of(*product.shape, dtype)
    expected = product + addend
    assert torch.equal(gemm_with_tile(tile, a, sa, b, sb, bias, dtype, addend=addend), expected), tile
    given = gemm_with_tile(tile, a, sa, b, sb, bias, dtype, addend=addend, c=addend)
    assert given is addend and torch.equal(addend, expected), tile


# -- on a GPU ---------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("dtype", OUT, ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        (1, 8, 16),
        (300, 264, 1040),
        (301, 263, 1040),  # N that no descriptor stores
        (128, 256, 8192),  # K in parts
        (16, 14336, 4096),  # few rows
        (7, 1030, 8192),  # few rows, K in parts
        (2048, 1024, 4096),
        (8192, 4096, 1024),  # the kernel for large products
        (4100, 8200, 1040),
    ],
    ids=str,
)
def test_bits_are_those_of_a_gemm_and_an_addition(shape, dtype: torch.dtype, fast: bool) -> None:
    m, n, _ = shape
    for a_dtype, biased in ((E4M3, True), (E5M2, False)):
        a, sa, b, sb, bias = operands(*shape, a_dtype, E4M3, device="cuda")
        shift = bias if biased else None
        addend = addend_of(m, n, dtype, "cuda")
        expected = gemm(a, sa, b, sb, shift, dtype, fast) + addend
        assert torch.equal(gemm_add(a, sa, b, sb, shift, addend, dtype, fast), expected)
        if adds_in_launch(a, b, dtype, fast):
            given = addend.clone()
            assert gemm_add_in_place(a, sa, b, sb, shift, given, dtype, fast) is given
            assert torch.equal(given, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [tile for tile in TILES if tile.fits(8)], ids=lambda tile: tile.name)
def test_every_tile(tile: Tile) -> None:
    a, sa, b, sb, bias = operands(333, 520, 1040, device="cuda")
    addend = addend_of(333, 520, torch.bfloat16, "cuda")
    expected = gemm_with_tile(tile, a, sa, b, sb, bias, torch.bfloat16) + addend
    assert torch.equal(gemm_with_tile(tile, a, sa, b, sb, bias, torch.bfloat16, addend=addend), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 8, 16), (300, 264, 1040), (1000, 1024, 4112), (8192, 136, 128), (257, 4096, 2064)], ids=str
)
def test_the_kernel_for_large_products_at_any_size(shape, dtype: torch.dtype, fast: bool) -> None:
    m, n, _ = shape
    a, sa, b, sb, bias = operands(*shape, device="cuda")
    addend, expected, c = (addend_of(m, n, dtype, "cuda") for _ in range(3))
    for shift, small in itertools.product(((), (bias,)), (False, True)):
        given = (a, sa, b, sb, *shift)
        gemm_specialized_out(*given, fast=fast, out=expected)
        gemm_specialized_out(*given, fast=fast, small=small, addend=addend, out=c)
        assert torch.equal(c, expected + addend)
        c.copy_(addend)
        gemm_specialized_out(*given, fast=fast, small=small, addend=c, out=c)
        assert torch.equal(c, expected + addend)


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [False, True])
def test_a_large_sum_repeats_itself(fast: bool) -> None:
    a, sa, b, sb, bias = operands(8192, 14336, 512, device="cuda")
    addend = addend_of(8192, 14336, torch.bfloat16, "cuda")
    expected = gemm(a, sa, b, sb, bias, torch.bfloat16, fast) + addend
    for _ in range(20):
        assert torch.equal(gemm_add(a, sa, b, sb, bias, addend, torch.bfloat16, fast), expected)


@pytest.mark.gpu
def test_an_addend_that_no_descriptor_reads() -> None:
    """At an odd address, and by columns."""
    a, sa, b, sb, _ = operands(64, 256, 512, device="cuda")
    whole = addend_of(1, 64 * 256 + 1, torch.bfloat16, "cuda").reshape(-1)
    for addend in (whole[1:].view(64, 256), whole[:-1].view(256, 64).t()):
        expected = gemm(a, sa, b, sb, None, torch.bfloat16, True) + addend
        assert torch.equal(gemm_add(a, sa, b, sb, None, addend, torch.bfloat16, True), expected)


if __name__ == "__main__":
    main()
