"""A model whose blocks are checkpointed, whole or by a policy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, **options: Any) -> None:
        super().__init__()
        self.inner, self.options = inner, {"use_reentrant": False} | options

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, **self.options)


def selective(policy: Any) -> Callable[[], Any]:
    return functools.partial(create_selective_checkpoint_contexts, policy)
