"""`te.linear`: one operation that owns forward, backward and what is saved between them.

    forward    out = x @ weight^T + bias                       x and weight rowwise in their quantizer's format
    backward   dx = dy @ weight,  dw = dy^T @ x,  db = sum dy  the columnwise operands that forward saved, dy quantized

Inside the compiler `te.linear` is seen as its parts (te.quantize, te.gemm, te.add_bias), below autograd, so
that shared inputs are quantized once and producers can write FP8 themselves. A recipe that keeps backward in high precision
saves x and weight as they are, and its two products are torch's own. So does one that keeps wgrad alone there, with x and that product.

A weight that the user stores as [K, N] (GPT-2's Conv1D) is read as it lies: its rowwise and its columnwise data change places,
in every format, because both are blocked along what their GEMM contracts. Its gradient is computed as [K, N] too.

`te.linear_with_workspace` is the same linear with the weight's buffers given: a cache's (te_dynamo/weights), or those of a weight that
the user's model holds as a QuantizedTensor. Of rows alone the columns are made where they are read, of the same codes.

`LinearFwdArgs` and `LinearBwdArgs` are the one argument of every helper: what backward reads is what they name.
A saved tensor that is an input of the operation is no result of it: forward names the slot in `saved_aliases`, and the
boundary to autograd puts the input there.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Optional

import torch

from te_dynamo._compat import OpaqueMeta, register_value_class
from te_dynamo.dialect.define import expand_in_compiler, te_op
from te_dynamo.dialect.fakes import of_proto
from te_dynamo.dialect.gemm import add_bias, bias_grad
from te_dynamo.dialect.multiply import Operand, multiply
from te_dynamo.dialect.quantize import quantize_with_amax
from te_dynamo.errors import InputError
from te_dynamo.kernels.runtime.target import target_of
from te_dynamo.quantized.quantize import quantize_tensor
from te_dynamo.quantized.quantizers import Quantizer, check_linear
from te_dynamo.quantized.tensor_proto import TensorProto, to_tensor_proto
from te_dynamo.recipe import Recipe

if TYPE_CHECKING:
    from typing_extensions import Self


@register_value_class
@dataclasses.dataclass(frozen=True)
class LinearConfig(metaclass=OpaqueMeta):
    """How one linear runs: a value, carried by the graph as a constant.

    grad_output_quantizer: None computes both gradients in the precision of the operands.
    input_requires_grad, weight_requires_grad: read once, when the graph is matched; real and fake runs save by these and
        never by a live tensor's flag, so that they agree on how many tensors there are.
    weight_transposed: the weight is [K, N].
    wgrad_in_high_precision: wgrad multiplies dy and x as they are, though dgrad's operands are quantized.
    input_amax: the amax for which x is scaled, 0 for its own.

    Raises QuantizationError for quantizers whose tensors no GEMM multiplies.
    """

    input_quantizer: Quantizer
    weight_quantizer: Quantizer
    grad_output_quantizer: Optional[Quantizer]
    input_requires_grad: bool
    weight_requires_grad: bool
    fprop_fast_accum: bool
    dgrad_fast_accum: bool
    wgrad_fast_accum: bool
    weight_transposed: bool = False
    wgrad_in_high_precision: bool = False
    input_amax: float = 0.0

    transposed_shape: ClassVar[str] = "[K, N]"

    def __post_init__(self) -> None:
        check_linear(self.input_quantizer, self.weight_quantizer, self.grad_output_quantizer)

    @classmethod
    def from_recipe(
        cls,
        recipe: Recipe,
        *,
        input_requires_grad: bool,
        weight_requires_grad: bool,
        weight_transposed: bool = False,
        device: Optional[torch.device] = None,
        input_amax: float = 0.0,
    ) -> "Self":
        """The configuration of this class that `recipe` gives a linear.

        device: of its operands, whose tensor cores say how scales lie; None: plain, which every GEMM takes.
        """
        x, weight, dy = recipe.input_quantizer(), recipe.weight_quantizer(), recipe.grad_output_quantizer()
        if device is not None and device.type == "cuda" and target_of(device).has_block_scales:
            x, weight, dy = (quantizer.for_block_scales() for quantizer in (x, weight, dy))
        _, quantized, wgrad_quantized = recipe.quantizes()
        for_dgrad = input_requires_grad and quantized
        fprop, dgrad, wgrad = recipe.fast_accum()
        return cls(
            input_quantizer=x.with_usage(columnwise=weight_requires_grad and wgrad_quantized),
            weight_quantizer=cls.weight_with_usage(
                weight, for_dgrad or not weight_transposed, for_dgrad or weight_transposed
            ),
            grad_output_quantizer=dy if quantized else None,
            input_requires_grad=input_requires_grad,
            weight_requires_grad=weight_requires_grad,
            fprop_fast_accum=fprop,
            dgrad_fast_accum=dgrad,
            wgrad_fast_accum=wgrad,
            weight_transposed=weight_transposed,
            wgrad_in_high_precision=quantized and not wgrad_quantized,
            input_amax=input_amax,
        )

    @staticmethod
    def weight_with_usage(quantizer: Quantizer, rowwise: bool, columnwise: bool) -> Quantizer:
        """How a weight is held by the recipe's quantizer of weights."""
        return quantizer.with_usage(rowwise, columnwise)

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        names: dict[str, type] = {type(self).__name__: type(self)}
        fields = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Quantizer):
                text, inner = value.__fx_repr__()
                names.update(inner)
            else:
                text = repr(value)
            fields.append(f"{field.name}={text}")
        return f"{type(self).__name__}({', '.join(fields)})", names

    def describe(self) -> str:
        """One short word for graphs: "x e4m3[row+column], w e4m3[row], dy e5m2[row+column]"."""
        quantizers = (self.input_quantizer, self.weight_quantizer, self.grad_output_quantizer)
        x = f"x of amax {self.input_amax:g}" if self.input_amax else "x"
        named = zip((x, "w", "dy"), quantizers, strict=True)
        text = "linear(" + ", ".join(f"{name} {q.describe() if q else 'as it is'}" for name, q in named) + ")"
        text += ", wgrad as it is" if self.wgrad_in_high_precision else ""
        return text + (f" of {self.transposed_shape}" if self.weight_transposed else "")


@dataclasses.dataclass(slots=True)
class LinearFwdArgs:
    """Everything the forward of a linear reads."""

    # tensors
    x: torch.Tensor  # [..., K]
    weight: Optional[torch.Tensor]  # [N, K], or [K, N]; None with a workspace whose weight gets no gradient
    bias: Optional[torch.Tensor]  # [N]
    # gradients, quantizers and numerics
    config: LinearConfig
    # the weight's buffers in the order of its quantizer, () where forward has to quantize it
    weight_workspace: tuple[torch.Tensor, ...] = ()


@dataclasses.dataclass(slots=True)
class LinearBwdArgs:
    """Everything the backward of a linear reads."""

    # tensors saved by forward: an operand as its GEMM reads it, the tensor itself in high precision, () where not needed
    x_saved: tuple[torch.Tensor, ...] = ()
    weight_saved: tuple[torch.Tensor, ...] = ()
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

    @property
    def quantizes_wgrad(self) -> bool:
        """Whether wgrad is asked for, of operands that are quantized."""
        return self.requires_wgrad and self.config is not None and not self.config.wgrad_in_high_precision


def linear_forward(args: LinearFwdArgs) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(output [..., N], tensors to save): the columnwise operand of x, then dgrad's of the weight, each only if needed and no
    input."""
    config = args.config
    x_buffers, weight_buffers = quantize_operands(args)
    out_dtype = args.x.dtype if args.bias is None else torch.float32
    product = forward_product(config, x_buffers, weight_buffers, out_dtype)
    if args.bias is not None:
        product = add_bias(product, args.bias, args.x.dtype)
    return _with_leading(product, args.x), saved_operands(
        config, x_buffers, weight_buffers, bool(args.weight_workspace)
    )


def quantize_operands(args: LinearFwdArgs) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(buffers of x, buffers of the weight)."""
    x, amax = args.x.contiguous(), args.config.input_amax
    if amax:
        x_buffers = quantize_with_amax(x, args.config.input_quantizer, x.new_full((1,), amax, dtype=torch.float32))
    else:
        x_buffers = quantize_tensor(x, args.config.input_quantizer)
    if args.weight_workspace:
        return x_buffers, list(args.weight_workspace)
    assert args.weight is not None
    return x_buffers, quantize_tensor(args.weight.contiguous(), args.config.weight_quantizer)


def forward_product(
    config: LinearConfig,
    x_buffers: list[torch.Tensor],
    weight_buffers: list[torch.Tensor],
    out_dtype: torch.dtype,
    bias: Optional[torch.Tensor] = None,
    addend: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """[M, N] = x @ weight^T, in the GEMM's epilogue with a bias if one is given, and then an addend [M, N]."""
    return multiply(
        Operand.of(config.input_quantizer, x_buffers, columnwise=False),
        Operand.of(config.weight_quantizer, weight_buffers, columnwise=config.weight_transposed),
        out_dtype,
        config.fprop_fast_accum,
        bias,
        addend,
    )


def saved_operands(
    config: LinearConfig,
    x_buffers: list[torch.Tensor],
    weight_buffers: list[torch.Tensor],
    weight_is_input: bool = False,
) -> list[torch.Tensor]:
    """What backward reads of the quantized operands; of the weight nothing where its buffers are an input (saved_aliases)."""
    to_save: list[torch.Tensor] = []
    if config.grad_output_quantizer is None:
        return to_save  # x and weight themselves, which are no results of the operation
    if config.weight_requires_grad and not config.wgrad_in_high_precision:
        to_save += config.input_quantizer.operand(x_buffers, columnwise=True)
    if config.input_requires_grad and not weight_is_input:
        to_save += config.weight_quantizer.operand(weight_buffers, columnwise=not config.weight_transposed)
    return to_save


def saved_aliases(args: LinearFwdArgs) -> list[torch.Tensor]:
    """What backward reads and is an input of the operation, in the order of the saved tensors, after those that are not.

    In a backward of high precision x and the weight themselves; else of a workspace dgrad's operand, and x where wgrad reads that.
    """
    config = args.config
    if config.grad_output_quantizer is None:
        aliases = [args.x] * config.weight_requires_grad
        if config.input_requires_grad:
            assert args.weight is not None
            aliases.append(args.weight)
        return aliases
    aliases = list(args.weight_workspace) if config.input_requires_grad else []
    if aliases and not _makes_columns(config):
        aliases = list(config.weight_quantizer.operand(aliases, columnwise=not config.weight_transposed))
    return aliases + [args.x] * (config.weight_requires_grad and config.wgrad_in_high_precision)


def saved_of(
    saved: Sequence[Any], needs_wgrad: bool, needs_dgrad: bool, config: Optional[LinearConfig]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """(what was saved of x, what of the weight): of one format, and so equally many; or of x itself, which is the last."""
    if config is not None and config.wgrad_in_high_precision:
        of_weight = len(saved) - needs_wgrad
        return tuple(saved[of_weight:]), tuple(saved[:of_weight])
    of_x = len(saved) // (needs_wgrad + needs_dgrad) * needs_wgrad if saved else 0
    return tuple(saved[:of_x]), tuple(saved[of_x:])


def _makes_columns(config: LinearConfig) -> bool:
    """Whether dgrad reads columns that backward makes: of a workspace that has rows alone."""
    return not (config.weight_transposed or config.weight_quantizer.columnwise)


def _with_leading(product: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """product [M, N] with the leading dimensions of `like` [..., K], whose product M is; no view where that is [M, K]."""
    return product if like.dim() == 2 else product.reshape(*like.shape[:-1], product.shape[-1])


def linear_forward_fake(
    x: TensorProto, weight: TensorProto, bias: Optional[Sequence[int]], config: LinearConfig
) -> tuple[TensorProto, list[TensorProto]]:
    """`linear_forward` over protos and the bias's shape: (out, saved), a proto for each operand that is saved quantized.

    Raises InputError for shapes that no linear has.
    """
    transposed = config.weight_transposed
    _check_shapes(x.shape, weight.shape, transposed, None if bias is None else tuple(bias))
    out = TensorProto((*x.shape[:-1], weight.shape[1 if transposed else 0]), x.dtype, device=x.device)
    saved = []
    if config.grad_output_quantizer is not None:
        if config.weight_requires_grad and not config.wgrad_in_high_precision:
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


def linear_backward(
    args: LinearBwdArgs, dy: torch.Tensor, addend: Optional[torch.Tensor] = None
) -> tuple[Optional[torch.Tensor], ...]:
    """(dx [..., K], dweight of the weight's shape, dbias [N]) from dy [..., N]; None for a gradient nobody asked for.

    addend: what is added to dx, of its shape.
    """
    config = args.config
    assert config is not None and args.x_dtype is not None and args.weight_dtype is not None
    dy = dy.contiguous()
    quantized = config.grad_output_quantizer is not None and (args.requires_dgrad or args.quantizes_wgrad)
    buffers = quantize_tensor(dy, grad_output_quantizer(args)) if quantized else None
    # Behind the quantization, for which dy is in memory: Inductor would else compute dy once more for the sums.
    dbias = bias_grad(dy).to(args.bias_dtype) if args.requires_bias_grad else None
    if buffers is None:
        dx, dweight = _gradients_in_high_precision(args, dy)
        return dx if dx is None or addend is None else dx.add_(addend), dweight, dbias
    dx, dweight = backward_products(args, buffers, addend)
    if args.requires_wgrad and not args.quantizes_wgrad:
        _, dweight = _gradients_in_high_precision(dataclasses.replace(args, requires_dgrad=False), dy)
    return None if dx is None else _with_leading(dx, dy), dweight, dbias


def grad_output_quantizer(args: LinearBwdArgs) -> Quantizer:
    """How dy is held for the products that are asked for."""
    assert args.config is not None and args.config.grad_output_quantizer is not None
    return args.config.grad_output_quantizer.with_usage(args.requires_dgrad, args.quantizes_wgrad)


def backward_products(
    args: LinearBwdArgs, dy_buffers: list[torch.Tensor], addend: Optional[torch.Tensor] = None
) -> tuple[Optional[torch.Tensor], Optional[torch.Tensor]]:
    """(dx [M, K], dweight of the weight's shape) from dy in the buffers of `grad_output_quantizer(args)`; None where not asked for, and for a
    wgrad in high precision.

    addend: what is added to dx, of as many elements.
    """
    config, quantizer = args.config, grad_output_quantizer(args)
    assert config is not None and args.x_dtype is not None and args.weight_dtype is not None
    dx = dweight = None
    if args.requires_dgrad:
        dx = multiply(
            Operand.of(quantizer, dy_buffers, columnwise=False),
            weight_of_dgrad(config, args.weight_saved),
            args.x_dtype,
            config.dgrad_fast_accum,
            addend=addend if addend is None or addend.dim() == 2 else addend.reshape(-1, addend.shape[-1]),
        )
    if args.quantizes_wgrad:
        n_by_m = Operand.of(quantizer, dy_buffers, columnwise=True)
        k_by_m = Operand(args.x_saved, config.input_quantizer.reading(columnwise=True))
        sides = (k_by_m, n_by_m) if config.weight_transposed else (n_by_m, k_by_m)
        dweight = multiply(*sides, args.weight_dtype, config.wgrad_fast_accum)
    return dx, dweight


def weight_of_dgrad(config: LinearConfig, saved: tuple[torch.Tensor, ...]) -> Operand:
    """The weight as dgrad reads it, of what was saved."""
    if _makes_columns(config):
        return Operand.of(config.weight_quantizer, saved, columnwise=True)
    return Operand(saved, config.weight_quantizer.reading(columnwise=not config.weight_transposed))


def _gradients_in_high_precision(
    args: LinearBwdArgs, dy: torch.Tensor
) -> tuple[Optional[torch.Tensor], Optional[torch.Tensor]]:
    """(dx, dweight) by torch's own products, in dy's precision."""
    dx = dweight = None
    assert args.config is not None and args.weight_dtype is not None
    transposed = args.config.weight_transposed
    rows = dy if dy.dim() == 2 else dy.reshape(-1, dy.shape[-1])
    if args.requires_dgrad:
        weight = args.weight_saved[0].to(dy.dtype)
        dx = _with_leading(torch.mm(rows, weight.t() if transposed else weight), dy)
    if args.requires_wgrad:
        (x,) = args.x_saved
        x = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        dweight = (torch.mm(x.t(), rows) if transposed else torch.mm(rows.t(), x)).to(args.weight_dtype)
    return dx, dweight


# The boundary to autograd: the only place that touches its context.


def _expansion(
    x: torch.Tensor,
    weight: Optional[torch.Tensor],
    bias: Optional[torch.Tensor],
    config: LinearConfig,
    workspace: Sequence[torch.Tensor] = (),
) -> list[torch.Tensor]:
    out, to_save = linear_forward(LinearFwdArgs(x, weight, bias, config, tuple(workspace)))
    return [out, *to_save]


def linear_flops(x: torch.Tensor, *args: Any, out_val: Any, **named: Any) -> int:
    """Of fprop; backward's products are operations of their own."""
    return 2 * out_val[0].numel() * x.shape[-1]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    x, weight, bias, config, *workspace = inputs
    ctx.workspace_grads = [[None] * len(buffers) for buffers in workspace]
    ctx.bwd_args = LinearBwdArgs(
        requires_dgrad=config.input_requires_grad,
        requires_wgrad=config.weight_requires_grad,
        requires_bias_grad=bias is not None and ctx.needs_input_grad[2],
        x_dtype=x.dtype,
        weight_dtype=x.dtype if weight is None else weight.dtype,
        bias_dtype=None if bias is None else bias.dtype,
        config=config,
    )
    ctx.save_for_backward(*output[1:], *saved_aliases(LinearFwdArgs(x, weight, bias, config, tuple(*workspace))))
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, grads: list[Optional[torch.Tensor]]) -> tuple[Any, ...]:
    # A copy for this call: ctx keeps no tensor beside its own saved ones, and a second backward finds it as it was.
    args, saved = dataclasses.replace(ctx.bwd_args), ctx.saved_tensors
    args.x_saved, args.weight_saved = saved_of(saved, args.requires_wgrad, args.requires_dgrad, args.config)
    dy = grads[0]
    assert dy is not None
    return *linear_backward(args, dy), None, *ctx.workspace_grads


@te_op(reference=_expansion, setup_context=_setup_context, backward=_backward, flops=linear_flops)
def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor], config: LinearConfig
) -> list[torch.Tensor]:
    """[out, *saved]: out[..., N] = x[..., K] @ weight[N, K]^T (+ bias[N]) in the config's formats; x's dtype bf16, fp16 or fp32.

    weight: [K, N] with config.weight_transposed.
    """
    return _fake(x, to_tensor_proto(weight), bias, config, ())


@te_op(reference=_expansion, setup_context=_setup_context, backward=_backward, flops=linear_flops)
def linear_with_workspace(
    x: torch.Tensor,
    weight: Optional[torch.Tensor],
    bias: Optional[torch.Tensor],
    config: LinearConfig,
    workspace: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """te.linear of a weight that is quantized: `workspace` holds its buffers, in the order of config.weight_quantizer.

    weight: what gets the gradient. Its values are read by a backward of high precision alone; None where that needs none.
    """
    proto = to_tensor_proto(weight) if weight is not None else _weight_proto(x, config, workspace)
    return _fake(x, proto, bias, config, workspace)


def _weight_proto(x: torch.Tensor, config: LinearConfig, workspace: Sequence[torch.Tensor]) -> TensorProto:
    """The weight of those buffers, which fprop reads rowwise, or columnwise where it is [K, N]."""
    k, data = x.shape[-1], config.weight_quantizer.operand(list(workspace), columnwise=config.weight_transposed)[0]
    if not config.weight_transposed:
        return TensorProto((data.shape[0], k), x.dtype, device=x.device)
    return TensorProto(
        (k, data.shape[0 if config.weight_quantizer.transposes_columns() else 1]), x.dtype, device=x.device
    )


def _fake(
    x: torch.Tensor,
    weight: TensorProto,
    bias: Optional[torch.Tensor],
    config: LinearConfig,
    workspace: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    out, saved = linear_forward_fake(to_tensor_proto(x), weight, None if bias is None else bias.shape, config)
    if workspace and config.input_requires_grad and config.grad_output_quantizer is not None:
        saved.pop()  # the weight's, an alias
    return [of_proto(out), *(buffer for proto in saved for buffer in proto.create_buffers())]


expand_in_compiler(linear, _expansion)
expand_in_compiler(linear_with_workspace, _expansion)
