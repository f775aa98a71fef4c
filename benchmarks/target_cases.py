"""What benchmarks/targets.py compiles: every launch of every kernel, with fake tensors of one size."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from te_dynamo.kernels.activation import activation, gated, gated_halves
from te_dynamo.kernels.gemm.block_scales import multiplies_codes
from te_dynamo.kernels.gemm.choose import Choice, Product, choose
from te_dynamo.kernels.gemm.decode import launch_decode
from te_dynamo.kernels.gemm.grouped_mxfp8 import multiply_groups
from te_dynamo.kernels.gemm.multiply import run
from te_dynamo.kernels.gemm.request import Operand, Request
from te_dynamo.kernels.gemm.specialized.gated import gemm_gated_specialized
from te_dynamo.kernels.gemm.tiles import (
    BLOCK_TILES,
    COLUMNS_TILES,
    GROUPED_TILES,
    SPECIALIZED_BLOCK,
    TILES,
    DecodeTile,
    Tile,
    grouped_block_tiles,
    specialized_tile,
)
from te_dynamo.kernels.layouts.block import BlockForm, scale_shape
from te_dynamo.kernels.layouts.form import Form
from te_dynamo.kernels.layouts.mxfp8 import MXFP8Form
from te_dynamo.kernels.layouts.nvfp4 import NVFP4Form
from te_dynamo.kernels.layouts.row import GroupedRowForm, RowForm
from te_dynamo.kernels.layouts.tensor import GroupedForm, TensorForm
from te_dynamo.kernels.norm import add, modulate, norm
from te_dynamo.kernels.produce.stack import quantize_stacked_blocks
from te_dynamo.kernels.quantize import current as quantize
from te_dynamo.kernels.quantize import float8_block, float8_rowwise, mxfp8, nvfp4, several, transpose
from te_dynamo.kernels.quantize.rows_of_several import (
    quantize_columns_of_groups,
    quantize_grouped_rows,
    quantize_stacked_rows,
)
from te_dynamo.kernels.runtime.target import Target
from te_dynamo.kernels.tiles.groups import padded_rows
from te_dynamo.kernels.tiles.stacking import Stacking

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
M, N, K, GROUPS = 4096, 4096, 2048, 8
Launch = Callable[[], Any]


def bf16(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=BF16, device="cuda")


def f8(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=E4M3, device="cuda")


def f32(*shape: int) -> Tensor:
    return torch.empty(shape, device="cuda")


def u8(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.uint8, device="cuda")


def i32(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device="cuda")


def launches(target: Target) -> Iterator[tuple[str, Launch, int]]:
    """(case, what launches it, the bytes of shared memory that it may take) of every kernel on a target."""
    for tiles in (_gemms, _stacked_gemms, _block_gemms, _scaled_gemms, _grouped_gemms, _grouped_block_gemms):
        yield from tiles(target)
    others = itertools.chain(_hopper_gemms(target) if target.has_wgmma else (), _grouped_mxfp8(), _others())
    yield from ((case, launch, target.shared_bytes) for case, launch in others)


def candidates(tiles: tuple[Tile, ...], target: Target, out_bytes: int = 2) -> Iterator[tuple[Tile, int]]:
    """(tile, the bytes that it is counted with), each as the target runs it; slow ones only where they are another sum."""
    for tile in tiles:
        fitted = tile.fitted(out_bytes, target)
        if fitted is not None and not (target.has_fp32_sums and not tile.fast and tiles is not BLOCK_TILES):
            yield fitted, fitted.shared_bytes(out_bytes, target)


def _by(tile: Tile, request: Request, kernel: Any = "usual") -> Launch:
    return functools.partial(run, Choice(kernel, tile), request)


def _gemms(target: Target) -> Iterator[tuple[str, Launch, int]]:
    a, b, one, bias = f8(M, K), f8(N, K), f32(1), bf16(N)
    for tile, most in candidates(TILES, target):
        yield tile.name, _by(tile, Request(Operand(a, one), Operand(b, one), BF16, tile.fast, bias)), most
        sides = Operand(a, f32(M), "row"), Operand(b, f32(N), "row")
        # The scales of a tile's rows change their layout in a kilobyte, where there are 256.
        with_scales = min(most + 1024 * (tile.block_m == 256), target.shared_bytes)
        yield f"{tile.name}, by rows", _by(tile, Request(*sides, BF16, tile.fast, bias)), with_scales
    for fast in (True, False):
        for what, n, dtype, epilogue in (
            ("fp32", N, torch.float32, "none"),
            ("rows of 4095", N - 1, BF16, "none"),
            ("adds", N, BF16, "add"),
        ):
            product = Product(M, n, K, fast, dtype.itemsize, epilogue, n_known=True)
            tile: Any = choose(product, target, recorded=True).tile
            adds = epilogue == "add"
            addend = bf16(M, n) if adds else None
            request = Request(Operand(a, one), Operand(f8(n, K), one), dtype, fast, addend=addend)
            yield f"{tile.name}, {what}", _by(tile, request), tile.shared_bytes(dtype.itemsize * (1 + adds), target)


def _stacked_gemms(target: Target) -> Iterator[tuple[str, Launch, int]]:
    for along, fast, m in itertools.product("MNK", (True, False), (64, M)):
        size = {"M": max(m, 256), "N": N, "K": K}
        stacking = Stacking(along, (size[along] // 2, size[along] // 2))
        tile: Any = choose(Product(*size.values(), fast, 2, stacking=stacking, m_known=False), target, True).tile
        a, b = f8(size["M"], K), f8(N, K)
        scales = [f32(2 if along in dims else 1) for dims in ("MK", "NK")]
        request = Request(Operand(a, scales[0]), Operand(b, scales[1]), BF16, fast, stacking=stacking)
        yield (
            f"{tile.name}, along {along}",
            _by(tile, request),
            tile.shared_bytes(2, target),
        )


def _blocks(two_d: bool) -> Literal["1x128", "128x128"]:
    return "128x128" if two_d else "1x128"


def _block_gemms(target: Target) -> Iterator[tuple[str, Launch, int]]:
    for tile, most in candidates(BLOCK_TILES, target):
        for two_d in (True, False):
            scales = [f32(*scale_shape(rows, K, square)) for rows, square in ((M, False), (N, two_d))]
            sides = Operand(f8(M, K), scales[0], "1x128"), Operand(f8(N, K), scales[1], _blocks(two_d))
            yield f"{tile.name}, 1x128 by {_blocks(two_d)}", _by(tile, Request(*sides, BF16, bias=bf16(N))), most
        if tile.split_k == 1:
            codes = [u8(rows, K // 32) for rows in (M, N)]
            sides = Operand(f8(M, K), codes[0], "1x128"), Operand(f8(N, K), codes[1], "1x128")
            yield f"{tile.name}, E8M0", _by(tile, Request(*sides, BF16, bias=bf16(N))), most
    for tile, most in candidates(BLOCK_TILES, target, out_bytes=4):  # an addend takes as much as the result
        for two_d in (True, False) if tile.split_k == 1 else ():
            scales = [f32(*scale_shape(rows, K, square)) for rows, square in ((M, False), (N, two_d))]
            sides = Operand(f8(M, K), scales[0], "1x128"), Operand(f8(N, K), scales[1], _blocks(two_d))
            request = Request(*sides, BF16, bias=bf16(N), addend=bf16(M, N))
            yield f"{tile.name}, 1x128 by {_blocks(two_d)}, adds", _by(tile, request), most


def _scaled_gemms(target: Target) -> Iterator[tuple[str, Launch, int]]:
    """By tensor cores that know block scales."""
    for turned in (False, True) if target.has_block_scales else ():
        if multiplies_codes(target, turned):
            a, b = (f8(M, K), u8(M // 4, K // 32, 4)), (f8(*((K, N) if turned else (N, K))), u8(N // 4, K // 32, 4))
            for what, addend in (("", None), (", adds", bf16(M, N))):
                sides = Operand(*a, "1x32"), Operand(*b, "1x32", turned)
                call = functools.partial(run, Choice("scaled"), Request(*sides, BF16, bias=bf16(N), addend=addend))
                yield f"scaled MXFP8{', b by columns' if turned else ''}{what}", call, target.shared_bytes


def _grouped_gemms(target: Target) -> Iterator[tuple[str, Launch, int]]:
    offs, one = i32(GROUPS), f32(1)
    for tile, most in candidates(GROUPED_TILES, target):
        rows = Request(
            Operand(f8(M, K), one), Operand(f8(GROUPS, N, K), f32(GROUPS)), BF16, tile.fast, groups="rows", offs=offs
        )
        yield f"{tile.name}, rows", _by(tile, rows), most
        sides = Operand(f8(M, K), f32(M), "row"), Operand(f8(GROUPS, N, K), f32(GROUPS, N), "row")
        yield f"{tile.name}, rows by rows", _by(tile, Request(*sides, BF16, tile.fast, groups="rows", offs=offs)), most
    for tile, most in candidates(COLUMNS_TILES, target):
        sides = Operand(f8(N, M), one), Operand(f8(K, M), one)
        columns = Request(*sides, BF16, tile.fast, groups="columns", offs=offs)
        yield f"{tile.name}, columns", _by(tile, columns), most
        sides = Operand(f8(N, M), f32(GROUPS, N), "row"), Operand(f8(K, M), f32(GROUPS, K), "row")
        columns = Request(*sides, BF16, tile.fast, groups="columns", offs=offs)
        yield f"{tile.name}, columns by rows", _by(tile, columns), most


def _grouped_block_gemms(target: Target) -> Iterator[tuple[str, Launch, int]]:
    offs, padded = i32(GROUPS), padded_rows(M, GROUPS)
    for two_d in (True, False):
        for tile in grouped_block_tiles(two_d, target):
            fitted = tile.fitted(2, target)
            if fitted is None:
                continue
            most, name = (
                fitted.shared_bytes(2, target),
                f"{fitted.name}, grouped, 1x128 by {'128' if two_d else '1'}x128",
            )
            for by_columns in (False, True):
                shape = (N, GROUPS * K) if by_columns else (GROUPS * N, K)
                scales = [f32(*scale_shape(*s, square)) for s, square in (((M, K), False), (shape, two_d))]
                sides = Operand(f8(M, K), scales[0], "1x128"), Operand(f8(*shape), scales[1], _blocks(two_d))
                call = _by(fitted, Request(*sides, BF16, groups="rows", offs=offs, deep=by_columns))
                yield f"{name}, {'dgrad' if by_columns else 'fprop'}", call, most
            if two_d:
                continue
            x, weight = ((f8(size, K), u8(size, K // 32), "1x128") for size in (M, GROUPS * N))
            rows = Request(Operand(*x), Operand(*weight), BF16, groups="rows", offs=offs)  # type: ignore[arg-type]
            yield f"{name}, E8M0", _by(fitted, rows), most
            for kind, scales in (
                ("wgrad", [f32(padded // 128, size) for size in (N, K)]),
                ("wgrad, E8M0", [u8(size, padded // 32) for size in (N, K)]),
            ):
                sides = Operand(f8(N, padded), scales[0], "1x128"), Operand(f8(K, padded), scales[1], "1x128")
                call = _by(fitted, Request(*sides, BF16, groups="columns", offs=offs))
                yield f"{name}, {kind}", call, most


def _grouped_mxfp8() -> Iterator[tuple[str, Launch]]:
    offs, padded = i32(GROUPS), padded_rows(M, GROUPS)
    uneven = K - 32
    for name, k, weight, turned in (
        ("fprop", K, (f8(GROUPS * N, K), u8(GROUPS * N, K // 32)), False),
        ("dgrad", K, (f8(GROUPS * K, N), u8(GROUPS * K // 32, N)), True),
        ("dgrad, uneven", uneven, (f8(GROUPS * uneven, N), u8(GROUPS * uneven // 32, N)), True),
        ("dgrad 128", K, (f8(N, GROUPS * K), u8(N, GROUPS * K // 32)), False),
    ):
        sides = Operand(f8(M, k), u8(M, K // 32), "1x32"), Operand(*weight, "1x32", turned)
        request = Request(*sides, BF16, groups="rows", offs=offs, deep=name != "fprop")
        yield f"grouped MXFP8, {name}", functools.partial(multiply_groups, request)
    for name, columns in (
        ("wgrad", [(f8(padded, size), u8(padded // 32, size)) for size in (N, K)]),
        ("wgrad 128", [(f8(size, padded), u8(size, padded // 32)) for size in (N, K)]),
    ):
        left, right = (Operand(*side, "1x32", name == "wgrad") for side in columns)
        request = Request(left, right, BF16, groups="columns", offs=offs)
        yield f"grouped MXFP8, {name}", functools.partial(multiply_groups, request)


def _hopper_gemms(target: Target) -> Iterator[tuple[str, Launch]]:
    a, b, one, bias = f8(M, K), f8(N, K), f32(1), bf16(N)
    e5m2 = torch.empty(M, K, dtype=torch.float8_e5m2, device="cuda")
    for fast in (True, False):
        name, tile = f"specialized {'fast' if fast else 'slow'}", specialized_tile(fast)
        for what, x, shift, addend, dtype in (
            ("", a, bias, None, BF16),
            (", e5m2", e5m2, None, None, BF16),
            (", fp32", a, None, None, torch.float32),
            (", fp32 with bias", a, bias, None, torch.float32),
            (", fp16", a, None, None, torch.float16),
            (", adds", a, None, bf16(M, N), BF16),
            (", adds with bias", a, bias, bf16(M, N), BF16),
        ):
            by_rows = Operand(x, f32(M), "row"), Operand(b, f32(N), "row")
            for by, sides in (("", (Operand(x, one), Operand(b, one))), (", by rows", by_rows)):
                request = Request(*sides, dtype, fast, shift, addend)
                yield name + by + what, _by(tile, request, "specialized")
                yield f"small {name}{by}{what}", _by(specialized_tile(fast, small=True), request, "specialized")
        for along, parts, shift in itertools.product("MNK", (2, 3), (None, bias)):
            quarter = {"M": M, "N": N, "K": K}[along] // 4
            segments = (2 * quarter, 2 * quarter) if parts == 2 else (quarter, quarter, 2 * quarter)
            scales = [f32(parts if along in dims else 1) for dims in ("MK", "NK")]
            sides = Operand(a, scales[0]), Operand(b, scales[1])
            request = Request(*sides, BF16, fast, shift, stacking=Stacking(along, segments))
            what = f"{name}, along {along} in {parts}{' with bias' if shift is not None else ''}"
            yield what, _by(tile, request, "specialized")
        gated = functools.partial(gemm_gated_specialized, a, one, b, f32(2), fast, 0)
        for kind in ("silu", "gelu"):
            yield f"{name}, gated {kind}", functools.partial(gated, kind)
        for dtype in (BF16, torch.float32):
            sides = Operand(f8(N, M), one), Operand(f8(K, M), one)
            request = Request(*sides, dtype, fast, groups="columns", offs=i32(GROUPS))
            what = str(dtype).removeprefix("torch.")
            yield f"{name}, columns of groups, {what}", _by(tile, request, "specialized")
            sides = Operand(f8(N, M), f32(GROUPS, N), "row"), Operand(f8(K, M), f32(GROUPS, K), "row")
            request = Request(*sides, dtype, fast, groups="columns", offs=i32(GROUPS))
            yield f"{name}, columns of groups, by rows, {what}", _by(tile, request, "specialized")
        for rows in (1, 16, 64):
            tile = choose(Product(rows, N, K, fast, 2), target).tile
            assert isinstance(tile, DecodeTile)
            yield (
                f"decode {'fast' if fast else 'slow'}, {rows} rows, {tile.split_k} parts",
                functools.partial(launch_decode, tile, f8(rows, K), one, b, one, None, f32(tile.split_k, rows, N)),
            )
            sides = Operand(f8(rows, K), f32(rows), "row"), Operand(b, f32(N), "row")
            what = f"decode {'fast' if fast else 'slow'}, by rows, {rows} rows"
            yield what, _by(tile, Request(*sides, BF16, fast, bias), "decode")
    for rows, two_d in itertools.product((1, 16, 64), (True, False)):
        tile = choose(Product(rows, N, K, False, 2, scaling="1x128"), target).tile
        scales = [f32(*scale_shape(count, K, square)) for count, square in ((rows, False), (N, two_d))]
        sides = Operand(f8(rows, K), scales[0], "1x128"), Operand(b, scales[1], _blocks(two_d))
        yield f"decode, 1x128 by {_blocks(two_d)}, {rows} rows", _by(tile, Request(*sides, BF16, bias=bias), "decode")
    for two_d, shift, dtype in itertools.product((True, False), (None, bias), (BF16, torch.float32)):
        scales = [f32(*scale_shape(rows, K, square)) for rows, square in ((M, False), (N, two_d))]
        sides = Operand(a, scales[0], "1x128"), Operand(b, scales[1], _blocks(two_d))
        request = Request(*sides, dtype, bias=shift)
        name = f"specialized, 1x128 by {_blocks(two_d)}, {str(dtype).removeprefix('torch.')}"
        name += "" if shift is None else " with bias"
        yield name, _by(SPECIALIZED_BLOCK, request, "specialized")
        yield f"small {name}", _by(specialized_tile(False, True, small=True), request, "specialized")
    codes = [u8(rows, K // 32) for rows in (M, N)]
    request = Request(Operand(a, codes[0], "1x128"), Operand(b, codes[1], "1x128"), BF16)
    yield "specialized, E8M0", _by(SPECIALIZED_BLOCK, request, "specialized")
    sides = Operand(a, f32(*scale_shape(M, K, False)), "1x128"), Operand(b, f32(*scale_shape(N, K, True)), "128x128")
    for what, shift in (("", None), (" with bias", bias)):
        request = Request(*sides, BF16, bias=shift, addend=bf16(M, N))
        yield f"specialized, 1x128 by 128x128, adds{what}", _by(SPECIALIZED_BLOCK, request, "specialized")


def _others() -> Iterator[tuple[str, Launch]]:
    """Kernels that choose their tiles by shape alone."""
    x, w, up = bf16(M, K), bf16(K), bf16(M, K)
    for usage in ((True, True), (True, False)):
        name = "rows and columns" if all(usage) else "rows"
        cast, by_rows = TensorForm(E4M3, *usage), RowForm(E4M3, *usage)
        yield f"current, {name}", functools.partial(quantize.quantize, x, cast)
        yield f"current of a few rows, {name}", functools.partial(quantize.quantize, bf16(16, K), cast)
        yield f"stacked, {name}", functools.partial(quantize.quantize_stacked, [x, up], cast, True)
        yield f"by rows, {name}", functools.partial(float8_rowwise.quantize_rowwise, x, by_rows)
        half = not all(usage)  # rows of a stack by rows, or columns of one by columns
        stacked = functools.partial(quantize_stacked_rows, [x, up], RowForm(E4M3, half, not half), not half)
        yield f"by rows, stacked, {'rows' if half else 'columns'}", stacked
        yield f"blocks 1x128, {name}", functools.partial(float8_block.quantize_block, x, BlockForm(E4M3, *usage, False))
        yield (
            f"blocks 128x128, {name}",
            functools.partial(float8_block.quantize_block, x, BlockForm(E4M3, *usage, True)),
        )
        for size, two_d in itertools.product((32, 128), (False, True)):
            call = functools.partial(mxfp8.quantize_mxfp8, x, MXFP8Form(E4M3, *usage, size, two_d=two_d))
            yield f"MXFP8 {f'{size}x{size}' if two_d else size}, {name}", call
        yield from _blocks_otherwise(name, usage)
        yield from _produced(name, usage)
        for source, one_pass in _one_pass(TensorForm(E4M3, *usage, True)).items():
            yield f"one pass, {source}, {name}", one_pass
        for special in (False, True):
            form = NVFP4Form(*usage, hadamard=special, stochastic_rounding=special)
            call = functools.partial(nvfp4.quantize_nvfp4, x, form, i32(2))
            yield f"NVFP4{', a gradient' if special else ''}, {name}", call
        norms = (cast, False)  # keep_output
        yield f"RMSNorm, {name}", functools.partial(norm.rms_norm_quantize, x, w, 1e-5, False, False, *norms)
        yield f"LayerNorm, {name}", functools.partial(norm.layer_norm_quantize, x, w, w, 1e-5, *norms)
        yield (
            f"add + RMSNorm, {name}",
            functools.partial(add.add_rms_norm_quantize, x, up, w, 1e-5, False, False, *norms),
        )
        yield (
            f"adaLN, {name}",
            functools.partial(
                modulate.layer_norm_modulate_quantize, bf16(8, M // 8, K), bf16(8, K), bf16(8, K), 1e-5, True, *norms
            ),
        )
        for kind in ("gelu", "silu"):
            yield f"{kind}, {name}", functools.partial(activation.activation_quantize, x, kind, *norms)
            backward = (x, up, kind, *norms, True)
            yield f"{kind} backward, {name}", functools.partial(activation.activation_backward_quantize, *backward)
            yield f"gated {kind}, {name}", functools.partial(gated.gated_quantize, x, up, kind, *norms)
            yield (
                f"gated {kind} backward, {name}",
                functools.partial(gated.gated_backward_quantize, x, x, up, kind, *norms),
            )
        yield f"bias gradient, {name}", functools.partial(quantize.quantize_bias_grad, x, cast)
    for dtype in (BF16, torch.float32):
        tokens, offs = torch.empty(M, K, dtype=dtype, device="cuda"), i32(GROUPS)
        name = f"columns of groups, {str(dtype).removeprefix('torch.')}"
        yield (
            f"{name}, 1x128",
            functools.partial(float8_block.quantize_block, tokens, BlockForm(E4M3, False, True, False), offs=offs),
        )
        yield (
            f"{name}, by rows",
            functools.partial(quantize_columns_of_groups, tokens, offs, RowForm(E4M3, False, True)),
        )
        for size in (32, 128):
            call = functools.partial(mxfp8.quantize_mxfp8, tokens, MXFP8Form(E4M3, False, True, size), offs=offs)
            yield f"{name}, MXFP8 {size}", call
    table = torch.empty(7, 2, dtype=torch.int64, device="cuda")
    alone: dict[str, Form] = {
        "": TensorForm(E4M3, True, False),
        ", by rows": RowForm(E4M3, True, False),
        ", 128x128": BlockForm(E4M3, True, False, True),
        ", 128x128 of any scale": BlockForm(E4M3, True, False, True, False),
        ", MXFP8 32x32": MXFP8Form(E4M3, True, False, 32, two_d=True),
        ", MXFP8 128x128": MXFP8Form(E4M3, True, False, 128, two_d=True),
    }
    for (name, form), dtype in itertools.product(alone.items(), (BF16, torch.float32)):
        values = torch.empty(M, K, dtype=dtype, device="cuda")
        buffers = f8(M, K), u8(M, K // 32) if isinstance(form, MXFP8Form) else f32(1)
        how = several.scaling_and_tile(form, K)
        call = functools.partial(several.cast_several, table, 1, values, buffers, BF16, form, *how)
        yield f"several, {str(dtype).removeprefix('torch.')}{name}", call
    experts = bf16(GROUPS, N, K)
    yield "grouped", functools.partial(quantize.quantize_grouped, experts, GroupedForm(E4M3, True, True))
    yield "grouped, by rows", functools.partial(quantize_grouped_rows, experts, GroupedRowForm(E4M3, True, True))
    yield "transpose", functools.partial(transpose.transpose, f8(M, K))
    yield (
        "MXFP8 to bf16",
        functools.partial(mxfp8.dequantize_mxfp8, f8(M, K), u8(M, K // 32), False, BF16),
    )


def _one_pass(form: TensorForm) -> dict[str, Launch]:
    """What guesses a scale: the launch that guesses and the one that mends, the output kept where it may be."""
    x, up = bf16(M, K), bf16(M, K)
    hint = torch.empty(2, 2, dtype=torch.int64, device="cuda")
    calls = {
        "current": functools.partial(quantize.quantize, x, form),
        "stacked rows": functools.partial(quantize.quantize_stacked, [x, up], form, False),
        "stacked columns": functools.partial(quantize.quantize_stacked, [x, up], form, True),
        "gelu": functools.partial(activation.activation_quantize, x, "gelu", form, True),
        "gelu backward": functools.partial(activation.activation_backward_quantize, x, up, "gelu", form, True, False),
        "gated silu": functools.partial(gated.gated_quantize, x, up, "silu", form, True),
        "gated silu backward": functools.partial(gated.gated_backward_quantize, x, x, up, "silu", form, True),
        "gated gelu backward, stacked": functools.partial(
            gated.gated_backward_quantize, x, x, up, "gelu", form, False, True
        ),
        "halves": functools.partial(gated_halves.gated_backward_quantize_halves, x, x, up, "silu", form, True, True),
    }
    return {name: functools.partial(call, hint=hint) for name, call in calls.items()}


def _produced(name: str, usage: tuple[bool, bool]) -> Iterator[tuple[str, Launch]]:
    """What writes the scales of blocks, or of rows, of its own result."""
    forms = {
        "1x128": BlockForm(E4M3, *usage, two_d=False),
        "128x128": BlockForm(E4M3, *usage, two_d=True),
        "MXFP8 32": MXFP8Form(E4M3, *usage, scale_block=32),
        "MXFP8 128": MXFP8Form(E4M3, *usage, scale_block=128),
        "rows": RowForm(E4M3, *usage),
    }
    inputs = {"": BF16, ", fp32": torch.float32}
    for (what, dtype), (blocks, form) in itertools.product(inputs.items(), forms.items()):
        x, dy, w = (torch.empty(*size, dtype=dtype, device="cuda") for size in ((M, K), (M, K), (K,)))
        samples = torch.empty(8, K, dtype=dtype, device="cuda")
        if not isinstance(form, RowForm):
            for along in ("rows", "columns"):
                call = functools.partial(quantize_stacked_blocks, [x, dy], form, along == "columns")
                yield f"stacked {along} in {blocks}, {name}{what}", call
        for source, call in {
            "RMSNorm": functools.partial(norm.rms_norm_quantize, x, w, 1e-5, True, False, form, False),
            "LayerNorm": functools.partial(norm.layer_norm_quantize, x, w, w, 1e-5, form, True),
            "adaLN": functools.partial(
                modulate.layer_norm_modulate_quantize, x.view(8, -1, K), samples, samples, 1e-5, True, form, False
            ),
            "gelu": functools.partial(activation.activation_quantize, x, "gelu", form, False),
            "gelu backward": functools.partial(
                activation.activation_backward_quantize, dy, x, "gelu", form, False, True
            ),
            "gated silu": functools.partial(gated.gated_quantize, x, dy, "silu", form, False),
            "gated gelu backward": functools.partial(gated.gated_backward_quantize, dy, x, x, "gelu", form, False),
            "halves": functools.partial(
                gated_halves.gated_backward_quantize_halves, dy, x, x, "silu", form, True, True
            ),
        }.items():
            yield f"{source} in {blocks}, {name}{what}", call


def _blocks_otherwise(name: str, usage: tuple[bool, bool]) -> Iterator[tuple[str, Launch]]:
    """Scales of blocks where x is not whole tiles of bf16, or scales are not what is usual."""
    for what, x in (("fp32", torch.empty(M, K, device="cuda")), ("ragged", bf16(M + 1, K + 8))):
        for two_d, power_of_two in itertools.product((False, True), repeat=2):
            blocks = f"{'128' if two_d else '1'}x128{'' if power_of_two else ' of any scale'}"
            call = functools.partial(float8_block.quantize_block, x, BlockForm(E4M3, *usage, two_d, power_of_two))
            yield f"blocks {blocks}, {name}, {what}", call
        for size, swizzled in itertools.product((32, 128), (False, True)):
            call = functools.partial(mxfp8.quantize_mxfp8, x, MXFP8Form(E4M3, *usage, size, swizzled))
            yield f"MXFP8 {size}{' swizzled' if swizzled else ''}, {name}, {what}", call
