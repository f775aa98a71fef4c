"""The text of graphs: snapshots that must be the same on every supported torch."""

import dataclasses
import operator
import re

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

from te_dynamo.quantized.quantizers import Float8CurrentScalingQuantizer
from te_dynamo.testing import graph_text

OUTSIDE = torch.library.Library("te_test", "DEF")
OUTSIDE.define("split(Tensor x, float factor, bool fast, int count=2, bool flag=False) -> Tensor[]")
OUTSIDE.impl("split", lambda x, factor, fast, count=2, flag=False: list(x.chunk(count)), "CompositeExplicitAutograd")


def texts(model, *inputs, dynamic=False):
    """{stage: text} of `model`, compiled by AOTAutograd alone and run forward and backward."""
    found = {}

    def backend(gm, example_inputs):
        found["torch"] = graph_text(gm)

        def compiler(stage):
            def compile_graph(gm, example_inputs):
                found[stage] = graph_text(gm.graph)
                return gm.forward

            return compile_graph

        return aot_autograd(fw_compiler=compiler("forward"), bw_compiler=compiler("backward"))(gm, example_inputs)

    torch._dynamo.reset()
    outputs = torch.compile(model, backend=backend, dynamic=dynamic)(*inputs)
    sum(out.sum() for out in torch.utils._pytree.tree_leaves(outputs)).backward()
    return found


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(8, 16, dtype=torch.bfloat16)
        self.blocks = nn.ModuleList([nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)])
        self.register_buffer("scale", torch.ones(8, dtype=torch.bfloat16))

    def forward(self, x):
        left, right = self.fc1(x * self.scale).chunk(2, -1)
        return self.blocks[0](F.silu(left)) * right.transpose(0, 1).reshape(x.shape[0], -1)[:, None, 0].to(x.dtype)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return x + checkpoint(lambda y: F.relu(self.fc(y)), x, use_reentrant=False)


def test_torch_ir_and_aten():
    found = texts(MLP(), torch.randn(8, 8, dtype=torch.bfloat16, requires_grad=True))
    assert_expected_inline(
        found["torch"],
        """\
scale: bf16[8] = input
x: bf16[8, 8] = input
fc1.weight: bf16[16, 8] = input
fc1.bias: bf16[16] = input
blocks.0.weight: bf16[8, 8] = input
mul: bf16[8, 8] = x * scale
linear: bf16[8, 16] = F.linear(mul, fc1.weight, fc1.bias)
chunk: (bf16[8, 8], bf16[8, 8]) = linear.chunk(2, -1)
silu: bf16[8, 8] = F.silu(chunk[0])
linear_1: bf16[8, 8] = F.linear(silu, blocks.0.weight, None)
transpose: bf16[8, 8] = chunk[1].transpose(0, 1)
reshape: bf16[8, 8] = transpose.reshape(8, -1)
getitem: bf16[8, 1] = reshape[:, None, 0]
to: bf16[8, 1] = getitem.to(bf16)
mul_1: bf16[8, 8] = linear_1 * to
return mul_1""",
    )
    assert_expected_inline(
        found["forward"],
        """\
primals_1: bf16[8] = input
primals_2: bf16[8, 8] = input
primals_3: bf16[16, 8] = input
primals_4: bf16[16] = input
primals_5: bf16[8, 8] = input
mul: bf16[8, 8] = aten.mul(primals_2, primals_1)
t: bf16[8, 16] = aten.t(primals_3)
addmm: bf16[8, 16] = aten.addmm(primals_4, mul, t)
split: (bf16[8, 8], bf16[8, 8]) = aten.split(addmm, 8, -1)
silu: bf16[8, 8] = aten.silu(split[0])
t_1: bf16[8, 8] = aten.t(primals_5)
mm: bf16[8, 8] = aten.mm(silu, t_1)
transpose: bf16[8, 8] = aten.transpose(split[1], 0, 1)
view: bf16[8, 8] = aten.view(transpose, [8, 8])
unsqueeze: bf16[8, 1, 8] = aten.unsqueeze(view, 1)
select: bf16[8, 1] = aten.select(unsqueeze, 2, 0)
mul_1: bf16[8, 8] = aten.mul(mm, select)
return mul_1, primals_1, mul, t, split[0], silu, t_1, mm, select""",
    )


def test_dynamic_sizes_are_renumbered():
    found = texts(nn.Linear(8, 4), torch.randn(6, 5, 8, requires_grad=True), dynamic=True)
    assert_expected_inline(
        found["torch"],
        """\
weight: f32[4, 8] = input
bias: f32[4] = input
s0: int = input
s1: int = input
args_0: f32[s0, s1, 8] = input
linear: f32[s0, s1, 4] = F.linear(args_0, weight, bias)
return linear""",
    )
    assert_expected_inline(
        found["backward"],
        """\
s0: int = input
s1: int = input
mul: s0*s1 = input
view: f32[s0*s1, 8] = input
t: f32[8, 4] = input
tangents_1: f32[s0, s1, 4] = input
view_1: f32[s0*s1, 4] = aten.view(tangents_1, [mul, 4])
t_1: f32[4, 8] = aten.t(t)
mm: f32[s0*s1, 8] = aten.mm(view_1, t_1)
t_2: f32[4, s0*s1] = aten.t(view_1)
mm_1: f32[4, 8] = aten.mm(t_2, view)
t_3: f32[8, 4] = aten.t(mm_1)
sum: f32[1, 4] = aten.sum(view_1, [0], keepdim=True)
view_2: f32[4] = aten.view(sum, [4])
t_4: f32[4, 8] = aten.t(t_3)
view_3: f32[s0, s1, 8] = aten.view(mm, [s0, s1, 8])
return t_4, view_2, None, None, view_3""",
    )


def test_checkpoint_body_is_indented():
    found = texts(Checkpointed(), torch.randn(4, 8, requires_grad=True))
    assert_expected_inline(
        found["torch"],
        """\
x: f32[4, 8] = input
fc.weight: f32[8, 8] = input
fc.bias: f32[8] = input
tag_activation_checkpoint: (f32[4, 8],) = tag_activation_checkpoint(body, x, fc.weight, fc.bias, use_reentrant=False)
    body:
        x: f32[4, 8] = input
        fc.weight: f32[8, 8] = input
        fc.bias: f32[8] = input
        linear: f32[4, 8] = F.linear(x, fc.weight, fc.bias)
        relu: f32[4, 8] = F.relu(linear)
        return relu
add: f32[4, 8] = x + tag_activation_checkpoint[0]
return add""",
    )


def hand_made():
    """A graph with a list output, constants, and arguments given every way the schema allows."""
    graph = fx.Graph()
    x = graph.placeholder("L_self_modules_blocks_modules_0_parameters_weight_")
    x.meta["example_value"] = torch.empty(4, 6, dtype=torch.float8_e5m2, device="meta")
    saved = graph.placeholder("getitem_17")
    split = torch.ops.te_test.split.default
    first = graph.call_function(split, (x, 2.0), {"fast": True})
    first.meta["val"] = [torch.empty(2, 6), torch.empty(2, 6, dtype=torch.uint8)]
    second = graph.call_function(split, (x,), {"factor": 2.0, "fast": False, "flag": True, "count": 2})
    item = graph.call_function(operator.getitem, (first, 1))
    config = Float8CurrentScalingQuantizer(columnwise=False)
    last = graph.call_function(F.dropout, (item, config, torch.float8_e4m3fn, None, saved), {"training": [1, (x,)]})
    graph.output((last, graph.call_function(operator.getitem, (second, 0))))
    return graph


def test_hand_made_graph():
    assert_expected_inline(
        graph_text(hand_made()),
        """\
blocks.0.weight: f8e5m2[4, 6] = input
saved = input
split: (f32[2, 6], u8[2, 6]) = te_test.split(blocks.0.weight, 2.0, fast=True)
split_1 = te_test.split(blocks.0.weight, 2.0, fast=False, flag=True)
dropout = F.dropout(split[1], e4m3[row], f8e4m3, None, saved, training=[1, (blocks.0.weight,)])
return dropout, split_1[0]""",
    )


def test_text_does_not_depend_on_node_names_or_spelling_of_arguments():
    graph = hand_made()
    before = graph_text(graph)
    for number, node in enumerate(graph.nodes):
        node.name = f"renamed_{number}"
    first = next(node for node in graph.nodes if node.op == "call_function")
    first.args, first.kwargs = (first.args[0], 2.0, True, 2), {}
    assert graph_text(graph) == before


def test_unused_projections_are_not_statements():
    graph = hand_made()
    before = graph_text(graph)
    first = next(node for node in graph.nodes if node.op == "call_function")
    with graph.inserting_after(first):
        graph.call_function(operator.getitem, (first, 0))
    assert graph_text(graph) == before


@dataclasses.dataclass(frozen=True)
class Described:
    size: int

    def describe(self):
        return f"<{self.size}>"


def test_constants():
    graph = fx.Graph()
    tensor = graph.placeholder("x")
    constants = (
        Described(3),
        object(),
        slice(None, 2),
        torch.device("cuda:1"),
        torch.contiguous_format,
        float("inf"),
    )
    graph.output(graph.call_function(torch.add, (tensor, *constants)))
    assert_expected_inline(
        graph_text(graph),
        """\
x = input
add = torch.add(x, <3>, <object object>, :2, cuda, contiguous_format, inf)
return add""",
    )


def test_kernel_launch_is_named():
    pytest.importorskip("triton")
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional

    def scale_kernel():
        pass

    graph = fx.Graph()
    x = graph.placeholder("x")
    kwargs = {
        "kernel_idx": kernel_side_table.add_kernel(scale_kernel),
        "constant_args_idx": kernel_side_table.add_constant_args({"BLOCK": 64}),
        "grid": [(4, 1, 1), (4, 1, 1)],
        "tma_descriptor_metadata": {},
        "kwargs": {"source": x, "target": x},
        "tensors_to_clone": ["target"],
    }
    launch = graph.call_function(triton_kernel_wrapper_functional, (), kwargs)
    launch.meta["val"] = {"target": torch.empty(3)}
    graph.output(graph.call_function(operator.getitem, (launch, "target")))
    assert_expected_inline(
        graph_text(graph),
        """\
x = input
scale_kernel: {target: f32[3]} = triton.scale_kernel[(4, 1, 1)](BLOCK=64, source=x, target=x)
return scale_kernel['target']""",
    )


def test_refuses_what_is_no_graph():
    with pytest.raises(TypeError, match=r"expected torch.fx.Graph"):
        graph_text("graph")


def test_colors(monkeypatch):
    graph = fx.symbolic_trace(lambda x: torch.relu(x))
    plain = "x = input\nrelu = torch.relu(x)\nreturn relu"
    assert graph_text(graph) == graph_text(graph, color="auto") == plain  # stdout is no terminal here
    colored = graph_text(graph, color=True)
    assert "\x1b[34mtorch.relu\x1b[0m" in colored
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == plain
    monkeypatch.setattr("te_dynamo.inspect.graphs.graph_colors.terminal_shows_colors", lambda: True)
    assert graph_text(graph, color="auto") == colored
