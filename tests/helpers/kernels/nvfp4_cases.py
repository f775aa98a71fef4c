"""Options, inputs and calls that the tests of NVFP4's kernels share."""

from __future__ import annotations

import math

import torch
from helpers.kernels.kernel_cases import INPUT_KINDS, make_input

from te_dynamo.kernels.layouts.nvfp4 import NVFP4Form
from te_dynamo.kernels.quantize.nvfp4 import hadamard_reference, quantize_nvfp4, quantize_nvfp4_reference

KINDS = (*INPUT_KINDS, "zero_row", "signed_zeros")
ROW, COLUMN, BOTH = (True, False), (False, True), (True, True)
KEY = torch.tensor([123456789, -987654321], dtype=torch.int32)

# (two_d, hadamard, stochastic_rounding)
PLAIN, TWO_D, HADAMARD, STOCHASTIC, GRADIENT = (
    (False, False, False),
    (True, False, False),
    (False, True, False),
    (False, False, True),
    (False, True, True),
)
OPTIONS = (PLAIN, TWO_D, HADAMARD, STOCHASTIC, GRADIENT, (True, False, True))


def make(kind: str, shape, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    """`make_input`, "zero_row": normal with a row and a column of zeros, and a -0, and "signed_zeros": nothing but zeros, of those
    signs that make one -0 of each 16 rows in the transform, which is the sum of sixteen -0."""
    if kind == "signed_zeros":
        rows, columns = math.prod(shape[:-1]), shape[-1]
        signs = hadamard_reference(torch.eye(16)).repeat(-(-rows // 16), -(-columns // 16))[:rows, :columns]
        return torch.zeros(rows, columns).copysign(-signs).reshape(shape).to(dtype).to(device)
    x = make_input("normal" if kind == "zero_row" else kind, shape, dtype, "cpu", seed)
    if kind == "zero_row":
        matrix = x.view(-1, shape[-1])
        matrix[matrix.shape[0] // 2] = 0
        matrix[:, shape[-1] // 3] = 0
        matrix[0, 0] = -0.0
    return x.to(device)


def special_inputs() -> dict[str, torch.Tensor]:
    """fp32 tensors at the edges of the rules."""
    normal = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    # With amax 6 in every block and in the tensor both scales are exact, and enc is 1.
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 2.0, 4.0])
    near = torch.cat([middles, *(middles.nextafter(torch.tensor(towards)) for towards in (0.0, 9.0)), torch.zeros(3)])
    ties = torch.cat([torch.full((2, 1), 6.0), near.reshape(2, 15)], dim=1).repeat(8, 3)
    infinities = normal.clone()
    infinities[3, 5], infinities[4, 5] = torch.inf, -torch.inf  # NaN where they are added
    return {
        "ties": ties * torch.where(torch.arange(48) % 2 == 0, 1.0, -1.0),
        "small blocks": normal * 2.0 ** -torch.arange(48)[:, None],  # whose scales are subnormal, then zero
        "tiny": normal * 2.0 ** -(125.0 + torch.arange(48) % 16)[:, None],  # the tensor's scale is the largest fp32
        "infinities": infinities,
        "signed zeros": make("signed_zeros", (32, 48), torch.float32),
        "nothing wide": torch.empty(5, 0),
        "nothing high": torch.empty(0, 48),
    }


def reference(x: torch.Tensor, usages, options, key: torch.Tensor = KEY, swizzled: bool = False) -> list[torch.Tensor]:
    return quantize_nvfp4_reference(x, NVFP4Form(*usages, *options, swizzled), key.to(x.device))


def kernel(x: torch.Tensor, usages, options, key: torch.Tensor = KEY, swizzled: bool = False) -> list[torch.Tensor]:
    return quantize_nvfp4(x, NVFP4Form(*usages, *options, swizzled), key.to(x.device))
