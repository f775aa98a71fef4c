"""The import table of docs/architecture.md: which folder may import which."""

from __future__ import annotations

import ast
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]

# Folder in the repository -> the package it is installed as.
PACKAGES = {
    "te_dynamo": "te_dynamo",
    "kernels": "te_dynamo.kernels",
    "passes": "te_dynamo.passes",
    "lowering": "te_dynamo.lowering",
}

# The only files of te_dynamo/ that know passes and lowering: the pipeline, what calls it, the public names.
TOP = {"__init__.py", "backend.py", "explain.py", "doctor.py", "__main__.py", "testing.py"}


def layer_of(module: str) -> str:
    """The folder that holds an imported te_dynamo module."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in PACKAGES else "te_dynamo"


def allowed(folder: str, path: pathlib.PurePath) -> set[str]:
    """The folders that the file at `path`, relative to `folder`, may import."""
    if folder == "kernels":
        return {"kernels"}
    if folder == "passes":
        return {"passes", "te_dynamo"}
    if folder == "lowering":
        return {"lowering", "te_dynamo", "kernels"}
    if path.parts[0] == "ops":
        return {"te_dynamo", "kernels"}
    if str(path) == "backend.py":  # the pipeline knows every stage, and which devices have kernels
        return set(PACKAGES)
    return {"te_dynamo", "passes", "lowering"} if str(path) in TOP else {"te_dynamo"}


def imported_modules(source: str, package: str) -> list[tuple[int, str]]:
    """(line, absolute module name) of every import in `source`, also of those inside functions.

    `from a import b` counts as `a.b`: b may be a module, and as a name in `a` it has the same layer.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
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


def violations(folder: str, path: pathlib.PurePath, source: str) -> list[str]:
    """One line of text for each import of a file that the table forbids."""
    package = ".".join([PACKAGES[folder], *path.parent.parts])
    bad = []
    for line, module in imported_modules(source, package):
        root = module.split(".")[0]
        if root == "te_dynamo":
            if layer_of(module) not in allowed(folder, path):
                bad.append(f"{folder}/{path}:{line} imports {module}")
        elif root in PACKAGES:
            bad.append(f"{folder}/{path}:{line} imports {module}, which is te_dynamo.{root} once installed")
        elif folder == "kernels" and root not in {"torch", "triton"} | set(sys.stdlib_module_names):
            bad.append(f"{folder}/{path}:{line} imports {module}: kernels need torch and triton only")
    return bad


@pytest.mark.parametrize("folder", PACKAGES)
def test_imports_point_one_way(folder: str) -> None:
    base = ROOT / folder
    files = sorted(base.rglob("*.py"))
    assert files, f"no source in {base}"
    bad = [line for f in files for line in violations(folder, f.relative_to(base), f.read_text())]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize(
    ("folder", "path", "source"),
    [
        ("kernels", "gemm.py", "from te_dynamo.errors import TeError"),
        ("kernels", "gemm.py", "import numpy"),
        ("te_dynamo", "recipe.py", "def f():\n    from te_dynamo.kernels import quantize"),
        ("te_dynamo", "recipe.py", "from te_dynamo import kernels"),
        ("te_dynamo", "ops/linear.py", "from te_dynamo.lowering.device import read_device"),
        ("te_dynamo", "options.py", "import te_dynamo.passes.cse"),
        ("passes", "match/linear.py", "from te_dynamo.kernels.quantize.current import quantize"),
        ("passes", "match/linear.py", "from ...lowering import device"),
        ("lowering", "linear.py", "from te_dynamo.passes.cse import cse"),
        ("lowering", "linear.py", "import kernels.gemm"),
    ],
)
def test_a_forbidden_import_is_found(folder: str, path: str, source: str) -> None:
    assert len(violations(folder, pathlib.PurePath(path), source)) == 1


@pytest.mark.parametrize(
    ("folder", "path", "source"),
    [
        (
            "kernels",
            "gemm.py",
            "import math\nimport torch\nimport triton.language as tl\nfrom . import tiles",
        ),
        ("te_dynamo", "ops/linear.py", "from te_dynamo.kernels.gemm.current import gemm"),
        ("te_dynamo", "backend.py", "from te_dynamo.passes.cse import cse\nimport te_dynamo.lowering"),
        ("passes", "fusions/norm.py", "from te_dynamo.ops import linear\nfrom ..match import walk"),
        ("lowering", "linear.py", "from te_dynamo.kernels import gemm\nfrom te_dynamo.errors import TeError"),
    ],
)
def test_an_allowed_import_passes(folder: str, path: str, source: str) -> None:
    assert violations(folder, pathlib.PurePath(path), source) == []
