"""A request (request.py) on a CUDA device: by the kernel and tile that choose.py names, or by the tensor cores that know its scales.

    multiply             C
    multiply_with_amax   C and partial amaxes of it: of a few rows by the kernel that multiplies, else by a pass
    multiply_gated       C of gate and up, and partial amaxes of f(gate) * up
    run                  C by a kernel and tile of the caller's choice

The same request gives the same bits on every run.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_dynamo.kernels.activation.gated import gated_partial_amaxes
from te_dynamo.kernels.gemm.block_scales import multiplies_codes, multiply_scaled
from te_dynamo.kernels.gemm.choose import CHOSEN, Choice, choose_for
from te_dynamo.kernels.gemm.cublaslt import multiply_cublaslt
from te_dynamo.kernels.gemm.decode import launch_decode, launch_gated_decode
from te_dynamo.kernels.gemm.emulated import multiply_mxfp8, multiply_nvfp4
from te_dynamo.kernels.gemm.gated import check_gated, halves
from te_dynamo.kernels.gemm.grouped_mxfp8 import multiply_groups
from te_dynamo.kernels.gemm.grouped_product import gemm_grouped_kernel
from te_dynamo.kernels.gemm.product import gemm_kernel, gemm_reduce_kernel
from te_dynamo.kernels.gemm.request import Request, check, sum_of_nothing
from te_dynamo.kernels.gemm.specialized.gated import gemm_gated_specialized
from te_dynamo.kernels.gemm.specialized.grouped import columns_specialized_out
from te_dynamo.kernels.gemm.specialized.product import gemm_specialized_out
from te_dynamo.kernels.gemm.tiles import REDUCE_BLOCK, SPECIALIZED_SMALL, DecodeTile, Tile, stores_by_descriptor
from te_dynamo.kernels.quantize.current import PARTIALS, partial_amaxes
from te_dynamo.kernels.runtime._triton import triton
from te_dynamo.kernels.runtime.dependent_launch import starts_early
from te_dynamo.kernels.runtime.launch import is_recording, launch
from te_dynamo.kernels.runtime.margin import current_sm_margin, gemm_multiprocessors
from te_dynamo.kernels.runtime.target import target_of
from te_dynamo.kernels.tiles.stacking import Stacking

_MOST_CHOSEN = 4096
_ALIGNMENT = 16  # bytes, of a tensor that is copied by a descriptor
_CHOSEN_FOR = ("tensor", "row", "1x128", "128x128")  # the scales of what choose.py names


def multiply(r: Request, out: torch.Tensor | None = None) -> torch.Tensor:
    """C of a request. Raises ValueError for what no GEMM takes, the values of `offs` excepted: those that are out of range are clamped.

    out: what C is written to, perhaps the addend, contiguous and aligned to 16 bytes, of a request that `choose_for` fuses; a new tensor
    otherwise.
    """
    choice = _checked_choice(r)
    if r.addend is None or choice.fused:
        return run(choice, r if r.addend is None or out is not None else _with_readable_addend(r), out)
    return multiply(dataclasses.replace(r, addend=None)) + r.addend


def _checked_choice(r: Request, epilogue: Any = "none") -> Choice:
    """`choice_of` a request that is checked. Both are remembered: they take the CPU as long as the launch."""
    if is_recording():
        check(r)
        return choice_of(r, epilogue, recorded=epilogue != "amax")
    key = (r.facts(), epilogue, current_sm_margin())
    choice = CHOSEN.get(key)  # another thread may clear it at any time
    if choice is None:
        check(r)
        if len(CHOSEN) >= _MOST_CHOSEN:
            CHOSEN.clear()
        CHOSEN[key] = choice = choice_of(r, epilogue)
    return choice


def _of_small_blocks(r: Request) -> Literal["scaled", "emulated"] | None:
    """How scales of small blocks are applied, by the tensor cores or to values; None where a request is choose.py's."""
    target, scaling = target_of(r.a.codes.device), r.a.scaling
    codes = r.a.scale_inv.dtype == torch.uint8
    if scaling == "1x16":
        return "scaled" if target.has_block_scales else "emulated"
    if scaling == "1x32" or (scaling in _CHOSEN_FOR and codes and target.has_block_scales):
        whole = all(x.codes.shape[1] % 16 == 0 for x in (r.a, r.b))
        return "scaled" if multiplies_codes(target, r.b.turned) and whole and not r.groups else "emulated"
    if scaling not in _CHOSEN_FOR:
        raise ValueError(f"te gemm: no kernel multiplies operands with scales {scaling}")
    return None


def multiply_with_amax(r: Request) -> tuple[torch.Tensor, torch.Tensor]:
    """(C, fp32 [PARTIALS] whose maximum is its amax), of operands with a tensor's scale."""
    choice = _checked_choice(r, "amax")
    if not choice.fused:
        c = multiply(r)
        return c, partial_amaxes(c)
    partials = torch.empty(PARTIALS, dtype=torch.float32, device=r.a.codes.device)
    return run(choice, r, partials=partials), partials


def multiply_gated(r: Request, gate: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(C, fp32 [PARTIALS] whose maximum is the amax of f(gate) * up): gated.py's, of operands with a tensor's scale."""
    check_gated(r, gate, kind)
    choice = _checked_choice(r, "gated")
    operands = r.a.codes, r.a.scale_inv, r.b.codes, r.b.scale_inv
    if choice.specialized:
        return gemm_gated_specialized(*operands, r.fast, gate, kind)
    if choice.fused and isinstance(choice.tile, DecodeTile):
        c, partials = r.empty(), torch.empty(PARTIALS, dtype=torch.float32, device=r.a.codes.device)
        launch_gated_decode(choice.tile, *operands, gate, kind, c, partials)
        return c, partials
    c = multiply(r)
    return c, gated_partial_amaxes(*halves(c, gate), kind)


def choice_of(r: Request, epilogue: Any = "none", recorded: bool = False) -> Choice:
    """What runs a request. recorded: as `choose` takes it."""
    epilogue = epilogue if r.addend is None else "add"
    small_blocks = _of_small_blocks(r)
    if small_blocks:
        return Choice(small_blocks, fused=epilogue == "none" or (small_blocks == "scaled" and epilogue == "add"))
    experts, b = r.groups == "rows", r.b.codes
    if r.a.scaling == "tensor":
        scaling = "tensor"
    elif r.groups and r.b.scaling == "1x128":
        scaling = "1x128 by 1x128"
    else:
        scaling = r.a.scaling
    choice = choose_for(
        r.a.codes,
        b.view(r.count, -1, b.shape[1]) if experts and b.dim() == 2 and not r.deep else b,
        r.fast,
        r.out_dtype,
        recorded=recorded,
        epilogue=epilogue,
        scaling=scaling,
        stacking=r.stacking,
        m_groups=r.count if experts else 0,
        k_groups=r.count if r.groups == "columns" else 0,
    )
    # Beside a scale for each row of B's blocks the specialized kernel has no registers for an addend.
    apart = epilogue == "add" and choice.specialized and r.a.scaling == r.b.scaling == "1x128"
    return dataclasses.replace(choice, fused=False) if apart else choice


def run(
    choice: Choice, r: Request, out: torch.Tensor | None = None, partials: torch.Tensor | None = None
) -> torch.Tensor:
    """C by that kernel and tile, which decides fast or slow accumulation; checks nothing.

    partials: of a DecodeTile, fp32 [PARTIALS] whose maximum becomes the amax of C, or None.
    """
    if not r.groups and isinstance(r.mnk[2], int) and r.mnk[2] == 0:
        return sum_of_nothing(r.empty() if out is None else out, r.bias, r.addend)
    if choice.kernel == "emulated":
        return _emulated(r)
    if choice.kernel == "cublaslt" and r.a.scale_inv.dtype == torch.float32:
        return multiply_cublaslt(r)
    c = r.empty() if out is None else out
    if choice.kernel == "scaled":
        multiply_scaled(r, c)
    elif choice.specialized:
        _run_specialized(choice.tile, r, c)
    elif isinstance(choice.tile, DecodeTile) or not r.groups:
        _run_whole(choice.tile, r, c, partials)
    else:
        _run_groups(choice.tile, r, c)
    return c


def _emulated(r: Request) -> torch.Tensor:
    if r.groups:
        return multiply_groups(r)
    return (multiply_nvfp4 if r.a.scaling == "1x16" else multiply_mxfp8)(r)


def _run_specialized(tile: Tile | DecodeTile, r: Request, c: torch.Tensor) -> None:
    operands = r.a.codes, r.a.scale_inv, r.b.codes, r.b.scale_inv
    if r.groups:
        columns_specialized_out(*operands, r.offs, r.fast, scaling=r.scaling, out=c)  # type: ignore[arg-type]
    else:
        form = {"scaling": r.scaling, "fast": r.fast, "along": r.borders.along, "segments": r.borders.segments}
        small = tile in SPECIALIZED_SMALL
        gemm_specialized_out(*operands, r.bias, r.addend, **form, small=small, out=c)


def _run_whole(tile: Tile | DecodeTile, r: Request, c: torch.Tensor, partials: torch.Tensor | None) -> None:
    operands, (m, n, k) = (r.a.codes, r.a.scale_inv, r.b.codes, r.b.scale_inv), r.mnk
    split = tile.split_k > 1
    target = torch.empty((tile.split_k, m, n), dtype=torch.float32, device=c.device) if split else c
    addend = None if split else r.addend
    if isinstance(tile, DecodeTile):
        stacking = r.borders if r.borders.along else None
        launch_decode(tile, *operands, r.bias, target, stacking, None if split else partials, addend, r.scaling)
    else:
        programs, bias = gemm_multiprocessors(c.device) * tile.ctas_per_sm, None if split else r.bias
        options = gemm_options(tile, n, r.scaling, r.borders, may_be_empty=not statically_known_true(k > 0))
        launch(gemm_kernel, (programs,), *operands, bias, target, addend, m, n, k, **options)
    if split:
        _add_parts(target, r, c, partials)


def _run_groups(tile: Tile, r: Request, c: torch.Tensor) -> None:
    launch(
        gemm_grouped_kernel,
        (gemm_multiprocessors(c.device) * tile.ctas_per_sm,),
        *(r.a.codes, r.a.scale_inv, r.b.codes, r.b.scale_inv, r.offs, c, *r.mnk, r.count),
        **grouped_options(tile, r.mnk[1], r.count, r.scaling, r.groups == "columns", r.deep),
    )


def _add_parts(parts: torch.Tensor, r: Request, c: torch.Tensor, partials: torch.Tensor | None) -> None:
    """c [M, N] = round(sum of parts [SPLIT_K, M, N] (* scales of tensors or rows) + bias) (+ addend). partials: as of `run`."""
    m, n = c.shape
    optional = [r.a.scale_inv if x is None else x for x in (r.bias, partials)]
    launch(
        gemm_reduce_kernel,
        (triton.cdiv(m * n, REDUCE_BLOCK),),
        *(parts, r.a.scale_inv, r.b.scale_inv, optional[0], c, r.addend, optional[1], m * n, n),
        **{"SCALING": r.scaling, "HAS_BIAS": r.bias is not None, "SPLIT_K": parts.shape[0]},
        **{"PARTIALS": 0 if partials is None else partials.shape[0], "EARLY": starts_early(m, c.device)},
        BLOCK=REDUCE_BLOCK,
    )


def gemm_options(
    tile: Tile, n: int | torch.SymInt, scaling: str, stacking: Stacking, *, may_be_empty: bool = False
) -> dict[str, Any]:
    """The constant arguments and compile options of `gemm_kernel` for a tile and a width N. may_be_empty: K may be 0."""
    which = {"SCALING": scaling, **stacking.constants(), "SPLIT_K": tile.split_k, "MAY_BE_EMPTY": may_be_empty}
    return {**which, **_tile_options(tile, n)}


def grouped_options(
    tile: Tile, n: int | torch.SymInt, groups: int, scaling: str, columns: bool, deep: bool = False
) -> dict[str, Any]:
    """Those of `gemm_grouped_kernel`."""
    which = {"COLUMNS": columns, "GROUPS": triton.next_power_of_2(groups), "SCALING": scaling, "B_COLUMNWISE": deep}
    return {**which, **_tile_options(tile, n)}


def _tile_options(tile: Tile, n: int | torch.SymInt) -> dict[str, Any]:
    return {
        "FAST": tile.fast,
        "HALVES": tile.halves,
        "DESCRIPTOR_STORE": tile.split_k == 1 and isinstance(n, int) and stores_by_descriptor(n),
        **tile.constants(),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def is_aligned(addend: torch.Tensor) -> bool:
    """Whether an addend without an address, a fake, begins where a descriptor may: its memory does, and it some vectors later."""
    first = addend.storage_offset() * addend.element_size()
    return isinstance(first, int) and first % _ALIGNMENT == 0


def _with_readable_addend(r: Request) -> Request:
    """With the addend as the kernels read it: rows one after the other, from an aligned address on."""
    assert r.addend is not None
    addend = r.addend.contiguous()
    aligned = is_aligned(addend) if is_recording() else addend.data_ptr() % _ALIGNMENT == 0
    return dataclasses.replace(r, addend=addend if aligned else addend.clone())
