"""Defining a `te::` operation: one schema, one fake, one reference, one kernel launcher, nothing written twice.

    @te_op(reference=kernels.foo_reference, kernel=kernels.foo)
    def foo(x: torch.Tensor, quantizer: Quantizer) -> list[torch.Tensor]:
        \"\"\"What it computes.\"\"\"
        return ...            # the fake: built from TensorProto, allocates nothing under a fake mode

The decorated function's signature is the schema and its body the fake. `reference` runs wherever no kernel of ours does
(CPU, older GPUs); `kernel` launches Triton, and lowering traces that same function into Inductor's code, so that eager
and compiled runs launch the same kernels.
"""

import contextvars
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import register_flop_formula

from te_dynamo.errors import UnsupportedError
from te_dynamo.kernels.runtime import availability

NAMESPACE = "te"

KERNELS: dict[torch._ops.OpOverload, Callable[..., Any]] = {}
"""What lowering traces in place of each operation: its launcher, with the operation's own arguments."""


REFERENCE_ONLY: set[torch._ops.OpOverload] = set()
"""Operations without a kernel of their own: aten operations that Inductor compiles wherever they run."""


REFERENCES: dict[torch._ops.OpOverload, Callable[..., Any]] = {}
"""Each operation in operations of torch: what `te_dynamo.export` writes in its place."""


leaving: contextvars.ContextVar[bool] = contextvars.ContextVar("te_dynamo_leaving", default=False)
"""Whether `te_dynamo.export` traces, which takes our operations out again."""


_DIRECT: dict[torch._ops.OpOverload, Callable[..., Any]] = {}


def direct(operation: torch._ops.OpOverload, *args: Any) -> Any:
    """operation(*args) of plain tensors that require no gradient, past torch's dispatcher, which takes the CPU longer than a launch does."""
    return _DIRECT[operation](*args)


def is_te(target: object) -> bool:
    """Whether a node's target is one of our operations."""
    return isinstance(target, torch._ops.OpOverload) and target.namespace == NAMESPACE


def te_op(
    *,
    reference: Callable[..., Any],
    kernel: Callable[..., Any] | None = None,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
    flops: Callable[..., int] | None = None,
) -> Callable[[Callable[..., Any]], torch._ops.OpOverload]:
    """Decorator: registers `te::<function name>` and returns its overload.

    Tracing it by torch.export raises UnsupportedError, but for te_dynamo.export, and so does forward-mode differentiation.

    reference: plain PyTorch, any device; must not return an input. A result with other strides than the fake's is copied.
    kernel: the Triton launcher (CUDA of compute capability 9.0 or newer); None where the operation has no kernel of its own
        and the reference, made of aten operations, is what Inductor should compile.
    backward, setup_context: the autograd formula. Without one the operation is an inner part of another's backward, and
        differentiating it raises UnsupportedError: that is a double backward.
    flops: those of a call, by its arguments and `out_val`, for torch.utils.flop_counter and what asks it in Inductor.
    """

    def decorate(fake: Callable[..., Any]) -> torch._ops.OpOverload:
        name = f"{NAMESPACE}::{fake.__name__}"
        schema = torch.library.infer_schema(fake, mutates_args=())
        called = _with_contiguous_results(reference)
        definition = torch.library.custom_op(name, _without_tangents(name, called), mutates_args=(), schema=schema)
        definition.register_fake(_without_tangents(name, _not_exported(name, fake)))
        run = called if kernel is None else kernel_or_reference(kernel, called)
        if kernel is not None:
            definition.register_kernel("cuda", _without_tangents(name, run))
        definition.register_autograd(
            backward or functools.partial(_refuse_double_backward, name), setup_context=setup_context
        )
        overload = definition._opoverload
        KERNELS[overload], REFERENCES[overload], _DIRECT[overload] = kernel or reference, called, run
        if kernel is None:
            REFERENCE_ONLY.add(overload)
        if flops is not None:
            register_flop_formula(overload.overloadpacket, get_raw=True)(flops)
        return overload

    return decorate


def _not_exported(name: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """The fake; UnsupportedError while torch.export traces, whose files cannot hold an operation's config or quantizer."""

    @functools.wraps(fake)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_exporting() and not leaving.get():
            raise UnsupportedError(
                f"{name} cannot be exported: torch.export.save and AOTInductor do not keep the values that say how it quantizes. "
                "te_dynamo.export(model, args) writes torch's operations in its place. Or export the model with modules of torch.nn in place of "
                "te_dynamo's, and compile what is loaded: torch.compile("
                'torch.export.load(path).module(), backend="te")'
            )
        return fake(*args, **kwargs)

    return run


def _without_tangents(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`; UnsupportedError where its arguments may have tangents, which it would lose without a word."""

    @functools.wraps(run)
    def checked(*args: Any) -> Any:
        if forward_ad._current_level >= 0:
            raise UnsupportedError(
                f"{name} has no forward-mode derivative: call it outside of torch.func.jvp and forward_ad.dual_level, or use modules of "
                'torch.nn, which torch.compile(model, backend="te") leaves as they are inside'
            )
        return run(*args)

    return checked


def _with_contiguous_results(reference: Callable[..., Any]) -> Callable[..., Any]:
    """The reference with the strides of the fake and of the kernel: torch's functions keep those of a transposed input."""

    @functools.wraps(reference)
    def run(*args: Any, **kwargs: Any) -> Any:
        results = reference(*args, **kwargs)
        if isinstance(results, torch.Tensor):
            return results.contiguous()
        return type(results)(result.contiguous() for result in results)

    return run


def kernel_or_reference(kernel: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel where it runs on the device of the first tensor, else the reference."""

    @functools.wraps(kernel)
    def run(*args: Any, **kwargs: Any) -> Any:
        device = next(a.device for a in tree_leaves(args) if isinstance(a, torch.Tensor))
        if not availability.kernels_available(device).ok:
            return reference(*args, **kwargs)
        if torch.cuda.is_initialized() and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):  # Triton launches on the current one
                return kernel(*args, **kwargs)
        return kernel(*args, **kwargs)

    return run


def _refuse_double_backward(name: str, ctx: Any, *grads: Any) -> Any:
    raise UnsupportedError(
        f"{name} has no derivative: it is part of the backward of an FP8 operation, so this is a double backward, which a recipe whose "
        'backward is quantized does not support. Give what needs second derivatives a recipe with backward="high_precision" or, by a rule, none.'
    )


def expand_in_compiler(overload: torch._ops.OpOverload, expansion: Callable[..., Any]) -> None:
    """Makes AOTAutograd see `expansion(*args)` in place of `overload`, below autograd: the autograd formula stays ours.

    Steps aside for tensor subclasses (DTensor), which must desugar first.
    """
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

    plain = (torch.Tensor, torch.nn.Parameter, FunctionalTensor)

    @torch.library.register_torch_dispatch(f"{NAMESPACE}::{overload._opname}", FunctionalTensorMode)
    def _(mode: Any, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if not all(issubclass(t, FakeTensor) or t in plain for t in types):
            return NotImplemented
        with mode:
            return expansion(*args, **(kwargs or {}))
