"""--input: random tensors of a size and dtype."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from te_dynamo.command_line.failure import Failure, one_line

_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def inputs_of(given: Sequence[str], model: Any, device: str) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """(args, kwargs) of `[NAME=]SIZE[:DTYPE]`, SIZE as 1x128, on `device` or where the model is.

    Without a dtype it is the model's. Floats are drawn from a normal distribution, integers below the vocabulary of a model of
    transformers, and are 0 or 1 of others. Raises Failure for another text.
    """
    parameter = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", 2)
    args, kwargs = [], {}
    for text in given:
        match = re.fullmatch(r"(?:(\w+)=)?(\d+(?:x\d+)*)(?::(\w+))?", text)
        if match is None or (match[3] and match[3] not in _DTYPES):
            raise Failure(
                f"--input {text!r}: expected a size and a dtype of torch's, as 1x128:int64 or mask=1x128:bool", status=2
            )
        size = tuple(map(int, match[2].split("x")))
        if match[1] in kwargs:
            raise Failure(f"--input {text!r}: {match[1]!r} is given twice", status=2)
        dtype = _DTYPES[match[3]] if match[3] else torch.float32 if parameter is None else parameter.dtype
        try:
            tensor = _random(size, dtype, vocabulary, device or ("cpu" if parameter is None else parameter.device))
        except (RuntimeError, TypeError) as error:  # more than memory holds, or a dtype that nothing computes in
            raise Failure(f"--input {text!r}: torch cannot make it: {one_line(error)}", status=2) from error
        if match[1]:
            kwargs[match[1]] = tensor
        else:
            args.append(tensor)
    return tuple(args), kwargs


def _random(size: tuple[int, ...], dtype: torch.dtype, below: int, device: str | torch.device) -> Tensor:
    if dtype == torch.bool:
        return torch.ones(size, dtype=dtype, device=device)  # of a mask: nothing is masked
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.randint(0, min(below, torch.iinfo(dtype).max), size, device=device).to(dtype)
    return torch.randn(size, device=device).to(dtype)
