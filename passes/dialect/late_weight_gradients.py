"""The weight gradient of a linear whose input is computed again in backward comes behind the first reader of its input gradient.

The last linear of a checkpointed region is such a one: its product is not made again, its input is, by columns, for wgrad alone.
What that is made of, gate and up of a gated unit, is read once more by the reader of dgrad. There memory is at its peak. In the
order of autograd dw is alive by then too, and so are both copies of dy.

    before    h: (f8e4m3[K, M], f32[1]) = te.gated_quantize(gate, up, 'silu', e4m3[column], ..)
              q: (f8e5m2[M, N], f8e5m2[N, M], f32[1]) = te.quantize(dy, e5m2[row+column])
              dw = te.gemm([q[1], q[2]], .., [h[0], h[1]], ..)
              dh = te.gemm([q[0], q[2]], .., [w[0], w[1]], ..)
              d = te.gated_backward_quantize(dh, gate, up, 'silu', e5m2[row], ..)
    after     q: (f8e5m2[M, N], f32[1]) = te.quantize(dy, e5m2[row])
              dh = te.gemm([q[0], q[1]], .., [w[0], w[1]], ..)
              h: (f8e4m3[K, M], f32[1]) = te.gated_quantize(gate, up, 'silu', e4m3[column], ..)
              d = te.gated_backward_quantize(dh, gate, up, 'silu', e5m2[row], ..)
              c: (f8e5m2[N, M], f32[1]) = te.quantize(dy, e5m2[column])
              dw = te.gemm([c[0], c[1]], .., [h[0], h[1]], ..)

dy is quantized twice where it lives on for something else. Where more stays than bf16 has there (it has dw), other columns that
are read later are made later as well, of tensors that live until then: attention's output, weights. Every bit is the same.

All of this only where the graph's peak is. A graph of many checkpointed blocks has it in the block that comes last in backward, when
the weight gradients of all others are there.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Iterator
from typing import Any

from torch.fx import Graph, Node

from te_dynamo.dialect.define import is_te
from te_dynamo.dialect.memory import byte_hint, is_view
from te_dynamo.dialect.quantize import quantize, quantize_bias_grad
from te_dynamo.dialect.stacked import quantize_stacked
from te_dynamo.passes.dialect.graph import calls, item_users
from te_dynamo.passes.dialect.live_memory import is_kernel, timeline
from te_dynamo.passes.dialect.low_memory import (
    is_callers,
    is_made_of_inputs,
    is_of_a_linear,
    keeps_its_order,
    products_of_a_linear,
)
from te_dynamo.passes.dialect.saved_weights import FEWEST_BYTES
from te_dynamo.passes.dialect.usage import drop_unread_usages, quantize_again

MOST_LINEARS = 8
"""So many are rewritten at most: for each the graph is walked once."""


def make_weight_gradients_late(graph: Graph) -> int:
    """Rewrites a backward graph in place; returns how many linears are rewritten."""
    linears = [] if keeps_its_order(graph) else list(_linears(graph))
    rewritten = 0
    for _ in range(min(len(linears), MOST_LINEARS)):
        peak, _ = max(timeline(graph), key=operator.itemgetter(1))
        linear = next((each for each in linears if each.spans(peak)), None)
        if linear is None:
            break
        linears.remove(linear)
        rewritten += _rewrite(graph, linear)
    if rewritten:
        drop_unread_usages(graph)
    return rewritten


@dataclasses.dataclass
class _Linear:
    """The last linear of a checkpointed region: y = x @ w^T.

    gradient: the quantization of dy, operand: of x; reader: the first kernel that reads dx.
    """

    wgrad: Node
    dgrad: Node
    gradient: Node
    operand: Node
    reader: Node

    def spans(self, kernel: Node) -> bool:
        """Whether a kernel is in the part of the graph that is rewritten."""
        return min(self.wgrad, self.dgrad, self.operand) <= kernel <= self.reader

    def bytes_now(self) -> int:
        """Bytes at the worse of wgrad and dgrad, beside dx and what x and dy are made of."""
        if self.wgrad < self.dgrad:
            return byte_hint(self.wgrad.meta["val"]) + _read_by(self.dgrad)
        return _read_by(self.wgrad) + max(_read_by(self.dgrad), byte_hint(self.wgrad.meta["val"]))

    def bytes_late(self) -> int:
        """The same with the weight gradient behind the reader."""
        kept = 0 if self.quantizes_again() else _read_by(self.wgrad, of=self.gradient)
        return kept + max(_read_by(self.dgrad), _read_by(self.wgrad, of=self.operand))

    def quantizes_again(self) -> bool:
        """Whether dy is there anyway where wgrad is made late."""
        return self.gradient.target in (quantize, quantize_bias_grad) and _stays(self.gradient, self.reader)


def _linears(graph: Graph) -> Iterator[_Linear]:
    for wgrad in products_of_a_linear(graph):
        makers = list(dict.fromkeys(map(_maker, wgrad.all_input_nodes)))
        if len(makers) != 2 or not all(is_te(maker.target) for maker in makers):
            continue
        gradient, operand = makers
        dgrads = list({user for user in _readers(gradient) if user is not wgrad and is_of_a_linear(user)})
        if len(dgrads) != 1 or set(_readers(operand)) != {wgrad} or is_made_of_inputs(operand):
            continue
        reader = min(_kernels_that_read(dgrads[0]))
        first = min(_kernels_that_read(wgrad))
        if (
            wgrad < reader < first
            and operand < reader
            and reader.op != "output"
            and _is_read_later(operand, _in_memory(operand), reader)
        ):
            yield _Linear(wgrad, dgrads[0], gradient, operand, reader)


def _rewrite(graph: Graph, linear: _Linear) -> bool:
    """Returns whether anything is made elsewhere."""
    now, late = linear.bytes_now(), linear.bytes_late()
    in_bf16 = byte_hint(linear.wgrad.meta["val"])
    columns = _make_columns_late(graph, linear) if min(now, late) > in_bf16 + FEWEST_BYTES else 0
    pays = late + FEWEST_BYTES <= now
    if pays:
        _make_late(linear)
    return pays or columns > 0


def _make_late(linear: _Linear) -> None:
    again = linear.quantizes_again()
    for node in _with_what_it_alone_reads(linear.operand):
        linear.reader.prepend(node)
    reads_dx = any(_before_views(x) is linear.dgrad for x in linear.reader.all_input_nodes)
    end = linear.reader.next if reads_dx else linear.reader
    for node in _with_what_reads_it(linear.wgrad, linear.reader):
        end.prepend(node)
    if again:
        quantize_again(linear.gradient, {linear.wgrad})


def _make_columns_late(graph: Graph, linear: _Linear) -> int:
    """Quantizes again what is read before the linear's products and, by columns, behind them, of tensors that are alive there."""
    made = 0
    for node in calls(graph, quantize, quantize_stacked):
        late = {user for user in _readers(node) if user > linear.reader}
        if node > linear.dgrad or node is linear.gradient or not late:
            continue
        saved = sum(byte_hint(items[0].meta["val"]) for items in item_users(node).values() if _all_read_by(items, late))
        if late != set(_readers(node)) and saved >= FEWEST_BYTES and _stays(node, min(late)):
            quantize_again(node, late)
            made += 1
    return made


def _all_read_by(items: list[Node], readers: set[Node]) -> bool:
    return all(user in readers for item in items for user in item.users)


def _maker(node: Any) -> Node:
    return node.args[0] if node.target is operator.getitem else node


def _readers(node: Node) -> Iterator[Node]:
    """Who reads the results of a te operation that has several."""
    for item in node.users:
        yield from item.users


def _read_by(product: Node, of: Node | None = None) -> int:
    """Bytes of a product's operands; of those that `of` makes."""
    return sum(byte_hint(x.meta["val"]) for x in product.all_input_nodes if of is None or _maker(x) is of)


def _stays(quantization: Node, reader: Node) -> bool:
    """Whether what is quantized there stays in memory until the kernel `reader` anyway."""
    return _is_read_later(quantization, map(_before_views, quantization.all_input_nodes), reader)


def _is_read_later(quantization: Node, sources: Iterable[Node], reader: Node) -> bool:
    """Whether all of `sources`, beside small ones, is there anyway until the kernel `reader`: the caller's, or read there or later."""
    return all(
        is_callers(source)
        or byte_hint(source.meta["val"]) < FEWEST_BYTES
        or any(user >= reader for user in _kernels_that_read(source) if user is not quantization)
        for source in sources
    )


def _in_memory(node: Node) -> Iterator[Node]:
    """The tensors in memory of which Inductor computes what a kernel reads."""
    for source in node.all_input_nodes:
        if source.op == "placeholder" or is_kernel(_maker(source)):
            yield source
        else:
            yield from _in_memory(source)


def _kernels_that_read(node: Node) -> Iterator[Node]:
    """The kernels, and the graph's output, that read a tensor or what Inductor computes of it; the next ones first."""
    found = {node}
    waiting = [node]
    for each in waiting:
        for user in each.users:
            if user in found:
                continue
            found.add(user)
            if is_kernel(user) or user.op == "output":
                yield user
            else:
                waiting.append(user)


def _before_views(node: Any) -> Any:
    return _before_views(node.args[0]) if is_view(node) else node


def _with_what_it_alone_reads(node: Node) -> list[Node]:
    """A quantization with its results, and what Inductor computes for it alone before it, in order."""
    found = [node, *node.users]
    for each in found:
        sources = [x for x in each.all_input_nodes if x.op == "call_function" and not is_kernel(_maker(x))]
        found += [x for x in sources if x not in found and set(x.users) <= set(found)]
    return sorted(found)


def _with_what_reads_it(node: Node, end: Node) -> list[Node]:
    """A product and what Inductor computes of it before `end`, in order."""
    found = [node]
    for each in found:
        found += [user for user in each.users if user < end and user not in found]
    return sorted(found)
