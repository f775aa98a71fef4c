"""benchmarks/compile_time.py and step_profile.py: what their tables count, and what they say of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch


@pytest.fixture
def step_profile(import_benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return import_benchmark("step_profile")


@pytest.fixture
def compile_time(import_benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return import_benchmark("compile_time")


def test_a_launch_moves_each_tensor_once_and_what_it_updates_twice(step_profile: ModuleType) -> None:
    x, y = torch.zeros(8, 4, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.float32)
    assert step_profile.launch_bytes([("in_ptr0", x), ("out_ptr0", y)]) == 64 + 32
    assert step_profile.launch_bytes([("in_out_ptr0", x), ("in_ptr0", y)]) == 128 + 32
    assert (
        step_profile.launch_bytes([("x", x), ("bias", x), ("y", y)]) == 64 + 32
    )  # x stands in for a bias there is not
    assert step_profile.launch_bytes([("a", x[:4]), ("b", x)]) == 64  # the larger of two views that begin at one place


def test_arguments_are_named_by_the_pointers_of_the_signature(step_profile: ModuleType) -> None:
    x, y = torch.zeros(2), torch.zeros(3)
    signature = {"in_ptr0": "*bf16", "ks0": "i64", "out_ptr0": "*fp32", "xnumel": "i32", "XBLOCK": "constexpr"}
    named = step_profile.named_tensors(signature, (x, 7, y, 32))
    assert [(name, tensor is expected) for (name, tensor), expected in zip(named, (x, y), strict=True)] == [
        ("in_ptr0", True),
        ("out_ptr0", True),
    ]


def test_every_launch_of_inductors_code_is_counted(step_profile: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton kernels where they are launched, products where they are called, and nothing after the context."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch._inductor.select_algorithm import extern_kernels

    monkeypatch.setattr(CachingAutotuner, "run", lambda self, *args, **kwargs: "ran")
    made = torch.zeros(3)
    monkeypatch.setattr(
        extern_kernels, "te_test_mm", lambda a, b, out=None: made if out is None else None, raising=False
    )
    kernel: Any = SimpleNamespace(
        fn=SimpleNamespace(__name__="quantize_cast_kernel"), triton_meta={"signature": {"x": "*bf16", "M": "i32"}}
    )
    x = torch.zeros(16, dtype=torch.bfloat16)
    with step_profile.count_traffic() as traffic:
        assert [CachingAutotuner.run(kernel, x, 4, stream=0) for _ in range(2)] == ["ran"] * 2
        assert extern_kernels.te_test_mm(x, torch.zeros(4), out=torch.zeros(2)) is None
        assert extern_kernels.te_test_mm(x, torch.zeros(4)) is made, "one that allocates what it returns"
    CachingAutotuner.run(kernel, x, 4, stream=0)
    extern_kernels.te_test_mm(x, x, out=x)
    assert traffic.kernels == {"quantize_cast_kernel": (2, 64), "extern_kernels.te_test_mm": (2, 56 + 60)}
    assert traffic.total() == 180 and traffic.total(products_only=True) == 116


def test_a_step_is_a_row_and_its_kernels(step_profile: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes are told of the kernels that were counted, and of a step without its products."""
    models = pytest.importorskip("models")
    Kernel = step_profile.Kernel
    found = [Kernel("tiny", "te", "gemm_kernel", 3, 1.5), Kernel("tiny", "te", "uncounted", 1, 0.25)]

    @contextlib.contextmanager
    def counted() -> Iterator[Any]:
        yield step_profile.Traffic({"gemm_kernel": (3, 2_000_000_000), "cast": (1, 1_000_000_000)}, {"gemm_kernel"})

    monkeypatch.setitem(step_profile.PROVIDERS, "te", lambda module: module)
    monkeypatch.setattr(step_profile, "profile", lambda block, provider, step: found)
    monkeypatch.setattr(step_profile, "count_traffic", counted)
    monkeypatch.setattr(step_profile, "time_step", lambda step, device: [2.0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    block = models.Block("tiny", lambda: models.GatedMLP(32, 64), (1, 16, 32))
    row, kernels = step_profile.measure("tiny", "te", block.make().bfloat16(), step_profile.Inputs.make(block, "cpu"))
    assert row == step_profile.Row("tiny", "te", 4, 4, 1.75, 2.0, 3.0, 1.0)
    assert [kernel.mb for kernel in kernels] == [2000.0, None]


def test_a_span_around_kernels_is_no_kernel(step_profile: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the annotation of a linear, which the profiler has on the GPU's line too."""
    from torch.autograd import DeviceType

    def event(name: str, device: DeviceType = DeviceType.CUDA, span: bool = False) -> SimpleNamespace:
        return SimpleNamespace(name=name, device_type=device, is_user_annotation=span, device_time_total=2000.0)

    others = event("fc1 te_gemm", span=True), event("Memset (Device)"), event("mm", DeviceType.CPU)
    events = [event("gemm"), event("gemm"), *others]
    profiler = contextlib.nullcontext(SimpleNamespace(events=lambda: events))
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: profiler)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert step_profile.profile("tiny", "te", lambda: None) == [step_profile.Kernel("tiny", "te", "gemm", 2, 4.0)]


def test_the_time_of_each_stage_is_found(compile_time: ModuleType) -> None:
    """In a whole compilation on the CPU, and the backend is as it was afterwards."""
    from te_dynamo import backend

    before = backend.match, backend._Compilation.lower
    model = torch.nn.Linear(64, 64).bfloat16()
    with compile_time.timed_stages() as stages:
        x = torch.randn(32, 64, dtype=torch.bfloat16)
        torch.compile(model, backend="te", options={"codegen": "eager"})(x).sum().backward()
    assert set(stages) == set(compile_time.STAGES)
    assert stages["match"] > 0 and stages["joint"] > 0 and stages["fuse"] > 0 and stages["lower"] == 0
    assert (backend.match, backend._Compilation.lower) == before


def test_backends_take_turns_and_the_median_counts(compile_time: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    seconds = iter([5.0, 3.0, 2.0, 1.0, 9.0, 4.0])

    def measure(kind: str, backend: str, blocks: int, args: Any) -> Any:
        taken.append(backend)
        stages = dict.fromkeys(compile_time.STAGES, 0.5) if backend == "te" else {}
        return compile_time.Row(kind, backend, blocks, next(seconds), stages)

    monkeypatch.setattr(compile_time, "measure_apart", measure)
    found = compile_time.compare("whole", 8, SimpleNamespace(repeats=3))
    assert taken == ["te", "inductor", "inductor", "te", "te", "inductor"]
    assert (found.te_s, found.inductor_s, found.te_to_inductor) == (5.0, 3.0, 5 / 3)
    assert found.te_repeats_s == [5.0, 1.0, 9.0] and found.inductor_repeats_s == [3.0, 2.0, 4.0]
    assert found.lower_s == 0.5 and found.stages_ms_per_block == 250.0


def test_the_warm_up_leaves_the_models_shapes_static(compile_time: ModuleType) -> None:
    """A model whose first frame is torch's own, as that of every nn.Sequential, was compiled for any number of tokens."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("eager")
    compile_time.warm_up(counter, "cpu")
    model = torch.nn.Sequential(torch.nn.Linear(64, 64)).bfloat16()
    torch.compile(model, backend=counter)(torch.randn(1, 32, 64, dtype=torch.bfloat16))
    inputs = [node for node in counter.graphs[-1].graph.nodes if node.op == "placeholder"]
    assert not any(isinstance(node.meta["example_value"], torch.SymInt) for node in inputs)


@pytest.mark.cost_rule
@pytest.mark.slow
def test_what_is_compiled_is_in_fp8(compile_time: ModuleType) -> None:
    """By itself the backend leaves linears as narrow as these in bf16, and there would be nothing to measure."""
    from te_dynamo.testing import capture_on_fake_cuda

    def inputs(device: str) -> tuple[torch.Tensor, ...]:
        return (torch.empty(1, 256, 128, dtype=torch.bfloat16, device=device, requires_grad=True),)

    for options, matched in ((None, False), (compile_time.options_of("te"), True)):
        torch._dynamo.reset()
        graphs = capture_on_fake_cuda(lambda: compile_time.model_of(1, 128), inputs, options=options)
        linears = [match for report in graphs.reports for match in report.matches if match.kind == "linear"]
        assert len(linears) == 7 and {match.matched for match in linears} == {matched}
    assert compile_time.options_of("inductor") is None
