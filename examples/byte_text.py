"""Real text that every machine with Python has, read as bytes: the standard library's source, and its pages of English."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import sysconfig
from collections.abc import Iterator
from pydoc_data.topics import topics

import torch

# Other people's packages, tests, and two folders that are tables of data rather than code.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "encodings", "pydoc_data"}

_NOT_PROSE = re.compile(r"\n |[|]|[*=-]{3}")  # indented code, tables, headings


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
    return _split(text[:max_bytes], validation)


def english(max_bytes: int, validation: float = 0.05) -> ByteText:
    """The paragraphs of prose in what Python's help() says of the language, about 190 kB; `standard_library` says the rest."""
    pages = (topics[name].encode("ascii", "ignore").decode() for name in sorted(topics))
    paragraphs = [paragraph for page in pages for paragraph in page.split("\n\n")]
    prose = [" ".join(each.split()) for each in paragraphs if re.match("[A-Z]", each) and not _NOT_PROSE.search(each)]
    text = "\n".join(prose).encode()
    return _split(bytearray(text[:max_bytes]), validation)


def _split(text: bytearray, validation: float) -> ByteText:
    data = torch.frombuffer(text, dtype=torch.uint8)
    cut = int(len(data) * (1 - validation))
    return ByteText(data[:cut], data[cut:])


def decode(tokens: torch.Tensor) -> str:
    """The text of byte tokens; what is not UTF-8 shows as a replacement character."""
    return bytes(tokens.tolist()).decode("utf-8", errors="replace")
