"""mode="max-autotune": the products of a graph are timed, the fastest runs, and later processes know it.

No GPU: fake CUDA tensors, which the package takes for an H200 that is there, and times that the test makes up.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
from helpers.graphs.lowered_graphs import BLOCKS, BLOCKS_2D, ROWS, bf16, f8, f32, graph_of, te
from helpers.kernels.gemms import arguments
from helpers.models.snapshot_models import launches

from te_dynamo import remembered as memory
from te_dynamo.kernels.gemm.choose import TUNED, Choice, Product, choose, use_tuned
from te_dynamo.kernels.gemm.tiles import SPECIALIZED_SMALL
from te_dynamo.kernels.layouts.block import scale_shape
from te_dynamo.kernels.runtime.margin import sm_margin
from te_dynamo.kernels.runtime.target import TARGETS
from te_dynamo.lowering import tune as tuning
from te_dynamo.lowering.lower import lower
from te_dynamo.lowering.tune import PRODUCTS, slower_than_cublaslt, tune, tuned_key, use_remembered
from te_dynamo.options import Options
from te_dynamo.quantized.quantizers import Float8GroupedQuantizer
from te_dynamo.remembered import remembered, remembered_file, why_unused
from te_dynamo.testing import graph_text

UP = Product(512, 4096, 1024).plain
H200 = TARGETS["h200"]


@pytest.fixture(autouse=True)
def device(gpu: None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An H200 that is there as far as tuning asks, and an empty cache folder."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for module in (tuning, memory):
        monkeypatch.setattr(module, "is_acting", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    later_process()
    yield
    later_process()


def later_process() -> None:
    """Forgets what this process knows of earlier ones."""
    TUNED.clear()
    choose.cache_clear()
    memory._read.cache_clear()
    tuning._use_remembered.cache_clear()


class Timer:
    """Says that one kernel is faster than all others, by so many percent."""

    def __init__(self, kernel: str, by: float = 10) -> None:
        self.kernel, self.by, self.asked = kernel, by, list[Product]()

    def __call__(self, product: Product, choices: list[Choice], device: torch.device) -> dict[Choice, float]:
        self.asked.append(product)
        return {choice: 100.0 + self.by * (choice.kernel != self.kernel) for choice in choices}


def gemm_graph(n: int = 4096, bias: bool = False) -> torch.fx.Graph:
    shift = bf16(n) if bias else None
    return graph_of(
        te.gemm.default, *arguments(f8(512, 1024), f32(1), f8(n, 1024), f32(1), shift, torch.bfloat16, False)
    )


def test_a_product_is_timed_once_and_later_processes_know_it() -> None:
    timer, graph = Timer("cublaslt"), gemm_graph()
    before = graph_text(graph)
    tune(graph, timer)
    assert graph_text(graph) == before and timer.asked == [UP]
    tune(graph, timer)
    assert len(timer.asked) == 1
    assert list(remembered(PRODUCTS).values()) == ["cublaslt"]

    later_process()
    assert choose(UP, H200).kernel == "usual" and tuned_key() == "{}"
    use_remembered()
    assert choose(UP, H200).kernel == "cublaslt" and "cublaslt" in tuned_key()
    tune(graph, timer)
    assert len(timer.asked) == 1


def block_graph(m: int, n: int, k: int) -> torch.fx.Graph:
    scales = (f32(*scale_shape(rows, k, two_d)) for rows, two_d in ((m, False), (n, True)))
    return graph_of(
        te.gemm.default, [f8(m, k), next(scales)], BLOCKS, [f8(n, k), next(scales)], BLOCKS_2D, torch.bfloat16, False
    )


def test_products_that_cublaslt_was_measured_to_have_sooner() -> None:
    assert slower_than_cublaslt(block_graph(512, 4096, 4096)) == ["512 x 4096 x 4096"]
    assert slower_than_cublaslt(block_graph(8192, 8192, 1024)) == [], "larger"
    assert slower_than_cublaslt(block_graph(64, 16384, 16384)) == [], "a few rows"
    assert slower_than_cublaslt(block_graph(512, 4096, 4096 + 128)) == [], "torch refuses the scales"
    assert slower_than_cublaslt(gemm_graph()) == [], "a scale a tensor"
    plain = Product(512, 4096, 4096, scaling="1x128").plain
    use_tuned({(plain, H200): Choice("specialized", SPECIALIZED_SMALL[2])})
    assert slower_than_cublaslt(block_graph(512, 4096, 4096)) == [], "timed here"


def test_what_is_said_of_cublaslt_is_what_was_measured(import_benchmark: Callable[[str], ModuleType]) -> None:
    report = import_benchmark("report")
    rows = report.read(report.RESULTS / "gemm-nvidia-h200.json").rows
    shares = []
    for row in rows:
        m, n, k = map(int, row["shape"].split(" x "))
        if (
            row["scales"].startswith("block")
            and row["cublas_tflops"]
            and tuning._is_slower(Product(m, n, k, scaling="1x128").plain, H200)
        ):
            shares.append(row["te_tflops"] / row["cublas_tflops"])
    assert len(shares) == 2 * 9 and (round(min(shares), 2), round(max(shares), 2)) == (0.59, 0.97)


def test_a_hair_faster_alone_is_no_reason() -> None:
    tune(gemm_graph(), Timer("cublaslt", by=4))
    assert TUNED[UP, H200] == choose(UP, H200) and choose(UP, H200).kernel == "usual"


def test_choices_of_another_driver_are_not_used() -> None:
    tune(gemm_graph(), Timer("cublaslt"))
    held = json.loads(remembered_file(PRODUCTS).read_text())
    held["made_with"]["driver"] = "1.0"
    remembered_file(PRODUCTS).write_text(json.dumps(held))
    later_process()
    use_remembered()
    assert choose(UP, H200).kernel == "usual" and not TUNED
    assert why_unused(PRODUCTS).startswith("it was made with driver 1.0, not ")
    timer = Timer("cublaslt")
    tune(gemm_graph(), timer)
    assert timer.asked == [UP] and why_unused(PRODUCTS) == ""


def test_a_kernel_that_leaves_a_sum_to_another_is_charged_for_it() -> None:
    """cuBLASLt's product, faster by 10 us, and a pass over three tensors of 32 MiB."""
    plain = arguments(f8(8192, 1024), f32(1), f8(2048, 1024), f32(1), None, torch.bfloat16, False)
    tune(graph_of(te.gemm.default, *plain, bf16(8192, 2048)), Timer("cublaslt"))
    assert choose(Product(8192, 2048, 1024).plain, H200).kernel in ("usual", "specialized")

    later_process()
    remembered_file(PRODUCTS).unlink()
    tune(graph_of(te.gemm.default, *plain), Timer("cublaslt"))
    assert choose(Product(8192, 2048, 1024).plain, H200).kernel == "cublaslt"


def test_every_product_of_a_graph_is_timed() -> None:
    """Those of every operation, in the graph that is about to be lowered."""
    timer = Timer("usual")
    a, b = f8(512, 256), f8(256, 256)
    for target, *given in (
        (te.gemm, *arguments(a, f32(1), b, f32(1), None, torch.bfloat16, False)),
        (te.gemm, *arguments(a, f32(1), b, f32(1), None, torch.bfloat16, True, bf16(512, 256))),
        (te.gemm_amax, *arguments(a, f32(1), f8(512, 256), f32(1), None, torch.bfloat16, True)),
        (te.gemm_gated, [a, f32(1)], ROWS, [b, f32(2)], ROWS, False, 0, "silu"),
        (te.gemm, [a, f32(2, 512)], BLOCKS, [b, f32(2, 4)], BLOCKS_2D, torch.bfloat16, False),
        (te.grouped_gemm, [a, f32(1)], ROWS, [f8(3, 128, 256), f32(3)], Float8GroupedQuantizer(columnwise=False), torch.empty(3, dtype=torch.int32, device="cuda"), torch.bfloat16, False),
    ):  # fmt: skip
        tune(graph_of(target.default, *given), timer)
    assert [(p.n, p.fast_accum, p.scaling, p.stacking.along, p.m_groups) for p in timer.asked] == [
        (256, False, "tensor", "", 0),
        (256, True, "tensor", "", 0),
        (512, True, "tensor", "", 0),
        (256, False, "tensor", "N", 0),
        (256, False, "1x128", "", 0),
        (128, False, "tensor", "", 3),
    ]


def test_cublaslt_is_called_in_the_lowered_graph() -> None:
    use_tuned({(UP, H200): Choice("cublaslt", choose(UP, H200).tile)})
    graph = gemm_graph()
    assert lower(graph) == [("te.gemm", "cuBLASLt")]
    text = graph_text(graph)
    assert "bf16[512, 4096] = te_kernels.scaled_mm(x0, x2, x1, x3, bf16, " in text and not launches(text)
    graph = gemm_graph(bias=True)
    assert lower(graph) == [("te.gemm", "cuBLASLt")]
    text = graph_text(graph)
    assert "f32[512, 4096] = te_kernels.scaled_mm" in text, "the bias is added in fp32"
    assert text.splitlines()[-2].startswith("to") and "bf16[512, 4096]" in text.splitlines()[-2]


def test_an_addend_is_a_pass_behind_cublaslt() -> None:
    use_tuned({(UP, H200): Choice("cublaslt", choose(UP, H200).tile)})
    plain = arguments(f8(512, 1024), f32(1), f8(4096, 1024), f32(1), None, torch.bfloat16, False)
    graph = graph_of(te.gemm.default, *plain, bf16(512, 4096))
    assert lower(graph) == [("te.gemm", "cuBLASLt")]
    assert "aten.add(scaled_mm, x4)" in graph_text(graph)


def test_a_margin_leaves_cublaslt_out_and_is_remembered_apart() -> None:
    timer = Timer("cublaslt")
    with sm_margin(12):
        tune(gemm_graph(), timer)
    assert set(remembered(PRODUCTS).values()) != {"cublaslt"}
    assert [target.multiprocessors for _, target in TUNED] == [120]
    tune(gemm_graph(), timer)
    assert len(timer.asked) == 2
    later_process()
    use_remembered()
    assert sorted(target.multiprocessors for _, target in TUNED) == [120, 132]


@pytest.mark.parametrize("failure", ["memory", "kernels"])
def test_what_cannot_be_timed_is_said_and_runs_as_ever(failure: str) -> None:
    def fails(*_: object) -> dict[Choice, float]:
        if failure == "memory":
            raise torch.OutOfMemoryError
        return {}

    before = choose(UP, H200)
    with pytest.warns(UserWarning, match=r"Product\(m=512, n=4096.* could not be timed"):
        tune(gemm_graph(), fails)
    assert not TUNED and choose(UP, H200) == before


def test_what_takes_less_than_its_call_is_launched() -> None:
    """Of a product of 10 us a launch runs, though a call would be faster by itself."""
    tune(gemm_graph(), lambda product, choices, device: {c: 10.0 if c.kernel == "usual" else 9.0 for c in choices})
    assert choose(UP, H200).kernel == "usual"


def test_a_folder_that_cannot_be_written_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> pathlib.Path:
        raise PermissionError("read-only file system")

    monkeypatch.setattr(tuning, "remember", refused)
    with pytest.warns(UserWarning, match="not kept for later processes: read-only file system"):
        tune(gemm_graph(), Timer("cublaslt"))
    assert choose(UP, H200).kernel == "cublaslt"


def test_without_a_device_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = Timer("cublaslt")
    monkeypatch.setattr(tuning, "is_acting", lambda: True)
    tune(gemm_graph(), timer)
    monkeypatch.setattr(tuning, "is_acting", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    tune(gemm_graph(), timer)
    assert not timer.asked


def test_the_mode_or_inductors_own_setting_asks_for_it() -> None:
    assert not Options.parse().max_autotune
    assert Options.parse(mode="max-autotune").max_autotune
    assert Options.parse(mode="max-autotune-no-cudagraphs").max_autotune
    with torch._inductor.config.patch(max_autotune=True):
        assert Options.parse().max_autotune and not Options.parse({"max_autotune": False}).max_autotune
