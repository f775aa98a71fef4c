"""what each linear's recipe costs in accuracy"""

from __future__ import annotations

import argparse
import json
from typing import Any

from te_dynamo.command_line import compiling
from te_dynamo.command_line.target import load

__all__ = ["add", "run"]


def add(parser: argparse.ArgumentParser) -> None:
    compiling.add(parser, "cpu, cuda: where the model runs")


def run(parsed: argparse.Namespace) -> int:
    """Prints a Comparison."""
    import te_dynamo

    options = compiling.options_of(parsed)
    subject = load(parsed, parsed.device)
    with compiling.compiling(subject, parsed.dynamic):
        compare: Any = te_dynamo.compare  # type: ignore[attr-defined]
        found = compare(subject.model, *subject.args, options=options, **subject.kwargs)
    print(json.dumps(found.to_dict(), indent=1) if parsed.json else found)
    return 0
