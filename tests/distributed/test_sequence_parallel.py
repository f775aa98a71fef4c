"""Sequence parallelism: codes travel in place of activations, and every rank computes the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.distributed import sequence_bodies
from helpers.distributed.ranks import SIZE, Ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")

UNFUSED = {"fusions": ["-fuse_gather_quantize"]}
ALIKE = {"float8": {}, "unfused": UNFUSED, "regather": {"regather": True}, "bf16": {"recipe": None}}


def assert_same_bits(one: dict[str, Any], other: dict[str, Any], but: str = "") -> None:
    assert one["tensors"].keys() == other["tensors"].keys()
    for name, tensor in one["tensors"].items():
        if name == but:  # a sum in another order
            torch.testing.assert_close(tensor, other["tensors"][name])
        else:
            assert torch.equal(tensor, other["tensors"][name]), name
        assert tensor.count_nonzero(), name


@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
def test_bits_and_bytes(ranks: Ranks, kind: str) -> None:
    """A shard of 24 tokens, no multiple of 16."""
    for results in ranks.run(sequence_bodies.steps, kind, list(ALIKE.values())):
        float8, unfused, regather, bf16 = results
        assert_same_bits(float8, unfused, but="parts.0.down.bias")
        assert_same_bits(regather, float8)
        assert all(reason == "" for _, reason in float8["linears"]) and float8["linears"]
        assert unfused["gathered"] == bf16["gathered"] == {"bfloat16": bf16["bytes"]}
        assert set(float8["gathered"]) == {"uint8"}
        assert float8["bytes"] <= 0.51 * bf16["bytes"]
        assert regather["gathered"] == {"uint8": float8["bytes"], "int8": float8["bytes"] // 2}
        assert float8["notes"] == regather["notes"] == []
