"""What a product is asked for: two quantized operands of any format, groups or segments of them, and what else its launch does.

    C[M, N]    = A[M, K] @ B[N, K]^T (+ bias[N]), rounded once (, + addend[M, N], rounded again)
    groups "rows"       C[M, N], rows m of group g by B[g]: a mixture's experts, of which `offs` has the ends
    groups "columns"    C[G, M, N], over the k of each group

`check` raises ValueError for what no GEMM takes. reference.py computes a request in plain PyTorch, multiply.py on a GPU.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import torch
from torch.fx.experimental.symbolic_shapes import guard_or_true

from te_dynamo.kernels.layouts import block, mxfp8
from te_dynamo.kernels.layouts.form import Scaling
from te_dynamo.kernels.tiles.stacking import NOT_STACKED, Stacking, check_segments

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_WITH_GROUPS = ("tensor", "row", "1x128", "1x32")
OUT = (torch.bfloat16, torch.float16, torch.float32)


@dataclasses.dataclass(frozen=True, slots=True)
class Operand:
    """One side of a product, as kernels read it.

    codes:     [rows, K] (of experts with scales of tensors or rows [G, N, K]), float8; of "1x16" two e2m1 a byte, [rows, K/2]; turned: [K, rows].
    scale_inv: of "tensor" fp32 [1], or one of each segment or expert; of "row" fp32 [rows], with groups [G, rows]; of blocks as kernels/layouts has them, in fp32 or E8M0 codes.
    scaling:   what has one scale. amax: of "1x16" the tensor's, fp32 [1].
    """

    codes: torch.Tensor
    scale_inv: torch.Tensor
    scaling: Scaling = "tensor"
    turned: bool = False
    amax: torch.Tensor | None = None

    @property
    def size(self) -> tuple[Any, Any]:
        """(rows, K) of the values."""
        *leading, last = self.codes.shape
        rows, k = (last, math.prod(leading)) if self.turned else (math.prod(leading), last)
        return rows, 2 * k if self.scaling == "1x16" else k

    def facts(self) -> tuple[Any, ...]:
        x, s = self.codes, self.scale_inv
        form = self.scaling, self.turned, x.device
        return x.shape, x.dtype, x.is_contiguous(), s.shape, s.dtype, s.is_contiguous(), form


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """fast: accumulation of "tensor" and "row" (product.py); the others always add up in fp32.

    stacking: of operands that are several tensors, with a scale each. offs: int32 [G], the end of each group.
    deep: B's groups of "rows" lie one beside the other along K, not one below the other.
    """

    a: Operand
    b: Operand
    out_dtype: torch.dtype
    fast: bool = False
    bias: torch.Tensor | None = None
    addend: torch.Tensor | None = None
    stacking: Stacking = NOT_STACKED
    groups: Literal["", "rows", "columns"] = ""
    offs: torch.Tensor | None = None
    deep: bool = False

    @property
    def count(self) -> int:
        """Groups; 1 without."""
        return 1 if self.offs is None else self.offs.shape[0]

    @property
    def mnk(self) -> tuple[Any, Any, Any]:
        (m, k), n = self.a.size, self.b.size[0]
        return m, n // self.count if self.groups == "rows" and not self.deep else n, k

    @property
    def scaling(self) -> str:
        """What has one scale in A and in B, as kernels are told: "tensor", "row", "1x128 128x128"."""
        return self.a.scaling if self.a.scaling in ("tensor", "row") else f"{self.a.scaling} {self.b.scaling}"

    @property
    def borders(self) -> Stacking:
        """The stacking as kernels know it. Between scales of rows there is no border: those of a stack are one longer vector."""
        return NOT_STACKED if self.scaling == "row" else self.stacking

    @property
    def shape(self) -> tuple[Any, ...]:
        """C's."""
        m, n, _ = self.mnk
        return (self.count, m, n) if self.groups == "columns" else (m, n)

    def facts(self) -> tuple[Any, ...]:
        """All that `check` and the choice of a kernel read: of equal ones both give the same answer."""
        others = [x if x is None else (x.shape, x.dtype) for x in (self.bias, self.addend, self.offs)]
        how = self.out_dtype, self.fast, self.stacking, self.groups, self.deep
        return self.a.facts(), self.b.facts(), how, *others

    def empty(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.out_dtype, device=self.a.codes.device)


def sum_of_nothing(c: torch.Tensor, bias: torch.Tensor | None, addend: torch.Tensor | None) -> torch.Tensor:
    """Writes C for a K of 0: of a weight's gradient where an expert got no tokens."""
    nothing = torch.zeros_like(c) if bias is None else bias.to(c.dtype).expand_as(c)
    return c.copy_(nothing if addend is None else nothing + addend)


def check(r: Request) -> None:
    """Raises ValueError, saying what is wrong, for a request that no GEMM takes. No symbolic size is guarded on."""
    name = "te grouped gemm" if r.groups else "te gemm"
    _check_dtypes(r, name)
    _check_shapes(r, name)
    if r.stacking != NOT_STACKED:
        _check_stacking(r)
    for side, operand in (("a", r.a), ("b", r.b)):
        _check_scales(r, name, side, operand)


def _check_dtypes(r: Request, name: str) -> None:
    a, b = r.a.codes, r.b.codes
    if r.out_dtype not in OUT:
        raise ValueError(f"{name}: out_dtype must be bfloat16, float16 or float32, got {r.out_dtype}")
    if r.a.scaling == "1x16":
        if any(x.dtype != torch.uint8 for x in (a, r.a.scale_inv, b, r.b.scale_inv)):
            raise ValueError(f"{name}: NVFP4 data and scales are uint8 tensors, as quantize_nvfp4 returns them")
    elif a.dtype not in FP8 or b.dtype not in FP8:
        raise ValueError(f"{name}: operands must be float8_e4m3fn or float8_e5m2, got {a.dtype} and {b.dtype}")
    if a.dtype == b.dtype == torch.float8_e5m2:
        raise ValueError(f"{name}: e5m2 x e5m2 is not supported; hold one operand in e4m3")
    if not (a.is_contiguous() and b.is_contiguous()):
        raise ValueError(f"{name}: both operands must be contiguous; use the columnwise buffer for a transposed one")
    if r.offs is not None:
        groups = b.shape[0] if b.dim() == 3 else "G"
        if r.offs.dtype != torch.int32 or r.offs.dim() != 1 or r.offs.shape[0] == 0 or groups not in ("G", r.count):
            raise ValueError(
                f"{name}: expected offs int32 [{groups}], the end of each group, got {r.offs.dtype} {tuple(r.offs.shape)}"
            )


def _check_shapes(r: Request, name: str) -> None:
    a, b, experts = r.a.codes, r.b.codes, r.groups == "rows"
    if r.groups and r.a.scaling not in _WITH_GROUPS:
        raise ValueError(
            f"{name}: expected a scaling of {', '.join(_WITH_GROUPS)}, got {r.scaling}: no kernel multiplies groups of it"
        )
    tensors = experts and r.a.scaling in ("tensor", "row")
    goes = a.dim() == 2 and b.dim() == (3 if tensors else 2)
    if goes and tensors:
        goes = a.shape[1] == b.shape[2]
    elif goes and experts:
        rows, k = r.b.size
        grouped, k = (k, k // r.count) if r.deep else (rows, k)
        goes = r.a.size[1] == k and grouped % (r.count * _block(r)) == 0
    elif goes:
        # dy has sizes of its own where data counts the tokens: torch knows that they are x's, and not that they stay so once padded.
        goes = guard_or_true(r.a.size[1] == r.b.size[1])
    if not goes:
        groups = f" of {r.count} groups" if r.groups else ""
        raise ValueError(f"{name}: expected {_wanted(r)}, got {tuple(a.shape)} and {tuple(b.shape)}{groups}")
    k = r.a.size[1]
    if r.a.scaling not in ("1x32", "1x16") and isinstance(k, int) and k % 16:
        raise ValueError(f"{name}: K must be a multiple of 16, got {k}")
    n = r.mnk[1]
    if r.bias is not None and (r.bias.dim() != 1 or r.bias.shape[0] != n):
        raise ValueError(f"{name}: expected bias [{n}], got {tuple(r.bias.shape)}")
    if r.addend is not None and (tuple(r.addend.shape) != r.shape or r.addend.dtype != r.out_dtype):
        raise ValueError(
            f"{name}: expected addend {r.shape} of {r.out_dtype}, got {tuple(r.addend.shape)} of {r.addend.dtype}"
        )


def _wanted(r: Request) -> str:
    """The shapes that a request's operands should have, for an error."""
    half = "/2" if r.a.scaling == "1x16" else ""
    a = "a [K, M]" if r.a.turned else f"a [M, K{half}]"
    if r.groups != "rows":
        return f"{a} and b [K, N]" if r.b.turned else f"{a} and b [N, K{half}]"
    if r.a.scaling in ("tensor", "row"):
        return f"{a} and b [G, N, K]"
    along = "[N, G K], K" if r.deep else "[G N, K], N"
    return f"{a} and b {along} a multiple of {_block(r)}"


def _block(r: Request) -> int:
    return mxfp8.BLOCK if r.a.scaling == "1x32" else block.BLOCK


def _check_scales(r: Request, name: str, side: str, operand: Operand) -> None:
    scale_inv = operand.scale_inv
    if operand.scaling == "tensor":
        count = r.count if r.groups == "rows" and side == "b" else 1
        if r.stacking.along in ("M" if side == "a" else "N", "K"):
            count = len(r.stacking.segments)
        if scale_inv.numel() != count:
            raise ValueError(f"{name}: expected {side}_scale_inv [{count}], got {tuple(scale_inv.shape)}")
        return
    if operand.scaling == "row":
        shape = tuple(operand.codes.shape[:-1]) if r.groups != "columns" else (r.count, operand.codes.shape[0])
        known = all(isinstance(size, int) for size in shape)
        if scale_inv.dtype != torch.float32 or (known and tuple(scale_inv.shape) != shape):
            raise ValueError(
                f"{name}: expected {side}_scale_inv fp32 {list(shape)}, got {scale_inv.dtype} {tuple(scale_inv.shape)}"
            )
    if operand.scaling not in ("1x128", "128x128"):
        return
    if r.a.scaling == r.b.scaling == "128x128":
        raise ValueError(
            f"{name}: 128x128 x 128x128 blocks are not supported, for a {tuple(r.a.codes.shape)} and b "
            f"{tuple(r.b.codes.shape)}; quantize one operand in blocks of 1x128"
        )
    if r.a.scale_inv.dtype != r.b.scale_inv.dtype or scale_inv.dtype not in (torch.float32, torch.uint8):
        raise ValueError(
            f"{name}: scales must both be float32 or both be uint8 (E8M0), got {r.a.scale_inv.dtype} and {r.b.scale_inv.dtype}"
        )
    codes, two_d = scale_inv.dtype == torch.uint8, operand.scaling == "128x128"
    if codes and two_d:
        raise ValueError(f"{name}: {side} has E8M0 scales, which are 1D, and is in blocks of 128x128")
    if not scale_inv.is_contiguous():
        raise ValueError(f"{name}: {side}_scale_inv must be contiguous")
    rows, k = operand.codes.shape
    if not (isinstance(rows, int) and isinstance(k, int)):
        return  # a guard on a symbolic size would specialize the graph
    expected = mxfp8.scale_shape(rows, k) if codes else block.scale_shape(rows, k, two_d)
    if tuple(scale_inv.shape) != expected:
        kind = "E8M0" if codes else operand.scaling
        raise ValueError(
            f"{name}: expected {side}_scale_inv {list(expected)} for {side} {list(operand.codes.shape)} in {kind} blocks, "
            f"got {list(scale_inv.shape)}"
        )


def _check_stacking(r: Request) -> None:
    along, segments = r.stacking.along, r.stacking.segments
    check_segments(segments)
    if r.scaling != "tensor" and (r.scaling != "row" or along == "K"):
        along_k = " along K" if r.scaling == "row" else ""
        raise ValueError(f"te gemm: operands with scales {r.scaling} do not stack{along_k}; with one a tensor they do")
    if along not in ("M", "N", "K"):
        raise ValueError(f"te gemm: expected a stacked dimension M, N or K, got {along!r}")
    if r.bias is not None and along != "N":
        raise ValueError(f"te gemm: expected no bias of operands stacked along {along}")
    length = dict(zip("MNK", r.mnk, strict=True))[along]
    if sum(segments) != length:
        raise ValueError(f"te gemm: segments {segments} must sum to {along} = {length}")
