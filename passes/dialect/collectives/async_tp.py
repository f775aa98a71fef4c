"""The option "async_tp": torch's operations that send one part of a tensor while another is multiplied, over symmetric memory.

    before    c: (f8e4m3[B*S, K], f32[1]) = te.quantize_with_amax(x, e4m3[row], a)      what fusions/gather_quantize.py leaves
              y: f8e4m3[B*P*S, K] = the bytes of c[0], gathered
              h: bf16[B*P*S, N] = te.gemm(y, c[1], w[0], w[1], bias, bf16, fast_accum)
    after     o: (f8e4m3[B, P*S, K], [bf16[B, P*S, N]]) = symm_mem.fused_all_gather_scaled_matmul(
                  c[0] as [B, S, K], [w[0]^T], c[1], [w[1]], 1, group, [bias], [None], [bf16], [fast_accum])
              y -> o[0], h -> o[1][0]                                                   of all products of y that have one scale an operand

    before    h: bf16[B*P*S, N] = te.gemm(z, z_scale, w[0], w[1], bias, bf16, fast_accum)
              p: bf16[P*B, S, N] = aten.cat(aten.split(h as [B, P*S, N], S, 1))
              r: bf16[B, S, N] = _c10d_functional.wait_tensor(_c10d_functional.reduce_scatter_tensor(p, 'sum', P, group))
    after     r = symm_mem.fused_scaled_matmul_reduce_scatter(z as [B, P*S, K], w[0]^T, z_scale, w[1], 'sum', 1, 1, group, [B, P*S, N], ..)

Tokens of one sequence, or of sequences that are gathered whole, are rows of a matrix and dimension 0 of it. The products are torch's
(cuBLASLt): the sums of te.gemm in another order. A collective stays by itself, and `explain` says why, where no such product stands
beside it, or where torch has no such operation for the device.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from te_dynamo.dialect.gemm import gemm
from te_dynamo.dialect.memory import RESHAPES, before_reshapes, is_copy
from te_dynamo.dialect.quantize import quantize, transpose
from te_dynamo.passes.dialect.collectives.gather_quantize import ALL_GATHER, before_moves
from te_dynamo.passes.dialect.graph import call_like, calls, getitem_after
from te_dynamo.user_code import source_line

__all__ = ["overlap_collectives"]

_aten, _c10d, _symm_mem = torch.ops.aten, torch.ops._c10d_functional, torch.ops.symm_mem

_MOVABLE = {quantize, transpose, operator.getitem, *RESHAPES}
"""What makes a weight ready for a product, beside copies."""

_PARTS = (_aten.split.Tensor, _aten.cat.default)


def overlap_collectives(graph: Graph) -> tuple[int, list[str]]:
    """Rewrites a forward or backward graph in place; returns (operations of torch's made, a sentence for each collective left)."""
    found = [("all-gather", node, _gather_and_multiply(graph, node)) for node in calls(graph, _aten.view.dtype)]
    scatters = calls(graph, _c10d.reduce_scatter_tensor.default)
    found += [("reduce-scatter", node, _multiply_and_scatter(graph, node)) for node in scatters]
    graph.eliminate_dead_code()
    return [reason for *_, reason in found].count(""), [
        f"async_tp leaves the {what} for {source_line(node) or node.name} by itself: {reason}"
        for what, node, reason in found
        if reason
    ]


def _gather_and_multiply(graph: Graph, codes: Node) -> str | None:
    """Why an all-gather stays by itself; "" if it is part of torch's operation now, None if `codes` are not gathered to be multiplied."""
    found = before_moves(codes.args[0], ALL_GATHER)
    readers = [user for user in codes.users if user.target is not transpose and user.args[0] is codes]
    if found is None or not readers:
        return None
    gather, moves = found
    part: Any = gather.args[0]
    shape = [*part.meta["val"].shape]
    dim = _gathered_dim(gather, moves)
    if reason := _why_no_operation("fused_all_gather_scaled_matmul", shape, codes) or min(
        map(_why_no_product, readers)
    ):
        return reason
    if dim is None:
        return "the parts of the ranks do not stand side by side, each whole"
    first = min(codes.users)
    products = [user for user in readers if not _why_no_product(user) and _operands_moved_before(first, user)]
    if not products:
        return "the product's weight is made of other values than weights are"
    if _is_one_matrix(shape, dim):
        dim, shape = 0, [-1, shape[-1]]
    as_codes = call_like(graph, _aten.view.dtype, (part, codes.meta["val"].dtype), first)
    shard = call_like(graph, _aten.view.default, (as_codes, shape), first)
    _, scales, weights, weight_scales, biases, dtypes, fast = (
        [*each] for each in zip(*(product.args for product in products), strict=True)
    )
    columns = [_transposed(graph, weight, first) for weight in weights]
    of_products = biases, [None] * len(products), dtypes, fast
    arguments = shard, columns, scales[0], weight_scales, dim, gather.args[2], *of_products
    fused = call_like(graph, _symm_mem.fused_all_gather_scaled_matmul.default, arguments, first)
    results = getitem_after(fused, 1)
    for index, product in enumerate(products):
        product.replace_all_uses_with(_as_rows(graph, getitem_after(results, index), first))
    codes.replace_all_uses_with(_as_rows(graph, getitem_after(fused, 0), first))
    for node in (*products, codes, *reversed(moves), gather):
        graph.erase_node(node)
    return ""


def _multiply_and_scatter(graph: Graph, scatter: Node) -> str | None:
    """Why a reduce-scatter stays by itself; "" if it is part of torch's operation now, None if it sums no activations."""
    value, how, ranks, group = scatter.args
    if how != "sum" or not isinstance(value, Node) or value.meta["val"].dim() < 2:
        return None
    whole, dim = _before_parts(value, ranks)
    shape = [*whole.meta["val"].shape]
    product = before_reshapes(whole)
    if reason := _why_no_operation("fused_scaled_matmul_reduce_scatter", shape, value) or _why_no_product(product):
        return reason
    a, a_scale, b, b_scale, bias, dtype, fast = product.args
    if dim not in (0, 1) or dim == len(shape) - 1 or shape[-1] != product.meta["val"].shape[1]:
        return "what is scattered is not the tokens of a product"
    if not _is_read_once(product, scatter):
        return "something else reads the product too"
    if _is_one_matrix(shape, dim):
        dim, shape = 0, [*product.meta["val"].shape]
    rows = call_like(graph, _aten.view.default, (a, [*shape[:-1], a.meta["val"].shape[1]]), scatter)
    columns = _transposed(graph, b, scatter)
    arguments = rows, columns, a_scale, b_scale, "sum", dim, dim, group, shape, bias, None, dtype, fast
    fused = call_like(graph, _symm_mem.fused_scaled_matmul_reduce_scatter.default, arguments, scatter)
    (waited,) = scatter.users
    own = call_like(graph, _aten.view.default, (fused, [*waited.meta["val"].shape]), scatter)
    waited.replace_all_uses_with(own)
    graph.erase_node(waited)
    graph.erase_node(scatter)
    return ""


def _why_no_operation(name: str, shape: list[Any], node: Node) -> str:
    device = node.meta["val"].device.type
    if not getattr(_symm_mem, name).default.has_kernel_for_dispatch_key(getattr(torch._C.DispatchKey, device.upper())):
        return f"torch has no {name} for {device}"
    return "" if all(isinstance(size, int) for size in shape) else "its sizes are not known while it is compiled"


def _why_no_product(node: Any) -> str:
    """Why torch's scaled product cannot be what a node is; "" if it can."""
    if node.target is not gemm:
        return f"{str(node.target).removesuffix('.default')} stands beside it, not one te.gemm"
    a, _, b, _, bias, dtype, _ = (arg.meta["val"] if isinstance(arg, Node) else arg for arg in node.args)
    if a.shape[1] != b.shape[1] or any(size % 16 for size in b.shape):
        return f"torch's product takes weights of multiples of 16, not {[*b.shape]}"
    if bias is not None and (bias.dtype != dtype or dtype == torch.float32):
        return f"torch's product adds no bias of {bias.dtype} to {dtype}"
    return ""


def _gathered_dim(gather: Node, moves: list[Node]) -> int | None:
    """The dimension along which the ranks' parts stand side by side in their order; None where they do not."""
    whole = [node for node in moves if node.target not in (_c10d.wait_tensor.default, _aten.slice.Tensor, *RESHAPES)]
    if any(user not in moves for node in (gather, *moves[:-1]) for user in node.users):
        return None
    if not whole:
        return 0
    part: Any = gather.args[0]
    *_, joined = whole
    source, dim = _before_join(joined, gather.args[1])
    if joined.target is not _aten.cat.default or source is None or [*source.args[2:]] not in ([], [0]):
        return None
    same = all(item.meta["val"].shape == part.meta["val"].shape for item in joined.args[0])  # type: ignore[union-attr]
    alone = len(whole) == gather.args[1] + 2  # type: ignore[operator]
    return dim if same and alone and 0 <= dim < part.meta["val"].dim() - 1 else None


def _before_parts(value: Node, ranks: Any) -> tuple[Any, int]:
    """(the tensor whose parts of the ranks, along the dimension, follow each other in `value`, the dimension)."""
    split, dim = _before_join(value, ranks)
    if split is None or dim != 0:
        return value, 0
    return split.args[0], (split.args[2] if len(split.args) > 2 else 0)  # type: ignore[return-value]


def _before_join(node: Node, ranks: Any) -> tuple[Node | None, int]:
    """(the aten.split whose items, all of them, as many as ranks and in order, an aten.cat joins, along which dimension)."""
    if node.target is not _aten.cat.default:
        return None, 0
    parts: Any = node.args[0]
    source = parts[0].args[0]
    in_order = [(source, index) for index in range(ranks)]
    if source.target is not _aten.split.Tensor or len(source.meta["val"]) != ranks:
        return None, 0
    if [part.args for part in parts] != in_order:
        return None, 0
    return source, (node.args[1] if len(node.args) > 1 else 0)  # type: ignore[return-value]


def _is_read_once(product: Node, scatter: Node) -> bool:
    """Whether nothing but a reduce-scatter that is waited for reads a product."""
    if [user.target for user in scatter.users] != [_c10d.wait_tensor.default]:
        return False
    waiting = [product]
    while waiting:
        users = waiting.pop().users.keys() - {scatter}
        if any(user.target not in (*RESHAPES, operator.getitem, *_PARTS) for user in users):
            return False
        waiting += users
    return True


def _operands_moved_before(first: Node, product: Node) -> bool:
    """Puts what makes a product's weight and bias ready before `first`; False, and nothing is moved, where it is anything else."""
    late: set[Node] = set()
    waiting = [arg for arg in product.args[2:5] if isinstance(arg, Node)]
    while waiting:
        node = waiting.pop()
        if node is product.args[0]:
            return False
        if node < first or node in late:
            continue
        if node.target not in _MOVABLE and not is_copy(node):
            return False
        late.add(node)
        waiting += node.all_input_nodes
    for node in sorted(late):
        first.prepend(node)
    return True


def _is_one_matrix(shape: list[int], dim: int) -> bool:
    """Whether a tensor's parts along a dimension are parts of its rows, read as one matrix."""
    return all(size == 1 for size in shape[:dim])


def _transposed(graph: Graph, weight: Any, before: Node) -> Node:
    return call_like(graph, _aten.permute.default, (weight, [1, 0]), before)


def _as_rows(graph: Graph, tensor: Node, before: Node) -> Node:
    """A contiguous [M, K] of a tensor [.., K]."""
    if not tensor.meta["val"].is_contiguous():
        tensor = call_like(graph, _aten.clone.default, (tensor,), before, {"memory_format": torch.contiguous_format})
    return call_like(graph, _aten.view.default, (tensor, [-1, tensor.meta["val"].shape[-1]]), before)
