"""`te-dynamo explain`: show which layers run in FP8, and why the others do not."""

from __future__ import annotations

import argparse
import json
from typing import Any

from te_dynamo.command_line import compiling
from te_dynamo.command_line.device import checked_device
from te_dynamo.command_line.failure import Failure, check_writable
from te_dynamo.command_line.target import load
from te_dynamo.kernels.runtime.target import TARGETS


def add(parser: argparse.ArgumentParser) -> None:
    compiling.add(
        parser, f"cpu, cuda: where the model runs; {', '.join(TARGETS)}: what such a GPU would do, on any machine"
    )
    parser.add_argument(
        "--codegen",
        choices=("inductor", "eager"),
        help="inductor generates code too, and shows what runs each operation (default: eager)",
    )
    parser.add_argument("--html", metavar="FILE", help="also write a page")


def run(parsed: argparse.Namespace) -> int:
    """Prints an Explanation. Fails where the model has no linear."""
    from te_dynamo.inspect.explain import explain

    options = compiling.options_of(parsed, codegen=parsed.codegen)
    if parsed.html is not None:
        check_writable(parsed.html)
    device = checked_device(parsed.device, explained_for=True)
    explained_for = device if device in TARGETS else None
    subject = load(
        parsed, "meta" if explained_for and parsed.target.startswith("hf:") else "" if explained_for else device
    )
    with compiling.compiling(subject, parsed.dynamic):
        found: Any = explain(subject.model, *subject.args, options=options, device=explained_for, **subject.kwargs)
    print(json.dumps(found.to_dict(), indent=1) if parsed.json else found)
    if parsed.html:
        found.to_html(parsed.html)
    if not found.linears:
        raise Failure("the model has no linear, and te_dynamo quantizes nothing else: it runs as with Inductor alone")
    return 0
