"""What a measurement was taken on: the facts without which its numbers say nothing."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import pathlib
import platform
import subprocess

import torch

ROOT = pathlib.Path(__file__).parents[1]


def collect(device: str) -> dict[str, str]:
    """Device, driver, versions, commit and UTC date; "unknown" or "none" where there is nothing to read.

    Ends the program with one line where the device is a GPU and torch finds none.
    """
    gpu = device.startswith("cuda")
    if gpu and not torch.cuda.is_available():
        raise SystemExit(
            "this benchmark needs a CUDA device, and torch finds none; where --help has --device, --device cpu tries whether it runs"
        )
    return {
        "device": torch.cuda.get_device_name(device) if gpu else f"CPU ({platform.machine()})",
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if gpu else "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "triton": version("triton"),
        "torchao": version("torchao"),
        "te_dynamo": version("te-dynamo"),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _commit() -> str:
    """TE_DYNAMO_COMMIT where it is set, as for a copy of a checkout; else the checkout's commit, "+dirty" when files differ from it."""
    if given := os.environ.get("TE_DYNAMO_COMMIT"):
        return given
    commit = _output("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD")
    changed = _output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no")
    return commit if commit == "unknown" or changed == "" else f"{commit}+dirty"


def version(distribution: str) -> str:
    """Of an installed distribution; "none" where it is not."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _output(*command: str) -> str:
    """The first line a command prints, "" for none, "unknown" when it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return (done.stdout.strip().splitlines() or [""])[0]
