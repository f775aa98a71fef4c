"""What programs of writes call: operators and functions that write an argument, in every calling form there is."""

from __future__ import annotations

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("te_fuzz", "DEF")
_LIBRARY.define("first(Tensor(a!) out, Tensor x) -> ()")
_LIBRARY.define("second(Tensor x, Tensor(a!) out) -> ()")
_LIBRARY.define("returns(Tensor x, Tensor(a!) out) -> Tensor")
_LIBRARY.define("many(Tensor x, Tensor(a!)[] outs, float by=-3.0) -> ()")


def _first(out: Tensor, x: Tensor) -> None:
    out.mul_(-3.0)


def _second(x: Tensor, out: Tensor) -> None:
    out.mul_(-3.0)


def _returns(x: Tensor, out: Tensor) -> Tensor:
    out.mul_(-3.0)
    return out.mean() * 0.01


def _many(x: Tensor, outs: list[Tensor], by: float = -3.0) -> None:
    for out in outs:
        out.mul_(by)


for _name, _function in {"first": _first, "second": _second, "returns": _returns, "many": _many}.items():
    _LIBRARY.impl(_name, _function, "CPU")
    torch.library.register_fake(
        f"te_fuzz::{_name}", lambda x, out, by=0.0, n=_name: x.new_empty(()) if n == "returns" else None
    )


@torch.library.custom_op("te_fuzz::decorated", mutates_args={"out"})
def as_operator(x: Tensor, out: Tensor) -> None:
    out.mul_(-3.0)


@torch.library.triton_op("te_fuzz::triton", mutates_args={"out"})
def as_triton(x: Tensor, out: Tensor) -> None:
    out.mul_(-3.0)


@torch._dynamo.allow_in_graph
def allowed(x: Tensor, out: Tensor) -> Tensor:
    out.mul_(-3.0)
    return x * 1


@torch._dynamo.nonstrict_trace
def nonstrict(x: Tensor, out: Tensor) -> Tensor:
    out.mul_(-3.0)
    return x * 1
