"""The names of inputs in captured graphs: the user's, and the forward graph's for what it saved."""

from __future__ import annotations

import torch
from helpers.models.snapshot_models import GeluMLP, capture_training
from torch import nn

import te_dynamo
from te_dynamo.inspect.graphs.graph_names import name_inputs
from te_dynamo.inspect.graphs.graph_text import NAME
from te_dynamo.testing import capture_on_fake_cuda, graph_text


def inputs(text: str) -> list[str]:
    """The names of the inputs in a graph's text."""
    return [line.split(":")[0] for line in text.splitlines() if line.endswith(" = input")]


def test_parameters_carry_the_users_names_and_saved_values_their_producers() -> None:
    graphs = capture_training(GeluMLP, (16, 64), "cpu")
    users = ["norm.weight", "norm.bias", "x", "fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    assert inputs(graphs["match"]) == inputs(graphs["forward"]) == users
    assert inputs(graphs["joint"]) == [*users, "tangents_1"]
    saved = inputs(graphs["backward"])[:-1]
    assert graphs["forward"].endswith(", ".join(saved))


def test_no_two_values_of_a_graph_share_a_name() -> None:
    text = capture_training(GeluMLP, (16, 64), "cpu")["backward"]
    names = [line.split(":")[0] for line in text.splitlines() if not line.startswith("return")]
    assert len(set(names)) == len(names)
    computed = {name for name in names if "[" not in name} - set(inputs(text))
    assert not computed & {name.split("[")[0] for name in inputs(text)}


def test_the_captured_graph_prints_as_the_captured_text() -> None:
    graphs = capture_training(GeluMLP, (16, 64), "cpu")
    assert all(graph_text(graphs.graph(stage)) == graphs[stage] for stage in graphs.stages)


def test_sizes_stay_symbols() -> None:
    graphs = capture_on_fake_cuda(
        lambda: GeluMLP().bfloat16(),
        lambda device: (torch.empty(16, 64, device=device, dtype=torch.bfloat16, requires_grad=True),),
        options={"codegen": "eager"},
        dynamic=True,
    )
    assert {"fc1.weight", "s0", "x"} <= set(inputs(graphs["forward"]))
    assert {"norm.weight", "s0", "x", "quantize_1[1]"} <= set(inputs(graphs["backward"]))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc_parameters = nn.Linear(32, 32, bias=False)  # a name that reads like Dynamo's own words

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return self.fc_parameters(x)


def test_paths_are_those_of_the_whole_model_behind_a_graph_break_too() -> None:
    model = nn.Sequential(nn.Tanh(), Layer())
    with te_dynamo.capture() as graphs:
        torch.compile(model, backend="te", options={"codegen": "eager"})(torch.randn(16, 32)).sum().backward()
    for stage in ("match", "forward"):
        assert "1.fc_parameters.weight: f32[32, 32] = input" in graphs[stage]
    assert [row.module for report in graphs.reports for row in report.matches] == ["1.fc_parameters"]


def test_a_model_that_a_function_is_given_is_left_out_of_its_parameters_names() -> None:
    model = nn.Sequential(nn.Linear(32, 32, bias=False))
    step = torch.compile(lambda model, x: model(x).sum(), backend="te", options={"codegen": "eager"})
    with te_dynamo.capture() as graphs:
        step(model, torch.randn(16, 32))
    assert set(inputs(graphs["match"])) == {"x", "0.weight"}
    assert [row.module for row in graphs.reports[0].matches] == ["0"]


def test_graphs_that_do_not_pair_up_keep_torchs_names() -> None:
    graphs = capture_training(GeluMLP, (16, 64), "cpu")
    forward = graphs.graph("forward")
    placeholders = forward.find_nodes(op="placeholder")
    for node in placeholders:
        node.meta.pop(NAME)
    placeholders[0].meta["val"] = torch.empty(3)  # as where a subclass was taken apart
    name_inputs(forward, "forward", {"match": graphs.graph("match")})
    assert inputs(graph_text(forward))[:2] == ["primals_1", "primals_2"]
