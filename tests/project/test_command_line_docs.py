"""docs/command-line.md: each command line of the page is one that the parser takes; those that need no GPU run."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from te_dynamo.command_line import main as command_line

PAGE = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text()
LINES = [line for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
RUN_HERE = [pytest.param(line, id=line) for line in LINES if line.split()[1] in ("explain", "doctor")]


@pytest.mark.parametrize("line", LINES)
def test_it_is_parsed(line: str) -> None:
    program, *arguments = shlex.split(line)
    assert program == "te-dynamo"
    command_line._parser(arguments).parse_args(arguments)


@pytest.mark.slow
@pytest.mark.parametrize("line", RUN_HERE)
def test_it_runs(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "hf:" in line:
        pytest.importorskip("transformers")
    (tmp_path / "models.py").write_text(PAGE.partition("```python\n")[2].partition("```")[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "models", raising=False)
    assert command_line.main(shlex.split(line)[1:]) == 0, capsys.readouterr().err


def test_every_option_is_on_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("explain", "compare", "bench", "generate", "calibrate", "doctor"):
        with pytest.raises(SystemExit):
            command_line.main([command, "--help"])
        for option in re.findall(r"--\w+", capsys.readouterr().out):
            assert option == "--help" or f"`{option}" in PAGE, option
