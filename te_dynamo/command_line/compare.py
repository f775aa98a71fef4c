"""`te-dynamo compare`: measure what each linear's recipe costs in accuracy."""

from __future__ import annotations

import argparse
import json

from te_dynamo.command_line import compiling
from te_dynamo.command_line.device import checked_device
from te_dynamo.command_line.failure import check_writable
from te_dynamo.command_line.target import load


def add(parser: argparse.ArgumentParser) -> None:
    compiling.add(parser, "cpu, cuda: where the model runs")
    parser.add_argument(
        "--html", metavar="FILE", help="also write explain's page, with these numbers as its tab Numerics"
    )


def run(parsed: argparse.Namespace) -> int:
    """Prints a Comparison."""
    from te_dynamo.accuracy.compare import compare
    from te_dynamo.inspect.explain import explain

    options = compiling.options_of(parsed)
    if parsed.html is not None:
        check_writable(parsed.html)
    subject = load(parsed, checked_device(parsed.device))
    with compiling.compiling(subject, parsed.dynamic):
        found = compare(subject.model, *subject.args, options=options, **subject.kwargs)
        if parsed.html:
            explained = explain(subject.model, *subject.args, options=options, **subject.kwargs)
            explained.to_html(parsed.html, comparison=found)
    print(json.dumps(found.to_dict(), indent=1) if parsed.json else found)
    return 0
