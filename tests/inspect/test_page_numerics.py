"""The tab Numerics of explain's page: cards in words, columns, the dots of its plot, the rules it suggests."""

from expecttest import assert_expected_inline
from helpers.comparisons import comparison

from te_dynamo.inspect.page.numerics import numerics
from te_dynamo.report import MatchRecord

LAYERS = [f"layers.{i}.fc" for i in range(6)]


def of(found, modules=LAYERS):
    return numerics(found, [MatchRecord("linear", module) for module in modules])


def test_cards_are_in_words():
    cards = of(comparison(LAYERS))["cards"]
    assert_expected_inline(
        "\n".join(f"{title}: {value} ({detail})" for title, value, detail in cards),
        """\
Linears in a recipe: 6 of 7 (coverage 100% of linear FLOPs, in float8_current_scaling; 2 steps)
Loss change: -0.003% (2.5 in the model's precision, 2.49993 in the recipe)
Model's output: 30.2 dB (SNR against the model's own precision)
Gradients: 21.5 dB (the worst: head.bias, 12.2 dB)
Worst linear: 29.5 dB (layers.5.fc; the median is 30.8 dB)""",
    )


def test_what_was_not_measured_has_no_card():
    unknown = dict(loss_change=None, snr_output_db=None, snr_gradients_db=None)
    titles = [title for title, _, _ in of(comparison([], **unknown))["cards"]]
    assert titles == ["Linears in a recipe"]


def test_the_module_is_first_snrs_follow_and_empty_columns_go():
    columns = of(comparison(LAYERS))["columns"]
    assert [column["title"] for column in columns if column["visible"]] == ["module", "output", "dx", "x", "M x N x K"]
    forms = {column["field"]: column["form"] for column in columns if not column["visible"]}
    assert (forms["x_flushed"], forms["x_amax"], forms["finite"]) == ("percent", "number", "text")
    assert not {"note", "snr_dw_db", "weight_amax"} & {column["field"] for column in columns}


def test_dots_are_in_the_order_of_the_model():
    plot = of(comparison(LAYERS[::-1], worst=LAYERS[:1]))["plot"]
    assert plot["products"] == ["output", "dx"], "dw was not measured"
    output = [dot for dot in plot["dots"] if dot["product"] == "output"]
    assert [dot["title"].partition(":")[0] for dot in output] == LAYERS
    assert [dot["x"] for dot in output] == sorted(dot["x"] for dot in output)
    assert output[0]["y"] == max(dot["y"] for dot in plot["dots"]), "the worst is the lowest"
    assert all(line["y"] >= dot["y"] for line in plot["lines"][:1] for dot in plot["dots"])


def test_equal_snrs_have_a_plot():
    assert len({line["label"] for line in of(comparison(LAYERS[:1]))["plot"]["lines"]}) > 1


def test_suggested_rules_can_be_pasted():
    rules = of(comparison(LAYERS, worst=LAYERS[2:3]))["rules"]
    assert eval(f"dict({rules})") == {"options": {"rules": [("^layers\\.2\\.fc$", None)]}}
    assert of(comparison(LAYERS))["rules"] == ""
