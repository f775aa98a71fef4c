"""GroupedLinear: the linears of G experts on one tensor of tokens that is sorted by expert."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Optional

import torch

from te_dynamo.dialect.grouped_linear import (
    GroupedLinearBwdArgs,
    GroupedLinearConfig,
    GroupedLinearFwdArgs,
    grouped_backward_products,
    grouped_linear_backward,
    grouped_linear_forward,
    grouped_linear_forward_fake,
    grouped_mm,
)
from te_dynamo.errors import InputError, InvalidOptionError
from te_dynamo.operations import types
from te_dynamo.operations.checks import check_settings
from te_dynamo.operations.context import OperationContext, RequiresGrad
from te_dynamo.operations.op import BasicOperation, Parameter
from te_dynamo.operations.saves import FuserSavesAll
from te_dynamo.quantized.tensor_proto import TensorProto, buffer_protos
from te_dynamo.recipe import Recipe


class GroupedLinear(FuserSavesAll, BasicOperation):
    """y[m, N] = x[m, K] @ weight[g, N, K]^T for the rows m of group g: offs[g - 1] <= m < offs[g].

    Extra input: offs, int32 [G], ascending, the end of each group's rows; it has no gradient and is read on the device alone.
    Groups may be empty. Rows of y and dx behind the last group are zero.

    recipe: None takes that of the Sequential. Grouped GEMMs are there for current scaling, block scaling and MXFP8 with a quantized
    backward, as in te.grouped_linear; in any other recipe, and without one, it is torch.nn.functional.grouped_mm in the precision of x.

    Saves offs and what te.grouped_linear saves: the columnwise x if the weight needs a gradient, the columnwise weight if x does;
    in high precision x and the weight themselves.

    Raises InvalidOptionError for sizes that the recipe's GEMMs cannot take, InputError for other shapes of x or another offs, and in
    high precision for rows of x or y that are no multiple of 16 bytes, which grouped_mm wants.
    """

    num_extra_inputs = 1

    num_groups: int
    in_features: int
    out_features: int
    recipe: Optional[Recipe] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self, "num_groups", "in_features", "out_features")
        recipe = self._grouped_recipe()
        if recipe is None:
            return
        if self.in_features % recipe.alignment or self.out_features % recipe.alignment:
            raise InvalidOptionError(f"{self._name()}: {recipe.gemms} need multiples of {recipe.alignment}")
        if self.out_features % (multiple := recipe.weight_quantizer().experts_begin_at()):
            raise InvalidOptionError(
                f"{self._name()}: {recipe.gemms} of experts need out_features to be a multiple of {multiple}"
            )

    def _name(self) -> str:
        return f"GroupedLinear({self.num_groups}, {self.in_features}, {self.out_features})"

    def parameters(self) -> tuple[Parameter, ...]:
        bound = 1 / math.sqrt(self.in_features)  # of each expert what torch.nn.Linear has
        shape = (self.num_groups, self.out_features, self.in_features)
        return (Parameter("weight", shape, lambda w: torch.nn.init.uniform_(w, -bound, bound)),)

    def with_recipe(self, recipe: Optional[Recipe]) -> BasicOperation:
        if self.recipe is not None or recipe is None:
            return self
        return dataclasses.replace(self, recipe=recipe)  # type: ignore[type-var]

    def _grouped_recipe(self) -> Optional[Recipe]:
        """The recipe, if there are grouped GEMMs for it."""
        return None if self.recipe is None or self.recipe.no_groups_reason() else self.recipe

    def config(self, requires_grad: RequiresGrad) -> Optional[GroupedLinearConfig]:
        """How te.grouped_linear's helpers run it; None in high precision."""
        recipe = self._grouped_recipe()
        if recipe is None:
            return None
        return GroupedLinearConfig.from_recipe(
            recipe, input_requires_grad=requires_grad.input, weight_requires_grad=requires_grad.params[0]
        )

    def fuser_forward_compute(
        self,
        input: torch.Tensor,
        params: Sequence[types.Params],
        extra_inputs: Sequence[types.Params],
        *,
        requires_grad: Sequence[RequiresGrad],
        **_: Any,
    ) -> types.FuserForward:
        ((weight,),), ((offs,),), (needs,) = params, extra_inputs, requires_grad
        self._check(input, offs)
        config = self.config(needs)
        if config is None:
            by_columns = weight.to(input.dtype).contiguous().transpose(1, 2)
            return grouped_mm(input, by_columns, offs), [()], [_unquantized(input, weight, offs, needs)]
        output, saved = grouped_linear_forward(GroupedLinearFwdArgs(input, weight, offs, config))
        return output, [()], [[offs, *saved] if saved else []]

    def fuser_forward_fake(
        self,
        input: TensorProto,
        params: Sequence[types.Protos],
        extra_inputs: Sequence[types.Protos],
        *,
        requires_grad: Sequence[RequiresGrad],
        **_: Any,
    ) -> types.FuserFake:
        ((weight,),), ((offs,),), (needs,) = params, extra_inputs, requires_grad
        self._check(input, offs)
        config = self.config(needs)
        if config is None:
            output = TensorProto((input.shape[0], self.out_features), input.dtype, device=input.device)
            return output, [()], [_unquantized(input, weight, offs, needs)]
        output, protos = grouped_linear_forward_fake(input, weight, config)
        saved = [buffer for proto in protos for buffer in buffer_protos(proto)]
        return output, [()], [[offs, *saved] if saved else []]

    def fuser_backward(
        self, ctxs: Sequence[OperationContext], grad_output: torch.Tensor, grad_extra_outputs: Any
    ) -> types.FuserBackward:
        (ctx,) = ctxs
        if not ctx.saved_tensors:
            return None, [(None,)], [(None,)]
        args = self.backward_args(ctx)
        assert args.offs is not None and args.weight_dtype is not None
        if args.config is None:
            of_x, of_weight = args.x_saved, args.weight_saved
            dx, dweight = _unquantized_backward(of_x, of_weight, grad_output, args.offs, args.weight_dtype)
        else:
            dx, dweight = grouped_linear_backward(args, grad_output)
        return dx, [(dweight,)], [(None,)]

    def products(self, ctx: OperationContext, dy_buffers: list[torch.Tensor]) -> types.Backward:
        """(dx, (dweight,)) of a dy that is quantized, as both of its products need it."""
        dx, dweight = grouped_backward_products(self.backward_args(ctx), dy_buffers)
        return dx, (dweight,)

    def backward_args(self, ctx: OperationContext) -> GroupedLinearBwdArgs:
        """What te.grouped_linear's helpers need of a context with saved tensors; without a config in high precision."""
        offs, *saved = ctx.saved_tensors
        needs = ctx.requires_grad
        count = len(saved) // (needs.input + needs.params[0]) * needs.params[0]
        of_x: Any = tuple(saved[:count])
        of_weight: Any = tuple(saved[count:])
        return GroupedLinearBwdArgs(of_x, of_weight, offs, ctx.input.dtype, ctx.params[0].dtype, self.config(needs))

    def _check(self, x: Any, offs: Any) -> None:
        """InputError, saying what is wrong, for tensors or protos that it cannot take."""
        if len(x.shape) != 2 or x.shape[1] != self.in_features:
            raise InputError(f"{self._name()}: expected x [M, {self.in_features}], got {list(x.shape)}")
        if offs.dtype != torch.int32 or tuple(offs.shape) != (self.num_groups,):
            raise InputError(
                f"{self._name()}: expected the ends of the groups, int32 [{self.num_groups}], as extra input, got {offs.dtype} "
                f"{list(offs.shape)}; sizes.cumsum(0, dtype=torch.int32) makes them of the groups' sizes"
            )
        if self._grouped_recipe() is None and any(
            n * x.dtype.itemsize % 16 for n in (self.in_features, self.out_features)
        ):
            raise InputError(
                f"{self._name()}: torch's grouped_mm needs rows of a multiple of 16 bytes; make in_features and out_features "
                f"multiples of {16 // x.dtype.itemsize} for {x.dtype}"
            )


def _unquantized(x: Any, weight: Any, offs: Any, needs: RequiresGrad) -> list[Any]:
    """What the products of backward read in high precision: the groups, x if wgrad is needed, the weight if dgrad is."""
    operands = [x] * needs.params[0] + [weight] * needs.input
    return [offs, *operands] if operands else []


def _unquantized_backward(
    x: tuple[torch.Tensor, ...],
    weight: tuple[torch.Tensor, ...],
    dy: torch.Tensor,
    offs: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[Optional[torch.Tensor], Optional[torch.Tensor]]:
    """(dx, dweight) in dy's precision, of those operands that were saved; dtype: of the weight."""
    dx = dweight = None
    dy = dy.contiguous()
    if weight:
        dx = grouped_mm(dy, weight[0].to(dy.dtype).contiguous(), offs)
    if x:
        dweight = torch.nn.functional.grouped_mm(dy.t(), x[0].contiguous(), offs=offs).to(dtype)
    return dx, dweight
