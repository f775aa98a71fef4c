"""One scale a tensor in one pass: with any hint the bits of two passes, in Triton's interpreter and on a GPU.

Run as a program, this file is the interpreted part: TRITON_INTERPRET must be set before Triton is imported.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from helpers.kernels.interpreter_process import run_in_interpreter
from helpers.kernels.kernel_cases import FP8_DTYPES, INPUT_KINDS, assert_same_bits, make_input, needs_cuda
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from te_dynamo.kernels.activation import activation, gated, gated_halves
from te_dynamo.kernels.layouts.tensor import TensorForm
from te_dynamo.kernels.produce import tensor
from te_dynamo.kernels.quantize import current

Function = Callable[[torch.Tensor | None], list[torch.Tensor]]


def hints_of(values: list[int], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(what lasts, a copy as kernels are given it) of hints with those values."""
    kept = torch.zeros(len(values), 2, dtype=torch.int64, device=device)
    kept[:, 0] = torch.tensor(values)
    kept[:, 1] = kept.data_ptr() + 16 * torch.arange(len(values))
    return kept, kept.clone()


def functions(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, form: TensorForm) -> dict[str, tuple[Function, int]]:
    """(what is quantized, given its hints or none, and how many) of each kernel."""
    return {
        "quantize": (lambda hint: current.quantize(x, form, hint=hint), 1),
        "rows": (lambda hint: current.quantize_stacked([x, y], form, False, hint=hint), 2),
        "columns": (lambda hint: current.quantize_stacked([x, y, z], form, True, hint=hint), 3),
        "activation": (lambda hint: activation.activation_quantize(x, "gelu", form, True, hint=hint), 1),
        "backward": (
            lambda hint: activation.activation_backward_quantize(y, x, "gelu_tanh", form, False, False, hint=hint),
            1,
        ),
        "gated": (lambda hint: gated.gated_quantize(x, y, "silu", form, False, hint=hint), 1),
        "gradients": (lambda hint: gated.gated_backward_quantize(z, x, y, "silu", form, True, False, hint=hint), 2),
        "stacked": (lambda hint: gated.gated_backward_quantize(z, x, y, "gelu", form, False, True, hint=hint), 2),
        "halves": (
            lambda hint: gated_halves.gated_backward_quantize_halves(z, x, y, "relu", form, False, False, hint=hint),
            1,
        ),
    }


def check(name: str, inputs: list[torch.Tensor], form: TensorForm, hints: list[int]) -> None:
    """With those hints, with what they left, which is right, and with one of them wrong at a time."""
    function, count = functions(*inputs, form)[name]
    expected = function(None)
    inverses = [expected[len(expected) // 2], expected[-1]] if name == "gradients" else expected[-1:]
    scales = (1.0 / torch.cat(inverses).cpu()).view(torch.int32).tolist()
    kept, given = hints_of(hints[:count], str(inputs[0].device))
    for _ in range(2):
        before = given.clone()
        assert_same_bits(function(given), expected, (name, hints))
        assert torch.equal(given, before), "a hint that is read was written"
        given = kept.clone()
    assert kept[:, 0].tolist() == scales, name
    for which in range(count) if count > 1 else ():
        given = kept.clone()
        given[which, 0] = hints[-1] ^ 1 << 30
        assert_same_bits(function(given), expected, (name, hints, which))


HINTS = st.integers(-(2**31), 2**31 - 1)
VALUES = st.sampled_from(["normal", *INPUT_KINDS])


def check_any_hint(name: str, device: str, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
    @given(
        kinds=st.tuples(VALUES, VALUES, VALUES),
        hints=st.lists(HINTS | st.sampled_from([0, 127 << 23, 255 << 23]), min_size=3, max_size=3),
        dtype=st.sampled_from([torch.bfloat16, torch.float32]),
        fp8=st.sampled_from(FP8_DTYPES[:1] if device == "cpu" else FP8_DTYPES),
        usage=st.sampled_from([(True, True), (True, False), (False, True)]),
    )
    def run(kinds, hints, dtype, fp8, usage):  # type: ignore[no-untyped-def]
        inputs = [make_input(kind, (128, 128), dtype, device, seed=i) for i, kind in enumerate(kinds)]
        check(name, inputs, TensorForm(fp8, *usage, True, 0.0), hints)

    run()


NAMES = tuple(functions(*[torch.empty(0)] * 3, TensorForm(FP8_DTYPES[0], True, True, True)))


@pytest.mark.parametrize(
    ("name", "examples"), [("quantize", 1), *(pytest.param(name, 6, marks=pytest.mark.slow) for name in NAMES)]
)
def test_any_hint_gives_the_bits_of_two_passes_in_the_interpreter(name: str, examples: int) -> None:
    run_in_interpreter(__file__, name, str(examples))


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("name", NAMES)
def test_any_hint_gives_the_bits_of_two_passes_on_a_gpu(name: str) -> None:
    check_any_hint(name, "cuda", 200)


def main(name: str, examples: str) -> None:
    from helpers.kernels import interpreted

    interpreted.install()
    np.seterr(all="ignore")
    for module in (current, tensor):
        module.PARTIALS = 8  # programs of a launch that finds amaxes, most of them without a tile here
    check_any_hint(name, "cpu", int(examples))


if __name__ == "__main__":
    import sys

    main(*sys.argv[1:])
