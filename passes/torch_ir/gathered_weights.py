"""Weights that `te_dynamo.distributed.fp8_all_gather` was asked for: that nothing reads the values of one that travels in FP8, and why
another does not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from te_dynamo.distributed.fp8_all_gather_shard import local_of
from te_dynamo.distributed.fp8_all_gather_weight import WEIGHTS, weight_of
from te_dynamo.errors import UnsupportedError
from te_dynamo.passes.torch_ir.match.patterns.linears.shards import local, of_shards
from te_dynamo.passes.torch_ir.match.where import source_line
from te_dynamo.passes.torch_ir.regions import regions
from te_dynamo.quantized.tensor import QuantizedTensor
from te_dynamo.report import RECORD, Report


def check_gathered(gm: fx.GraphModule, example_inputs: Sequence[Any], report: Report) -> None:
    """Notes why weights travel in the model's precision. Raises UnsupportedError where anything but te.linear reads one that travels in FP8."""
    weights = {position: weight_of(value) for position, value in enumerate(example_inputs)} if WEIGHTS else {}
    report.notes += [
        f"FSDP gathers {w.name} in the model's precision: {w.reason}" for w in weights.values() if w and w.reason
    ]
    travelling = {
        p: weight
        for p, weight in weights.items()
        if weight and isinstance(local_of(example_inputs[p]), QuantizedTensor)
    }
    for region in regions(gm) if travelling else []:
        for placeholder, positions in region.inputs.items():
            found = [travelling[position] for position in positions if position in travelling]
            reader = next(_readers_of_values(placeholder), None) if found else None
            if reader is None:
                continue
            line, record = source_line(reader), reader.meta.get(RECORD)
            raise UnsupportedError(
                f"te_dynamo: {found[0].name} travels in FP8 (fp8_all_gather), and {reader.target} reads its values"
                f"{f' ({line})' if line else ''}{f': {record.reason}' if record and record.reason else ''}. Give torch.compile and "
                "fp8_all_gather the same recipe, or leave the linear out of both by a rule: (path, None)"
            )


def _readers_of_values(weight: fx.Node) -> Iterator[fx.Node]:
    for user in weight.users:
        if user.target in ("to", local):  # autocast's, for the gradient's dtype; this rank's part
            yield from _readers_of_values(user)
        elif user.target not in (getattr, of_shards, torch.ops.te.linear_with_workspace.default) and not isinstance(
            user.target, torch._ops.HigherOrderOperator
        ):
            yield user
