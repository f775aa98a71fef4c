"""kernels/gemm/decode.py: the choice, the machine code, the numbers in Triton's interpreter, the bits on a GPU.

Run as a program, this file is the interpreted part: TRITON_INTERPRET must be set before Triton is imported.
"""

from __future__ import annotations

import itertools
import types

import pytest
import torch
from helpers.kernels.gemms import gemm_gated, gemm_gated_reference, gemm_stacked
from helpers.kernels.interpreter_process import run_in_interpreter

from te_dynamo.kernels.activation.gated import BOUNDED_KINDS, gated_partial_amaxes, gated_reference
from te_dynamo.kernels.gemm import decode as kernels
from te_dynamo.kernels.gemm.choose import Choice, Product, choose
from te_dynamo.kernels.gemm.decode import gated_decode_options
from te_dynamo.kernels.gemm.tiles import DecodeTile
from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.runtime.target import TARGETS, Target
from te_dynamo.kernels.tiles import activations
from te_dynamo.kernels.tiles.stacking import Stacking

H200 = TARGETS["h200"]

SHAPES = [(1, 14336, 4096), (16, 2048, 4096), (33, 14336, 4096), (64, 14336, 4096), (7, 2176, 2064)]


def choice(m: int, width: int, k: int, fast: bool, target: Target = H200) -> Choice:
    stacking = Stacking("N", (width, width))
    return choose(Product(m, 2 * width, k, fast, 2, "gated", stacking=stacking), target, recorded=True)


def chosen(m: int, width: int, k: int, fast: bool) -> DecodeTile:
    tile = choice(m, width, k, fast).tile
    assert isinstance(tile, DecodeTile)
    return tile


def operands(m: int, width: int, k: int, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    torch.manual_seed(m)
    a, b = (torch.randn(r, k, device=device).to(torch.float8_e4m3fn) for r in (m, 2 * width))
    return a, torch.full((1,), 0.5, device=device), b, torch.tensor([0.25, 0.06], device=device)


@pytest.mark.parametrize("fast", [True, False])
def test_the_choice(fast: bool) -> None:
    assert chosen(64, 14336, 4096, fast).block_m == 64
    for others in ((65, 14336, 4096), (1, 512, 1024)):
        assert not choice(*others, fast).fused
    assert not choice(1, 14336, 4096, fast, TARGETS["b200"]).fused, "not Hopper"
    assert not choice(1, 64 * 512 + 128, 4096, fast).fused, "more programs than places for an amax"
    assert not choice(1, 1024, 14336, fast).fused, "the whole product takes K in parts"


@pytest.mark.slow
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(("m", "width", "k"), SHAPES)
def test_machine_code(m: int, width: int, k: int, fast: bool) -> None:
    """By the kind whose arithmetic is the longest."""
    from te_dynamo.kernels.runtime.compiled_code import compile_for

    tile = chosen(m, width, k, fast)
    options = gated_decode_options(tile, width, k, 0, "gelu", True)
    report = compile_for(
        kernels.gemm_decode_gated_kernel,
        args={
            **{"a": "*fp8e4nv", "a_scale_inv": "*fp32", "b": "*fp8e4nv", "b_scale_inv": "*fp32"},
            **{"c": "*bf16", "partials": "*fp32", "M": "i32", "WIDTH": "i32", "K": "i32"},
        },
        constexprs={name: value for name, value in options.items() if name != "num_warps"},
        aligned=("a", "a_scale_inv", "b", "b_scale_inv", "c", "partials", "WIDTH", "K"),
        num_warps=tile.num_warps,
    )
    assert "wgmma.mma_async" in report.ptx and "cp.async.cg" in report.ptx
    assert not report.spills and not report.warnings
    assert 2 * (report.shared + 1024) <= 227 * 1024, "two programs on a multiprocessor"


@pytest.mark.slow
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


@triton.jit
def _plain_approximate(FUNCTION: tl.constexpr, x):
    return tl.exp2(x) if FUNCTION == "ex2" else 1.0 / x


@triton.jit
def _plain_rounded(x, DTYPE: tl.constexpr):
    return x.to(DTYPE)


def main() -> None:
    # In place of what is written in PTX, which the interpreter does not know.
    activations._approximate, kernels.rounded = _plain_approximate, _plain_rounded  # type: ignore[assignment]
    kernels.libdevice = types.SimpleNamespace(mul_rn=lambda x, y: x * y)  # type: ignore[assignment]
    for m, width, k in ((1, 128, 256), (5, 128, 144), (16, 640, 512)):
        for (fast, gate), kind in itertools.product(((True, 0), (False, 1)), BOUNDED_KINDS):
            a, sa, b, sb = operands(m, width, k)
            c = torch.full((m, 2 * width), torch.nan, dtype=torch.bfloat16)
            partials = torch.full((kernels.PARTIALS,), torch.nan)
            kernels.launch_gated_decode(DecodeTile(16, 64, 64, 4, 3, fast, 1), a, sa, b, sb, gate, kind, c, partials)
            torch.testing.assert_close(c, gemm_gated_reference(a, sa, b, sb, fast, gate, kind)[0], rtol=1e-2, atol=1e-2)
            halves = c.chunk(2, 1)
            amax = gated_reference(halves[gate], halves[1 - gate], kind).abs().amax().float()
            torch.testing.assert_close(partials.max(), amax, rtol=1e-2, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(("m", "width", "k"), SHAPES)
def test_bits_of_a_product_and_a_pass(m: int, width: int, k: int, fast: bool) -> None:
    a, sa, b, sb = operands(m, width, k, "cuda")
    for gate, kind in itertools.product((0, 1), BOUNDED_KINDS):
        c, partials = gemm_gated(a, sa, b, sb, fast, gate, kind)
        expected = gemm_stacked(a, sa, b, sb, None, torch.bfloat16, fast, "N", (width, width))
        torch.testing.assert_close(c, expected, rtol=0, atol=0)
        parts = expected.chunk(2, 1)
        amax = gated_partial_amaxes(parts[gate], parts[1 - gate], kind).max()
        torch.testing.assert_close(partials.max(), amax, rtol=0, atol=0)
        reference = gemm_gated_reference(a, sa, b, sb, fast, gate, kind)[0].float()
        assert (c.float() - reference).norm() / reference.norm() < (0.02 if fast else 0.003)


@pytest.mark.gpu
def test_nan_is_the_amax() -> None:
    a, sa, b, sb = operands(3, 14336, 4096, "cuda")
    a.view(torch.uint8)[1, 5] = 0x7F  # NaN
    assert gemm_gated(a, sa, b, sb, True, 0, "silu")[1].max().isnan()


if __name__ == "__main__":
    main()
