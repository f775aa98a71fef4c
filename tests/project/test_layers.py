"""The import table of docs/architecture.md: which folder, and which room of a folder, may import which."""

from __future__ import annotations

import ast
import functools
import graphlib
import pathlib
import re
import sys
from collections import Counter

import pytest

ROOT = pathlib.Path(__file__).parents[2]

PACKAGES = {
    "te_dynamo": "te_dynamo",
    "kernels": "te_dynamo.kernels",
    "passes": "te_dynamo.passes",
    "lowering": "te_dynamo.lowering",
}
"""Folder in the repository -> the package it is installed as."""

TOP = {"te_dynamo/__init__.py", "te_dynamo/__main__.py", "te_dynamo/backend.py", "te_dynamo/entry.py"}
"""The pipeline, the public names and the command line know every room."""

KERNEL_ROOMS = {
    "kernels/activation",
    "kernels/gemm",
    "kernels/layouts",
    "kernels/norm",
    "kernels/produce",
    "kernels/quantize",
    "kernels/runtime",
    "kernels/tiles",
}

ROOMS: dict[str, set[str]] = {
    "kernels/runtime": set(),
    "kernels/layouts": {"kernels/runtime"},
    "kernels/tiles": {"kernels/layouts", "kernels/runtime"},
    "kernels/quantize": {"kernels/layouts", "kernels/runtime", "kernels/tiles"},
    "kernels/produce": {"kernels/quantize", "kernels/layouts", "kernels/runtime", "kernels/tiles"},
    "kernels/activation": {"kernels/produce", "kernels/quantize", "kernels/layouts", "kernels/runtime", "kernels/tiles"},
    "kernels/norm": {"kernels/produce", "kernels/quantize", "kernels/layouts", "kernels/runtime", "kernels/tiles"},
    "kernels/gemm": {"kernels/activation", "kernels/quantize", "kernels/layouts", "kernels/runtime", "kernels/tiles"},
    "te_dynamo/quantized": {"te_dynamo", "kernels/layouts"},
    "te_dynamo/dialect": {"te_dynamo", "te_dynamo/quantized", *KERNEL_ROOMS},
    "te_dynamo/rules": {"te_dynamo"},
    "te_dynamo/torch_private": {"te_dynamo", "kernels/runtime"},
    "te_dynamo/weights": {"te_dynamo", "te_dynamo/torch_private", "te_dynamo/quantized", "te_dynamo/dialect"},
    "te_dynamo/operations": {"te_dynamo", "te_dynamo/quantized", "te_dynamo/dialect"},
    "te_dynamo/nn": {"te_dynamo", "te_dynamo/quantized", "te_dynamo/dialect", "te_dynamo/weights"},
    "te_dynamo/distributed": {
        "te_dynamo", "te_dynamo/quantized", "te_dynamo/dialect", "te_dynamo/weights", "kernels/layouts", "kernels/runtime",
    },
    "te_dynamo/inspect": {
        "te_dynamo", "te_dynamo/rules", "te_dynamo/torch_private", "te_dynamo/quantized", "te_dynamo/distributed", "te_dynamo/weights", "kernels/runtime",
    },
    "te_dynamo/accuracy": {"te_dynamo", "te_dynamo/quantized", "te_dynamo/dialect", "te_dynamo/weights", "te_dynamo/inspect"},
    "te_dynamo/testing": {"te_dynamo", "te_dynamo/inspect", "kernels/runtime"},
    "te_dynamo/command_line": {
        "te_dynamo", "te_dynamo/torch_private", "te_dynamo/quantized", "te_dynamo/dialect", "te_dynamo/weights", "te_dynamo/inspect",
        "te_dynamo/accuracy", "kernels/runtime", "lowering", "lowering/inductor",
    },
    "passes/dialect": {"te_dynamo", "te_dynamo/quantized", "te_dynamo/dialect"},
    "passes/torch_ir": {
        "te_dynamo", "te_dynamo/quantized", "te_dynamo/dialect", "te_dynamo/weights", "te_dynamo/operations",
        "te_dynamo/distributed", "passes/dialect", "kernels/gemm", "kernels/runtime",
    },
    "lowering/inductor": {"te_dynamo", "te_dynamo/torch_private", "kernels/runtime"},
    "lowering/extern": {"te_dynamo", "te_dynamo/torch_private", "te_dynamo/dialect", "lowering", "lowering/inductor", "kernels/gemm", "kernels/runtime"},
    "lowering": {
        "te_dynamo", "te_dynamo/torch_private", "te_dynamo/quantized", "te_dynamo/dialect", "lowering/inductor", "lowering/extern",
        *KERNEL_ROOMS,
    },
    "te_dynamo": {"te_dynamo/rules", "te_dynamo/quantized", "te_dynamo/operations", "kernels/runtime"},
}  # fmt: skip
"""Room -> the rooms it may import, itself apart. A folder's own name stands for the files that lie in no room of it.

The files at the top of te_dynamo stand by themselves: test_no_room_reaches_itself_by_a_detour holds their order."""


def modules() -> dict[str, pathlib.Path]:
    """Name -> file of every module that is installed."""
    found = {}
    for folder, package in PACKAGES.items():
        for file in sorted((ROOT / folder).rglob("*.py")):
            parts = file.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([package, *parts]).removesuffix(".__init__")] = file
    return found


MODULES = modules()


def room_of(file: pathlib.Path) -> str:
    """ "kernels/gemm", or "lowering" for a file that lies in no room."""
    parts = file.relative_to(ROOT).parts
    return "/".join(parts[:2]) if len(parts) > 2 else parts[0]


def imported(source: str, package: str) -> list[tuple[int, str]]:
    """(line, absolute name) of every import in `source`, also of those inside functions; not of those for type checkers alone.

    `from a import b` counts as `a.b`: b may be a module.
    """
    tree = ast.parse(source)
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found = []
    for node in ast.walk(tree):
        if node in for_types:
            continue
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                parents = parents[: len(parents) - node.level + 1]
                base = ".".join([*parents, base]).rstrip(".")
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return found


def module_of(name: str) -> str | None:
    """The module of ours that an imported name is, or is in."""
    while name not in MODULES and "." in name:
        name = name.rpartition(".")[0]
    return name if name in MODULES else None


def violations(file: str, source: str) -> list[str]:
    """One line of text for each import of a file that the table forbids."""
    path = ROOT / file
    package = ".".join([PACKAGES[path.relative_to(ROOT).parts[0]], *path.relative_to(ROOT).parts[1:-1]])
    room, bad = room_of(path), []
    for line, name in imported(source, package):
        root = name.split(".")[0]
        if root == "te_dynamo":
            to = module_of(name)
            target = room_of(MODULES[to]) if to and to != "te_dynamo" else "te_dynamo"
            if file not in TOP and target not in {room, *ROOMS[room]}:
                bad.append(f"{file}:{line} imports {name}")
        elif root in PACKAGES:
            bad.append(f"{file}:{line} imports {name}, which is te_dynamo.{root} once installed")
        elif room.startswith("kernels") and root not in {"torch", "triton"} | set(sys.stdlib_module_names):
            bad.append(f"{file}:{line} imports {name}: kernels need torch and triton only")
    return bad


@pytest.mark.parametrize("room", sorted({room_of(file) for file in MODULES.values()} - {"kernels", "passes"}))
def test_imports_follow_the_table(room: str) -> None:
    files = [str(file.relative_to(ROOT)) for file in MODULES.values() if room_of(file) == room]
    assert files
    bad = [line for file in files for line in violations(file, (ROOT / file).read_text())]
    assert not bad, "\n".join(bad)


def node_of(file: pathlib.Path) -> str:
    """The room; a file at the top of te_dynamo stands for itself, and what is in lowering for one room."""
    room = room_of(file)
    return str(file.relative_to(ROOT)) if room == "te_dynamo" else room.replace("lowering/extern", "lowering")


def test_no_room_reaches_itself_by_a_detour() -> None:
    arrows: dict[str, set[str]] = {}
    for name, file in MODULES.items():
        if str(file.relative_to(ROOT)) in TOP:
            continue
        nodes = {node_of(MODULES[target]) for target in targets_of(name)}
        arrows.setdefault(node_of(file), set()).update(nodes - {node_of(file)})
    order = list(graphlib.TopologicalSorter(arrows).static_order())
    assert order.index("kernels/runtime") < order.index("te_dynamo/dialect") < order.index("passes/torch_ir")


@functools.cache
def targets_of(name: str) -> set[str]:
    """The modules that one of ours imports, itself and te_dynamo apart: that gives its public names as they are first used."""
    file = MODULES[name]
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    targets = {module_of(target) for _, target in imported(file.read_text(), package)}
    return {target for target in targets if target and target not in (name, "te_dynamo")}


def test_no_file_reaches_itself() -> None:
    """Imports inside functions count; those for type checkers alone do not. CycleError names the files of a circle."""
    order = list(graphlib.TopologicalSorter({name: targets_of(name) for name in MODULES}).static_order())
    assert order.index("te_dynamo.operations.op") < order.index("te_dynamo.operations.fuser")


def test_no_folder_has_more_than_fifteen_files() -> None:
    counts = Counter(str(file.parent.relative_to(ROOT)) for file in MODULES.values())
    assert not {folder for folder, count in counts.items() if count > 15}


def classes_asked_for(source: str) -> list[str]:
    """The quantizers' classes, the base apart, that isinstance or issubclass is asked for."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and len(node.args) == 2)
    asked = (ast.unparse(call.args[1]) for call in calls if ast.unparse(call.func) in ("isinstance", "issubclass"))
    return [name for text in asked for name in re.findall(r"\w+Quantizer\b", text)]


def test_nobody_asks_a_quantizer_for_its_class() -> None:
    """What a format is and can do is an attribute or a method of its quantizer."""
    assert classes_asked_for("isinstance(q, (a.MXFP8Quantizer, Quantizer)) or q.MXFP8Quantizer") == ["MXFP8Quantizer"]
    asking = {str(file): asked for file in MODULES.values() if (asked := classes_asked_for(file.read_text()))}
    assert not asking, asking


ASKS_FOR_VERSIONS = {"te_dynamo/_compat.py", "kernels/runtime/_gluon.py"}
"""Differences between releases live here; kernels, which import neither from te_dynamo, have a file of their own."""


def questions_of_version(source: str) -> list[str]:
    """One line of text for each comparison with a version of torch or Triton, or question whether they have a name."""
    tree, found = ast.parse(source), []
    theirs = {"torch", "triton"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            theirs |= {a.asname for a in node.names if a.asname and a.name.split(".")[0] in ("torch", "triton")}
        elif (
            isinstance(node, ast.ImportFrom)
            and not node.level
            and (node.module or "").split(".")[0] in ("torch", "triton")
        ):
            theirs |= {a.asname or a.name for a in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            text = ast.unparse(node)
            found += [text] if "__version__" in text or "torch_version" in text else []
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            owner, name = ast.unparse(node.args[0]), node.args[1]
            asks = node.func.id == "hasattr" or (node.func.id == "getattr" and len(node.args) == 3)
            if asks and owner.split(".")[0] in theirs and isinstance(name, ast.Constant):
                found.append(ast.unparse(node))
    return found


def test_one_place_asks_for_versions() -> None:
    asking = {
        str(file.relative_to(ROOT)): asked
        for file in MODULES.values()
        if (asked := questions_of_version(file.read_text())) and str(file.relative_to(ROOT)) not in ASKS_FOR_VERSIONS
    }
    assert not asking, asking


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nif torch.__version__ >= '2.12': pass",
        "import triton\nif tuple(map(int, triton.__version__.split('.'))) > (3, 7): pass",
        "from te_dynamo._compat import torch_version\nif torch_version() == (2, 11): pass",
        "import torch\nhasattr(torch.library, 'wrap_triton')",
        "from torch._inductor import config as options\ngetattr(options, 'cpp_wrapper', False)",
    ],
)
def test_a_question_of_version_is_found(source: str) -> None:
    assert len(questions_of_version(source)) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("kernels/gemm/current.py", "from te_dynamo.errors import TeError"),
        ("kernels/gemm/current.py", "import numpy"),
        ("kernels/quantize/current.py", "from helpers.kernels.gemms import gemm"),
        ("te_dynamo/recipe.py", "def f():\n    from te_dynamo.kernels.quantize import current"),
        ("te_dynamo/dialect/linear.py", "from te_dynamo.lowering.device import read_device"),
        ("te_dynamo/dialect/linear.py", "from te_dynamo.weights.freeze import freeze"),
        ("te_dynamo/options.py", "import te_dynamo.passes.dialect.cse"),
        ("passes/torch_ir/match/patterns/linears/linear.py", "from te_dynamo.kernels.quantize.current import quantize"),
        ("passes/torch_ir/match/patterns/linears/linear.py", "from .....lowering import device"),
        ("passes/dialect/cse.py", "from te_dynamo.passes.torch_ir.match.patterns.linears.linear import match_linear"),
        ("lowering/lower.py", "from te_dynamo.passes.dialect.cse import merge_common_subexpressions"),
        ("lowering/lower.py", "import kernels.gemm"),
    ],
)
def test_a_forbidden_import_is_found(file: str, source: str) -> None:
    assert len(violations(file, source)) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("kernels/gemm/current.py", "import math\nimport torch\nimport triton.language as tl\nfrom . import tiles"),
        ("te_dynamo/dialect/linear.py", "from helpers.kernels.gemms import gemm"),
        ("te_dynamo/backend.py", "from te_dynamo.passes.dialect.cse import cse\nimport te_dynamo.lowering.lower"),
        ("passes/dialect/fusions/norm_quantize.py", "from te_dynamo.dialect import linear\nfrom ..graph import calls"),
        ("lowering/lower.py", "from te_dynamo.kernels.gemm import current\nfrom te_dynamo.errors import TeError"),
    ],
)
def test_an_allowed_import_passes(file: str, source: str) -> None:
    assert violations(file, source) == []


def test_no_test_file_imports_another() -> None:
    """What two of them share is a module of tests/helpers."""
    tests = ROOT / "tests"
    bad = [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in sorted(tests.rglob("*.py"))
        for name in re.findall(r"^\s*(?:from|import) ((?:\w+\.)*test_\w+)", file.read_text(), re.MULTILINE)
    ]
    assert not bad, "\n".join(bad)
