"""How the values of one weight [.., N, K] lie in a file, and a QuantizedTensor of the same codes and scales.

    kind      codes                     scale                                  held as
    tensor    e4m3 [.., N, K]           one, or one an expert                  Float8CurrentScaling, Float8Grouped
    row       e4m3                      [.., N]                                Float8Rowwise, Float8GroupedRowwise
    block     e4m3                      [.., ceil(N/128), ceil(K/128)]         Float8Block, 128x128
    mxfp8     e4m3                      E8M0 [.., N, K/32]                     MXFP8
    mxfp4     e2m1 [.., N, K/2]         E8M0 [.., N, K/32]                     MXFP8, whose e4m3 has every value of e2m1
    nvfp4     e2m1 [.., N, K/2]         e4m3 [.., N, K/16], fp32 of the tensor NVFP4

`read` and `write` are inverse to each other, bit for bit. Of two e2m1 values in a byte the even one is in the low nibble. A scale may have
dimensions of one more, E8M0 the dtype uint8, and rows of codes may be split into blocks. Transposed weights [.., K, N] are of MXFP8 alone, held by
columns.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from te_dynamo.errors import CheckpointError
from te_dynamo.quantized.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8GroupedQuantizer,
    Float8GroupedRowwiseQuantizer,
    Float8RowwiseQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from te_dynamo.quantized.tensor import QuantizedTensor

_ROLES = ("codes", "scale", "tensor_scale")

Parts = dict[str, Tensor]
"""Role -> tensor: "codes", "scale" and "tensor_scale", the factor of NVFP4; on meta where only dtypes and shapes are told."""

NVFP4_RANGE = 448 * 6
"""The amax of a tensor whose factor is 1."""

_E2M1 = (0, 48, 56, 60, 64, 68, 72, 76)
"""The magnitudes of e2m1, 0 0.5 1 1.5 2 3 4 6, as e4m3."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_E8M0 = (torch.uint8, torch.float8_e8m0fnu)


@dataclasses.dataclass(frozen=True)
class Kind:
    """name: of the table. block: rows and columns that share a scale, 0 for all of them. scales: their dtypes. packed: two values a byte."""

    name: str
    block: tuple[int, int]
    scales: tuple[torch.dtype, ...]
    held_as: type[Quantizer]
    packed: bool = False

    def quantizer(self, dims: int, powers_of_two: bool, transposed: bool = False) -> Quantizer:
        """Of a weight with so many dimensions. powers_of_two: how activations beside it are scaled. transposed: its file has [.., N, K] of it."""
        cls = self.held_as if dims == 2 else _OF_EXPERTS.get(self.name, self.held_as)
        fields = {"power_of_two_scale": powers_of_two, "block_dims": 1 + (self.block[0] > 1)}
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(not transposed, transposed, **{name: value for name, value in fields.items() if name in known})  # type: ignore[arg-type]

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of the scales of a weight of that shape, one where all values share it."""
        pairs = zip(shape[-2:], self.block, strict=True)
        return *shape[:-2], *(math.ceil(size / block) if block else 1 for size, block in pairs)

    def divides(self, columns: int) -> bool:
        """Whether rows of so many values have the blocks that they need: whole ones, where scales have 8 bits."""
        return self.scales[0].itemsize > 1 or columns % self.block[1] == 0

    def like(self, shape: tuple[int, ...], squeezed: bool = False) -> Parts:
        """The parts of such a weight on meta, as a new file has them. squeezed: one scale is a scalar, a row's [N], and not [1] and [N, 1]."""
        scale = self.scale_shape(shape)
        if self.block == (0, 0):
            scale = shape[:-2] or ((1,) * (not squeezed))
        elif squeezed and self.block == (1, 0):
            scale = scale[:-1]
        codes = (*shape[:-1], shape[-1] // 2) if self.packed else shape
        parts = {
            "codes": _meta(codes, torch.uint8 if self.packed else torch.float8_e4m3fn),
            "scale": _meta(scale, self.scales[0]),
        }
        if self.name == "nvfp4":
            parts["tensor_scale"] = _meta((1,) * (not squeezed), torch.float32)
        return parts

    def has_codes(self, parts: Parts, shape: tuple[int, ...]) -> bool:
        """Whether the codes are those of a weight of that shape."""
        return _rows(parts["codes"], shape).shape == self.like(shape)["codes"].shape

    def check(self, parts: Parts, names: dict[str, str], shape: tuple[int, ...]) -> None:
        """Raises CheckpointError, with the tensor's name, unless parts on meta are those of a weight of that shape."""
        wanted = self.like(shape)
        for role, dtypes in (
            ("codes", (wanted["codes"].dtype,)),
            ("scale", self.scales),
            ("tensor_scale", FLOATS[:1]),
        ):
            if role in wanted and role not in parts:
                raise CheckpointError(f"{names['codes']!r} has no {role.replace('_', ' ')}, which {self.name} needs")
            if role in parts and parts[role].dtype not in dtypes:
                raise CheckpointError(f"{names[role]!r} is {parts[role].dtype}; {self.name} has {dtypes[0]} there")
        if not self.has_codes(parts, shape):
            there = _rows(parts["codes"], shape).shape
            cut = next((n for size, n in zip(shape[-2:], self.block, strict=True) if n and size % n), 0)
            why = f"; a shard of one has to end at a border of its blocks of {cut}" if cut else ""
            raise CheckpointError(
                f"{names['codes']!r} has codes {list(there)}, and the model's {list(shape)} needs {list(wanted['codes'].shape)}{why}"
            )
        for role in set(parts) - {"codes"}:
            if _without_ones(parts[role]) != _without_ones(wanted[role]):
                raise CheckpointError(
                    f"{names[role]!r} is {list(parts[role].shape)}, and {self.name} of a weight {list(shape)} has {list(wanted[role].shape)}: "
                    "a tensor that was fused of several has to have one scale, or to be split"
                )
        if not self.divides(shape[-1]):
            raise CheckpointError(f"{names['codes']!r}: rows of {shape[-1]} values are no blocks of {self.block[1]}")
        if len(shape) > 2 and self.block[0] and shape[-2] % self.block[0]:
            raise CheckpointError(
                f"{names['codes']!r}: experts of {shape[-2]} rows would share blocks of {self.block[0]}"
            )

    def read(
        self,
        parts: Parts,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        powers_of_two: bool,
        transposed: bool = False,
    ) -> QuantizedTensor:
        """The tensor of values in `dtype` over the parts' codes and scales. transposed: the parts are those of its transpose."""
        quantizer = self.quantizer(len(shape), powers_of_two, transposed)
        codes, scale = _rows(parts["codes"], shape), parts["scale"]
        buffers = [
            _from_e2m1(codes) if self.name == "mxfp4" else codes,
            decoded(scale) if torch.float32 in self.scales else scale.view(torch.uint8),
        ]
        if transposed:
            buffers = [buffer.mT.contiguous() for buffer in buffers]
        if "tensor_scale" in parts:
            buffers.append(parts["tensor_scale"] * NVFP4_RANGE)
        described = quantizer._describe_buffers(shape).items()
        filled = {
            name: _padded(buffer, sizes, self._lines(role, shape, transposed))
            for role, (name, (sizes, _)), buffer in zip(_ROLES, described, buffers, strict=False)
        }
        return QuantizedTensor(filled, shape, dtype, quantizer)

    def write(self, stored: QuantizedTensor, like: Parts, transposed: bool = False) -> Parts:
        """The parts, with the dtypes and shapes of `like`."""
        parts, shape = {}, tuple(stored.shape)
        for role, buffer in zip(_ROLES, stored.with_usage(not transposed, transposed).buffers(), strict=False):
            lines, of = self._lines(role, shape, transposed), like[role]
            if role == "tensor_scale":
                buffer = torch.where(buffer == 0, 1, buffer / NVFP4_RANGE)  # all codes are zero, and no factor may be
            elif transposed:
                columns = shape[-1]
                buffer = buffer[:lines, :columns].reshape(*shape[:-2], -1, columns).mT.contiguous()
            if role == "codes" and self.name == "mxfp4":
                buffer = _to_e2m1(buffer)
            cut = buffer if buffer.numel() == of.numel() else buffer[:lines, : of.numel() // lines]
            parts[role] = _encoded(cut, of.dtype).reshape(of.shape)
        return parts

    def _lines(self, role: str, shape: tuple[int, ...], transposed: bool) -> int:
        """How many rows a buffer has without its padding."""
        if role == "codes":
            return math.prod(shape[:-1])
        return math.prod(shape[:-1]) // self.block[1] if transposed else math.prod(self.scale_shape(shape)[:-1])


KINDS = {
    kind.name: kind
    for kind in (
        Kind("tensor", (0, 0), FLOATS, Float8CurrentScalingQuantizer),
        Kind("row", (1, 0), FLOATS, Float8RowwiseQuantizer),
        Kind("block", (128, 128), (*FLOATS, *_E8M0), Float8BlockQuantizer),
        Kind("mxfp4", (1, 32), _E8M0, MXFP8Quantizer, packed=True),
        Kind("mxfp8", (1, 32), _E8M0, MXFP8Quantizer),
        Kind("nvfp4", (1, 16), (torch.float8_e4m3fn,), NVFP4Quantizer, packed=True),
    )
}
_OF_EXPERTS: dict[str, type[Quantizer]] = {"tensor": Float8GroupedQuantizer, "row": Float8GroupedRowwiseQuantizer}
_KIND_OF: dict[type[Quantizer], str] = {
    **{cls: kind for kind, cls in _OF_EXPERTS.items()},
    **{kind.held_as: kind.name for kind in KINDS.values()},
}


def kind_of(quantizer: Quantizer) -> str:
    """The kind in which a file has what is held so, "" where none has."""
    unusual = {"fp8_format": "e5m2", "swizzled": True, "rowwise": False}
    if any(getattr(quantizer, name, None) == value for name, value in unusual.items()):
        return ""
    kind = _KIND_OF.get(type(quantizer), "")
    return "" if kind and KINDS[kind].block[0] > quantizer.rows_of_a_scale() else kind


def check_scale(scale: Tensor, name: str) -> bool:
    """Whether all are powers of two, in fp32, which no chance makes. Raises CheckpointError for scales that are zero, negative or no numbers;
    one of 8 bits is zero where its block is."""
    values = decoded(scale)
    bad = ~values.isfinite() | (values < 0) | ((values == 0) & (scale.dtype.itemsize > 1))
    if bad.any():
        raise CheckpointError(
            f"{name!r}: {int(bad.sum())} of its {bad.numel()} scales are zero, negative or no numbers"
        )
    return scale.dtype is torch.float32 and bool((values.frexp().mantissa == 0.5).all())


def decoded(scale: Tensor) -> Tensor:
    """Scales in fp32: uint8 is E8M0."""
    return (scale.view(torch.float8_e8m0fnu) if scale.dtype is torch.uint8 else scale).to(torch.float32)


def _encoded(values: Tensor, dtype: torch.dtype) -> Tensor:
    if values.dtype.itemsize == dtype.itemsize:
        return values.view(dtype)
    return values.to(torch.float8_e8m0fnu).view(dtype) if dtype in _E8M0 else values.to(dtype)


def _rows(codes: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Rows that are not split into blocks."""
    return codes.flatten(-2) if codes.dim() == len(shape) + 1 else codes


def _without_ones(tensor: Tensor) -> list[int]:
    return [size for size in tensor.shape if size != 1]


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _padded(buffer: Tensor, shape: tuple[int, ...], lines: int) -> Tensor:
    """A buffer of that shape, zero behind the values of `lines` lines."""
    if buffer.numel() == math.prod(shape):
        return buffer.reshape(shape)
    whole = buffer.new_zeros(shape)
    whole[:lines, : buffer.numel() // lines] = buffer.reshape(lines, -1)
    return whole


def _e2m1(like: Tensor) -> Tensor:
    return torch.tensor(_E2M1, dtype=torch.uint8, device=like.device)


def _from_e2m1(codes: Tensor) -> Tensor:
    """Packed e2m1 as e4m3."""
    codes = torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2)
    return (_e2m1(codes)[(codes & 7).int()] | (codes & 8) << 4).view(torch.float8_e4m3fn)


def _to_e2m1(codes: Tensor) -> Tensor:
    """Its inverse."""
    bits = codes.view(torch.uint8)
    nibbles = torch.searchsorted(_e2m1(codes), bits & 0x7F).to(torch.uint8) | (bits & 0x80) >> 4
    return nibbles[..., 0::2] | nibbles[..., 1::2] << 4
