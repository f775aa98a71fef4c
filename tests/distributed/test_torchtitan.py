"""te_dynamo.distributed.torchtitan_backend, with classes of torchtitan's form and blocks compiled as it compiles them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from helpers.models.small_models import Llama

import te_dynamo
from te_dynamo.distributed import torchtitan_backend, torchtitan_options
from te_dynamo.errors import InvalidOptionError
from te_dynamo.recipe import Float8RowwiseScaling


class Float8LinearConverter:
    @dataclasses.dataclass(kw_only=True)
    class Config:
        recipe_name: str = "rowwise"
        filter_fqns: list[str] = dataclasses.field(default_factory=list)
        model_compile_enabled: bool = True


class MXFP8LinearConverter:
    @dataclasses.dataclass(kw_only=True)
    class Config:
        fqns: list[str] = dataclasses.field(default_factory=list)


class NVFP4LinearConverter(MXFP8LinearConverter):
    @dataclasses.dataclass(kw_only=True)
    class Config(MXFP8LinearConverter.Config):
        pass


class LoRAConverter:
    @dataclasses.dataclass
    class Config:
        rank: int = 8


FLOAT8, MXFP8, NVFP4 = Float8LinearConverter.Config, MXFP8LinearConverter.Config, NVFP4LinearConverter.Config


@pytest.mark.parametrize(
    ("converters", "expected"),
    [
        ([], {}),
        ([FLOAT8()], {"recipe": "float8_current_scaling", "rules": []}),
        (
            [FLOAT8(filter_fqns=["auto_filter_small_kn", "attention.wk"])],
            {"recipe": "float8_current_scaling", "rules": [(r"attention\.wk", None)]},
        ),
        (
            [FLOAT8(recipe_name="rowwise_with_gw_hp")],
            {"recipe": Float8RowwiseScaling(wgrad="bf16"), "rules": []},
        ),
        ([MXFP8()], {"recipe": "mxfp8", "rules": []}),
        ([NVFP4(fqns=["w1", "w3"])], {"recipe": None, "rules": [("w1", "nvfp4"), ("w3", "nvfp4")]}),
        ([NVFP4(fqns=["w2"]), MXFP8()], {"recipe": "mxfp8", "rules": [("w2", "nvfp4")]}),
    ],
)
def test_options(converters, expected) -> None:
    assert torchtitan_options(converters) == expected


@pytest.mark.parametrize(
    ("converter", "message"),
    [
        (LoRAConverter.Config(), "LoRAConverter.Config"),
        (FLOAT8(filter_fqns=["layers.0"]), "paths in their block"),
    ],
)
def test_what_has_no_counterpart(converter, message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        torchtitan_options([converter])


def test_a_wrong_option_is_named_at_once() -> None:
    with pytest.raises(InvalidOptionError, match="codegen"):
        torchtitan_backend([FLOAT8()], codegen="inductr")


def test_blocks_run_in_the_recipe() -> None:
    model = Llama()
    backend = torchtitan_backend([FLOAT8(filter_fqns=["parts.0.k"])], codegen="eager")
    assert backend == torchtitan_backend([FLOAT8(filter_fqns=["parts.0.k"])], codegen="eager") and isinstance(
        backend, str
    )
    assert backend != torchtitan_backend([FLOAT8()], codegen="eager")
    for block in model.layers:
        block.compile(backend=backend, fullgraph=True)
    with te_dynamo.capture() as graphs:
        model(torch.randint(64, (2, 16))).sum().backward()
    (report,) = graphs.reports
    left = [match.module for match in report.matches if match.kind == "linear" and not match.matched]
    assert left == ["parts.0.k"]
    assert {match.recipe for match in report.matches if match.kind == "linear"} == {"float8_current_scaling", ""}
