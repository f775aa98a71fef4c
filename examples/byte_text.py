"""Real text that every machine with Python has: the standard library's source, read as bytes."""

from __future__ import annotations

import dataclasses
import pathlib
import sysconfig
from collections.abc import Iterator

import torch

__all__ = ["ByteText", "decode", "standard_library"]

# Other people's packages, tests, and two folders that are tables of data rather than code.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "encodings", "pydoc_data"}


@dataclasses.dataclass(frozen=True)
class ByteText:
    """A text split in two.

    train, validation: uint8 [bytes], the validation part being the text's end.
    """

    train: torch.Tensor
    validation: torch.Tensor

    def batches(self, part: str, count: int, batch: int, seq: int, seed: int) -> Iterator[torch.Tensor]:
        """`count` random batches of `part` ("train" or "validation"), int64 [batch, seq].

        Equal seeds give equal batches.
        """
        data = getattr(self, part)
        generator = torch.Generator().manual_seed(seed)
        window = torch.arange(seq)
        for _ in range(count):
            starts = torch.randint(len(data) - seq, (batch, 1), generator=generator)
            yield data[starts + window].long()


def standard_library(max_bytes: int, validation: float = 0.05) -> ByteText:
    """The standard library's .py files in sorted order, cut at `max_bytes`; the last part is held out.

    validation: the share held out, 0 to 1.

    Raises FileNotFoundError where the standard library is not installed as source.
    """
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(root.rglob("*.py")):
        if _SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts):
            text += path.read_bytes()
        if len(text) >= max_bytes:
            break
    if not text:
        raise FileNotFoundError(f"no .py files under {root}: this Python has its standard library in another form")
    data = torch.frombuffer(text[:max_bytes], dtype=torch.uint8)
    cut = int(len(data) * (1 - validation))
    return ByteText(data[:cut], data[cut:])


def decode(tokens: torch.Tensor) -> str:
    """The text of byte tokens; what is not UTF-8 shows as a replacement character."""
    return bytes(tokens.tolist()).decode("utf-8", errors="replace")
