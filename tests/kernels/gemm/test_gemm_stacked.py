"""Stacked operands: quantization into a stack, the GEMM that reads it; references, tiles, machine code, and on a GPU their bits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from helpers.kernels.compiled_cases import MIXES, SHARED_BYTES, Case, check_machine_code, written
from helpers.kernels.gemm_operands import E4M3, E5M2, FMAX, relative_error
from helpers.kernels.gemms import (
    gemm_reference,
    gemm_stacked,
    gemm_stacked_reference,
    gemm_with_tile,
)
from helpers.kernels.kernel_cases import assert_same_bits, gpu, make_input, needs_cuda, run_poisoned

from te_dynamo.kernels.activation import gated
from te_dynamo.kernels.gemm.choose import Product, choose, stacking_pays
from te_dynamo.kernels.gemm.multiply import gemm_options
from te_dynamo.kernels.gemm.product import gemm_kernel
from te_dynamo.kernels.gemm.specialized.product import (
    _segment_at,
    gemm_specialized_kernel,
    gemm_specialized_out,
    specialized_options,
)
from te_dynamo.kernels.gemm.tiles import (
    TILES,
    choose_stacked_tile,
    choose_tile,
)
from te_dynamo.kernels.layouts.tensor import TensorForm
from te_dynamo.kernels.quantize import current as plain
from te_dynamo.kernels.quantize.current import quantize_stacked, quantize_stacked_reference
from te_dynamo.kernels.quantize.current_kernels import quantize_stacked_kernel
from te_dynamo.kernels.runtime.compiled_code import compile_for
from te_dynamo.kernels.runtime.target import TARGETS
from te_dynamo.kernels.tiles.stacking import Stacking

H200 = TARGETS["h200"]

PAIR, TRIPLE = (256, 384), (256, 128, 128)
FORM = TensorForm(E4M3, True, True)


def stacked_operands(m: int, n: int, k: int, along: str, segments: Sequence[int], device: str = "cpu", spread=1.0):
    """(a, a_scale_inv, b, b_scale_inv): random e5m2 [m, k] and e4m3 [n, k] of current scaling, a scale for each segment.

    spread: how many times larger the values of each segment are than those of the one before.
    """
    generator = torch.Generator().manual_seed(0)
    result = []
    for rows, dtype, dims in ((m, E5M2, "MK"), (n, E4M3, "NK")):
        x = torch.randn(rows, k, generator=generator, dtype=torch.float64)
        parts = list(x.split(list(segments), int(along == "K"))) if along in dims else [x]
        parts = [part * spread**i for i, part in enumerate(parts)] if dtype == E5M2 or along == "N" else parts
        scales = [FMAX[dtype] / part.abs().max() for part in parts]
        data = [(part * scale).to(torch.float32).to(dtype) for part, scale in zip(parts, scales, strict=True)]
        joined = torch.cat([d.view(torch.uint8) for d in data], int(along == "K") if along in dims else 0).view(dtype)
        result += [joined.to(device), torch.stack([1 / s for s in scales]).float().to(device)]
    return result


def in_float64(a, a_scale_inv, b, b_scale_inv, along: str, segments: Sequence[int]) -> torch.Tensor:
    """The definition on the dequantized operands."""
    values = []
    for x, scales, dims in ((a, a_scale_inv, "MK"), (b, b_scale_inv, "NK")):
        parts = x.double().split(list(segments), int(along == "K")) if along in dims else [x.double()]
        values.append(
            torch.cat([p * s.double() for p, s in zip(parts, scales, strict=True)], int(along == "K" and along in dims))
        )
    return values[0] @ values[1].t()


def sizes(along: str, segments: Sequence[int], m: int = 48, n: int = 72, k: int = 96) -> tuple[int, int, int]:
    """m, n, k with the stacked one the sum of the segments."""
    total = sum(segments)
    return (total if along == "M" else m, total if along == "N" else n, total if along == "K" else k)


def apart(
    a, a_scale_inv, b, b_scale_inv, bias, out_dtype, along: str, segments: Sequence[int], product
) -> torch.Tensor:
    """Along M or N, `product` of each segment by itself."""
    stacked, scales = (a, a_scale_inv) if along == "M" else (b, b_scale_inv)
    biases = [None] * len(segments) if bias is None else bias.split(list(segments))
    results = []
    for part, scale, its_bias in zip(stacked.split(list(segments)), scales.split(1), biases, strict=True):
        operands = (part, scale, b, b_scale_inv) if along == "M" else (a, a_scale_inv, part, scale)
        results.append(product(*operands, its_bias, out_dtype))
    return torch.cat(results, int(along == "N"))


# -- references --------------------------------------------------------------------------------------


@pytest.mark.parametrize("segments", [PAIR, TRIPLE], ids=str)
@pytest.mark.parametrize("along", ["M", "N", "K"])
def test_reference_is_the_float64_product(along: str, segments: tuple[int, ...]) -> None:
    operands = stacked_operands(*sizes(along, segments), along, segments)
    want = in_float64(*operands, along, segments)
    assert relative_error(gemm_stacked_reference(*operands, None, torch.float32, True, along, segments), want) < 1e-6
    got = gemm_stacked_reference(*operands, None, torch.bfloat16, True, along, segments)
    assert relative_error(got, want) < 2**-8
    if along != "K":
        each = apart(*operands, None, torch.bfloat16, along, segments, lambda *args: gemm_reference(*args, False))
        assert torch.equal(got, each)


def test_reference_adds_the_bias_of_each_part() -> None:
    operands = stacked_operands(*sizes("N", TRIPLE), "N", TRIPLE)
    bias = torch.randn(sum(TRIPLE), dtype=torch.bfloat16)
    got = gemm_stacked_reference(*operands, bias, torch.bfloat16, True, "N", TRIPLE)
    assert torch.equal(got, apart(*operands, bias, torch.bfloat16, "N", TRIPLE, lambda *x: gemm_reference(*x, False)))


@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("usages", [(True, True), (True, False), (False, True)], ids=str)
def test_quantization_is_that_of_each_tensor(by_columns: bool, usages: tuple[bool, bool]) -> None:
    shapes = [(72, n) if by_columns else (n, 72) for n in TRIPLE]
    xs = [make_input("normal", shape, torch.bfloat16, seed=i) * 3**i for i, shape in enumerate(shapes)]
    stack = quantize_stacked_reference(xs, TensorForm(E4M3, *usages, False, 0.0), by_columns)
    each = [plain.quantize_reference(x, TensorForm(E4M3, *usages, False, 0.0)) for x in xs]
    dims = [int(by_columns)] * usages[0] + [int(not by_columns)] * usages[1] + [0]
    for index, dim in enumerate(dims):
        for part, own in zip(stack[index].split([o[index].shape[dim] for o in each], dim), each, strict=True):
            assert_same_bits([part], [own[index]])


def test_operands_that_are_refused() -> None:
    a, sa, b, sb = stacked_operands(*sizes("N", PAIR), "N", PAIR)

    def call(a=a, sa=sa, b=b, sb=sb, bias=None, along="N", segments=PAIR):
        return gemm_stacked_reference(a, sa, b, sb, bias, torch.bfloat16, True, along, segments)

    with pytest.raises(ValueError, match="2 to 3 segments, multiples of 128"):
        call(segments=(640,))
    with pytest.raises(ValueError, match="multiples of 128"):
        call(segments=(320, 320))
    with pytest.raises(ValueError, match=r"must sum to N = 640"):
        call(segments=(256, 256))
    with pytest.raises(ValueError, match="M, N or K"):
        call(along="n")
    with pytest.raises(ValueError, match=r"expected b_scale_inv \[2\], got \(1,\)"):
        call(sb=sb[:1])
    with pytest.raises(ValueError, match=r"expected bias \[640\], got \(256,\)"):
        call(bias=torch.zeros(256))
    other = stacked_operands(*sizes("K", PAIR), "K", PAIR)
    with pytest.raises(ValueError, match="expected no bias of operands stacked along K"):
        call(*other, bias=torch.zeros(72), along="K")
    x = torch.zeros(128, 64)
    with pytest.raises(ValueError, match="equally many columns"):
        quantize_stacked_reference([x, torch.zeros(128, 32)], FORM, False)
    with pytest.raises(ValueError, match="one dtype"):
        quantize_stacked_reference([x, x.bfloat16()], FORM, False)


# -- choice ------------------------------------------------------------------------------------------


def test_the_tile_divides_the_segments() -> None:
    for fast in (True, False):
        assert choose_stacked_tile(8192, 640, 4096, fast, Stacking("N", (512, 128))).block_n <= 128
        assert choose_stacked_tile(640, 8192, 4096, fast, Stacking("M", (512, 128))).block_m <= 128
        assert choose_stacked_tile(16, 64, 640, fast, Stacking("K", (512, 128))).block_k == 128


def pays(m: int, n: int, k: int, fast: bool, stacking: Stacking) -> bool:
    return stacking_pays(Product(m, n, k, fast, stacking=stacking, m_known=False), H200)


def is_specialized(m: int, n: int, k: int, fast: bool, along: str) -> bool:
    half = {"M": m, "N": n, "K": k}[along] // 2
    return choose(Product(m, n, k, fast, stacking=Stacking(along, (half, half))), H200).specialized


def test_one_gemm_is_taken_where_it_is_faster() -> None:
    ffn = (14336, 14336)
    for fast in (True, False):
        assert pays(8192, 28672, 4096, fast, Stacking("N", ffn))
        assert pays(8192, 4096, 28672, fast, Stacking("K", ffn))
        assert pays(28672, 4096, 8192, fast, Stacking("M", ffn))
        assert choose_tile(16, 1024, 4096, fast).split_k > 1
        assert not pays(16, 6144, 4096, fast, Stacking("N", (4096, 1024, 1024))), "its parts cut K"
    for along, size in {"N": (8192, 28672, 4096), "K": (8192, 4096, 28672), "M": (28672, 4096, 8192)}.items():
        assert is_specialized(*size, True, along) and is_specialized(*size, False, along)
        assert not is_specialized(256, 256, 256, True, along)


@pytest.mark.parametrize(("width", "kv", "fast"), [(2048, 512, False), (2560, 2560, True), (5120, 5120, True)])
def test_launches_count(width: int, kv: int, fast: bool) -> None:
    """q, k and v of 8192 tokens would be as fast apart, by their products' times alone."""
    segments = (width, kv, kv)
    whole = sum(segments)
    for along, size in {"N": (8192, whole, width), "K": (8192, width, whole), "M": (whole, width, 8192)}.items():
        assert pays(*size, fast, Stacking(along, segments)), along


# -- machine code ------------------------------------------------------------------------------------

ARGS = {
    **{"a": "*fp8e5", "a_scale_inv": "*fp32", "b": "*fp8e4nv", "b_scale_inv": "*fp32", "bias": "*bf16", "c": "*bf16"},
    **{"M": "i32", "N": "i32", "K": "i32"},
}


def gemm_case(fast: bool, along: str, segments: tuple[int, ...], m: int, n: int, k: int, bias: bool = False) -> Case:
    stacking = Stacking(along, segments)
    tile = choose_stacked_tile(m, n, k, fast, stacking, out_bytes=2)
    return Case(
        name=f"gemm_stacked {tile.name} {along} {segments}{' bias' * bias}",
        kernel=gemm_kernel,
        args={name: kind for name, kind in ARGS.items() if bias or name != "bias"},
        constants={
            "addend": None,
            **({} if bias else {"bias": None}),
            **gemm_options(tile, n, "tensor", stacking),
        },
        aligned=("a", "a_scale_inv", "b", "b_scale_inv", *(("bias",) if bias else ()), "c", "N", "K"),
        has=("wgmma.mma_async", ".f32.e5m2.e4m3"),
        lacks=("fma.",),
        writes=("c",),
        programs_per_sm=tile.ctas_per_sm,
    )


def quantize_case(by_columns: bool) -> Case:
    block_m, block_k, warps = plain.CAST_TILE
    pointers = {f"x{i}": "*bf16" for i in range(3)} | {f"partials{i}": "*fp32" for i in range(3)}
    pointers |= {"data": "*fp8e4nv", "transpose": "*fp8e4nv", "scale_inv": "*fp32"}
    pointers |= {"hint": "*i64"}
    sizes = [*(f"COUNT_{i}" for i in range(3)), *(f"SIDE_{i}" for i in range(3)), "other"]
    args = {**pointers, **dict.fromkeys(sizes, "i32")}
    return Case(
        name=f"quantize_stacked {by_columns=}",
        kernel=quantize_stacked_kernel,
        args={name: args[name] for name in quantize_stacked_kernel.arg_names if name in args},
        constants={
            **{"BY_COLUMNS": by_columns, "FMAX": 448.0, "EPS": 0.0, "POWER_OF_TWO": False},
            **{"ROWWISE": True, "COLUMNWISE": True, "PARTIALS": plain.PARTIALS, "PASS": "known"},
            **{"BLOCK_M": block_m, "BLOCK_K": block_k, "num_warps": warps},
        },
        aligned=tuple(args),
        has=("st.global.v4.b32", "cvt.rn.satfinite.e4m3x2.f32"),
        writes=("data", "transpose", "scale_inv"),
    )


CASES = [
    gemm_case(True, "N", (14336, 14336), 8192, 28672, 4096),
    gemm_case(False, "N", (4096, 1024, 1024), 8192, 6144, 4096, bias=True),
    gemm_case(False, "M", (4096, 1024, 1024), 6144, 4096, 8192),
    gemm_case(True, "K", (4096, 1024, 1024), 8192, 4096, 6144),
    gemm_case(False, "K", (14336, 14336), 8192, 4096, 28672),
    quantize_case(False),
    quantize_case(True),
]


class Position(int):
    """A position as kernels compare it."""

    def __ge__(self, edge: int) -> Position:
        return Position(int(self) >= edge)

    def to(self, dtype: object) -> int:
        return int(self)


@pytest.mark.parametrize("segments", [PAIR, TRIPLE], ids=str)
def test_positions_past_the_end_are_of_the_last_segment(segments: tuple[int, ...]) -> None:
    """Tiles of the specialized kernel reach past M and N by more than a segment's multiple: the scale that they read is one of them."""
    _, count, *edges = (stacking := Stacking("N", segments).constants()).values()
    assert list(stacking) == ["STACKED", "SEGMENTS", "EDGE_1", "EDGE_2"]
    found = [_segment_at.fn(Position(at), ("N", count, *edges)) for at in range(0, sum(segments) + 257, 128)]
    assert found == [segment for segment, length in enumerate(segments) for _ in range(length // 128)] + [count - 1] * 3


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_machine_code(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    check_machine_code(case)
    assert written(case, monkeypatch) == case.writes


@pytest.mark.one_fast_case
@pytest.mark.parametrize(
    ("fast", "along", "segments"),
    [
        (True, "K", (14336, 14336)),
        pytest.param(False, "K", (4096, 1024, 1024), marks=pytest.mark.slow),
        (False, "M", (14336, 14336)),
        pytest.param(False, "N", (14336, 14336), marks=pytest.mark.slow),
    ],
)
def test_machine_code_of_the_specialized_kernel(fast: bool, along: str, segments: tuple[int, ...]) -> None:
    """Rescaling at the borders costs no spill, and no product waits for another's registers."""
    a, b = MIXES["e5m2.e4m3"]
    options = specialized_options(2, "tensor", fast, along, segments)
    warps = options.pop("num_warps")
    args = {name: kind for name, kind in {**ARGS, "a": a, "b": b}.items() if name != "bias"}
    constants = {**options, "bias": None, "addend": None}
    aligned = ("a", "a_scale_inv", "b", "b_scale_inv", "c", "K", "N")
    report = compile_for(gemm_specialized_kernel, args, constants, aligned=aligned, num_warps=warps)
    assert report.warnings == () and report.spills == 0, report.log
    assert report.shared <= SHARED_BYTES
    # A sum for each segment along K, in each of the two groups of warps: 4 instructions, for each half with slow accumulation.
    products = 1 if fast else 2
    assert report.ptx.count("wgmma.mma_async") == 2 * products * 4 * (len(segments) if along == "K" else 1)
    assert ("add.f32" in report.ptx) != fast and "fma." not in report.ptx


# -- on a GPU ----------------------------------------------------------------------------------------

on_gpu = [gpu, needs_cuda]


def marked(function):
    for mark in on_gpu:
        function = mark(function)
    return function


@marked
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("segments", [PAIR, TRIPLE, (1024, 2048)], ids=str)
@pytest.mark.parametrize("along", ["M", "N", "N and a bias"])
def test_bits_are_those_of_each_product(along: str, segments, out_dtype: torch.dtype, fast: bool) -> None:
    bias = torch.randn(sum(segments), dtype=torch.bfloat16, device="cuda") if "bias" in along else None
    along = along[0]
    operands = stacked_operands(*sizes(along, segments, 300, 264, 1040), along, segments, "cuda", spread=7.0)
    usual = next(t for t in TILES if t.fast == fast and t.split_k == 1 and t.fits(out_dtype.itemsize))
    each = apart(*operands, bias, out_dtype, along, segments, lambda *args: gemm_with_tile(usual, *args))
    assert torch.equal(gemm_stacked(*operands, bias, out_dtype, fast, along, segments), each)
    c = torch.full_like(each, torch.nan)
    gemm_specialized_out(*operands, bias, fast=fast, along=along, segments=segments, out=c)
    assert torch.equal(c, each)


@marked
@pytest.mark.parametrize("spread", [1.0, 2.0**-20, 3e12, 1e-30])
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("segments", [PAIR, TRIPLE, (1024, 2048)], ids=str)
def test_one_sum_over_all_segments(segments, fast: bool, spread: float) -> None:
    """Whichever segment has the largest scale, by either kernel; far apart too."""
    operands = stacked_operands(*sizes("K", segments, 300, 264), "K", segments, "cuda", spread)
    want = in_float64(*operands, "K", segments)
    tolerance = 2e-2 if fast else 2**-8
    got = gemm_stacked(*operands, None, torch.bfloat16, fast, "K", segments)
    assert relative_error(got, want) < tolerance
    special = torch.full_like(got, torch.nan)
    gemm_specialized_out(*operands, fast=fast, along="K", segments=segments, out=special)
    assert relative_error(special, want) < tolerance
    if not fast:
        assert torch.equal(special, got)


@marked
def test_a_segment_of_zeros_adds_nothing() -> None:
    a, sa, b, sb = stacked_operands(*sizes("K", PAIR, 300, 264), "K", PAIR, "cuda")
    for zero in (0, 1):
        x, scales = a.float(), sa.clone()
        x[:, PAIR[0] * zero : PAIR[0] + PAIR[1] * zero] = 0
        scales[zero] = 1.0
        operands = (x.to(E5M2), scales, b, sb)
        want = in_float64(*operands, "K", PAIR)
        for fast in (True, False):
            assert relative_error(gemm_stacked(*operands, None, torch.bfloat16, fast, "K", PAIR), want) < 2e-2


@marked
@pytest.mark.parametrize("fast", [True, False])
def test_a_large_product_is_right_and_repeats_itself(fast: bool) -> None:
    segments = (3584, 512, 512)
    assert is_specialized(8192, 4096, 4608, fast, "K")
    operands = stacked_operands(8192, 4096, 4608, "K", segments, "cuda", spread=0.1)
    first = gemm_stacked(*operands, None, torch.bfloat16, fast, "K", segments)
    a, sa, b, sb = operands
    want = in_float64(a[:300], sa, b, sb, "K", segments)
    assert relative_error(first[:300], want) < 2e-2
    for _ in range(20):
        assert torch.equal(gemm_stacked(*operands, None, torch.bfloat16, fast, "K", segments), first)


@marked
def test_fast_accumulation_of_the_specialized_kernel_is_the_other_kernels() -> None:
    a, sa, b, sb = stacked_operands(512, 512, 4096, "K", (2048, 2048), "cuda")
    c = torch.full((512, 512), torch.nan, dtype=torch.bfloat16, device="cuda")
    gemm_specialized_out(a, sa[:1], b, sb[:1], fast=True, out=c)
    tile = next(t for t in TILES if t.fast and t.split_k == 1)  # parts of K would be added in another order
    assert torch.equal(c, gemm_with_tile(tile, a, sa[:1], b, sb[:1], None, torch.bfloat16))


@marked
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("usages", [(True, True), (True, False), (False, True)], ids=str)
def test_quantize_kernel(by_columns: bool, usages: tuple[bool, bool], dtype: torch.dtype) -> None:
    for other, segments in ((303, TRIPLE), (2048, (2048, 4096))):
        shapes = [(other, n) if by_columns else (n, other) for n in segments]
        xs = [make_input("normal", s, dtype, "cuda", seed=i) * 9**i for i, s in enumerate(shapes)]
        options = (xs, TensorForm(E5M2, *usages), by_columns)
        assert_same_bits(run_poisoned(lambda o=options: quantize_stacked(*o)), quantize_stacked_reference(*options))
        amaxes = [xs[0].abs().amax().float().reshape(1)] + [None] * (len(xs) - 1)
        assert_same_bits(quantize_stacked(*options, amaxes), quantize_stacked_reference(*options))


@marked
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("usages", [(True, True), (True, False), (False, True)], ids=str)
def test_gated_backward_writes_the_stack(usages: tuple[bool, bool], dtype: torch.dtype) -> None:
    for rows, columns in ((303, 256), (4096, 1024)):
        both = make_input("normal", (rows, 2 * columns), dtype, "cuda", seed=1)
        gate, up = both[:, :columns], both[:, columns:]
        dy = make_input("normal", (rows, columns), dtype, "cuda", seed=2)
        form = TensorForm(E5M2, *usages)
        grads = gated.gated_backward(dy, gate, up, "silu")
        expected = quantize_stacked_reference(grads, form, True)
        fused = run_poisoned(lambda args=(dy, gate, up, "silu", form): gated.gated_backward_quantize(*args, True, True))
        assert_same_bits(fused, [*grads, *expected])
        assert_same_bits(gated.gated_backward_quantize(dy, gate, up, "silu", form, False, True), expected)
