"""What a kernel writes is said where it is defined, truly, or analysed once for its constants."""

import functools
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.graphs import lowered_graphs
from helpers.models.snapshot_models import kernels_everywhere
from torch import nn
from torch._higher_order_ops import triton_kernel_wrap
from torch.fx.experimental.proxy_tensor import make_fx

from te_dynamo._compat import mutation_analysis_name
from te_dynamo.kernels.activation.gated_in_place import gated_backward_quantize_in_place
from te_dynamo.kernels.layouts.tensor import TensorForm
from te_dynamo.kernels.runtime._triton import INSTALLED
from te_dynamo.kernels.runtime.writes import updated, updates, writes, written
from te_dynamo.lowering.inductor import mutation
from te_dynamo.lowering.inductor.mutation import _description, analyse
from te_dynamo.lowering.lower import lower
from te_dynamo.testing.fake_cuda import capture_on_fake_cuda, fake_cuda

pytestmark = pytest.mark.skipif(not INSTALLED, reason="launches need Triton")


def _analyses(sizes: list[int]) -> int:
    """How many kernels torch compiles to see what they write, for a chain of linears between those sizes."""
    torch._dynamo.reset()
    layers = [nn.Linear(k, n, bias=False, device="meta") for k, n in itertools.pairwise(sizes)]
    compile_kernel = mock.Mock(wraps=triton_kernel_wrap.generate_ttir)
    with kernels_everywhere(), mock.patch.object(triton_kernel_wrap, "generate_ttir", compile_kernel):
        capture_on_fake_cuda(
            lambda: nn.Sequential(*layers).bfloat16(),
            lambda device: (torch.empty(512, sizes[0], dtype=torch.bfloat16, device=device),),
            options={"recipe": "float8_block_scaling"},
        )
    return compile_kernel.call_count


@pytest.mark.slow
def test_more_layers_need_no_more_analyses() -> None:
    _analyses([512, 768, 512])
    assert _analyses([512, 768, 512, 768, 512, 768]) == 0


def _launched() -> Iterator[tuple[Any, dict[str, Any]]]:
    """(kernel, its arguments) of every launch that an operation becomes, or may become in place, one of each set of constants."""
    table, seen = triton_kernel_wrap.kernel_side_table, set()
    graphs = [
        lowered_graphs.graph_of(target.default, *arguments()) for target, arguments, _ in lowered_graphs.CASES.values()
    ]
    for graph in graphs:
        lower(graph)
    dy, gate, up = (torch.empty(256, 512, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    for gate_first in (None, True):
        form = TensorForm(torch.float8_e5m2, rowwise=True, columnwise=False)
        in_place = functools.partial(gated_backward_quantize_in_place, kind="gelu", form=form, gate_first=gate_first)
        graphs.append(make_fx(in_place)(dy, gate, up).graph)
    for graph in graphs:
        for node in graph.find_nodes(op="call_function", target=triton_kernel_wrap.triton_kernel_wrapper_mutation):
            kernel = table.get_kernel(node.kwargs["kernel_idx"])
            values = torch.fx.map_arg(node.kwargs["kwargs"], lambda given: given.meta["val"])
            launched = {**values, **table.get_constant_args(node.kwargs["constant_args_idx"])}
            function = kernel.fn if hasattr(kernel, "configs") else kernel
            key = (function, _description(function, launched))
            if key not in seen:
                seen.add(key)
                yield kernel, launched


@pytest.mark.slow
def test_kernels_write_what_they_say() -> None:
    """By torch's analysis, of every operation's launches. An early kernel is analysed as one that is not: it waits in PTX."""
    torchs = getattr(triton_kernel_wrap, mutation_analysis_name())
    compared = set()
    with fake_cuda(), kernels_everywhere():
        for kernel, launched in _launched():
            function, chosen = (kernel.fn, kernel.configs[0].kwargs) if hasattr(kernel, "configs") else (kernel, {})
            said = written(function, {**launched, **chosen})
            if said is None:
                continue
            plain = {**launched, "EARLY": False} if "EARLY" in launched else launched
            found = torchs(kernel, plain, {})
            names = found if isinstance(found, list) else [dep.name for dep in found.read_writes.writes]
            names = [name for name in names if isinstance(launched.get(name), torch.Tensor)]
            assert sorted(said) == sorted(names), (function.fn.__name__, launched)
            if not isinstance(found, list):
                read = {dep.name for dep in found.read_writes.reads} & set(said)
                rest = {"c"} if function.fn.__name__ == "nvfp4_epilogue_kernel" else set()  # it writes a part of c
                if launched.get("PASS") == "mend":
                    rest = {"data", "transpose", "second_data", "second_transpose"} & set(launched)
                assert read | rest == set(updated(function, launched)), (function.fn.__name__, launched)
            compared.add(function.fn.__name__)
    assert len(compared) >= 30 and {"produce_write_kernel", "gated_backward_rows_kernel"} <= compared


def test_what_a_kernel_says() -> None:
    kernel = SimpleNamespace(arg_names=["x", "data", "scale", "y", "c"])
    writes("c", data="ROWWISE", y=lambda k: not k.QUANTIZE, scale=lambda k: k.ROWWISE or k.COLUMNWISE)(kernel)
    flags = {"ROWWISE": False, "COLUMNWISE": 1, "QUANTIZE": False}
    tensors = dict.fromkeys(kernel.arg_names)
    assert written(kernel, {**tensors, **flags}) == ["scale", "y", "c"]
    assert written(kernel, {**tensors, "ROWWISE": True, "COLUMNWISE": 0, "QUANTIZE": True}) == ["data", "scale", "c"]
    assert written(test_what_a_kernel_says, tensors) is None
    assert updated(kernel, flags) == () and updated(updates("c", y="COLUMNWISE", data="ROWWISE")(kernel), flags) == (
        "c",
        "y",
    )


def _kernel(module: str, parameters: list[SimpleNamespace]) -> mock.Mock:
    return mock.Mock(spec=["fn", "params"], fn=SimpleNamespace(__module__=module), params=parameters)


def test_kernels_of_others_are_analysed_as_before() -> None:
    own = mock.Mock(return_value=["y"])
    theirs = _kernel("a_model", [])
    assert [analyse(own, theirs, {"x": 1}, {}), analyse(own, theirs, {"x": 1}, {})] == [["y"], ["y"]]
    assert own.call_count == 2


def test_what_the_analysis_can_see_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    own = mock.Mock(side_effect=lambda kernel, kwargs, _: sorted(kwargs))
    monkeypatch.setattr(mutation, "_answers", {})
    parameters = [SimpleNamespace(name="SIZE", is_constexpr=True), SimpleNamespace(name="m", is_constexpr=False)]
    kernel = _kernel("te_dynamo.kernels.quantize.current", parameters)
    bf16, fp32 = torch.empty(2, dtype=torch.bfloat16), torch.empty(2)
    for arguments in (
        {"x": bf16, "m": 32, "SIZE": 128},
        {"x": bf16, "m": 48, "SIZE": 128},  # another multiple of 16: the same
        {"x": fp32, "m": 32, "SIZE": 128},
        {"x": bf16, "m": 1, "SIZE": 128},
        {"x": bf16, "m": 32, "SIZE": 64},
    ):
        assert analyse(own, kernel, arguments, {}) == ["SIZE", "m", "x"]
    assert own.call_count == 4
