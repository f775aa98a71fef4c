"""NVFP4 of bf16 in words: the assembly of blocks on an emulator, whole kernels in Triton's interpreter.

Run as a program, this file is the interpreted half: TRITON_INTERPRET must be set before Triton is imported.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from helpers.kernels.interpreter_process import run_in_interpreter
from helpers.kernels.kernel_cases import DTYPES, assert_same_bits, gpu, needs_cuda
from helpers.kernels.ptx_emulator import PtxEmulator
from test_quantize_nvfp4 import (
    BOTH,
    COLUMN,
    GRADIENT,
    HADAMARD,
    KEY,
    KINDS,
    OPTIONS,
    PLAIN,
    ROW,
    STOCHASTIC,
    TWO_D,
    hashed_words,
    kernel,
    make,
    reference,
)

from te_dynamo.kernels.quantize import e2m1, nvfp4
from te_dynamo.kernels.quantize import e2m1_assembly as assembly
from te_dynamo.kernels.quantize.hadamard_amax_assembly import amax_of_column_words

# -- blocks on the emulator ------------------------------------------------------------------------


def tensor_scale(amax: torch.Tensor, count: int, bf16_to_nearest: bool = False) -> list[np.ndarray]:
    """`e2m1.tensor_scale`, as arguments of `count` blocks, which may be of bf16 that is rounded to the nearest."""
    f, value = np.float32, amax.numpy()[0]
    with np.errstate(all="ignore"):
        s = f(1) if value == 0 or np.isinf(value) else np.minimum(f(2688) / value, np.finfo(f).max)
        inverse = f(1) / s
    lift, most = f(2.0**64 if inverse < 2.0**-60 else 1), f(0 if np.isnan(value) else np.finfo(f).max)
    least = f(
        3.5 * 2.0**-9
        if 2.0**-60 < inverse < 2.0**60 and np.isfinite(value) and not (bf16_to_nearest and unlucky(value))
        else np.inf
    )
    kept = np.uint32(0 if np.isnan(value) else 0x88888888)
    return [np.full(count, word) for word in (s * f(1 / 6), inverse, lift, most, least, kept)]


def unlucky(amax: np.float32) -> bool:
    """`e2m1.least_of_bf16`."""
    return int(amax.view(np.int32) >> 16 & 0x7F) in e2m1.UNLUCKY.value


def significands(amax: np.ndarray) -> np.ndarray:
    """Those that enc has in tensors of these amaxes, fp32 [8, ...] from 1 to 2."""
    f = np.float32
    inverse = f(1) / (f(2688) / amax)
    enc = f(1) / ((1 + np.arange(8, dtype=f) / f(8)).reshape(8, *[1] * amax.ndim) * inverse)
    return (enc.view(np.int32) & 0x7FFFFF | 0x3F800000).view(f)


def may_round_otherwise(enc: np.ndarray) -> np.ndarray:
    """`e2m1.least_of_bf16`'s rule for one significand, in exact arithmetic."""
    product = np.where(enc <= 1.25, 160.0, 320.0)
    above = np.rint(product / enc.astype(np.float64)) * enc - product
    return (above > 0.8 * product * 2.0**-24) & (above <= 0.8 * product * 2.0**-23)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [PLAIN, STOCHASTIC], ids=["nearest", "stochastic"])
def test_blocks_of_rows_equal_the_reference(options, kind) -> None:
    x = make(kind, (512, 16), torch.bfloat16)
    data, scale_inv, amax = reference(x, ROW, options)
    words = [np.ascontiguousarray(column) for column in x.view(torch.int32).numpy().T]
    arguments = words + tensor_scale(amax, 512, options == PLAIN)
    arguments += hashed_words(KEY, 512) if options[2] else ()
    codes, scale = PtxEmulator(arguments, 2).run(assembly.block_of_a_row(options[2], False))
    assert np.array_equal(codes, data.numpy().view(np.uint64)[:, 0])
    assert np.array_equal(scale & 0xFF, scale_inv[:512, 0].numpy())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [PLAIN, HADAMARD, STOCHASTIC, GRADIENT], ids=str)
@pytest.mark.parametrize("whole", [False, True], ids=["", "whole"])
def test_blocks_of_columns_equal_the_reference(options, kind, whole) -> None:
    x = make(kind, (16, 512), torch.bfloat16)
    data, scale_inv, amax = reference(x, COLUMN, options)
    words = list(x.view(torch.int32).numpy())
    hashes = hashed_words(KEY.flip(0), 512)
    arguments = words + tensor_scale(amax, 256, options == PLAIN)
    arguments += [np.ascontiguousarray(word[side::2]) for side in range(2) for word in hashes] if options[2] else []
    *codes, scale = PtxEmulator(arguments, 5).run(assembly.blocks_of_two_columns(options[1], options[2], False, whole))
    expected = data.numpy().view(np.uint32).reshape(256, 4).T
    for word, wanted in zip(codes, expected, strict=True):
        assert np.array_equal(word, wanted)
    assert np.array_equal(scale, scale_inv[:512, 0].contiguous().numpy().view(np.uint16))


def test_blocks_far_below_the_largest_saturate_as_the_reference() -> None:
    """Their scales are subnormal or 0, so that values times 1 / scale may be large."""
    x = (make("normal", (512, 16), torch.float32) * 2.0 ** -(torch.arange(512)[:, None] / 16)).bfloat16()
    data, scale_inv, amax = reference(x, ROW, PLAIN)
    assert (scale_inv[:, 0] < 8).sum() > 200 and (scale_inv[:, 0] == 0).any()
    words = [np.ascontiguousarray(column) for column in x.view(torch.int32).numpy().T]
    arguments = words + tensor_scale(amax, 512, True)
    codes, _ = PtxEmulator(arguments, 2).run(assembly.block_of_a_row(False, False))
    assert np.array_equal(codes, data.numpy().view(np.uint64)[:, 0])
    turned = x.t().contiguous()
    for options in (PLAIN, HADAMARD):
        data, _, amax = reference(turned, COLUMN, options)
        arguments = list(turned.view(torch.int32).numpy()) + tensor_scale(amax, 256, options == PLAIN)
        *codes, _ = PtxEmulator(arguments, 5).run(assembly.blocks_of_two_columns(options[1], False, False))
        expected = data.numpy().view(np.uint32).reshape(256, 4).T
        assert all(np.array_equal(word, wanted) for word, wanted in zip(codes, expected, strict=True))


UNLUCKY = (280.0, 294.0, 336.0, 360.0, 396.0, 420.0, 504.0)
"""Amaxes of bf16, but for powers of two, with a scale whose enc may round bf16 otherwise."""


def test_amaxes_that_may_round_otherwise() -> None:
    amaxes = (torch.arange(128, 256) * 2).numpy().astype(np.float32)
    assert tuple(amaxes[may_round_otherwise(significands(amaxes)).any(0)]) == UNLUCKY
    assert [unlucky(amax) for amax in amaxes] == [amax in UNLUCKY for amax in amaxes]


def blocks_next_to_five(amax: float) -> torch.Tensor:
    """[1792, 16] of that amax with every bf16 for a block's largest value, beside each that lies where v is 5."""
    largest = (torch.arange(128, 256) * 2.0 ** torch.arange(-1, 1)[:, None]).flatten() * 2.0**-1
    largest = largest[largest <= amax]
    others = (largest[:, None] * torch.linspace(0.70, 0.95, 105)).bfloat16().float()
    blocks = torch.cat([largest[:, None, None].expand(-1, 7, 1), others.view(-1, 7, 15)], dim=2).reshape(-1, 16)
    return torch.cat([torch.full((16, 16), amax), blocks])[:1792].bfloat16()


@pytest.mark.parametrize("amax", [*UNLUCKY, 256.0, 300.0, 510.0])
def test_values_next_to_five_round_as_the_reference(amax: float) -> None:
    x = blocks_next_to_five(amax)
    data, scale_inv, found = reference(x, ROW, PLAIN)
    assert found.item() == amax and len(set((scale_inv[:, 0] & 7).tolist())) == 8
    words = [np.ascontiguousarray(column) for column in x.view(torch.int32).numpy().T]
    arguments = words + tensor_scale(found, len(x), True)
    codes, _ = PtxEmulator(arguments, 2).run(assembly.block_of_a_row(False, False))
    assert np.array_equal(codes, data.numpy().view(np.uint64)[:, 0])


@pytest.mark.parametrize("step", [16, pytest.param(1, marks=pytest.mark.slow)])
def test_bf16_rounds_as_the_reference_with_every_enc_but_those_of_unlucky_tensors(step: int) -> None:
    """Both are monotone in |x|: it is enough to look next to each tie."""
    f = np.float32
    for first in range(0, 1 << 23, 1 << 20):
        enc = (np.arange(first, first + (1 << 20), step) + (1 << 23)).astype(f) * f(2.0**-23)
        wrong = np.zeros(len(enc), bool)
        for tie in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0):
            place = tie / enc.astype(np.float64)
            unit = np.exp2(np.floor(np.log2(place)) - 7)
            for neighbour in (-1, 0, 1, 2):
                x = ((np.floor(place / unit) + neighbour) * unit).astype(f)
                exact = x.astype(np.float64) * (enc * f(0.25))
                z = (exact + np.minimum(exact.astype(f), f(1))).astype(f)
                code = (2 * z.astype(np.float64) + (2.0**23 - 2)).astype(f).view(np.int32) - 0x4AFFFFFC
                wrong |= code != nvfp4.nearest_codes(torch.from_numpy(x * enc)).numpy()
        assert np.array_equal(wrong, wrong & may_round_otherwise(enc))


CODES = {"any": assembly.nearest, "below 7": assembly.nearest_below_seven}


@pytest.mark.parametrize("rule", CODES)
def test_values_next_to_ties_round_as_the_reference(rule: str) -> None:
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 2.0, 4.0, 6.0], np.float32)
    near = (ties.view(np.int32)[:, None] + np.arange(-64, 65)).astype(np.int32).view(np.float32).ravel()
    even = np.linspace(0, 6.998, 10006).astype(np.float32)
    values = np.concatenate([near, even])[: (len(near) + len(even)) // 8 * 8].reshape(8, -1)
    columns = [np.ascontiguousarray(row * np.float32(1 if rule == "any" else 4)) for row in values]
    names = [f"${1 + index}" for index in range(8)]
    lines = [assembly.CODE_REGISTERS, "mov.b32 s, 0;"]
    lines += assembly.nearest_word(names, "word", "s", "0f3F800000", CODES[rule])
    (words,) = PtxEmulator(columns).run(assembly.one_line([*lines, "mov.b32 $0, word;"]))
    expected = nvfp4.nearest_codes(torch.from_numpy(values)).numpy()
    for nibble in range(8):
        assert np.array_equal(words >> np.uint32(4 * nibble) & np.uint32(15), expected[nibble])


@pytest.mark.parametrize("stochastic", [False, True])
def test_words_of_values_equal_the_codes_of_the_reference(stochastic) -> None:
    words = 4096
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(words, 8, generator=generator) * 2
    edges = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 0.5, 1.0, 2.0, 4.0, 7.0, 0.0])
    edges = torch.cat([edges, edges.nextafter(torch.tensor(9.0)), edges.nextafter(torch.tensor(-9.0))])
    special = torch.tensor([1e-45, 1e-30, 3e38, torch.inf, 2.0**-18, 2.0**-17])
    edges = torch.cat([edges, special, -edges, -special])
    value.view(-1)[: 64 * len(edges)] = edges.repeat(64)
    key = torch.tensor([77, -5], dtype=torch.int32)
    bits = nvfp4.random_bits(key, words, 1).reshape(words, 2, 8)
    seeds = list(hashed_words(key, words))
    for half, multiplier in itertools.product((0, 1), (1.0, 0.3, 7.7)):
        scaled = value * multiplier
        codes = nvfp4.stochastic_codes(scaled, bits[:, half]) if stochastic else nvfp4.nearest_codes(scaled)
        codes = (codes | (value.signbit() << 3)).to(torch.int64)
        expected = sum(codes[:, index] << 4 * index for index in range(8)).numpy().astype(np.uint32)
        arguments = [np.ascontiguousarray(column) for column in value.numpy().T]
        arguments += [np.full(words, multiplier, np.float32), np.full(words, 0x88888888, np.uint32)]
        arguments += seeds if stochastic else []
        (word,) = PtxEmulator(arguments).run(assembly.word_of_values(stochastic, half))
        assert np.array_equal(word, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_amaxes_of_columns_equal_the_reference(kind) -> None:
    x = make(kind, (16, 512), torch.bfloat16)
    words, zeros = list(x.view(torch.int32).numpy()), np.zeros(256, np.float32)
    with np.errstate(all="ignore"):
        transformed, halves = PtxEmulator([*words, zeros, zeros], 2).run(amax_of_column_words(True))
        (alone,) = PtxEmulator([*words, zeros]).run(amax_of_column_words(False))
        assert np.array_equal(transformed, alone)
        amax = transformed.view(np.float32).max() / np.float32(4)
    assert np.array_equal(amax, reference(x, COLUMN, HADAMARD)[2].numpy()[0], equal_nan=True)
    values = torch.from_numpy((halves & 0x7FFF7FFF).view(np.int16)).view(torch.bfloat16).float()
    assert np.array_equal(values.max().numpy(), x.float().abs().max().numpy(), equal_nan=True)


def test_amaxes_of_blocks_with_infinities_equal_the_reference() -> None:
    """NaN where any sum of the transform is one, wherever a block's one or two infinities lie: not all stages compute every sum."""
    x = torch.randn(16, 4 * 256, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    for index, (first, second, sign) in enumerate(itertools.product(range(16), range(16), (torch.inf, -torch.inf))):
        x[first, 2 * index], x[second, 2 * index] = torch.inf, sign
    words = list(np.ascontiguousarray(x.view(torch.int32).numpy()))
    with np.errstate(all="ignore"):
        (amaxes,) = PtxEmulator([*words, np.zeros(512, np.float32)]).run(amax_of_column_words(False))
    expected = nvfp4.hadamard_reference(x.t().contiguous()).abs().reshape(512, 32).amax(dim=1)
    assert expected.isnan().any() and expected.isinf().any()
    assert np.array_equal(amaxes.view(np.float32) / np.float32(4), expected.numpy(), equal_nan=True)


def test_random_bits_of_a_block_are_evenly_spread() -> None:
    """Every element's, and every pair's of a block, upper and lower ones: counts in 32 and in 32 x 32 cells are those of
    independent draws."""
    bits = nvfp4.random_bits(KEY, 1 << 14, 1).numpy().reshape(-1, 16)
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

    rotations = itertools.product(assembly.LOW_ROTATIONS, assembly.HIGH_ROTATIONS, (0, 16))
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


@gpu
@needs_cuda
@pytest.mark.parametrize("amax", [*UNLUCKY, 300.0])
def test_kernels_next_to_five_equal_the_reference(amax: float) -> None:
    x = blocks_next_to_five(amax).cuda()
    for matrix, options in itertools.product((x, x.t().contiguous(), x.view(256, 112), x.view(-1, 128)[:128]), OPTIONS):
        assert_same_bits(kernel(matrix, BOTH, options), reference(matrix, BOTH, options))


# -- kernels in the interpreter --------------------------------------------------------------------


@pytest.mark.slow
def test_kernels_equal_the_reference_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


def main() -> None:
    from helpers.kernels import interpreted

    from te_dynamo.kernels.tiles import fp8

    interpreted.install()
    np.seterr(all="ignore")
    nvfp4.multiprocessor_count = fp8.multiprocessor_count = lambda device: 1  # type: ignore[assignment]
    nvfp4.PARTIALS = 4  # type: ignore[assignment]
    for shape, kinds, dtypes in (
        ((40, 136), KINDS, (torch.bfloat16,)),
        ((128, 128), ("normal",), (torch.bfloat16,)),
        ((303, 304), ("normal",), (torch.bfloat16,)),
        ((512, 128), ("normal", "zero_row"), (torch.bfloat16,)),  # strips of several tiles
        ((35, 50), ("nan", "zero_row", "signed_zeros"), DTYPES),
        ((1, 32), ("normal",), DTYPES),
    ):
        for kind, dtype, options in itertools.product(kinds, dtypes, OPTIONS):
            x = make(kind, shape, dtype)
            for usages in (ROW, COLUMN, BOTH) if kind == "zero_row" else (BOTH,):
                assert_same_bits(kernel(x, usages, options), reference(x, usages, options))
    for amax, options in itertools.product((UNLUCKY[0], 300.0), (PLAIN, TWO_D)):
        x = blocks_next_to_five(amax)
        for matrix in (x, x.t().contiguous(), x.view(256, 112)):
            assert_same_bits(kernel(matrix, BOTH, options), reference(matrix, BOTH, options))


if __name__ == "__main__":
    main()
