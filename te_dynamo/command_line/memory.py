"""How much memory is free where a model is to be made."""

from __future__ import annotations

import re
from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")


def free_bytes(device: str) -> int:
    """Of a GPU, or of this machine where `device` is "" or "cpu": what its kernel and the container's limit leave."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0]
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    free = int(found[1]) * 1024 if found else 0
    try:
        limit, used, stat = ((_CGROUP / f"memory.{name}").read_text().strip() for name in ("max", "current", "stat"))
    except OSError:  # no container
        return free
    # The kernel gives these up when memory is needed.
    files = sum(map(int, re.findall(r"^(?:in)?active_file (\d+)$", stat, re.MULTILINE)))
    return free if limit == "max" else min(free, int(limit) - int(used) + files)
