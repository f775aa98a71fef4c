"""Workers that compile kernels are told who launches them, and our kernels are launched by torch's launcher."""

from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch._inductor import config
from torch._inductor.utils import fresh_cache
from torch.nn import functional as F

from te_dynamo.lowering.inductor.static_launch import STATIC_LAUNCH, _telling


def test_a_worker_is_told_the_option_of_its_asker() -> None:
    asked: list[Any] = []

    def pool(*arguments: Any) -> Future[Any]:
        asked.append(arguments)
        return Future()

    submit = _telling(pool)
    for said in (True, False):
        with config.patch({STATIC_LAUNCH: said}):
            submit(len, "kernel", {"A_FOLDER": "x"}, {"use_static_triton_launcher": True})
        told = {"use_static_triton_launcher": True, STATIC_LAUNCH: said}
        assert asked.pop() == (len, "kernel", {"A_FOLDER": "x"}, told)


@pytest.mark.gpu
def test_kernels_have_torchs_launcher() -> None:
    """All but the GEMMs, which make tensor descriptors in scratch memory."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner, StaticTritonCompileResult

    launched: dict[str, bool] = {}
    run = CachingAutotuner.run

    def running(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = run(self, *args, **kwargs)
        launched[self.fn.__name__] = all(isinstance(x, StaticTritonCompileResult) for x in self.compile_results)
        return result

    x = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CachingAutotuner, "run", running)
        with fresh_cache():
            torch.compile(lambda x: F.silu(F.linear(x, w)).relu(), backend="te")(x)
    assert launched["quantize_amax_kernel"] and launched["quantize_cast_kernel"], launched
