"""What `import te_dynamo` and the command's --help load: what is slow to import waits until it is used."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline

import te_dynamo
from te_dynamo import Float8CurrentScalingQuantizer

NEW = """
import sys
import torch
before = set(sys.modules)

import te_dynamo
print(*sorted(set(sys.modules) - before), sep="\\n")
"""


def printed_by(code: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_the_import_loads_beside_torch() -> None:
    ours_and_others = {name for name in printed_by(NEW).split() if name.split(".")[0] not in sys.stdlib_module_names}
    assert_expected_inline(
        "\n".join(sorted(ours_and_others)),
        """\
te_dynamo
te_dynamo.errors
te_dynamo.quantized
te_dynamo.quantized.saved""",
    )


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["exlpain"]])
def test_the_command_answers_without_torch(arguments: list[str]) -> None:
    code = """
import sys
sys.argv[0] = "/usr/local/bin/te-dynamo"
from te_dynamo.command_line.main import main
try:
    main()
except SystemExit:
    pass
print(", ".join({"torch", "rich", "te_dynamo"} & set(sys.modules)))
"""
    assert printed_by(code, *arguments).splitlines()[-1] == "te_dynamo"


def test_the_public_surface() -> None:
    assert dir(te_dynamo) == sorted([*te_dynamo.__all__, "__version__"])
    for name in te_dynamo.__all__:
        assert getattr(te_dynamo, name).__name__.rpartition(".")[2] == name
    stub = ast.parse(Path(te_dynamo.__file__).with_suffix(".pyi").read_text())
    names = [alias for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert all(alias.asname == alias.name for alias in names)  # what type checkers take as public
    with pytest.raises(AttributeError, match="module 'te_dynamo' has no attribute 'explian'"):
        te_dynamo.explian  # noqa: B018


def test_the_import_alone_lets_torch_load_a_quantized_tensor(tmp_path: Path) -> None:
    torch.save(Float8CurrentScalingQuantizer().quantize(torch.ones(16, 16)), tmp_path / "saved.pt")
    code = "import sys, te_dynamo, torch\nprint(torch.load(sys.argv[1], weights_only=True).dequantize().sum().item())"
    assert printed_by(code, str(tmp_path / "saved.pt")).strip() == "256.0"


@pytest.mark.one_fast_case
@pytest.mark.parametrize("imported", ["te_dynamo.recipe", "te_dynamo.quantized.quantizers"])
def test_what_is_used_registers_what_it_needs(imported: str) -> None:
    """Whatever of the package is imported first."""
    code = f"import torch, {imported}\nx = torch.ones(16, 16)\nq = te_dynamo.quantized.quantizers.Float8CurrentScalingQuantizer()"
    assert printed_by(f"{code}\nprint(q.quantize(x).dequantize().sum().item())").strip() == "256.0"


def test_the_backend_is_registered_without_an_import() -> None:
    code = "import torch\nprint(torch._dynamo.lookup_backend('te').__module__)"
    assert printed_by(code).strip() == "te_dynamo.backend"
