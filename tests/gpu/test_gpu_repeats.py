"""Every kernel and every tile that can run a product gives the same bits each time: also where C has more elements than 32 bits count."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_dynamo.kernels.gemm.choose import Choice, Product, choose
from te_dynamo.kernels.gemm.multiply import run
from te_dynamo.kernels.gemm.tuned import _request, candidates
from te_dynamo.kernels.runtime.target import target_of
from te_dynamo.kernels.tiles.stacking import Stacking

pytestmark = pytest.mark.gpu

TIMES = 100

KINDS: dict[str, dict[str, Any]] = {
    "slow sums": {},
    "fast sums": {"fast_accum": True},
    "1x128 by 128x128": {"scaling": "1x128"},
    "128x128 by 1x128": {"scaling": "128x128"},
    "groups of rows": {"m_groups": 4},
    "groups of K": {"k_groups": 4},
}


def _repeats_itself(choice: Choice, product: Product) -> None:
    request = _request(product, torch.device("cuda"))
    first = run(choice, request)
    assert first.isfinite().all()
    for time in range(TIMES - 1):
        again = run(choice, request)
        assert torch.equal(first.view(torch.int16), again.view(torch.int16)), f"{choice}, time {time + 2}"


@pytest.mark.parametrize("kind", KINDS)
def test_every_tile_repeats_itself(kind: str) -> None:
    product = Product(1040, 768, 2048, out_bytes=2, **KINDS[kind])
    for choice in candidates(product, target_of(torch.device("cuda"))):
        _repeats_itself(choice, product)


@pytest.mark.parametrize("along", ["M", "N", "K"])
def test_every_stacked_tile_repeats_itself(along: str) -> None:
    size = {"M": 1024, "N": 1024, "K": 2048}
    stacking = Stacking(along, (size[along] // 2,) * 2)
    product = Product(size["M"], size["N"], size["K"], out_bytes=2, stacking=stacking)
    for choice in candidates(product, target_of(torch.device("cuda"))):
        _repeats_itself(choice, product)


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_beyond_32_bits_repeats_itself(kind: str) -> None:
    m, n = 65_792, 32_768  # 2.16e9 elements
    if torch.cuda.get_device_properties(0).total_memory < 40 * 2**30:
        pytest.skip("two results of 4.3 GB and what compares them")
    if kind == "groups of K":
        m //= 4
    product = Product(m, n, 512, out_bytes=2, **KINDS[kind])
    _repeats_itself(choose(product, target_of(torch.device("cuda"))), product)
