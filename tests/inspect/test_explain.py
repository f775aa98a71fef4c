"""explain(): its numbers, its forms, and that it leaves the user's model as it was."""

import importlib
import json
import warnings

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from helpers.graphs.fake_backend import recording_backend
from torch import nn

import te_dynamo
import te_dynamo.__main__ as command_line
from te_dynamo.errors import InvalidOptionError, UnsupportedError
from te_dynamo.inspect.explain import Explanation, explain
from te_dynamo.kernels.runtime.target import TARGETS


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 16)
        self.left = nn.Linear(16, 4, bias=False)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.left(F.dropout(F.silu(self.fc(self.norm(x)))))


def breaking(x):
    x = F.linear(x, x)
    print("in between")
    return x + 1


@pytest.fixture(autouse=True)
def backend(monkeypatch):
    torch._dynamo.reset()
    module = importlib.import_module(
        "te_dynamo.inspect.explain"
    )  # the package's attribute of that name is the function
    monkeypatch.setattr(module, "_te_backend", lambda: recording_backend)


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


@pytest.mark.h200_too
def test_text(net):
    assert_expected_inline(
        str(explain(net, torch.ones(4, 8))),
        """\
coverage 66.7% of linear FLOPs in float8_current_scaling, 1 of 2 linears; the rows are 100.0% of the model's matrix FLOPs; 1 graph, 0 graph breaks; an NVIDIA
H200 would take 1 of 2 linears, 66.7%

modules

| module | M x N x K  | dtype | runs                   | source            |
|--------|------------|-------|------------------------|-------------------|
| silu   |            | f32   | silu left (1)          |                   |
| fc     | 4 x 16 x 8 | f32   | float8_current_scaling | fake_backend.py:1 |
| left   | 4 x 4 x 16 | f32   | left (2)               | fake_backend.py:1 |

fusions

| phase    | fusion          | count |
|----------|-----------------|-------|
| forward  | silu + quantize | 2     |
| backward | silu + quantize | 2     |

lowered

| phase    | te op   | runs        | count |
|----------|---------|-------------|-------|
| forward  | te.gemm | gemm_kernel | 1     |
| backward | te.gemm | gemm_kernel | 1     |

reasons

(1)  for the test
(2)  rule 'left' leaves it

note: options {'codegen': 'eager'}""",
    )


def test_dict_is_plain_data(net):
    found = json.loads(json.dumps(explain(net, torch.ones(4, 8)).to_dict()))
    assert found["coverage"] == pytest.approx(128 / 192)  # 8 x 16 of 8 x 16 + 16 x 4 multiplications a row
    assert [row["matched"] for row in found["linears"]] == [True, False]
    assert found["linears"][1]["reason"] == "rule 'left' leaves it"
    assert [row["kind"] for row in found["norms_activations"]] == ["silu"]
    assert found["fusions"][1] == {"phase": "backward", "fusion": "silu + quantize", "count": 2}
    assert found["lowered"][0] == {"phase": "forward", "op": "te.gemm", "runs": "gemm_kernel", "count": 1}
    assert (found["graphs"], found["graph_breaks"]) == (1, [])


def test_html_is_one_page(net, tmp_path):
    explain(net, torch.ones(4, 8)).to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert "coverage 66.7%" in page.replace("&#x27;", "'")


def test_coverage_without_linears_is_zero():
    found = explain(torch.sin, torch.ones(3))
    assert found.coverage == 0.0
    assert str(found).startswith(
        "coverage 0.0% of linear FLOPs: none of 0 linears is in a recipe; 1 graph, 0 graph breaks"
    )
    assert Explanation([], []).to_dict()["coverage"] == 0.0


def test_graph_breaks_are_listed_with_line_and_reason():
    found = explain(breaking, torch.ones(3, 3))
    assert len(found.graph_breaks) == 1
    line = breaking.__code__.co_firstlineno + 2
    assert found.graph_breaks[0].source == f"test_explain.py:{line}"
    assert "graph break" in str(found)
    assert found.to_dict()["graphs"] == 2


def test_a_torch_that_keeps_no_list_of_breaks_is_refused(net, monkeypatch):
    monkeypatch.delattr("torch._dynamo.utils.graph_break_reasons")
    with pytest.raises(
        UnsupportedError,
        match=r"no torch\._dynamo\.utils\.graph_break_reasons, which lists the graph breaks: install a release",
    ):
        explain(net, torch.randn(4, 8))


def test_a_break_without_a_message_has_dynamos_reason():
    def forward(x):
        x = x.sin()
        torch._dynamo.graph_break()
        return x.cos()

    (found,) = explain(forward, torch.ones(3)).graph_breaks
    assert "graph_break" in found.reason


def test_a_break_names_what_dynamo_cannot_trace():
    def forward(x):
        print(end="")
        return x.cos()

    (found,) = explain(forward, torch.ones(3)).graph_breaks
    assert "builtin operator `print`" in found.reason


def test_a_traced_module_inside_a_model():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.norm = nn.Linear(16, 16), torch.jit.trace(nn.BatchNorm1d(16).eval(), torch.randn(4, 16))

        def forward(self, x):
            return self.norm(self.fc(x))

    assert [row.module for row in explain(Net(), torch.randn(4, 16)).linears] == ["fc"]


def test_the_model_is_left_as_it_was(net):
    net.fc.weight.grad = torch.full_like(net.fc.weight, 7)
    state = {name: value.clone() for name, value in net.state_dict().items()}
    versions = net.norm.running_mean
    random = torch.get_rng_state()
    explain(net, torch.ones(4, 8, requires_grad=True))
    assert all(torch.equal(state[name], value) for name, value in net.state_dict().items())
    assert net.norm.running_mean is versions
    assert torch.equal(random, torch.get_rng_state())
    assert torch.equal(net.fc.weight.grad, torch.full_like(net.fc.weight, 7))
    assert net.left.weight.grad is None
    assert net.training


def test_a_compiled_model_keeps_its_compilation_and_its_options(net):
    compilations = []

    def counting(gm, example_inputs, **kwargs):
        compilations.append(kwargs)
        return recording_backend(gm, example_inputs, **kwargs)

    user = torch.compile(net, backend=counting, options={"recipe": "mxfp8"})
    user(torch.ones(4, 8))
    assert explain(user, torch.ones(4, 8)).reports[0].notes == ["options {'codegen': 'eager', 'recipe': 'mxfp8'}"]
    assert explain(user, torch.ones(4, 8), options={"recipe": "nvfp4"}).reports[0].notes == [
        "options {'codegen': 'eager', 'recipe': 'nvfp4'}"
    ]
    user(torch.ones(4, 8))
    assert compilations == [{"options": {"recipe": "mxfp8"}}]


def test_a_model_compiled_in_place_is_compiled_afresh_too(net):
    """By `model.compile()`, as Trainer and PEFT take models: the code that runs already would answer, and no pass would run."""
    net.compile(backend=recording_backend)
    net(torch.ones(4, 8))
    compiled = net._compiled_call_impl
    assert len(explain(net, torch.ones(4, 8)).reports) == 1
    assert net._compiled_call_impl is compiled


def test_paths_of_blocks_that_are_compiled_by_themselves(te):
    """As FSDP2's: what calls them is in no graph. Those alike run few graphs; another backend's, and those with other options, have rows of
    their own."""

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Layer() for _ in range(6))
            self.wrapped = torch.compile(Layer(), backend="te", options={"codegen": "eager"})

        @torch.compiler.disable(recursive=False)
        def forward(self, x):
            return sum(block(x) for block in (*self.blocks, self.wrapped))

    model = Around()
    for block in model.blocks[:4]:
        block.compile(backend="te", options={"codegen": "eager"})
    model.blocks[4].compile(backend="eager")
    model.blocks[5].compile(backend="te", options={"codegen": "eager", "rules": [("fc", None)]})
    found = explain(model, torch.ones(32, 32))
    taken = [*(f"blocks.{i}.fc" for i in range(4)), "wrapped.fc"]
    assert sorted(row.module for row in found.linears if row.matched) == taken
    assert {row.module for row in found.linears if not row.matched} == {"blocks.4.fc", "blocks.5.fc"}


def test_compiles_afresh_each_time(net):
    assert len(explain(net, torch.ones(4, 8)).reports) == len(explain(net, torch.ones(4, 8)).reports) == 1


def test_inference_without_grad(net):
    with torch.no_grad():
        found = explain(net.eval(), torch.ones(4, 8))
    assert [row["phase"] for row in found.to_dict()["lowered"]] == ["inference"]


def make_net():
    return Net(), torch.ones(4, 8)


def test_command_line(capsys, tmp_path):
    page = tmp_path / "page.html"
    assert command_line.main(["explain", f"{__name__}:make_net", "--codegen", "eager", "--html", str(page)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("coverage 66.7%")
    assert "options {'codegen': 'eager'}" in printed
    assert page.exists()


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(32, 32)

    def forward(self, x):
        return self.fc(x)


class Disabled(Layer):
    @torch._dynamo.disable
    def forward(self, x):
        return self.fc(x)


class Scattered(nn.Module):
    """Layers that share a graph behind breaks, one that Dynamo skips, a recurrent layer, an attention by hand."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.skipped, self.rnn = Disabled(), nn.LSTM(32, 32)
        self.cache = []

    def forward(self, x):
        for layer in self.layers:
            torch._dynamo.graph_break()
            x = layer(x)
        x = self.rnn(self.skipped(x))[0]
        self.kept = x
        return (x @ x.t()).softmax(-1) @ x


@pytest.fixture
def te(monkeypatch):
    module = importlib.import_module("te_dynamo.inspect.explain")
    monkeypatch.setattr(module, "_te_backend", lambda: torch._dynamo.lookup_backend("te"))


def test_every_product_of_the_model_has_a_row(te):
    model = Scattered()
    found = explain(model, torch.randn(8, 32), options={"codegen": "eager"})
    assert [(row.module, row.matched) for row in found.linears] == [
        *((f"layers.{i}.fc", True) for i in range(3)), ("skipped.fc", False), ("rnn", False),
    ]  # fmt: skip
    skipped, rnn = (row.reason for row in found.linears[3:])
    assert skipped.endswith("Disabled.forward is disabled for the compiler (torch.compiler.disable)")
    assert rnn.startswith("Dynamo leaves nn.LSTM as it is, and torch fails on its gradient on a CPU")
    by_weight = 2 * 8 * 32 * 32 * (4 + 8)
    assert found.to_dict()["matrix_flops"] == {
        "by_weight": by_weight, "activations": 2 * 2 * 8 * 8 * 32, "has_a_row": 1.0,
    }  # fmt: skip
    assert "the rows are 96.0% of the model's matrix FLOPs, products of two activations 4.0%; " in found.headline


@pytest.mark.one_fast_case
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("learns", [False, True])
def test_a_recurrent_layer_is_advised_what_works(te, layer, learns):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = layer(32, 16), nn.Linear(16, 32)

        def forward(self, x):
            return self.head(self.rnn(x)[0])

    model, x = Net(), torch.randn(2, 4, 32)
    with torch.set_grad_enabled(learns):
        (reason,) = (row.reason for row in explain(model, x, options=CODEGEN).linears if row.module == "rnn")
    works = "with torch._dynamo.config.allow_rnn = True Inductor compiles it" in reason
    assert works == (layer is not nn.LSTM or not learns)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(allow_rnn=True), torch.set_grad_enabled(learns):
        try:
            y = torch.compile(model, backend="te", options=CODEGEN)(x)
            if learns:
                y.sum().backward()
        except Exception:
            assert not works
        else:
            assert works, "torch has mended it: advise it"


def test_a_row_that_is_missing_shows_in_the_share():
    """The backend of these tests has no row for `@`."""
    found = explain(lambda x, w: F.linear(x, w) @ w, torch.randn(4, 32), nn.Parameter(torch.randn(32, 32)))
    assert found.to_dict()["matrix_flops"]["has_a_row"] == 0.5


def test_counting_leaves_no_fake_tensor_behind(te):
    class Keeps(Layer):
        def forward(self, x, cache):
            self.seen = self.fc(x)
            cache.append(self.seen)
            return self.seen.sum()

    model, cache = Keeps(), []
    explain(model, torch.randn(8, 32), cache, options={"codegen": "eager"})
    with torch.autocast("cpu", torch.bfloat16):
        explain(model, torch.randn(8, 32), cache, options={"codegen": "eager"})
        assert type(model.fc(torch.randn(8, 32))) is torch.Tensor
    assert not hasattr(model, "seen") and [type(value) for value in cache] == [torch.Tensor] * 2


def test_data_that_decides_what_runs_is_counted_by_a_real_forward(te):
    class Chooses(Layer):
        def forward(self, x):
            return self.fc(x[x[:, 0] > 0]) if x.sum() > 0 else x

    found = explain(Chooses(), torch.ones(8, 32), options={"codegen": "eager"})
    assert found.to_dict()["matrix_flops"] == {"by_weight": 2 * 8 * 32 * 32, "activations": 0, "has_a_row": 1.0}


# ---- what a GPU would do


def small():
    """Two linears which a GPU runs faster in bf16."""
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).bfloat16()


CODEGEN = {"codegen": "eager"}


@pytest.mark.cost_rule
@pytest.mark.h200_too
def test_without_a_gpu_the_headline_says_what_one_would_take(te):
    model, x = small(), torch.randn(8, 64).bfloat16()
    weights = [*model.parameters()]
    found = explain(model, x, options=CODEGEN)
    assert found.coverage == 1.0 and found.headline.endswith("; an NVIDIA H200 would take 0 of 2 linears, 0.0%")
    assert found.to_dict()["on_gpu"]["coverage"] == 0.0 and found.to_dict()["device"] == ""
    assert all(a is b and type(a) is nn.Parameter for a, b in zip(weights, model.parameters(), strict=True))


@pytest.mark.cost_rule
def test_for_a_device_its_rule_of_cost_is_asked(te):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 256)).bfloat16()
        x = torch.empty(16384, 4096).bfloat16()
    found = explain(model, x, device="h200")
    assert [row.matched for row in found.linears] == [True, False]
    assert "bf16 takes" in found.linears[1].reason
    assert found.headline.startswith("on an NVIDIA H200, where it was not run: coverage")
    assert "lowered" not in str(found) and found.to_dict()["device"] == "h200"
    assert found.to_dict()["matrix_flops"]["has_a_row"] == 1.0
    assert model[0].weight.is_meta


def test_a_frozen_weight_is_frozen_on_that_device_too(te):
    model, x = te_dynamo.freeze(small()), torch.randn(8, 64).bfloat16()
    with torch.no_grad():
        assert explain(model, x, device="h200").coverage == 1.0


@pytest.mark.cost_rule
def test_a_dropped_weight_is_dropped_on_that_device_too(te):
    """It can be multiplied in FP8 alone, whatever that costs."""
    for drop in (False, True):
        model = nn.Linear(256, 64, bias=False).bfloat16().requires_grad_(False)
        found = explain(
            te_dynamo.freeze(model, drop_weights=drop),
            torch.randn(512, 256).bfloat16(),
            options={"recipe": "float8_block_scaling"},
            device="h200",
        )
        assert found.coverage == drop


@pytest.mark.cost_rule
def test_each_device_answers_for_itself(te):
    with torch.device("meta"):
        model, x = nn.Linear(4096, 4096, bias=False).bfloat16(), torch.empty(1300, 4096).bfloat16()
    rows = {
        device: explain(model, x, device=device, options={"weight_cache": "step"}).linears[0].us for device in TARGETS
    }
    assert rows["h200"][1] < rows["h100"][1] < rows["l40s"][1]
    assert rows["b200"] < rows["h200"] < rows["rtx5090"]


def test_gemms_that_cublaslt_has_sooner_are_one_note(te):
    model = nn.Sequential(
        *(nn.Linear(*size, bias=False) for size in ((1024, 4096), (4096, 2048), (2048, 4096)))
    ).bfloat16()
    x = torch.ones(4096, 1024, dtype=torch.bfloat16)
    rules = [("", "float8_block_scaling")]
    assert explain(model, x, rules=rules, device="h200").to_dict()["notes"] == [
        "on an H200 cuBLASLt took 0.59 to 0.97 of the time for GEMMs with scales of blocks of such sizes: 4096 x 4096 x 1024, "
        '4096 x 2048 x 4096, 4096 x 4096 x 2048 and 2 more. mode="max-autotune" times them, and takes it where it is faster and takes '
        "longer than the CPU does to call it"
    ]
    assert explain(model, x, rules=rules, device="b200").to_dict()["notes"] == []
    assert explain(model, x, rules=rules, device="h200", mode="max-autotune").to_dict()["notes"] == []


@pytest.mark.h200_too
def test_what_is_not_known_is_a_note(te):
    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(32, 32)

        def forward(self, x):
            return self.fc(x) if x.sum().item() > 0 else x

    found = explain(Asks(), torch.ones(8, 32), options=CODEGEN)
    (note,) = found.to_dict()["notes"]
    assert found.to_dict()["on_gpu"] is None and note.startswith("what an NVIDIA H200 would take is not known: ")


def test_another_device_is_refused(net):
    with pytest.raises(InvalidOptionError, match=r"unknown device 'b300'; did you mean 'gb300' or 'b200'"):
        explain(net, torch.ones(4, 8), device="b300")


@pytest.mark.parametrize("device", [None, "h200"])
def test_a_wrong_option_is_our_error_alone(net, device):
    """Not what Dynamo makes of what a backend raises."""
    with pytest.raises(InvalidOptionError, match=r"unknown recipe 'mxpf8'; did you mean 'mxfp8'"):
        explain(net, torch.ones(4, 8), recipe="mxpf8", device=device)


def test_notes_of_another_device(te):
    """What is advised of a model stands in the report, and nothing warns of a device that is not here."""
    model, x = nn.Sequential(nn.Linear(2048, 2048)).bfloat16(), torch.ones(4096, 2048, dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="te_dynamo")
        found = explain(model, x, rules=[("head", None)], device="h200")
    assert found.to_dict()["notes"] == ["no module path of the model matches the rule 'head'"]


def test_a_device_in_other_letters(net):
    assert explain(net, torch.ones(4, 8), device="H200").device == "h200"


def test_nothing_is_told_of_a_device_that_is_not_here(te):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        explain(small(), torch.randn(8, 64).bfloat16(), device="h200")
