"""What `import te_dynamo` and the command's --help load: what is slow to import waits until it is used."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline

import te_dynamo
from te_dynamo import Float8CurrentScalingQuantizer

NEW = """
import sys
before = set(sys.modules)

import te_dynamo
print(*sorted(set(sys.modules) - before), sep="\\n")
"""


FORKS = """
import contextlib, io, json, os, sys
import torch
for program in sys.stdin:
    if not os.fork():
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(json.loads(program), {})
        print(json.dumps(printed.getvalue()))
        break
    if os.wait()[1]:
        print("null", flush=True)
"""


@pytest.fixture(scope="module")
def printed_after_torch() -> Iterator[Callable[[str], str]]:
    """What a program prints that begins with torch imported and no more: a fork each of one process, since that import takes a second."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", FORKS], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin and process.stdout
        given, answers = process.stdin, process.stdout

        def printed(program: str) -> str:
            print(json.dumps(program), file=given, flush=True)
            answer = json.loads(answers.readline())
            assert answer is not None, "its traceback is in what was written to stderr"
            return answer

        yield printed


def test_what_the_import_loads_beside_torch(printed_after_torch: Callable[[str], str]) -> None:
    loaded = printed_after_torch(NEW).split()
    ours_and_others = {name for name in loaded if name.split(".")[0] not in sys.stdlib_module_names}
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
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "te_dynamo"


def test_the_public_surface() -> None:
    assert dir(te_dynamo) == sorted([*te_dynamo.__all__, "__version__"])
    for name in te_dynamo.__all__:
        assert getattr(te_dynamo, name).__name__.rpartition(".")[2] == name
    stub = ast.parse(Path(te_dynamo.__file__).with_suffix(".pyi").read_text())
    names = [alias for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert all(alias.asname == alias.name for alias in names)  # what type checkers take as public
    with pytest.raises(AttributeError, match="module 'te_dynamo' has no attribute 'explian'"):
        te_dynamo.explian  # noqa: B018


def test_the_import_alone_lets_torch_load_a_quantized_tensor(
    tmp_path: Path, printed_after_torch: Callable[[str], str]
) -> None:
    saved = str(tmp_path / "saved.pt")
    torch.save(Float8CurrentScalingQuantizer().quantize(torch.ones(16, 16)), saved)
    code = f"import te_dynamo, torch\nprint(torch.load({saved!r}, weights_only=True).dequantize().sum().item())"
    assert printed_after_torch(code).strip() == "256.0"


@pytest.mark.one_fast_case
@pytest.mark.parametrize("imported", ["te_dynamo.recipe", "te_dynamo.quantized.quantizers"])
def test_what_is_used_registers_what_it_needs(imported: str, printed_after_torch: Callable[[str], str]) -> None:
    """Whatever of the package is imported first."""
    code = f"import torch, {imported}\nx = torch.ones(16, 16)\nq = te_dynamo.quantized.quantizers.Float8CurrentScalingQuantizer()"
    assert printed_after_torch(f"{code}\nprint(q.quantize(x).dequantize().sum().item())").strip() == "256.0"


@pytest.mark.slow
def test_the_backend_is_registered_without_an_import(printed_after_torch: Callable[[str], str]) -> None:
    """No other test has te_dynamo.backend as the first module of the package, where a circle of imports would show."""
    assert (
        printed_after_torch("import torch\nprint(torch._dynamo.lookup_backend('te').__module__)").strip()
        == "te_dynamo.backend"
    )
