"""What FP8 training is, written a second time: every linear rounds its operands to FP8 and multiplies in float64.

    with fp8_linears():
        model(x).sum().backward()

Shares nothing with the package but the definition of current scaling: scale = fmax / amax(x), one a tensor.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected| in the Frobenius norm; NaN if either holds one."""
    actual, expected = actual.detach().double(), expected.detach().double()
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} is not {tuple(expected.shape)}"
    return float((actual - expected).norm() / expected.norm())


def rounded(x: Tensor, fp8: torch.dtype, power_of_two: bool = False) -> Tensor:
    """x, of an amax above 0 and finite, after a round trip through FP8, in float64."""
    fmax = torch.finfo(fp8).max
    scale = torch.tensor(fmax, dtype=torch.float32) / x.abs().max().float()
    if power_of_two:
        scale = scale.log2().floor().exp2()
    return (x.double() * scale).float().clamp(-fmax, fmax).to(fp8).double() / scale


@dataclasses.dataclass
class fp8_linears(TorchFunctionMode):
    """Inside, F.linear rounds x and weight to `forward` and the gradient of its result to `backward`.

    skip: weights (by identity) that stay in their own precision.
    """

    forward: torch.dtype = torch.float8_e4m3fn
    backward: torch.dtype = torch.float8_e5m2
    power_of_two: bool = False
    skip: tuple[Tensor, ...] = ()

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.linear or any(args[1] is weight for weight in self.skip):
            return func(*args, **(kwargs or {}))
        x, weight, bias = (*args, None)[:3]
        return _Linear.apply(x, weight, bias, self)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: fp8_linears) -> Tensor:
        x8 = rounded(x, how.forward, how.power_of_two)
        w8 = rounded(weight, how.forward, how.power_of_two)
        ctx.save_for_backward(x8, w8)
        ctx.how, ctx.dtypes = how, (x.dtype, weight.dtype)
        out = x8 @ w8.t()
        return (out if bias is None else out + bias.double()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x8, w8 = ctx.saved_tensors
        dy8 = rounded(dy, ctx.how.backward, ctx.how.power_of_two)
        dx = (dy8 @ w8).to(ctx.dtypes[0])
        dw = (dy8.flatten(0, -2).t() @ x8.flatten(0, -2)).to(ctx.dtypes[1])
        db = dy.double().flatten(0, -2).sum(0).to(ctx.dtypes[1]) if ctx.needs_input_grad[2] else None
        return dx, dw, db, None
