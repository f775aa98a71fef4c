"""Facts about a device in a file: what is read back, what is not, and that a reader never sees half a file."""

from __future__ import annotations

import json
import os
import pathlib
import warnings
from collections.abc import Iterator

import pytest
import torch

from te_dynamo import remembered as module
from te_dynamo.kernels.runtime.target import TARGETS, acting_as
from te_dynamo.remembered import remember, remembered, remembered_file, why_unused


@pytest.fixture(autouse=True)
def an_h200(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The device that is asked, and an empty cache folder."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    module._read.cache_clear()
    yield monkeypatch
    module._read.cache_clear()


def made_with(**others: str) -> None:
    """The file of "times" as if other versions had made it."""
    path = remembered_file("times")
    held = json.loads(path.read_text())
    held["made_with"].update(others)
    path.write_text(json.dumps(held))
    module._read.cache_clear()


def test_nothing_is_remembered_at_first() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert remembered("times") == {}
    assert why_unused("times") == ""


def test_facts_come_back_and_add_up(tmp_path: pathlib.Path) -> None:
    assert remember("times", {"launch": 2.5}) == tmp_path / "te_dynamo" / "times-nvidia-h200.json"
    remember("times", {"copy": [1, 2]})
    remember("tiles", {"copy": 3})
    assert remembered("times") == {"launch": 2.5, "copy": [1, 2]}
    assert remembered("tiles") == {"copy": 3}
    assert sorted(os.listdir(tmp_path / "te_dynamo")) == ["tiles-nvidia-h200.json", "times-nvidia-h200.json"]


def test_another_device_has_a_file_of_its_own(an_h200: pytest.MonkeyPatch) -> None:
    remember("times", {"launch": 2.5})
    an_h200.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    assert remembered("times") == {}
    with acting_as(TARGETS["h200"]):
        assert remembered("times") == {}
    an_h200.setattr(torch.cuda, "is_available", lambda: False)
    assert remembered("times") == {}


def test_what_others_made_is_not_used() -> None:
    remember("times", {"launch": 2.5})
    made_with(driver="1.0", torch="2.0")
    assert remembered("times") == {}
    assert (
        why_unused("times")
        == f"it was made with driver 1.0, not {module._driver()} and torch 2.0, not {torch.__version__}"
    )
    remember("times", {"copy": 1})
    assert remembered("times") == {"copy": 1}
    assert why_unused("times") == ""


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"facts": 1, "made_with": {}}', "\udce9"], ids=repr)
def test_what_cannot_be_read_is_warned_of_once(text: str) -> None:
    remember("times", {"launch": 2.5})
    remembered_file("times").write_bytes(text.encode(errors="surrogateescape"))
    module._read.cache_clear()
    with pytest.warns(UserWarning, match=r"times-nvidia-h200\.json is not used: it cannot be read") as told:
        assert remembered("times") == remembered("times") == {}
    assert len(told) == 1
    assert why_unused("times").startswith("it cannot be read")


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path: pathlib.Path) -> None:
    remember("times", {"launch": 2.5})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
        with pytest.raises(OSError, match="no space left"):
            remember("times", {"launch": 3})
    assert remembered("times") == {"launch": 2.5}
    assert os.listdir(tmp_path / "te_dynamo") == ["times-nvidia-h200.json"]
