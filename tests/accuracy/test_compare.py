"""compare(): its numbers against a direct computation, the planted layer, and that it leaves the model as it was."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from helpers.models.planted import WIDTH, Planted
from torch import nn

import te_dynamo
from te_dynamo import recipe as recipes
from te_dynamo.dialect.linear import LinearConfig
from te_dynamo.errors import InputError, InvalidOptionError

RECIPES = [
    recipes.Float8CurrentScaling(),
    recipes.Float8BlockScaling(),
    recipes.MXFP8BlockScaling(),
    recipes.MXFP8BlockScaling(scale_block=128),
    recipes.NVFP4BlockScaling(stochastic_rounding=False),
]


def recipe_id(recipe):
    return recipe.describe()


def db(exact, found):
    exact, found = exact.double(), found.double()
    return 10 * math.log10(exact.square().sum() / (found - exact).square().sum())


@pytest.mark.one_fast_case
@pytest.mark.parametrize("outlier", ["x", "weight"])
@pytest.mark.parametrize("recipe", RECIPES, ids=recipe_id)
def test_the_planted_layer_is_the_first_row(recipe, outlier):
    torch.manual_seed(0)
    model, x = Planted(outlier), torch.randn(64, WIDTH)
    found = te_dynamo.compare(model, x, options={"recipe": recipe})
    assert found.suggest_rules() == [(r"^layers\.2$", None)]
    worst, *others = found.rows
    assert worst.module == "layers.2"
    assert worst.tensors[outlier].flushed > 0.5
    assert all(row.tensors[name].flushed < 0.2 for row in others for name in ("x", "weight"))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("recipe", RECIPES, ids=recipe_id)
def test_numbers_are_those_of_a_direct_computation(recipe, bias):
    torch.manual_seed(0)
    fc, x = nn.Linear(96, 64, bias=bias), torch.randn(2, 16, 96, requires_grad=True)
    found = te_dynamo.compare(fc, x, options={"recipe": recipe}, loss=lambda out: out.square().sum())
    (row,) = found.rows
    out = fc(x)
    dx, dw = torch.autograd.grad(out.square().sum(), (x, fc.weight))
    dy = 2 * out.detach()
    held = {
        "x": recipe.input_quantizer().quantize(x).dequantize(),
        "weight": recipe.weight_quantizer().quantize(fc.weight).dequantize(),
        "dy": recipe.grad_output_quantizer().quantize(dy).dequantize(),
    }
    for name, exact in (("x", x), ("weight", fc.weight), ("dy", dy)):
        tensor, exact = row.tensors[name], exact.detach()
        assert tensor.snr_db == pytest.approx(db(exact, held[name]), abs=1e-3)
        assert tensor.amax == exact.abs().max().item()
        assert tensor.flushed == ((held[name] == 0) & (exact != 0)).double().mean().item()
    config = LinearConfig.from_recipe(recipe, input_requires_grad=True, weight_requires_grad=True)
    alone = [torch.ops.te.linear(x, fc.weight, fc.bias, config)[0]]
    alone += torch.autograd.grad(alone[0], (x, fc.weight), dy)
    exact = F.linear(held["x"], held["weight"], fc.bias)
    assert db(out.detach(), exact.detach()) == pytest.approx(row.output_snr_db, abs=0.01)
    for name, one, other in zip(("output", "dx", "dw"), (out, dx, dw), alone, strict=True):
        assert getattr(row, f"{name}_snr_db") == pytest.approx(db(one.detach(), other.detach()), abs=0.01)
    # A model of one linear: its loss and its gradients are the linear's own.
    assert found.summary["loss"] == pytest.approx(out.square().sum().item())
    assert found.summary["loss_recipe"] == pytest.approx(alone[0].square().sum().item())


def test_saturated_zero_and_exact_values():
    """In NVFP4 half of the blocks have a scale that was rounded down: their largest values are above what it can hold."""
    torch.manual_seed(0)
    fc = nn.Linear(64, 64, bias=False)
    x = torch.randn(64, 64)
    x[:, 7] = 0.0
    recipe = recipes.NVFP4BlockScaling()
    (row,) = te_dynamo.compare(fc, x, options={"recipe": recipe}).rows
    assert row.tensors["x"].zero == 1 / 64
    _, scales, amax = torch.ops.te.quantize(x, recipe.input_quantizer().with_usage(True, False))
    largest = 6 * scales.view(torch.float8_e4m3fn).double()[:64, :4] * amax.double() / 2688
    saturated = (x.abs().double().view(64, 4, 16) > largest[..., None] * (1 + 1e-6)).double().mean().item()
    assert row.tensors["x"].saturated == saturated > 0.01
    ones = te_dynamo.compare(fc, torch.ones(32, 64), options={"recipe": "mxfp8"}).rows[0].tensors["x"]
    assert (ones.snr_db, ones.flushed, ones.saturated, ones.zero) == (200.0, 0.0, 0.0, 0.0)


class Ordinary(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 32)

    def forward(self, x):
        return self.down(F.dropout(F.gelu(self.norm(self.up(x))), training=self.training))


def test_text():
    torch.manual_seed(0)
    found = te_dynamo.compare(Ordinary().eval(), torch.randn(32, 32), loss=lambda out: out.square().mean())
    assert_expected_inline(
        str(found),
        """\
float8_current_scaling: 2 of 2 linears, 100.0% of linear FLOPs; 1 step; loss 0.041266, in the recipe 0.0415721 (+0.742%); the model's outputs 25.9 dB; the
model's gradients 24.2 dB

SNR in dB, the worst linear first

| module | source                       | M x N x K    | output | dx   | dw   | x    | weight | dy   | amax of x |
|--------|------------------------------|--------------|--------|------|------|------|--------|------|-----------|
| down   | accuracy/test_compare.py:105 | 32 x 32 x 64 | 28.8   | 26.1 | 28.9 | 31.5 | 31.9   | 25.6 | 2.108     |
| up     | accuracy/test_compare.py:105 | 32 x 64 x 32 | 29.2   |      | 26.2 | 32.0 | 32.1   | 25.4 | 3.74      |""",
    )


def test_dict_is_plain_data():
    torch.manual_seed(0)
    found = json.loads(json.dumps(te_dynamo.compare(Ordinary(), torch.randn(32, 32)).to_dict(), allow_nan=False))
    assert {row["module"] for row in found["rows"]} == {"up", "down"}
    assert found["rows"][0]["snr_db"] == min(found["rows"][0][f"snr_{name}_db"] for name in ("output", "dw"))
    assert found["summary"]["linears"] == found["summary"]["linears_in_all"] == 2
    assert set(found["summary"]["gradients"]) == {name for name, _ in Ordinary().named_parameters()}


def test_the_model_is_left_as_it_was():
    torch.manual_seed(0)
    model, x = Ordinary(), torch.randn(32, 32)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.random.get_rng_state()
    found = te_dynamo.compare(model, x, options={"recipe": "nvfp4"}, steps=2)
    assert not found.notes  # dropout's mask is the same in all runs
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(torch.equal(parameter.grad, torch.ones_like(parameter)) for parameter in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), random) and model.training
    assert all(not module._forward_hooks for module in model.modules())


def test_steps_and_batches_add_up():
    torch.manual_seed(0)
    fc = nn.Linear(32, 32)
    x = torch.randn(16, 32)
    once = te_dynamo.compare(fc, x)
    found = te_dynamo.compare(fc, batches=[x, (4 * x,), {"input": x[:8] / 2}])
    assert found.summary["steps"] == 3 and len(found.rows) == 1
    tensor = found.rows[0].tensors["x"]
    assert tensor.amax == 4 * x.abs().max() and tensor.amax_spread == pytest.approx(
        tensor.amax / (x[:8].abs().max().item() / 2)
    )
    assert found.rows[0].flops == pytest.approx(2 * 32 * 32 * (16 + 16 + 8) / 3)
    assert once.rows[0].flops == 2 * 16 * 32 * 32
    assert te_dynamo.compare(fc, x, steps=3).rows[0].tensors["x"].amax_spread == 1.0


def test_rules_leave_linears_and_follow_the_suggested():
    torch.manual_seed(0)
    rules = [("down", None)]
    found = te_dynamo.compare(Ordinary(), torch.randn(32, 32), options={"rules": rules})
    assert [row.module for row in found.rows] == ["up"] and found.summary["linears_in_all"] == 2
    assert found.suggest_rules(min_snr=100) == [("^up$", None), *rules]
    assert found.suggest_rules(min_snr=0) == rules


def test_suggested_rules_are_options_and_the_cheapest_gain_is_first():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 32))
    x = torch.randn(32, 64)
    found = te_dynamo.compare(model, x)
    assert [pattern for pattern, _ in found.suggest_rules(min_snr=60)] == ["^1$", "^0$"]  # half the FLOPs
    rules = found.suggest_rules(min_snr=60, max_layers=1)
    left = te_dynamo.compare(model, x, options={"rules": rules})
    assert [row.module for row in left.rows] == ["0"]
    torch.compile(model, backend="te", options={"rules": rules, "codegen": "eager"})(x)


def test_recipes_side_by_side():
    torch.manual_seed(0)
    model = Planted("")
    found = te_dynamo.compare_recipes(model, torch.randn(64, WIDTH), loss=lambda out: out.square().mean())
    assert set(found.comparisons) == set(recipes.names())
    assert list(found.comparisons)[-1] == "nvfp4"
    alone = te_dynamo.compare(model, torch.randn(64, WIDTH), options={"recipe": "mxfp8"})
    assert found.comparisons["mxfp8"].summary["linears"] == alone.summary["linears"] == 4
    lines = str(found).splitlines()
    assert lines[2].startswith("| recipe") and lines[-1].startswith("| nvfp4")
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["nvfp4"]["summary"]["loss"] is not None


@pytest.mark.parametrize("written", ["x", "weight", "bias"])
def test_what_no_gradient_needs_may_be_written_in_place(written):
    """x behind a frozen weight, the weight of an input that needs no gradient, and any bias."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.fc = nn.Linear(32, 32), nn.Linear(32, 32)
            self.fc.weight.requires_grad_(written != "x")

        def forward(self, x):
            h = self.up(x) if written == "x" else x.clone()
            y = self.fc(h)
            with torch.no_grad():
                for tensor in {"x": (), "weight": [self.fc.weight], "bias": [self.fc.bias]}[written]:
                    tensor.mul_(1)
            return y + h.mul_(2) if written == "x" else y

    torch.manual_seed(0)
    row = next(row for row in te_dynamo.compare(Model(), torch.randn(8, 32)).rows if row.module == "fc")
    assert (row.dx_snr_db is None, row.dw_snr_db is None) == (written != "x", written == "x")


def test_one_linear_in_backward_of_high_precision():
    torch.manual_seed(0)
    x = torch.randn(32, 32, requires_grad=True)
    options = {"recipe": recipes.Float8CurrentScaling(backward="high_precision")}
    (row,) = te_dynamo.compare(nn.Linear(32, 32), x, options=options).rows
    assert row.output_snr_db and row.dx_snr_db is None and row.dw_snr_db is None and "dy" not in row.tensors


def test_without_gradients_forward_alone_is_measured():
    with torch.no_grad():
        found = te_dynamo.compare(Ordinary().eval(), torch.randn(32, 32))
    assert found.summary["snr_gradients_db"] is None and found.summary["snr_output_db"] > 20
    assert all(row.dw_snr_db is None and "dy" not in row.tensors for row in found.rows)


def test_a_compiled_model_has_its_own_options():
    compiled = torch.compile(nn.Linear(32, 32), backend="te", options={"recipe": "mxfp8"})
    assert te_dynamo.compare(compiled, torch.randn(8, 32)).recipe == "mxfp8"


def test_the_plot(tmp_path):
    pytest.importorskip("matplotlib")
    te_dynamo.compare(Ordinary(), torch.randn(32, 32)).plot(tmp_path / "snr.png")
    assert (tmp_path / "snr.png").read_bytes().startswith(b"\x89PNG")


def test_the_plot_without_matplotlib(monkeypatch, tmp_path):
    found = te_dynamo.compare(nn.Linear(32, 32), torch.randn(8, 32))
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="needs matplotlib: pip install matplotlib"):
        found.plot(tmp_path / "snr.png")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, "steps must be 1 or more, got 0"),
        ({"batches": []}, "expected the model's arguments and steps, or batches, got both"),
        ({"loss": lambda out: out}, r"loss gave a tensor of shape \(8, 32\); expected a function"),
        ({"options": {"recipe": None}}, "no linear of the model is in a recipe: 1 x recipe is None"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(InputError, match=message):
        te_dynamo.compare(nn.Linear(32, 32), torch.randn(8, 32), **arguments)


def test_no_linear_and_no_recipes():
    with pytest.raises(InputError, match="there is none in the graphs"):
        te_dynamo.compare(torch.sin, torch.randn(8, 32))
    with pytest.raises(InvalidOptionError, match="expected recipes, got none"):
        te_dynamo.compare_recipes(nn.Linear(32, 32), torch.randn(8, 32), recipes=[])
    with pytest.raises(InvalidOptionError, match=r"expected recipes=\[...\], got 'mxfp8'"):
        te_dynamo.compare_recipes(nn.Linear(32, 32), torch.randn(8, 32), recipes="mxfp8")
    for wrong, message in (
        ({"batches": []}, "batches are empty"),
        ({"batches": [torch.randn(8, 32)], "steps": 2}, "or batches, got both"),
        ({"batches": torch.randn(8, 32)}, "batches is a list with what each step is called with, got a Tensor"),
        ({"batches": {"input": torch.randn(8, 32)}}, "got a dict"),
    ):
        with pytest.raises(InputError, match=message):
            te_dynamo.compare(nn.Linear(32, 32), **wrong)
    with pytest.raises(InputError, match="max_layers is a number of modules, got -1"):
        te_dynamo.compare(nn.Linear(32, 32), torch.randn(8, 32)).suggest_rules(max_layers=-1)
