"""kernels/gemm/choose.py: which kernel and tile run a product, for shapes of every kind."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

from te_dynamo.kernels.gemm.choose import TUNED, Choice, Product, choose, choose_for
from te_dynamo.kernels.gemm.tiles import SPECIALIZED_BLOCK, SPECIALIZED_SMALL, Tile
from te_dynamo.kernels.runtime.target import TARGETS, Target
from te_dynamo.kernels.tiles.stacking import Stacking

H200, B200 = TARGETS["h200"], TARGETS["b200"]
MLP = {
    "up": (8192, 14336, 4096),
    "short": (512, 4096, 4096),
    "short and deep": (512, 4096, 14336),
    "small one too short": (2048, 3072, 4096),
    "16 rows": (16, 14336, 4096),
    "in parts": (1, 1024, 14336),
}


def line(choice: Choice) -> str:
    tile = choice.tile
    name = tile.name if isinstance(tile, Tile) else f"{tile.block_m}x{tile.block_n}x{tile.block_k} s{tile.num_stages}"
    split = f" k/{tile.split_k}" if not isinstance(tile, Tile) and tile.split_k > 1 else ""
    return f"{choice.kernel:12}{name}{split}{'' if choice.fused else ', and a pass'}"


def table(rows: dict[str, Product], target: Target = H200, recorded: bool = False) -> str:
    return "\n".join(f"{name:22}{line(choose(product, target, recorded))}" for name, product in rows.items())


def shapes(fast: bool, **others: Any) -> dict[str, Product]:
    return {name: Product(*size, fast, 2, **others) for name, size in MLP.items()}


def test_one_scale_a_tensor() -> None:
    assert_expected_inline(
        table(shapes(True)),
        """\
up                    specialized fast 128x256x128 w12 s4
short                 usual       fast 128x128x128 w8 s4
short and deep        usual       fast 128x128x128 w8 s4
small one too short   usual       fast 128x128x128 w8 s4
16 rows               decode      16x64x256 s4
in parts              decode      16x64x256 s4 k/4""",
    )
    assert_expected_inline(
        table(shapes(False)),
        """\
up                    specialized slow 256x128x128 w12 s4 halves
short                 usual       slow 128x128x128 w8 s4
short and deep        specialized slow 128x128x128 w12 s6
small one too short   specialized slow 256x128x128 w12 s4 halves
16 rows               decode      16x64x128 s6
in parts              decode      16x64x128 s8 k/4""",
    )


def test_the_specialized_kernel_adds_to_large_tiles_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    up = Product(*MLP["up"], False, 2, "add", "1x128")
    assert choose(up, H200) == Choice("specialized", SPECIALIZED_BLOCK)
    wide = choose(dataclasses.replace(up, out_bytes=4), H200)
    assert wide.kernel == "specialized" and not wide.fused
    monkeypatch.setitem(TUNED, (up.plain, H200), Choice("specialized", SPECIALIZED_SMALL[2]))
    choose.cache_clear()
    assert choose(up, H200) == Choice("specialized", SPECIALIZED_SMALL[2])
    choose.cache_clear()


@pytest.mark.parametrize("target", [TARGETS[name] for name in ("h200", "l40s", "b200", "rtx5090")], ids=str)
def test_an_addend_takes_as_much_shared_memory_as_the_result(target: Target) -> None:
    """The sum keeps the plain product's parts of K, of which its bits are."""
    for scaling, size, nbytes in itertools.product(("tensor", "row", "1x128"), MLP.values(), (2, 4)):
        added = Product(*size, False, nbytes, "add", scaling)  # type: ignore[arg-type]
        found, plain = (choose(p, target, recorded=True) for p in (added, dataclasses.replace(added, epilogue="none")))
        if found.kernel == "usual" and found.fused:
            assert found.tile.fits(2 * nbytes, target) and found.tile.split_k == plain.tile.split_k


def test_rows_that_are_not_known_and_rows_that_are_not_whole_vectors() -> None:
    rows = {
        "16 rows, a hint": Product(16, 14336, 4096, True, 2, m_known=False),
        "rows of 14330": Product(8192, 14330, 4096, True, 2),
    }
    assert_expected_inline(
        table(rows),
        """\
16 rows, a hint       usual       fast 64x128x128 w4 s5
rows of 14330         usual       fast 128x128x128 w8 s4""",
    )


def test_where_launches_are_recorded_or_the_device_is_no_hopper() -> None:
    assert_expected_inline(
        table(shapes(True), recorded=True),
        """\
up                    usual       fast 256x128x128 w8 s4
short                 usual       fast 128x128x128 w8 s4
short and deep        usual       fast 128x128x128 w8 s4
small one too short   usual       fast 128x128x128 w8 s4
16 rows               decode      16x64x256 s4
in parts              decode      16x64x256 s4 k/4""",
    )
    assert_expected_inline(
        table(shapes(True), B200),
        """\
up                    usual       fast 256x128x128 w8 s4
short                 usual       fast 128x128x128 w8 s4
short and deep        usual       fast 128x128x128 w8 s4
small one too short   usual       fast 128x128x128 w8 s4
16 rows               usual       fast 64x128x128 w4 s5
in parts              usual       fast 64x64x256 w4 s4 k/8""",
    )


def test_epilogues() -> None:
    assert_expected_inline(
        table(shapes(False, epilogue="add")),
        """\
up                    specialized slow 256x128x128 w12 s4 halves
short                 usual       slow 128x128x128 w8 s4
short and deep        specialized slow 128x128x128 w12 s6
small one too short   specialized slow 256x128x128 w12 s4 halves
16 rows               decode      16x64x128 s6
in parts              decode      16x64x128 s8 k/4""",
    )
    wide = {"fp32": Product(8192, 14336, 4096, epilogue="add"), "rows of 1021": Product(256, 1021, 512, epilogue="add")}
    assert_expected_inline(
        table(wide),
        """\
fp32                  specialized slow 256x128x128 w12 s4 halves, and a pass
rows of 1021          usual       slow 64x64x128 w4 s6, and a pass""",
    )
    assert_expected_inline(
        table(shapes(False, epilogue="amax")),
        """\
up                    specialized slow 256x128x128 w12 s4 halves, and a pass
short                 usual       slow 128x128x128 w8 s4, and a pass
short and deep        specialized slow 128x128x128 w12 s6, and a pass
small one too short   specialized slow 256x128x128 w12 s4 halves, and a pass
16 rows               decode      16x64x128 s6
in parts              decode      16x64x128 s8 k/4""",
    )
    halves = {
        name: Product(m, 2 * n, k, True, 2, "gated", stacking=Stacking("N", (n, n))) for name, (m, n, k) in MLP.items()
    }
    assert_expected_inline(
        table(halves),
        """\
up                    specialized fast 128x256x128 w12 s4
short                 usual       fast 256x128x128 w8 s4, and a pass
short and deep        specialized fast 128x256x128 w12 s4
small one too short   specialized fast 128x256x128 w12 s4
16 rows               decode      16x64x128 s4
in parts              usual       fast 64x64x256 w4 s4, and a pass""",
    )


def test_block_scaling() -> None:
    assert_expected_inline(
        table(shapes(False, scaling="1x128")),
        """\
up                    specialized slow 256x128x128 w12 s4 halves
short                 usual       block 128x128x128 w4 s3 halves 2/sm k/2
short and deep        specialized slow 128x128x128 w12 s6
small one too short   specialized slow 256x128x128 w12 s4 halves
16 rows               decode      16x64x128 s6
in parts              decode      16x64x128 s8 k/4""",
    )
    assert_expected_inline(
        table(shapes(False, scaling="128x128")),
        """\
up                    usual       block 128x128x128 w4 s3 halves 2/sm
short                 usual       block 128x128x128 w4 s3 halves 2/sm k/2
short and deep        usual       block 128x128x128 w4 s3 halves 2/sm k/2
small one too short   usual       block 128x128x128 w4 s3 halves 2/sm k/2
16 rows               usual       block 64x128x128 w4 s5
in parts              usual       block 64x128x128 w4 s5 k/4""",
    )
    assert_expected_inline(
        table(shapes(False, scaling="1x128"), B200),
        """\
up                    usual       block 64x128x128 w4 s5
short                 usual       block 64x128x128 w4 s5
short and deep        usual       block 64x128x128 w4 s5
small one too short   usual       block 64x128x128 w4 s5
16 rows               usual       block 64x128x128 w4 s5
in parts              usual       block 64x128x128 w4 s5 k/4""",
    )


def test_stacks_and_groups() -> None:
    qkv = (4096, 1024, 1024)
    rows = {
        "qkv forward": Product(8192, 6144, 4096, True, 2, stacking=Stacking("N", qkv)),
        "qkv, 16 rows": Product(16, 6144, 4096, True, 2, stacking=Stacking("N", qkv)),
        "qkv dgrad": Product(8192, 4096, 6144, False, 2, stacking=Stacking("K", qkv)),
        "qkv dgrad, short": Product(512, 4096, 6144, False, 2, stacking=Stacking("K", qkv)),
        "qkv wgrad": Product(6144, 4096, 8192, False, 4, stacking=Stacking("M", qkv)),
        "experts": Product(16384, 14336, 4096, False, 2, m_groups=8, m_known=False),
        "experts, few rows": Product(64, 4096, 4096, True, 2, m_groups=32, m_known=False),
        "experts' wgrad": Product(14336, 4096, 16384, False, 2, k_groups=8),
        "small experts' wgrad": Product(256, 128, 256, False, 2, k_groups=4),
    }
    assert_expected_inline(
        table(rows),
        """\
qkv forward           specialized fast 128x256x128 w12 s4
qkv, 16 rows          decode      16x64x256 s4
qkv dgrad             specialized slow 256x128x128 w12 s4 halves
qkv dgrad, short      usual       slow 128x128x128 w8 s4
qkv wgrad             specialized slow 256x128x128 w12 s4 halves
experts               usual       slow 128x128x128 w4 s3 halves 2/sm
experts, few rows     usual       fast 64x128x128 w4 s5
experts' wgrad        specialized slow 256x128x128 w12 s4 halves
small experts' wgrad  usual       slow 64x128x128 w4 s5""",
    )


def test_tensors_are_asked_of_as_they_are() -> None:
    a, b = (torch.empty(rows, 4096, dtype=torch.float8_e4m3fn, device="meta") for rows in (8192, 14336))
    assert choose_for(a, b, True, torch.bfloat16) == choose(Product(8192, 14336, 4096, True, 2), H200)
    groups = torch.empty(8, 14336, 4096, dtype=torch.float8_e4m3fn, device="meta")
    want = choose(Product(8192, 14336, 4096, True, 2, m_groups=8), H200)
    assert choose_for(a, groups, True, torch.bfloat16, m_groups=8) == want
