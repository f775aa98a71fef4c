"""What torch's compile caches must know of us: a cached graph is ours only if our sources, options and fusions are the same.

torch's own keys hold the graph and its constants, not the bodies of our operations, fakes, passes and kernels.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from te_dynamo.options import Options


def cache_key(options: Options, *others: str) -> str:
    """A digest of the package's sources, torch's and Triton's versions, our options and what else decides which code is made.

    Inductor's options are in torch's own keys, a user's passes by what they say of themselves.
    """
    ours = dataclasses.replace(options, inductor=())
    text = "\n".join((sources_digest(), repr(ours), *others))
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def sources_digest() -> str:
    """Computed once a process: every Python file of the four code folders, in a fixed order."""
    digest = hashlib.sha256()
    for folder in ("te_dynamo", "te_dynamo.kernels", "te_dynamo.lowering", "te_dynamo.passes"):
        spec = importlib.util.find_spec(folder)
        assert spec is not None and spec.submodule_search_locations
        root = Path(next(iter(spec.submodule_search_locations)))
        for file in sorted(root.rglob("*.py")):
            digest.update(f"{folder}/{file.relative_to(root)}".encode())
            digest.update(file.read_bytes())
    with contextlib.suppress(ImportError):  # without Triton the references run
        import triton

        digest.update(triton.__version__.encode())
    digest.update(torch.__version__.encode())
    return digest.hexdigest()
