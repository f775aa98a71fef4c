"""What a GPU is, in one table: kernels, tiles and the cost of a linear are chosen by it, here and where there is no such GPU.

    target_of(x.device)      the GPU that holds a tensor
    TARGETS["rtx5090"]       one that need not be here, by its published figures
    with acting_as(target):  inside, every CUDA device is taken for that one

A GPU that the table lacks has its own capability, multiprocessors and shared memory. Its rates are those of a GPU of its kind, by the
number of multiprocessors.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class Target:
    """One kind of GPU.

    name:               a part of the name that its driver tells.
    capability:         the compute capability, (9, 0) of Hopper.
    multiprocessors:    how many there are.
    shared_bytes:       the shared memory that one program may take.
    bandwidth:          of its memory, in TB/s.
    bf16_tflops, fp8_tflops: dense products with fp32 sums, in TFLOP/s, as its maker publishes them.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int
    bandwidth: float
    bf16_tflops: float
    fp8_tflops: float

    @property
    def arch(self) -> str:
        """As compilers write it: "sm_90a", "sm_89"."""
        return "sm_{}{}{}".format(*self.capability, "a" if self.capability >= (9, 0) else "")

    @property
    def measured(self) -> bool:
        """Whether our kernels have run on such a GPU: on Hopper so far. Elsewhere they are compiled, and times are estimates by figures."""
        return self.capability[0] == 9

    @property
    def has_wgmma(self) -> bool:
        """Whether its tensor cores are Hopper's, whose instruction `wgmma` their successors lack. Their FP8 sums have fewer bits than
        fp32."""
        return self.capability[0] == 9

    @property
    def has_tensor_memory(self) -> bool:
        """Whether products add up in a memory of the tensor core's own (`tcgen05.mma`)."""
        return self.capability[0] in (10, 11)

    @property
    def has_fp32_sums(self) -> bool:
        """Whether FP8 products add up in fp32 whatever a kernel does, so that slow accumulation is fast accumulation.

        They do in tensor memory. cuBLAS documents that its flag for fast accumulation (CUBLASLT_MATMUL_DESC_FAST_ACCUM) has an
        effect on Ada and Hopper alone. Of sm_120, which has the instruction of Ada, nothing more is published: it counts as Ada.
        """
        return self.has_tensor_memory

    def buffers(self, stages: int) -> int:
        """How many blocks of K lie in shared memory at once in a loop of so many stages.

        `mma.sync` multiplies what is in registers: there lies the block that is multiplied. Other tensor cores read shared memory.
        """
        return stages if self.has_wgmma or self.has_tensor_memory else stages - 1

    @property
    def has_block_scales(self) -> bool:
        """Whether its tensor cores apply the scales of blocks, of MXFP8 and of NVFP4 (`tcgen05.mma` or `mma.sync`, `block_scale`).

        sm_121 has them too, and Triton 3.7 does not use them there: it multiplies MXFP8 in bf16 and fails on NVFP4."""
        return self.has_tensor_memory or self.capability == (12, 0)

    @property
    def has_e2m1_casts(self) -> bool:
        """Whether one instruction rounds two values to the nearest e2m1 (`cvt.rn.satfinite.e2m1x2`)."""
        return self.capability >= (10, 0)

    @property
    def has_dependent_launch(self) -> bool:
        """Whether kernels are launched before their predecessors end (kernels/runtime/dependent_launch.py): on Hopper so far."""
        return self.capability[0] == 9


_LARGE, _SMALL = 227 * 1024, 99 * 1024

TARGETS = {
    "h100": Target("H100", (9, 0), 132, _LARGE, 3.35, 989, 1979),
    "h200": Target("H200", (9, 0), 132, _LARGE, 4.8, 989, 1979),
    "b200": Target("B200", (10, 0), 148, _LARGE, 8.0, 2250, 4500),
    "gb300": Target("GB300", (10, 3), 160, _LARGE, 8.0, 2500, 5000),
    "rtx5090": Target("RTX 5090", (12, 0), 170, _SMALL, 1.792, 209.5, 419),
    "rtxpro6000": Target("RTX PRO 6000", (12, 0), 188, _SMALL, 1.792, 503.8, 1007.6),
    "l40s": Target("L40S", (8, 9), 142, _SMALL, 0.864, 362, 733),
    "rtx4090": Target("RTX 4090", (8, 9), 128, _SMALL, 1.008, 165.2, 330.3),
}
"""By the names that `te_dynamo.explain(device=...)` takes. Figures are those of NVIDIA's data sheets and architecture papers."""

LAUNCH_US = 1.22
"""Microseconds of an H200 for one launch, as `calibrate` finds them."""

_acting: Target | None = None  # of the process and not of a context: autograd compiles backward on a thread of its own


def target_of(device: torch.device) -> Target:
    """A CUDA device as its driver describes it; an H200 where no GPU can be asked, so that graphs build anywhere."""
    if _acting is not None:
        return _acting
    told = _told.get(device)  # before anything else, as every launch of a GEMM asks
    if told is not None:
        return told
    if device.type != "cuda" or not torch.cuda.is_available():
        return TARGETS["h200"]
    _told[device] = told = _asked(device)
    return told


def is_acting() -> bool:
    """Whether `target_of` tells of another device than the one that is here."""
    return _acting is not None


@contextlib.contextmanager
def acting_as(target: Target) -> Iterator[None]:
    """Inside, every device is taken for `target`."""
    global _acting
    before, _acting = _acting, target
    try:
        yield
    finally:
        _acting = before


_told: dict[torch.device, Target] = {}
"""What drivers have said."""


def _asked(device: torch.device) -> Target:
    found: Any = torch.cuda.get_device_properties(device)  # torch's stub lacks some of them
    return described(
        found.name, (found.major, found.minor), found.multi_processor_count, found.shared_memory_per_block_optin
    )


def described(name: str, capability: tuple[int, int], multiprocessors: int, shared_bytes: int) -> Target:
    """The target of a GPU that says this of itself."""
    known = [t for t in TARGETS.values() if t.capability == capability]
    named = next((t for t in known if t.name in name and t.multiprocessors == multiprocessors), None)
    if named is not None:
        return named
    like = next(iter(known), None) or min(
        TARGETS.values(), key=lambda t: (abs(t.capability[0] - capability[0]), t.capability[0])
    )
    share = multiprocessors / like.multiprocessors
    return Target(
        name,
        capability,
        multiprocessors,
        shared_bytes,
        like.bandwidth * share,
        like.bf16_tflops * share,
        like.fp8_tflops * share,
    )
