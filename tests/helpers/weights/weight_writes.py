"""Every way to write a linear's weight that a training script or a server has, and which of them torch shows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

Write = Callable[[nn.Module, torch.Tensor], None]


def _in_place(linear: nn.Module, new: torch.Tensor) -> None:
    with torch.no_grad():
        linear.weight.mul_(0).add_(new)


def _copy(linear: nn.Module, new: torch.Tensor) -> None:
    with torch.no_grad():
        linear.weight.copy_(new)


def _optimizer(linear: nn.Module, new: torch.Tensor) -> None:
    linear.weight.grad = linear.weight.detach() - new
    torch.optim.SGD([linear.weight], lr=1.0).step()
    linear.weight.grad = None


def _data(linear: nn.Module, new: torch.Tensor) -> None:
    linear.weight.data = new.clone()


def _set(linear: nn.Module, new: torch.Tensor) -> None:
    with torch.no_grad():
        linear.weight.set_(new.clone())


def _load(linear: nn.Module, new: torch.Tensor) -> None:
    linear.load_state_dict({"weight": new})


def _assign(linear: nn.Module, new: torch.Tensor) -> None:
    linear.load_state_dict({"weight": new.clone()}, assign=True)


def _swap(linear: nn.Module, new: torch.Tensor) -> None:
    linear.weight = nn.Parameter(new.clone(), requires_grad=linear.weight.requires_grad)


def _view(linear: nn.Module, new: torch.Tensor) -> None:
    with torch.no_grad():
        linear.weight.view(-1)[: new.numel()].copy_(new.reshape(-1))


def _detached(linear: nn.Module, new: torch.Tensor) -> None:
    linear.weight.detach().copy_(new)  # shares the version counter


def _data_copy(linear: nn.Module, new: torch.Tensor) -> None:
    linear.weight.data.copy_(new)


def _numpy(linear: nn.Module, new: torch.Tensor) -> None:
    linear.weight.detach().numpy()[:] = new.numpy()


def _storage(linear: nn.Module, new: torch.Tensor) -> None:
    linear.weight.untyped_storage().copy_(new.clone().untyped_storage())


WRITES: dict[str, Write] = {
    "in place": _in_place,
    "copy_": _copy,
    "optimizer": _optimizer,
    "assignment to .data": _data,
    "set_": _set,
    "load_state_dict": _load,
    "load_state_dict with assign": _assign,
    "a swapped parameter": _swap,
    "a view": _view,
    "detach()": _detached,
}
"""Seen by identity, version counter or storage."""

HIDDEN_WRITES: dict[str, Write] = {
    ".data.copy_": _data_copy,
    "numpy": _numpy,
    "untyped_storage().copy_": _storage,
}
"""Shown by nothing: te_dynamo.invalidate has to be told."""
