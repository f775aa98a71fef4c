"""Options that users get wrong, each refused by a message that names it, and rules where graph breaks divide a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.models.small_models import SwiGLU
from torch import Tensor, nn

import te_dynamo
from te_dynamo._compat import torch_version
from te_dynamo.errors import InvalidOptionError
from te_dynamo.recipe import Float8CurrentScaling

EAGER = {"codegen": "eager"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipes": None}, "unknown option 'recipes'; did you mean 'recipe'?"),
        ({"max_autotone": True}, "unknown option 'max_autotone'; did you mean 'max_autotune'"),
        (
            {"zzzzzz": 1},
            "unknown option 'zzzzzz'; valid: 'codegen', 'fusions', 'low_memory', 'recipe', 'regather', 'replayed', 'require_coverage', 'rules', ",
        ),
        ({3: 1}, "unknown option 3; valid: 'codegen'"),
        ({"max_autotune": "yes"}, "Inductor's option 'max_autotune' takes a value of type bool, got 'yes'"),
        (
            {"joint_custom_pre_pass": 3},
            "Inductor's option 'joint_custom_pre_pass' takes a value of type CustomGraphPass or Callable or ",
        ),
        ({"cpp_wrapper": None}, "Inductor's option 'cpp_wrapper' takes a value of type bool, got None"),
        ({"profile_bandwidth_output": 3}, "Inductor's option 'profile_bandwidth_output' takes a value of type "),
        ({"layout_optimization": "on"}, "Inductor's option 'layout_optimization' takes a value of type bool, got 'on'"),
        ({"benchmark_harness": 2}, "Inductor's option 'benchmark_harness' takes a value of type bool, got 2"),
        (
            {"recipe": "float8_curent_scaling"},
            "unknown recipe 'float8_curent_scaling'; did you mean 'float8_current_sc",
        ),
        (
            {"recipe": 8},
            "a recipe is a name (float8_block_scaling, float8_current_scaling, float8_rowwise, mxfp8, nvfp4), a te_dynamo.recipe object or "
            "None, got 8",
        ),
        ({"recipe": Float8CurrentScaling}, "a te_dynamo.recipe object or None, got <class"),
        ({"codegen": "triton"}, "unknown codegen 'triton'; valid: 'eager', 'inductor'"),
        ({"regather": 1}, "option 'regather' takes True or False, got 1"),
        ({"fusions": "off"}, "option 'fusions' takes True, False or a list of fusions' names, got 'off'"),
        ({"fusions": ["fuse_gemm_bias", "-fuse_norm_quantize"]}, "names to leave out, not both: ['fuse_gemm_bias'"),
        ({"rules": None}, "rules must be a list of (regular expression, recipe or None) pairs, got None"),
        ({"rules": "lm_head"}, "rules must be a list of (regular expression, recipe or None) pairs, got 'lm_head'"),
        ({"rules": {"lm_head": None}}, "rules must be a list"),
        ({"rules": ("lm_head", None)}, "rules[0] must be (regular expression, recipe or None), got 'lm_head'"),
        ({"rules": [("mlp", None), ("head",)]}, "rules[1] must be (regular expression, recipe or None), got ('head',)"),
        (
            {"rules": [("mlp", None), ("(", None)]},
            "'(' is not a regular expression: missing ), unterminated subpattern at position 0 (in rules[1])",
        ),
        (
            {"rules": [("mlp", None), ("a", "xfp8")]},
            "unknown recipe 'xfp8'; did you mean 'mxfp8' or 'fp8'? valid: 'float8_block_scaling', 'float8_current_scaling', 'float8_rowwise', 'mxfp8', 'nvfp4' (in rules[1",
        ),
    ],
    ids=str,
)
def test_options_name_what_is_wrong(options: dict[Any, Any], message: str) -> None:
    compiled = torch.compile(nn.Linear(32, 32), backend="te", options=options)
    with pytest.raises(Exception, match="InvalidOptionError: te_dynamo: ") as error:  # in Dynamo's own wrapper
        compiled(torch.randn(4, 32))
    assert message in str(error.value) and len(str(error.value)) < 600
    assert isinstance(getattr(error.value, "inner_exception", error.value.__cause__), InvalidOptionError)


def test_mode_names_the_nearest() -> None:
    compiled = torch.compile(nn.Linear(32, 32), backend="te", mode="reduce-overheads")
    with pytest.raises(Exception, match="te_dynamo: unknown mode 'reduce-overheads'; did you mean 'reduce-overhead'"):
        compiled(torch.randn(4, 32))


def test_a_format_without_a_gemm_is_refused_where_it_is_written() -> None:
    with pytest.raises(InvalidOptionError, match="unknown backward_format 'e3m4'; valid: 'e4m3'"):
        Float8CurrentScaling(backward_format="e3m4")


class Broken(nn.Module):
    """A graph break two levels down: Dynamo compiles each half, and what follows, as functions of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Sequential(nn.Linear(32, 32)), nn.Linear(32, 32)
        self.inner[0].register_forward_hook(lambda *_: torch._dynamo.graph_break())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))


def test_rules_find_module_paths_behind_a_graph_break() -> None:
    explanation = te_dynamo.explain(Broken(), torch.randn(4, 32), options={**EAGER, "rules": [("^head$", None)]})
    rows = [(row.module, row.matched) for row in explanation.linears]
    if torch_version() == (2, 11):  # which compiles nothing of a module whose own hook breaks the graph
        assert rows == [("head", False), ("inner.0", False)] and explanation.graph_breaks
    else:
        assert rows == [("inner.0", True), ("head", False)]


class BrokenLoop(nn.Module):
    """Each block is compiled as a function of its own: one graph for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SwiGLU() for _ in range(5))
        for layer in self.layers:
            layer.register_forward_pre_hook(torch._dynamo.disable(lambda *_: None))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_rule_that_tells_blocks_of_one_graph_apart_leaves_them() -> None:
    """The other blocks run the first one's graph: a rule for one must not hold for all, nor for none."""
    torch.manual_seed(0)
    model, x = BrokenLoop(), torch.randn(8, 32, requires_grad=True)
    explanation = te_dynamo.explain(model, x, options={**EAGER, "rules": [(r"layers\.2", None)]})
    assert explanation.coverage == 0 and len(explanation.reports) == 1
    reason = "5 modules run this graph, behind graph breaks, and the rules treat them differently"
    assert {row.reason.partition(";")[0] for row in explanation.linears} == {reason}
    same = te_dynamo.explain(model, x, options={**EAGER, "rules": [("down", None)]})
    assert sorted((row.module, row.matched) for row in same.linears) == sorted(
        (f"layers.{i}.{name}", name != "down") for i in range(5) for name in ("gate", "up", "down")
    )
