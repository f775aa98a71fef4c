"""Inputs and comparisons that the kernel tests share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INPUT_KINDS = ("normal", "zeros", "constant", "huge", "denormals", "inf", "nan")
RAGGED_SHAPES = ((1, 32), (17, 300), (303, 4096), (4096, 32), (2, 9, 300))

gpu = pytest.mark.gpu
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def make_input(kind: str, shape: Sequence[int], dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    """A tensor of that kind; "inf" and "nan" hold one such element among normal ones."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    flat = x.view(-1)
    if kind == "zeros":
        flat.zero_()
    elif kind == "constant":
        flat.fill_(-1.7)
    elif kind == "huge":
        flat[flat.numel() // 3] = torch.finfo(dtype).max
    elif kind == "denormals":
        flat.mul_(torch.finfo(dtype).tiny / 8)
    elif kind in ("inf", "nan"):
        flat[flat.numel() // 2] = -float(kind)
    return x.to(dtype).to(device)


def assert_same_bits(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], case: object = "") -> None:
    """Equal count, shapes, dtypes and bit patterns. case: what a failure names, in a test of several."""
    assert len(actual) == len(expected), case
    for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype, (case, index, a.shape, b.shape, a.dtype, b.dtype)
        integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
        different = (a.contiguous().view(integer) != b.to(a.device).contiguous().view(integer)).sum().item()
        assert different == 0, f"{case} tensor {index}: {different} of {a.numel()} elements differ"


def assert_within_rounding(actual: torch.Tensor, exact: torch.Tensor, ulps: float = 1.0, atol: float = 1e-30) -> None:
    """|actual - exact| is at most that many units in the last place of actual's dtype (32 times for fp32)."""
    relative = torch.finfo(actual.dtype).eps * ulps * (32 if actual.dtype == torch.float32 else 1)
    excess = (actual.double() - exact).abs() - relative * exact.abs() - max(atol, _smallest(actual.dtype))
    worst = excess.argmax()
    assert excess.max() <= 0, (actual.reshape(-1)[worst].item(), exact.reshape(-1)[worst].item())


def _smallest(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


def run_poisoned(function: Callable[[], Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """function() twice on differently dirtied GPU memory: equal results mean that all was written."""
    results = []
    for poison in (0x5A, 0xA5):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        dirty = [torch.full((1 << 27,), poison, dtype=torch.uint8, device="cuda") for _ in range(2)]
        dirty += [torch.full((1 << 19,), poison, dtype=torch.uint8, device="cuda") for _ in range(16)]
        del dirty
        results.append([tensor.clone() for tensor in function()])
    assert_same_bits(results[0], results[1])
    return results[0]
