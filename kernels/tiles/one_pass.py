"""One scale a tensor in one pass over it: its scale, a power of two, is guessed, and mended by a launch behind where the guess was wrong.

    PASS "known"   the amax is known: casts with its scale                                        codes, scale_inv
    PASS "guess"   casts with the scale of the hint, and finds the amax beside                    codes, partial amaxes
    PASS "mend"    has the scale of that amax, and casts again unless it is the hint's            codes (perhaps again), scale_inv
    PASS "found"   "known" by the amax that a guess found, of the usage that takes a launch of its own    codes, scale_inv

A hint is int64 [2]: the bits of a scale, and the address where the next hint goes (kernels/runtime/hints.py). It is a copy that nothing
writes, so that every program of both launches reads the same guess whatever other streams do meanwhile. Codes are left alone only where
they were cast with the very scale that the amax asks for: any hint, also a wrong, stale or torn one, gives the bits of two passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from te_dynamo.kernels.layouts.form import Form
from te_dynamo.kernels.runtime._triton import tl, triton
from te_dynamo.kernels.tiles.fp8 import abs_bits, load_scale, store_amax

Conditions = dict[str, Callable[[Any], bool]]


def guessed(*partials: str) -> Conditions:
    """What a guess writes, for `writes`."""
    return dict.fromkeys(partials, lambda k: bool(k.PASS == "guess"))


def scaled(*scale_invs: str) -> Conditions:
    """What the pass writes that has the scale, for `writes`, of a kernel that always casts."""
    return dict.fromkeys(scale_invs, lambda k: bool(k.PASS != "guess"))


def mended(*codes: str) -> Conditions:
    """What is written again or left as it is, for `updates`."""
    return dict.fromkeys(codes, lambda k: bool(k.PASS == "mend"))


@triton.jit
def begin_pass(
    partials,
    hint,
    scale_inv,
    PARTIALS: tl.constexpr,
    FMAX: tl.constexpr,
    EPS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    PASS: tl.constexpr,
    count=None,
):
    """The scale to cast with; one program also stores its inverse and the next hint."""
    if PASS == "guess":
        scale = guessed_bits(hint).to(tl.float32, bitcast=True)
    else:
        scale = load_scale(partials, scale_inv, PARTIALS, FMAX, EPS, POWER_OF_TWO, count)
    if PASS == "mend":
        bits = scale.to(tl.int32, bitcast=True)
        if tl.program_id(0) == 0:
            tl.store(tl.load(hint + 1).to(hint.dtype), bits.to(tl.int64))
    return scale


@triton.jit
def tiles_to_mend(tiles, hint, scale):
    """How many of the tiles have to be cast again: all, or none where the guess held."""
    return tl.where(guessed_bits(hint) == scale.to(tl.int32, bitcast=True), 0, tiles)


@triton.jit
def guessed_bits(hint):
    """Those of the scale that is guessed: a power of two, zero or inf."""
    return tl.load(hint).to(tl.int32) & 0x7F800000


@triton.jit
def no_amaxes(R: tl.constexpr, C: tl.constexpr):
    """What `with_amaxes` begins with, for tiles [R, C]."""
    return tl.zeros((R, C // 8), tl.int32)


@triton.jit
def with_amaxes(bits, values, PASS: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """bits with the magnitudes of every eight neighbours of a tile, which lie in one thread; where the pass finds no amax, as they are."""
    if PASS == "guess":
        bits = tl.maximum(bits, tl.max(tl.reshape(abs_bits(values), (R, C // 8, 8)), axis=2))
    return bits


@triton.jit
def end_pass(partials, bits, PARTIALS: tl.constexpr, PASS: tl.constexpr):
    """Writes this program's amax, where the pass finds it."""
    if PASS == "guess":
        store_amax(partials, bits, PARTIALS)


# --- host ---------------------------------------------------------------------------------------------------


def passes(form: Form, itemsize: int, hint: torch.Tensor | None) -> list[dict[str, Any]]:
    """The usages and the pass of each launch (`Form.launches`). Without a hint the amax is known before.

    Of two usages the first is guessed and mended: its amax is that of the second too.
    """
    first, *others = form.launches(itemsize)
    if hint is None:
        return [{**usage, "PASS": "known"} for usage in (first, *others)]
    assert form.constants()["POWER_OF_TWO"], "a scale that is no power of two cannot be guessed"
    return [
        {**first, "PASS": "guess"},
        {**first, "PASS": "mend"},
        *({**usage, "PASS": "found"} for usage in others),
    ]


def partials_to_find(programs: int, device: torch.device, *tensors: int) -> torch.Tensor:
    """fp32 [*tensors, a power of two]: where so many programs of a guess write the amaxes that they find, of each tensor."""
    return torch.empty(*tensors, triton.next_power_of_2(programs), dtype=torch.float32, device=device)
