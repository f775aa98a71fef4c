"""Selective checkpointing: a policy is asked for the aten operations that a te operation stands for.

A policy says of each operation in a checkpointed region whether its result is saved or computed again, and names the operations
that its author knows: aten.mm, aten.addmm. Where te.linear took their place, the policy is asked for them, with the arguments
that they would have had (some policies go by a weight's shape, or count), and te.linear does what it answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils.checkpoint import CheckpointPolicy

from te_dynamo.dialect.activation import gelu, quick_gelu, relu, relu2, silu
from te_dynamo.dialect.gated import gated
from te_dynamo.dialect.grouped_linear import grouped_linear, grouped_linear_with_workspace
from te_dynamo.dialect.linear import linear, linear_with_workspace
from te_dynamo.dialect.norm import layer_norm, rms_norm
from te_dynamo.dialect.norm_modulate import layer_norm_modulate

_aten = torch.ops.aten

Call = tuple[torch._ops.OpOverload, tuple[Any, ...]]


def ask_for_what_was_replaced(body: fx.GraphModule) -> None:
    """Wraps the policy of a checkpointed body, if it has one."""
    make_contexts = body.meta.get("_checkpoint_context_fn")
    if make_contexts is None:
        return

    def make_asking_contexts() -> tuple[Any, Any]:
        contexts = make_contexts()
        for context in contexts:
            if getattr(context, "policy_fn", None) is not None:
                context.policy_fn = _asking(context.policy_fn)
        return contexts

    if hasattr(make_contexts, "cache_hash"):  # torch's key of the compiled code
        make_asking_contexts.cache_hash = make_contexts.cache_hash  # type: ignore[attr-defined]
    body.meta["_checkpoint_context_fn"] = make_asking_contexts


def _asking(policy: Callable[..., Any]) -> Callable[..., Any]:
    def answer(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        answered = policy(context, op, *args, **kwargs)
        if op in _REPLACED and not _saves(answered):
            with disable_proxy_modes_tracing():
                for replaced, its_args in _REPLACED[op](*args, **kwargs):
                    answered = policy(context, replaced, *its_args)
                    if _saves(answered):
                        break
        return answered

    return answer


def _saves(answered: Any) -> bool:
    return answered is True or answered in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


def _of_linear(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, config: Any, workspace: Any = ()
) -> Iterator[Call]:
    if weight is None:  # a frozen one
        codes = config.weight_quantizer.operand(list(workspace), columnwise=False)[0]
        weight = x.new_empty(codes.shape[0], x.shape[-1])
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    k_by_n, n_by_k = (weight, weight.t()) if config.weight_transposed else (weight.t(), weight)
    yield _aten.linear.default, (x, n_by_k, bias)
    if bias is None:
        yield _aten.mm.default, (rows, k_by_n)
    else:
        yield _aten.addmm.default, (bias, rows, k_by_n)


def _of_grouped_linear(
    x: torch.Tensor, weight: torch.Tensor | None, offs: torch.Tensor, config: Any, workspace: Any = ()
) -> Iterator[Call]:
    if weight is None:
        weight = x.new_empty(config.stored_shape(workspace, offs.shape[0]))
    yield _aten._grouped_mm.default, (x, weight, offs)


def _same(op: torch._ops.OpOverload) -> Callable[..., Iterator[Call]]:
    return lambda *args: iter([(op, args)])


_REPLACED: dict[Any, Callable[..., Iterator[Call]]] = {
    linear: _of_linear,
    linear_with_workspace: _of_linear,
    grouped_linear: _of_grouped_linear,
    grouped_linear_with_workspace: _of_grouped_linear,
    rms_norm: lambda x, weight, eps, *_: iter([(_aten._fused_rms_norm.default, (x, [x.shape[-1]], weight, eps))]),
    layer_norm: lambda x, weight, bias, eps, *_: iter(
        [(_aten.native_layer_norm.default, (x, [x.shape[-1]], weight, bias, eps))]
    ),
    layer_norm_modulate: lambda x, *_: iter([(_aten.add.Tensor, (x, x))]),
    gelu: _same(_aten.gelu.default),
    quick_gelu: lambda x: iter([(_aten.mul.Tensor, (x, x))]),
    silu: _same(_aten.silu.default),
    relu: _same(_aten.relu.default),
    relu2: lambda x: iter([(_aten.pow.Tensor_Scalar, (x, 2))]),
    gated: lambda gate, up, kind: iter([(_aten.mul.Tensor, (gate, up))]),
}
"""What a te operation of the matcher stands for, given its arguments: of several the one whose result is the operation's."""
