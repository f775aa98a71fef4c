"""kernels/runtime/dependent_launch.py: kernels of few rows wait before they touch memory, are launched early in Inductor's code, and miss nothing."""

import sys
from typing import Any

import pytest
import torch
from helpers.kernels.compiled_quantize import source
from helpers.slow import slow_but
from torch import nn
from torch._inductor.utils import run_and_get_code

import te_dynamo
from te_dynamo.kernels.gemm import decode as gemm_decode
from te_dynamo.kernels.gemm import product as gemm
from te_dynamo.kernels.produce import tensor_kernels
from te_dynamo.kernels.quantize import current as quantize
from te_dynamo.kernels.runtime._triton import INSTALLED
from te_dynamo.kernels.runtime.compiled_code import compile_for
from te_dynamo.kernels.runtime.dependent_launch import starts_early

F8, BF16, F32, I64 = "*fp8e4nv", "*bf16", "*fp32", "*i64"
QUANTIZED = {"FMAX": 448.0, "EPS": 0.0, "POWER_OF_TWO": False}
CAST = QUANTIZED | {
    "ROWWISE": True,
    "COLUMNWISE": False,
    "PARTIALS": 512,
    "PASS": "known",
    "BLOCK_M": 4,
    "BLOCK_K": 1024,
}
TILE = {"EVEN": True, "STAGES": 3, "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128}
WRITTEN = {
    **dict(a=BF16, b=BF16, partials=F32, data=F8, scale_inv=F32),
    **dict(M="i32", K="i32", a_stride="i32", b_stride="i32"),
}
KERNELS: dict[str, tuple[Any, dict[str, str], dict[str, Any]]] = {
    "gemm_decode": (
        gemm_decode.gemm_decode_kernel,
        dict(a=F8, a_scale_inv=F32, b=F8, b_scale_inv=F32, bias=BF16, c=BF16, partials=F32, M="i32", N="i32", K="i32"),
        {
            **TILE,
            "SCALING": "tensor",
            "HAS_BIAS": True,
            "FAST": True,
            "SPLIT_K": 1,
            "PARTIALS": 512,
            "EDGE_1": 64,
            "EDGE_2": 64,
            "addend": None,
        },
    ),
    "gemm_decode_gated": (
        gemm_decode.gemm_decode_gated_kernel,
        dict(a=F8, a_scale_inv=F32, b=F8, b_scale_inv=F32, c=BF16, partials=F32, M="i32", WIDTH="i32", K="i32"),
        {**TILE, "GATE": 0, "KIND": "silu", "FAST": True, "PARTIALS": 512},
    ),
    "gemm_reduce": (
        gemm.gemm_reduce_kernel,
        dict(parts=F32, a_scale_inv=F32, b_scale_inv=F32, bias=BF16, c=BF16, partials=F32, SIZE="i32", N="i32"),
        {"SCALING": "tensor", "HAS_BIAS": True, "SPLIT_K": 2, "PARTIALS": 512, "BLOCK": 1024, "addend": None},
    ),
    "quantize_cast": (
        quantize.quantize_cast_kernel,
        dict(x=BF16, hint=I64, partials=F32, data=F8, transpose=F8, scale_inv=F32, M="i32", K="i32"),
        {**CAST, "GROUPED": False, "G": 1},
    ),
    "quantize_few": (
        quantize.quantize_few_kernel,
        dict(x=BF16, data=F8, scale_inv=F32, SIZE="i32"),
        {**QUANTIZED, "BLOCK": 4096},
    ),
    "gated_write": (
        tensor_kernels.produce_write_kernel,
        WRITTEN,
        {
            **dict.fromkeys(name for name in tensor_kernels.produce_write_kernel.arg_names if name not in WRITTEN),
            **CAST,
            **source("gated", "silu"),
            **{"KEEP_OUTPUT": False, "PARTS": 0, "STACKED": False, "HALF": -1},
        },
    ),
}


@pytest.mark.one_fast_case
@pytest.mark.skipif(not INSTALLED, reason="compiles kernels")
@pytest.mark.parametrize("name", slow_but(2, KERNELS))
def test_an_early_kernel_waits_first(name: str) -> None:
    kernel, args, constexprs = KERNELS[name]
    lines = compile_for(kernel, args=args, constexprs={**constexprs, "EARLY": True}, num_warps=4).ptx.splitlines()
    waits = [i for i, line in enumerate(lines) if "griddepcontrol.wait" in line]
    touches = [
        i
        for i, line in enumerate(lines)
        if any(word in line for word in ("ld.global", "st.global", "cp.async", "atom.global", "red.global"))
    ]
    assert len(waits) == 1 and touches and waits[0] < min(touches)
    assert not any(
        "tensormap" in line for line in lines
    )  # its descriptors would lie where those of its predecessor are
    plain = compile_for(kernel, args=args, constexprs={**constexprs, "EARLY": False}, num_warps=4).ptx
    assert "griddepcontrol" not in plain


def test_which_launches_are_early() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert starts_early(1, cuda) and starts_early(64, cuda)
    assert not starts_early(65, cuda) and not starts_early(1, cpu)


def _frozen_chain(layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    pairs = (nn.Sequential(nn.Linear(2048, 8192, bias=False), nn.Linear(8192, 2048)) for _ in range(layers))
    chain = nn.Sequential(*pairs).to("cuda", torch.bfloat16).eval().requires_grad_(False)
    return te_dynamo.freeze(chain)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_a_chain_of_early_kernels_misses_nothing(tokens: int) -> None:
    """The bits of the same kernels, each launched after its predecessor's end: called, and replayed as a CUDA graph."""
    chain = _frozen_chain(4)
    x = torch.randn(tokens, 2048, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(chain, backend="te", dynamic=False)
    with torch.no_grad():
        output, (code, *_) = run_and_get_code(compiled, x)
        assert code.count("'EARLY': True") == code.count("'launch_pdl': True") >= 3
        eager = torch.compile(chain, backend="te", dynamic=False, options={"codegen": "eager"})
        expected = eager(x)
        torch.cuda.synchronize()
        assert torch.equal(output, expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = compiled(x)
        for _ in range(50):
            x.copy_(torch.randn_like(x))
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(replayed, _one_by_one(eager, x))


def _one_by_one(call: Any, x: torch.Tensor) -> torch.Tensor:
    """call(x), each kernel launched after the end of the one before."""
    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("te_dynamo.kernels") and hasattr(module, "starts_early"):
                patch.setattr(module, "starts_early", lambda *_: False)
        return call(x)
