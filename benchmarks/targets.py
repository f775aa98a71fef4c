"""What becomes of every kernel on every kind of GPU, compiled where none is: shared memory, registers, spills, instructions.

    python benchmarks/targets.py                  # all targets: some minutes each
    python benchmarks/targets.py l40s b200        # these; the rows of the others stay
    python benchmarks/targets.py --check          # writes nothing: names the kernels whose machine code is not the recorded one

The launchers run with fake tensors and compile what they would launch. Every tile of the tables is compiled that is a candidate on the
target, as `Tile.fitted` leaves it there; the kernels of norms, activations and quantizers by the tiles that they choose themselves.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import io
import itertools
import multiprocessing
import os
import pathlib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import environment
import machine_code
import report
from target_cases import launches
from triton import knobs

from te_dynamo.inspect.fake_cuda import fake_cuda
from te_dynamo.kernels.runtime.availability import why_no_kernels
from te_dynamo.kernels.runtime.launch import compiling_only
from te_dynamo.kernels.runtime.target import TARGETS, Target, described

KINDS = {name: TARGETS[name] for name in ("l40s", "h200", "b200", "gb300", "rtx5090")} | {
    "thor": described("Thor", (11, 0), 20, 227 * 1024),
    "gb10": described("GB10", (12, 1), 48, 99 * 1024),
}
"""A GPU of each compute capability with FP8 tensor cores. Of gb10 that shows why it has no kernels."""

MULTIPLIES = re.compile(
    r"(wgmma)\.mma_async\.sync\.aligned\.m\d+n\d+(k\d+)\.f32\.(\w+)|(mma\.sync)\.aligned\.m\d+n\d+(k\d+)\.row\.col\.f32\.(\w+)"
    r"|(tcgen05\.mma)\.[\w.:]*kind::(\w+)"
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One compiled kernel. most_kib: what the choice of tiles counts with, or what a program may take; spills: bytes a thread, stored and
    loaded; instructions, code: machine_code.py's."""

    target: str
    kernel: str
    case: str
    shared_kib: float
    most_kib: float
    registers: int
    spills: int
    multiplies: str
    instructions: int
    code: str
    error: str = ""


@contextlib.contextmanager
def compiled_for(target: Target, found: list[dict[str, Any]]) -> Iterator[None]:
    """Inside, launches compile for a target and launch nothing; what became of each kernel is appended."""
    log = io.StringIO()
    number = 10 * target.capability[0] + target.capability[1]

    def listen(src: Any, metadata: dict[str, Any], metadata_group: dict[str, str], **_: Any) -> None:
        text = log.getvalue()
        log.seek(0)
        log.truncate()
        spills = sum(int(size) for size in re.findall(r"(\d+) bytes spill", text))
        registers = max((int(count) for count in re.findall(r"Used (\d+) registers", text)), default=0)
        made = {pathlib.Path(name).suffix: pathlib.Path(path) for name, path in metadata_group.items()}
        found.append({
            "kernel": metadata["name"],
            "shared_kib": metadata["shared"] / 1024,
            "registers": registers,
            "spills": spills,
            "multiplies": ", ".join(sorted({" ".join(filter(None, parts)) for parts in MULTIPLIES.findall(made[".ptx"].read_text())})),
            **dataclasses.asdict(machine_code.code_of(made[".cubin"].read_bytes())),
        })  # fmt: skip

    from triton.runtime import driver

    with compiling_only(), knobs.compilation.scope(), knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        driver.active.get_current_stream = lambda device: 0
        driver.active.get_current_device = lambda: number  # kernels remember by it what they compiled
        knobs.compilation.always_compile = True  # a cached kernel would come without ptxas's words
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.listener = listen
        yield


def compiled(name: str, wanted: str = "") -> list[Row]:
    """The rows of one of KINDS, of the cases that a regular expression is found in. What is compiled already has no row."""
    target = KINDS[name]
    rows: list[Row] = []
    with fake_cuda(target):
        for case, launch, most in launches(target):
            if not re.search(wanted, case):
                continue
            found: list[dict[str, Any]] = []
            error = ""
            try:
                with compiled_for(target, found):
                    launch()
            except Exception as failure:
                error = f"{type(failure).__name__}: {(str(failure).splitlines() or [''])[0][:120]}"
                nothing = dict.fromkeys(("registers", "spills", "instructions"), 0)
                found.append({"kernel": "", "shared_kib": 0.0, "multiplies": "", "code": "", **nothing})
            for facts in found:
                # The kernel that adds up parts, and those that swizzle scales, are no tile's.
                own = most if facts["multiplies"] else target.shared_bytes
                rows.append(Row(target.arch, case=case, most_kib=own / 1024, error=error, **facts))
    return rows


def compiled_apart(names: Sequence[str], wanted: str = "") -> Iterator[list[Row]]:
    """`compiled` of each, in a process of its own with the hash seed 0: for 10.x Triton writes one of several machine codes by it."""
    spawn = multiprocessing.get_context("spawn")
    with (
        concurrent.futures.ProcessPoolExecutor(1, spawn, max_tasks_per_child=1) as pool,
        mock.patch.dict(os.environ, PYTHONHASHSEED="0"),
    ):
        yield from pool.map(compiled, names, itertools.repeat(wanted))


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("targets", nargs="*", help=f"of {', '.join(KINDS)}; all that have kernels without it")
    parser.add_argument(
        "--check", action="store_true", help="compare with the file of results, by the Triton that it was made with"
    )
    parser.add_argument(
        "--only", default="", metavar="REGEX", help="the cases that it is found in; the rows of the others stay"
    )
    args = parser.parse_args()
    facts = {**environment.collect("cpu"), "device": "no GPU"}
    recorded = recorded_in(args.out)
    kept = [Row(**row) for row in recorded.rows] if recorded else []
    if args.check and (why := why_not_comparable(recorded, facts["triton"])):
        parser.error(why)
    names = args.targets or [name for name, target in KINDS.items() if not why_no_kernels(target)]
    found: list[str] = []
    for name, rows in zip(names, compiled_apart(names, args.only), strict=True):
        if recorded is not None and args.check:
            found += changed(recorded, name, rows, args.only)
        else:
            kept = [row for row in kept if row.target != KINDS[name].arch or not re.search(args.only, row.case)] + rows
            report.write(args.out, "targets", facts, kept)
    sys.exit("\n".join(found) or 0)


def recorded_in(folder: pathlib.Path = report.RESULTS) -> report.Run | None:
    path = folder / "targets-no-gpu.json"
    return report.read(path) if path.exists() else None


def why_not_comparable(recorded: report.Run | None, triton: str) -> str | None:
    if recorded is None:
        return "no results to compare with; run without --check first"
    made_by = recorded.environment["triton"]
    return None if made_by == triton else f"the results were made with Triton {made_by}, this is {triton}"


def changed(recorded: report.Run, name: str, rows: Sequence[Row], wanted: str = "") -> list[str]:
    """How the code of a target's rows, of the cases that `wanted` is found in, differs from what is recorded: `machine_code.changes`."""
    before = [row for row in recorded.rows if row["target"] == KINDS[name].arch and re.search(wanted, row["case"])]
    return machine_code.changes(before, map(dataclasses.asdict, rows))


if __name__ == "__main__":
    main()
