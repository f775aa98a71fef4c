"""te_dynamo.export: programs and packages of torch's operations alone, which give what the compiled model gives."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.slow import EXHAUSTIVE
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import te_dynamo
from te_dynamo.errors import InputError, InvalidOptionError, UnsupportedError

RECIPES = ["float8_current_scaling", "float8_rowwise", "float8_block_scaling", "mxfp8", "nvfp4"]
ROWS = ({0: torch.export.Dim.DYNAMIC},)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(128), nn.Linear(128, 256), nn.Linear(256, 128, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def block() -> nn.Module:
    return Block().bfloat16().eval()


def rows(count: int = 32) -> torch.Tensor:
    return torch.randn(count, 128, dtype=torch.bfloat16)


def compiled(model: nn.Module, x: Any, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        return torch.compile(model, backend="te", options={"codegen": "eager", **options})(x)


def assert_close(result: torch.Tensor, expected: torch.Tensor) -> None:
    """Sums of products in another order: one rounding to bf16 apart at most, of few values."""
    torch.testing.assert_close(result, expected, rtol=2**-7, atol=1e-5)
    assert (result != expected).float().mean() < 0.02


def operations(exported: te_dynamo.Exported) -> set[str]:
    return {str(node.target) for node in exported.program.graph.nodes if node.op == "call_function"}


@pytest.mark.one_fast_case
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_program_gives_what_the_compiled_model_gives(recipe: str) -> None:
    model, x = block(), rows()
    exported = te_dynamo.export(model, (x,), dynamic_shapes=ROWS, recipe=recipe)
    assert exported.explanation.coverage == 1.0
    assert exported.path is None
    assert not any(name.startswith("te") for name in operations(exported))
    assert ("aten._scaled_mm.default" in operations(exported)) == (recipe in RECIPES[:2])
    for count in (32, 7, 80):
        x = rows(count)
        assert_close(exported.program.module()(x), compiled(model, x, recipe=recipe))


@pytest.mark.one_fast_case
@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_are_codes(recipe: str) -> None:
    program = te_dynamo.export(block(), (rows(),), recipe=recipe).program
    matrices = [t for t in [*program.state_dict.values(), *program.constants.values()] if t.numel() >= 64 * 128]
    assert len(matrices) == 2
    assert {t.element_size() for t in matrices} == {1}


@pytest.mark.parametrize("drop", [False, True])
def test_a_frozen_model(drop: bool) -> None:
    model, x = block(), rows()
    expected = compiled(model, x)
    te_dynamo.freeze(model, drop_weights=drop)
    frozen = compiled(model, x)
    program = te_dynamo.export(model, (x,)).program
    assert torch.equal(frozen, expected)
    assert_close(program.module()(x), expected)
    assert torch.equal(compiled(model, x), expected)  # the model is as it was


def test_a_stored_weight_keeps_its_codes() -> None:
    model, x = block(), rows()
    stored = te_dynamo.Float8BlockQuantizer(columnwise=False, block_dims=2).quantize(model.down.weight.detach())
    model.down.weight = nn.Parameter(stored, requires_grad=False)
    exported = te_dynamo.export(model, (x,), recipe="float8_current_scaling")
    assert exported.explanation.coverage == 1.0
    codes = [
        t for t in exported.program.state_dict.values() if t.dtype == torch.float8_e4m3fn and t.shape == (128, 256)
    ]
    assert [torch.equal(c.view(torch.uint8), stored._data.view(torch.uint8)) for c in codes] == [True]
    assert_close(exported.program.module()(x), compiled(model, x, recipe="float8_current_scaling"))


def test_a_stored_weight_that_a_rule_leaves_is_dequantized_in_the_graph() -> None:
    model, x = block(), rows()
    stored = te_dynamo.Float8CurrentScalingQuantizer(columnwise=False).quantize(model.down.weight.detach())
    model.down.weight = nn.Parameter(stored, requires_grad=False)
    exported = te_dynamo.export(model, (x,), rules=[("down", None)])
    assert [row.matched for row in exported.explanation.linears] == [True, False]
    assert_close(exported.program.module()(x), compiled(model, x, rules=[("down", None)]))


def test_rules_and_what_is_left() -> None:
    model, x = block(), rows()
    model.odd = nn.Linear(128, 3).bfloat16()
    model.forward = lambda x: model.odd(Block.forward(model, x))
    exported = te_dynamo.export(model, (x,), rules=[("down", None), ("up", "mxfp8")])
    found = {row.module: row.recipe if row.matched else row.reason for row in exported.explanation.linears}
    assert found["up"] == "mxfp8"
    assert found["down"] == "rule 'down' leaves it in the model's precision"
    assert "aten._scaled_mm.default" not in operations(exported)
    assert_close(exported.program.module()(x), compiled(model, x, rules=[("down", None), ("up", "mxfp8")]))


def test_the_recipe_of_a_compiled_model() -> None:
    model = te_dynamo.compile(block(), recipe="mxfp8")
    assert te_dynamo.export(model, (rows(),)).explanation.recipes == "mxfp8"
    assert te_dynamo.export(model, (rows(),), recipe="float8_rowwise").explanation.recipes == "float8_rowwise"


class Written(nn.Module):
    """A product by parameters that is no nn.Linear."""

    def __init__(self, write: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.write, self.conv = write, nn.Conv1d(128, 256, 1)
        self.w, self.v, self.b = (nn.Parameter(torch.randn(*shape)) for shape in ((128, 256), (256, 128), (256,)))
        self.register_buffer("mask", torch.rand(128, 256).round())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.write(self, x)


@pytest.mark.one_fast_case
@pytest.mark.parametrize(
    "write",
    [
        lambda m, x: x @ m.w,
        lambda m, x: torch.mm(x, m.v.t()),
        lambda m, x: torch.addmm(m.b, x, m.w),
        lambda m, x: torch.einsum("mk,kn->mn", x, m.w),
        lambda m, x: torch.tensordot(x, m.w, 1),
        lambda m, x: torch.inner(x, m.v),
        lambda m, x: x @ (m.w * m.mask),
        lambda m, x: F.linear(x, m.v, m.b),
        lambda m, x: m.conv(x.t()[None]),
    ],
    ids=["matmul", "mm", "addmm", "einsum", "tensordot", "inner", "masked", "F.linear", "conv1d"],
)  # fmt: skip
def test_what_is_no_module_leaves_as_it_is_compiled(write: Any) -> None:
    model, x = Written(write).bfloat16().eval().requires_grad_(False), rows()
    exported = te_dynamo.export(model, (x,))
    found, expected = (
        [(row.module, row.recipe, row.shape) for row in explained.linears]
        for explained in (exported.explanation, te_dynamo.explain(model, x))
    )
    assert found == expected and len(found) == 1 and found[0][1]
    assert_close(exported.program.module()(x), compiled(model, x))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 128), nn.Linear(128, 64, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens: torch.Tensor, *, scale: float = 1.0) -> dict[str, torch.Tensor]:
        self.calls += 1
        return {"logits": self.head(self.embed(tokens) * scale), "calls": self.calls.clone()}


@pytest.mark.parametrize("drop", [None, False, True])
def test_a_tied_weight_keyword_arguments_and_a_buffer(drop: bool | None) -> None:
    model, tokens = Tied().bfloat16().eval(), torch.arange(32)
    with torch.no_grad():
        expected = torch.compile(model, backend="te", options={"codegen": "eager"})(tokens, scale=2.0)["logits"]
    if drop is not None:
        te_dynamo.freeze(model, drop_weights=drop)
    program = te_dynamo.export(model, (tokens,), {"scale": 2.0}).program.module()
    assert [program(tokens, scale=2.0)["calls"] for _ in range(2)] == [2, 3]
    assert_close(program(tokens, scale=2.0)["logits"], expected)


def test_modules_of_te_dynamo() -> None:
    model, x = te_dynamo.nn.LayerNormMLP(128, 256).bfloat16().eval(), rows()
    exported = te_dynamo.export(model, (x,))
    assert not any(name.startswith("te") for name in operations(exported))
    with torch.no_grad():
        assert_close(exported.program.module()(x), model(x))


def test_a_program_is_saved_and_loaded(tmp_path: Path) -> None:
    x, exported = rows(), te_dynamo.export(block(), (rows(),))
    torch.export.save(exported.program, tmp_path / "model.pt2")
    run = "import sys, torch; sys.modules['te_dynamo'] = None; x, y = torch.load('xy.pt'); m = torch.export.load('model.pt2').module(); assert torch.equal(m(x), y)"
    torch.save((x, exported.program.module()(x).detach()), tmp_path / "xy.pt")
    subprocess.run([sys.executable, "-c", run], cwd=tmp_path, check=True)


class Blocks(nn.ModuleList):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([one(x) for one in self])


@pytest.mark.slow
def test_a_package_of_all_recipes_runs_without_te_dynamo(tmp_path: Path) -> None:
    model = Blocks(block() for _ in RECIPES).eval()
    content, exported = _package(model, tmp_path, rules=[(str(i), recipe) for i, recipe in enumerate(RECIPES)])
    assert [row.recipe for row in exported.explanation.linears] == [recipe for recipe in RECIPES for _ in range(2)]
    codes = [t for t in exported.program.state_dict.values() if t.shape[0] >= 128 and t.numel() >= 64 * 128]
    assert [bytes_of(t) in content for t in codes] == [True, True] * len(RECIPES)
    weights = [p.detach() for one in model for p in (one.up.weight, one.down.weight)]
    assert not any(bytes_of(weight) in content for weight in weights)


@pytest.mark.parametrize(
    ("form", "recipe"),
    [
        pytest.param("compressed-tensors", "float8_rowwise", marks=pytest.mark.slow),
        pytest.param("modelopt", "mxfp8", marks=EXHAUSTIVE),
    ],
)
def test_a_package_has_the_codes_of_a_checkpoint(form: str, recipe: str, tmp_path: Path) -> None:
    te_dynamo.save_checkpoint(block(), tmp_path / "folder", form, recipe=recipe)
    loaded = te_dynamo.load_checkpoint(block(), tmp_path / "folder")
    content, _ = _package(loaded, tmp_path, recipe=RECIPES[0])
    file = load_file(tmp_path / "folder" / "model.safetensors")
    assert [bytes_of(file[f"{name}.weight"]) in content for name in ("up", "down")] == [True, True]


def _package(model: nn.Module, tmp_path: Path, **options: Any) -> tuple[bytes, te_dynamo.Exported]:
    """What is in a package, which gives what its program gives where te_dynamo is not."""
    x = rows()
    exported = te_dynamo.export(model, (x,), dynamic_shapes=ROWS, path=tmp_path / "model.pt2", **options)
    assert exported.path == str(tmp_path / "model.pt2")
    inputs = [x, rows(80)]
    torch.save((inputs, [exported.program.module()(x).detach() for x in inputs]), tmp_path / "xy.pt")
    run = (
        "import sys, torch; sys.modules['te_dynamo'] = None; xs, ys = torch.load('xy.pt'); "
        "m = torch._inductor.aoti_load_package('model.pt2'); found = [((m(x) - y).abs().amax((-2, -1)) / y.abs().amax((-2, -1))).max() for x, y in zip(xs, ys)]; "
        "print(found); assert max(found) < 2**-6"  # Inductor's C++ rounds a fused sum otherwise, which may move a code of the next input
    )
    subprocess.run([sys.executable, "-c", run], cwd=tmp_path, check=True, env=os.environ | {"PYTHONPATH": ""})
    with zipfile.ZipFile(tmp_path / "model.pt2") as package:
        return b"".join(map(package.read, package.namelist())), exported


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


class Wrong(nn.Module):
    """Asks for a value."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(128, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) if x.sum() > 0 else x


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 128, 128))

    def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(x, self.weight.transpose(-2, -1), offs=offs)


def test_what_cannot_leave_is_named() -> None:
    x = torch.randn(32, 128)
    with pytest.raises(UnsupportedError, match=r"torch\.export does not trace Wrong: "):
        te_dynamo.export(Wrong().eval(), (x,))
    with pytest.raises(InputError, match=r"Block is in training mode.*model\.eval\(\)"):
        te_dynamo.export(Block(), (x,))
    with pytest.raises(InputError, match=r"expected a torch\.nn\.Module, got function"):
        te_dynamo.export(lambda x: x, (x,))  # type: ignore[arg-type]
    experts = Experts().bfloat16().eval()
    with pytest.raises(UnsupportedError, match=r"experts .* are multiplied in groups"):
        te_dynamo.export(experts, (x.bfloat16(), torch.tensor([8, 16, 24, 32], dtype=torch.int32)))
    batched = Written(lambda m, x: torch.bmm(x[None].expand(2, -1, -1), m.w.expand(2, -1, -1))).eval()
    with pytest.raises(UnsupportedError, match=r"experts \('w', .*rules=\[\('w', None\)\]"):
        te_dynamo.export(batched, (x,))
    assert te_dynamo.export(batched, (x,), rules=[("w", None)]).explanation.linears[0].module == "w"


def test_kernels_that_no_package_has_are_named(tmp_path: Path) -> None:
    given, path = (block(), (rows(),)), tmp_path / "model.pt2"
    with pytest.raises(
        UnsupportedError, match=r"kernels='triton'.*device cpu has no FP8 kernels \(first met: te\.layer_norm"
    ):
        te_dynamo.export(*given, kernels="triton", path=path)
    with pytest.raises(InputError, match=r"go into a package: give its path"):
        te_dynamo.export(*given, kernels="triton")
    for wrong, message in (
        ({"path": tmp_path}, r'path is of a package and ends in "\.pt2"'),
        ({"inductor": {"max_autotune": True}}, r"inductor= is of the package: give its path"),
    ):
        with pytest.raises(InputError, match=message):
            te_dynamo.export(*given, **wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidOptionError, match="unknown option 'max_autotone'"):
        te_dynamo.export(*given, path=path, inductor={"max_autotone": True})
    with pytest.raises(InputError, match=r"kernels is 'torch' or 'triton', got 'gluon'"):
        te_dynamo.export(*given, kernels="gluon", path=path)  # type: ignore[arg-type]


def test_a_dtensor_does_not_leave() -> None:
    from torch.distributed.tensor import DTensor, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = Block().eval()
        weight = DTensor.from_local(model.up.weight.detach(), init_device_mesh("cpu", (2,)))
        model.up.weight = nn.Parameter(weight, requires_grad=False)
        with pytest.raises(UnsupportedError, match=r"'up\.weight' is a DTensor"):
            te_dynamo.export(model, (torch.randn(32, 128),))
    finally:
        torch.distributed.destroy_process_group()
