"""`te-dynamo doctor`: show versions, the device, and how each recipe runs here."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any

import torch
from rich.console import RenderableType

from te_dynamo import recipe as recipes
from te_dynamo.errors import NoDeviceError
from te_dynamo.inspect.tables import FittedTable, paragraph, text_of
from te_dynamo.kernels.runtime.availability import why_no_kernels
from te_dynamo.kernels.runtime.target import Target, described
from te_dynamo.lowering import device
from te_dynamo.lowering.inductor.install import WRAPPERS
from te_dynamo.lowering.tune import PRODUCTS
from te_dynamo.rates import KIND
from te_dynamo.remembered import remembered, remembered_file, why_unused
from te_dynamo.torch_private.table import TABLE

_RECIPES: tuple[recipes.Recipe, ...] = (
    *map(recipes.by_name, recipes.names()),
    recipes.MXFP8BlockScaling(scale_block=128),
)
"""A row each: the recipes by name, and the variant that runs on other tensor cores."""

_EMULATED = "exact emulation, its values multiplied in bf16, slower than bf16"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--verbose", action="store_true", help="also list the private names of torch that are used")
    parser.add_argument("--debug", action="store_true", help="a failure has its traceback")


def run(parsed: argparse.Namespace) -> int:
    """Prints a Diagnosis. 1 for a broken installation."""
    diagnosis = diagnose()
    print(diagnosis.text(parsed.verbose))
    return diagnosis.exit_status


@dataclasses.dataclass
class Diagnosis:
    """What `doctor` found.

    versions: (name, version or what is wrong). device: (fact, value), empty without one.
    no_device: why there is none, "" with one. recipes: (name, "native" | "emulated" | "reference" | "16 bits", why).
    privates: (name of torch's or Triton's, what for, what is lost without it, the releases of torch it is tested with, state).
    problems: what is broken about the installation; empty when the package works.
    """

    versions: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    device: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    no_device: str = ""
    recipes: list[tuple[str, str, str]] = dataclasses.field(default_factory=list)
    privates: list[tuple[str, str, str, str, str]] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)

    @property
    def exit_status(self) -> int:
        """0, or 1 for a broken installation. A machine without a GPU is not broken."""
        return 1 if self.problems else 0

    def __str__(self) -> str:
        return self.text()

    def text(self, verbose: bool = False) -> str:
        """What is wrong, or "no problem found"; versions, the device and the recipes.

        verbose: each private name of torch and Triton too, which are else shown where one is gone.
        """
        return text_of(self._parts(verbose))

    def _parts(self, verbose: bool) -> Iterator[RenderableType]:
        yield from (paragraph(f"PROBLEM: {problem}") for problem in self.problems)
        if not self.problems:
            yield paragraph("no problem found")
        yield paragraph(f"\n{', '.join(f'{name} {value}' for name, value in self.versions)}\n")
        if self.device:
            yield FittedTable("device", ("fact", "value"), self.device)
        else:
            yield paragraph(f"no device: {self.no_device}")
        reasons = {why: f"({number})" for number, why in enumerate(dict.fromkeys(why for *_, why in self.recipes), 1)}
        yield FittedTable(
            "", ("recipe", "runs"), ((name, f"{runs} {reasons[why]}") for name, runs, why in self.recipes)
        )
        yield from (paragraph(f"{number} {why}", indent=5) for why, number in reasons.items())
        columns = ("name", "what for", "without it", "torch", "state")
        shown = [row for row in self.privates if verbose or row[-1] not in ("active", "not needed")]
        if shown:
            yield FittedTable(
                "\nprivate names of torch and Triton; wrappers act in graphs of ours alone", columns, shown
            )
        else:
            yield paragraph(
                f"\n{len(self.privates)} private names of torch and Triton are in place; --verbose lists them"
            )


def diagnose() -> Diagnosis:
    """Looks at this machine. Never raises for what it finds: a broken part becomes a problem."""
    found = Diagnosis()
    _find_versions(found)
    _find_backend(found)
    target = _find_device(found)
    found.recipes = [(r.describe(), *_recipe_support(r, target)) for r in _RECIPES]
    _find_privates(found)
    return found


def _find_privates(found: Diagnosis) -> None:
    for entry in TABLE:
        lost = entry.gain or "failure or wrong results"
        effect = "wrapped" if entry.name in WRAPPERS else "used"
        why = f"{effect} in {entry.owner}: {entry.why}"
        found.privates.append((entry.name, why, lost, entry.releases, entry.state))
        if not entry.gain and entry.needed and not entry.active:
            found.problems.append(
                f"torch {torch.__version__} has no {entry.missing()}; install a release of torch {entry.releases}"
            )


def _find_versions(found: Diagnosis) -> None:
    found.versions += [
        ("te_dynamo", _installed("te-dynamo")),
        ("torch", torch.__version__),
        ("torch's CUDA", torch.version.cuda or "none (CPU build)"),
    ]
    try:
        found.versions.append(("triton", str(importlib.import_module("triton").__version__)))
    except Exception as error:  # a half-installed Triton raises more than ImportError
        found.versions.append(("triton", "cannot be imported"))
        found.problems.append(
            f"Triton cannot be imported ({error}); install the one that torch {torch.__version__} ships with"
        )
    found.versions += [("cuda-bindings", _installed("cuda-bindings")), ("Python", platform.python_version())]


def _find_backend(found: Diagnosis) -> None:
    entries = [entry for entry in entry_points(group="torch_dynamo_backends") if entry.name == "te"]
    if not entries:
        found.versions.append(('backend="te"', "not registered"))
        found.problems.append(
            'the entry point of backend="te" is not installed; run `pip install -e .` in the checkout'
        )
        return
    try:
        entries[0].load()
        found.versions.append(('backend="te"', "registered"))
    except Exception as error:  # whatever stops it from loading stops torch.compile too
        found.versions.append(('backend="te"', "registered, does not load"))
        found.problems.append(f'backend="te" does not load: {type(error).__name__}: {error}')


def _find_device(found: Diagnosis) -> Target | None:
    try:
        info: Any = device.read_device(0)
        count = device.device_count()
    except NoDeviceError as error:
        found.no_device = str(error).removeprefix("te_dynamo: ")
        return None
    found.device = [
        ("name", info.name if count == 1 else f"{info.name} (the first of {count})"),
        ("compute capability", f"{info.compute_capability[0]}.{info.compute_capability[1]} ({info.arch})"),
        ("multiprocessors", str(info.multiprocessor_count)),
        ("shared memory per block", f"{info.shared_memory_per_block_optin / 1024:.0f} KiB"),
        ("L2 cache", f"{info.l2_cache_bytes / 2**20:.0f} MiB"),
        ("memory", f"{info.total_memory_bytes / 2**30:.1f} GiB"),
        ("driver supports CUDA", info.driver_version),
    ]
    if torch.cuda.is_available():
        found.device += [("calibration", _calibration()), ("products timed", _timed_products())]
    else:
        found.problems.append(
            "there is a CUDA device that this torch cannot use; install a CUDA build of torch for this driver"
        )
    return described(info.name, info.compute_capability, info.multiprocessor_count, info.shared_memory_per_block_optin)


def _calibration() -> str:
    """What the rule of what FP8 costs goes by."""
    if unused := why_unused(KIND):
        return f"not used: {unused}; `python -m te_dynamo calibrate` measures anew ({remembered_file(KIND)})"
    if facts := remembered(KIND):
        return f"{', '.join(f'{name} {value}' for name, value in facts.items())} ({remembered_file(KIND)})"
    return "none: published figures; `python -m te_dynamo calibrate` measures this GPU"


def _timed_products() -> str:
    """How many products were timed here by max-autotune, and whether that is used."""
    unused = why_unused(PRODUCTS)
    state = f"not used: {unused}" if unused else f"{len(remembered(PRODUCTS))}, with this driver, torch and Triton"
    return f"{state} ({remembered_file(PRODUCTS)})"


def _recipe_support(recipe: recipes.Recipe, target: Target | None) -> tuple[str, str]:
    """("native" | "emulated" | "reference" | "16 bits", why) on a GPU; None for no device."""
    if target is None:
        return "reference", "no CUDA device: PyTorch reference code, the same results, much slower than bf16"
    here = "sm_{}{}".format(*target.capability)
    if reason := why_no_kernels(target):
        return "16 bits", f"{reason}; a linear that a rule names runs reference code, without speed"
    if not recipe.is_emulated(target):
        tested = "" if target.measured else "; compiled for it, measured on sm_90 only"
        return "native", f"tensor cores of {here} read its operands{tested}"
    return "emulated", f"{here} has no tensor core for its operands: {_EMULATED}"


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
