"""Autocast for a GPU that is not here: what `explain` says of one is said under the autocast that would hold there.

torch turns `torch.autocast("cuda")` off where there is no GPU. Inside of `fake_cuda` it is told that there is one (`autocast_on_cuda`).
What moves from the CPU to "cuda" for a forecast takes its autocast along (`cpu_autocast_on_cuda`): around the call, in forward, as a decorator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from te_dynamo.errors import UnsupportedError


@contextlib.contextmanager
def autocast_on_cuda() -> Iterator[None]:
    """Inside, `torch.autocast("cuda")` is on, in every dtype: each of `TARGETS` has bf16.

    Raises UnsupportedError at the end where one counted that was made before and is off: perhaps since there was no GPU.
    """
    autocast, had_gpu = torch.autocast, torch.cuda.is_available()
    init, enter = autocast.__init__, autocast.__enter__
    unknown = _is_in_autocast_that_is_off()

    def init_here(
        self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: bool | None = None
    ) -> None:
        init(self, device_type, dtype, enabled, cache_enabled)
        # Dynamo enters another in the place of one that was made before, and gives it all four values: nobody else gives the last.
        self.is_made_here = cache_enabled is None

    def enter_here(self: Any) -> Any:
        nonlocal unknown
        unknown |= self.device == "cuda" and not self._enabled and not getattr(self, "is_made_here", False)
        return enter(self)

    with (
        mock.patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False),
        mock.patch("torch.cuda.is_bf16_supported", lambda *_, **__: True),
        mock.patch.object(autocast, "__init__", init_here),
        mock.patch.object(autocast, "__enter__", enter_here),
    ):
        yield
    if unknown and not had_gpu:
        raise UnsupportedError(
            "te_dynamo.explain: the model runs in a torch.autocast that is off, and torch turns off every one for CUDA that is made where "
            'there is no GPU. So it is not known whether it would be on there: write torch.autocast("cpu", ..), which is taken along, or make '
            "it in forward, by torch.autocast(x.device.type, ..)"
        )


def _is_in_autocast_that_is_off() -> bool:
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth > 0 and not any(map(torch.is_autocast_enabled, ("cpu", "cuda")))


@contextlib.contextmanager
def cpu_autocast_on_cuda() -> Iterator[None]:
    """Inside of `autocast_on_cuda`: where autocast for the CPU is or gets on, that for "cuda" is too, in the same dtype."""
    autocast, twins = torch.autocast, list[Any]()
    enter, leave = autocast.__enter__, autocast.__exit__

    def enter_both(self: Any) -> Any:
        if self.device == "cpu":
            twins.append(autocast("cuda", self.fast_dtype, self._enabled))
            enter(twins[-1])
        return enter(self)

    def leave_both(self: Any, *error: Any) -> Any:
        result = leave(self, *error)
        if self.device == "cpu":
            leave(twins.pop(), *error)
        return result

    held = torch.is_autocast_enabled("cpu")
    with (
        autocast("cuda", torch.get_autocast_dtype("cpu")) if held else contextlib.nullcontext(),
        mock.patch.object(autocast, "__enter__", enter_both),
        mock.patch.object(autocast, "__exit__", leave_both),
    ):
        yield
