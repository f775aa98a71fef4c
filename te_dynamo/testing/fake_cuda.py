"""The graphs of a model for CUDA on a machine without one: what graph snapshots are taken with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from te_dynamo.inspect.dynamo import dynamo_untouched, one_at_a_time
from te_dynamo.inspect.fake_cuda import checked_gpu, fake_cuda, grad, moved
from te_dynamo.inspect.graphs.capture import Captured, capture
from te_dynamo.inspect.target import tensors_in
from te_dynamo.kernels.runtime.target import Target

__all__ = ["capture_on_fake_cuda", "fake_cuda"]


@one_at_a_time
def capture_on_fake_cuda(
    make_model: Callable[[], nn.Module],
    make_inputs: Callable[[str], tuple[Any, ...]],
    backward: bool = True,
    backend: Any = "te",
    device: str | Target = "h200",
    **compile_kwargs: Any,
) -> Captured:
    """The graphs that `torch.compile(make_model(), backend=backend, **compile_kwargs)` makes on CUDA,
    without a GPU.

    make_model:  builds the model, dtype included, on the CPU or on "meta"; its tensors are fake CUDA ones meanwhile.
    make_inputs: called with "cuda", returns the positional arguments; use torch.empty or torch.randn. Real sizes cost nothing
                 here, and linears of a few hundred rows would stay in 16 bits (docs/will-my-model-gain.md).
    backward:    also run backward from every output that requires grad, to every parameter and input that
                 does; False runs under torch.no_grad().
    device:      which GPU it is: one of kernels/runtime/target.py's table, by name, or a Target. Raises InvalidOptionError for another name.

    No kernel runs and no value is computed. On a CPU-only build of torch, aten ops whose CUDA kernel only the
    CUDA build has (silu_backward, _fused_rms_norm, flash attention) show up decomposed; te operations are the same everywhere.
    Other threads wait, and call no torch.autograd.grad: it is replaced meanwhile. What was compiled before, and with which sizes, does not show.
    """
    model = make_model()
    gpu = checked_gpu(device) if isinstance(device, str) else device
    with capture() as graphs, dynamo_untouched(), fake_cuda(gpu), moved(model, None):
        inputs = make_inputs("cuda")
        compiled = torch.compile(model, backend=backend, **compile_kwargs)
        with torch.set_grad_enabled(backward):
            outputs = compiled(*inputs)
        if backward:
            leaves = [leaf for leaf in (*tensors_in(inputs), *model.parameters()) if leaf.requires_grad]
            grad([out for out in tensors_in(outputs) if out.requires_grad], leaves)
    return graphs
