"""The products of quantized tensors, `te.gemm` and `te.grouped_gemm`, and what stands beside them in a linear: `te.add_bias`, `te.bias_grad`.

An operand is what `Quantizer.operand` gives, codes and scales, beside its quantizer, which has one usage: the rows of
[M, K], or the columns of [K, M]. No other argument speaks of the format.

    te.gemm             C                    of every format
    te.gemm_amax        C and its amax       with one scale a tensor
    te.gemm_gated       C and the amax of f(gate) * up
    te.grouped_gemm     C of each group of rows: a mixture's experts

Gemm, GatedGemm and GroupedGemm name the arguments of a call or of a node.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch.fx.node import Node, map_arg

from te_dynamo.dialect.define import te_op
from te_dynamo.dialect.fakes import column_sums, plain
from te_dynamo.kernels.gemm.choose import Choice
from te_dynamo.kernels.gemm.gated import check_gated
from te_dynamo.kernels.gemm.multiply import choice_of, multiply, multiply_gated, multiply_with_amax
from te_dynamo.kernels.gemm.reference import reference, reference_gated, reference_with_amax
from te_dynamo.kernels.gemm.request import Operand, Request, check
from te_dynamo.kernels.quantize.current import PARTIALS
from te_dynamo.kernels.tiles.stacking import Stacking
from te_dynamo.quantized.quantizers import Quantizer


class Gemm(NamedTuple):
    """The arguments of te.gemm; those of te.gemm_amax are the first ones."""

    a: Sequence[torch.Tensor]
    a_quantizer: Quantizer
    b: Sequence[torch.Tensor]
    b_quantizer: Quantizer
    out_dtype: torch.dtype
    fast_accum: bool
    bias: Optional[torch.Tensor] = None
    addend: Optional[torch.Tensor] = None
    along: str = ""
    segments: Optional[Sequence[int]] = None

    @classmethod
    def of(cls, node: Node) -> Any:
        """Those of a node, in which nodes stand for tensors."""
        return cls(*node.args)  # type: ignore[arg-type]

    @property
    def of_a_linear(self) -> bool:
        """Whether it is of one linear, and adds nothing but a bias."""
        return not self.along and self.addend is None

    def request(self) -> Request:
        return Request(
            _operand(self.a, self.a_quantizer),
            _operand(self.b, self.b_quantizer),
            self.out_dtype,
            self.fast_accum,
            None if self.bias is None else self.bias.contiguous(),  # a column of a matrix, or one value expanded
            self.addend,
            Stacking(self.along, tuple(self.segments or ())),
        )


class GroupedGemm(NamedTuple):
    """The arguments of te.grouped_gemm."""

    a: Sequence[torch.Tensor]
    a_quantizer: Quantizer
    b: Sequence[torch.Tensor]
    b_quantizer: Quantizer
    offs: torch.Tensor
    out_dtype: torch.dtype
    fast_accum: bool

    def request(self) -> Request:
        by_columns = self.a_quantizer.columnwise
        return Request(
            _operand(self.a, self.a_quantizer),
            _operand(self.b, self.b_quantizer),
            self.out_dtype,
            self.fast_accum,
            groups="columns" if by_columns else "rows",
            offs=self.offs.contiguous(),
            deep=self.b_quantizer.columnwise and not by_columns and self.b_quantizer.scaling() not in ("tensor", "row"),
        )


class GatedGemm(NamedTuple):
    """The arguments of te.gemm_gated."""

    a: Sequence[torch.Tensor]
    a_quantizer: Quantizer
    b: Sequence[torch.Tensor]
    b_quantizer: Quantizer
    fast_accum: bool
    gate: int
    kind: str

    def request(self) -> Request:
        halves = 2 * (self.b[0].shape[0] // 2,)
        return Gemm(*self[:4], torch.bfloat16, self.fast_accum, along="N", segments=halves).request()


def _operand(tensors: Sequence[torch.Tensor], quantizer: Quantizer) -> Operand:
    codes, scale_inv, *amax = tensors
    turned = quantizer.columnwise and not quantizer.transposes_columns()
    return Operand(codes, scale_inv, quantizer.scaling(), turned, *amax)


def values_of(node: Node) -> Any:
    """A product's arguments, nodes among them as the values in their meta."""
    return ARGUMENTS[node.target](*map_arg(node.args, lambda each: each.meta["val"]))


def request_of(node: Node) -> Request:
    """What a product's node asks for."""
    return values_of(node).request()


def choice_for(node: Node, epilogue: str = "none") -> Choice:
    """Which kernel and tile run a product's node, and whether they do the epilogue too."""
    return choice_of(request_of(node), epilogue)


def _runs(
    arguments: Callable[..., Any], kernel: Callable[..., Any] = multiply, plain: Callable[..., Any] = reference
) -> dict[str, Callable[..., Any]]:
    """How `te_op` runs an operation with those arguments."""
    return {
        "reference": lambda *args: plain(arguments(*args).request()),
        "kernel": lambda *args: kernel(arguments(*args).request()),
        "flops": _flops(arguments),
    }


def _flops(arguments: Callable[..., Any]) -> Callable[..., int]:
    """2 M N K. Where the padding of experts' tokens to whole blocks of scales is multiplied, it counts."""
    return lambda *args, out_val=None, **named: 2 * math.prod(arguments(*args, **named).request().mnk)


def _fake(request: Request) -> torch.Tensor:
    check(request)
    return plain(request.shape, request.out_dtype, request.a.codes)


@te_op(**_runs(Gemm))
def gemm(
    a: Sequence[torch.Tensor],
    a_quantizer: Quantizer,
    b: Sequence[torch.Tensor],
    b_quantizer: Quantizer,
    out_dtype: torch.dtype,
    fast_accum: bool,
    bias: Optional[torch.Tensor] = None,
    addend: Optional[torch.Tensor] = None,
    along: str = "",
    segments: Optional[Sequence[int]] = None,
) -> torch.Tensor:
    """[M, N] = a[M, K] @ b[N, K]^T by their scales (+ bias[N]), summed in fp32 and rounded once to out_dtype (, + addend[M, N]
    of that dtype, in fp32 and rounded again).

    fast_accum: of operands with one scale a tensor or a row; those with scales for parts of a row are always added up in fp32.
    along, segments: of operands stacked along "M" (a), "N" (b) or "K" (both), with a scale a segment. A bias then goes with "N" alone.
    """
    return _fake(Gemm(a, a_quantizer, b, b_quantizer, out_dtype, fast_accum, bias, addend, along, segments).request())


@te_op(**_runs(Gemm, multiply_with_amax, reference_with_amax))
def gemm_amax(
    a: Sequence[torch.Tensor],
    a_quantizer: Quantizer,
    b: Sequence[torch.Tensor],
    b_quantizer: Quantizer,
    out_dtype: torch.dtype,
    fast_accum: bool,
    bias: Optional[torch.Tensor] = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y = te.gemm of the same arguments, fp32 [PARTIALS] whose maximum is the amax of y)."""
    y = _fake(Gemm(a, a_quantizer, b, b_quantizer, out_dtype, fast_accum, bias).request())
    return y, plain((PARTIALS,), torch.float32, y)


def _gated(implementation: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: implementation(GatedGemm(*args).request(), *args[-2:])


@te_op(reference=_gated(reference_gated), kernel=_gated(multiply_gated), flops=_flops(GatedGemm))
def gemm_gated(
    a: Sequence[torch.Tensor],
    a_quantizer: Quantizer,
    b: Sequence[torch.Tensor],
    b_quantizer: Quantizer,
    fast_accum: bool,
    gate: int,
    kind: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, partial amaxes, fp32 [PARTIALS], of te.gated of y's halves): y = te.gemm stacked along "N" of two halves, in bf16.

    gate: which half is the gate's, 0 or 1; kind: as te.gated takes it.
    """
    request = GatedGemm(a, a_quantizer, b, b_quantizer, fast_accum, gate, kind).request()
    check_gated(request, gate, kind)
    y = _fake(request)
    return y, plain((PARTIALS,), torch.float32, y)


@te_op(**_runs(GroupedGemm))
def grouped_gemm(
    a: Sequence[torch.Tensor],
    a_quantizer: Quantizer,
    b: Sequence[torch.Tensor],
    b_quantizer: Quantizer,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:
    """te.gemm by groups: group g is offs[g - 1] <= m < offs[g], offs int32 [G], ascending.

    Rows of a: [M, N], row m of group g a[m, K] @ b[g]^T, of b [G, N, K] as its quantizer holds it; zero behind the last group.
    Columns of a: [G, N, K], a_g^T @ b_g of a [M, N] and b [M, K], held as `quantize_groups` holds them; zero for an empty group.
    """
    return _fake(GroupedGemm(a, a_quantizer, b, b_quantizer, offs, out_dtype, fast_accum).request())


ARGUMENTS: dict[Any, Callable[..., Any]] = {
    gemm: Gemm,
    gemm_amax: Gemm,
    gemm_gated: GatedGemm,
    grouped_gemm: GroupedGemm,
}


def _add_bias(x: torch.Tensor, bias: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    return (x.to(torch.float32) + bias.to(torch.float32)).to(out_dtype)


@te_op(reference=_add_bias)
def add_bias(x: torch.Tensor, bias: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """x[M, N] (fp32) + bias[N] in fp32, rounded to out_dtype."""
    return plain(tuple(x.shape), out_dtype, x)


def _bias_grad(dy: torch.Tensor) -> torch.Tensor:
    return dy.reshape(-1, dy.shape[-1]).sum(0, dtype=torch.float32)


@te_op(reference=_bias_grad)
def bias_grad(dy: torch.Tensor) -> torch.Tensor:
    """Column sums [N] of dy read as [M, N], in fp32."""
    return column_sums(dy)
