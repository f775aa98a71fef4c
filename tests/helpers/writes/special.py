"""Calls that neither torch's operator database nor a guess of arguments makes: flags that write, calls by keyword, changes of size and
storage, steps of optimizers, and what Dynamo makes of NumPy and of `.data`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from helpers.writes.calls import Call
from torch import Tensor, nn


def _call(target: Any, *args: Any, **kwargs: Any) -> Call:
    return ("call_method" if isinstance(target, str) else "call_function"), target, args, kwargs


def _x(*shape: int) -> Tensor:
    return torch.randn(*shape) + 0.1


_INPLACE = (
    F.relu,
    F.relu6,
    F.silu,
    F.elu,
    F.selu,
    F.celu,
    F.leaky_relu,
    F.hardtanh,
    F.hardswish,
    F.hardsigmoid,
    F.mish,
)


def flagged_calls(on: bool) -> Iterator[Call]:
    """Calls that write something if, and only if, a flag is on."""
    aten, statistics = torch.ops.aten, lambda: (_x(3), _x(3).abs())
    yield _call(F.batch_norm, _x(4, 3), *statistics(), training=on)
    yield _call(F.batch_norm, _x(4, 3), *statistics(), None, None, on)
    yield _call(F.instance_norm, _x(4, 3, 4), *statistics(), use_input_stats=on)
    for f in (torch.batch_norm, aten.batch_norm, aten.batch_norm.default, aten._batch_norm_impl_index.default):
        yield _call(f, _x(4, 3), None, None, *statistics(), on, 0.1, 1e-5, False)
    for f in (torch.instance_norm, aten.instance_norm, aten.instance_norm.default):
        yield _call(f, _x(4, 3, 4), None, None, *statistics(), on, 0.1, 1e-5, False)
    for f in (torch.native_batch_norm, aten.native_batch_norm, aten.native_batch_norm.default):
        yield _call(f, _x(4, 3), None, None, *statistics(), on, 0.1, 1e-5)
    norm, indices, offsets = 0.1 if on else None, torch.tensor([0, 1]), torch.tensor([0])
    yield _call(F.embedding, indices, _x(4, 4), max_norm=norm)
    yield _call(F.embedding, indices, _x(4, 4), None, norm)
    yield _call(F.embedding_bag, indices, _x(4, 4), offsets, max_norm=norm)
    yield _call(F.embedding_bag, indices, _x(4, 4), offsets, norm)
    for f in _INPLACE:
        yield _call(f, -_x(64), inplace=on)
        yield _call(f, input=-_x(64), inplace=on)
    yield _call(F.relu, -_x(64), on)
    yield _call(F.threshold, _x(64), 0.5, 0.1, on)
    for f in (F.dropout, F.alpha_dropout, F.feature_alpha_dropout):
        yield _call(f, _x(4, 64), 0.5, True, on)
        yield _call(f, input=_x(4, 64), p=0.5, training=True, inplace=on)


def calls_of_writers() -> Iterator[Call]:
    indices = torch.tensor([0, 1])
    for f in (torch.embedding_renorm_, torch.ops.aten.embedding_renorm_, torch.ops.aten.embedding_renorm_.default):
        yield _call(f, _x(4, 4), indices, 0.1, 2.0)
    for f in (torch._C._nn.rrelu_with_noise, torch._C._nn.rrelu_with_noise_):
        yield _call(f, -_x(64).abs(), _x(64), 0.1, 0.3, True)
    yield _call(F.instance_norm, _x(4, 3, 4), _x(3), _x(3).abs())
    yield _call(torch.nan_to_num_, torch.tensor([float("nan")]))
    on, zero = torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    helper = torch.ops.aten._fused_moving_avg_obs_fq_helper
    fake_quant = torch.ops.aten.fused_moving_avg_obs_fake_quant
    for f in (torch.fused_moving_avg_obs_fake_quant, fake_quant, fake_quant.default, helper, helper.default):
        yield _call(f, _x(4, 4), on, on.clone(), _x(1), _x(1) + 9, _x(1), zero.clone(), 0.1, 0, 255, 0)
    yield _call("set_", _x(4), _x(5))
    yield _call("resize_", _x(4), (2, 2))
    for f in ("resize_as_", torch.resize_as_):
        yield _call(f, _x(4), _x(2, 2))
    for name, shape, args in (
        ("t_", (2, 3), ()), ("transpose_", (2, 3), (0, 1)), ("swapaxes_", (2, 3), (0, 1)), ("swapdims_", (2, 3), (0, 1)),
        ("squeeze_", (1, 3), ()), ("unsqueeze_", (3,), (0,)), ("as_strided_", (4,), ((2,), (1,))), ("requires_grad_", (3,), ()),
    ):  # fmt: skip
        yield _call(name, _x(*shape), *args)
    for f in ("detach_", torch.detach_):
        yield _call(f, _x(3).requires_grad_() * 2)
    yield _call("copy_", _x(3), _x(3))
    yield _call("__setitem__", _x(3), 0, 5.0)
    yield _call("apply_", _x(3), lambda v: v + 1)
    yield _call("map_", _x(3), _x(3), lambda a, b: a + b + 1)
    yield _call("clamp_", _x(64), 0.0, 0.1)
    for fill in (nn.init.uniform_, nn.init.normal_, nn.init.xavier_normal_, nn.init.orthogonal_, nn.init.zeros_):
        yield _call(fill, _x(4, 4))
        yield _call(fill, tensor=_x(4, 4))
    sgd = {"weight_decay": 0.1, "momentum": 0.9, "lr": 0.1, "dampening": 0.0, "nesterov": False, "maximize": False}
    yield _call(torch._fused_sgd_, [_x(3)], [_x(3)], [_x(3)], is_first_step=False, **sgd)
    adam = {
        "lr": 0.1,
        "beta1": 0.9,
        "beta2": 0.9,
        "weight_decay": 0.1,
        "eps": 1e-8,
        "amsgrad": False,
        "maximize": False,
    }
    for f in (torch._fused_adam_, torch._fused_adamw_):
        yield _call(f, *([_x(3).abs()] for _ in range(4)), [], [torch.tensor(1.0)], **adam)
    yield _call(torch._amp_foreach_non_finite_check_and_unscale_, [_x(3)], torch.zeros(1), torch.tensor([2.0]))
    yield _call(torch._amp_update_scale_, torch.ones(1), zero.clone(), torch.ones(1), 2.0, 0.5, 1)


def traced_functions() -> Iterator[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Functions whose graph is Dynamo's own, and their arguments."""

    parameter = nn.Parameter(torch.ones(4, 4))

    def clipped(x: Tensor) -> Tensor:
        parameter.grad = x
        nn.utils.clip_grad_norm_([parameter], 0.1)
        return x * 2

    def of_data(x: Tensor) -> Tensor:
        (h := x * 2).data.mul_(3)
        return h

    def of_numpy(x: Tensor) -> Tensor:
        view = x.numpy()
        view[0] = 5.0
        view += 1
        np.multiply(view, 3.0, out=view)
        (h := x * 2).detach().numpy()[...] = 0
        return h

    def filled(x: Tensor) -> Tensor:
        x.numpy().fill(3.0)
        return x * 2

    yield from ((f, (_x(4, 4),)) for f in (clipped, of_data, of_numpy, filled))
