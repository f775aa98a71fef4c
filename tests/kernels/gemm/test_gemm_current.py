"""The FP8 GEMM: its reference against float64, its errors, its traced launch, and on a GPU the kernel itself."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers.kernels.gemm_operands import E4M3, E5M2, OUT, in_float64, operands, relative_error
from helpers.kernels.gemms import gemm, gemm_reference, gemm_with_tile
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from te_dynamo.kernels.gemm.reference import reference
from te_dynamo.kernels.gemm.request import Operand, Request, sum_of_nothing
from te_dynamo.kernels.gemm.tiles import TILES, choose_tile
from te_dynamo.kernels.runtime.launch import size_hint

# -- the reference, on the CPU ---------------------------------------------------------------------


@pytest.mark.parametrize("mix", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)], ids=str)
@pytest.mark.parametrize("shape", [(128, 256, 96), (64, 128, 64), (1, 336, 64), (320, 24, 16)], ids=str)
def test_reference_is_the_float64_product(shape, mix) -> None:
    a, sa, b, sb, bias = operands(*shape, *mix)
    want = in_float64(a, sa, b, sb, bias)
    assert relative_error(gemm_reference(a, sa, b, sb, bias, torch.float32, False), want) < 1e-6
    assert relative_error(gemm_reference(a, sa, b, sb, bias, torch.bfloat16, True), want) < 2**-8


@pytest.mark.parametrize("out_dtype", OUT, ids=str)
def test_reference_bias_is_an_addition_of_its_own(out_dtype) -> None:
    a, sa, b, sb, bias = operands(128, 256, 96)
    product = gemm_reference(a, sa, b, sb, None, torch.float32, True)
    unfused = (product + bias.float()).to(out_dtype)
    assert torch.equal(gemm_reference(a, sa, b, sb, bias, out_dtype, True), unfused)


def test_operands_that_are_refused() -> None:
    a, sa, b, sb, bias = operands(32, 64, 48)

    def call(a=a, b=b, bias=None, out=torch.bfloat16):
        return gemm_reference(a, sa, b, sb, bias, out, True)

    with pytest.raises(ValueError, match="e5m2 x e5m2"):
        call(a.to(E5M2), b.to(E5M2))
    with pytest.raises(ValueError, match="multiple of 16"):
        call(a[:, :24].contiguous(), b[:, :24].contiguous())
    with pytest.raises(ValueError, match="contiguous"):
        call(a[:, :32], b[:, :32])
    with pytest.raises(ValueError, match=r"a \[M, K\] and b \[N, K\]"):
        call(a, b[:, :32].contiguous())
    with pytest.raises(ValueError, match="float8"):
        call(a.float(), b)
    with pytest.raises(ValueError, match="out_dtype"):
        call(out=torch.float64)
    with pytest.raises(ValueError, match=r"bias \[64\]"):
        call(bias=bias[:63])


# -- tile choice -----------------------------------------------------------------------------------


def test_tile_names_are_unique() -> None:
    assert len({tile.name for tile in TILES}) == len(TILES)


@pytest.mark.parametrize("fast", [True, False])
def test_the_choice_fits_the_shape(fast) -> None:
    large = choose_tile(8192, 14336, 4096, fast)
    assert large.block_m * large.block_n == 128 * 256 and large.fast == fast
    decode = choose_tile(1, 4096, 14336, fast)
    assert decode.block_m == 64 and decode.split_k > 1, "64 tiles or fewer of a whole K leave half of the GPU idle"
    assert choose_tile(1, 14336, 256, fast).split_k == 1
    for shape in itertools.product((1, 300, 8192), (100, 4095, 4096), (16, 4096)):
        tile = choose_tile(*shape, fast)
        assert tile.fits(out_bytes=4) and (tile.narrow or shape[1] % 8 == 0)


# -- launching from a traced graph, no GPU needed --------------------------------------------------


def traced_kernels(m: int, n: int, k: int, bias: bool = True, dynamic: str = "") -> list[dict]:
    """The launches recorded for fake CUDA operands; the sizes named in `dynamic` ("m", "k") are symbolic, with "data" k is nobody's guess."""
    shape_env = ShapeEnv()
    real = torch.empty(m, k // 16)  # a fake one has its own sizes already
    with FakeTensorMode(shape_env=shape_env) as mode:
        symbols = mode.from_tensor(real, static_shapes=False).shape
        m = symbols[0] if "m" in dynamic else m
        k = symbols[1] * 16 if "k" in dynamic else k
        with shape_env.ignore_fresh_unbacked_symbols():
            k = (shape_env.create_unbacked_symint() + 15) // 16 * 16 if dynamic == "data" else k
        a = torch.empty((m, k), dtype=E4M3, device="cuda")
        b = torch.empty((n, k), dtype=E4M3, device="cuda")
        one = torch.empty(1, device="cuda")
        shift = torch.empty(n, device="cuda") if bias else None
        fn = lambda a, b, one: gemm(a, one, b, one, shift, torch.bfloat16, True)  # noqa: E731
        graph = make_fx(fn, tracing_mode="real")(a, b, one).graph
    assert len(shape_env.guards) == 0, "the launch must not specialize the graph"
    return [node.kwargs for node in graph.nodes if "triton_kernel_wrapper" in str(node.target)]


@pytest.mark.parametrize("dynamic", ["", "m", "k"], ids=["static", "dynamic m", "dynamic k"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_the_launch_is_recorded_by_make_fx(dynamic, bias) -> None:
    (launch,) = traced_kernels(256, 128, 64, bias, dynamic)
    assert set(launch["kwargs"]) >= {"a", "a_scale_inv", "b", "b_scale_inv", "c", *(["bias"] if bias else [])}
    assert launch["grid"][0][0] > 0


@pytest.mark.parametrize(("dynamic", "may_be"), [("", False), ("k", False), ("data", True)])
def test_a_depth_that_data_decides_may_be_0(dynamic: str, may_be: bool) -> None:
    product, *_ = traced_kernels(4096, 512, 1024, False, dynamic)
    assert product["kwargs"]["MAY_BE_EMPTY"] is may_be


@pytest.mark.parametrize("dynamic", ["", "k", "data"])
def test_few_rows_by_a_depth_that_is_not_known(dynamic: str) -> None:
    """The gradient of a weight with few rows, as of a LoRA: the depth is the tokens."""
    product, *_ = traced_kernels(64, 4096, 8192, False, dynamic)
    assert product["kwargs"]["EVEN"] is (dynamic == "")


@pytest.mark.parametrize("addend", [None, torch.tensor([[1.0078125]], dtype=torch.bfloat16).expand(2, 3)])
@pytest.mark.parametrize("bias", [None, torch.tensor([1.0, 1.001953125, 300.5])])
def test_a_sum_of_nothing(bias: torch.Tensor | None, addend: torch.Tensor | None) -> None:
    empty, one = torch.empty(2, 0).to(E4M3), torch.ones(1)
    operands = Operand(empty, one), Operand(torch.empty(3, 0).to(E4M3), one)
    expected = reference(Request(*operands, torch.bfloat16, True, bias, addend))
    assert torch.equal(sum_of_nothing(torch.full_like(expected, 7), bias, addend), expected)


def test_split_k_is_two_launches() -> None:
    assert len(traced_kernels(16, 4096, 14336)) == 2


def test_size_hint_of_a_plain_and_of_a_symbolic_size() -> None:
    shape_env = ShapeEnv()
    size = FakeTensorMode(shape_env=shape_env).from_tensor(torch.empty(48, 3), static_shapes=False).shape[0]
    assert isinstance(size, torch.SymInt)
    assert (size_hint(48), size_hint(size), size_hint(size * 2)) == (48, 48, 96)
    assert size_hint(shape_env.create_unbacked_symint(), fallback=7) == 7
    assert len(shape_env.guards) == 0


# -- the kernel, on a GPU --------------------------------------------------------------------------


GPU_SHAPES = [
    (128, 256, 96),
    (64, 128, 64),
    (1, 4096, 4096),
    (16, 14336, 4096),
    (16, 4096, 14336),
    (320, 336, 64),
    (336, 320, 4096),
    (1000, 1024, 4096),
    (8192, 1024, 512),
    (2048, 4096, 4096),
    (512, 14336, 4096),
    (200, 100, 208),  # rows of 200 bytes: masked stores
    (1000, 4095, 256),
    (17, 33, 4112),
]


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [True, False], ids=["fast", "slow"])
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_kernel_is_the_float64_product(shape, fast) -> None:
    for (a_dtype, b_dtype), out_dtype in zip(((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)), OUT, strict=True):
        a, sa, b, sb, bias = operands(*shape, a_dtype, b_dtype, device="cuda")
        want = in_float64(a, sa, b, sb, bias)
        got = gemm(a, sa, b, sb, bias, out_dtype, fast)
        assert got.dtype == out_dtype and got.shape == shape[:2]
        assert relative_error(got, want) < 1e-2
        if not fast and out_dtype == torch.float32:
            assert relative_error(got, want) < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: tile.name)
def test_every_tile_is_right_and_repeats_itself(tile) -> None:
    a, sa, b, sb, bias = operands(1000, 1040, 2064, E5M2, device="cuda")
    want = in_float64(a, sa, b, sb, bias)
    first = gemm_with_tile(tile, a, sa, b, sb, bias, torch.bfloat16)
    assert relative_error(first, want) < 1e-2
    for _ in range(3):
        assert torch.equal(gemm_with_tile(tile, a, sa, b, sb, bias, torch.bfloat16), first)


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [True, False], ids=["fast", "slow"])
@pytest.mark.parametrize("out_dtype", OUT, ids=str)
@pytest.mark.parametrize("shape", [(1000, 1024, 4096), (16, 4096, 14336), (200, 100, 208)], ids=str)
def test_fused_bias_is_bit_equal_to_an_addition_of_its_own(shape, out_dtype, fast) -> None:
    a, sa, b, sb, bias = operands(*shape, device="cuda")
    product = gemm(a, sa, b, sb, None, torch.float32, fast)
    fused = gemm(a, sa, b, sb, bias, out_dtype, fast)
    assert torch.equal(fused, (product + bias.float()).to(out_dtype))


@pytest.mark.gpu
def test_nan_and_infinity_pass_through() -> None:
    a, sa, b, sb, _ = operands(64, 64, 64, E5M2, device="cuda")
    a[3, 5] = float("nan")
    got = gemm(a, sa, b, sb, None, torch.float32, False)
    assert got[3].isnan().all() and not got[:3].isnan().any() and not got[4:].isnan().any()
