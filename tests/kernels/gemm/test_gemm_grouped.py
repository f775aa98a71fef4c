"""The grouped FP8 GEMMs and the quantization by groups: references against a loop over the groups, errors, traced launches,
and on a GPU the kernels themselves."""

from __future__ import annotations

import pytest
import torch
from helpers.kernels.gemm_operands import E4M3, E5M2, relative_error
from helpers.kernels.gemms import (
    gemm_grouped,
    gemm_grouped_columns,
    gemm_grouped_columns_reference,
    gemm_grouped_columns_with_tile,
    gemm_grouped_reference,
    gemm_grouped_with_tile,
    gemm_reference,
)
from helpers.kernels.grouped_operands import column_operands, exact_columns, offsets
from helpers.kernels.kernel_cases import DTYPES, FP8_DTYPES, assert_same_bits, gpu, make_input, needs_cuda, run_poisoned
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from te_dynamo.kernels.gemm.tiles import GROUPED_TILES, choose_columns_tile, choose_rows_tile
from te_dynamo.kernels.layouts.tensor import GroupedForm, TensorForm
from te_dynamo.kernels.quantize.current import quantize_grouped, quantize_grouped_reference, quantize_reference

OUT = [torch.bfloat16, torch.float16, torch.float32]


def row_operands(m: int, groups: int, n: int, k: int, a_dtype=E4M3, device: str = "cpu", seed: int = 0):
    """a, a_scale_inv, b, b_scale_inv: random tokens in one scale and weights in a scale a group."""
    generator = torch.Generator().manual_seed(seed)
    x, w = torch.randn(m, k, generator=generator), torch.randn(groups, n, k, generator=generator)
    w *= torch.arange(1, groups + 1)[:, None, None]
    a = quantize_reference(x, TensorForm(a_dtype, True, False, False, 0.0))
    b = quantize_grouped_reference(w, GroupedForm(E4M3, True, False, False, 0.0))
    return tuple(t.to(device) for t in (*a, *b))


def exact_rows(a, a_scale_inv, b, b_scale_inv, offs):
    """The definition in float64, on the dequantized operands."""
    c = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64, device=a.device)
    start = 0
    for group, end in enumerate(offs.tolist()):
        weight = b[group].double() * b_scale_inv[group].double()
        c[start:end] = (a[start:end].double() * a_scale_inv.double()) @ weight.t()
        start = end
    return c


# -- the references, on the CPU --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rowwise", "columnwise"), [(True, True), (True, False), (False, True)])
def test_groups_are_quantized_each_by_itself(rowwise, columnwise, dtype) -> None:
    x = torch.stack([make_input(kind, (20, 48), dtype) for kind in ("normal", "zeros", "huge", "nan")])
    for fp8_dtype in FP8_DTYPES:
        *buffers, scale_inv = quantize_grouped_reference(x, GroupedForm(fp8_dtype, rowwise, columnwise, False, 1e-3))
        for group in range(4):
            expected = quantize_reference(x[group], TensorForm(fp8_dtype, rowwise, columnwise, False, 1e-3))
            assert_same_bits([*(buffer[group] for buffer in buffers), scale_inv[group : group + 1]], expected)


@pytest.mark.parametrize(
    ("sizes", "behind", "out_dtype"),
    [([9, 0, 33], 5, OUT[0]), ([40], 0, OUT[1]), ([0, 0], 3, OUT[2]), ([1, 16, 7, 0], 0, OUT[2])],
    ids=str,
)
def test_references_are_a_loop_over_the_groups(sizes: list[int], behind: int, out_dtype: torch.dtype) -> None:
    check_references(sizes, behind, out_dtype)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=4), st.integers(0, 20), st.sampled_from(OUT))
def test_references_of_random_groups(sizes: list[int], behind: int, out_dtype: torch.dtype) -> None:
    check_references(sizes, behind, out_dtype)


def check_references(sizes: list[int], behind: int, out_dtype: torch.dtype) -> None:
    """Bit for bit the ungrouped GEMM of every group; zero behind the last one, and in an empty group's columns."""
    m, groups = sum(sizes) + behind, len(sizes)
    offs = offsets(sizes)
    a, sa, b, sb = row_operands(m, groups, 32, 48)
    c = gemm_grouped_reference(a, sa, b, sb, offs, out_dtype, True)
    left, sl, right, sr = column_operands(max(m, 1), 32, 48)
    dw = gemm_grouped_columns_reference(left, sl, right, sr, offs, out_dtype, False)
    start = 0
    for group, size in enumerate(sizes):
        end = start + size
        expected = gemm_reference(a[start:end], sa, b[group], sb[group], None, out_dtype, True)
        assert torch.equal(c[start:end], expected)
        torch.testing.assert_close(
            dw[group].double(),
            exact_columns(left, sl, right, sr, torch.tensor([start, end]))[1],
            rtol=torch.finfo(out_dtype).eps * 4,
            atol=1e-3,
        )
        assert size or not dw[group].any()
        start = end
    assert not c[start:].any()


def test_nan_stays_in_its_group() -> None:
    """A neighbour's NaN is not multiplied by zero."""
    left, sl, right, sr = column_operands(24, 16, 16)
    left[3, 10], right[5, 10] = float("nan"), float("nan")
    dw = gemm_grouped_columns_reference(left, sl, right, sr, offsets([9, 3, 12]), torch.float32, False)
    assert not dw[0].isnan().any() and dw[1, 3].isnan().all() and dw[1, :, 5].isnan().all() and not dw[2].isnan().any()


def test_offsets_out_of_range_are_clamped() -> None:
    a, sa, b, sb = row_operands(10, 3, 16, 16)
    wild = torch.tensor([4, 2**31 - 1, 99], dtype=torch.int32)
    c = gemm_grouped_reference(a, sa, b, sb, wild, torch.float32, True)
    assert torch.equal(c[:4], gemm_reference(a[:4], sa, b[0], sb[0], None, torch.float32, True))
    assert torch.equal(c[4:], gemm_reference(a[4:], sa, b[1], sb[1], None, torch.float32, True))
    wild[0] = -9
    assert torch.equal(
        gemm_grouped_reference(a, sa, b, sb, wild, torch.float32, True),
        gemm_reference(a, sa, b[1], sb[1], None, torch.float32, True),
    )


def test_operands_that_are_refused() -> None:
    a, sa, b, sb = row_operands(32, 3, 64, 48)
    offs = offsets([10, 10, 12])

    def rows(a=a, b=b, sb=sb, offs=offs, out=torch.bfloat16):
        return gemm_grouped_reference(a, sa, b, sb, offs, out, True)

    with pytest.raises(ValueError, match=r"a \[M, K\] and b \[G, N, K\], got \(32, 48\) and \(64, 48\)"):
        rows(b=b[0])
    with pytest.raises(ValueError, match=r"got \(32, 32\) and \(3, 64, 48\)"):
        rows(a=a[:, :32].contiguous())
    with pytest.raises(ValueError, match="both operands must be contiguous"):
        rows(b=b.transpose(1, 2).contiguous().transpose(1, 2))
    with pytest.raises(ValueError, match="multiple of 16"):
        rows(a[:, :24].contiguous(), b[:, :, :24].contiguous())
    with pytest.raises(ValueError, match="e5m2 x e5m2"):
        rows(a.to(E5M2), b.to(E5M2))
    with pytest.raises(ValueError, match=r"offs int32 \[3\], the end of each group, got torch.int64 \(3,\)"):
        rows(offs=offs.long())
    with pytest.raises(ValueError, match=r"offs int32 \[3\].*got torch.int32 \(2,\)"):
        rows(offs=offs[:2])
    with pytest.raises(ValueError, match=r"b_scale_inv \[3\], got \(1,\)"):
        rows(sb=sb[:1])
    with pytest.raises(ValueError, match="out_dtype"):
        rows(out=torch.float64)
    left, sl, right, sr = column_operands(32, 16, 16)
    with pytest.raises(ValueError, match=r"offs int32 \[G\].*got torch.int32 \(0,\)"):
        gemm_grouped_columns_reference(left, sl, right, sr, offs[:0], torch.bfloat16, True)
    for shape in ((4, 4), (0, 4, 4), (2, 0, 4)):
        with pytest.raises(ValueError, match=r"expected x \[G, N, K\]"):
            quantize_grouped_reference(torch.zeros(shape), GroupedForm(E4M3, True, False, False, 0.0))


# -- tile choice and launches, no GPU needed -------------------------------------------------------


@pytest.mark.parametrize("fast", [True, False])
def test_the_choice_fits_the_shape(fast) -> None:
    assert len({tile.name for tile in GROUPED_TILES}) == len(GROUPED_TILES)
    assert choose_rows_tile(65536, 4096, 4096, 8, fast, out_bytes=2).block_m == 128
    assert choose_rows_tile(64, 4096, 4096, 32, fast).block_m == 64, "two rows a group"
    for groups in (1, 8, 128):
        for n in (16, 4095, 4096):
            for tile in (choose_rows_tile(300, n, 64, groups, fast), choose_columns_tile(64, n, 300, groups, fast)):
                assert tile.fast == fast and tile.fits(4) and (tile.narrow or n % 8 == 0)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic m"])
def test_the_launches_are_recorded_by_make_fx(dynamic) -> None:
    shape_env = ShapeEnv()
    real = torch.empty(64, 2)  # a fake one has its own sizes already
    with FakeTensorMode(shape_env=shape_env) as mode:
        m = mode.from_tensor(real, static_shapes=False).shape[0] if dynamic else 64
        a = torch.empty((m, 48), dtype=E4M3, device="cuda")
        columns = torch.empty((32, (m + 15) // 16 * 16), dtype=E4M3, device="cuda")
        w = torch.empty((3, 32, 48), device="cuda")
        one, offs = torch.empty(1, device="cuda"), torch.empty(3, dtype=torch.int32, device="cuda")

        def run(a, columns, w, one, offs):
            data, transpose, scales = quantize_grouped(w, GroupedForm(E4M3, True, True, False, 0.0))
            y = gemm_grouped(a, one, data, scales, offs, torch.bfloat16, True)
            return y, transpose, gemm_grouped_columns(columns, one, columns, one, offs, torch.bfloat16, False)

        graph = make_fx(run, tracing_mode="real")(a, columns, w, one, offs).graph
    assert len(shape_env.guards) == 0, "the launch must not specialize the graph"
    launches = [node for node in graph.nodes if "triton_kernel_wrapper" in str(node.target)]
    assert len(launches) == 2 + 1 + 1 + 1, "fp32 weights: a cast launch for each usage"


# -- the kernels, on a GPU -------------------------------------------------------------------------

GPU_SIZES = [
    [300],
    [0, 0, 5],
    [128, 128, 128, 128],
    [1, 127, 129, 0, 255, 33, 400, 7],
    [64] * 33,
    [2000, 0, 48, 1],
    [16, 48, 0, 5, 3, 104, 304, 100],
]


def on_gpu(test):
    return gpu(needs_cuda(test))


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [True, False], ids=["fast", "slow"])
@pytest.mark.parametrize("behind", [0, 77])
@pytest.mark.parametrize("sizes", GPU_SIZES, ids=str)
def test_kernels_are_the_float64_product(sizes, behind, fast) -> None:
    m = sum(sizes) + behind
    offs = offsets(sizes, "cuda")
    for (n, k), out_dtype in zip(((256, 512), (4096, 1024), (336, 208)), OUT, strict=True):
        a, sa, b, sb = row_operands(m, len(sizes), n, k, E5M2 if out_dtype == torch.float16 else E4M3, "cuda")
        got = gemm_grouped(a, sa, b, sb, offs, out_dtype, fast)
        assert got.dtype == out_dtype and got.shape == (m, n)
        assert relative_error(got, exact_rows(a, sa, b, sb, offs)) < 1e-2
        assert not got[m - behind :].any()
        left, sl, right, sr = column_operands(m, n, k, device="cuda")
        dw = gemm_grouped_columns(left, sl, right, sr, offs, out_dtype, fast)
        assert dw.dtype == out_dtype and dw.shape == (len(sizes), n, k)
        want = exact_columns(left, sl, right, sr, offs)
        assert relative_error(dw, want) < 1e-2
        for group, size in enumerate(sizes):
            assert size or not dw[group].any()


@pytest.mark.gpu
@pytest.mark.parametrize("tile", GROUPED_TILES, ids=lambda tile: tile.name)
def test_every_tile_is_right_and_writes_everything(tile) -> None:
    sizes = [300, 0, 17, 512, 171]
    offs = offsets(sizes, "cuda")
    a, sa, b, sb = row_operands(1040, 5, 1040, 2064, device="cuda")
    left, sl, right, sr = column_operands(1040, 1040, 528, device="cuda")

    def run():
        c = gemm_grouped_with_tile(tile, a, sa, b, sb, offs, torch.bfloat16)
        return [c, gemm_grouped_columns_with_tile(tile, left, sl, right, sr, offs, torch.bfloat16)]

    c, dw = run_poisoned(run)
    assert relative_error(c, exact_rows(a, sa, b, sb, offs)) < 1e-2
    assert relative_error(dw, exact_columns(left, sl, right, sr, offs)) < 1e-2


@pytest.mark.gpu
@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=40), st.booleans())
def test_random_groups(sizes: list[int], fast: bool) -> None:
    m = max(sum(sizes), 1)
    offs = offsets(sizes, "cuda")
    a, sa, b, sb = row_operands(m, len(sizes), 128, 96, device="cuda")
    got = gemm_grouped(a, sa, b, sb, offs, torch.bfloat16, fast)
    left, sl, right, sr = column_operands(m, 128, 96, device="cuda")
    dw = gemm_grouped_columns(left, sl, right, sr, offs, torch.bfloat16, fast)
    start = 0
    for group, size in enumerate(sizes):
        rows, exact = slice(start, start + size), torch.tensor([start, start + size])
        if size:
            assert relative_error(got[rows], exact_rows(a, sa, b, sb, offs)[rows]) < 1e-2
            assert relative_error(dw[group], exact_columns(left, sl, right, sr, exact)[1]) < 1e-2
        start += size


@pytest.mark.gpu
def test_nan_stays_in_its_group_on_the_gpu() -> None:
    left, sl, right, sr = column_operands(400, 256, 128, device="cuda")
    left[3, 150], right[5, 150] = float("nan"), float("nan")
    for fast in (True, False):
        dw = gemm_grouped_columns(left, sl, right, sr, offsets([149, 3, 248], "cuda"), torch.float32, fast)
        assert not dw[0].isnan().any() and not dw[2].isnan().any()
        assert dw[1, 3].isnan().all() and dw[1, :, 5].isnan().all()


@pytest.mark.gpu
def test_wild_offsets_write_nothing_outside() -> None:
    """Whatever offs holds, the kernels stay inside their tensors: compute-sanitizer-like guard bytes stay as they are."""
    a, sa, b, sb = row_operands(500, 3, 256, 128, device="cuda")
    left, sl, right, sr = column_operands(500, 256, 128, device="cuda")
    for wild in ([400, -7, 9999], [2**31 - 1] * 3, [-(2**31)] * 3):
        offs = torch.tensor(wild, dtype=torch.int32, device="cuda")
        c = gemm_grouped(a, sa, b, sb, offs, torch.bfloat16, True)
        dw = gemm_grouped_columns(left, sl, right, sr, offs, torch.bfloat16, False)
        torch.cuda.synchronize()
        assert c.isfinite().all() and dw.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rowwise", "columnwise"), [(True, True), (True, False), (False, True)])
def test_quantization_by_groups_is_bit_equal_to_the_reference(rowwise, columnwise, dtype) -> None:
    kinds = ("normal", "zeros", "huge", "nan", "denormals")
    for shape in ((48, 300), (1024, 256), (17, 33)):
        x = torch.stack([make_input(kind, shape, dtype) for kind in kinds])
        for fp8_dtype in FP8_DTYPES:
            form = GroupedForm(fp8_dtype, rowwise, columnwise)
            on_device = x.cuda()
            got = run_poisoned(lambda: quantize_grouped(on_device, form))  # noqa: B023
            assert_same_bits(got, quantize_grouped_reference(x, form))
