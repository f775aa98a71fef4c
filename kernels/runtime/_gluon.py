"""Gluon, Triton's language for explicit warps and barriers, under one set of names, or a stand-in where it is not installed."""

from __future__ import annotations

from typing import Any

from te_dynamo.kernels.runtime._triton import triton

__all__ = ["async_load", "async_store", "gl", "gluon", "hopper", "mbarrier", "reinterpret", "tma"]

async_load: Any
async_store: Any
reinterpret: Any

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper
    from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

    # Triton 3.8 gave the two copies their short names.
    async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
    async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
    # Triton 3.9 made this method public.
    reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
except ImportError:
    gluon = gl = hopper = mbarrier = tma = async_load = async_store = reinterpret = triton  # type: ignore[assignment]
