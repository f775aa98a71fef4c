"""Products that were timed: what can run one, how it is written down, and that no fusion changes the order of its sums."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from helpers.kernels.gemm_operands import relative_error
from helpers.kernels.gemms import block_request, gemm_reference, tensor_request

from te_dynamo.kernels.gemm import cublaslt
from te_dynamo.kernels.gemm.choose import (
    TUNED,
    Choice,
    Product,
    Stacking,
    asked_products,
    choose,
    choose_for,
    use_tuned,
)
from te_dynamo.kernels.gemm.choose import stacking_pays as pays
from te_dynamo.kernels.gemm.cublaslt import multiply_cublaslt
from te_dynamo.kernels.gemm.multiply import run
from te_dynamo.kernels.gemm.request import check
from te_dynamo.kernels.gemm.tiles import SPECIALIZED_SMALL
from te_dynamo.kernels.gemm.tuned import _request, candidates, choices_of, facts, timed_us
from te_dynamo.kernels.layouts.block import scale_shape
from te_dynamo.kernels.runtime.margin import gemm_target
from te_dynamo.kernels.runtime.target import TARGETS

H200, B200 = TARGETS["h200"], TARGETS["b200"]
PRODUCTS = {
    "large": Product(8192, 4096, 4096, fast_accum=True),
    "a few rows": Product(16, 4096, 4096),
    "of 8 columns": Product(512, 8, 4096),
    "stacked": Product(16, 8192, 4096, stacking=Stacking("N", (4096, 4096))),
    "stacked along K": Product(4096, 4096, 512, stacking=Stacking("K", (256, 256))),
    "block": Product(8192, 4096, 4096, scaling="1x128"),
    "block, transposed": Product(8192, 4096, 4096, scaling="128x128"),
    "rows": Product(4096, 4096, 1024, scaling="row"),
    "a few rows of rows": Product(16, 4096, 4096, scaling="row"),
    "stacked rows": Product(4096, 4096, 1024, scaling="row", stacking=Stacking("N", (2048, 2048))),
    "experts of rows": Product(4096, 4096, 1024, scaling="row", m_groups=8),
    "experts' wgrad of rows": Product(4096, 1024, 4096, scaling="row", k_groups=8),
    "experts": Product(4096, 4096, 1024, m_groups=8),
    "experts' wgrad": Product(4096, 1024, 4096, k_groups=8),
    "experts in blocks": Product(4096, 4096, 1024, scaling="1x128", m_groups=8),
    "experts' wgrad in blocks": Product(4096, 1024, 4096, scaling="1x128 by 1x128", k_groups=8),
}


@pytest.fixture(autouse=True)
def nothing_timed() -> Iterator[None]:
    yield
    TUNED.clear()
    choose.cache_clear()


@pytest.mark.parametrize("name", PRODUCTS)
def test_what_is_chosen_is_a_candidate_and_is_written_down(name: str) -> None:
    product = PRODUCTS[name].plain
    for target in (H200, B200):
        found = candidates(product, target)
        assert choose(product, target) in found
        assert len({tuple(facts({(product, target): choice}).values()) for choice in found}) == len(found), (
            "unique names"
        )
        for choice in found:
            assert choices_of(facts({(product, target): choice}), target) == {(product, target): choice}


def test_kernels_are_candidates_where_they_can_run() -> None:
    kernels = {
        name: " ".join(sorted({choice.kernel for choice in candidates(product.plain, H200)} - {"usual"}))
        for name, product in PRODUCTS.items()
    }
    assert kernels == {
        "large": "cublaslt specialized",
        "a few rows": "cublaslt decode specialized",
        "of 8 columns": "specialized",
        "stacked": "decode specialized",
        "stacked along K": "specialized",
        "block": "cublaslt specialized",
        "block, transposed": "cublaslt",
        "rows": "specialized",
        "a few rows of rows": "decode specialized",
        "stacked rows": "specialized",
        "experts of rows": "",
        "experts' wgrad of rows": "specialized",
        "experts": "",
        "experts' wgrad": "specialized",
        "experts in blocks": "",
        "experts' wgrad in blocks": "",
    }
    for name, tile in (("block", SPECIALIZED_SMALL[2]), ("rows", SPECIALIZED_SMALL[0])):
        assert Choice("specialized", tile) in candidates(PRODUCTS[name].plain, H200)
    assert {choice.kernel for choice in candidates(PRODUCTS["large"].plain, B200)} == {"usual", "cublaslt"}
    eleven_blocks = dataclasses.replace(PRODUCTS["block"].plain, k=1408)
    assert "cublaslt" not in {choice.kernel for choice in candidates(eleven_blocks, H200)}, "torch refuses the scales"


@pytest.mark.parametrize("name", PRODUCTS)
def test_every_candidate_is_chosen_once_it_was_the_fastest(name: str) -> None:
    """And by every width of C and epilogue: with the same kernel, and as many parts of K."""
    product = PRODUCTS[name]
    for candidate in candidates(product.plain, H200):
        use_tuned({(product.plain, H200): candidate})
        chosen = choose(product.plain, H200)
        assert chosen == candidate or chosen.kernel == candidate.kernel == "cublaslt"
        for out_bytes in (2, 4):
            for epilogue in ("none", "add", "amax"):
                choice = choose(dataclasses.replace(product, out_bytes=out_bytes, epilogue=epilogue), H200)
                if choice.kernel == "cublaslt" or candidate.kernel == "cublaslt":
                    assert choice.kernel == candidate.kernel
                elif epilogue == "none" or choice.kernel == candidate.kernel:
                    assert (choice.kernel, choice.tile.split_k) == (candidate.kernel, candidate.tile.split_k)
                assert choice.fused <= (candidate.kernel != "cublaslt" or epilogue == "none")
                if choice.kernel == "usual":
                    assert choice.tile.fits(out_bytes)


def test_a_stack_whose_parts_were_fastest_in_parts_of_k_does_not_pay() -> None:
    """Apart they would have other bits."""
    product = Product(512, 8192, 4096, True, stacking=Stacking("N", (4096, 4096)))
    assert pays(product, H200)
    part = Product(512, 4096, 4096, True).plain
    for split in (2, 4):
        in_parts = next(c for c in candidates(part, H200) if c.kernel == "usual" and c.tile.split_k == split)
        use_tuned({(part, H200): in_parts})
        assert not pays(product, H200)
    use_tuned({(part, H200): Choice("cublaslt", in_parts.tile)})
    assert not pays(product, H200)


def test_what_cannot_run_here_is_left_out() -> None:
    large = PRODUCTS["large"].plain
    held = facts({(large, H200): choose(large, H200)})
    assert set(held.values()) == {"specialized"}
    assert choices_of(held, B200) == {}, "no specialized kernel"


def test_asked_products() -> None:
    a, b = (torch.empty(rows, 4096, dtype=torch.float8_e4m3fn, device="meta") for rows in (8192, 4096))
    with asked_products() as asked:
        choose_for(a, b, True, torch.bfloat16)
        choose_for(a, b, True, epilogue="amax")
    assert list(asked) == [(PRODUCTS["large"].plain, H200)]
    choose_for(a, b, False)
    assert len(asked) == 1


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_cublaslts_product_is_the_references(bias: bool, dtype: torch.dtype) -> None:
    """On the CPU torch's own kernel stands in for cuBLASLt: the same call."""
    torch.manual_seed(0)
    a, b = torch.randn(48, 256).to(torch.float8_e5m2), torch.randn(64, 256).to(torch.float8_e4m3fn)
    shift = torch.randn(64).bfloat16() if bias else None
    arguments = (a, torch.tensor([0.5]), b, torch.tensor([0.25]), shift, dtype, False)
    got, want = multiply_cublaslt(tensor_request(*arguments)), gemm_reference(*arguments)
    assert got.dtype == dtype and relative_error(got, want) < {torch.float32: 1e-6}.get(dtype, 4e-3)
    if bias:
        plain = multiply_cublaslt(tensor_request(*arguments[:4], None, torch.float32, False))
        assert torch.equal(got, (plain + shift.float()).to(dtype)), "one rounding"  # type: ignore[union-attr]


def test_cublaslts_scales_of_blocks_are_torchs() -> None:
    """Its shapes and strides."""
    for m, n, k, two_d in (
        (256, 384, 1024, (False, True)),
        (256, 384, 1024, (True, False)),
        (32, 48, 1024, (False, False)),
    ):
        a, b = (torch.empty(rows, k, dtype=torch.float8_e4m3fn, device="meta") for rows in (m, n))
        scales = [
            torch.empty(scale_shape(rows, k, two), device="meta") for rows, two in zip((m, n), two_d, strict=True)
        ]
        with mock.patch.object(cublaslt, "SCALED_MM") as call:
            multiply_cublaslt(block_request(a, scales[0], b, scales[1], None, torch.bfloat16, *two_d))
        _, _, a_scale, b_scale, *_ = call.call_args.args
        assert a_scale.shape == (-(-m // 128) if two_d[0] else m, k // 128)
        assert a_scale.stride() == ((8, 1) if two_d[0] else (1, m))
        assert b_scale.shape == (k // 128, -(-n // 128) if two_d[1] else n)
        assert b_scale.stride() == ((1, 8) if two_d[1] else (n, 1))


@pytest.mark.slow
def test_inductors_code_calls_it_and_times_nothing() -> None:
    def product(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        codes = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        return multiply_cublaslt(tensor_request(codes[0], scale, codes[1], scale, None, torch.bfloat16, False))

    a, b, scale = torch.randn(48, 256), torch.randn(64, 256), torch.tensor([0.5])
    got, (code,) = torch._inductor.utils.run_and_get_code(torch.compile(product), a, b, scale)
    assert "torch.ops.te_kernels.scaled_mm.default(" in code
    assert torch.equal(got, product(a, b, scale))


@pytest.mark.parametrize("name", PRODUCTS)
def test_operands_are_those_of_the_product(name: str) -> None:
    small = dataclasses.replace(PRODUCTS[name].plain, m=256, n=256, k=256)
    if small.stacking.along:
        small = dataclasses.replace(small, stacking=Stacking(small.stacking.along, (128, 128)))
    state = torch.get_rng_state()
    request = _request(small, torch.device("cpu"))
    check(request)
    a, b = request.a.codes, request.b.codes
    assert torch.equal(torch.get_rng_state(), state), "the user's random numbers"
    experts = 8 if name == "experts in blocks" else 1  # one after the other, in one matrix
    assert a.shape == (256, 256) and b.shape[-2:] == (experts * 256, 256)


@pytest.mark.gpu
@pytest.mark.parametrize("name", PRODUCTS)
def test_all_candidates_run_and_agree_on_a_gpu(name: str) -> None:
    """cuBLASLt may lack a product on the device at hand; the kernels may not."""
    product, device = PRODUCTS[name].plain, torch.device("cuda")
    request = _request(product, device)
    for operand in (request.a, request.b):
        operand.scale_inv.copy_(torch.exp2(torch.randint(-2, 3, operand.scale_inv.shape, device=device).float()))
    choices = candidates(product, gemm_target(device))
    times = timed_us(product, choices, device)
    assert min(times.values()) > 0
    assert {choice.kernel for choice in choices if choice not in times} <= {"cublaslt"}
    first, *others = [run(choice, request) for choice in times]
    for other, choice in zip(others, list(times)[1:], strict=True):
        assert relative_error(other, first) < 1e-2, choice
