"""capture(): the stages by name, several graphs, nesting, caches, and graphs for CUDA without a GPU."""

import importlib
import threading

import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F
import triton
import triton.language as tl
from expecttest import assert_expected_inline
from helpers.graphs.fake_backend import recording_backend
from torch import nn

from te_dynamo.errors import MissingStageError
from te_dynamo.inspect.graphs.capture import capture
from te_dynamo.testing import capture_on_fake_cuda, fake_cuda, graph_text

# The package's attribute of that name is the function.
producer = importlib.import_module("te_dynamo.inspect.graphs.capture")


def compiled(model=None):
    return torch.compile(model or nn.Linear(4, 4), backend=recording_backend)


def breaking(x):
    x = torch.relu(x)
    torch._dynamo.graph_break()
    return x + 1


def test_stages_of_training():
    with capture() as graphs:
        compiled()(torch.ones(2, 4)).sum().backward()
    assert graphs.stages == ["match", "forward", "backward"]
    assert len(graphs) == 3 and len(graphs.reports) == 1
    assert "aten.addmm" in graphs["forward"]
    assert graphs["forward"] == graph_text(graphs.graph("forward"))
    assert "# graph 0, backward\n" + graphs["backward"] in str(graphs)
    assert [match.kind for match in graphs.reports[0].matches] == ["linear"]


def test_iterates_over_its_stages():
    with capture() as graphs:
        compiled()(torch.ones(2, 4)).sum().backward()
    assert list(graphs) == ["match", "forward", "backward"]
    assert dict(graphs.items()) == {stage: graphs[stage] for stage in graphs.stages}
    assert "joint" not in graphs and graphs.get("joint") is None


def test_backward_stage_names_why_it_is_missing():
    with capture() as graphs:
        compiled()(torch.ones(2, 4))
    with pytest.raises(KeyError, match=r"captured: match, forward.*first backward"):
        graphs["backward"]
    with capture() as graphs, torch.no_grad():
        compiled()(torch.ones(2, 4))
    with pytest.raises(MissingStageError, match=r"captured: match, inference.*nothing required grad"):
        graphs["backward"]


def test_already_compiled_function_names_why_nothing_is_there():
    model = compiled()
    model(torch.ones(2, 4))
    with capture() as graphs:
        model(torch.ones(2, 4))
    assert str(graphs) == "no graph captured"
    with pytest.raises(KeyError, match=r"nothing was captured.*compiled before"):
        graphs["forward"]
    with pytest.raises(KeyError, match=r"no stage 'fwd'; the stages are match, joint"):
        graphs["fwd"]


def test_several_graphs():
    with capture() as graphs:
        torch.compile(breaking, backend=recording_backend)(torch.ones(3))
    assert len(graphs.reports) == len(graphs.all("match")) == 2
    assert_expected_inline(
        graphs["match"],
        """\
# graph 0
x: f32[3] = input
relu: f32[3] = torch.relu(x)
return relu

# graph 1
x: f32[3] = input
add: f32[3] = x + 1
return add""",
    )


def test_contexts_nest():
    with capture() as outer:
        compiled()(torch.ones(2, 4))
        with capture() as inner:
            torch.compile(torch.sin, backend=recording_backend)(torch.ones(3))
        compiled(nn.Linear(4, 2))(torch.ones(2, 4))
    assert len(inner.all("match")) == 1
    assert "sin" in inner["match"]
    assert len(outer.all("match")) == 3


def test_records_from_another_thread():
    with capture() as graphs:
        progress = producer.GraphInProgress()
        graph = torch.fx.symbolic_trace(lambda x: torch.relu(x)).graph
        thread = threading.Thread(target=producer.record, args=("backward", graph, progress))
        thread.start()
        thread.join()
    assert graphs.stages == ["backward"]


def test_caches_are_off_inside_and_restored_after_an_exception():
    before = torch._inductor.config.force_disable_caches
    with pytest.raises(ZeroDivisionError), capture():
        with capture():
            assert torch._inductor.config.force_disable_caches
        assert torch._inductor.config.force_disable_caches
        _ = 1 / 0
    assert torch._inductor.config.force_disable_caches == before
    assert not producer.active()


def test_uncached_holds_on_any_thread():
    seen = []

    def look():
        with producer.uncached():
            seen.append(torch._inductor.config.force_disable_caches)

    with capture():
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    look()
    assert seen == [True, torch._inductor.config.force_disable_caches]


def test_a_later_change_of_the_graph_does_not_reach_the_copy():
    gm = torch.fx.symbolic_trace(lambda x: torch.relu(x) + 1)
    with capture() as graphs:
        producer.record("match", gm.graph, producer.GraphInProgress())
    before = graphs["match"]
    for node in list(gm.graph.nodes):
        if node.target is torch.relu:
            node.target = torch.sin
    assert graph_text(graphs.graph("match")) == before != graph_text(gm)


class Gated(nn.Module):
    """One parameter used twice, a buffer, a broadcast, two outputs of which one needs no grad."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 16, dtype=torch.bfloat16)
        self.register_buffer("offset", torch.zeros(16, dtype=torch.bfloat16))

    def forward(self, x):
        h = self.fc(F.gelu(self.fc(x)).narrow(-1, 0, 8)) + self.offset
        return h.t(), x.detach().sum()


def gated_inputs(device):
    return (torch.randn(4, 8, device=device, dtype=torch.bfloat16, requires_grad=True),)


def test_fake_cuda_traces_what_a_cpu_run_traces():
    on_cuda = capture_on_fake_cuda(Gated, gated_inputs, backend=recording_backend)
    torch._dynamo.reset()
    with capture() as on_cpu:
        compiled(Gated())(*gated_inputs("cpu"))[0].sum().backward()
    assert on_cuda.graph("backward").find_nodes(op="placeholder")[0].meta["val"].device.type == "cuda"
    assert on_cuda["forward"] == on_cpu["forward"]
    assert on_cuda["backward"] == on_cpu["backward"]


def test_fake_cuda_inference_and_dynamic_sizes():
    graphs = capture_on_fake_cuda(Gated, gated_inputs, backward=False, backend=recording_backend, dynamic=True)
    assert graphs.stages == ["match", "inference"]
    assert "x: bf16[s0, 8] = input" in graphs["match"]


def test_fake_cuda_under_inductor():
    graphs = capture_on_fake_cuda(Gated, gated_inputs, backend=inductor_recording_last_pass)
    assert graphs.stages == ["lower.forward", "lower.backward"]
    node = graphs.graph("lower.backward").find_nodes(op="placeholder")[0]
    assert node.meta["val"].device.type == "cuda"


@triton.jit
def double_kernel(source, target, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    tl.store(target + index, 2 * tl.load(source + index))


def double(x):
    target = torch.empty_like(x)
    torch.library.wrap_triton(double_kernel)[(1,)](x, target, SIZE=64)
    return target


def test_fake_cuda_knows_what_a_triton_kernel_writes():
    # Without a device to compile for, torch takes every argument for written and copies it.
    from torch._subclasses.functional_tensor import dispatch_functionalize
    from torch.fx.experimental.proxy_tensor import make_fx

    with fake_cuda():
        traced = make_fx(dispatch_functionalize(double))(torch.empty(64, device="cuda"))
    assert "double_kernel: {target: f32[64]} = triton.double_kernel[(1, 1, 1)](" in graph_text(traced)


class Constants(nn.Module):
    """Tensors made of numbers in forward: a scalar that backward keeps, a list, an index list."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 64)

    def forward(self, x):
        y = self.up(x)
        y = y / torch.sqrt(torch.tensor(y.size(-1), dtype=torch.float) * torch.tensor(2.0, device=x.device))
        empty = torch.tensor([], dtype=y.dtype, device=y.device)
        return torch.cat([empty, y[..., [-2]], y[..., [0, 1]]], -1)


@pytest.mark.parametrize("backend", [recording_backend, "te"])
def test_fake_cuda_makes_tensors_of_numbers(backend):
    graphs = capture_on_fake_cuda(lambda: Constants().bfloat16(), rows_of_64, backend=backend)
    assert {"match", "forward", "backward"} <= set(graphs.stages)


def rows_of_64(device):
    return (torch.randn(512, 64, dtype=torch.bfloat16, device=device, requires_grad=True),)


def test_fake_cuda_fills_the_gradients_of_outputs_that_nothing_reads():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            read, unread = self.a(x), self.b(x)
            torch._dynamo.graph_break()
            return read + 1, unread.detach()

    graphs = capture_on_fake_cuda(lambda: Two().bfloat16(), rows_of_64)
    assert [stage for stage in graphs.stages if stage.startswith("lower")] == ["lower.forward", "lower.backward"]


def inductor_recording_last_pass(gm, example_inputs):
    """Inductor with one pass of its own after its last, which records the graph."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.custom_graph_pass import CustomGraphPass

    progress = producer.GraphInProgress()
    stages = []

    class Record(CustomGraphPass):
        def __call__(self, graph):
            producer.record(f"lower.{stages[-1]}", graph, progress)

        def uuid(self):
            return None

    def inner(gm, example_inputs, **kwargs):
        inference = "inference" if kwargs.get("is_inference") else "forward"
        stages.append("backward" if kwargs.get("is_backward") else inference)
        return compile_fx_inner(gm, example_inputs, **kwargs)

    return compile_fx(gm, example_inputs, inner_compile=inner, config_patches={"post_grad_custom_post_pass": Record()})


def test_before_is_the_graph_that_a_stage_started_from():
    torch._dynamo.reset()
    with capture() as graphs:
        torch.compile(nn.Linear(16, 16), backend="te", options={"codegen": "eager"})(torch.ones(4, 16)).sum().backward()
    before = {stage: graphs.before(stage) for stage in graphs.stages}
    assert "F.linear" in graph_text(before["match"]) and "te.linear" in graphs["match"]
    assert "te.add_bias" in graph_text(before["forward"]) and "te.add_bias" not in graphs["forward"]
    with pytest.raises(MissingStageError):
        graphs.before("inference")


def test_dynamo_knows_torchs_grad_after_graphs_on_fake_cuda() -> None:
    """If it learned inside which functions are torch's, a step with torch.autograd.grad in it broke afterwards. It learns once, and
    again when a process group is made."""
    from torch._dynamo.trace_rules import get_torch_obj_rule_map
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    learned = get_torch_obj_rule_map, TorchInGraphFunctionVariable._get_handlers
    for _ in range(2):
        for cache in learned:
            cache.cache_clear()
        torch._dynamo.reset()
        capture_on_fake_cuda(Gated, gated_inputs, backend=recording_backend)
        assert all(torch.autograd.grad in functions() for functions in learned)


def test_a_model_that_was_there_keeps_its_tensors() -> None:
    """A factory may give one: it was left with fake tensors on a device that is not there."""
    model = torch.nn.Linear(64, 64)
    before = list(model.parameters())
    for _ in range(2):
        capture_on_fake_cuda(lambda: model, lambda device: (torch.empty(32, 64, device=device),))
    assert [parameter is held for parameter, held in zip(model.parameters(), before, strict=True)] == [True, True]
