"""--device: where a model runs, or, for `explain`, the GPU that it is explained for."""

from __future__ import annotations

import torch

from te_dynamo.command_line.failure import Failure, one_line
from te_dynamo.errors import InvalidOptionError
from te_dynamo.inspect.fake_cuda import checked_gpu
from te_dynamo.kernels.runtime.target import TARGETS


def checked_device(name: str, explained_for: bool = False) -> str:
    """`name` as torch writes it, or, where a GPU can be `explained_for`, one of TARGETS; "" as it is. Letters may have any case.

    Raises Failure for a device that does not exist, that is not here, or on which nothing can run.
    """
    wanted = name.lower()
    if wanted in TARGETS:
        if explained_for:
            return wanted
        raise Failure(
            f"--device {name}: only explain takes a GPU by its name, as it does not run there; to run the model, write cpu or cuda",
            status=2,
        )
    kind, colon, index = wanted.partition(":")
    if kind not in ("", "cpu", "cuda") or (colon and not (kind and index.isdigit())):
        try:
            if explained_for:
                return checked_gpu(name, ("cpu", "cuda"))
            raise InvalidOptionError.unknown("device", name, ("cpu", "cuda"))
        except InvalidOptionError as error:
            raise Failure(f"--device: {one_line(error)}", status=2) from error
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cuda" and int(index or 0) >= count:
        raise Failure(
            f"--device {name}: torch can use {count} CUDA devices here; `te-dynamo doctor` shows why, and "
            "`te-dynamo explain TARGET --device h200` needs no GPU",
            status=2,
        )
    return wanted
