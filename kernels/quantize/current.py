"""x -> float8 with one scale a tensor, rowwise, transposed or both (equations: kernels/tiles/fp8.py, buffers: kernels/layouts/tensor.py).

    quantize              a tensor [M, K], in two launches, or in one of few values, where each program reads all of them for the amax
    quantize_bias_grad    the same, and the sums of its columns, which the launch of the amax adds up
    quantize_grouped      each group of [G, M, K], in its own scale
    quantize_stacked      two or three tensors in the buffers of one, each in its own scale: by rows [M_i, K] as [sum of M_i, K],
                          by columns [M, K_i] as [M, sum of K_i]. te.gemm of a stack reads this

Each has its function in plain PyTorch, equal bit for bit (sums aside): that of a tensor, and it for every group and every part of a stack.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import guard_or_false

from te_dynamo.kernels.layouts.sizes import Size, allocate, round_up, rows_and_columns, transposed
from te_dynamo.kernels.layouts.tensor import GroupedForm, TensorForm
from te_dynamo.kernels.quantize.current_kernels import (
    quantize_amax_kernel,
    quantize_amaxes_kernel,
    quantize_cast_kernel,
    quantize_few_kernel,
    quantize_stacked_kernel,
)
from te_dynamo.kernels.runtime._triton import triton
from te_dynamo.kernels.runtime.dependent_launch import starts_early
from te_dynamo.kernels.runtime.launch import launch, size_hint
from te_dynamo.kernels.tiles.fp8 import program_count, zero_padded
from te_dynamo.kernels.tiles.one_pass import partials_to_find, passes
from te_dynamo.kernels.tiles.stacking import MOST_SEGMENTS, check_segments

PARTIALS = 512
"""Programs of an amax launch, so also partial amaxes: a power of two, four a multiprocessor of the H200."""

GROUP_PARTIALS = 64
"""Those of each group: a power of two."""

Tile = tuple[int, int, int]
"""(rows, columns, warps)"""

FEW_VALUES = 16384
"""At most so many are quantized in one launch: a program reads them in less time than a launch takes (twice as many it does not)."""

_FEW_BLOCK = 8192

MOST_TENSORS = 8
"""Of one launch of amaxes: each is an argument of the kernel, because a graph cannot know addresses."""

CAST_TILE: Tile = (128, 128, 8)
"""Tile of `quantize`'s cast launch: the fastest of nine on an H200 at 14336x4096 (benchmarks/quantize.py --sweep)."""


# --- reference ----------------------------------------------------------------------------------------------


def scale_reference(
    amax: torch.Tensor,
    fp8_dtype: torch.dtype,
    power_of_two: bool,
    eps: float,
    largest: float = torch.finfo(torch.float32).max,
) -> torch.Tensor:
    """The scale rule of kernels/tiles/fp8.py for fp32 amaxes; an infinite quotient becomes `largest`."""
    amax = torch.where(amax < eps, torch.full_like(amax, eps), amax)
    scale = torch.full_like(amax, torch.finfo(fp8_dtype).max) / amax
    scale = torch.where(scale == torch.inf, torch.full_like(scale, largest), scale)
    scale = torch.where((amax > 0) & (amax < torch.inf), scale, torch.ones_like(scale))
    return (scale.view(torch.int32) & 0x7F800000).view(torch.float32) if power_of_two else scale


def cast_reference(value: torch.Tensor, fp8_dtype: torch.dtype) -> torch.Tensor:
    """fp32 values in float8: saturating, and one NaN, as the hardware casts them. (A CPU would keep a NaN's sign.)"""
    fmax = torch.finfo(fp8_dtype).max
    return value.clamp(-fmax, fmax).masked_fill(value.isnan(), torch.nan).to(fp8_dtype)


def quantize_reference(x: torch.Tensor, form: TensorForm, amax: torch.Tensor | None = None) -> list[torch.Tensor]:
    """`quantize` in plain PyTorch, on any device; `amax` may be partial ones, as there."""
    rows, columns = rows_and_columns(x.shape)
    if amax is None:
        low, high = torch.aminmax(x) if x.numel() else (x.new_zeros(()), x.new_zeros(()))
        amax = torch.maximum(high, -low)
    amax = amax.max().abs().to(torch.float32).reshape(1)
    scale = scale_reference(amax, form.dtype, form.power_of_two, form.eps)
    data = cast_reference(x.reshape(rows, columns).to(torch.float32) * scale, form.dtype)
    buffers = [data] if form.rowwise else []
    if form.columnwise:
        buffers.append(zero_padded(data.t(), *transposed(rows, columns)))
    return [*buffers, 1.0 / scale]


def amax_by_rows(x: torch.Tensor) -> torch.Tensor:
    """max|x| in fp32, shape [1], in aten operations; NaN propagates, no rows give 0.

    Of what Inductor itself writes (the residual gradient after a norm's backward, say): the row maxima fuse with the kernel that writes it,
    and one pass over memory is saved. Any other tensor is read by the amax kernel.
    """
    if guard_or_false(x.numel() == 0):
        return torch.zeros(1, dtype=torch.float32, device=x.device)
    return x.abs().amax(-1).amax().to(torch.float32).reshape(1)


def partial_amaxes_of_reference(xs: Sequence[torch.Tensor]) -> torch.Tensor:
    """`partial_amaxes_of` in plain PyTorch, on any device: each row is full of its tensor's amax."""
    amaxes = [x.abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32) for x in xs]
    return torch.stack(amaxes).reshape(-1, 1).repeat(1, PARTIALS)


def quantize_bias_grad_reference(dy: torch.Tensor, form: TensorForm) -> list[torch.Tensor]:
    """`quantize_bias_grad` in plain PyTorch."""
    return [dy.reshape(-1, dy.shape[-1]).sum(0, dtype=torch.float32), *quantize_reference(dy, form)]


def quantize_grouped_reference(x: torch.Tensor, form: GroupedForm) -> list[torch.Tensor]:
    """`quantize_grouped` in plain PyTorch, on any device."""
    _check_groups(x)
    *buffers, scale_inv = zip(*(quantize_reference(group, form) for group in x), strict=True)
    return [*(concatenated(buffer, 0).unflatten(0, (len(x), -1)) for buffer in buffers), torch.cat(scale_inv)]


def quantize_stacked_reference(
    xs: Sequence[torch.Tensor],
    form: TensorForm,
    by_columns: bool,
    amaxes: Sequence[torch.Tensor | None] | None = None,
) -> list[torch.Tensor]:
    """`quantize_stacked` in plain PyTorch, on any device."""
    stacked_size(xs, by_columns)
    each = [quantize_reference(x, form, amax) for x, amax in zip(xs, amaxes or [None] * len(xs), strict=True)]
    dims = [int(by_columns)] * form.rowwise + [int(not by_columns)] * form.columnwise + [0]
    return [concatenated(parts, dim) for dim, parts in zip(dims, zip(*each, strict=True), strict=True)]


def concatenated(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """float8 travels as integers: torch concatenates none on every device."""
    if parts[0].element_size() > 1:
        return torch.cat(list(parts), dim)
    return torch.cat([part.view(torch.uint8) for part in parts], dim).view(parts[0].dtype)


def _check_groups(x: torch.Tensor) -> None:
    if x.dim() != 3 or 0 in x.shape:
        raise ValueError(f"te quantize by groups: expected x [G, N, K], none of them 0, got {tuple(x.shape)}")


def stacked_size(xs: Sequence[torch.Tensor], by_columns: bool) -> tuple[Size, Size]:
    """(M, K) of the stack. Raises ValueError unless the tensors fit and their stacked sides are what kernels take."""
    sizes = [rows_and_columns(x.shape) for x in xs]
    check_segments(tuple(size[by_columns] for size in sizes))
    if any(size[not by_columns] != sizes[0][not by_columns] for size in sizes) or len({x.dtype for x in xs}) > 1:
        what = "rows" if by_columns else "columns"
        found = ", ".join(f"{x.dtype} {tuple(x.shape)}" for x in xs)
        raise ValueError(f"te quantize_stacked: expected tensors of one dtype with equally many {what}, got {found}")
    total = sum(size[by_columns] for size in sizes)
    return (sizes[0][0], total) if by_columns else (total, sizes[0][1])


# --- launchers ----------------------------------------------------------------------------------------------


def quantize(
    x: torch.Tensor,
    form: TensorForm,
    amax: torch.Tensor | None = None,
    tile: Tile | None = None,
    hint: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """[data?, transpose?, scale_inv] of x, of any rank >= 1, read as [M, K].

    Past M the transpose is zero. amax (fp32 [1], or a power of two of partial ones), where the caller knows it, saves a launch and a read of x. `tile`
    overrides the cast's. hint: of the scale, to read x once (one_pass.py).
    """
    x = x.contiguous()
    if hint is not None:
        return _cast(x, None, rows_and_columns(x.shape), form, tile, hint)
    if amax is None and in_one_launch(x, form.columnwise):
        return _quantize_few(x, form)
    return _cast(x, partial_amaxes(x) if amax is None else amax, rows_and_columns(x.shape), form, tile)


def quantize_bias_grad(dy: torch.Tensor, form: TensorForm, tile: Tile | None = None) -> list[torch.Tensor]:
    """[dbias, data?, transpose?, scale_inv] of dy, of any rank >= 1, read as [M, K]: dbias[k] = sum over m of dy[m, k], fp32.

    Each program of the amax walks down a stripe of columns with one sum a thread and element in registers, and reduces them once,
    at its end.
    """
    dy = dy.contiguous()
    rows, columns = rows_and_columns(dy.shape)
    block_m, block_k, parts = stripes(columns)
    sums = torch.empty((parts, columns), dtype=torch.float32, device=dy.device)
    partials = _amaxes(dy, (rows, columns), (block_m, block_k, 8), sums)
    return [sums.sum(0), *_cast(dy, partials, (rows, columns), form, tile)]


def quantize_grouped(x: torch.Tensor, form: GroupedForm) -> list[torch.Tensor]:
    """[data?, transpose?, scale_inv] of x [G, N, K], bf16, fp16 or fp32, of fixed shape, on a CUDA device.

    Past N the transposes are zero. Raises ValueError for a tensor that is not three-dimensional or is empty.
    """
    _check_groups(x)
    x = x.contiguous()
    partials = _amaxes(x, x.shape, amax_tile(x.shape[-1]))
    return _cast(x, partials, x.shape, form)


def quantize_stacked(
    xs: Sequence[torch.Tensor],
    form: TensorForm,
    by_columns: bool,
    amaxes: Sequence[torch.Tensor | None] | None = None,
    hint: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """[data?, transpose?, scale_inv] of the stack of xs, each of any rank >= 1 and read as a matrix.

    The buffers are those of the stack's M and K, and scale_inv has one scale a tensor. The stacked sides are two or three multiples of 128. amaxes: of each x whose amax is known already, fp32 [1] or PARTIALS partial ones.
    hint: int64 [len(xs), 2], of each scale, to read xs once.
    Raises ValueError for tensors that do not stack.
    """
    shape = stacked_size(xs, by_columns)
    xs = [x.contiguous() for x in xs]
    sizes = [rows_and_columns(x.shape) for x in xs]
    tile = cast_tile(*shape, form.columnwise)
    programs = max(program_count(*size, *tile[:2], xs[0].device) for size in sizes)
    if hint is None:
        partials, most = _with_all_amaxes(xs, amaxes or [None] * len(xs)), PARTIALS
    else:
        found = partials_to_find(programs, xs[0].device, len(xs))
        partials, most = [found] * len(xs), found.shape[1]
    arguments = {
        **_numbered("x", xs, xs[0]),
        **_numbered("partials", partials, partials[0]),
        **_numbered("COUNT_", [p.shape[-1] for p in partials], 1),
        **_numbered("SIDE_", [size[by_columns] for size in sizes], 0),
        "other": sizes[0][not by_columns],
        "BY_COLUMNS": by_columns,
        "PARTIALS": most,
    }
    return _launch_cast(
        quantize_stacked_kernel, (programs, len(xs)), xs[0], shape, len(xs), form, tile, arguments, hint
    )


def _with_all_amaxes(xs: Sequence[torch.Tensor], amaxes: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """The amaxes, those that are not known found in one launch."""
    unknown = [x for x, amax in zip(xs, amaxes, strict=True) if amax is None]
    found = iter(partial_amaxes_of(unknown) if unknown else ())
    return [next(found) if amax is None else amax for amax in amaxes]


def _numbered(name: str, values: Sequence[Any], unused: Any, most: int = MOST_SEGMENTS) -> dict[str, Any]:
    """The kernel's arguments of that name, one for each tensor that there may be."""
    return {f"{name}{i}": values[i] if i < len(values) else unused for i in range(most)}


def partial_amaxes_of(xs: Sequence[torch.Tensor]) -> torch.Tensor:
    """fp32 [len(xs), PARTIALS] in one launch: a row's maximum is the amax of its tensor, the bits of `partial_amaxes`.

    Contiguous tensors of one dtype, MOST_TENSORS or fewer. A launch takes the CPU longer than one of few bytes takes the GPU.
    """
    assert 0 < len(xs) <= MOST_TENSORS
    partials = torch.empty(len(xs), PARTIALS, dtype=torch.float32, device=xs[0].device)
    launch(
        quantize_amaxes_kernel,
        (PARTIALS, len(xs)),
        **_numbered("x", xs, xs[0], MOST_TENSORS),
        partials=partials,
        **_numbered("SIZE_", [x.numel() for x in xs], xs[0].numel(), MOST_TENSORS),
        BLOCK=4096,
        num_warps=8,
    )
    return partials


def partial_amaxes(x: torch.Tensor) -> torch.Tensor:
    """fp32 [PARTIALS], whose maximum is the amax of a contiguous x."""
    return _amaxes(x, rows_and_columns(x.shape), amax_tile(x.shape[-1]))


def _amaxes(x: torch.Tensor, shape: Sequence[Size], tile: Tile, sums: torch.Tensor | None = None) -> torch.Tensor:
    """Partial amaxes of x of the shape [M, K], all of its programs', or [G, M, K], [G, GROUP_PARTIALS]; sums: as the kernel's."""
    *groups, rows, columns = shape
    partials = torch.empty([*groups, GROUP_PARTIALS if groups else PARTIALS], dtype=torch.float32, device=x.device)
    block_m, block_k, warps = tile
    launch(
        quantize_amax_kernel,
        (partials.numel(),),
        x=x,
        partials=partials,
        sums=x if sums is None else sums,
        M=rows,
        K=columns,
        GROUP=GROUP_PARTIALS if groups else 0,
        PARTS=0 if sums is None else sums.shape[0],
        BLOCK_M=block_m,
        BLOCK_K=block_k,
        num_warps=warps,
    )
    return partials


def _cast(
    x: torch.Tensor,
    partials: torch.Tensor | None,
    shape: Sequence[Size],
    form: TensorForm,
    tile: Tile | None = None,
    hint: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """The buffers of x of the shape [M, K] or [G, M, K], whose partial amaxes are known, or are found by a guess."""
    *groups, rows, columns = shape
    count = groups[0] if groups else 1
    block_m, block_k, warps = tile or cast_tile(count * rows, columns, form.columnwise)
    programs = program_count(count * round_up(rows, block_m) if groups else rows, columns, block_m, block_k, x.device)
    if partials is None:
        partials = partials_to_find(programs, x.device)
    arguments = {
        "x": x,
        "partials": partials,
        "G": count,
        "M": rows,
        "K": columns,
        "GROUPED": bool(groups),
        "PARTIALS": partials.shape[-1],
        "EARLY": not groups and starts_early(rows, x.device),
    }
    return _launch_cast(
        quantize_cast_kernel, (programs,), x, tuple(shape), count, form, (block_m, block_k, warps), arguments, hint
    )


def _launch_cast(
    kernel: Any,
    grid: tuple[int, ...],
    x: torch.Tensor,
    shape: tuple[Size, ...],
    scales: int,
    form: TensorForm,
    tile: Tile,
    arguments: dict[str, Any],
    hint: torch.Tensor | None,
) -> list[torch.Tensor]:
    """The buffers of that shape and number of scales that a cast kernel fills from x, or from what is like x."""
    buffers = allocate(form.buffers(shape, scales), x.device)
    for usage in passes(form, x.element_size(), hint):
        launch(
            kernel,
            grid,
            **arguments,
            hint=x if hint is None else hint,
            **form.pointers(buffers, unused=x),
            **form.constants(),
            **usage,
            BLOCK_M=tile[0],
            BLOCK_K=tile[1],
            num_warps=tile[2],
        )
    return list(buffers.values())


def in_one_launch(x: torch.Tensor, columnwise: bool) -> bool:
    """Whether `quantize` finds the amax in the launch that casts."""
    return not columnwise and isinstance(x.numel(), int) and x.numel() <= FEW_VALUES


def _quantize_few(x: torch.Tensor, form: TensorForm) -> list[torch.Tensor]:
    buffers = form.allocate(x.shape, x.device)
    block = min(_FEW_BLOCK, max(triton.next_power_of_2(x.numel()), 32))
    launch(
        quantize_few_kernel,
        (max(triton.cdiv(x.numel(), block), 1),),
        x=x,
        **buffers,
        SIZE=x.numel(),
        **form.constants(),
        EARLY=starts_early(rows_and_columns(x.shape)[0], x.device),
        BLOCK=block,
        num_warps=max(block // 1024, 1),
    )
    return list(buffers.values())


# --- tile choice --------------------------------------------------------------------------------------------


def amax_tile(columns: int) -> Tile:
    """Tile of an amax launch, whose rows are long: two 16-byte loads a thread and tensor, the fastest on an H200."""
    block_k = min(max(triton.next_power_of_2(columns), 16), 1024)
    return 4096 // block_k, block_k, 8


def stripes(columns: int) -> tuple[int, int, int]:
    """(rows and columns of a tile, programs a stripe of columns): half a kilobyte a row of bf16, wider for more than 131072."""
    block_k = min(max(triton.next_power_of_2(columns), 16), 256)
    while triton.cdiv(columns, block_k) > PARTIALS:
        block_k *= 2
    return max(4096 // block_k, 1), block_k, PARTIALS // triton.cdiv(columns, block_k)


def cast_tile(rows: Size, columns: int, columnwise: bool, large: Tile = CAST_TILE) -> Tile:
    """Tile of a cast launch: `large` (the kernel's own choice), or a small one.

    With a transpose, its side of the tile fills whole 128-byte lines of fp8, unless the tensor is too small
    to give every multiprocessor several such tiles. Without one, only rows count. It is narrower where its rows of the transpose
    would be 2**31 values or more from the first to the last: inside of a tile offsets have 32 bits.
    """
    if not columnwise:
        return amax_tile(columns)
    small = size_hint(rows) * columns < 4 * 132 * 128 * 128
    block_m, block_k, warps = (64, 64, 4) if small and large[0] * large[1] > 64 * 64 else large
    while block_k * round_up(size_hint(rows), 16) >= 2**31:
        block_k //= 2
    return block_m, block_k, warps
