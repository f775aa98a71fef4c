"""compare() of trained weights: AntiBERTy, a BERT of antibodies' amino acids (Ruffolo et al., MIT licence), whose wheel holds its weights."""

import importlib.util
import json
import pathlib

import pytest
import torch

import te_dynamo

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

CHAIN = "EVQLVQSGPEVKKPGTSVKVSCKASGFTFMSSAVQWVRQARGQRLEWIGWIVIGSGNTNYAQKFQERVTITRDMSTSTAYMELSSLRSEDTAVYYCAAPYCSSISCNDGFDIWGQGTMVTVS"


@pytest.fixture(scope="module")
def encoder():
    """(the model in bf16, the tokens of a chain)"""
    transformers = pytest.importorskip("transformers")
    found = importlib.util.find_spec("antiberty")
    if found is None:
        pytest.skip("antiberty is not installed")
    folder = pathlib.Path(found.origin).parent / "trained_models"
    weights = folder / "AntiBERTy_md_smooth"
    fields = json.loads((weights / "config.json").read_text())
    config = transformers.BertConfig(**{name: fields[name] for name in fields.keys() - {"architectures", "model_type"}})
    model = transformers.BertForMaskedLM(config).eval()
    missing = model.load_state_dict(
        torch.load(weights / "pytorch_model.bin", map_location="cpu", weights_only=True), strict=False
    )
    assert not missing.missing_keys
    letters = {letter: i for i, letter in enumerate((folder / "vocab.txt").read_text().split())}
    return model.bfloat16(), torch.tensor([[letters["[CLS]"], *map(letters.__getitem__, CHAIN), letters["[SEP]"]]])


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
