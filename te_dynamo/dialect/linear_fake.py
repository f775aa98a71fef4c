"""The shapes of a linear without its data: forward and backward over `TensorProto`.

    forward    x [L, ..., K], weight [N, K]  ->  out [L', ..., N], and what backward saves of x and weight
    backward   dy [L', ..., N]               ->  dx [L, ..., K], dweight [N, K], dbias [N]

A weight that is stored as [K, N] (LinearConfig.weight_transposed) has a gradient of that shape.

All tensors are those of one rank. Tensor parallelism splits N (column) or K (row) among the ranks, which the weight that
is given already shows. Sequence parallelism splits L: a column-parallel linear gathers its input, L' = L * tp_size, a
row-parallel one scatters the sum of its output, L' = L / tp_size. What is saved, and the gradients, stay the rank's own.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal, Optional

from te_dynamo.errors import InputError, InvalidOptionError
from te_dynamo.quantized.tensor_proto import TensorProto

if TYPE_CHECKING:
    from te_dynamo.dialect.linear import LinearConfig


@dataclasses.dataclass(frozen=True, slots=True)
class Parallel:
    """How the ranks share a linear.

    mode: "column" splits the output features, "row" the input features; None is one rank's own linear.
    tp_size: ranks that share it.
    sequence_parallel: whether what is outside the linear is split by its leading dimension.
    """

    mode: Optional[Literal["column", "row"]] = None
    tp_size: int = 1
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        if self.mode not in (None, "column", "row"):
            raise InvalidOptionError(f"tensor parallelism: expected mode 'column', 'row' or None, got {self.mode!r}")
        if self.tp_size < 1 or (self.mode is None and self.tp_size > 1):
            raise InvalidOptionError(
                f"tensor parallelism: {self.tp_size} ranks do not share a linear of mode {self.mode!r}"
            )

    def output_leading(self, leading: int) -> int:
        """L' of L. Raises InputError where the ranks cannot share the output evenly."""
        if self.mode is None or not self.sequence_parallel:
            return leading
        if self.mode == "column":
            return leading * self.tp_size
        if leading % self.tp_size:
            raise InputError(
                f"sequence parallelism: {self.tp_size} ranks cannot share an output whose leading dimension is {leading}: "
                "it is no multiple of tp_size"
            )
        return leading // self.tp_size


@dataclasses.dataclass(slots=True)
class LinearFwdProtos:
    """What the forward of a linear reads."""

    # tensors, of this rank
    x: TensorProto  # [L, ..., K]
    weight: TensorProto  # [N, K], or [K, N]
    bias: Optional[TensorProto]  # [N]
    # gradients, quantizers and numerics
    config: LinearConfig
    # parallelism
    parallel: Parallel = dataclasses.field(default_factory=Parallel)


@dataclasses.dataclass(slots=True)
class LinearBwdProtos:
    """What the backward of a linear reads."""

    # tensors, of this rank
    dy: TensorProto  # [L', ..., N]
    x: TensorProto  # [L, ..., K]
    weight: TensorProto  # [N, K], or [K, N]
    bias: Optional[TensorProto]  # [N]
    # gradients, quantizers and numerics
    config: LinearConfig
    requires_bias_grad: bool = False
    # parallelism
    parallel: Parallel = dataclasses.field(default_factory=Parallel)


def linear_forward_fake(args: LinearFwdProtos) -> tuple[TensorProto, list[TensorProto]]:
    """(out, saved): of x, then of the weight, what the GEMM that reads it in backward needs, if that gradient is asked for.

    Nothing is saved for gradients in high precision: they read x and the weight, which are no results of the operation.
    Raises InputError for shapes that no linear has.
    """
    x, weight, config = args.x, args.weight, args.config
    transposed = config.weight_transposed
    _check_shapes(x.shape, weight.shape, transposed, None if args.bias is None else args.bias.shape)
    leading = (args.parallel.output_leading(x.shape[0]), *x.shape[1:-1]) if len(x.shape) > 1 else ()
    requires_grad = config.input_requires_grad or config.weight_requires_grad
    requires_grad = requires_grad or (args.bias is not None and args.bias.requires_grad)
    out = TensorProto((*leading, weight.shape[1 if transposed else 0]), x.dtype, None, requires_grad, x.device)
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


def linear_backward_fake(args: LinearBwdProtos) -> tuple[Optional[TensorProto], ...]:
    """(dx, dweight, dbias); None for a gradient nobody asked for. Raises InputError for a dy of another shape than out's."""
    x, weight, config = args.x, args.weight, args.config
    out, _ = linear_forward_fake(LinearFwdProtos(x, weight, args.bias, config, args.parallel))
    if args.dy.shape != out.shape:
        raise InputError(f"linear: dy has the shape {args.dy.shape}, the output {out.shape}")
    dx = _gradient_of(x) if config.input_requires_grad else None
    dweight = _gradient_of(weight) if config.weight_requires_grad else None
    dbias = _gradient_of(args.bias) if args.bias is not None and args.requires_bias_grad else None
    return dx, dweight, dbias


def _gradient_of(tensor: TensorProto) -> TensorProto:
    """Plain, of the tensor's own shape and dtype."""
    return TensorProto(tensor.shape, tensor.dtype, device=tensor.device)
