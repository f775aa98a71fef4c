"""The CUDA graph that FSDP2's work is captured into. Its replays compare nothing: they have to make all that they read."""

from __future__ import annotations

import torch

from te_dynamo.errors import UnsupportedError
from te_dynamo.kernels.runtime.capture import is_captured


def captured_into() -> int:
    """Its number, unique in the process; 0 where the current stream is not captured.

    Raises UnsupportedError where the driver does not tell.
    """
    if not torch.cuda.is_initialized() or not is_captured(torch.device("cuda")):
        return 0
    from cuda.bindings import driver

    status, _, number, *_ = driver.cuStreamGetCaptureInfo(torch.cuda.current_stream().cuda_stream)
    if int(status) != 0:
        raise UnsupportedError(
            f"te_dynamo: cuStreamGetCaptureInfo failed ({status!r}): a gather in FP8 cannot be captured"
        )
    return int(number)
