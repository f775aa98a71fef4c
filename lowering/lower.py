"""The last stage: every te operation of a graph becomes what runs it.

On a device with kernels, the operation's own launcher is traced in its place: the graph then holds Triton launches that
Inductor writes into its code, without a dispatcher call. A large GEMM stays, for extern_gemm.py to have called. Elsewhere the
operation stays an opaque call whose implementation is the reference. An operation with no kernel at all (te.add_bias,
te.bias_grad) is always traced: its aten operations are Inductor's to fuse.
"""

from __future__ import annotations

import contextlib
import operator
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten

from te_dynamo.errors import LoweringError
from te_dynamo.kernels.availability import kernels_available
from te_dynamo.lowering.amax import amax_by_rows, written_by_inductor
from te_dynamo.lowering.extern_gemm import is_extern
from te_dynamo.ops import KERNELS, is_te
from te_dynamo.ops.define import REFERENCE_ONLY
from te_dynamo.ops.quantize import quantize, quantize_with_amax
from te_dynamo.quantizers import Float8CurrentScalingQuantizer

__all__ = ["lower"]


def lower(graph: Graph) -> list[tuple[str, str]]:
    """Rewrites in place; returns (operation, what runs it) of each te node. Raises LoweringError for one it cannot lower."""
    done = []
    waiting = deque(_te_nodes(graph.nodes))
    while waiting:
        node = waiting.popleft()
        name = str(node.target).removesuffix(".default")
        device = _device(node)
        if node.target not in KERNELS:
            raise LoweringError(f"{name} has no implementation to lower to{_where(node)}")
        if node.target in REFERENCE_ONLY:
            waiting.extendleft(reversed(_te_nodes(_inline(graph, node))))  # te.linear is made of te operations
            done.append((name, "Inductor"))
        elif kernels_available(device).ok and is_extern(node):
            done.append((name, "Gluon"))
        elif kernels_available(device).ok:
            waiting.extendleft(reversed(_te_nodes(_inline(graph, node))))  # an opaque operation calls others
            done.append((name, "Triton"))
        else:
            done.append((name, f"reference ({kernels_available(device).reason})"))
    graph.lint()
    return done


def _te_nodes(nodes: Iterable[Node]) -> list[Node]:
    return [node for node in nodes if node.op == "call_function" and is_te(node.target)]


def _launches(node: Node) -> Callable[..., Any]:
    """What is traced in place of `node`: a function of the operation's own arguments."""
    if _takes_amax(node) and written_by_inductor(node.args[0]):
        return lambda x, quantizer: quantize_with_amax(x, quantizer, amax_by_rows(x))
    assert isinstance(node.target, torch._ops.OpOverload)
    return KERNELS[node.target]


def _takes_amax(node: Node) -> bool:
    """Whether it quantizes with one scale a tensor, which an amax known beforehand decides."""
    return node.target is quantize and isinstance(node.args[1], Float8CurrentScalingQuantizer)


def _inline(graph: Graph, node: Node) -> list[Node]:
    """Replaces `node` by the traced nodes of its implementation, and returns them in order."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.functional_tensor import dispatch_functionalize

    launches = _launches(node)
    flat, spec = tree_flatten((node.args, node.kwargs))
    inputs = [a for a in flat if isinstance(a, Node)]
    constant = [None if isinstance(a, Node) else a for a in flat]
    is_node = [isinstance(a, Node) for a in flat]

    def implementation(*values: Any) -> list[Any]:
        given = iter(values)
        args, kwargs = spec.unflatten([next(given) if dynamic else c for dynamic, c in zip(is_node, constant)])  # noqa: B905
        results = launches(*args, **kwargs)
        return [results] if isinstance(results, torch.Tensor) else list(results)

    values = [n.meta["val"] for n in inputs]
    trace = make_fx(dispatch_functionalize(implementation), select_decomp_table(), tracing_mode="real")
    try:
        with detect_fake_mode(values) or contextlib.nullcontext():
            traced = trace(*values)
    except Exception as error:
        raise LoweringError(f"{node.target} could not be lowered{_where(node)}: {error}") from error
    copies = _copy_into(graph, traced, node, inputs)
    output = next(n for n in traced.graph.nodes if n.op == "output")
    _replace(graph, node, [copies[result] for result in output.args[0]])
    return [copies[n] for n in traced.graph.nodes if n.op == "call_function"]


def _copy_into(graph: Graph, traced: torch.fx.GraphModule, node: Node, inputs: list[Node]) -> dict[Node, Node]:
    """Copies the traced nodes before `node`; returns the copy of each, the placeholders' being `inputs`."""
    placeholders = [n for n in traced.graph.nodes if n.op == "placeholder"]
    copies: dict[Node, Node] = dict(zip(placeholders, inputs, strict=True))
    for original in traced.graph.nodes:
        if original.op in ("placeholder", "output"):
            continue
        if original.op == "get_attr":
            raise LoweringError(f"{node.target} was traced with a tensor constant{_where(node)}")
        with graph.inserting_before(node):
            copied = graph.node_copy(original, lambda n: copies[n])
        copied.meta = {
            **{k: node.meta[k] for k in ("stack_trace", "nn_module_stack") if k in node.meta},
            **original.meta,
        }
        copies[original] = copied
    return copies


def _replace(graph: Graph, node: Node, results: list[Node]) -> None:
    if isinstance(node.meta["val"], torch.Tensor):
        node.replace_all_uses_with(results[0])
    else:
        for reader in list(node.users):
            if reader.target is not operator.getitem:
                raise LoweringError(
                    f"{node.target}: its results are read by {reader.target}, not by index{_where(node)}"
                )
            reader.replace_all_uses_with(results[_index(reader)])
            graph.erase_node(reader)
    graph.erase_node(node)


def _index(reader: Node) -> int:
    index = reader.args[1]
    assert isinstance(index, int)
    return index


def _device(node: Node) -> torch.device:
    for arg in node.all_input_nodes:
        value = arg.meta.get("val")
        if isinstance(value, torch.Tensor):
            return value.device
    raise LoweringError(f"{node.target} reads no tensor{_where(node)}")


def _where(node: Node) -> str:
    """at "file.py", line 17, in forward: the user's line, from torch's stack trace."""
    lines = [
        line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip().startswith("File")
    ]
    return f" ({lines[-1]})" if lines else ""
