"""lowering/inductor/define_kernel.py: our kernels are handed to Inductor's workers when they are defined, and launched early."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor import async_compile
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.utils import IndentedBuffer, fresh_cache
from torch.nn import functional as F

from te_dynamo.lowering.inductor import define_kernel
from te_dynamo.lowering.inductor.install import install
from te_dynamo.torch_private.private import compiling_ours

SOURCE = """
import triton

@triton_heuristics.user_autotune(
    triton_meta={'signature': {}, 'constants': {'EARLY': %s}},
    custom_kernel=True,
)
@triton.jit
def kernel(x):
    \"\"\"What it does.\"\"\"

    pass
"""
DEFINITION = f"async_compile.triton('kernel', '''{SOURCE}''', device_str='cuda')\n"
OF_INDUCTOR = DEFINITION.replace("    custom_kernel=True,\n", "")


class Compiler:
    """In place of AsyncCompile: remembers what it is asked to compile."""

    asked: list[tuple[Any, ...]]
    ready: bool

    def use_process_pool(self) -> bool:
        return self.ready

    def __call__(self) -> Compiler:
        return self

    def triton(self, kernel_name: str, source_code: str, device_str: str = "cuda") -> None:
        self.asked.append((kernel_name, source_code, device_str))


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    install()
    made = Compiler()
    made.asked, made.ready = [], True
    monkeypatch.setattr(async_compile, "AsyncCompile", made)
    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: 4)
    return made


def define(*bodies: str) -> str:
    """Inductor's code that defines kernels, in a graph of ours."""
    code = IndentedBuffer()
    wrapper = SimpleNamespace(writeline=lambda line: code.splice(f"\n\nkernel = {line.kernel_body}"))
    with compiling_ours():
        for body in bodies:
            PythonWrapperCodegen.define_kernel(wrapper, "kernel", body)  # type: ignore[arg-type]
    return code.getvalue()


def test_what_is_compiled_is_what_the_code_asks_for(compiler: Compiler) -> None:
    """To the letter, launch attributes included: torch finds it by its text."""
    code = define(*(DEFINITION % early for early in (False, True)))
    early = list(compiler.asked)
    assert ["'launch_pdl': True" in source for _, source, _ in early] == [False, True]
    compiler.asked.clear()
    exec(code, {"async_compile": compiler})
    assert compiler.asked == early and len(early) == 2


def test_only_ours_are_compiled_and_only_where_workers_are_ready(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor has handed its own to them already. Code in C++ is none of ours to read."""
    define(
        OF_INDUCTOR % False,
        "R'cpp(custom_kernel=True)cpp'",
        "custom_kernel=True (",
        "other.triton('custom_kernel=True')",
    )
    compiler.ready = False
    define(DEFINITION % False)
    compiler.ready = True
    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: 1)
    define(DEFINITION % False)
    assert not compiler.asked


def test_the_attribute_is_put_into_inductors_code(compiler: Compiler) -> None:
    """Of kernels that are EARLY alone."""
    assert "triton_meta={'launch_pdl': True, 'signature'" in define(DEFINITION % True)
    assert define(DEFINITION % False).endswith(DEFINITION % False)


def test_kernels_of_other_graphs_are_torchs_alone(compiler: Compiler) -> None:
    defined: list[str] = []
    wrapper = SimpleNamespace(writeline=lambda line: defined.append(line.kernel_body))
    PythonWrapperCodegen.define_kernel(wrapper, "kernel", DEFINITION % True)  # type: ignore[arg-type]
    assert defined == [DEFINITION % True] and not compiler.asked


@pytest.mark.gpu
def test_each_kernel_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code that is imported gets what is being compiled."""
    install()
    AsyncCompile.wait_pool_ready()
    pools, submitted, defined = type(AsyncCompile.process_pool()), [], []
    submit, compile_early = pools.submit, define_kernel._compile

    @functools.wraps(submit)  # or it would be wrapped once more
    def submitting(pool: Any, job: Any, *arguments: Any) -> Any:
        submitted.extend(
            given.args[0] for given in arguments[:1] if hasattr(given, "args")
        )  # none: whether the pool is ready
        return submit(pool, job, *arguments)

    def compiling(body: str) -> None:
        defined.append(body)
        compile_early(body)

    # Of the class: pytest before 9.2 leaves the pool itself a method, past what is installed later.
    monkeypatch.setattr(pools, "submit", submitting)
    monkeypatch.setattr(define_kernel, "_compile", compiling)
    x, w = (torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    with fresh_cache():
        torch.compile(lambda x: F.silu(F.linear(x, w)), backend="te")(x)
    assert len([name for name in submitted if not name.startswith("triton_")]) == len(defined) >= 2
