"""compare() of models as users write them: what is measured, and that the model's own results are the user's."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers.models.small_models import MODELS, WIDTH, Llama, SwiGLU
from helpers.slow import slow_but
from torch import nn
from torch.utils.checkpoint import checkpoint

import te_dynamo
from te_dynamo.accuracy.probes import Graphs, Mode, Session
from te_dynamo.accuracy.whole import run_step
from te_dynamo.options import Options


class Experts(nn.Module):
    """Four experts, one without tokens, as torch's grouped GEMM takes them."""

    def __init__(self):
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(4, *shape) / 6) for shape in ((32, 64), (64, 32)))

    def forward(self, x):
        ends = torch.tensor([8, 8, 20, 32], dtype=torch.int32)
        return F.grouped_mm(F.relu(F.grouped_mm(x, self.up, offs=ends)), self.down, offs=ends)


class Conv1D(nn.Module):
    """GPT-2's: the weight is [K, N]."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(32, 64) / 6), nn.Parameter(torch.randn(64))

    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.head = SwiGLU(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.head(checkpoint(self.block, x, use_reentrant=False))


class Broken(nn.Module):
    """A graph break between two layers of one class, which run one graph."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(SwiGLU() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            torch._dynamo.graph_break()
        return x


CASES = {
    **MODELS,
    "experts": Experts,
    "conv1d": Conv1D,
    "checkpointed": Checkpointed,
    "broken": Broken,
    "padded": lambda: nn.Linear(WIDTH, 250),
    "encoder layer": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 64, dropout=0.0, batch_first=True),
    "in place": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)),
}


def inputs(name):
    torch.manual_seed(1)
    shape = (32, WIDTH) if name in ("experts", "conv1d") else (2, 16, WIDTH)
    return torch.randn(shape, dtype=torch.bfloat16 if name == "experts" else torch.float32, requires_grad=True)


def build(name):
    torch.manual_seed(0)
    model = CASES[name]()
    return model.bfloat16() if name == "experts" else model


@pytest.mark.parametrize("name", slow_but(6, CASES))
def test_the_measured_run_is_the_users_model(name):
    """Outputs and gradients of the graph with probes, which measure, are those of the model itself."""
    model, x = build(name), inputs(name)
    session = Session(mode=Mode.MEASURED)
    compiled = torch.compile(model, backend=Graphs([Options.parse()], session))
    found = run_step(compiled, model, (x,), {}, None, session)
    exact = run_step(model, model, (x,), {}, None, session)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if name == "experts" else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(found.outputs, exact.outputs, **tolerance)
    assert found.gradients.keys() == exact.gradients.keys()
    for key, gradient in exact.gradients.items():
        torch.testing.assert_close(found.gradients[key], gradient, **tolerance)


@pytest.mark.one_fast_case
@pytest.mark.parametrize("name", slow_but(3, CASES))
def test_every_linear_is_measured(name):
    model, x = build(name), inputs(name)
    found = te_dynamo.compare(model, x)
    explained = te_dynamo.explain(model, x, options={"codegen": "eager"})
    if name != "broken":  # two layers run one graph, and share its rows
        assert found.summary["linears"] == sum(row.matched for row in explained.linears)
    assert found.summary["coverage"] == pytest.approx(explained.coverage)
    assert {row.module for row in found.rows} <= {row.module for row in explained.linears}
    assert found.rows and not found.notes
    for row in found.rows:
        assert not row.note
        assert row.output_snr_db > 24 and row.dw_snr_db > 20 and row.dx_snr_db > 20
    assert found.summary["snr_output_db"] > 15 and found.summary["snr_gradients_db"] > 10


@pytest.mark.parametrize("recipe", ["float8_block_scaling", "mxfp8", "nvfp4"])
def test_a_transposed_weight_has_the_numbers_of_the_other_layout(recipe):
    torch.manual_seed(0)
    stored, x = Conv1D(), torch.randn(32, 32, requires_grad=True)
    usual = nn.Linear(32, 64)
    with torch.no_grad():
        usual.weight.copy_(stored.weight.t())
        usual.bias.copy_(stored.bias)
    (one,), (other,) = (te_dynamo.compare(model, x, options={"recipe": recipe}).rows for model in (stored, usual))
    for name in ("output", "dx", "dw"):
        assert getattr(one, f"{name}_snr_db") == pytest.approx(getattr(other, f"{name}_snr_db"), abs=1e-3)
    assert one.tensors["weight"].snr_db == pytest.approx(other.tensors["weight"].snr_db, abs=1e-3)
    assert one.flops == other.flops == 2 * 32 * 32 * 64


def test_bodies_that_run_at_several_places_have_a_row_each_or_one():
    model, x = build("broken"), inputs("broken")
    found = te_dynamo.compare(model, x)
    assert {row.module.rpartition(".")[2] for row in found.rows} == {"gate", "up", "down"}


def test_a_checkpointed_forward_is_measured_once():
    model, x = build("checkpointed"), inputs("checkpointed")
    found = te_dynamo.compare(model, x)
    assert {row.module: row.flops for row in found.rows}["block.gate"] == 2 * 32 * WIDTH * 2 * WIDTH


def test_autocast():
    torch.manual_seed(0)
    model, x = SwiGLU(), torch.randn(32, WIDTH)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = te_dynamo.compare(model, x)
    assert all(row.dtype == "bf16" and row.output_snr_db > 24 for row in found.rows) and len(found.rows) == 3
    plain = te_dynamo.compare(model.bfloat16(), x.bfloat16())
    for row, other in zip(found.rows, plain.rows, strict=True):
        assert row.output_snr_db == pytest.approx(other.output_snr_db, abs=0.1)


def test_lengths_that_change_keep_one_row():
    torch.manual_seed(0)
    model = SwiGLU()
    found = te_dynamo.compare(model, batches=[torch.randn(rows, WIDTH) for rows in (16, 24, 40)])
    assert len(found.rows) == found.summary["linears_in_all"] == 3
    assert {row.module: row.flops for row in found.rows}["gate"] == pytest.approx(2 * WIDTH * 2 * WIDTH * 80 / 3)


def test_token_numbers_tied_weights_and_a_loss_in_the_result():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Llama()
            self.inner.head.weight = self.inner.embedding.weight

        def forward(self, ids):
            logits = self.inner(ids)
            return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()), "logits": logits}

    torch.manual_seed(0)
    model, ids = Model(), torch.randint(64, (2, 16))
    found = te_dynamo.compare(model, ids)
    assert found.summary["loss"] == pytest.approx(model(ids)["loss"].item(), rel=1e-5)
    assert abs(found.summary["loss_change"]) < 0.05
    assert set(found.summary["gradients"]) == {name for name, _ in model.named_parameters()}


def test_a_function_and_a_frozen_model():
    torch.manual_seed(0)
    weight, x = torch.randn(32, 32, requires_grad=True), torch.randn(8, 32, requires_grad=True)
    found = te_dynamo.compare(lambda x: F.linear(x, weight).sum(), x)
    assert found.summary["loss"] is not None and len(found.rows) == 1 and found.rows[0].module == ""
    assert found.suggest_rules(min_snr=100) == []  # no path that a rule could name
    model = nn.Linear(32, 32).requires_grad_(False)
    te_dynamo.freeze(model)
    with torch.no_grad():
        assert te_dynamo.compare(model, torch.randn(8, 32)).rows[0].output_snr_db > 20


def test_nothing_is_warned():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        te_dynamo.compare(nn.Linear(32, 32), torch.randn(8, 32))


@pytest.mark.parametrize("recipe", ["float8_block_scaling", "mxfp8"])
def test_experts_with_scales_of_blocks_are_measured(recipe):
    torch.manual_seed(0)
    model = Experts()
    model.up, model.down = (nn.Parameter(torch.randn(4, *shape) / 12) for shape in ((128, 256), (256, 128)))
    x = torch.randn(32, 128, dtype=torch.bfloat16, requires_grad=True)
    rows = te_dynamo.compare(model.bfloat16(), x, options={"recipe": recipe}).rows
    assert len(rows) == 2
    for row in rows:
        assert row.output_snr_db > 24 and row.dw_snr_db > 24 and row.dx_snr_db > 24
        assert row.tensors["dy"].snr_db > 24
