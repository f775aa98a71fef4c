"""compare() of trained weights."""

import pytest
import torch
from helpers.models.antiberty import CHAIN, antiberty, tokens_of

import te_dynamo

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def encoder():
    """(the model in bf16, the tokens of a chain)"""
    return antiberty(), tokens_of(CHAIN)


def test_a_trained_encoder(encoder):
    model, tokens = encoder
    recovered = model(input_ids=tokens).logits[0, 1:-1].argmax(-1) == tokens[0, 1:-1]
    assert recovered.float().mean() > 0.9  # the weights are the trained ones
    found = te_dynamo.compare(model, input_ids=tokens, labels=tokens)
    assert found.summary["linears"] == 49 and found.summary["linears_in_all"] == 50  # the head has 25 columns
    assert abs(found.summary["loss_change"]) < 0.01 and found.summary["snr_output_db"] > 30
    assert all(24 < row.snr_db < 34 for row in found.rows)


def test_which_recipe(encoder):
    model, tokens = encoder
    with torch.no_grad():
        found = te_dynamo.compare_recipes(model, input_ids=tokens, recipes=["nvfp4", "float8_current_scaling"])
    fp8, nvfp4 = found.comparisons.values()  # the most accurate first
    assert fp8.recipe == "float8_current_scaling"
    assert fp8.summary["snr_output_db"] > nvfp4.summary["snr_output_db"] + 8
