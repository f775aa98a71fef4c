"""`te.linear`: one operation that owns forward, backward and what is saved between them.

    forward    out = x @ weight^T + bias                       x and weight rowwise in FP8
    backward   dx = dy @ weight,  dw = dy^T @ x,  db = sum dy  the columnwise copies that forward saved, dy in FP8

Inside the compiler `te.linear` is seen as its parts (te.quantize, te.gemm, te.add_bias), below autograd, so that shared
inputs are quantized once and producers can write FP8 themselves.

`LinearFwdArgs` and `LinearBwdArgs` are the one argument of every helper (seed 001): what backward reads is what they name.
"""

import dataclasses
from typing import Any, Optional

import torch

from te_dynamo._compat import OpaqueMeta, register_value_class
from te_dynamo.ops.define import expand_in_compiler, te_op
from te_dynamo.ops.fakes import of_proto
from te_dynamo.ops.gemm import add_bias, bias_grad, gemm
from te_dynamo.ops.quantize import quantize_tensor
from te_dynamo.quantizers import Quantizer
from te_dynamo.recipe import Recipe
from te_dynamo.tensor_proto import TensorProto

__all__ = ["LinearBwdArgs", "LinearConfig", "LinearFwdArgs", "linear", "linear_backward", "linear_forward"]


@register_value_class
@dataclasses.dataclass(frozen=True)
class LinearConfig(metaclass=OpaqueMeta):
    """How one linear runs: a value, carried by the graph as a constant.

    input_requires_grad, weight_requires_grad: read once, when the graph is matched; real and fake runs save by these and
        never by a live tensor's flag, so that they agree on how many tensors there are.
    """

    input_quantizer: Quantizer
    weight_quantizer: Quantizer
    grad_output_quantizer: Quantizer
    input_requires_grad: bool
    weight_requires_grad: bool
    fprop_fast_accum: bool
    dgrad_fast_accum: bool
    wgrad_fast_accum: bool

    @classmethod
    def from_recipe(cls, recipe: Recipe, *, input_requires_grad: bool, weight_requires_grad: bool) -> "LinearConfig":
        """The configuration that `recipe` gives a linear."""
        return cls(
            input_quantizer=recipe.input_quantizer().with_usage(columnwise=weight_requires_grad),
            weight_quantizer=recipe.weight_quantizer().with_usage(columnwise=input_requires_grad),
            grad_output_quantizer=recipe.grad_output_quantizer(),
            input_requires_grad=input_requires_grad,
            weight_requires_grad=weight_requires_grad,
            fprop_fast_accum=recipe.fprop_fast_accum,
            dgrad_fast_accum=recipe.dgrad_fast_accum,
            wgrad_fast_accum=recipe.wgrad_fast_accum,
        )

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        names: dict[str, type] = {"LinearConfig": LinearConfig}
        fields = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Quantizer):
                text, inner = value.__fx_repr__()
                names.update(inner)
            else:
                text = repr(value)
            fields.append(f"{field.name}={text}")
        return f"LinearConfig({', '.join(fields)})", names

    def describe(self) -> str:
        """One short word for graphs: "x e4m3[row+column], w e4m3[row], dy e5m2[row+column]"."""
        quantizers = (self.input_quantizer, self.weight_quantizer, self.grad_output_quantizer)
        named = zip(("x", "w", "dy"), quantizers, strict=True)
        return "linear(" + ", ".join(f"{name} {quantizer.describe()}" for name, quantizer in named) + ")"


@dataclasses.dataclass(slots=True)
class LinearFwdArgs:
    """Everything the forward of a linear reads."""

    # tensors
    x: torch.Tensor  # [..., K]
    weight: torch.Tensor  # [N, K]
    bias: Optional[torch.Tensor]  # [N]
    # gradients, quantizers and numerics
    config: LinearConfig


@dataclasses.dataclass(slots=True)
class LinearBwdArgs:
    """Everything the backward of a linear reads. A saved operand is None where no gradient needs it."""

    # tensors saved by forward
    x_columnwise: Optional[torch.Tensor] = None
    x_scale_inv: Optional[torch.Tensor] = None
    weight_columnwise: Optional[torch.Tensor] = None
    weight_scale_inv: Optional[torch.Tensor] = None
    # which gradients are asked for
    requires_dgrad: bool = False
    requires_wgrad: bool = False
    requires_bias_grad: bool = False
    # dtypes of the gradients
    x_dtype: Optional[torch.dtype] = None
    weight_dtype: Optional[torch.dtype] = None
    bias_dtype: Optional[torch.dtype] = None
    # quantizers and numerics
    config: Optional[LinearConfig] = None


def linear_forward(args: LinearFwdArgs) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(output [..., N], tensors to save): columnwise data and scale of x, then of the weight, each only if needed."""
    config = args.config
    x_buffers = quantize_tensor(args.x.contiguous(), config.input_quantizer)
    weight_buffers = quantize_tensor(args.weight.contiguous(), config.weight_quantizer)
    product = gemm(
        *config.input_quantizer.operand(x_buffers, columnwise=False),
        *config.weight_quantizer.operand(weight_buffers, columnwise=False),
        None,
        args.x.dtype if args.bias is None else torch.float32,
        config.fprop_fast_accum,
    )
    if args.bias is not None:
        product = add_bias(product, args.bias, args.x.dtype)
    to_save: list[torch.Tensor] = []
    if config.weight_requires_grad:
        to_save += config.input_quantizer.operand(x_buffers, columnwise=True)
    if config.input_requires_grad:
        to_save += config.weight_quantizer.operand(weight_buffers, columnwise=True)
    return _with_leading(product, args.x), to_save


def _with_leading(product: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """product [M, N] with the leading dimensions of `like` [..., K], whose product M is; no view where that is [M, K]."""
    return product if like.dim() == 2 else product.reshape(*like.shape[:-1], product.shape[-1])


def linear_forward_fake(args: LinearFwdArgs) -> tuple[TensorProto, list[torch.Tensor]]:
    """`linear_forward` over protos: the same arity from the same flags."""
    config, device = args.config, args.x.device
    out = TensorProto((*args.x.shape[:-1], args.weight.shape[0]), args.x.dtype, device=device)
    to_save: list[torch.Tensor] = []
    if config.weight_requires_grad:
        proto = TensorProto(args.x.shape, args.x.dtype, config.input_quantizer, device=device)
        to_save += config.input_quantizer.operand(proto.create_buffers(), columnwise=True)
    if config.input_requires_grad:
        proto = TensorProto(args.weight.shape, args.weight.dtype, config.weight_quantizer, device=device)
        to_save += config.weight_quantizer.operand(proto.create_buffers(), columnwise=True)
    return out, to_save


def linear_setup_ctx(bwd_args: LinearBwdArgs, fwd_args: LinearFwdArgs, needs_input_grad: tuple[bool, ...]) -> None:
    """What backward needs beside the saved tensors; runs once, on fake tensors under the compiler."""
    config = fwd_args.config
    bwd_args.config = config
    bwd_args.requires_dgrad = config.input_requires_grad
    bwd_args.requires_wgrad = config.weight_requires_grad
    bwd_args.requires_bias_grad = fwd_args.bias is not None and needs_input_grad[2]
    bwd_args.x_dtype, bwd_args.weight_dtype = fwd_args.x.dtype, fwd_args.weight.dtype
    bwd_args.bias_dtype = None if fwd_args.bias is None else fwd_args.bias.dtype


def linear_backward(args: LinearBwdArgs, dy: torch.Tensor) -> tuple[Optional[torch.Tensor], ...]:
    """(dx [..., K], dweight [N, K], dbias [N]) from dy [..., N]; None for a gradient nobody asked for."""
    config = args.config
    assert config is not None
    dx = dweight = dbias = None
    dy = dy.contiguous()
    if args.requires_bias_grad:
        dbias = bias_grad(dy).to(args.bias_dtype)
    if not (args.requires_dgrad or args.requires_wgrad):
        return dx, dweight, dbias
    quantizer = config.grad_output_quantizer.with_usage(args.requires_dgrad, args.requires_wgrad)
    dy_buffers = quantize_tensor(dy, quantizer)
    if args.requires_dgrad:
        operand = quantizer.operand(dy_buffers, columnwise=False)
        dx = gemm(
            *operand,
            args.weight_columnwise,
            args.weight_scale_inv,
            None,
            args.x_dtype,
            config.dgrad_fast_accum,
        )
        dx = _with_leading(dx, dy)
    if args.requires_wgrad:
        operand = quantizer.operand(dy_buffers, columnwise=True)
        dweight = gemm(*operand, args.x_columnwise, args.x_scale_inv, None, args.weight_dtype, config.wgrad_fast_accum)
    return dx, dweight, dbias


# The boundary to autograd: the only place that touches its context.


def _expansion(
    x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor], config: LinearConfig
) -> list[torch.Tensor]:
    out, to_save = linear_forward(LinearFwdArgs(x, weight, bias, config))
    return [out, *to_save]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    ctx.bwd_args = LinearBwdArgs()
    linear_setup_ctx(ctx.bwd_args, LinearFwdArgs(*inputs), ctx.needs_input_grad)
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, grads: list[Optional[torch.Tensor]]) -> tuple[Optional[torch.Tensor], ...]:
    # A copy for this call: ctx keeps no tensor beside its own saved ones, and a second backward finds it as it was.
    args, saved = dataclasses.replace(ctx.bwd_args), list(ctx.saved_tensors)
    if args.requires_wgrad:
        args.x_columnwise, args.x_scale_inv, *saved = saved
    if args.requires_dgrad:
        args.weight_columnwise, args.weight_scale_inv = saved
    dy = grads[0]
    assert dy is not None
    return *linear_backward(args, dy), None


@te_op(reference=_expansion, setup_context=_setup_context, backward=_backward)
def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor], config: LinearConfig
) -> list[torch.Tensor]:
    """[out, *saved]: out[..., N] = x[..., K] @ weight[N, K]^T (+ bias[N]) in FP8; x's dtype bf16, fp16 or fp32."""
    out, to_save = linear_forward_fake(LinearFwdArgs(x, weight, bias, config))
    return [of_proto(out), *to_save]


expand_in_compiler(linear, _expansion)
