"""What a launch writes is analysed once, and the answer is torch's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._higher_order_ops import triton_kernel_wrap as torchs

from te_dynamo.kernels.quantize import quantize_amax_kernel, quantize_cast_kernel
from te_dynamo.lowering import accesses
from te_dynamo.testing import fake_cuda


@pytest.fixture(autouse=True)
def fake() -> Iterator[None]:
    with fake_cuda():
        yield


class Counting:
    """torch's analysis, and how often it ran."""

    def __init__(self) -> None:
        name = "identify_accessed_tensors"
        self.analyse = getattr(torchs, name, None) or torchs.identify_mutated_tensors  # type: ignore[attr-defined]
        self.analyse = getattr(self.analyse, "__wrapped__", self.analyse)  # where it is registered already
        self.runs = 0

    def __call__(self, *args: Any) -> Any:
        self.runs += 1
        return self.analyse(*args)


def arguments(dtype: torch.dtype = torch.bfloat16, **others: Any) -> dict[str, Any]:
    x = torch.empty(32, 64, dtype=dtype, device="cuda")
    partials = torch.empty(512, device="cuda")
    return {"x": x, "partials": partials, "M": 32, "K": 64, "BLOCK_M": 8, "BLOCK_K": 64, **others}


def test_equal_launches_are_analysed_once_with_torchs_answer() -> None:
    counting = Counting()
    remembered = accesses._remembered(counting)
    answers = [remembered(quantize_amax_kernel, arguments(), {}) for _ in range(3)]
    assert counting.runs == 1
    expected = counting.analyse(quantize_amax_kernel, arguments(), {})
    assert all(answer == expected for answer in answers)
    assert answers[0] is not answers[1]  # the caller's own, to change


@pytest.mark.parametrize(
    "other",
    [{"dtype": torch.float32}, {"K": 48}, {"BLOCK_M": 16}, {"M": True}, {"M": 32.0}],
    ids=lambda other: next(iter(other)),
)
def test_what_the_ir_depends_on_is_analysed_again(other: dict[str, Any]) -> None:
    keys = [accesses._key(quantize_amax_kernel, given) for given in (arguments(), arguments(**other))]
    assert None not in keys and keys[0] != keys[1]


def test_other_kernels_of_ours_have_their_own_answer() -> None:
    assert accesses._key(quantize_amax_kernel, {}) != accesses._key(quantize_cast_kernel, {})


def test_what_is_not_ours_or_not_known_is_torchs() -> None:
    class Foreign:
        __module__ = "somebody.kernels"

    assert accesses._key(Foreign(), arguments()) is None
    assert accesses._key(quantize_amax_kernel, arguments(M=[32])) is None
    with torch._C._DisableTorchDispatch():
        real = torch.zeros(2)
    assert accesses._key(quantize_amax_kernel, arguments(x=real)) is None
    counting = Counting()
    counting.analyse = lambda kernel, kwargs, metadata: ["x"]
    remembered = accesses._remembered(counting)
    for _ in range(2):
        assert remembered(Foreign(), arguments(), {}) == ["x"]
        assert remembered(quantize_amax_kernel, arguments(), {"x": "a descriptor"}) == ["x"]
    assert counting.runs == 4


def test_sizes_known_only_at_run_time_are_one() -> None:
    """As torch compiles them: every symbol as the same number."""
    import sympy

    symbols = [sympy.Symbol(name) for name in ("s0", "s1")]
    keys = {accesses._key(quantize_amax_kernel, arguments(M=symbol)) for symbol in symbols}
    assert len(keys) == 1 and keys != {accesses._key(quantize_amax_kernel, arguments())}
