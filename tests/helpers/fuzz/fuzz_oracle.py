"""What a drawn program (fuzz_models.py) computes, in float64, and how far roundings may move that: the tolerance.

The oracle is the program in float64, where each linear that the recipe covers rounds its operands to the recipe's formats
(quantized_oracle.py). A fixed tolerance would be either loose or wrong: a rounding that differs upstream moves some values over
an edge of the next quantization, by a whole step, and what is left where large terms cancel is rounding alone. So the tolerance is measured, for
each tensor of each program: the oracle runs again with every result of every operation, forward and backward, moved at random by
one rounding of the program's dtype (`Roundings`), and how far the tensor then lies from the oracle's is what roundings do to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from helpers.fuzz.fuzz_models import Program
from helpers.oracles.quantized_oracle import quantized_linear
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from te_dynamo.recipe import Recipe

FACTOR = 3.0
"""Tolerances are so many times the largest move seen. In 100 models the tensor furthest off was 1.3 times as far from the oracle's as the
largest of three moves; torch's own layer norm in fp16, which adds up in 16 bits on a CPU, was 2.1 times."""


class OutOfRangeError(Exception):
    """A value of the program overflows in its dtype: what follows is not a question of roundings."""


@dataclasses.dataclass
class Step:
    """One step: what the weights were, and what came out."""

    weights: dict[str, Tensor]
    outputs: list[Tensor]
    gradients: dict[str, Tensor | None]
    input_after: Tensor
    aliases: list[bool]

    def tensors(self) -> dict[str, Tensor]:
        """Everything that is compared, by name."""
        found = {f"output {i}": y.detach() for i, y in enumerate(self.outputs)}
        found |= {f"gradient of {name}": g for name, g in self.gradients.items() if g is not None}
        return found | {"the input afterwards": self.input_after}

    def described(self) -> dict[str, Any]:
        """What has to be as eager has it, whatever the precision."""
        outputs = [(tuple(y.shape), y.dtype, y.requires_grad) for y in self.outputs]
        gradients = {name: g if g is None else (tuple(g.shape), g.dtype) for name, g in self.gradients.items()}
        return {"outputs": outputs, "gradients": gradients, "which outputs share the input's memory": self.aliases}


def run(
    program: Program,
    call: Callable[..., Any],
    model: nn.Module,
    only: list[dict[str, Tensor]] | None = None,
    within: contextlib.AbstractContextManager[Any] | None = None,
) -> list[Step]:
    """The program's steps through `call`, which is `model` or compiled from it.

    only: the weights of each step, in place of those that its updates make.
    within: around each forward and backward.
    """
    dtype = next(model.parameters()).dtype
    steps, optimizer = [], program.optimizer(model)
    for number, leading in enumerate(program.leading):
        if only is not None:
            model.load_state_dict(only[number])
        weights = {name: p.detach().clone() for name, p in model.state_dict().items()}
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(*leading, program.width, generator=generator)
        x.view(-1, program.width)[-1:] *= 3  # the largest values lie where a kernel's or a pass's edge is
        x = x.to(program.torch_dtype).to(dtype)
        x.requires_grad_(program.input_requires_grad)
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=program.autocast and dtype != torch.float64)
        within = within or contextlib.nullcontext()
        with within, autocast, torch.set_grad_enabled(not program.inference):
            outputs = tree_leaves(call(x))
        found = [y for y in outputs if y.requires_grad]
        dys = [
            torch.randn(y.shape, generator=generator, dtype=torch.float64).to(torch.bfloat16).to(y.dtype) for y in found
        ]
        if found:
            with within:
                torch.autograd.backward(found, dys)
        gradients = {"x": x.grad, **{name: p.grad for name, p in model.named_parameters()}}
        gradients = {name: g if g is None else g.clone() for name, g in gradients.items()}
        aliases = [torch._C._is_alias_of(y, x) for y in outputs]
        copies = [y.detach().clone().requires_grad_(y.requires_grad) for y in outputs]
        steps.append(Step(weights, copies, gradients, x.detach(), aliases))
        if only is None:
            program.step(model, optimizer)
        model.zero_grad()
    return steps


@dataclasses.dataclass
class Roundings(TorchDispatchMode):
    """Inside, each float64 result of an operation is moved by up to `unit` of itself, at random.

    Raises OutOfRangeError for one above half of `largest`.
    """

    unit: float
    largest: float
    seed: int

    def __post_init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(self.seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):  # no view
            for value in tree_leaves(result):
                if isinstance(value, Tensor) and value.dtype == torch.float64 and value.numel():
                    moves = torch.rand(value.shape, generator=self.generator, dtype=torch.float64)
                    value.mul_(1 + self.unit * (2 * moves - 1))
                    if not value.abs().max() < self.largest / 2:
                        raise OutOfRangeError
        return result


def oracle_steps(
    program: Program, weights: list[dict[str, Tensor]], recipes: list[Recipe | None], seed: int | None
) -> list[Step]:
    """The program in float64 with the weights of each step, its linears in `recipes`; with a seed its results are moved."""

    def linear(number: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        recipe = recipes[number]
        if program.autocast:  # casts both, which is a rounding
            x, weight = x * 1, weight * 1
        if recipe is None:
            return torch.nn.functional.linear(x, weight, bias)
        return quantized_linear(x, weight, bias, recipe).clone()  # no view, so that a program may write to it

    model = program.model(linear)
    given = [{name: w.double() for name, w in step.items()} for step in weights]
    roundings = None if seed is None else Roundings(unit(program), torch.finfo(program.rounds_to).max, seed)
    return run(program, model, model, given, roundings)


def unit(program: Program) -> float:
    """One rounding, relative: half an eps in 16 bits. In fp32 sums are as far apart as the order of their terms, some eps."""
    eps = torch.finfo(program.rounds_to).eps
    return 8 * eps if program.rounds_to == torch.float32 else eps / 2


def tolerances(program: Program, exact: Step, moved: list[Step]) -> dict[str, float]:
    """By tensor, how far from the oracle's it may lie (Frobenius): FACTOR times what it moved, and one rounding of itself."""
    exact_tensors = exact.tensors()
    found = {name: unit(program) * float(value.norm()) for name, value in exact_tensors.items()}
    for step in moved:
        for name, value in step.tensors().items():
            found[name] = max(found[name], FACTOR * float((value - exact_tensors[name]).norm()))
    return found


def eager_errors(program: Program, weights: list[dict[str, Tensor]]) -> list[dict[str, float]]:
    """By step and tensor, how far eager's is from float64's (Frobenius), with no linear in a recipe.

    Some of torch's CPU kernels add up in 16 bits (native_layer_norm_backward), which moves a sum by more than a rounding.
    """
    model = program.model()
    own, exact = run(program, model, model, weights), oracle_steps(program, weights, [None] * 100, None)
    return [
        {name: float((value.double() - b.tensors()[name].double()).norm()) for name, value in a.tensors().items()}
        for a, b in zip(own, exact, strict=True)
    ]
