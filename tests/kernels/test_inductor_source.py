"""Inductor copies a kernel and all that it calls into one file, name by name: a name must mean the same in all of them."""

from __future__ import annotations

import ast
import dis
import importlib
import pkgutil
import types
from pathlib import Path

import pytest
import triton

import te_dynamo.kernels

IMPORTED = {"tl", "libdevice", "triton"}
"""The modules that Inductor's file imports."""


def kernels() -> list[triton.JITFunction]:
    """Those of te_dynamo.kernels in Triton's language. Gluon's are not copied: operators of ours launch them."""
    names = [module.name for module in pkgutil.walk_packages(te_dynamo.kernels.__path__, "te_dynamo.kernels.")]
    found = [value for name in names for value in vars(importlib.import_module(name)).values()]
    functions = {id(value): value for value in found if isinstance(value, triton.JITFunction)}
    return [f for f in functions.values() if f.__name__.endswith("_kernel") and not f.is_gluon()]


@pytest.mark.parametrize("kernel", kernels(), ids=lambda kernel: kernel.__name__)
def test_every_name_can_be_copied(kernel: triton.JITFunction) -> None:
    meanings: dict[str, object] = {kernel.__name__: kernel}
    waiting = [kernel]
    while waiting:
        function = waiting.pop().fn
        for name in {i.argval for i in dis.get_instructions(function) if i.opname == "LOAD_GLOBAL"}:
            value = function.__globals__.get(name)
            if isinstance(value, types.ModuleType):
                assert name in IMPORTED, f"{function.__name__} calls through the module {name}"
            elif value is not None and name not in meanings:
                meanings[name] = value
                if isinstance(value, triton.JITFunction):
                    assert value.__name__ == name, f"{function.__name__} calls {value.__name__} by another name, {name}"
                    waiting.append(value)
            elif value is not None:
                same = meanings[name] is value or repr(meanings[name]) == repr(value)  # constants of one value
                assert same, f"{function.__name__} and another function mean different things by {name}"


def test_constants_are_not_unpacked() -> None:
    """Triton 3.9 makes tensors of what a tuple of constants is unpacked into: they are taken by index, as tl.constexpr."""
    unpacked = [
        f"{file.name}:{node.lineno}"
        for file in Path(te_dynamo.kernels.__path__[0]).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Name)
        if node.value.id.isupper()
    ]
    assert not unpacked
