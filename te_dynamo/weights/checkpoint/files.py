"""Tensors in safetensors files: the header first, then one tensor at a time.

A file is the length of its header (8 bytes), the header (JSON: name -> dtype, shape and place), then the bytes of the tensors.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from te_dynamo.errors import CheckpointError

INDEX = "model.safetensors.index.json"
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class _Place(NamedTuple):
    file: Path
    begin: int
    meta: Tensor


class Files(Mapping[str, Tensor]):
    """The tensors of a folder, or of one file, by name: what is asked for is read then. shards: its files, where they are known.

    metas:    name -> a tensor on meta, of the header's dtype and shape.
    metadata: the headers' own words, as torchao writes them.
    """

    def __init__(self, path: Path, shards: Sequence[Path] = ()) -> None:
        self._places: dict[str, _Place] = {}
        self.metadata: dict[str, str] = {}
        with of_its_form(f"{path}: the header of a file, or {INDEX},"):
            for file in shards or _shards(path):
                for name, place in _read_header(file, self.metadata):
                    if name in self._places:
                        raise CheckpointError(f"{name!r} is in {self._places[name].file.name} and in {file.name}")
                    self._places[name] = place
            if (path / INDEX).is_file():
                for name, file in read_json(path / INDEX)["weight_map"].items():
                    if name not in self._places:
                        raise CheckpointError(f"{name!r} is not in {file}, where {INDEX} has it")
        self.metas = {name: place.meta for name, place in self._places.items()}

    def __getitem__(self, name: str) -> Tensor:
        file, begin, meta = self._places[name]
        storage = torch.UntypedStorage.from_file(str(file), False, begin + meta.nbytes)
        whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, begin, (meta.nbytes,))  # type: ignore[call-overload]
        return whole.clone().view(meta.dtype).reshape(meta.shape)  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


@contextlib.contextmanager
def of_its_form(what: str) -> Iterator[None]:
    """Raises CheckpointError where JSON that is read inside has other parts, or parts of other types, than it has to have."""
    try:
        yield
    except CheckpointError:
        raise
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError, re.error) as error:
        raise CheckpointError(f"{what} is not of its form: {type(error).__name__}: {error}") from error


def read_json(file: Path) -> Any:
    """What a file of JSON says. Raises CheckpointError for one that is none."""
    return _parsed(file.read_bytes(), f"{file} is cut short, or")


def _parsed(text: bytes, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{what} no JSON: {error}") from None


def _shards(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if (path / INDEX).is_file():
        found = sorted(set(read_json(path / INDEX)["weight_map"].values()))
        missing = [name for name in found if not (path / name).is_file()]
        if missing:
            raise CheckpointError(f"{path}: {INDEX} names {missing[0]}, which is not there")
        return [path / name for name in found]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{path}: no file of safetensors is there")
    return files


def _read_header(file: Path, metadata: dict[str, str]) -> Iterator[tuple[str, _Place]]:
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > size - 8:
            raise CheckpointError(
                f"{file}: cut short, or no file of safetensors: its header would end at byte {8 + length} of {size}"
            )
        header = _parsed(opened.read(length), f"{file}: its header is")
    metadata.update(header.pop("__metadata__", {}))
    for name, entry in header.items():
        if entry["dtype"] not in _DTYPES:
            raise CheckpointError(
                f"{name!r} of {file.name} has the dtype {entry['dtype']}; known are {', '.join(_DTYPES)}"
            )
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        meta = torch.empty(entry["shape"], dtype=_DTYPES[entry["dtype"]], device="meta")
        if end > size or end - begin != meta.nbytes:
            raise CheckpointError(
                f"{name!r} has {meta.nbytes} bytes, to byte {end} of {file.name}, which is cut short at {size}"
            )
        yield name, _Place(file, begin, meta)


Written = tuple[Tensor, Callable[[], Tensor]]
"""A tensor on meta, and what gives its values when its turn has come."""


def write_files(folder: Path, tensors: Mapping[str, Written], metadata: Mapping[str, str], shard_bytes: int) -> None:
    """Writes model.safetensors, or shards of at most `shard_bytes` and their index: all of them, or none."""
    shards: list[dict[str, Tensor]] = [{}]
    for name, (meta, _) in tensors.items():
        if shards[-1] and sum(each.nbytes for each in shards[-1].values()) + meta.nbytes > shard_bytes:
            shards.append({})
        shards[-1][name] = meta
    files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    places = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    with tempfile.TemporaryDirectory(dir=folder) as unfinished, progress() as bar:
        task = bar.add_task("saving", total=len(tensors))
        for i, file in enumerate(files if len(files) > 1 else ["model.safetensors"]):
            # Readers look at bytes in place: what has larger elements lies first, so that all are aligned.
            shard = dict(sorted(shards[i].items(), key=lambda item: -item[1].itemsize))
            with Path(unfinished, file).open("wb") as opened:
                header = _header(shard, metadata)
                opened.write(len(header).to_bytes(8, "little") + header)
                for name, meta in shard.items():
                    made = tensors[name][1]().detach().contiguous().cpu()
                    assert (made.dtype, made.shape) == (meta.dtype, meta.shape), name
                    opened.write((ctypes.c_char * made.nbytes).from_address(made.data_ptr()) if made.nbytes else b"")
                    bar.advance(task)
        for file in os.listdir(unfinished):
            os.replace(Path(unfinished, file), folder / file)
    if len(files) > 1:
        total = sum(meta.nbytes for meta, _ in tensors.values())
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2))


def progress() -> Progress:
    """A bar on a terminal, and nothing elsewhere."""
    return Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True)


def _header(shard: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    begin = 0
    for name, meta in shard.items():
        header[name] = {
            "dtype": NAMES[meta.dtype],
            "shape": list(meta.shape),
            "data_offsets": [begin, begin + meta.nbytes],
        }
        begin += meta.nbytes
    text = json.dumps(header).encode()
    return text + b" " * (-len(text) % 8)
