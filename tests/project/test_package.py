"""The package as it is installed, and beside a checkout."""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import re
import shutil
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

import te_dynamo

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("folder", ["kernels", "lowering", "passes"])
def test_a_checkout_is_whole_wherever_it_is_found_first(folder: str) -> None:
    """Python started at its root finds its te_dynamo before an installed wheel's: not half of each."""
    spec = PathFinder.find_spec(f"te_dynamo.{folder}", te_dynamo.__path__)
    assert spec is not None and spec.origin == str(ROOT / folder / "__init__.py")


def test_what_the_distribution_declares() -> None:
    assert te_dynamo.__version__ == importlib.metadata.version("te-dynamo")
    assert (Path(te_dynamo.__file__).parent / "py.typed").exists()
    (script,) = (e for e in importlib.metadata.entry_points(group="console_scripts") if e.name == "te-dynamo")
    assert callable(script.load())


def test_the_version_is_the_same_everywhere() -> None:
    version = importlib.metadata.version("te-dynamo")
    for name, line in {
        "CITATION.cff": "version: {}",
        "mkdocs.yml": "copyright: te_dynamo {},",
        "CHANGELOG.md": "release, {}.",
    }.items():
        assert line.format(version) in (ROOT / name).read_text(), name


@pytest.mark.parametrize(
    "name", ["compile", "set_recipe", "export", "explain", "compare", "compare_recipes", "save_checkpoint"]
)
def test_help_shows_no_address(name: str) -> None:
    assert " at 0x" not in str(inspect.signature(getattr(te_dynamo, name)))


def test_every_package_is_declared() -> None:
    """setuptools takes only those that are listed."""
    text = (ROOT / "pyproject.toml").read_text()
    declared = set(text.partition("packages = [")[2].partition("]")[0].replace('"', "").replace(",", "").split())
    names = {"te_dynamo": "te_dynamo", **{f: f"te_dynamo.{f}" for f in ("kernels", "lowering", "passes")}}
    found = {
        ".".join([package, *file.relative_to(ROOT / folder).parts[:-1]])
        for folder, package in names.items()
        for file in (ROOT / folder).rglob("__init__.py")
    }
    assert declared == found


@pytest.mark.slow
def test_a_wheel_runs_the_first_example_of_the_readme(tmp_path: Path) -> None:
    """Every file that the package reads is in it: no other test runs without the checkout."""
    checkout = tmp_path / "checkout"
    elsewhere = shutil.ignore_patterns(".*", "build", "out", "*.egg-info", "__pycache__", "tests")
    shutil.copytree(ROOT, checkout, ignore=elsewhere)
    pip = [sys.executable, "-m", "pip", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", tmp_path, checkout], check=True)
    (wheel,) = tmp_path.glob("te_dynamo-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", tmp_path / "installed", wheel], check=True)
    example = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    shown = subprocess.run(
        [sys.executable, "-c", f"{example}\nprint(te_dynamo.__file__)"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert "coverage 100.0% of linear FLOPs" in shown and "4 of 4 linears" in shown
    (estimate,) = re.findall(r"\(([\d.]+)x\)", shown)
    assert f"estimates that they are {estimate} times as fast" in (ROOT / "README.md").read_text()
    assert shown.splitlines()[-1] == str(tmp_path / "installed" / "te_dynamo" / "__init__.py")
