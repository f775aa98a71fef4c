"""What a product of known sizes costs the CPU: the check and the choice of a kernel are remembered, and only for what is equal."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from helpers.kernels.gemms import tensor_request

from te_dynamo.kernels.gemm import multiply as gemm
from te_dynamo.kernels.gemm.choose import CHOSEN, Choice, use_tuned
from te_dynamo.kernels.gemm.multiply import multiply
from te_dynamo.kernels.gemm.request import Request
from te_dynamo.kernels.runtime.margin import sm_margin
from te_dynamo.kernels.runtime.target import TARGETS


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is asked on an H200, whose launches are left out."""
    asked: list[str] = []
    check, choice_of = gemm.check, gemm.choice_of
    monkeypatch.setattr(gemm, "check", lambda r: (asked.append("check"), check(r)))
    monkeypatch.setattr(
        gemm, "choice_of", lambda *args, **given: (asked.append("choice"), choice_of(*args, **given))[1]
    )
    for name in ("multiply.target_of", "choose.gemm_target"):
        monkeypatch.setattr(f"te_dynamo.kernels.gemm.{name}", lambda device: TARGETS["h200"])
    monkeypatch.setattr(gemm, "gemm_multiprocessors", lambda device: 132)
    monkeypatch.setattr(gemm, "launch", lambda *args, **given: None)
    CHOSEN.clear()
    yield asked
    CHOSEN.clear()


def request(m: int = 256, dtype: torch.dtype = torch.bfloat16, **others: torch.Tensor) -> Request:
    a, b = (torch.zeros(rows, 512, dtype=torch.float8_e4m3fn) for rows in (m, 128))
    return dataclasses.replace(tensor_request(a, torch.ones(1), b, torch.ones(1), None, dtype, True), **others)


def test_the_same_sizes_ask_once(asked: list[str]) -> None:
    for _ in range(3):
        assert multiply(request()).shape == (256, 128)
    assert asked == ["check", "choice"]


def test_what_differs_asks_again(asked: list[str]) -> None:
    multiply(request())
    for other in (request(m=128), request(dtype=torch.float32), request(bias=torch.zeros(128))):
        asked.clear()
        multiply(other)
        assert asked == ["check", "choice"]
    asked.clear()
    with sm_margin(8):
        multiply(request())
    assert asked == ["check", "choice"]


def test_a_wrong_operand_behind_right_ones_is_an_error(asked: list[str]) -> None:
    right = request()
    multiply(right)
    turned = dataclasses.replace(right.a, codes=right.a.codes.t().contiguous().t())
    for wrong in (dataclasses.replace(right.a, scale_inv=torch.ones(2)), turned):
        with pytest.raises(ValueError, match="te gemm: "):
            multiply(dataclasses.replace(right, a=wrong))
    with pytest.raises(ValueError, match=r"expected bias \[128\], got \(64,\)"):
        multiply(request(bias=torch.zeros(64)))


def test_what_was_timed_since_is_asked(asked: list[str]) -> None:
    multiply(request())
    asked.clear()
    use_tuned({})
    multiply(request())
    assert asked == ["check", "choice"] and isinstance(next(iter(CHOSEN.values())), Choice)


def test_another_thread_may_forget_at_any_time(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(dict[object, Choice]):
        """One that another thread empties whenever it has answered, as timing and too many sizes do."""

        def __contains__(self, key: object) -> bool:
            found = super().__contains__(key)
            self.clear()
            return found

        def __setitem__(self, key: object, choice: Choice) -> None:
            """Is emptied at once."""

    monkeypatch.setattr(gemm, "CHOSEN", Forgetful(CHOSEN))
    assert multiply(request()).shape == (256, 128)
    right = request()
    held = Forgetful()
    dict.__setitem__(held, (right.facts(), "none", 0), Choice("usual", gemm.choice_of(right).tile))
    monkeypatch.setattr(gemm, "CHOSEN", held)
    assert multiply(right).shape == (256, 128)
