"""A second process that compiles the same model finds everything in torch's caches; what would change the code misses."""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._inductor.custom_graph_pass import CustomGraphPass

import te_dynamo
from te_dynamo._compat import torch_version
from te_dynamo.fusion_registry import fusion_key
from te_dynamo.lowering.inductor.ptxas import use_torchs_ptxas
from te_dynamo.recipe import Float8CurrentScaling
from te_dynamo.testing import capture_on_fake_cuda

PROGRAM = textwrap.dedent(
    """
    import json, sys, warnings
    warnings.simplefilter("ignore")
    import torch, te_dynamo
    from torch._dynamo.utils import counters

    class MLP(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)
        def forward(self, x):
            return self.down(self.up(x))

    work = {}

    def count(owner, name, what):
        original = getattr(owner, name)
        def counted(*args, **kwargs):
            work[what] += 1
            return original(*args, **kwargs)
        setattr(owner, name, counted)

    import te_dynamo.backend
    count(te_dynamo.backend, "lower", "lowered")
    from torch._higher_order_ops import triton_kernel_wrap
    from te_dynamo._compat import mutation_analysis_name
    count(triton_kernel_wrap, mutation_analysis_name(), "analysed")
    try:
        from triton import knobs
    except ImportError:
        pass
    else:
        def listen(*, src, cache_hit, **_):
            if not cache_hit:
                work["compiled"].append(src.name)
        knobs.compilation.listener = listen

    def run(setup, options):
        exec(setup)
        torch._dynamo.reset()
        counters.clear()
        work.update(lowered=0, analysed=0, compiled=[])
        torch.manual_seed(0)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        frozen = options.pop("frozen", False)
        mlp = MLP().to(device, torch.bfloat16)
        if frozen:
            te_dynamo.freeze(mlp, drop_weights=True).requires_grad_(False)
        model = torch.compile(mlp, backend="te", options=options)
        x = torch.randn(1024, 32, device=device, dtype=torch.bfloat16)
        losses = []
        for _ in range(2):
            loss = model(x).float().square().sum()
            losses.append(loss.item())
            if not frozen:
                loss.backward()
        fx, aot = counters["inductor"], counters["aot_autograd"]
        return {
            "losses": losses,
            **{f"fx_{what}": fx[f"fxgraph_cache_{what}"] for what in ("hit", "miss", "bypass")},
            **{f"aot_{what}": aot[f"autograd_cache_{what}"] for what in ("hit", "miss", "bypass")},
            **work,
        }

    print(json.dumps([run(*case) for case in json.loads(sys.argv[1])]))
    """
)

PLAIN, STEP, FROZEN = ("", {}), ("", {"weight_cache": "step"}), ("", {"frozen": True})
CHANGES = (
    ("import te_dynamo.recipe as r; options['recipe'] = r.Float8CurrentScaling(power_of_two_scales=True)", {}),
    ("", {"fusions": False}),
    ("import te_dynamo.cache_key as k; k.sources_digest = lambda: 'as if a kernel source had changed'", {}),
    ("te_dynamo.register_graph_fusion(lambda graph: 0, phase='forward')", {}),
)
"""(what is executed before, the options) of models that the code made before is wrong for. What is executed stays in its process."""


def compiled_in_new_process(folder: Path, *cases: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """What each of the cases found in the caches and did, one after another in one process."""
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # whatever compiles does so here, where it is counted
    }
    environment.pop("TRITON_PTXAS_PATH", None)  # this process may have set it, which a user's finds out by itself
    command = [sys.executable, "-c", PROGRAM, json.dumps(cases)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_second_process_hits_and_changes_miss(tmp_path: Path) -> None:
    kept = PLAIN, STEP, FROZEN
    for cold in (first := compiled_in_new_process(tmp_path, *kept)):
        assert (cold["aot_hit"], cold["aot_miss"], cold["aot_bypass"], cold["fx_bypass"]) == (0, 1, 0, 0)
    assert [cold["lowered"] for cold in first] == [2, 2, 1]

    second = compiled_in_new_process(tmp_path, *kept, *CHANGES)
    for cold, warm in zip(first, second, strict=False):
        assert (warm["aot_hit"], warm["aot_miss"], warm["fx_miss"]) == (1, 0, 0)
        assert warm["lowered"] == 0, "no pass of ours runs"
        assert warm["losses"] == cold["losses"] and len(set(cold["losses"])) == 1, "kept weights are supplied"
    for changed in second[len(kept) :]:
        assert (changed["aot_hit"], changed["aot_miss"]) == (0, 1)


CUMSUM, CUMPROD, LOGCUMSUMEXP = (
    getattr(torch.ops.aten, name).default for name in ("cumsum", "cumprod", "logcumsumexp")
)
"""Inductor calls torch's on the CPU: no C++ is compiled, which takes 10 s the first time."""


def cumsum(x: torch.Tensor) -> torch.Tensor:
    return x.cumsum(0)


class Replace(CustomGraphPass):
    """A user's pass: cumsum becomes `op`."""

    def __init__(self, op: Any, key: Any) -> None:
        self.op, self.key = op, key

    def __call__(self, graph: torch.fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=CUMSUM):
            node.target = self.op

    def uuid(self) -> Any:
        return self.key


def replaced(op: Any) -> Callable[[torch.fx.Graph], None]:
    def replace(graph: torch.fx.Graph) -> None:
        Replace(op, None)(graph)

    return replace


HOOKS = ["joint_custom_pre_pass", "post_grad_custom_pre_pass", "post_grad_custom_post_pass"]


def with_passes(hook: str, passes: Any, x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.reset()
    return torch.compile(cumsum, backend="te", options={hook: passes})(x)


@pytest.mark.parametrize("make", [lambda op: Replace(op, None), replaced], ids=["uuid() is None", "a plain function"])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_users_pass_that_cannot_tell_its_changes_is_never_answered_from_a_cache(
    hook: str, make: Callable[[Any], Any]
) -> None:
    x = torch.randn(8)
    for op in (CUMPROD, LOGCUMSUMEXP):
        torch.testing.assert_close(with_passes(hook, make(op), x), op(x, 0))


def test_a_users_pass_that_tells_them_is_cached() -> None:
    x = torch.randn(8)
    results = [
        with_passes(HOOKS[1], Replace(op, key), x)
        for op, key in ((CUMPROD, "one"), (LOGCUMSUMEXP, "one"), (LOGCUMSUMEXP, "two"))
    ]
    for result, op in zip(results, (CUMPROD, CUMPROD, LOGCUMSUMEXP), strict=True):
        torch.testing.assert_close(result, op(x, 0))


@pytest.mark.skipif(torch_version() < (2, 13), reason="one pass a hook until torch 2.12")
def test_users_passes_in_a_list_all_run_before_ours() -> None:
    x = torch.randn(8)
    one, other = (Replace(op, op.name()) for op in (CUMPROD, LOGCUMSUMEXP))
    torch.testing.assert_close(with_passes(HOOKS[1], [one, other], x), x.cumprod(0))
    torch.testing.assert_close(with_passes(HOOKS[1], [replaced(LOGCUMSUMEXP), one], x), x.logcumsumexp(0))


@pytest.mark.slow
@pytest.mark.skipif(torch_version() < (2, 13), reason="no such passes in torch 2.11")
@pytest.mark.parametrize("hook", HOOKS[1:])
def test_a_users_pass_is_told_of_inference_if_it_asks(hook: str) -> None:
    from torch._inductor.custom_graph_pass import CustomInferenceAwareGraphPass

    told = []

    class Ask(CustomInferenceAwareGraphPass):
        def __call__(self, graph: torch.fx.Graph, is_inference: bool) -> None:
            told.append(is_inference)

        def uuid(self) -> None:
            return None

    with_passes(hook, Ask(), torch.randn(8))
    with_passes(hook, Ask(), torch.randn(8, requires_grad=True)).sum().backward()
    assert told == [True, False, False]


class Stateful:
    """A fusion of the user's, which is an object."""

    def __init__(self, op: Any) -> None:
        self.op = op

    def __call__(self, graph: torch.fx.Graph) -> int:
        found = graph.find_nodes(op="call_function", target=CUMSUM)
        Replace(self.op, None)(graph)
        return len(found)


def closing_over(op: Any) -> Callable[[torch.fx.Graph], int]:
    holder = Stateful(op)

    def fuse(graph: torch.fx.Graph) -> int:
        return holder(graph)

    return fuse


@pytest.mark.parametrize("make", [Stateful, closing_over])
def test_a_registered_fusion_with_a_state_is_never_answered_from_a_cache(make: Callable[[Any], Any]) -> None:
    x = torch.randn(8)
    for op in (CUMPROD, LOGCUMSUMEXP):
        torch._dynamo.reset()
        with te_dynamo.register_graph_fusion(make(op), phase="forward"):
            torch.testing.assert_close(torch.compile(cumsum, backend="te")(x), op(x, 0))


def test_the_key_of_a_fusion_holds_what_it_closes_over() -> None:
    def make(value: Any) -> Callable[[torch.fx.Graph], int]:
        def fuse(graph: torch.fx.Graph) -> int:
            return int(value is None)

        return fuse

    def key(value: Any) -> str:
        with te_dynamo.register_graph_fusion(make(value), phase="forward"):
            return fusion_key()

    for value in (1, "one", torch.float16, CUMPROD, (1, [2.0, None]), Float8CurrentScaling(), make(3)):
        assert key(value) == key(value)
    assert len({key(value) for value in (1, 2, "1", 1.0, [1], (1,), make(1), make(2))}) == 8
    assert key(Stateful(CUMPROD)) != key(Stateful(CUMPROD))


@pytest.mark.gpu
def test_second_process_hits_on_a_gpu(tmp_path: Path) -> None:
    """And compiles nothing: every kernel comes from Triton's cache, and none is asked what it writes."""
    (cold,) = compiled_in_new_process(tmp_path, PLAIN)
    assert cold["aot_miss"] == 1 and cold["lowered"] == 2 and cold["compiled"]
    (warm,) = compiled_in_new_process(tmp_path, PLAIN)
    assert (warm["aot_hit"], warm["aot_miss"], warm["fx_miss"]) == (1, 0, 0)
    assert (warm["lowered"], warm["analysed"], warm["compiled"]) == (0, 0, [])


def test_kernels_are_stored_under_the_ptxas_that_assembles_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch chooses one after Triton was asked for the version of another: a second process would compile all kernels again."""
    compiler = pytest.importorskip("triton.backends.nvidia.compiler")
    from torch._inductor.runtime import compile_tasks

    torchs = tmp_path / "ptxas"
    torchs.write_text("#!/bin/sh\necho Cuda compilation tools, release 99.1, V99.1.0\n")
    torchs.chmod(0o755)
    monkeypatch.setattr(
        compile_tasks, "_set_triton_ptxas_path", lambda: monkeypatch.setenv("TRITON_PTXAS_PATH", str(torchs))
    )
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    old = 80  # Triton 3.9 has another assembler, which torch does not choose, for newer GPUs
    assert "99.1" not in compiler.get_ptxas_version(old)
    use_torchs_ptxas.__wrapped__()
    assert "99.1" in compiler.get_ptxas_version(old)
    compiler.get_ptxas_version.cache_clear()


def test_ptxas_is_chosen_before_code_is_generated() -> None:
    chosen: list[bool] = []
    with mock.patch("te_dynamo.lowering.inductor.install.use_torchs_ptxas", lambda: chosen.append(True)):
        capture_on_fake_cuda(
            lambda: torch.nn.Linear(32, 32).bfloat16(),
            lambda device: (torch.empty(16, 32, dtype=torch.bfloat16, device=device),),
            backward=False,
        )
    assert chosen


def test_key_covers_every_source_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest changes with the bytes of a kernel file, and is computed once a process."""
    from te_dynamo import cache_key

    read: list[str] = []
    original = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path.name) or original(path))
    cache_key.sources_digest.cache_clear()
    before = cache_key.sources_digest()
    count = len(read)
    assert {"gemm.py", "quantize.py", "lower.py", "fuser.py", "linear.py"} <= set(read)
    assert cache_key.sources_digest() == before and len(read) == count

    monkeypatch.setattr(Path, "read_bytes", lambda path: original(path) + (b"#" if path.name == "quantize.py" else b""))
    cache_key.sources_digest.cache_clear()
    assert cache_key.sources_digest() != before
    cache_key.sources_digest.cache_clear()
