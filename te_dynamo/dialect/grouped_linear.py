"""`te.grouped_linear`: linears of G experts on one tensor of tokens that is sorted by expert, in FP8.

    forward    out[m] = x[m] @ weight[g]^T           for the tokens m of group g: offs[g - 1] <= m < offs[g]
    backward   dx[m] = dy[m] @ weight[g],  dweight[g] = dy_g^T @ x_g

The weight is [G, N, K], or [G, K, N] as torch.nn.functional.grouped_mm takes it: its rowwise and its columnwise data
change places, nothing is transposed in memory. Rows of out and dx behind the last group are zero.

In current scaling x and dy have one scale a tensor, the weight one a group; rows behind the last group are multiplied by nothing, but
count in the tensor's scale. In formats with scales of blocks or rows each group is quantized as a tensor of its own: what te.linear of the
expert alone gives. There the second dimension of the weight is a multiple of `Quantizer.experts_begin_at`.

`quantize_groups` holds the operands of te.grouped_gemm, for every format. Scales for parts of a row are of one group each: rows as te.quantize
makes them, weights [G, N, K] as [G N, K], and columns by `te.quantize_group_columns`: in blocks of 32 or 128 tokens, which are quantized in their
padded order (kernels/tiles/groups.py), or with a scale a row, in the tokens' own order.

`te.grouped_linear_with_workspace` is the same with the weight's buffers given. Of rows alone backward makes the columns, or dx is that of the
dequantized weight, which then is given beside them (no grad_output_quantizer). `GroupedLinearFwdArgs` and
`GroupedLinearBwdArgs` are the one argument of every helper, as in linear.py.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Optional

import torch

from te_dynamo._compat import register_value_class
from te_dynamo.dialect.define import expand_in_compiler, te_op
from te_dynamo.dialect.fakes import of_proto
from te_dynamo.dialect.gemm import grouped_gemm
from te_dynamo.dialect.linear import LinearConfig, LinearFwdArgs, linear_flops, saved_aliases, weight_of_dgrad
from te_dynamo.dialect.multiply import Operand
from te_dynamo.errors import InputError, QuantizationError
from te_dynamo.kernels.layouts.form import Form
from te_dynamo.kernels.quantize.formats import columns_of_groups, columns_of_groups_reference
from te_dynamo.kernels.tiles.groups import padded_rows
from te_dynamo.quantized.quantize import quantize_tensor
from te_dynamo.quantized.quantizers import Quantizer, check_grouped_linear
from te_dynamo.quantized.tensor_proto import TensorProto, to_tensor_proto


@register_value_class
@dataclasses.dataclass(frozen=True)
class GroupedLinearConfig(LinearConfig):
    """How one grouped linear runs: a value, carried by the graph as a constant; weight_transposed: the weight is [G, K, N].

    grad_output_quantizer: None computes dx in the precision of x, of the weight's values; the weight then has no gradient.
    Raises QuantizationError for quantizers whose tensors no grouped GEMM multiplies.
    """

    transposed_shape: ClassVar[str] = "[G, K, N]"

    def __post_init__(self) -> None:
        check_grouped_linear(self.input_quantizer, self.weight_quantizer, self.grad_output_quantizer)
        if self.grad_output_quantizer is None and self.weight_requires_grad:
            raise QuantizationError("grouped linear: expected a quantizer of dy, of which wgrad is made")

    @staticmethod
    def weight_with_usage(quantizer: Quantizer, rowwise: bool, columnwise: bool) -> Quantizer:
        return quantizer.for_groups(rowwise, columnwise)

    def stored_shape(self, workspace: Sequence[torch.Tensor], groups: int) -> tuple[int, ...]:
        """The shape of the weight whose buffers these are: as it is stored, [G, N, K] or [G, K, N]."""
        codes = self.weight_quantizer.operand(list(workspace), columnwise=self.weight_transposed)[0]
        if self.weight_transposed and self.weight_quantizer.transposes_columns():
            codes = codes.transpose(-1, -2)
        rows = codes.shape[-2] if codes.dim() == 3 else codes.shape[-2] // groups
        return groups, rows, codes.shape[-1]

    def describe(self) -> str:
        """One short word for graphs: "grouped linear(x e4m3[row+column], w grouped e4m3[row], dy e5m2[row+column])"."""
        return f"grouped {super().describe()}"


@dataclasses.dataclass(slots=True)
class GroupedLinearFwdArgs:
    """Everything the forward of a grouped linear reads."""

    # tensors
    x: torch.Tensor  # [M, K]
    weight: Optional[torch.Tensor]  # [G, N, K], or [G, K, N]; None with a workspace where nothing reads its values
    offs: torch.Tensor  # int32 [G], the end of each group
    # gradients, quantizers and numerics
    config: GroupedLinearConfig
    # the weight's buffers in the order of its quantizer, () where forward has to quantize it
    weight_workspace: tuple[torch.Tensor, ...] = ()


@dataclasses.dataclass(slots=True)
class GroupedLinearBwdArgs:
    """Everything the backward of a grouped linear reads."""

    # tensors saved by forward: what a GEMM reads of an operand, data and scales, () where not needed
    x_saved: tuple[torch.Tensor, ...] = ()
    weight_saved: tuple[torch.Tensor, ...] = ()
    offs: Optional[torch.Tensor] = None
    # dtypes of the gradients
    x_dtype: Optional[torch.dtype] = None
    weight_dtype: Optional[torch.dtype] = None
    # gradients, quantizers and numerics
    config: Optional[GroupedLinearConfig] = None


def quantize_groups(x: torch.Tensor, offs: torch.Tensor, quantizer: Quantizer) -> list[torch.Tensor]:
    """The buffers of x [M, K], contiguous, in the order of its quantizer, its columns as products by groups read them."""
    if quantizer.one_scale:
        return quantize_tensor(x, quantizer)
    buffers = quantize_tensor(x, quantizer.with_usage(columnwise=False)) if quantizer.rowwise else []
    if quantizer.columnwise:
        buffers = [*buffers, *quantize_group_columns(x, offs, quantizer.with_usage(False, True))]
    return buffers


def columns_proto(x: TensorProto, groups: int, quantizer: Quantizer) -> TensorProto:
    """What `quantize_groups` makes of x's columns."""
    rows = padded_rows(x.shape[0], groups) if quantizer.experts_begin_at() > 1 else x.shape[0]
    return TensorProto((rows, x.shape[1]), x.dtype, quantizer.for_group_columns(groups), device=x.device)


def _columns_form(quantizer: Quantizer) -> Form:
    if quantizer.one_scale or quantizer.no_groups_reason() or quantizer.rowwise:
        raise QuantizationError(
            f"te.quantize_group_columns: {quantizer.describe()}: expected columns by rows, in 1x128 blocks or MXFP8"
        )
    return quantizer.form()


def _columns_kernel(x: torch.Tensor, offs: torch.Tensor, quantizer: Quantizer) -> list[torch.Tensor]:
    return columns_of_groups(x, offs, _columns_form(quantizer))


def _columns_reference(x: torch.Tensor, offs: torch.Tensor, quantizer: Quantizer) -> list[torch.Tensor]:
    return columns_of_groups_reference(x, offs, _columns_form(quantizer))


@te_op(reference=_columns_reference, kernel=_columns_kernel)
def quantize_group_columns(x: torch.Tensor, offs: torch.Tensor, quantizer: Quantizer) -> list[torch.Tensor]:
    """te.quantize's columns of x [M, K] in the padded order of its groups: zero rows behind each, to a multiple of 128. With a scale a row
    in the order of x, [K, M^16] and [G, K].

    x: contiguous, bf16, fp16 or fp32. quantizer: of blocks or rows, columnwise alone.
    """
    _columns_form(quantizer)
    proto = TensorProto(tuple(x.shape), x.dtype, device=x.device)
    return columns_proto(proto, offs.shape[0], quantizer).create_buffers()


def grouped_linear_forward(args: GroupedLinearFwdArgs) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(output [M, N], tensors to save): the columnwise operand of x, then dgrad's of the weight, each only if needed and no
    input."""
    config = args.config
    x_buffers = quantize_groups(args.x.contiguous(), args.offs, config.input_quantizer)
    weight_buffers = list(args.weight_workspace)
    if not weight_buffers:
        assert args.weight is not None
        weight_buffers = quantize_tensor(args.weight.contiguous(), config.weight_quantizer)
    x_rows = Operand.of(config.input_quantizer, x_buffers, columnwise=False)
    weight = Operand.of(config.weight_quantizer, weight_buffers, columnwise=config.weight_transposed)
    out = _product(x_rows, weight, args.offs, args.x.dtype, config.fprop_fast_accum)
    to_save: list[torch.Tensor] = []
    if config.weight_requires_grad:
        to_save += config.input_quantizer.operand(x_buffers, columnwise=True)
    if config.input_requires_grad and not args.weight_workspace and config.grad_output_quantizer is not None:
        to_save += config.weight_quantizer.operand(weight_buffers, columnwise=not config.weight_transposed)
    return out, to_save


def _product(a: Operand, b: Operand, offs: torch.Tensor, out_dtype: torch.dtype, fast_accum: bool) -> torch.Tensor:
    return grouped_gemm(a.tensors, a.quantizer, b.tensors, b.quantizer, offs, out_dtype, fast_accum)


def grouped_linear_backward(
    args: GroupedLinearBwdArgs, dy: torch.Tensor
) -> tuple[Optional[torch.Tensor], Optional[torch.Tensor]]:
    """(dx [M, K], dweight of the weight's shape) from dy [M, N]; None for a gradient nobody asked for."""
    config = args.config
    assert config is not None
    if not (config.input_requires_grad or config.weight_requires_grad):
        return None, None
    assert args.offs is not None
    if config.grad_output_quantizer is None:
        weight = args.weight_saved[0].to(dy.dtype)
        return grouped_mm(dy, weight.transpose(1, 2) if config.weight_transposed else weight, args.offs), None
    return grouped_backward_products(
        args, quantize_groups(dy.contiguous(), args.offs, grouped_grad_output_quantizer(args))
    )


def grouped_mm(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """x [M, K] @ weight [G, K, N] by groups of rows; torch leaves the rows behind the last group unwritten, here they are zero."""
    y = torch.nn.functional.grouped_mm(x.contiguous(), weight, offs=offs)
    rows = torch.arange(x.shape[0], device=x.device, dtype=offs.dtype)
    return torch.where((rows < offs[-1]).unsqueeze(1), y, 0)


def grouped_grad_output_quantizer(args: GroupedLinearBwdArgs) -> Quantizer:
    """How dy is held for the products that are asked for, one at least."""
    config = args.config
    assert config is not None and config.grad_output_quantizer is not None
    return config.grad_output_quantizer.with_usage(config.input_requires_grad, config.weight_requires_grad)


def grouped_backward_products(
    args: GroupedLinearBwdArgs, dy_buffers: list[torch.Tensor]
) -> tuple[Optional[torch.Tensor], Optional[torch.Tensor]]:
    """`grouped_linear_backward` from dy in the buffers that `quantize_groups` makes by `grouped_grad_output_quantizer(args)`."""
    config, quantizer = args.config, grouped_grad_output_quantizer(args)
    assert config is not None and args.offs is not None
    assert args.x_dtype is not None and args.weight_dtype is not None
    dx = dweight = None
    if config.input_requires_grad:
        dy_rows = Operand.of(quantizer, dy_buffers, columnwise=False)
        weight = weight_of_dgrad(config, args.weight_saved)
        dx = _product(dy_rows, weight, args.offs, args.x_dtype, config.dgrad_fast_accum)
    if config.weight_requires_grad:
        dy_columns = Operand.of(quantizer, dy_buffers, columnwise=True)
        x_columns = Operand(args.x_saved, config.input_quantizer.reading(columnwise=True))
        operands = (x_columns, dy_columns) if config.weight_transposed else (dy_columns, x_columns)
        dweight = _product(*operands, args.offs, args.weight_dtype, config.wgrad_fast_accum)
    return dx, dweight


def grouped_linear_forward_fake(
    x: TensorProto, weight: TensorProto, config: GroupedLinearConfig
) -> tuple[TensorProto, list[TensorProto]]:
    """(out, saved) over protos: of x, then of the weight, what backward reads. Raises InputError for other shapes."""
    if len(x.shape) != 2 or len(weight.shape) != 3:
        raise InputError(
            f"te.grouped_linear: expected x [M, K] and a weight of three dimensions, got {x.shape} and {weight.shape}"
        )
    n, k = weight.shape[1:] if not config.weight_transposed else weight.shape[:0:-1]
    if x.shape[1] != k:
        raise InputError(f"te.grouped_linear: x has {x.shape[1]} columns, the weight {weight.shape} takes {k}")
    requires_grad = config.input_requires_grad or config.weight_requires_grad
    out = TensorProto((x.shape[0], n), x.dtype, None, requires_grad, x.device)
    saved = []
    if config.weight_requires_grad:
        saved.append(columns_proto(x, weight.shape[0], config.input_quantizer))
    if config.input_requires_grad and config.grad_output_quantizer is not None:
        saved.append(TensorProto(weight.shape, weight.dtype, config.weight_quantizer, device=weight.device))
        saved[-1].update_usage(config.weight_transposed, not config.weight_transposed)
    return out, saved


# The boundary to autograd: the only place that touches its context.


def _expansion(
    x: torch.Tensor,
    weight: Optional[torch.Tensor],
    offs: torch.Tensor,
    config: GroupedLinearConfig,
    workspace: Sequence[torch.Tensor] = (),
) -> list[torch.Tensor]:
    out, to_save = grouped_linear_forward(GroupedLinearFwdArgs(x, weight, offs, config, tuple(workspace)))
    return [out, *to_save]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    x, weight, offs, config, *workspace = inputs
    ctx.workspace_grads = [[None] * len(buffers) for buffers in workspace]
    weight_dtype = x.dtype if weight is None else weight.dtype
    ctx.bwd_args = GroupedLinearBwdArgs(x_dtype=x.dtype, weight_dtype=weight_dtype, config=config)
    aliases = saved_aliases(LinearFwdArgs(x, weight, None, config, tuple(*workspace)))
    ctx.save_for_backward(offs, *output[1:], *aliases)
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, grads: list[Optional[torch.Tensor]]) -> tuple[Any, ...]:
    # A copy for this call: ctx keeps no tensor beside its own saved ones, and a second backward finds it as it was.
    args, (offs, *saved) = dataclasses.replace(ctx.bwd_args), ctx.saved_tensors
    of_x = 2 * args.config.weight_requires_grad  # data and scale
    args.offs, args.x_saved, args.weight_saved = offs, tuple(saved[:of_x]), tuple(saved[of_x:])
    dy = grads[0]
    assert dy is not None
    return *grouped_linear_backward(args, dy), None, None, *ctx.workspace_grads


@te_op(reference=_expansion, setup_context=_setup_context, backward=_backward, flops=linear_flops)
def grouped_linear(
    x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor, config: GroupedLinearConfig
) -> list[torch.Tensor]:
    """[out, *saved]: out[m, N] = x[m, K] @ weight[g, N, K]^T for the m of group g, in the config's formats.

    x and weight bf16, fp16 or fp32; offs int32 [G], ascending: the end of each group's rows.
    """
    out, saved = grouped_linear_forward_fake(to_tensor_proto(x), to_tensor_proto(weight), config)
    return [of_proto(out), *(buffer for proto in saved for buffer in proto.create_buffers())]


@te_op(reference=_expansion, setup_context=_setup_context, backward=_backward, flops=linear_flops)
def grouped_linear_with_workspace(
    x: torch.Tensor,
    weight: Optional[torch.Tensor],
    offs: torch.Tensor,
    config: GroupedLinearConfig,
    workspace: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """te.grouped_linear of weights that are quantized: `workspace` holds their buffers, in the order of config.weight_quantizer.

    weight: what gets the gradient. Its values are read by a backward of high precision alone; None where that needs none.
    """
    shape = config.stored_shape(workspace, offs.shape[0])
    proto = TensorProto(shape, x.dtype, device=x.device) if weight is None else to_tensor_proto(weight)
    out, saved = grouped_linear_forward_fake(to_tensor_proto(x), proto, config)
    if config.input_requires_grad and config.grad_output_quantizer is not None:
        saved.pop()  # the weight's, an alias
    return [of_proto(out), *(buffer for proto in saved for buffer in proto.create_buffers())]


expand_in_compiler(grouped_linear, _expansion)
expand_in_compiler(grouped_linear_with_workspace, _expansion)
