"""Compiles a Triton kernel to PTX and machine code without a GPU, and reads what ptxas says of it.

    report = compile_for(
        gemm_kernel,
        args={"a": "*fp8e4nv", "b": "*fp8e4nv", ..., "M": "i32", "K": "i32"},
        constexprs={"BLOCK_M": 128, ...},
        aligned=("a", "b", "c", "N", "K"),
        num_warps=8,
        num_stages=3,
    )
    assert "wgmma.mma_async" in report.ptx and report.spills == 0 and not report.warnings

The PTX and the ptxas run are those of Triton itself, options included: the report holds for what a GPU loads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from collections.abc import Collection, Mapping
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as triton_compile


@dataclasses.dataclass(frozen=True)
class PtxReport:
    """What became of one kernel.

    ptx:       the PTX text.
    cubin:     the machine code, for `triton.tools.disasm.get_sass`.
    registers: registers a thread.
    spills:    bytes of spill stores and spill loads a thread; 0 is the only good number.
    shared:    bytes of shared memory a program.
    warnings:  ptxas's warnings of group C7xxx, for one "C7515) Potential Performance Loss: ..." (serialized wgmma).
    log:       the whole of ptxas's report.
    """

    ptx: str
    cubin: bytes = dataclasses.field(repr=False)
    registers: int
    spills: int
    shared: int
    warnings: tuple[str, ...]
    log: str


def compile_for(
    kernel: Any,
    args: Mapping[str, str],
    constexprs: Mapping[str, Any],
    *,
    aligned: Collection[str] | None = None,
    capability: int = 90,
    **options: Any,
) -> PtxReport:
    """Compiles `kernel` (a `triton.jit` or `gluon.jit` function) for a CUDA capability; needs no GPU and no driver.

    args:       type of each run-time argument as Triton writes it: "*fp8e4nv", "*fp8e5", "*bf16", "i32", "fp32".
    constexprs: value of each `tl.constexpr` argument.
    aligned:    names of the arguments that Triton may take for multiples of 16, as a launch finds out for
                itself; this changes the code. None: every pointer, no integer.
    capability: 90 (sm_90a), 100 (sm_100a), ...
    options:    compile options: num_warps, num_stages, maxnreg, ...

    Raises ValueError when the two mappings together are not exactly the kernel's arguments.
    """
    _check_names(kernel, args, constexprs, aligned)
    if aligned is None:
        aligned = [name for name, kind in args.items() if kind.startswith("*")]
    names = kernel.arg_names
    source = _source_class(kernel)(
        fn=kernel,
        signature={name: args.get(name, "constexpr") for name in names},
        constexprs=dict(constexprs),
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    log = io.StringIO()
    # A cached kernel would come without ptxas's words.
    with knobs.compilation.scope(), knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        knobs.compilation.always_compile = True
        knobs.nvidia.dump_ptxas_log = True
        compiled = triton_compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return _report(compiled.asm, compiled.metadata.shared, log.getvalue())


def _source_class(kernel: Any) -> type[ASTSource]:
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource
    return ASTSource


def _check_names(
    kernel: Any, args: Mapping[str, str], constexprs: Mapping[str, Any], aligned: Collection[str] | None
) -> None:
    given, wanted = {*args, *constexprs}, set(kernel.arg_names)
    if given != wanted or set(args) & set(constexprs):
        raise ValueError(
            f"compile_for: {kernel.__name__} takes {sorted(wanted)}; missing {sorted(wanted - given)}, "
            f"unknown {sorted(given - wanted)}, given twice {sorted(set(args) & set(constexprs))}"
        )
    if unknown := set(aligned or ()) - set(args):
        raise ValueError(f"compile_for: aligned names no run-time argument of {kernel.__name__}: {sorted(unknown)}")


def _report(asm: Mapping[str, Any], shared: int, log: str) -> PtxReport:
    registers = re.search(r"Used (\d+) registers", log)
    if registers is None:
        raise RuntimeError(f"compile_for: ptxas's report has no register count:\n{log}")
    return PtxReport(
        ptx=asm["ptx"],
        cubin=asm["cubin"],
        registers=int(registers.group(1)),
        spills=sum(int(size) for size in re.findall(r"(\d+) bytes spill", log)),
        shared=shared,
        warnings=tuple(dict.fromkeys(re.findall(r"\((C7\d\d\d\).*)", log))),
        log=log,
    )
