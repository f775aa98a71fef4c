"""kernels/runtime/prepared.py and scratch.py on a GPU: launches that Triton does not see give its bits, on any stream and in graphs."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.kernels.gemms import gemm_with_tile
from torch import Tensor
from triton.runtime.jit import JITFunction

from te_dynamo.kernels.gemm.specialized.product import gemm_specialized_out
from te_dynamo.kernels.gemm.tiles import TILES
from te_dynamo.kernels.layouts.tensor import TensorForm
from te_dynamo.kernels.quantize.current import quantize
from te_dynamo.kernels.runtime import scratch
from te_dynamo.kernels.runtime.target import target_of

pytestmark = pytest.mark.gpu

M, N, K = 1024, 2048, 1024
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def operands(seed: int = 0) -> list[Tensor]:
    """a [M, K], its scale, b [N, K], its scale."""
    generator = torch.Generator("cuda").manual_seed(seed)
    a, b = (torch.randn(rows, K, device="cuda", generator=generator).to(E4M3) for rows in (M, N))
    return [a, torch.full((1,), 0.5, device="cuda"), b, torch.full((1,), 0.25, device="cuda")]


def specialized(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype = BF16) -> Tensor:
    out = torch.empty(M, N, dtype=dtype, device="cuda")
    gemm_specialized_out(a, a_scale, b, b_scale, out=out)
    return out


def usual(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    tile = next(tile for tile in TILES if not tile.fast and tile.split_k == 1)
    return gemm_with_tile(tile, a, a_scale, b, b_scale, None, BF16)


def cast(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    return torch.cat([x.reshape(-1) for x in quantize(a.to(BF16), TensorForm(E4M3, True, True, False, 0.0))[:2]]).view(
        torch.uint8
    )


@pytest.fixture(params=[specialized, usual, cast], ids=lambda run: run.__name__)
def run(request: pytest.FixtureRequest) -> Callable[..., Tensor]:
    """By the Gluon kernel and by the usual one, which need scratch memory, and by kernels that need none."""
    if request.param is specialized and not target_of(torch.device("cuda")).has_wgmma:
        pytest.skip("the specialized kernels are Hopper's")
    return request.param  # type: ignore[no-any-return]


def by_triton(run: Callable[..., Tensor], given: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """What Triton's own launches give: hooks that want to see them have them all."""
    import triton

    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.runtime.launch_enter_hook, "calls", [lambda _: None])
        return run(*given)


def test_a_later_launch_gives_tritons_bits(run: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    run(*operands())

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("Triton binds again")

    for seed in range(3):
        given = operands(seed)
        expected = by_triton(run, given, monkeypatch)
        with monkeypatch.context() as patch:
            patch.setattr(JITFunction, "run", never)
            assert torch.equal(run(*given), expected)


def test_streams_do_not_meet_in_scratch(run: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    given = [operands(seed) for seed in range(4)]
    expected = [by_triton(run, each, monkeypatch) for each in given]
    streams = [torch.cuda.Stream() for _ in given]
    torch.cuda.synchronize()
    results: list[list[Tensor]] = [[] for _ in given]
    for _ in range(50):
        for stream, each, found in zip(streams, given, results, strict=True):
            with torch.cuda.stream(stream):
                found.append(run(*each))
    torch.cuda.synchronize()
    for wanted, found in zip(expected, results, strict=True):
        assert all(torch.equal(one, wanted) for one in found)


def test_a_captured_graph_has_scratch_of_its_own(run: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Replayed while the same kernels run on other streams, after everything else that the capture allocated is overwritten."""
    static, other = operands(1), operands(2)
    expected, expected_other = (by_triton(run, each, monkeypatch) for each in (static, other))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(*static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = run(*static)
    found = []
    for kept in scratch._kept.values():
        kept.fill_(-1)
    for _ in range(50):
        rubbish = [torch.full((2**16,), 255, dtype=torch.uint8, device="cuda") for _ in range(8)]
        with torch.cuda.stream(stream):
            captured.zero_()
            graph.replay()
        found.append(run(*other))
        del rubbish
    torch.cuda.synchronize()
    assert torch.equal(captured, expected)
    assert all(torch.equal(one, expected_other) for one in found)


def test_a_first_launch_may_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    given = operands(3)
    expected = by_triton(usual, given, monkeypatch)
    monkeypatch.setattr("te_dynamo.kernels.runtime.prepared._spellings", {})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first, second = usual(*given), usual(*given)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(first, expected) and torch.equal(second, expected)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_model_compiled_with_and_without_graphs(mode: str) -> None:
    """CUDA graph trees check, after the run before a capture, that nothing but results stays in the graph's memory."""
    import te_dynamo  # noqa: F401

    torch.manual_seed(0)
    torch._dynamo.reset()
    scratch._kept.clear()
    layers = (torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024))
    model = torch.nn.Sequential(*layers).to("cuda", BF16)
    x = torch.randn(8192, 1024, device="cuda", dtype=BF16)
    options = {"rules": [("", "float8_current_scaling")], **torch._inductor.list_mode_options(mode)}
    compiled = torch.compile(model, backend="te", options=options)

    def gradients() -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        torch.compiler.cudagraph_mark_step_begin()
        compiled(x).float().square().mean().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    first = gradients()
    for _ in range(5):
        assert all(torch.equal(one, other) for one, other in zip(first, gradients(), strict=True))


def test_other_dtypes_and_addresses_are_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    given = operands()
    values = torch.randn(64 * 1024 + 8, device="cuda", dtype=BF16)

    def both(*_: Tensor) -> Tensor:
        return torch.cat([specialized(*given, dtype=dtype).float() for dtype in (BF16, torch.float16, BF16)])

    def casts(*_: Tensor) -> Tensor:
        rows = [values[offset : offset + 64 * 1024].view(64, 1024) for offset in (0, 1, 0, 8)]
        return torch.cat(
            [quantize(each, TensorForm(E4M3, True, False, False, 0.0))[0].view(torch.uint8) for each in rows]
        )

    for run in (both, casts) if target_of(torch.device("cuda")).has_wgmma else (casts,):
        expected = by_triton(run, given, monkeypatch)
        for _ in range(3):
            assert torch.equal(run(), expected)


def test_a_tensor_of_the_cpu_is_refused_after_good_launches() -> None:
    given = operands()
    for _ in range(2):
        usual(*given)
    for place, tensor in enumerate(given):
        with pytest.raises(ValueError, match="cannot be accessed from Triton"):
            usual(*given[:place], tensor.cpu(), *given[place + 1 :])
    torch.cuda.synchronize()


PROGRAM = textwrap.dedent(
    """
    import os, sys
    import torch
    from te_dynamo.kernels.quantize.current import quantize
    from te_dynamo.kernels.layouts.tensor import TensorForm

    def cast():
        return quantize(x, TensorForm(torch.float8_e4m3fn, True, False, False, 0.0))

    x = torch.randn(128, 1024, device="cuda")
    cast(), cast(), torch.cuda.synchronize()
    child = os.fork()
    if not child:
        try:
            cast()
        except RuntimeError as error:
            os._exit(0 if "forked subprocess" in str(error) else 2)
        os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    cast(), torch.cuda.synchronize()
    sys.exit(code)
    """
)


def test_a_fork_after_launches_is_told() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
