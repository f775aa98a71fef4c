"""What a CUDA device can do, as far as kernels are chosen and launched by it."""

from __future__ import annotations

import dataclasses
import functools

import torch


@dataclasses.dataclass(frozen=True)
class Device:
    """capability: the compute capability, (9, 0) of Hopper. multiprocessors: how many there are."""

    capability: tuple[int, int]
    multiprocessors: int

    @property
    def has_wgmma(self) -> bool:
        """Whether its tensor cores are Hopper's, whose instruction `wgmma` their successors lack."""
        return self.capability[0] == 9

    @property
    def has_block_scales(self) -> bool:
        """Whether its tensor cores apply the scales of blocks of 32 (`tcgen05.mma ... block_scale`)."""
        return self.capability[0] == 10

    @property
    def has_dependent_launch(self) -> bool:
        """Whether kernels are launched before their predecessors end (kernels/runtime/dependent_launch.py): on Hopper so far."""
        return self.capability[0] == 9


H200 = Device((9, 0), 132)

DEVICES = {"h200": H200}
"""Those whose times are known (passes/torch_ir/match/cost.py), by the names that `te_dynamo.explain(device=...)` takes."""


@functools.cache
def device_of(device: torch.device) -> Device:
    """A CUDA device as torch describes it; an H200 where no GPU can be asked, so that graphs build anywhere."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return H200
    return Device(
        torch.cuda.get_device_capability(device), torch.cuda.get_device_properties(device).multi_processor_count
    )
