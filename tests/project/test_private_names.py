"""te_dynamo/torch_private/table.py names every private part of torch and Triton that the code touches, and where."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from te_dynamo.torch_private import table
from te_dynamo.torch_private.private import Private
from te_dynamo.torch_private.table import DOCUMENTED, TABLE

ROOT = Path(__file__).parents[2]

FILES = {
    str(file.relative_to(ROOT)): file.read_text()
    for folder in ("te_dynamo", "kernels", "passes", "lowering")
    for file in sorted((ROOT / folder).rglob("*.py"))
    if file.name != "table.py"
}

_DOTTED = re.compile(r"(torch|triton)(\.\w+)+")


def is_private(name: str) -> bool:
    """Whether a part of a dotted name begins with one underscore, and it is neither within what PyTorch documents nor a module of that."""
    documented = any(f"{name}.".startswith(f"{known}.") or known.startswith(f"{name}.") for known in DOCUMENTED)
    return not documented and any(re.match(r"_(?!_)", part) for part in name.split("."))


@functools.cache
def nodes_of(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


def touched(source: str, own: set[str]) -> set[str]:
    """The private names of a file, dotted: of torch's and Triton's modules, and "._version" of an object that may be of theirs.

    own: attributes that our classes define, which count as ours on any object.
    """
    theirs: dict[str, str] = {}  # what a name of the file stands for, dotted; a module of somebody else's for itself
    found: set[str] = set()
    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            for alias in node.names:
                theirs[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
                found.add(alias.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("torch", "triton"):
            theirs |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("torch.ops."):
            theirs |= {ast.unparse(target): ast.unparse(node.value) for target in node.targets}
    for node in nodes_of(source):
        if isinstance(node, ast.Attribute):
            root, _, rest = ast.unparse(node).partition(".")
            if root in theirs and re.fullmatch(r"[\w.]+", rest):
                found.add(f"{theirs[root]}.{rest}")
            elif node.attr not in own:
                found.add(f".{node.attr}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _DOTTED.fullmatch(node.value):
            found.add(node.value)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            found |= {f".{a.value}" for a in node.args[1:2] if isinstance(a, ast.Constant) and a.value not in own}
    return {name for name in found if name.startswith((".", "torch.", "triton.")) and is_private(name)}


def attributes_of_ours(sources: Iterable[str]) -> set[str]:
    """Names that a class of ours gives its objects: methods, fields, what is assigned on `self`."""
    found: set[str] = set()
    for node in (node for source in sources for node in nodes_of(source)):
        if isinstance(node, ast.ClassDef):
            found |= {inner.name for inner in node.body if isinstance(inner, ast.FunctionDef)}
            found |= {ast.unparse(inner.target) for inner in node.body if isinstance(inner, ast.AnnAssign)}
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
    return found


@functools.cache
def ours() -> set[str]:
    return attributes_of_ours(FILES.values()) | {
        "_scale_inv",  # a QuantizedTensor's, set by its name
        "_is_hf_initialized",  # of transformers
    }


SHARED = {"_buffers", "_version"}
"""What torch's objects have too."""

NAMES = {name: row for row in TABLE for name in row.names}


def known_as(name: str) -> str:
    """The name in the table that a touched name is, or is beneath: the most special one. "" without any; of ".attribute" the object is unknown."""
    if name.startswith("."):
        return next((known for known in NAMES if known.endswith(name)), "")
    return max((known for known in NAMES if name == known or name.startswith(f"{known}.")), key=len, default="")


def is_on_the_way(name: str) -> bool:
    """Whether it is a module of a name in the table."""
    return any(known.startswith(f"{name}.") for known in NAMES)


def test_each_private_name_has_a_row_that_says_where_it_is_touched() -> None:
    wrong = {}
    for file, source in FILES.items():
        names = touched(source, ours() - SHARED)
        unknown = sorted(name for name in names if not known_as(name) and not is_on_the_way(name))
        rows = [NAMES[known] for known in map(known_as, names) if known in NAMES]
        elsewhere = [row.name for row in rows if not file.startswith(tuple(row.owner.split(", ")))]
        if unknown or elsewhere:
            wrong[file] = f"no row of {unknown}; rows of {elsewhere} name other files"
    nodes_of.cache_clear()  # some hundred thousand
    assert not wrong, "te_dynamo/torch_private/table.py names what each file touches"


CONSTANTS = {id(value): name for name, value in vars(table).items() if isinstance(value, Private)}


@functools.cache
def words_of(owner: str) -> set[str]:
    """All in the files of an owner of rows, "" for everything."""
    return set(re.findall(r"\w+", "\n".join(source for file, source in FILES.items() if file.startswith(owner))))


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_each_row_is_touched_by_its_owners(row: Private) -> None:
    for owner in row.owner.split(", "):
        words = words_of(owner)
        used = [name for name in row.names if name.rpartition(".")[2] in words]
        assert used or CONSTANTS.get(id(row)) in words, f"{owner} touches nothing of the row {row.name}"
    unused = [name for name in row.names if is_private(name) and name.rpartition(".")[2] not in words_of("")]
    assert unused in ([], [row.name] if id(row) in CONSTANTS else [])


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_this_release_has_it(row: Private) -> None:
    assert row.state in ("active", "not needed")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch\ntorch._C._new_thing()", "torch._C._new_thing"),
        ("from torch._inductor import new_module as m\nm.thing()", "torch._inductor.new_module.thing"),
        ("def f(x):\n    import torch._inductor.new_module", "torch._inductor.new_module"),
        ("def f(x):\n    return x._new_attribute", "._new_attribute"),
        ("def f(x):\n    return getattr(x, '_new_attribute', None)", "._new_attribute"),
        ("from unittest import mock\nmock.patch('torch.cuda._new_thing')", "torch.cuda._new_thing"),
    ],
)
def test_a_private_name_is_found(source: str, name: str) -> None:
    assert name in touched(source, ours()) and not known_as(name) and not is_on_the_way(name)


def test_what_is_documented_or_ours_is_none() -> None:
    source = (
        "import sys, torch\ntorch._dynamo.config.x = torch.ops.aten._to_copy\nself._kept = sys._getframe()\nself._kept"
    )
    assert touched(source, attributes_of_ours([source])) == set()
