"""The bytes of collectives, counted in two processes."""

from __future__ import annotations

import pytest
import torch
from helpers.distributed import wire_bodies
from helpers.distributed.ranks import SIZE, Ranks
from helpers.distributed.wire_bodies import N

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")

BF16 = 2 * N
"""Bytes of a rank's part."""


def test_each_operation(ranks: Ranks) -> None:
    first, second = ranks.run(wire_bodies.each_operation)
    of_both = {
        "all_gather": {"all_gather bfloat16": (1, BF16)},
        "all_gather of codes": {"all_gather uint8": (1, N)},
        "reduce_scatter": {"reduce_scatter bfloat16": (1, BF16)},
        "all_reduce": {"all_reduce bfloat16": (1, BF16)},
        "all_to_all": {"all_to_all bfloat16": (1, BF16 // SIZE)},
        "barrier": {},
    }
    of_first = {
        "uneven all_to_all": {"all_to_all bfloat16": (1, BF16 * 3 // 4)},
        "broadcast": {"broadcast bfloat16": (0, 0)},
        "scatter": {"scatter bfloat16": (0, 0)},
        "gather": {"gather bfloat16": (1, BF16)},
        "reduce": {"reduce bfloat16": (1, BF16)},
        "one way": {},
    }
    of_second = {
        "uneven all_to_all": {"all_to_all bfloat16": (1, BF16 // 4)},
        "broadcast": {"broadcast bfloat16": (1, BF16)},
        "scatter": {"scatter bfloat16": (1, BF16)},
        "gather": {},
        "reduce": {},
        "one way": {"recv bfloat16": (1, BF16)},
    }
    assert first == of_both | of_first
    assert second == of_both | of_second


def test_collectives_of_a_compiled_graph(ranks: Ranks) -> None:
    both = ranks.run(wire_bodies.compiled)
    assert both == [{"all_gather float32": (1, 8 * N), "reduce_scatter float32": (1, 8 * N)}] * SIZE


def test_fsdp2(ranks: Ranks) -> None:
    """The weight's other half comes before forward, and stays for backward: the outermost module keeps it. Its gradient's half."""
    both = ranks.run(wire_bodies.fsdp2)
    assert both == [{"all_gather bfloat16": (1, N * BF16 // 2), "reduce_scatter bfloat16": (1, N * BF16 // 2)}] * SIZE


def test_ddp(ranks: Ranks) -> None:
    """C++ starts the all-reduce."""
    assert ranks.run(wire_bodies.ddp) == [{"all_reduce float32": (1, 4 * N * N)}] * SIZE


def test_a_table(ranks: Ranks) -> None:
    first, _ = ranks.run(wire_bodies.table)
    assert first == {
        "table": "all_reduce     float32             2 calls           512 bytes",
        "all": 512,
        "of none": 0,
    }
