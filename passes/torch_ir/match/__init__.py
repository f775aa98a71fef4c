"""Stage 1: finds linears, norms and activations in the user's graph and puts te operations in their place.

The graph is Dynamo's Torch IR: the calls of torch functions and tensor methods that the model made, in its
order, with fake tensors under `meta["example_value"]`. That is as close to the user's words as a graph comes,
so a match here does not depend on how a torch release decomposes anything, and one te operation can own
forward, backward and what is saved.

    bodies.py       walks a graph and the bodies in it (checkpoint, cond, ...), and keeps the records in order
    checkpoint.py   policies of selective checkpointing: asked for what a te operation stands for
    inline.py       a call replaced by the torch calls that a Python function makes for it
    cost.py         whether a linear's GEMMs repay the quantization of its weight
    cpu_bound.py    whether the graph waits for the CPU, so that no linear gains
    autocast.py     whether autocast may be on where a node stands
    readers.py      what "next to a matched linear" means
    memory.py       which memory a node's tensors lie in, noted before anything is rewritten
    writes.py       which tensors a node writes
    mutation.py     why several nodes must not become one: in-place writes and mode changes in between
    where.py        module path and source line of a node
    origins.py      which tensors are made of parameters alone
    root.py         where in the whole model these paths begin, behind a graph break too
    values.py       what a node calls, which tensor it gives, how a te node replaces it

    patterns/linears/
    linear.py       linears: always tried, always recorded
    products.py     the ways in which models write them: F.linear, x @ weight, addmm
    letters.py      einsum, tensordot, inner, weight @ x, baddbmm: a letter for each dimension
    contractions.py what such a product is: a linear, or one of groups, between changes of shape
    convolutions.py 1x1 convolutions and patches
    strides.py      results that the user's views read
    padding.py      a weight whose N or K the GEMMs do not take
    fp32.py         a product whose author casts up to fp32 for it
    stored.py       weights that are codes already
    shards.py       F.linear of DTensors: te.linear of the rank's shards

    patterns/
    compounds.py    calls that hide products (recurrent cells, bilinear): recorded; an einsum of several weights is taken apart
    attention.py    nn.MultiheadAttention, nn.TransformerEncoderLayer: their parts take their place
    grouped.py      F.grouped_mm, torch.bmm by a parameter: a mixture's experts
    experts.py      a loop over experts that each take a piece of one split
    norm.py         F.layer_norm, F.rms_norm: as the next two, only next to a matched linear
    modulated_norm.py  a LayerNorm scaled and shifted for each sample (adaLN)
    written_norm.py RMSNorm and LayerNorm written out in the model
    activation.py   gelu, silu, relu
    formulas.py     activations written out in the model
    gated.py        f(a) * b of such an f, or the sigmoid; F.glu
    sequence.py     a te_dynamo.Sequential or te_dynamo.nn of the user's: its linears recorded

Each matcher takes a node and returns None (not mine) or a MatchRecord (matched, or left with the reason); those of
linears return lists, since one call may hide several. Nothing that looks like a linear is passed over without a
record. An unsupported shape, dtype or device is a reason, not an error.

To add a pattern: write a function of that form for the node at which the pattern is easiest to recognise,
read the other nodes from there by hand (`calls`, `arguments`, `sole_user`), ask `left_as_plain` and
`refuses`, put the te node in with `emit` and `replace` and take the user's nodes out with `erase_unused`; then name the
function in `_AFTER_LINEARS` of bodies.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx
from torch.autograd import forward_ad

from te_dynamo.options import Options
from te_dynamo.passes.torch_ir.match.bodies import Matcher
from te_dynamo.passes.torch_ir.match.cost import kept_weights_known
from te_dynamo.passes.torch_ir.match.cpu_bound import cpu_known
from te_dynamo.passes.torch_ir.match.mutation import facts_known
from te_dynamo.passes.torch_ir.match.origins import origins_known
from te_dynamo.passes.torch_ir.match.patterns.sequence import fused_operations
from te_dynamo.passes.torch_ir.match.root import also_run_at, in_whole_model
from te_dynamo.report import Report
from te_dynamo.user_code import traced_code

__all__ = ["match"]


def match(
    gm: fx.GraphModule,
    options: Options,
    report: Report,
    example_inputs: Sequence[Any] = (),
    linears_only: bool = False,
) -> None:
    """Rewrites Dynamo's graph `gm` in place and appends a MatchRecord to `report.matches` for every linear
    and for every norm and activation that was matched or left.

    example_inputs: what Dynamo gives a backend beside the graph; the parameters among them tell where in the whole model
    the graph's paths begin, and which weights are frozen.
    linears_only: norms and activations stay what the user wrote.
    """
    by_step = options.weight_cache == "step"
    with (
        in_whole_model(gm.graph, example_inputs),
        kept_weights_known(gm, example_inputs, by_step),
        origins_known(),
        facts_known(gm),
    ):
        matcher = Matcher(options, linears_only)
        with cpu_known(gm, options, matcher.recipe_for, example_inputs, report):
            records = matcher.match(gm, outside=_forward_mode(gm))
        for record in records:
            record.shared = also_run_at(record.module)
        report.matches.extend(records)
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            report.fusions.extend(fused_operations(module.graph))


def _forward_mode(gm: fx.GraphModule) -> str:
    """Why nothing is rewritten where the model is called with tangents, or makes them: te operations would lose them. "" elsewhere."""
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import GlobalStateSource

    if traced_code():  # Dynamo compiles anew inside of it, and outside
        install_guard(GlobalStateSource().make_guard(GuardBuilder.DUAL_LEVEL))
    within = any(getattr(node.target, "__name__", "") == "_enter_dual_level" for node in gm.graph.nodes)
    return "inside torch.autograd.forward_ad.dual_level" if within or forward_ad._current_level >= 0 else ""
