"""Models whose gate and up are one linear: however its output is divided, backward writes one quantized tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from helpers.graphs.graph_builder import E5M2, Builder, te
from helpers.models.snapshot_models import FFN, HIDDEN, capture_training, compiled_run, kernels_everywhere, launches
from helpers.oracles.same_bits import assert_same_bits
from helpers.slow import EXHAUSTIVE
from torch import Tensor, nn

from te_dynamo import capture
from te_dynamo.passes.dialect.fuser import fuse
from te_dynamo.testing import fake_cuda, graph_text

NAME = "fuse_gated_backward_quantize_halves"
Divide = Callable[[Tensor], tuple[Tensor, ...]]

FORMS: dict[str, Divide] = {
    "chunk": lambda h: h.chunk(2, -1),
    "split": lambda h: h.split(FFN, dim=-1),
    "up first": lambda h: h.chunk(2, -1)[::-1],
    "slices": lambda h: (h[..., :FFN], h[..., FFN:]),
    "slices, up first": lambda h: (h[..., FFN:], h[..., :FFN]),
    "from the end": lambda h: (h[..., :-FFN], h[..., -FFN:]),
    "tensor_split": lambda h: h.tensor_split(2, -1),
    "narrow": lambda h: (h.narrow(-1, 0, FFN), h.narrow(-1, FFN, FFN)),
    "unbind": lambda h: h.unflatten(-1, (2, FFN)).unbind(-2),
}
FAST = ("slices", "unbind")


def gated(divide: Divide, bias: bool = False) -> type[nn.Module]:
    """A SwiGLU MLP with one linear for gate and up."""

    class GateUp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up, self.down = nn.Linear(HIDDEN, 2 * FFN, bias), nn.Linear(FFN, HIDDEN, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            gate, up = divide(self.gate_up(x))
            return self.down(F.silu(gate) * up)

    return GateUp


@pytest.fixture(autouse=True)
def no_caches() -> Iterator[None]:
    with torch._inductor.config.patch(force_disable_caches=True):
        yield


@pytest.mark.one_fast_case
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("form", "codegen"),
    [
        *((form, "eager") for form in FAST),
        *(pytest.param(form, "eager", marks=pytest.mark.slow) for form in FORMS if form not in FAST),
        *(pytest.param(form, "inductor", marks=pytest.mark.slow if form in FAST else EXHAUSTIVE) for form in FORMS),
    ],
)
def test_every_form_is_fused_and_gives_the_same_bits(form: str, codegen: str, bias: bool) -> None:
    model = gated(FORMS[form], bias)
    torch.manual_seed(4)
    x = torch.randn(2, 19, HIDDEN, dtype=torch.bfloat16)
    with capture() as graphs:
        fused = compiled_run(model, {"codegen": codegen})(x)
    assert ("backward", NAME, 1) in graphs.reports[0].fusions
    (line,) = [line for line in graphs["backward"].splitlines() if "gated_backward" in line and "= te.gated" in line]
    assert f"gate_first={'up first' not in form}" in line
    assert "aten.cat" not in graphs["backward"] and "te.quantize(" in graphs["backward"]
    assert_same_bits(fused, compiled_run(model, {"codegen": codegen, "fusions": False})(x))
    chunked = gated(FORMS["up first" if "up first" in form else "chunk"], bias)
    assert_same_bits(fused, compiled_run(chunked, {"codegen": codegen})(x))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["chunk", "slices", "unbind"])
def test_dynamic_rows(form: str) -> None:
    torch.manual_seed(5)
    model = gated(FORMS[form])().bfloat16()
    found = []
    for options in ({}, {"fusions": False}):
        torch._dynamo.reset()
        with capture() as graphs:
            run, results = torch.compile(model, backend="te", dynamic=True, options=options), []
            for rows in (16, 40, 64):
                x = (
                    torch.randn(2, rows, HIDDEN, generator=torch.Generator().manual_seed(rows))
                    .bfloat16()
                    .requires_grad_()
                )
                results += torch.autograd.grad(run(x).float().square().sum(), [x, *model.parameters()])
        fired = {name for _, name, _ in graphs.reports[0].fusions}
        assert (NAME in fired) == (not options) and len(graphs.reports) == 1
        found.append(results)
    for fused, plain in zip(*found, strict=True):
        assert torch.equal(fused, plain)


def test_what_is_no_half_stays() -> None:
    """Every second column; a third of them; a format that the kernels do not write."""

    def interleaved(h: Tensor) -> tuple[Tensor, ...]:
        return h[..., ::2], h[..., 1::2]

    def overlapping(h: Tensor) -> tuple[Tensor, ...]:
        return h[..., :FFN], h[..., 16 : 16 + FFN]

    x = torch.randn(2, 16, HIDDEN, dtype=torch.bfloat16)
    for form, recipe in ((interleaved, None), (overlapping, None), (FORMS["chunk"], "nvfp4")):
        with capture() as graphs:
            compiled_run(gated(form), {"codegen": "eager"} | ({"recipe": recipe} if recipe else {}))(x)
        assert NAME not in {name for _, name, _ in graphs.reports[0].fusions}
        assert "te.quantize(" in graphs["backward"]


def test_gradients_that_are_read_apart_too_stay() -> None:
    with fake_cuda():
        b = Builder((32, 64), (32, 64), (32, 64))
        gradients = b.read(b.call(te.gated_backward.default, *b.inputs, "silu"), 0, 1)
        cat = b.call(torch.ops.aten.cat.default, gradients, -1)
        sums = b.call(te.bias_grad.default, gradients[0])
        graph = b.returns(sums, *b.read(b.call(te.quantize.default, cat, E5M2), 0, 1, 2))
        assert fuse(graph, "backward", (NAME,)) == []


def test_low_memory_writes_into_dys_memory() -> None:
    """And makes the columns of the codes, between the two products."""
    with kernels_everywhere():
        graphs = capture_training(gated(FORMS["up first"]), (256, HIDDEN), "cuda", codegen="inductor")
        text = graph_text(graphs.graph("lower.backward"))
    lines = launches(text).splitlines()
    assert lines[-5:] == [
        "produce_amax_kernel -> partials",
        "gated_backward_rows_kernel -> dy, scale_inv",
        "gemm_kernel -> c",
        "transpose_kernel -> transpose",
        "gemm_kernel -> c",
    ]
    assert "clone" not in text and "aten.cat" not in text


@pytest.mark.parametrize("codegen", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_low_memory_gives_the_same_bits(codegen: str) -> None:
    x = torch.randn(48, HIDDEN, dtype=torch.bfloat16)
    low, high = (
        compiled_run(gated(FORMS["chunk"]), {"codegen": codegen, "low_memory": value})(x) for value in (True, False)
    )
    assert_same_bits(low, high)
