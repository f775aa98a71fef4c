"""The whole model, run once in its own precision and once in a recipe: how far loss, outputs and gradients are apart.

Beside the model and what its own step takes, outputs and gradients of the first run are kept, on the CPU, until the second has made its.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from te_dynamo.accuracy.probes import Session
from te_dynamo.accuracy.rows import decibels
from te_dynamo.accuracy.sums import error_sums
from te_dynamo.errors import InputError
from te_dynamo.inspect.target import tensors_in


@dataclasses.dataclass
class Outcome:
    """What one step gave: the loss where there is one, floating outputs, gradients by name; tensors on the CPU."""

    loss: float | None
    outputs: list[Tensor]
    gradients: dict[str, Tensor]


def run_step(
    compiled: Callable[..., Any],
    target: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss: Callable[[Any], Tensor] | None,
    session: Session,
    backward: bool = True,
) -> Outcome:
    """Forward, and backward where something requires grad. `.grad` stays as it is."""
    result = compiled(*args, **kwargs)
    value = _loss_of(result, loss)
    outputs = [out for out in tensors_in(result) if out.is_floating_point()]
    roots = [out for out in (outputs if value is None else [value]) if out.requires_grad]
    named: dict[str, Tensor] = dict(target.named_parameters()) if isinstance(target, nn.Module) else {}
    named |= {f"input {i}": tensor for i, tensor in enumerate(tensors_in((args, kwargs)))}
    leaves = {name: leaf for name, leaf in named.items() if leaf.requires_grad and leaf.is_leaf}
    gradients: dict[str, Tensor] = {}
    if backward and roots and leaves:
        seeds = [torch.ones_like(root) if value is not None else _direction(root) for root in roots]
        session.in_backward = True
        try:
            found = torch.autograd.grad(roots, list(leaves.values()), seeds, allow_unused=True)
        finally:
            session.in_backward = False
        gradients = {name: _on_cpu(grad) for name, grad in zip(leaves, found, strict=True) if grad is not None}
    return Outcome(
        None if value is None else float(value.detach()), [_on_cpu(out.detach()) for out in outputs], gradients
    )


def _loss_of(result: Any, loss: Callable[[Any], Tensor] | None) -> Tensor | None:
    """By the user's function; else the result itself where it is one number, or what it holds as "loss"; None without one."""
    if loss is not None:
        value = loss(result)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise InputError(
                f"te_dynamo.compare: loss gave {_what(value)}; expected a function of the model's result that returns a tensor of one value"
            )
        return value
    held = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    number = result if isinstance(result, Tensor) else held
    return number if isinstance(number, Tensor) and number.numel() == 1 and number.is_floating_point() else None


def _what(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _direction(out: Tensor) -> Tensor:
    """The same random gradient for both runs: ones would vanish behind a norm or a softmax."""
    generator = torch.Generator(out.device).manual_seed(0)
    return torch.randn(out.shape, generator=generator, device=out.device, dtype=torch.float32).to(out.dtype)


def _on_cpu(tensor: Tensor) -> Tensor:
    return (tensor if tensor.layout == torch.strided else tensor.to_dense()).cpu()


class Difference:
    """Of a recipe's runs from the model's own, over all steps."""

    def __init__(self) -> None:
        self._losses: list[tuple[float, float]] = []
        self._outputs = torch.zeros(2, dtype=torch.float64)
        self._gradients: dict[str, Tensor] = {}

    def add(self, exact: Outcome, found: Outcome) -> None:
        """One step's; what `found` holds is given up tensor by tensor."""
        if exact.loss is not None and found.loss is not None:
            self._losses.append((exact.loss, found.loss))
        for one, other in zip(exact.outputs, found.outputs, strict=True):
            if one.shape == other.shape:  # data may decide a shape
                self._outputs += error_sums(one, other)
        for name, grad in exact.gradients.items():
            if name in found.gradients:
                before = self._gradients.get(name, torch.zeros(2, dtype=torch.float64))
                self._gradients[name] = before + error_sums(grad, found.gradients.pop(name))

    def to_dict(self) -> dict[str, Any]:
        """ "loss", "loss_recipe", "loss_change" (relative, of the means over the steps), "snr_output_db", "snr_gradients_db", and "gradients":
        {parameter: dB}, the worst first. None for what there was not."""
        means = [sum(column) / len(self._losses) for column in zip(*self._losses, strict=True)] or [None, None]
        exact, found = (value if value is not None and math.isfinite(value) else None for value in means)
        gradients = {name: decibels(*sums.tolist()) for name, sums in self._gradients.items()}
        total = sum(self._gradients.values(), torch.zeros(2, dtype=torch.float64))
        return {
            "loss": exact,
            "loss_recipe": found,
            "loss_change": None if exact is None or found is None or not exact else (found - exact) / abs(exact),
            "snr_output_db": decibels(*self._outputs.tolist()),
            "snr_gradients_db": decibels(*total.tolist()),
            "gradients": dict(sorted(gradients.items(), key=lambda pair: -1.0 if pair[1] is None else pair[1])),
        }
