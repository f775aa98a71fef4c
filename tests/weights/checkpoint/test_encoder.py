"""A trained encoder saved in each form and loaded: the numbers of the recipe, and the nearest neighbours that compare's SNRs promise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models.antiberty import antiberty, embeddings, kept, lineage, tokens_of, untrained

import te_dynamo

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

FORMS = {
    "float8_block_scaling": ["fp8", "compressed-tensors", "modelopt"],
    **{
        name: ["compressed-tensors", "modelopt"]
        for name in ("float8_current_scaling", "float8_rowwise", "mxfp8", "nvfp4")
    },
}
CHAINS = lineage(12)


def part(model: Any, recipe: str) -> Any:
    """Two of its eight layers, which are alike, where every bit is compared; few neighbours of two change by wrong scales of NVFP4."""
    if recipe != "nvfp4":
        model.bert.encoder.layer = model.bert.encoder.layer[:2]
    return model


def embedded(model: Any, **options: Any) -> torch.Tensor:
    torch.compiler.reset()
    return embeddings(torch.compile(model.bert, backend="te", options={"codegen": "eager", **options}), CHAINS)


@pytest.mark.parametrize("recipe", FORMS)
def test_a_loaded_encoder_is_the_one_that_ran(recipe: str, tmp_path: Path) -> None:
    model = part(antiberty(), recipe)
    expected = embedded(model, recipe=recipe)
    for form in FORMS[recipe]:
        te_dynamo.save_checkpoint(model, tmp_path / form, form, recipe=recipe)
        found = embedded(te_dynamo.load_checkpoint(part(untrained(), recipe), tmp_path / form))
        assert torch.equal(found, expected) if recipe != "nvfp4" else kept(expected, found, 5) > 0.95, form


def test_neighbours_are_kept_as_compare_says(tmp_path: Path) -> None:
    """Noise of the embeddings is in the order of its SNRs; FP8 keeps nearly all neighbours. benchmarks/encoder.py counts those of 100 chains."""
    model = antiberty()
    with torch.no_grad():
        compared = te_dynamo.compare_recipes(
            model, input_ids=tokens_of(*CHAINS[:2]), recipes=["nvfp4", "float8_current_scaling"]
        ).comparisons
    reference, found = embeddings(model.bert, CHAINS), {}
    for recipe in compared:  # the most accurate first
        te_dynamo.save_checkpoint(model, tmp_path / recipe, "modelopt", recipe=recipe)
        found[recipe] = embedded(te_dynamo.load_checkpoint(untrained(), tmp_path / recipe))
    assert list(compared) == ["float8_current_scaling", "nvfp4"]
    fp8, nvfp4 = ((vectors - reference).norm() for vectors in found.values())
    assert 2 * fp8 < nvfp4
    assert kept(reference, found["float8_current_scaling"], 5) > 0.8 and kept(reference, found["nvfp4"], 5) > 0.5
