"""The block-scaled GEMM: its reference against float64, its errors, its traced launch, and on a GPU the kernel itself."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers.kernels.block_operands import BLOCKS, e8m0, in_float64, operands
from helpers.kernels.gemm_operands import E4M3, E5M2, OUT, relative_error
from helpers.kernels.gemms import gemm_block, gemm_block_reference, gemm_block_with_tile
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from te_dynamo.kernels.gemm.multiply import multiply
from te_dynamo.kernels.gemm.reference import reference
from te_dynamo.kernels.gemm.request import Operand, Request
from te_dynamo.kernels.gemm.tiles import BLOCK_TILES, choose_block_tile
from te_dynamo.kernels.layouts import block, mxfp8
from te_dynamo.kernels.runtime.target import TARGETS

# -- the reference, on the CPU ---------------------------------------------------------------------

SHAPES = [(128, 256, 96), (64, 128, 64), (1, 336, 272), (200, 24, 16), (130, 300, 400)]


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reference_is_the_float64_product(shape, blocks) -> None:
    for mix in ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)):
        a, sa, b, sb, bias, *two_d = operands(*shape, blocks, *mix)
        want = in_float64(a, sa, b, sb, bias, *two_d)
        assert relative_error(gemm_block_reference(a, sa, b, sb, bias, torch.float32, *two_d), want) < 1e-6
        assert relative_error(gemm_block_reference(a, sa, b, sb, bias, torch.bfloat16, *two_d), want) < 2**-8


def test_e8m0_codes_are_the_same_scales() -> None:
    a, sa, b, sb, bias, *two_d = operands(130, 140, 400, "1x128.1x128")
    want = gemm_block_reference(a, sa, b, sb, bias, torch.float32, *two_d)
    got = gemm_block_reference(a, e8m0(sa, 130), b, e8m0(sb, 140), bias, torch.float32, *two_d)
    assert torch.equal(got, want)


def test_e8m0_codes_0_and_255() -> None:
    ones = torch.ones(2, 16).to(E4M3)
    codes = torch.zeros(128, 4, dtype=torch.uint8)
    codes[1] = 255
    other = torch.full((128, 4), 127, dtype=torch.uint8)
    got = gemm_block_reference(ones, codes, ones, other, None, torch.float32, False, False)
    assert torch.equal(got[0], torch.full((2,), 16 * 2.0**-127)) and got[1].isnan().all()


def test_reference_bias_is_an_addition_of_its_own() -> None:
    a, sa, b, sb, bias, *two_d = operands(128, 256, 272, "1x128.128x128")
    product = gemm_block_reference(a, sa, b, sb, None, torch.float32, *two_d)
    for out_dtype in OUT:
        unfused = (product + bias.float()).to(out_dtype)
        assert torch.equal(gemm_block_reference(a, sa, b, sb, bias, out_dtype, *two_d), unfused)


def test_operands_that_are_refused() -> None:
    a, sa, b, sb, *_ = operands(32, 64, 144, "1x128.128x128")

    def call(a=a, sa=sa, b=b, sb=sb, bias=None, out=torch.bfloat16, a_two_d=False, b_two_d=True):
        return gemm_block_reference(a, sa, b, sb, bias, out, a_two_d, b_two_d)

    with pytest.raises(ValueError, match=r"128x128 x 128x128 .*\(32, 144\).*\(64, 144\)"):
        call(a_two_d=True)
    with pytest.raises(ValueError, match="e5m2 x e5m2"):
        call(a.to(E5M2), b=b.to(E5M2))
    with pytest.raises(ValueError, match="multiple of 16"):
        call(a[:, :24].contiguous(), b=b[:, :24].contiguous())
    with pytest.raises(ValueError, match=r"a_scale_inv \[2, 32\] for a \[32, 144\] in 1x128 blocks, got \[2, 28\]"):
        call(sa=sa[:, :28].contiguous())
    with pytest.raises(ValueError, match=r"b_scale_inv \[1, 4\] for b \[64, 144\] in 128x128 blocks, got \[2, 64\]"):
        call(sb=torch.ones(2, 64))
    with pytest.raises(ValueError, match="both be float32 or both be uint8"):
        call(sa=torch.zeros(128, 8, dtype=torch.uint8))
    with pytest.raises(ValueError, match="which are 1D"):
        call(sa=torch.zeros(128, 8, dtype=torch.uint8), sb=torch.zeros(128, 8, dtype=torch.uint8))
    with pytest.raises(ValueError, match="a_scale_inv must be contiguous"):
        call(sa=sa.t().contiguous().t())


# -- tile choice -----------------------------------------------------------------------------------


def test_the_chosen_tile_suits_the_shape() -> None:
    large = choose_block_tile(8192, 14336, 4096, out_bytes=2)
    assert large.halves and large.ctas_per_sm == 2, "of two programs one adds while the other multiplies"
    decode = choose_block_tile(1, 4096, 14336)
    assert decode.block_m == 64 and decode.split_k > 1
    for shape in itertools.product((1, 300, 8192), (100, 4095, 4096), (16, 4096)):
        for target in (TARGETS["h200"], TARGETS["b200"]):
            tile = choose_block_tile(*shape, target)
            assert tile.fits(4, target) and (tile.narrow or shape[1] % 8 == 0)
            assert target.has_wgmma or not tile.halves
    assert len({tile.name for tile in BLOCK_TILES}) == len(BLOCK_TILES)


# -- launching from a traced graph, no GPU needed --------------------------------------------------


def traced_kernels(m: int, n: int, k: int, bias: bool, dynamic: str, codes: bool = False) -> list[dict]:
    """The launches recorded for fake CUDA operands; the sizes named in `dynamic` ("m", "k") are symbolic."""
    shape_env = ShapeEnv()
    real = torch.empty(m, k // 16)  # a fake one has its own sizes already
    with FakeTensorMode(shape_env=shape_env) as mode:
        symbols = mode.from_tensor(real, static_shapes=False).shape
        m = symbols[0] if "m" in dynamic else m
        k = symbols[1] * 16 if "k" in dynamic else k
        dtype = torch.uint8 if codes else torch.float32
        shapes = [mxfp8.scale_shape(r, k) if dtype == torch.uint8 else block.scale_shape(r, k, False) for r in (m, n)]
        scales = [torch.empty(shape, dtype=dtype, device="cuda") for shape in shapes]
        a, b = (torch.empty((rows, k), dtype=E4M3, device="cuda") for rows in (m, n))
        shift = torch.empty(n, device="cuda") if bias else None
        fn = lambda a, sa, b, sb: gemm_block(a, sa, b, sb, shift, torch.bfloat16, False, False)  # noqa: E731
        graph = make_fx(fn, tracing_mode="real")(a, scales[0], b, scales[1]).graph
    # torch itself asks whether a traced tensor's sizes are 1, as the number of blocks may be.
    assert all(str(guard.expr).endswith("//128), 1)") for guard in shape_env.guards), "the launch must not specialize"
    return [node.kwargs for node in graph.nodes if "triton_kernel_wrapper" in str(node.target)]


@pytest.mark.parametrize("codes", [False, True], ids=["fp32", "e8m0"])
@pytest.mark.parametrize("dynamic", ["", "m", "k"], ids=["static", "dynamic m", "dynamic k"])
def test_the_launch_is_recorded_by_make_fx(dynamic, codes) -> None:
    (launch,) = traced_kernels(256, 128, 256, True, dynamic, codes)
    assert set(launch["kwargs"]) >= {"a", "a_scale_inv", "b", "b_scale_inv", "bias", "c"}
    assert launch["grid"][0][0] > 0


def test_split_k_is_two_launches() -> None:
    assert len(traced_kernels(16, 4096, 14336, False, "")) == 2


# -- the kernel, on a GPU --------------------------------------------------------------------------


GPU_SHAPES = [
    (128, 256, 96),
    (64, 128, 64),
    (1, 4096, 4096),
    (16, 4096, 14336),
    (320, 336, 64),
    (336, 320, 4096),
    (1000, 1024, 4096),
    (2048, 4096, 4096),
    (512, 14336, 4096),
    (200, 100, 208),  # rows of 200 bytes: masked stores
    (1000, 4095, 256),
    (17, 33, 4112),
]


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_kernel_is_the_reference(shape, blocks) -> None:
    for (a_dtype, b_dtype), out_dtype in zip(((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)), OUT, strict=True):
        power_of_two = out_dtype != torch.float16
        a, sa, b, sb, bias, *two_d = operands(*shape, blocks, a_dtype, b_dtype, "cuda", power_of_two)
        want = gemm_block_reference(a, sa, b, sb, bias, torch.float32, *two_d)
        got = gemm_block(a, sa, b, sb, bias, out_dtype, *two_d)
        assert got.dtype == out_dtype and got.shape == shape[:2]
        assert relative_error(got, want.double().cpu()) < (1e-3 if out_dtype == torch.float32 else 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("tile", BLOCK_TILES, ids=lambda tile: tile.name)
def test_every_tile_is_right_and_repeats_itself(tile, blocks) -> None:
    a, sa, b, sb, bias, *two_d = operands(1000, 1040, 2064, blocks, E5M2, device="cuda")
    want = in_float64(a, sa, b, sb, bias, *two_d)
    first = gemm_block_with_tile(tile, a, sa, b, sb, bias, torch.bfloat16, *two_d)
    assert relative_error(first, want) < 1e-2
    for _ in range(3):
        assert torch.equal(gemm_block_with_tile(tile, a, sa, b, sb, bias, torch.bfloat16, *two_d), first)


@pytest.mark.gpu
def test_bits_depend_on_the_parts_of_k_alone() -> None:
    a, sa, b, sb, bias, *two_d = operands(1000, 1040, 2064, "1x128.1x128", device="cuda")
    first = {}
    for tile in (tile for tile in BLOCK_TILES if tile.fits(out_bytes=4)):
        got = gemm_block_with_tile(tile, a, sa, b, sb, bias, torch.float32, *two_d)
        assert torch.equal(got, first.setdefault(tile.split_k, got)), tile.name


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1000, 1024, 4096), (16, 4096, 14336), (200, 100, 208)], ids=str)
def test_e8m0_codes_give_the_bits_of_their_scales(shape) -> None:
    a, sa, b, sb, bias, *two_d = operands(*shape, "1x128.1x128", device="cuda")
    want = gemm_block(a, sa, b, sb, bias, torch.bfloat16, *two_d)
    codes = e8m0(sa, shape[0]), e8m0(sb, shape[1])
    assert torch.equal(gemm_block(a, codes[0], b, codes[1], bias, torch.bfloat16, *two_d), want)


@pytest.mark.gpu
@pytest.mark.parametrize("out_dtype", OUT, ids=str)
@pytest.mark.parametrize("blocks", BLOCKS)
def test_fused_bias_is_bit_equal_to_an_addition_of_its_own(blocks, out_dtype) -> None:
    for shape in ((1000, 1024, 4096), (16, 4096, 14336), (200, 100, 208)):
        a, sa, b, sb, bias, *two_d = operands(*shape, blocks, device="cuda")
        product = gemm_block(a, sa, b, sb, None, torch.float32, *two_d)
        fused = gemm_block(a, sa, b, sb, bias, out_dtype, *two_d)
        assert torch.equal(fused, (product + bias.float()).to(out_dtype))


@pytest.mark.gpu
def test_nan_infinity_and_the_codes_0_and_255_pass_through() -> None:
    a, sa, b, sb, _, *two_d = operands(128, 128, 256, "1x128.1x128", E5M2, device="cuda")
    for value in (float("nan"), float("inf")):
        broken = a.clone()
        broken[3, 5] = value
        got = gemm_block(broken, sa, b, sb, None, torch.float32, *two_d)
        assert not got[3].isfinite().any() and got[:3].isfinite().all() and got[4:].isfinite().all()
    codes = e8m0(sa, 128)
    codes[7], codes[8] = 255, 0
    got = gemm_block(a, codes, b, e8m0(sb, 128), None, torch.float32, *two_d)
    want = gemm_block_reference(a, codes, b, e8m0(sb, 128), None, torch.float32, *two_d)
    assert got[7].isnan().all() and (got[8].abs() < 1e-30).all()
    keep = torch.arange(128) != 7
    assert relative_error(got[keep], want[keep].double().cpu()) < 1e-3


def test_scales_that_nobody_knows_are_an_error() -> None:
    codes, scale_inv = torch.zeros(192, 64).to(E4M3), torch.ones(3, 1)
    operand = Operand(codes, scale_inv, "64x64")  # type: ignore[arg-type]
    for product in (multiply, reference):
        with pytest.raises(ValueError, match="with scales 64x64"):
            product(Request(operand, operand, torch.bfloat16))
