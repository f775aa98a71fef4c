"""NVFP4's stochastic rounding: its mean, and the independence of its random bits."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from helpers.kernels.kernel_cases import assert_same_bits
from helpers.kernels.nvfp4_cases import BOTH, GRADIENT, KEY, ROW, STOCHASTIC, make, reference

from te_dynamo.kernels.quantize.nvfp4 import E2M1_VALUES, dequantize_nvfp4_reference, random_bits
from te_dynamo.kernels.quantize.nvfp4_kernels import HIGH_ROTATIONS, LOW_ROTATIONS
from te_dynamo.quantized.quantize import random_key


def test_stochastic_rounding_is_unbiased() -> None:
    """The mean of n draws is within five standard errors (a step's variance is at most 1/4) and the bits' resolution."""
    draws = 4096
    x = torch.cat([torch.tensor([6.0]), torch.linspace(-5.9, 5.9, 31)])
    x[16] = 6  # both blocks' enc is 1, as above
    data, scale_inv, amax = reference(x.repeat(draws, 1), ROW, STOCHASTIC)
    assert (scale_inv[:draws, :2] == 0x7E).all()
    values = dequantize_nvfp4_reference(data, scale_inv, amax, 32, torch.float64)
    x = x.double()
    step = torch.where(x.abs() < 2, 0.5, torch.where(x.abs() < 4, 1.0, 2.0))
    assert ((values.mean(dim=0) - x).abs() <= step * (5 * 0.5 / draws**0.5 + 1 / 2**10)).all()
    assert ((values - x).abs() < step).all()
    assert ((values.std(dim=0) > 0) == ~torch.isin(x.abs(), torch.tensor(E2M1_VALUES, dtype=torch.float64))).all()


def test_stochastic_rounding_depends_on_the_key_alone() -> None:
    x = make("normal", (70, 100), torch.bfloat16)
    one, same = reference(x, BOTH, GRADIENT), reference(x, BOTH, GRADIENT)
    other = reference(x, BOTH, GRADIENT, KEY + 1)
    assert_same_bits(one, same)
    assert_same_bits([one[i] for i in (1, 2, 4, 5)], [other[i] for i in (1, 2, 4, 5)])
    for index in (0, 3):
        differing = ((one[index] ^ other[index]) & 7 != 0).float().mean()
        assert 0.2 < differing < 0.6
    generators = [torch.Generator().manual_seed(7) for _ in range(2)]
    assert torch.equal(*(random_key(generator=g) for g in generators))
    assert not torch.equal(random_key(), random_key())


def test_rows_and_columns_round_independently() -> None:
    """Where both round 5 up with probability 1/2, they differ half of the time."""
    x = torch.full((64, 64), 5.0)
    for shift in (0, 16, 32, 48):  # a 6 in every block of rows and of columns
        x[torch.arange(64), torch.arange(64).roll(shift)] = 6.0
    data, _, _, columnwise_data, _, _ = reference(x, BOTH, STOCHASTIC)
    rows, columns = (torch.stack([d & 15, d >> 4], dim=-1).flatten(1) for d in (data, columnwise_data))
    differing = (rows != columns.t())[x == 5].float().mean()
    assert 0.45 < differing < 0.55


def test_random_bits_of_a_block_are_evenly_spread() -> None:
    """Every element's, and every pair's of a block, upper and lower ones: counts in 32 and in 32 x 32 cells are those of
    independent draws."""
    bits = random_bits(KEY, 1 << 14, 1).numpy().reshape(-1, 16)
    assert bits.min() == 0 and bits.max() == 511
    for five in (bits >> 4, bits & 31):
        for i in range(16):
            assert chi_square(np.bincount(five[:, i], minlength=32)) < 80  # 31 degrees of freedom
            for j in range(i):
                assert chi_square(np.bincount(five[:, i] * 32 + five[:, j], minlength=1024)) < 1250  # 1023


def test_rotations_make_independent_numbers() -> None:
    """Of 64 independent bits: any three of a block's sixteen numbers are."""

    def bits_of(first: int, second: int, half: int) -> list[int]:
        places = range(half, half + 9)
        return [1 << (place - first) % 32 | 1 << 32 + (place - second) % 32 for place in places]

    rotations = itertools.product(LOW_ROTATIONS, HIGH_ROTATIONS, (0, 16))
    numbers = [bits_of(*rotation) for rotation in rotations]
    assert len(numbers) == 16
    for three in itertools.combinations(numbers, 3):
        assert rank([row for number in three for row in number]) == 27


def rank(rows: list[int]) -> int:
    """Of a matrix over two elements, a row's bits those of a number."""
    by_highest: dict[int, int] = {}
    for row in rows:
        while row and (pivot := by_highest.get(row.bit_length())):
            row ^= pivot
        if row:
            by_highest[row.bit_length()] = row
    return len(by_highest)


def chi_square(counts: np.ndarray) -> float:
    mean = counts.sum() / len(counts)
    return float(((counts - mean) ** 2 / mean).sum())
