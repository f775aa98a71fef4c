"""The shapes of a linear's forward without its data, over `TensorProto`.

x [L, ..., K], weight [N, K]  ->  out [L, ..., N], and what backward saves of x and weight
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Optional

from te_dynamo.errors import InputError
from te_dynamo.quantized.tensor_proto import TensorProto

if TYPE_CHECKING:
    from te_dynamo.dialect.linear import LinearConfig


@dataclasses.dataclass(slots=True)
class LinearFwdProtos:
    """What the forward of a linear reads."""

    # tensors
    x: TensorProto  # [L, ..., K]
    weight: TensorProto  # [N, K], or [K, N]
    bias: Optional[TensorProto]  # [N]
    # gradients, quantizers and numerics
    config: LinearConfig


def linear_forward_fake(args: LinearFwdProtos) -> tuple[TensorProto, list[TensorProto]]:
    """(out, saved): of x, then of the weight, what the GEMM that reads it in backward needs, if that gradient is asked for.

    Nothing is saved for gradients in high precision: they read x and the weight, which are no results of the operation.
    Raises InputError for shapes that no linear has.
    """
    x, weight, config = args.x, args.weight, args.config
    transposed = config.weight_transposed
    _check_shapes(x.shape, weight.shape, transposed, None if args.bias is None else args.bias.shape)
    requires_grad = config.input_requires_grad or config.weight_requires_grad
    requires_grad = requires_grad or (args.bias is not None and args.bias.requires_grad)
    out = TensorProto((*x.shape[:-1], weight.shape[1 if transposed else 0]), x.dtype, None, requires_grad, x.device)
    saved = []
    if config.grad_output_quantizer is not None:
        if config.weight_requires_grad:
            saved.append(TensorProto(x.shape, x.dtype, config.input_quantizer, device=x.device))
            saved[-1].update_usage(rowwise_usage=False, columnwise_usage=True)
        if config.input_requires_grad:
            saved.append(TensorProto(weight.shape, weight.dtype, config.weight_quantizer, device=weight.device))
            saved[-1].update_usage(rowwise_usage=transposed, columnwise_usage=not transposed)
    return out, saved


def _check_shapes(
    x: tuple[int, ...], weight: tuple[int, ...], transposed: bool, bias: Optional[tuple[int, ...]]
) -> None:
    n_k = weight[::-1] if transposed else weight
    if len(weight) != 2 or not x or x[-1] != n_k[1] or bias not in (None, n_k[:1]):
        stored = "[K, N]" if transposed else "[N, K]"
        given = "" if bias is None else f" and a bias of {bias}"
        raise InputError(f"linear: expected x [..., K], a weight {stored} and a bias [N], got {x}, {weight}{given}")
