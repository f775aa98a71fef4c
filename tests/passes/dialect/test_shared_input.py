"""Linears that share an input: which become one GEMM, what their graphs are, and that their numbers are those apart."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from helpers.kernels.kernel_cases import assert_same_bits
from helpers.models.snapshot_models import capture_inference, capture_training, compiled_run
from helpers.slow import slow_but
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import te_dynamo
from te_dynamo.recipe import Float8BlockScaling, MXFP8BlockScaling, Recipe

HIDDEN = 64


class Linears(nn.Module):
    """Linears of those widths that read one input."""

    widths: Sequence[int] = (256, 128, 128)
    biases: Sequence[bool] = (False,) * 7

    def __init__(self) -> None:
        super().__init__()
        made = (nn.Linear(HIDDEN, n, bias=b) for n, b in zip(self.widths, self.biases, strict=False))
        self.linears = nn.ModuleList(made)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(*(linear(x) for linear in self.linears))

    def mix(self, *results: Tensor) -> Tensor:
        """All are read in forward, none in backward."""
        return torch.cat([result + 1.0 for result in results], -1)


class Rotary(Linears):
    """Attention over q, k and v, with a rotation of q and k in between: of the three, backward reads v alone."""

    widths = (128, 128, 128)

    def mix(self, *results: Tensor) -> Tensor:
        q, k, v = (r.unflatten(-1, (2, 64)).transpose(1, 2) for r in results)
        q, k = (torch.cat([-t[..., 32:], t[..., :32]], -1) * 0.5 + t for t in (q, k))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)


class SwiGLU(Linears):
    """Whose gradients one operation writes."""

    widths = (128, 128)

    def mix(self, *results: Tensor) -> Tensor:
        return F.silu(results[0]) * results[1]


class Biased(Linears):
    """As in Whisper: k has no bias."""

    biases = (True, False, True)


class Four(Linears):
    """More than the kernels take at once."""

    widths = (128, 256, 128, 128)


class Seven(Linears):
    """Some with a bias, and one whose width is no multiple of 128."""

    widths = (128, 256, 128, 192, 128, 384, 128)
    biases = (True, False, False, True, False, True, False)


class Parallel(Linears):
    """A parallel block: attention and a gated unit read one input."""

    widths = (128, 128, 128, 128, 128)

    def mix(self, *results: Tensor) -> Tensor:
        gate, *others, up = results
        return Rotary.mix(self, *others) + F.silu(gate) * up  # type: ignore[arg-type]


IN_BLOCKS = [
    Float8BlockScaling(),
    Float8BlockScaling(weight_block_dims=1, power_of_two_scales=False),
    MXFP8BlockScaling(),
    MXFP8BlockScaling(weight_block_dims=2),
    MXFP8BlockScaling(scale_block=128),
    MXFP8BlockScaling(scale_block=128, weight_block_dims=2),
]


def one_gemm(text: str) -> bool:
    """Whether linears became one in that graph, which has linears."""
    assert "te.gemm(" in text
    return "te.quantize_stacked(" in text


def lines(text: str, *operations: str) -> str:
    """The lines of a graph that call one of those operations, and what it returns."""
    kept = [line for line in text.splitlines() if any(f"= {name}(" in line for name in operations)]
    return "\n".join(kept)


def test_before() -> None:
    graphs = capture_training(Linears, (32, HIDDEN), "cpu", fusions=False)
    text = lines(graphs["joint"], "te.quantize", "te.gemm", "te.quantize_stacked", "aten.add")
    assert text.count("= te.gemm(") == 9 and "stacked" not in text


def test_after() -> None:
    """One GEMM in forward, one dgrad, one wgrad; the gradient of x is no sum any more."""
    graphs = capture_training(Linears, (32, HIDDEN), "cpu")
    text = lines(graphs["joint"], "te.quantize", "te.gemm", "te.quantize_stacked", "aten.slice")
    assert_expected_inline(
        text,
        """\
quantize: (f8e4m3[32, 64], f8e4m3[64, 32], f32[1]) = te.quantize(x, e4m3[row+column])
quantize_stacked: (f8e4m3[512, 64], f8e4m3[64, 512], f32[3]) = te.quantize_stacked([linears.0.weight, linears.1.weight, linears.2.weight], e4m3[row+column], by_columns=False)
gemm: bf16[32, 512] = te.gemm([quantize[0], quantize[2]], e4m3[row], [quantize_stacked[0], quantize_stacked[2]], e4m3[row], bf16, fast_accum=False, along='N', segments=[256, 128, 128])
slice: bf16[32, 256] = aten.slice(gemm, 1, 0, 256)
slice_1: bf16[32, 128] = aten.slice(gemm, 1, 256, 384)
slice_2: bf16[32, 128] = aten.slice(gemm, 1, 384, 512)
slice_3: bf16[32, 256] = aten.slice(tangents_1, 1, 0, 256)
slice_4: bf16[32, 128] = aten.slice(tangents_1, 1, 256, 384)
slice_5: bf16[32, 128] = aten.slice(tangents_1, 1, 384, 512)
quantize_stacked_1: (f8e5m2[32, 512], f8e5m2[512, 32], f32[3]) = te.quantize_stacked([clone_2, clone_1, clone], e5m2[row+column], by_columns=True)
gemm_1: bf16[32, 64] = te.gemm([quantize_stacked_1[0], quantize_stacked_1[2]], e5m2[row], [quantize_stacked[1], quantize_stacked[2]], e4m3[column], bf16, fast_accum=False, along='K', segments=[256, 128, 128])
gemm_2: bf16[512, 64] = te.gemm([quantize_stacked_1[1], quantize_stacked_1[2]], e5m2[column], [quantize[1], quantize[2]], e4m3[column], bf16, fast_accum=False, along='M', segments=[256, 128, 128])
slice_6: bf16[128, 64] = aten.slice(gemm_2, start=384, end=512)
slice_7: bf16[128, 64] = aten.slice(gemm_2, start=256, end=384)
slice_8: bf16[256, 64] = aten.slice(gemm_2, start=0, end=256)""",
    )


def test_four_are_two_and_two() -> None:
    """The gradient of x is the sum of two dgrads."""
    graphs = capture_training(Four, (32, HIDDEN), "cpu")
    text = lines(graphs["joint"], "te.gemm", "te.quantize_stacked", "aten.add")
    assert_expected_inline(
        text,
        """\
quantize_stacked: (f8e4m3[384, 64], f8e4m3[64, 384], f32[2]) = te.quantize_stacked([linears.0.weight, linears.1.weight], e4m3[row+column], by_columns=False)
gemm: bf16[32, 384] = te.gemm([quantize[0], quantize[2]], e4m3[row], [quantize_stacked[0], quantize_stacked[2]], e4m3[row], bf16, fast_accum=False, along='N', segments=[128, 256])
quantize_stacked_1: (f8e4m3[256, 64], f8e4m3[64, 256], f32[2]) = te.quantize_stacked([linears.2.weight, linears.3.weight], e4m3[row+column], by_columns=False)
gemm_1: bf16[32, 256] = te.gemm([quantize[0], quantize[2]], e4m3[row], [quantize_stacked_1[0], quantize_stacked_1[2]], e4m3[row], bf16, fast_accum=False, along='N', segments=[128, 128])
add: bf16[32, 128] = aten.add(slice, 1.0)
add_1: bf16[32, 256] = aten.add(slice_1, 1.0)
add_2: bf16[32, 128] = aten.add(slice_2, 1.0)
add_3: bf16[32, 128] = aten.add(slice_3, 1.0)
quantize_stacked_2: (f8e5m2[32, 256], f8e5m2[256, 32], f32[2]) = te.quantize_stacked([clone_1, clone], e5m2[row+column], by_columns=True)
gemm_2: bf16[32, 64] = te.gemm([quantize_stacked_2[0], quantize_stacked_2[2]], e5m2[row], [quantize_stacked_1[1], quantize_stacked_1[2]], e4m3[column], bf16, fast_accum=False, along='K', segments=[128, 128])
gemm_3: bf16[256, 64] = te.gemm([quantize_stacked_2[1], quantize_stacked_2[2]], e5m2[column], [quantize[1], quantize[2]], e4m3[column], bf16, fast_accum=False, along='M', segments=[128, 128])
quantize_stacked_3: (f8e5m2[32, 384], f8e5m2[384, 32], f32[2]) = te.quantize_stacked([clone_3, clone_2], e5m2[row+column], by_columns=True)
gemm_4: bf16[32, 64] = te.gemm([quantize_stacked_3[0], quantize_stacked_3[2]], e5m2[row], [quantize_stacked[1], quantize_stacked[2]], e4m3[column], bf16, fast_accum=False, along='K', segments=[128, 256])
gemm_5: bf16[384, 64] = te.gemm([quantize_stacked_3[1], quantize_stacked_3[2]], e5m2[column], [quantize[1], quantize[2]], e4m3[column], bf16, fast_accum=False, along='M', segments=[128, 256])
add_4: bf16[32, 64] = aten.add(gemm_4, gemm_2)""",
    )


def segments(text: str) -> list[str]:
    """The segments of each GEMM of a graph, "" where it is not stacked."""
    return [line.partition("segments=")[2][:-1] for line in lines(text, "te.gemm").splitlines()]


@pytest.mark.parametrize(
    ("model", "stacks"),
    [(Seven, ["[128, 256, 128]", "[128, 384, 128]", ""]), (Parallel, ["[128, 128, 128]", "[128, 128]"])],
)
def test_more_than_three_are_stacks_of_two_or_three(model: type[nn.Module], stacks: list[str]) -> None:
    """What does not stack is left out; gate and up are together, though they are not neighbours. Of kept weights too."""
    linears, x = model().bfloat16(), torch.randn(1, 32, HIDDEN, dtype=torch.bfloat16)
    run = torch.compile(linears, backend="te", options={"codegen": "eager"})
    with torch.no_grad():
        with te_dynamo.capture() as graphs:
            expected = run(x)
        te_dynamo.freeze(linears)
        with te_dynamo.capture() as of_kept:
            assert torch.equal(run(x), expected)
    assert sorted(segments(graphs["inference"])) == sorted(segments(of_kept["inference"])) == sorted(stacks)
    assert "te.quantize_stacked(" not in of_kept["inference"]


def test_what_is_saved_does_not_grow() -> None:
    """Forward returns fewer tensors: one transpose and one tensor of scales in place of three."""
    returned = [
        capture_training(Linears, (32, HIDDEN), "cpu", fusions=on)["forward"].splitlines()[-1].count(",")
        for on in (True, False)
    ]
    assert returned[0] == returned[1] - 4


def test_a_result_that_backward_reads_does_not_keep_the_others_alive() -> None:
    graphs = capture_training(Rotary, (1, 32, HIDDEN), "cpu")
    text = lines(graphs["forward"], "te.quantize_stacked", "te.gemm")
    assert_expected_inline(
        text,
        """\
quantize_stacked: (f8e4m3[256, 64], f8e4m3[64, 256], f32[2]) = te.quantize_stacked([linears.0.weight, linears.1.weight], e4m3[row+column], by_columns=False)
gemm: bf16[32, 256] = te.gemm([quantize[0], quantize[2]], e4m3[row], [quantize_stacked[0], quantize_stacked[2]], e4m3[row], bf16, fast_accum=False, along='N', segments=[128, 128])
gemm_1: bf16[32, 128] = te.gemm([quantize[0], quantize[2]], e4m3[row], [quantize_1[0], quantize_1[2]], e4m3[row], bf16, fast_accum=False)""",
    )


def test_a_scale_a_row() -> None:
    """Weights in forward and gradients in wgrad are longer vectors of scales; dgrads, each of scales of its own, stay apart."""
    graphs = capture_training(Linears, (32, HIDDEN), "cpu", recipe="float8_rowwise")
    operations = ("te.quantize", "te.gemm", "te.quantize_stacked", "aten.add")
    text = "\n".join(lines(graphs[phase], *operations) for phase in ("forward", "backward"))
    assert_expected_inline(
        text,
        """\
quantize: (f8e4m3[32, 64], f32[32], f8e4m3[64, 32], f32[64]) = te.quantize(x, e4m3 by rows[row+column])
quantize_stacked: (f8e4m3[512, 64], f32[512]) = te.quantize_stacked([linears.0.weight, linears.1.weight, linears.2.weight], e4m3 by rows[row], by_columns=False)
gemm: bf16[32, 512] = te.gemm([quantize[0], quantize[1]], e4m3 by rows[row], [quantize_stacked[0], quantize_stacked[1]], e4m3 by rows[row], bf16, fast_accum=False, along='N', segments=[256, 128, 128])
add: bf16[32, 256] = aten.add(slice, 1.0)
add_1: bf16[32, 128] = aten.add(slice_1, 1.0)
add_2: bf16[32, 128] = aten.add(slice_2, 1.0)
quantize_1: (f8e5m2[32, 128], f32[32]) = te.quantize(clone, e5m2 by rows[row])
quantize_2: (f8e4m3[64, 128], f32[64]) = te.quantize(linears.2.weight, e4m3 by rows[column])
gemm: bf16[32, 64] = te.gemm([quantize_1[0], quantize_1[1]], e5m2 by rows[row], [quantize_2[0], quantize_2[1]], e4m3 by rows[column], bf16, fast_accum=False)
quantize_3: (f8e5m2[32, 128], f32[32]) = te.quantize(clone_1, e5m2 by rows[row])
quantize_4: (f8e4m3[64, 128], f32[64]) = te.quantize(linears.1.weight, e4m3 by rows[column])
gemm_1: bf16[32, 64] = te.gemm([quantize_3[0], quantize_3[1]], e5m2 by rows[row], [quantize_4[0], quantize_4[1]], e4m3 by rows[column], bf16, fast_accum=False, addend=gemm)
quantize_stacked: (f8e5m2[512, 32], f32[512]) = te.quantize_stacked([clone_2, clone_1, clone], e5m2 by rows[column], by_columns=True)
quantize_5: (f8e5m2[32, 256], f32[32]) = te.quantize(clone_2, e5m2 by rows[row])
quantize_6: (f8e4m3[64, 256], f32[64]) = te.quantize(linears.0.weight, e4m3 by rows[column])
gemm_2: bf16[32, 64] = te.gemm([quantize_5[0], quantize_5[1]], e5m2 by rows[row], [quantize_6[0], quantize_6[1]], e4m3 by rows[column], bf16, fast_accum=False, addend=gemm_1)
gemm_3: bf16[512, 64] = te.gemm([quantize_stacked[0], quantize_stacked[1]], e5m2 by rows[column], [quantize[2], quantize[3]], e4m3 by rows[column], bf16, fast_accum=False, along='M', segments=[256, 128, 128])""",
    )


def test_a_scale_a_block() -> None:
    """The buffers are those of the concatenation, and each GEMM is one as any other; of blocks of 32x32 both usages read one `data`."""
    graphs = capture_training(Linears, (32, HIDDEN), "cpu", recipe=MXFP8BlockScaling(weight_block_dims=2))
    text = lines(graphs["joint"], "te.quantize", "te.gemm", "te.quantize_stacked", "aten.slice")
    assert_expected_inline(
        text,
        """\
quantize: (f8e4m3[32, 64], u8[128, 4], f8e4m3[32, 64], u8[4, 128]) = te.quantize(x, mxfp8[row+column])
quantize_stacked: (f8e4m3[512, 64], u8[512, 4], u8[16, 128]) = te.quantize_stacked([linears.0.weight, linears.1.weight, linears.2.weight], mxfp8[row+column, 32x32], by_columns=False)
gemm: bf16[32, 512] = te.gemm([quantize[0], quantize[1]], mxfp8[row], [quantize_stacked[0], quantize_stacked[1]], mxfp8[row, 32x32], bf16, fast_accum=False)
slice: bf16[32, 256] = aten.slice(gemm, 1, 0, 256)
slice_1: bf16[32, 128] = aten.slice(gemm, 1, 256, 384)
slice_2: bf16[32, 128] = aten.slice(gemm, 1, 384, 512)
slice_3: bf16[32, 256] = aten.slice(tangents_1, 1, 0, 256)
slice_4: bf16[32, 128] = aten.slice(tangents_1, 1, 256, 384)
slice_5: bf16[32, 128] = aten.slice(tangents_1, 1, 384, 512)
quantize_stacked_1: (f8e4m3[32, 512], u8[128, 16], f8e4m3[32, 512], u8[4, 512]) = te.quantize_stacked([clone_2, clone_1, clone], mxfp8[row+column], by_columns=True)
gemm_1: bf16[32, 64] = te.gemm([quantize_stacked_1[0], quantize_stacked_1[1]], mxfp8[row], [quantize_stacked[0], quantize_stacked[2]], mxfp8[column, 32x32], bf16, fast_accum=False)
gemm_2: bf16[512, 64] = te.gemm([quantize_stacked_1[2], quantize_stacked_1[3]], mxfp8[column], [quantize[2], quantize[3]], mxfp8[column], bf16, fast_accum=False)
slice_6: bf16[128, 64] = aten.slice(gemm_2, start=384, end=512)
slice_7: bf16[128, 64] = aten.slice(gemm_2, start=256, end=384)
slice_8: bf16[256, 64] = aten.slice(gemm_2, start=0, end=256)""",
    )


def test_inference_stacks_all() -> None:
    graphs = capture_inference(Rotary, (1, 32, HIDDEN), "cpu")
    assert graphs["inference"].count("along='N'") == graphs["inference"].count("= te.gemm(") == 1


def test_biases_are_one() -> None:
    """-0.0 where a linear has none: it changes no bit. The GEMM adds them."""
    graphs = capture_training(Biased, (32, HIDDEN), "cpu")
    text = lines(graphs["forward"], "te.gemm", "te.add_bias", "aten.cat", "aten.new_full", "aten.full")
    assert_expected_inline(
        text,
        """\
full: bf16[128] = aten.full([128], -0.0, dtype=bf16, device=cpu)
cat: bf16[512] = aten.cat([linears.0.bias, full, linears.2.bias])
gemm: bf16[32, 512] = te.gemm([quantize[0], quantize[2]], e4m3[row], [quantize_stacked[0], quantize_stacked[2]], e4m3[row], bf16, fast_accum=False, bias=cat, along='N', segments=[256, 128, 128])
cat_1: bf16[32, 512] = aten.cat([add, add_1, add_2], -1)""",
    )
    assert graphs["joint"].count(", along='") == 3 and graphs["joint"].count("= te.bias_grad(") == 2


@pytest.mark.slow
@torch.no_grad()
def test_biases_of_some_in_inductor() -> None:
    """Which lowers what stands for the others."""
    model, x = Biased().bfloat16(), torch.randn(32, HIDDEN, dtype=torch.bfloat16)
    eager, inductor = (torch.compile(model, backend="te", options={"codegen": c})(x) for c in ("eager", "inductor"))
    assert torch.equal(eager, inductor)


@pytest.mark.parametrize("recipe", ["float8_current_scaling", *IN_BLOCKS], ids=str)
def test_kept_weights_with_biases_are_one(recipe: object) -> None:
    model = Biased().bfloat16()
    x = torch.randn(32, HIDDEN, dtype=torch.bfloat16)
    run = torch.compile(model, backend="te", options={"codegen": "eager", "recipe": recipe})
    with torch.no_grad():
        expected = run(x)
        te_dynamo.freeze(model)
        with te_dynamo.capture() as graphs:
            assert torch.equal(run(x), expected)
    assert "te.quantize_stacked(" not in graphs["inference"] and "aten.clone(" not in graphs["inference"]
    assert graphs["inference"].count("= te.gemm(") == 1


# -- refused -----------------------------------------------------------------------------------------


class Narrow(Linears):
    """A width that is no multiple of 128."""

    widths = (128, 192)


class Returned(Linears):
    """The results are outputs."""

    widths = (128, 128)

    def mix(self, *results: Tensor) -> Tensor:
        return results  # type: ignore[return-value]


class Flattened(Linears):
    """A view that reads across rows."""

    widths = (128, 128)

    def mix(self, *results: Tensor) -> Tensor:
        return results[0].view(-1) + results[1].view(-1)


class UnboundAndFlattened(Linears):
    """The same, of a part."""

    widths = (128, 128)

    def mix(self, *results: Tensor) -> Tensor:
        return results[0].unflatten(0, (2, -1)).unbind(0)[0].view(-1) * 2.0 + results[1].mean()


class Strided(Linears):
    """Strides of the model's own, which are those of a contiguous tensor."""

    widths = (128, 128)

    def mix(self, *results: Tensor) -> Tensor:
        return results[0].as_strided((64, 32), (32, 1)) * 2.0 + results[1].mean()


class ReadByGelu(Linears):
    """A kernel that reads contiguous tensors."""

    widths = (128, 128)

    def mix(self, *results: Tensor) -> Tensor:
        return F.gelu(results[0]) + results[1]


class Tied(Linears):
    """One weight read twice, so that its gradients are a sum."""

    widths = (128, 128)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.linears
        return self.mix(first(x), second(x), second(x * 2.0))


class OneFrozen(Linears):
    """One weight needs no gradient."""

    widths = (128,)

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frozen", torch.randn(128, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.linears[0](x), F.linear(x, self.frozen))  # type: ignore[arg-type]


@pytest.mark.parametrize("recipe", ["float8_current_scaling", IN_BLOCKS[0]], ids=["tensors", "blocks"])
@pytest.mark.parametrize("model", [Narrow, Returned, Flattened, UnboundAndFlattened, Strided, ReadByGelu])
def test_left_apart(model: type[nn.Module], recipe: object) -> None:
    assert not one_gemm(capture_inference(model, (32, HIDDEN), "cpu", recipe=recipe)["inference"])


def attention_layers() -> nn.Module:
    """Of the attentions, backward reads each v alone."""
    return nn.Sequential(*(layer for _ in range(4) for layer in (Rotary(), nn.Linear(128, HIDDEN))))


ALIKE = "backward reads its result and not theirs, or theirs and not its, one of them is no multiple of 128 wide, or two are gate and up"


@pytest.mark.parametrize(
    ("model", "left"),
    [
        (Narrow, {"linears.0": ALIKE, "linears.1": "a weight's first dimension is no multiple of 128"}),
        (Returned, {"linears.0, linears.1": "a result is returned, or what reads it takes no rows of a larger tensor"}),
        (attention_layers, {"0.linears.2, 2.linears.2, 4.linears.2 and 1 more": ALIKE}),
        (
            OneFrozen,
            {
                "linears.0, gemm_1": "some weights get no gradient, gradients differ in format, or the input's is more than their sum"
            },
        ),
        (Seven, {"linears.3": "a weight's first dimension is no multiple of 128"}),
        (Four, {}),
    ],
)
def test_explain_says_why(model: Callable[[], nn.Module], left: dict[str, str]) -> None:
    x = torch.randn(1, 32, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    explained = te_dynamo.explain(model().bfloat16(), x, options={"codegen": "eager"})
    expected = [f"linears are not stacked with others of their input ({paths}): {why}" for paths, why in left.items()]
    assert explained.to_dict()["notes"] == expected


class OfTwoCheckpoints(Linears):
    """Each region recomputes its own."""

    widths = (128, 128)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(*(checkpoint(lambda x, f=f: f(x).sin(), x, use_reentrant=False) for f in self.linears))


@pytest.mark.parametrize("recipe", ["float8_current_scaling", IN_BLOCKS[0]], ids=["tensors", "blocks"])
@pytest.mark.parametrize("model", [Tied, OneFrozen, OfTwoCheckpoints])
def test_left_apart_in_training(model: type[nn.Module], recipe: object) -> None:
    assert not one_gemm(capture_training(model, (32, HIDDEN), "cpu", recipe=recipe)["joint"])


def test_gate_and_up_in_blocks_are_left_apart_in_training() -> None:
    training, inference = (
        f(SwiGLU, (32, HIDDEN), "cpu", recipe=IN_BLOCKS[0]) for f in (capture_training, capture_inference)
    )
    assert not one_gemm(training["joint"]) and one_gemm(inference["inference"])


def test_nvfp4_is_left_apart() -> None:
    assert not one_gemm(capture_inference(Linears, (32, HIDDEN), "cpu", recipe="nvfp4")["inference"])


def test_a_gradient_that_others_add_to() -> None:
    """The input is a residual too: its gradient is the stacked dgrad plus the others."""

    class Residual(Linears):
        widths = (128, 128)

        def forward(self, x: Tensor) -> Tensor:
            first, second = self.linears
            return self.mix(first(x), second(x), x * 3.0)

    graphs = capture_training(Residual, (32, HIDDEN), "cpu")
    assert graphs["joint"].count(", along='") == 3 and "aten.add(" in graphs["joint"]


# -- numbers -----------------------------------------------------------------------------------------


def run(model: type[nn.Module], fusions: bool) -> Callable[[Tensor], object]:
    return compiled_run(model, {"codegen": "eager", "fusions": fusions})


@pytest.mark.one_fast_case
@pytest.mark.parametrize("model", [Linears, Biased, Rotary, Four, Seven, Parallel])
def test_numbers_with_a_scale_a_row_are_those_apart(model: type[nn.Module]) -> None:
    """In every bit, as no sum is another."""
    torch.manual_seed(0)
    x = torch.randn(1, 128, HIDDEN, dtype=torch.bfloat16)
    together, apart = (
        compiled_run(model, {"codegen": "eager", "fusions": fusions, "recipe": "float8_rowwise"})(x)
        for fusions in (["fuse_shared_input"], False)
    )
    assert all(map(torch.equal, together.outputs, apart.outputs))
    for name, gradient in together.gradients.items():
        assert torch.equal(gradient, apart.gradients[name]) and gradient.count_nonzero() > 0, name


@pytest.mark.one_fast_case
@pytest.mark.parametrize("model", slow_but(1, [Linears, Biased, Rotary, Four, Seven]))
@pytest.mark.parametrize("recipe", slow_but(1, IN_BLOCKS), ids=str)
def test_numbers_with_a_scale_a_block_are_those_apart(model: type[nn.Module], recipe: Recipe) -> None:
    """In every bit, but that the input's gradient is rounded once: it is that of the one linear that the linears are together."""
    torch.manual_seed(0)
    x = torch.randn(1, 128, HIDDEN, dtype=torch.bfloat16)
    together, apart = (
        compiled_run(model, {"codegen": "eager", "fusions": fusions, "recipe": recipe})(x) for fusions in (True, False)
    )
    assert all(map(torch.equal, together.outputs, apart.outputs))
    for name, gradient in together.gradients.items():
        expected = apart.gradients[name]
        assert torch.equal(gradient, expected) == (name != "x") and gradient.count_nonzero() > 0, name
    error = (together.gradients["x"] - apart.gradients["x"]).double().norm() / apart.gradients["x"].double().norm()
    assert error < 3 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("recipe", IN_BLOCKS, ids=str)
def test_a_stack_in_blocks_is_one_linear_of_both_weights(recipe: Recipe) -> None:
    """Every gradient in every bit, also of values that are no numbers."""

    class Two(Linears):
        widths = (256, 128)

    class One(Two):
        def forward(self, x: Tensor) -> Tensor:
            weight = torch.cat([linear.weight for linear in self.linears])  # type: ignore[misc]
            return self.mix(*F.linear(x, weight).split([256, 128], -1))

    torch.manual_seed(0)
    x = torch.randn(1, 128, HIDDEN, dtype=torch.bfloat16)
    x[0, 5], x[0, 7, 3], x[0, 9, 4] = 0.0, float("inf"), float("nan")
    stacked, one = (compiled_run(model, {"codegen": "eager", "recipe": recipe})(x) for model in (Two, One))
    assert_same_bits(stacked.outputs, one.outputs)
    assert_same_bits([*stacked.gradients.values()], [*one.gradients.values()])


@pytest.mark.one_fast_case
@pytest.mark.parametrize("dtype", slow_but(1, [torch.bfloat16, torch.float32]), ids=str)
@pytest.mark.parametrize("model", [Linears, Biased, Rotary, Four, Seven, Parallel])
def test_numbers_are_those_apart(model: type[nn.Module], dtype: torch.dtype) -> None:
    """Forward and the weights' gradients in every bit; the input's gradient is rounded once in place of three times."""
    torch.manual_seed(0)
    x = torch.randn(1, 128, HIDDEN, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        together, apart = run(model, True)(x), run(model, False)(x)
    for one, other in zip(together.outputs, apart.outputs, strict=True):
        assert torch.equal(one, other) and one.count_nonzero() > 0
    for name, gradient in together.gradients.items():
        expected = apart.gradients[name]
        if name != "x":
            assert torch.equal(gradient, expected), name
        else:
            error = (gradient - expected).double().norm() / expected.double().norm()
            assert error < 3 * torch.finfo(dtype).eps
    assert dtype == torch.float32 or not torch.equal(together.gradients["x"], apart.gradients["x"]), "nothing was fused"
