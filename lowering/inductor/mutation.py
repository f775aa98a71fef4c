"""Which tensors a launch writes, as its kernel says, or found out once for each kernel and its constants.

torch compiles a kernel to Triton's IR to see what it writes: up to four times a launch, 50 ms and more each, while a model of many
layers launches few different kernels many times. A kernel that says what it writes (kernels/runtime/writes.py) is not compiled. Of
another of ours the answer depends on the kernel, its constants and the dtypes of its tensors alone, so that one answer serves every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch

from te_dynamo._compat import as_analysed
from te_dynamo.kernels.runtime.writes import updated, written

_OURS = "te_dynamo.kernels."


_answers: dict[Any, Any] = {}
"""By (kernel, what the analysis can see of its arguments), for the life of the process."""


def analyse(own: Callable[..., Any], kernel: Any, kwargs: dict[str, Any], tma_descriptor_metadata: Any) -> Any:
    """What a launch of `kernel` writes, as torch's analysis `own` answers."""
    # A launch that chooses its warps is recorded as an autotuner of its own, with one configuration.
    function, chosen = (kernel.fn, kernel.configs[0].kwargs) if hasattr(kernel, "configs") else (kernel, {})
    if not function.fn.__module__.startswith(_OURS) or tma_descriptor_metadata:
        return own(kernel, kwargs, tma_descriptor_metadata)
    launched = {**kwargs, **chosen}
    declared = written(function, launched)
    if declared is not None:
        return as_analysed(declared, updated(function, launched), kwargs)
    key = (function, _description(function, {**kwargs, **chosen}))
    if key not in _answers:
        _answers[key] = own(kernel, kwargs, tma_descriptor_metadata)
    return _answers[key]


def _description(function: Any, arguments: Mapping[str, Any]) -> frozenset[tuple[str, Any]]:
    """What the analysis can see of the arguments."""
    constants = {parameter.name for parameter in function.params if parameter.is_constexpr}
    return frozenset((name, _seen(value, name in constants)) for name, value in arguments.items())


def _seen(value: Any, constant: bool) -> Any:
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, sympy.Expr)):
        return "symbol"  # torch gives each the same value
    if isinstance(value, torch.Tensor):
        return "tensor", value.dtype
    if hasattr(value, "get_dtype"):  # a tensor of Inductor's IR
        return "tensor", value.get_dtype()
    if type(value) is int and not constant:
        return "integer", value == 1, value % 16 == 0, -(2**31) <= value < 2**31  # as Triton specializes it
    return type(value), value
