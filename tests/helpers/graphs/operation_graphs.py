"""The graphs of a Sequential with and without one shipped fusion of operations, for their snapshots."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from unittest import mock

import torch
from helpers.graphs.differences import changes

import te_dynamo
from te_dynamo.fusion_registry import Fusion
from te_dynamo.operations import FusibleOperation, OperationFuser, fused, fuser, sequence
from te_dynamo.operations.basic import GroupedLinear
from te_dynamo.recipe import Float8CurrentScaling

ROWS, WIDTH = 32, 64
RECIPE = Float8CurrentScaling()


def graphs(ops: Sequence[FusibleOperation], fusion: Fusion | None) -> dict[str, str]:
    """{"forward": text, "backward": text} of a step of `ops` in FP8 with that fusion alone, inputs left out."""
    torch._dynamo.reset()
    module = te_dynamo.Sequential(*ops, recipe=RECIPE, dtype=torch.bfloat16)
    # Of the graph's own fusions one that finds nothing here: none at all would turn off those of operations too.
    options = {"codegen": "eager", "fusions": ["fuse_shared_input"]}
    x = torch.ones(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    with shipped_alone(fusion), te_dynamo.capture() as captured:
        extra = [extra_input(op) for op in ops if op.num_extra_inputs]
        outputs = torch.compile(module, backend="te", fullgraph=True, options=options)(x, *extra)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
    return {stage: without_inputs(captured[stage]) for stage in ("forward", "backward")}


def extra_input(op: FusibleOperation) -> torch.Tensor:
    """Its one extra input: the ends of equal groups, or what is added."""
    if isinstance(op, GroupedLinear):
        return torch.arange(1, op.num_groups + 1, dtype=torch.int32) * (ROWS // op.num_groups)
    return torch.ones(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)


@contextlib.contextmanager
def shipped_alone(fusion: Fusion | None) -> Iterator[None]:
    """Inside, of the shipped fusions of operations that one is the only one."""
    alone = {kind: tuple(f for f in fusions if f is fusion) for kind, fusions in fused.SHIPPED.items()}
    caches = (fuser._fused, sequence._program)
    for cache in caches:
        cache.cache_clear()
    with mock.patch.dict(fused.SHIPPED, alone):
        yield
    for cache in caches:
        cache.cache_clear()


def without_inputs(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.endswith(" = input"))


def before_and_after(ops: Sequence[FusibleOperation], fusion: Fusion) -> str:
    """Of both halves: the operations without the fusion and with it, the graph without it, and what of that it changes."""
    before, after = graphs(ops, None), graphs(ops, fusion)
    lines = []
    for half in ("forward", "backward"):
        unfused = ", ".join(type(op).__name__ for op in ops)
        with shipped_alone(fusion):
            groups = getattr(OperationFuser(ops, recipe=RECIPE).fuse(), half)
        names = ", ".join(type(group.op).__name__ for group in groups)
        lines += [f"{half} of {unfused}:", before[half], ""]
        if names != unfused:
            lines += [f"{half} of {names}:", changes(before[half], after[half], gone=False) or "the same graph", ""]
        else:
            assert after[half] == before[half] or half == "backward", "only names of what forward saves may change"
    return "\n".join(lines).rstrip()
