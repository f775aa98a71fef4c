"""`quantize_weight`: a weight in its quantizer's format, taken from a workspace where there is one.

A free function: what is kept from call to call, and for how long, is the caller's (a module, te_dynamo/weights). No
autograd function and no graph holds a module.
"""

from __future__ import annotations

import torch

from te_dynamo.errors import QuantizationError
from te_dynamo.quantized.quantize import quantize_tensor
from te_dynamo.quantized.quantizers import Quantizer
from te_dynamo.quantized.storage import QuantizedTensorStorage


def quantize_weight(
    tensor: torch.Tensor,
    quantizer: Quantizer,
    workspace: QuantizedTensorStorage | None = None,
    *,
    update: bool = False,
    cache: bool = False,
) -> tuple[QuantizedTensorStorage, QuantizedTensorStorage | None]:
    """(the weight for the GEMMs, what the caller should keep: None where that is nothing new).

    tensor: [N, K], or [G, N, K] of a grouped linear; bf16, fp16 or fp32. No gradient flows through.
    workspace: what an earlier call gave to keep. It is a hit where it is of the quantizer's format and the tensor's shape,
        dtype and device and has its usages, and then the first result.
    update: the weight was written since: a hit's buffers are written anew, in place.
    cache: a miss may be kept: both results are the new storage. Without, the second is None.

    Raises QuantizationError for a quantizer that rounds at random: two calls would differ.
    """
    if quantizer.needs_random():
        raise QuantizationError(
            f"quantize_weight: {quantizer.describe()} rounds stochastically; a weight is quantized with stochastic_rounding off"
        )
    hit = workspace is not None and is_valid_workspace(workspace, tensor, quantizer)
    if hit and not update:
        assert workspace is not None
        return workspace, None
    made = workspace.quantizer if hit and workspace is not None else quantizer  # in place: every usage that is there
    with torch.no_grad():
        buffers = quantize_tensor(tensor.detach().contiguous(), made)
        if hit:
            assert workspace is not None
            for kept, new in zip(workspace.buffers(), buffers, strict=True):
                kept.copy_(new)
            return workspace, None
    named = dict(zip(made.buffer_names(), buffers, strict=True))
    new_storage = QuantizedTensorStorage.from_metadata(named, made.create_metadata(tuple(tensor.shape), tensor.dtype))
    return new_storage, new_storage if cache else None


def is_valid_workspace(workspace: QuantizedTensorStorage, tensor: torch.Tensor, quantizer: Quantizer) -> bool:
    """Whether the workspace could be `tensor` quantized: the same format, shape, dtype and device, and the usages asked for.

    Values are not looked at. A workspace made for inference has no columnwise usage: training finds it invalid. Buffers made in inference mode
    can only be written there. While Dynamo traces, this cannot be told.
    """
    held = workspace.quantizer
    if (
        not torch.compiler.is_compiling()
        and not torch.is_inference_mode_enabled()
        and workspace.buffers()[0].is_inference()
    ):
        return False
    return (
        held.with_usage(True, True) == quantizer.with_usage(True, True)
        and held.rowwise >= quantizer.rowwise
        and held.columnwise >= quantizer.columnwise
        and workspace.shape == tuple(tensor.shape)
        and workspace.dtype == tensor.dtype
        and workspace.device == tensor.device
    )
