"""What each recipe costs a trained encoder, and which nearest neighbours stay when its weights are stored in it: no GPU.

    python benchmarks/encoder.py                        # some minutes; needs `pip install .[frameworks]`
    python benchmarks/encoder.py --recipes nvfp4 --chains 20

The encoder is AntiBERTy's (26 million parameters, 49 linear layers). `te_dynamo.compare_recipes` gives the SNR of four chains: of the model's
logits and of the worst linear layer. Then the model is saved by `te_dynamo.save_checkpoint` in the first form that has the recipe, and loaded
again. Each of 100 chains has the mean of its last hidden state as its embedding; `top 1` and `top 5` are the shares of nearest neighbours by
cosine that are those of the bf16 model. Blocks of 128 in MXFP8 are in no form: that recipe quantizes when it runs.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
import tempfile
from typing import Any

import report
import torch
from environment import collect

sys.path.insert(0, str(report.ROOT / "tests"))

from helpers.models.antiberty import antiberty, embeddings, kept, lineage, tokens_of, untrained

import te_dynamo
from te_dynamo.recipe import MXFP8BlockScaling, Recipe, by_name

RECIPES: dict[str, tuple[Recipe, str]] = {
    "float8_current_scaling": (by_name("float8_current_scaling"), "compressed-tensors"),
    "float8_rowwise": (by_name("float8_rowwise"), "compressed-tensors"),
    "float8_block_scaling": (by_name("float8_block_scaling"), "fp8"),
    "mxfp8": (by_name("mxfp8"), "compressed-tensors"),
    "mxfp8-128": (MXFP8BlockScaling(scale_block=128), ""),
    "nvfp4": (by_name("nvfp4"), "compressed-tensors"),
}
"""Name -> the recipe, and the form of its files."""


@dataclasses.dataclass(frozen=True)
class Row:
    """SNRs in dB. top_1, top_5: shares of nearest neighbours that stay."""

    recipe: str
    form: str
    output_db: float
    worst_linear_db: float
    embeddings_db: float
    top_1: float
    top_5: float


def stored(model: Any, recipe: Recipe, form: str) -> Any:
    """The model with weights as a file has them, compiled; the model itself where there is no form."""
    options: dict[str, Any] = {"codegen": "eager"}
    if not form:
        return torch.compile(model.bert, backend="te", options={**options, "recipe": recipe})
    with tempfile.TemporaryDirectory() as folder:
        te_dynamo.save_checkpoint(model, pathlib.Path(folder), form, recipe=recipe)
        loaded = te_dynamo.load_checkpoint(untrained(), folder)
    return torch.compile(loaded.bert, backend="te", options=options)


def rows_of(names: list[str], chains: list[str]) -> list[Row]:
    model = antiberty()
    compared = te_dynamo.compare_recipes(
        model, input_ids=tokens_of(*chains[:4]), recipes=[RECIPES[name][0] for name in names]
    ).comparisons
    expected, rows = embeddings(model.bert, chains), []
    for name in names:
        recipe, form = RECIPES[name]
        summary = compared[recipe.describe()].summary
        torch.compiler.reset()
        found = embeddings(stored(model, recipe, form), chains)
        noise = 20 * torch.log10(expected.norm() / (found - expected).norm()).item()
        tops = [kept(expected, found, count) for count in (1, 5)]
        rows.append(
            Row(name, form, *(round(db, 1) for db in (summary["snr_output_db"], summary["worst_snr_db"], noise)), *tops)
        )
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--recipes", default=",".join(RECIPES), help="of: %(default)s")
    parser.add_argument("--chains", type=int, default=100)
    args = parser.parse_args()
    report.split_choices(parser, args, recipes=RECIPES)
    rows = rows_of(args.recipes, lineage(args.chains))
    report.write(args.out, "encoder", collect("cpu"), rows, chains=args.chains)


if __name__ == "__main__":
    main()
