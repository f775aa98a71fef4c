"""Triton, or a stand-in where it is not installed.

The references beside the kernels run anywhere, so their files must import without Triton. The stand-in lets a decorated
kernel be defined; nothing launches it (`kernels_available` says why).
"""

from __future__ import annotations

from typing import Any

__all__ = ["INSTALLED", "libdevice", "tl", "triton"]


class _Absent:
    """Every attribute is this object, and decorating a function with it changes nothing."""

    def __getattr__(self, name: str) -> _Absent:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args and callable(args[0]) else self


try:
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice
except ImportError:
    triton = tl = libdevice = _Absent()  # type: ignore[assignment]

INSTALLED = not isinstance(triton, _Absent)
