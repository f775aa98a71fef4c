"""The warp-specialized GEMM: when it is taken, its machine code, its call by Inductor, and on a GPU its bits."""

from __future__ import annotations

import pytest
import torch
from helpers.kernels.compiled_cases import SHARED_BYTES, compile_specialized
from helpers.kernels.gemm_operands import E4M3, E5M2, OUT, in_float64, operands, relative_error
from helpers.kernels.gemms import arguments, gemm, gemm_with_tile
from helpers.models.snapshot_models import kernels_everywhere
from helpers.models.training import train
from torch import fx, nn

from te_dynamo.kernels.gemm.choose import Product, choose
from te_dynamo.kernels.gemm.specialized.product import (
    gemm_specialized_out,
)
from te_dynamo.kernels.gemm.tiles import TILES
from te_dynamo.kernels.runtime.target import TARGETS
from te_dynamo.lowering.lower import lower
from te_dynamo.recipe import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, Recipe
from te_dynamo.testing import fake_cuda, graph_text

H200 = TARGETS["h200"]

BF16_SPILLS = 0
FP32_SPILLS = 16  # a few words around the bias of a fp32 result, on Triton 3.8


def taken(m: int, n: int, k: int, fast: bool) -> bool:
    return choose(Product(m, n, k, fast), H200).specialized


@pytest.mark.parametrize("fast", [False, True])
def test_it_is_taken_for_large_products(fast: bool) -> None:
    assert taken(8192, 4096, 4096, fast)
    assert taken(8192, 14336, 4096, fast)
    assert not taken(8192, 14330, 4096, fast), "rows of C that are not whole 16 bytes"
    assert not taken(16, 14336, 4096, fast), "decoding"
    assert not taken(4096, 1024, 1024, fast), "shorter than the CPU needs for a call"


@pytest.mark.one_fast_case
@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("scaling", ["tensor", "row"])
@pytest.mark.parametrize(
    ("mix", "out_dtype", "bias"), [("e4m3.e4m3", torch.bfloat16, False), ("e5m2.e4m3", torch.float32, True)]
)
def test_machine_code(mix: str, out_dtype: torch.dtype, bias: bool, scaling: str, fast: bool, small: bool) -> None:
    report = compile_specialized(mix, out_dtype, bias, scaling, fast=fast, small=small)
    assert report.warnings == (), report.log
    assert report.spills <= (BF16_SPILLS if out_dtype == torch.bfloat16 else FP32_SPILLS), report.log
    assert report.shared <= SHARED_BYTES
    assert f".m64n{256 if fast and not small else 128}k32.f32.{mix}" in report.ptx
    assert "wgmma.mma_async" in report.ptx and "setmaxnreg" in report.ptx
    assert "fma." not in report.ptx, "a contracted multiply-add would make a fused bias differ from an addition"


def graph_of_gemm(m: int, n: int, k: int) -> fx.Graph:
    graph = fx.Graph()
    shapes = {"a": ((m, k), E4M3), "s": ((1,), torch.float32), "b": ((n, k), E4M3)}
    nodes = {}
    for name, (shape, dtype) in shapes.items():
        nodes[name] = graph.placeholder(name)
        nodes[name].meta["val"] = torch.empty(shape, dtype=dtype, device="cuda")
    args = arguments(nodes["a"], nodes["s"], nodes["b"], nodes["s"], None, torch.bfloat16, False)
    product = graph.call_function(torch.ops.te.gemm.default, args)
    product.meta["val"] = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    graph.output(product)
    return graph


def test_lowering_leaves_a_large_gemm_to_be_called_and_launches_a_small_one() -> None:
    with fake_cuda(), kernels_everywhere():
        assert lower(graph_of_gemm(8192, 14336, 4096)) == [("te.gemm", "Gluon")]
        assert lower(graph_of_gemm(256, 512, 128)) == [("te.gemm", "Triton")]
        with torch._inductor.config.patch(cpp_wrapper=True):
            graph = graph_of_gemm(8192, 14336, 4096)
            assert lower(graph) == [("te.gemm", "Triton")]
            assert "triton.gemm_kernel[" in graph_text(graph), "a launch that Inductor can write"


# -- on a GPU ----------------------------------------------------------------------------------------


def specialized(a, sa, b, sb, bias, out_dtype: torch.dtype, fast: bool = False, small: bool = False) -> torch.Tensor:
    c = torch.full((a.shape[0], b.shape[0]), torch.nan, dtype=out_dtype, device=a.device)
    gemm_specialized_out(a, sa, b, sb, bias, fast=fast, small=small, out=c)
    return c


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("out_dtype", OUT, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 8, 16), (300, 264, 1040), (1000, 1024, 4112), (8192, 136, 128), (257, 4096, 2064)], ids=str
)
def test_its_bits_are_the_other_kernels(shape, out_dtype: torch.dtype, fast: bool) -> None:
    usual = next(tile for tile in TILES if tile.fast == fast and tile.split_k == 1 and tile.fits(out_dtype.itemsize))
    for a_dtype, b_dtype in ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)):
        a, sa, b, sb, bias = operands(*shape, a_dtype, b_dtype, device="cuda")
        for shift in (None, bias):
            expected = gemm_with_tile(usual, a, sa, b, sb, shift, out_dtype)
            for small in (False, True):
                assert torch.equal(specialized(a, sa, b, sb, shift, out_dtype, fast, small), expected)


@pytest.mark.gpu
def test_a_large_product_is_right_and_repeats_itself() -> None:
    a, sa, b, sb, bias = operands(8192, 14336, 512, device="cuda")
    first = specialized(a, sa, b, sb, bias, torch.bfloat16)
    assert relative_error(first[:300], in_float64(a[:300], sa, b, sb, bias)) < 1e-2
    for _ in range(20):
        assert torch.equal(specialized(a, sa, b, sb, bias, torch.bfloat16), first)


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [False, True])
def test_gemm_takes_it(fast: bool) -> None:
    a, sa, b, sb, _ = operands(8192, 8192, 1024, device="cuda")
    assert taken(8192, 8192, 1024, fast)
    expected = specialized(a, sa, b, sb, None, torch.bfloat16, fast)
    assert torch.equal(gemm(a, sa, b, sb, None, torch.bfloat16, fast), expected)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "recipe", [Float8CurrentScaling(), Float8BlockScaling(), MXFP8BlockScaling(scale_block=128)], ids=Recipe.describe
)
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductors_code_calls_it_without_the_dispatcher(mode: str, recipe: Recipe) -> None:
    from torch._inductor.utils import run_and_get_code

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4096, 8192), nn.GELU(), nn.Linear(8192, 4096)).to("cuda", torch.bfloat16)
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    torch._dynamo.reset()
    expected = train(torch.compile(model, backend="te", options={"recipe": recipe, "codegen": "eager"}), x)
    torch._dynamo.reset()
    options = {"recipe": recipe, **torch._inductor.list_mode_options(mode)}
    compiled = torch.compile(model, backend="te", options=options)
    with torch._inductor.config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(train, compiled, x)
    source = "\n".join(codes)
    assert "extern_kernels.te_gemm(" in source and "torch.ops.te." not in source
    for _ in range(3):  # CUDA graphs are recorded on the second call and replayed on the third
        for got, wanted in zip(train(compiled, x), expected, strict=True):
            assert relative_error(got, wanted.double()) < 5e-2


@pytest.mark.gpu
def test_dynamic_rows() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4096, 8192, bias=False).to("cuda", torch.bfloat16)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="te", dynamic=True)
    with torch.no_grad():
        for index, rows in enumerate((8192, 5000, 3)):
            x = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
            with torch._dynamo.config.patch(error_on_recompile=index > 0):
                assert relative_error(compiled(x), model(x).double()) < 0.08
