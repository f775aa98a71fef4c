"""Hooks on saved tensors (torch.autograd.graph.saved_tensors_hooks) get FP8 codes as bytes.

What hooks do with any tensor (scale it by its amax, go through numpy) torch cannot do with float8, and they take bytes for what they are: no
floating values. A byte view is made where there are hooks alone: graphs are the same, and without hooks a call pays for one question.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import GraphModule

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def saves_bytes(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """`compiled`, whose saved tensors the caller's hooks get without float8 among them."""
    top_hooks = torch._C._autograd._top_saved_tensors_default_hooks

    def call(*args: Any) -> Any:
        hooks = top_hooks(True)
        if hooks is None or isinstance(hooks[0], GraphModule):  # which AOTAutograd has put into the graphs
            return compiled(*args)
        with saved_tensors_hooks(*_on_bytes(*hooks)):
            return compiled(*args)

    call.serialize = getattr(compiled, "serialize", None)  # type: ignore[attr-defined]  # for torch's aot_compile
    return call


def _on_bytes(
    pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    def pack_bytes(tensor: Tensor) -> Any:
        if tensor.dtype in _FLOAT8:
            return tensor.dtype, pack(tensor.view(torch.uint8))
        return None, pack(tensor)

    def unpack_bytes(packed: Any) -> Tensor:
        dtype, theirs = packed
        tensor = unpack(theirs)
        return tensor if dtype is None else tensor.view(dtype)

    return pack_bytes, unpack_bytes
