"""What was measured of a GPU and outlives the process: a JSON file for each kind of fact and each name of a device, in torch's cache folder.

    {"made_with": {"driver": "580.65", "torch": "2.13.0", "triton": "3.7.1", "sources": "4f..."}, "facts": {...}}

A file that another driver, torch, Triton or other sources of ours made is not used, and the next `remember` replaces it. So is one that
cannot be read, which is warned of once.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import re
import tempfile
import warnings
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from te_dynamo.cache_key import sources_digest
from te_dynamo.kernels.runtime.target import is_acting


def remembered(kind: str) -> Mapping[str, Any]:
    """The facts of this kind about the current CUDA device, read once a process; empty where there are none, without a device, and
    where another one is acted (kernels/runtime/target.py)."""
    name = _device_name()
    return _read(kind, name)[0] if name else {}


def remember(kind: str, facts: Mapping[str, Any]) -> Path:
    """Adds facts, which JSON can write, to those of this kind about the current CUDA device; the file they are in.

    Raises OSError where the file cannot be written. Of two processes that write at once the later one's file stays whole.
    """
    _read.cache_clear()  # another process may have added some
    path = remembered_file(kind)
    text = json.dumps({"made_with": _made_with(), "facts": {**remembered(kind), **facts}}, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, written = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text + "\n")
        os.replace(written, path)
    except BaseException:
        os.unlink(written)
        raise
    _read.cache_clear()
    return path


def why_unused(kind: str) -> str:
    """Why there is a file of this kind for the current CUDA device that is not used: "it was made with driver 570.1, not 580.65"."""
    name = _device_name()
    return _read(kind, name)[1] if name else ""


def remembered_file(kind: str) -> Path:
    """Where facts of this kind about the current CUDA device are, or would be."""
    return _file(kind, _device_name())


def _device_name() -> str:
    """ "" where no device can be asked."""
    return "" if is_acting() or not torch.cuda.is_available() else torch.cuda.get_device_name()


def _file(kind: str, device: str) -> Path:
    return _folder() / f"{kind}-{'-'.join(re.findall('[a-z0-9]+', device.lower()))}.json"


def _folder() -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()) / "te_dynamo"


@functools.cache
def _read(kind: str, device: str) -> tuple[Mapping[str, Any], str]:
    """(facts, why those of the file are not used)"""
    path = _file(kind, device)
    try:
        held = json.loads(path.read_text())
        facts, made_with = dict(held["facts"]), dict(held["made_with"])
    except FileNotFoundError:
        return {}, ""
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"it cannot be read ({type(error).__name__}: {error})"
        warnings.warn(f"te_dynamo: {path} is not used: {reason}; delete it", stacklevel=3)
        return {}, reason
    others = [
        f"{what} {made_with.get(what)}, not {now}" for what, now in _made_with().items() if made_with.get(what) != now
    ]
    return ({}, f"it was made with {' and '.join(others)}") if others else (facts, "")


@functools.cache
def _made_with() -> dict[str, str]:
    """What facts depend on beside the device."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    return {"driver": _driver(), "torch": torch.__version__, "triton": triton, "sources": sources_digest()[:12]}


def _driver() -> str:
    """The release of NVIDIA's driver, asked of its management library; "unknown" without that."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return "unknown"
    text = ctypes.create_string_buffer(96)
    library.nvmlInit_v2()
    library.nvmlSystemGetDriverVersion(text, len(text))
    return text.value.decode() or "unknown"
