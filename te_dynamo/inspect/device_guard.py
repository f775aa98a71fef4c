"""A device guard for "cuda" in CPU-only builds of torch, which have none: autograd asks it for streams while it builds a graph.

torch keeps guards in a C++ array by device type, c10::impl::device_guard_impl_registry, and gives no other way to put one there. The
CPU's guard does nothing, so a pointer to it is written into CUDA's place. Nothing is written where the array is not what is known
of it: 21 pointers, in torch 2.11 to 2.15 on Linux, to objects whose classes lie in torch's libraries.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch

from te_dynamo.errors import UnsupportedError

_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
_DEVICE_TYPES = 21
_CPU, _CUDA, _META = 0, 1, 14
"""Places of the array, by c10::DeviceType."""


def ensure_device_guard() -> None:
    """Gives a CPU-only build the CPU's guard for "cuda"; leaves every other build alone.

    It stays for the process: autograd nodes made meanwhile may outlive any context. Raises UnsupportedError where the array is unknown.
    """
    if torch.backends.cuda.is_built():
        return
    guards = _registry(Path(torch.__file__).parent / "lib" / "libc10.so")
    if guards[_CUDA] == guards[_CPU]:
        return  # written before
    _check(list(guards))
    guards[_CUDA] = guards[_CPU]


class _Found(ctypes.Structure):
    """What dladdr finds at an address (Dl_info)."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("start", ctypes.c_void_p),
    )


class _Symbol(ctypes.Structure):
    """A symbol of a library (Elf64_Sym)."""

    _fields_ = (
        ("name", ctypes.c_uint32),
        ("info", ctypes.c_ubyte),
        ("other", ctypes.c_ubyte),
        ("section", ctypes.c_uint16),
        ("value", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
    )


def _registry(library: Path) -> ctypes.Array[ctypes.c_void_p]:
    """torch's array, whose size its library states."""
    try:
        guards = (ctypes.c_void_p * _DEVICE_TYPES).in_dll(ctypes.CDLL(str(library)), _REGISTRY)
        found, symbol = _Found(), ctypes.POINTER(_Symbol)()
        with_symbol = 1  # RTLD_DL_SYMENT
        here = ctypes.c_void_p(ctypes.addressof(guards))
        known = ctypes.CDLL(None).dladdr1(here, ctypes.byref(found), ctypes.byref(symbol), with_symbol)
    except (OSError, ValueError, AttributeError) as error:  # no such library, array or function of the C library
        raise _unknown(str(error)) from error
    size = symbol.contents.size if known and symbol else 0
    if size != ctypes.sizeof(guards):
        raise _unknown(f"it has {size} bytes, and {ctypes.sizeof(guards)} are expected")
    return guards


def _check(guards: Sequence[int | None]) -> None:
    """Raises UnsupportedError unless the CPU and "meta" have guards, CUDA has none, and each guard is an object of a loaded library's class."""
    filled = [place for place, guard in enumerate(guards) if guard]
    if not {_CPU, _META} <= set(filled) or _CUDA in filled:
        raise _unknown(f"places {filled} are filled, and {_CPU} and {_META} without {_CUDA} are expected")
    for place in filled:
        first_word = ctypes.c_void_p.from_address(
            guards[place] or 0
        )  # of an object with virtual functions: their table
        if not ctypes.CDLL(None).dladdr(first_word, ctypes.byref(_Found())):
            raise _unknown(f"what place {place} points to is no object of a C++ class")


def _unknown(why: str) -> UnsupportedError:
    return UnsupportedError(
        f"te_dynamo.testing: torch {torch.__version__} keeps its device guards otherwise than torch 2.11 to 2.15 on Linux ({why}), so that "
        "graphs for CUDA cannot be made with this CPU-only build, and nothing was changed: use one of those releases, or a CUDA build, "
        "which needs no GPU for it"
    )
