"""What each rank receives in a training step, by layout, collective and dtype: counted on gloo, no GPU.

    python benchmarks/wire.py                                        # some minutes
    python benchmarks/wire.py --layouts fsdp2,sequence --ranks 2

The model is a Llama of four small blocks in bf16, shared out as tests/helpers/distributed/layouts.py does; with `experts` its first block is
a mixture. The bytes of a layout grow with the sizes of weights (FSDP2, DDP) or of activations (the others): the ratio to bf16 is what holds
for other models too. `te_dynamo.testing.count_wire` says what counts as received. The numbers are those of the second step.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
import tempfile

import report
from environment import collect

sys.path.insert(0, str(report.ROOT / "tests"))

from helpers.distributed.layouts import LAYOUTS, train
from helpers.distributed.ranks import Ranks

from te_dynamo.recipe import MXFP8BlockScaling

RECIPES = {"bf16": None, "te": "float8_current_scaling"}
OF_WEIGHTS = {"te mxfp8": "mxfp8", "te mxfp8 32x32": MXFP8BlockScaling(weight_block_dims=2)}
"""Of layouts whose weights may travel in FP8 too."""
SHARED = [name for name in LAYOUTS if not name.startswith("alone")]


@dataclasses.dataclass(frozen=True)
class Row:
    """kib: that the first rank receives. ratio: to bf16's of the same collective. dtypes: that travel."""

    layout: str
    ranks: int
    collective: str
    recipe: str
    kib: float
    ratio: float
    dtypes: list[str]


def rows_of(ranks: Ranks, size: int, layout: str) -> list[Row]:
    """A row for each collective and recipe. A pipeline's first rank receives gradients alone: the last one's activations are as many."""
    rows: list[Row] = []
    for recipe, name in (RECIPES | (OF_WEIGHTS if layout.endswith("in fp8") else {})).items():
        wire = ranks.run(train, layout, False, 2, {"recipe": name}, 4, 256, True, seconds=300)[0]["wire"]
        received = {key: count for key, count in wire.items() if count}
        for collective in dict.fromkeys(operation for operation, _ in received):
            found = {dtype: count for (operation, dtype), count in received.items() if operation == collective}
            kib = round(sum(found.values()) / 1024, 1)
            beside = next((row.kib for row in rows if (row.collective, row.recipe) == (collective, "bf16")), kib)
            dtypes = sorted(str(dtype).removeprefix("torch.") for dtype in found)
            rows.append(Row(layout, size, collective, recipe, kib, round(kib / beside, 3), dtypes))
    return rows


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--layouts", default=",".join(SHARED), help="of: %(default)s")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    args = parser.parse_args()
    report.split_choices(parser, args, layouts=SHARED)
    rows: list[Row] = []
    for size in args.ranks:
        with tempfile.TemporaryDirectory() as folder, Ranks(pathlib.Path(folder), size=size) as ranks:
            for layout in args.layouts:
                rows += rows_of(ranks, size, layout)
    rows.sort(key=lambda row: SHARED.index(row.layout))
    report.write(args.out, "wire", collect("cpu"), rows)


if __name__ == "__main__":
    main()
