"""The result of an activation, a gated unit, a norm or a gradient quantized where each block, each row, or all of it has a scale.

A block's scale needs no value of another block. So the tile that computes the result quantizes it, and the result itself goes to memory only
if it is asked for. Equal to the unfused kernel and then te.quantize's, bit for bit (kernels/produce/sources.py). With one scale a tensor
its amax has to be known first, which takes two launches (kernels/produce/tensor.py). With one scale a row, rows take one launch and columns
another (kernels/produce/rows.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from te_dynamo.kernels.layouts.block import BlockForm
from te_dynamo.kernels.layouts.form import Form
from te_dynamo.kernels.layouts.mxfp8 import MXFP8Form
from te_dynamo.kernels.layouts.row import RowForm
from te_dynamo.kernels.layouts.sizes import Size, blocks_of, round_up, rows_and_columns
from te_dynamo.kernels.layouts.tensor import TensorForm
from te_dynamo.kernels.produce.kernels import produce_kernel
from te_dynamo.kernels.produce.rows import produce_rows
from te_dynamo.kernels.produce.tensor import produce_tensor
from te_dynamo.kernels.quantize.float8_block import block_launches
from te_dynamo.kernels.quantize.mxfp8 import mxfp8_launches
from te_dynamo.kernels.runtime.launch import launch
from te_dynamo.kernels.tiles.block_words import packs

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

_NO_NORM = dict.fromkeys(("LAYER", "HAS_WEIGHT", "HAS_BIAS", "CAST_BEFORE_WEIGHT", "ZERO_CENTERED", "MODULATED"), False)

_OTHER_BLOCKS = {"SCALING": "", "EPS": 0.0, "POWER_OF_TWO": True, "LARGEST": 0.0, "ROWS": 0, "GROUP_M": 0} | {
    "SCALE_BLOCK": 0, "TWO_D": False, "SWIZZLED": False, "BLOCK_M": 0, "BLOCK_K": 128,
}  # fmt: skip
"""The kernel's constants for the blocks of 128 by block_kernels.py, and for those by mxfp8_kernels.py, where they are not these blocks'."""


@dataclasses.dataclass(frozen=True)
class Source:
    """What a launch computes.

    name, inputs, strides: SOURCE of kernels/produce/sources.py, its tensors, and the values from row to row of each.
    kind: of an activation, or of a stack, of which stacked_shape is the result's. norm: the kernel's arguments that say which norm it is; statistics: mean and rstd of the rows.
    dtype: what is quantized is rounded to. kept: the dtype that the result is kept in, if it is.
    """

    name: str
    inputs: Sequence[torch.Tensor]
    strides: Sequence[Size]
    kind: str = ""
    norm: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    statistics: Sequence[torch.Tensor] = ()
    dtype: torch.dtype | None = None
    kept: torch.dtype | None = None
    stacked_shape: tuple[Size, ...] = ()

    @property
    def like(self) -> torch.Tensor:
        """The input that the result is like: of a gradient not dy."""
        return self.inputs["backward" in self.name]

    @property
    def is_pair(self) -> bool:
        """Whether there are two results: both gradients of a gated unit."""
        return self.name == "gated_backward"

    @property
    def rounded_to(self) -> str:
        """ROUNDED_TO of the kernels."""
        return NAMES[self.dtype or self.like.dtype]

    def packed(self) -> bool:
        """Whether it is read, and made, as words of two."""
        if self.norm:
            read, strides = self.inputs[:1], self.strides[:1]
            plain = not self.norm["MODULATED"] and {self.dtype, self.kept} <= {None, torch.bfloat16}
        else:
            read, strides, plain = self.inputs, self.strides, True
        in_words = all(isinstance(stride, int) and stride % 8 == 0 for stride in strides)
        return plain and in_words and all(map(packs, read))

    def itemsize(self) -> int:
        """Bytes of the widest element that is loaded, kept or cast."""
        dtypes = (self.inputs[0].dtype, self.like.dtype, self.dtype, self.kept)
        return max(dtype.itemsize for dtype in dtypes if dtype is not None)

    def arguments(self) -> dict[str, Any]:
        """Those of a kernel, beside the buffers and what it is told of their form."""
        a, b, c = (*self.inputs, *[self.inputs[0]] * 2)[:3]
        mean, rstd = self.statistics or (a, a)
        strides = (*self.strides, 0, 0)[:3]
        return {
            **{"a": a, "b": b, "c": c, "mean": mean, "rstd": rstd},
            **{"a_stride": strides[0], "b_stride": strides[1], "c_stride": strides[2]},
            **{"SOURCE": self.name, "KIND": self.kind, "ROUNDED_TO": self.rounded_to},
            "rows_of_sample": self.norm.get("rows_of_sample", 0),
            **{name: self.norm.get(name, value) for name, value in _NO_NORM.items()},
        }


def produce(
    source: Source, form: Form, keep_output: bool, *, sums: bool = False, half: int = -1, **of_tensor: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """(the result if it is kept, the fp32 sums of its columns if asked for, its buffers): of both gradients of a gated unit one after the other.

    half: 0 or 1 makes them halves of one tensor [.., 2K], dgate this one; -1 does not. Of blocks K is then a multiple of 128.
    of_tensor: what `produce_tensor` takes besides, for one scale a tensor.
    """
    if isinstance(form, TensorForm):
        return produce_tensor(source, form, keep_output, sums, half, **of_tensor)
    if isinstance(form, RowForm):
        return produce_rows(source, form, keep_output, sums, half)
    x = source.like
    rows, columns = rows_and_columns(source.stacked_shape or x.shape)
    width, count = (columns, 1 + source.is_pair) if half == -1 else (2 * columns, 1)
    shape = (*x.shape[:-1], width)
    kept = [torch.empty(shape, dtype=source.kept or x.dtype, device=x.device) for _ in range(count * keep_output)]
    held = [form.allocate((rows, width), x.device) for _ in range(count)]
    buffers = [buffer for each in held for buffer in each.values()]
    arguments = source.arguments() | {"M": rows, "K": columns, "HALF": half, "sums": x}
    arguments |= dict(zip(("y", "second_y"), (*kept, x, x), strict=False))
    for prefix, each in zip(("", "second_"), (*held, dict[str, torch.Tensor]()), strict=False):
        # In this order for all forms; in blocks of 32 columnwise data is not transposed.
        pointers = zip(BlockForm.NAMES, form.pointers(each, unused=x).values(), strict=True)
        arguments |= {f"{prefix}{name}": pointer for name, pointer in pointers}
    partial: list[torch.Tensor] = []
    for number, (grid, constants) in enumerate(_launches(form, (rows, columns), source)):
        if number == 0 and sums:
            parts = (
                blocks_of(rows, constants["ROWS"])
                if "ROWS" in constants
                else round_up(rows, 128) // constants["BLOCK_M"]
            )
            partial = [torch.empty((parts, columns), dtype=torch.float32, device=x.device)]
            arguments["sums"] = partial[0]
        if isinstance(rows, int) and rows * columns == 0:
            continue
        once = {"KEEP_OUTPUT": keep_output and number == 0, "SUMS": sums and number == 0}
        launch(produce_kernel, grid, **arguments, **once, **_OTHER_BLOCKS | constants)
    return kept, [part.sum(0) for part in partial], buffers


def _launches(form: Form, size: tuple[Size, Size], source: Source) -> Iterator[tuple[tuple[Size, ...], dict[str, Any]]]:
    """(the grid, the constants) of each launch.

    By more warps than what only quantizes: a thread has several inputs, or results, for each value.
    """
    itemsize, packed = source.itemsize(), source.packed()
    if isinstance(form, MXFP8Form):
        of_one = math.gcd(*source.strides) if source.kind == "columns" else None  # type: ignore[arg-type]
        launches = mxfp8_launches(form, size, itemsize, packed, None, columns_of_one=of_one)
    else:
        assert isinstance(form, BlockForm)
        largest = torch.finfo(source.dtype or source.like.dtype).max
        launches = block_launches(form, size, itemsize, packed and form.power_of_two, None, largest)
    for _, grid, constants in launches:
        of_gradient = "backward" in source.name
        more = 4 if constants["COLUMNWISE"] and of_gradient else 1 if source.name == "stack" else 2
        most = 16 if constants["PACKED"] or of_gradient else 8
        yield grid, constants | {"num_warps": min(more * constants["num_warps"], most)}
