"""te_dynamo: FP8 training and inference for unmodified PyTorch models, through `torch.compile(model, backend="te")`.

A public name is imported when it is first used: `__init__.pyi` says from where.
"""

import ast
import os
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if (
    __name__ != "te_dynamo"
):  # what walks through a checkout's packages, as TORCH_LOGS="te_dynamo" does, finds this one in itself
    raise ImportError("te_dynamo: this package has one name, te_dynamo")
if not (Path(__file__).parent / "kernels").is_dir():  # in a checkout, whose other code folders lie beside this one
    __path__.append(str(Path(__file__).parents[1]))

try:
    __version__ = version("te-dynamo")
except PackageNotFoundError:  # a checkout that nobody has installed
    __version__ = "0"

_HOMES = {
    alias.name: node.module
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home not in (None, "te_dynamo"):
        value = globals()[name] = getattr(import_module(home), name)
        return value
    if name.startswith("_") or find_spec(f"te_dynamo.{name}") is None:
        raise AttributeError(f"module 'te_dynamo' has no attribute {name!r}")
    return import_module(f"te_dynamo.{name}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


if os.path.basename(next(iter(sys.argv), "")) != "te-dynamo":  # the command imports torch when a model is there
    import_module("te_dynamo.quantized.saved")
