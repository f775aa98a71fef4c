"""A backend that changes nothing and records what the real one records: for the tests of inspection."""

import os

from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from te_dynamo.inspect.graphs.capture import GraphInProgress, publish, record
from te_dynamo.report import MatchRecord, Report


def recording_backend(gm, example_inputs, options=None, mode=None):
    """AOTAutograd alone; a linear is "matched" unless its name has "left" in it."""
    progress = GraphInProgress()
    report = Report(notes=[f"options {options}"] if options else [])
    for node in gm.graph.nodes:
        name = getattr(node.target, "__name__", "")
        if node.op == "call_function" and name in ("linear", "silu"):
            report.matches.append(_record(node, name))
    record("match", gm.graph, progress)

    def compiler(stage):
        def compile_graph(gm, example_inputs):
            record(stage, gm.graph, progress)
            report.fusions.append((stage, "silu + quantize", 2))
            report.lowered.append((stage, "te.gemm", "gemm_kernel"))
            return make_boxed_func(gm.forward)

        return compile_graph

    publish(report, progress)
    return aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
    )(gm, example_inputs)


def _record(node, name):
    if name == "silu":
        return MatchRecord(kind="silu", matched=False, reason="for the test", dtype="f32")
    x, weight = (argument.meta["example_value"] for argument in node.args[:2])
    m, n, k = x.numel() // x.shape[-1], *weight.shape
    left = "left" in str(node.args[1])
    return MatchRecord(
        kind="linear",
        module="left" if left else "fc",
        source=f"{os.path.basename(__file__)}:1",
        matched=not left,
        reason="rule 'left' leaves it" if left else "",
        recipe="" if left else "float8_current_scaling",
        shape=(str(m), str(n), str(k)),
        flops=2 * m * n * k,
        dtype="f32",
    )
