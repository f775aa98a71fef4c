"""te_dynamo/inspect/device_guard.py: torch's array of guards is written where it is known, and nowhere else."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from te_dynamo.errors import UnsupportedError
from te_dynamo.inspect import device_guard
from te_dynamo.testing import fake_cuda

LIBRARY = Path(torch.__file__).parent / "lib" / "libc10.so"


def guards() -> list[int | None]:
    return list((ctypes.c_void_p * 21).in_dll(ctypes.CDLL(str(LIBRARY)), device_guard._REGISTRY))


@pytest.fixture
def cpu_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)


def test_the_array_of_this_torch_is_known() -> None:
    known = list(device_guard._registry(LIBRARY))
    assert known == guards()
    device_guard._check([None if place == device_guard._CUDA else guard for place, guard in enumerate(known)])


@pytest.mark.usefixtures("cpu_build")
@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("_DEVICE_TYPES", 22, "it has 168 bytes, and 176 are expected"),
        ("_REGISTRY", "_ZN3c104impl26device_guard_impl_registry_v2E", "undefined symbol"),
    ],
)
def test_an_array_of_another_layout_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, name: str, value: object, why: str
) -> None:
    before = guards()
    monkeypatch.setattr(device_guard, name, value)
    refused = f"device guards otherwise than torch 2.11 to 2.15 .*{why}.* nothing was changed: use one of"
    with pytest.raises(UnsupportedError, match=refused), fake_cuda():
        raise AssertionError
    monkeypatch.undo()
    assert guards() == before


def test_other_contents_are_left_alone() -> None:
    object_of_no_class = ctypes.create_string_buffer(64)
    known: list[int | None] = [None if place == device_guard._CUDA else guard for place, guard in enumerate(guards())]
    moved = [known[-1], *known[:-1]]
    filled = [known[0], known[0], *known[2:]]
    classless = [ctypes.addressof(object_of_no_class), *known[1:]]
    for contents, why in ((moved, "are filled"), (filled, "are filled"), (classless, "no object of a C\\+\\+ class")):
        with pytest.raises(UnsupportedError, match=why):
            device_guard._check(contents)
