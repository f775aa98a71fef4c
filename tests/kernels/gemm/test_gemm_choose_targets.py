"""kernels/gemm/choose.py on every GPU of the table: whatever the product, the kernel that is chosen runs there."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator

import pytest
from expecttest import assert_expected_inline
from helpers.slow import slow_but

from te_dynamo.kernels.gemm.choose import Choice, Product, choose, stacking_pays
from te_dynamo.kernels.gemm.tiles import Tile
from te_dynamo.kernels.runtime.target import TARGETS, Target
from te_dynamo.kernels.tiles.stacking import Stacking

SHAPES = 200


def products() -> Iterator[Product]:
    """Random products of each kind; segments are whole blocks of 128, as te.gemm demands of a stack."""
    draw = random.Random(0)
    for _ in range(SHAPES):
        m, n = (draw.choice((draw.randrange(1, 65), draw.randrange(65, 20000))) for _ in range(2))
        k, fast = 16 * draw.randrange(1, 1200), draw.random() < 0.5
        known = {"m_known": draw.random() < 0.5, "n_known": draw.random() < 0.5}
        product = Product(m, n, k, fast, draw.choice((2, 4)), **known)
        for epilogue in ("none", "add", "amax"):
            yield dataclasses.replace(product, epilogue=epilogue)
        for scaling in ("1x128", "128x128"):
            yield dataclasses.replace(product, scaling=scaling, fast_accum=False)
        groups = draw.randrange(1, 129)
        yield dataclasses.replace(product, m_groups=groups)
        yield dataclasses.replace(product, k_groups=groups)
        segments = tuple(128 * draw.randrange(1, 64) for _ in range(draw.choice((2, 3))))
        for along in ("M", "N", "K"):
            yield dataclasses.replace(product, **{along.lower(): sum(segments)}, stacking=Stacking(along, segments))
        half = segments[0]
        gated = {"n": 2 * half, "out_bytes": 2, "epilogue": "gated", "stacking": Stacking("N", (half, half))}
        yield dataclasses.replace(product, **gated)


def check(product: Product, choice: Choice, target: Target) -> None:
    if not isinstance(choice.tile, Tile) or choice.kernel != "usual":
        assert target.has_wgmma
        return
    tile = choice.tile
    # What a program adds passes through shared memory beside its result.
    widest = 2 * product.out_bytes if product.epilogue == "add" and choice.fused else product.out_bytes
    assert tile.shared_bytes(widest, target) <= target.shared_bytes
    assert tile.ctas_per_sm * (tile.shared_bytes(widest, target) + 1024) <= target.shared_bytes + 1024
    assert target.buffers(tile.num_stages) >= 2, "one block of K is read while the next is written"
    assert tile.fast or not product.fast_accum or product.scaling != "tensor"
    assert not tile.fast or product.fast_accum or target.has_fp32_sums
    assert target.has_wgmma or not tile.halves
    assert tile.narrow or product.n % 8 == 0
    if product.stacking.along:
        assert tile.split_k == 1 and product.stacking.divisible(tile.block_m, tile.block_n, tile.block_k)
    if product.m_groups or product.k_groups:
        assert tile.split_k == 1


@pytest.mark.one_fast_case
@pytest.mark.parametrize("name", slow_but(4, TARGETS))
def test_something_that_runs_is_always_chosen(name: str) -> None:
    target = TARGETS[name]
    for product in products():
        check(product, choose(product, target), target)
        if target.has_wgmma:
            check(product, choose(product, target, recorded=True), target)
        if product.stacking.along and product.epilogue == "none":
            stacking_pays(product, target)


@pytest.mark.parametrize("name", ["h200", "b200", "rtx5090", "l40s"])
def test_an_epilogue_changes_no_sum(name: str) -> None:
    """The parts of K are those of the plain product, whatever the kernel does besides and however wide C is."""
    for product in products():
        if product.scaling == "tensor" and not product.m_groups and not product.k_groups and not product.stacking.along:
            plain = choose(dataclasses.replace(product, epilogue="none", out_bytes=4), TARGETS[name])
            assert choose(product, TARGETS[name]).tile.split_k == plain.tile.split_k


def test_a_gpu_whose_shared_memory_holds_no_tile() -> None:
    tiny = dataclasses.replace(TARGETS["l40s"], name="Tiny", shared_bytes=16 * 1024)
    with pytest.raises(ValueError, match="no tile fits in the 16 KB of shared memory of Tiny"):
        choose(Product(4096, 4096, 4096), tiny)


def test_the_tiles_of_a_large_and_of_a_small_product() -> None:
    lines = []
    for name, (what, size) in itertools.product(
        ("h200", "b200", "rtx5090", "l40s"), {"large": (8192, 4096, 4096), "16 rows": (16, 14336, 4096)}.items()
    ):
        kinds = {
            "fast": Product(*size, True, 2),
            "slow": Product(*size, False, 2),
            "blocks": Product(*size, False, 2, scaling="1x128"),
            "groups": Product(*size, False, 2, m_groups=8),
        }
        for kind, product in kinds.items():
            tile = choose(product, TARGETS[name], recorded=True).tile
            lines.append(f"{name:8} {what:8}{kind:7} {tile.name if isinstance(tile, Tile) else 'decode'}")
    assert_expected_inline(
        "\n".join(lines),
        """\
h200     large   fast    fast 256x128x128 w8 s4
h200     large   slow    slow 128x128x128 w4 s3 halves 2/sm
h200     large   blocks  block 128x128x128 w4 s3 halves 2/sm
h200     large   groups  slow 128x128x128 w4 s3 halves 2/sm
h200     16 rows fast    decode
h200     16 rows slow    decode
h200     16 rows blocks  decode
h200     16 rows groups  slow 64x128x128 w4 s5
b200     large   fast    fast 256x128x128 w8 s4
b200     large   slow    fast 256x128x128 w8 s4
b200     large   blocks  block 64x128x128 w4 s5
b200     large   groups  fast 128x128x128 w4 s3 2/sm
b200     16 rows fast    fast 64x128x128 w4 s5
b200     16 rows slow    fast 64x128x128 w4 s5
b200     16 rows blocks  block 64x128x128 w4 s5
b200     16 rows groups  fast 64x128x128 w4 s5
rtx5090  large   fast    fast 128x128x128 w8 s3
rtx5090  large   slow    slow 128x128x128 w8 s3
rtx5090  large   blocks  block 64x128x128 w4 s4
rtx5090  large   groups  slow 64x128x128 w4 s4
rtx5090  16 rows fast    fast 64x128x128 w4 s4 k/4
rtx5090  16 rows slow    slow 64x128x128 w4 s4 k/4
rtx5090  16 rows blocks  block 64x128x128 w4 s4 k/4
rtx5090  16 rows groups  slow 64x128x128 w4 s4
l40s     large   fast    fast 128x128x128 w8 s3
l40s     large   slow    slow 128x128x128 w8 s3
l40s     large   blocks  block 64x128x128 w4 s4
l40s     large   groups  slow 64x128x128 w4 s4
l40s     16 rows fast    fast 64x128x128 w4 s4
l40s     16 rows slow    slow 64x128x128 w4 s4
l40s     16 rows blocks  block 64x128x128 w4 s4
l40s     16 rows groups  slow 64x128x128 w4 s4""",
    )
