"""Which ptxas assembles kernels: torch's own, from the start.

Triton's cache stores a kernel under the version of ptxas, which Triton asks for once a process. torch has Triton run the ptxas that
torch brings, but only sets that (TRITON_PTXAS_PATH) when it compiles its first kernel. A process that generates code has
asked before then, and stores its kernels under the version of Triton's ptxas; a second one, which finds the generated code in torch's
cache, asks afterwards and looks under the version of torch's. It would find none of them, and compile every kernel again.
"""

from __future__ import annotations

import functools

import torch


@functools.cache
def use_torchs_ptxas() -> None:
    """Does before anything is compiled what torch does then, once a process. A path that the user has set stays."""
    if not torch.cuda.is_available():
        return
    from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path
    from triton.backends.nvidia.compiler import get_ptxas_version

    _set_triton_ptxas_path()
    get_ptxas_version.cache_clear()  # another model's compilation may have asked already
