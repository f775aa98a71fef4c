"""An addition in the GEMM whose result it reads: a residual stream's, or that of the gradients of linear layers with one input.

    before    gemm: bf16[M, N] = te.gemm(a, e4m3[row], b, e4m3[row], bf16, fast_accum=False, bias=bias)
              y: bf16[M, N] = aten.add(x, gemm)
    after     y: bf16[M, N] = te.gemm(a, e4m3[row], b, e4m3[row], bf16, fast_accum=False, bias=bias, addend=x)

Bit-equal: the product is rounded before x is added. Where nothing reads x later, y takes its memory (lowering/in_place.py).

The fusion is for GEMMs that the kernel for large products runs: its tensor cores multiply while it reads x. For smaller GEMMs it takes only
sums that are written whoever computes them, because an addition that Inductor fuses with its reader costs no pass. The sum before a norm
that is quantized goes to that norm (norm_add_quantize.py). x must be in memory anyway, with y's shape and dtype. An emulated product, and one
in NVFP4, takes none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_dynamo.dialect.gemm import Gemm, choice_for, gemm
from te_dynamo.dialect.memory import RESHAPES, is_in_memory, must_be_written
from te_dynamo.passes.dialect.graph import call_like, calls, fakes_of, is_plain_sum

_aten = torch.ops.aten
_MODULE = ("nn_module_stack", "fwd_nn_module_stack")
"""Where torch keeps the module that a node is of, in a forward graph and in a backward one."""


def fuse_gemm_add(graph: Graph) -> int:
    """te.gemm + aten.add -> te.gemm with an addend."""
    fired = 0
    for node in calls(graph, _aten.add.Tensor):
        product = _product_of(node)
        if product is None:
            continue
        view, addend = product, _other(node, product)
        while product.target is not gemm:
            product = product.args[0]  # type: ignore[assignment]
        if is_in_memory(addend) and _pays(node, product):
            _fuse(graph, node, product, view, addend)
            fired += 1
    return fired


def _product_of(node: Node) -> Node | None:
    """The operand of a plain sum that is a GEMM's result, or a view of it, and that nothing else reads; the later one of two."""
    if not is_plain_sum(node) or node.args[0] is node.args[1]:
        return None
    products = [operand for operand in node.all_input_nodes if _is_product(operand)]
    return max(products, default=None)


def _is_product(node: Any) -> bool:
    if len(node.users) != 1:
        return False
    if node.target is gemm:
        asked = Gemm.of(node)
        return asked.of_a_linear and asked.a_quantizer.fused_producers
    return node.target in RESHAPES and _is_product(node.args[0])


def _other(node: Node, operand: Node) -> Node:
    (other,) = (arg for arg in node.args if arg is not operand)
    assert isinstance(other, Node)
    return other


def _pays(node: Node, product: Node) -> bool:
    """Whether a launch that adds takes no longer than the GEMM and what Inductor makes of the addition."""
    choice = choice_for(product, "add")
    return choice.specialized or (choice.fused and (must_be_written(node) or _is_added_again(node)))


def _is_added_again(node: Node) -> bool:
    """Whether the sum is the addend of another GEMM that this fusion takes."""
    for user in node.users:
        if user.target in RESHAPES and _is_added_again(user):
            return True
        product = _product_of(user)
        if product is not None and product is not node and (must_be_written(user) or _is_added_again(user)):
            return True
    return False


def _fuse(graph: Graph, node: Node, product: Node, view: Node, addend: Node) -> None:
    """`node` becomes the te.gemm with an addend, or a view of it: it changes in place, as the graph may return it (passes/dialect/graph.py)."""
    replaced = [view]
    while replaced[-1] is not product:
        replaced.append(replaced[-1].args[0])  # type: ignore[arg-type]
    with fakes_of(node):
        value = node.meta["val"].view(product.meta["val"].shape)
    args = tuple(Gemm.of(product)._replace(addend=_as_rows(graph, addend, product, node)))
    node.meta.pop("eager_input_vals", None)  # of the arguments it had
    node.meta.update(
        {key: product.meta[key] for key in _MODULE if key in product.meta}
    )  # a profile names the launch by it
    if view is product:
        node.target, node.args = gemm, args
    else:
        fused = call_like(graph, gemm, args, node)
        fused.meta["val"] = value  # of the memory that the readers of `node` know
        node.target, node.args = view.target, (fused, *view.args[1:])
    for old in replaced:
        graph.erase_node(old)


def _as_rows(graph: Graph, addend: Node, product: Node, before: Node) -> Node:
    """The addend as [M, N], in front of a node."""
    rows, columns = product.meta["val"].shape
    seen: Any = addend
    while isinstance(seen, Node):
        shape = seen.meta["val"].shape
        if len(shape) == 2 and statically_known_true(shape[0] == rows) and statically_known_true(shape[1] == columns):
            return seen
        seen = seen.args[0] if seen.target in RESHAPES else None
    return call_like(graph, _aten.view.default, (addend, [rows if isinstance(rows, int) else -1, columns]), before)
