"""Whether a program of writes (write_programs.py) computes through the backend what it does in eager.

Two eager runs are the oracle: the program as it is, and with the operands of its products rounded as the recipe rounds them. The backend's
lie beside one of them, whichever products it takes; how far these two are from each other says what roundings do. Writes are large, so a
value that is read too early or too late lies far from both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import linecache
from collections.abc import Callable, Iterator
from typing import Any

import torch
from helpers.fuzz.write_programs import Program
from helpers.oracles.quantized_oracle import quantized_linear
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

import te_dynamo
from te_dynamo import recipe as recipes

NEAR, BY_ROUNDINGS = 0.1, 2.0
"""Allowed: so much of a tensor's norm, and so many times what the recipe's roundings do to it."""

STEPS = 2


class Wrong(AssertionError):
    """The backend's result is not eager's."""


class NotComparable(Exception):
    """Eager raises, or gives what is not finite; or torch's own backend is wrong too."""


class _Rounded(TorchFunctionMode):
    """Inside, products round their operands as the recipe does."""

    def __init__(self, recipe: recipes.Recipe) -> None:
        super().__init__()
        self.recipe = recipe

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            x, weight, bias = (*args, None)[:3]
            return quantized_linear(x, weight, bias, self.recipe).clone()
        if getattr(func, "__name__", "") in ("matmul", "__matmul__"):
            return quantized_linear(args[0], args[1].mT, None, self.recipe).clone()
        return func(*args, **(kwargs or {}))


def _model(program: Program, source: str) -> nn.Module:
    name, space = f"write_program_{abs(hash(source))}.py", {}
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), space)
    torch.manual_seed(0)
    dtype = eval(program.dtype)
    model = space["Model"]().to(dtype)
    for key, p in model.named_parameters():
        if key.startswith("other"):
            p.data = p.data.to(torch.float32 if dtype == torch.bfloat16 else torch.bfloat16)
    return model


Found = dict[str, Tensor | None]


def _run(program: Program, source: str, compiled: Callable[[nn.Module], Any], within: Any = None) -> Found:
    """Everything that two calls give: outputs, gradients, and what is in the inputs, weights and buffers afterwards."""
    model = _model(program, source)
    call, found = compiled(model), {}
    dtype = eval(program.dtype)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x, r = (torch.randn(*program.shape, generator=generator).to(dtype) for _ in range(2))
        x.requires_grad_(program.x_requires_grad and not program.inference)
        with within or contextlib.nullcontext():
            with torch.set_grad_enabled(not program.inference):
                outputs = [y for y in tree_leaves(call(x, r)) if isinstance(y, Tensor)]
                if program.caller_writes:
                    outputs[-1].mul_(-3)
            of = f" of call {step}"
            found |= {f"output {i}{of}": y.detach().clone() for i, y in enumerate(outputs)}
            differentiable = [y for y in outputs if y.requires_grad and not program.inference]
            if differentiable:
                dys = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in differentiable]
                torch.autograd.backward(differentiable, dys)
        found |= {f"gradient of {name}{of}": p.grad for name, p in [("x", x), *model.named_parameters()]}
        found |= {
            f"{name} after it{of}": t.detach().clone() for name, t in [("x", x), ("r", r), *model.state_dict().items()]
        }
        model.zero_grad()
        with torch.no_grad():
            for p in model.parameters():
                if not program.inference:
                    p.add_(torch.randn(p.shape, generator=generator).to(p.dtype), alpha=0.05)
    return found


def _backend(program: Program, name: str, **options: Any) -> Callable[[nn.Module], Any]:
    def compiled(model: nn.Module) -> Any:
        torch._dynamo.reset()
        if options and program.weights == "freeze":
            te_dynamo.freeze(model)
        return torch.compile(model, backend=name, options=options or None)

    return compiled


def _reads_late(program: Program, source: str) -> bool:
    """Whether backward reads what was written past the version counter: eager's gradients are those of the written values then, which we do
    not promise."""
    if program.inference:
        return False
    try:
        _run(
            program,
            source.replace(".data", ".detach()").replace(".numpy()[", "[").replace("  # t.add_", "; t.add_"),
            lambda model: model,
        )
    except Exception:
        return True
    return False


def check(program: Program) -> None:
    """Raises Wrong where the backend raises, or gives something else than eager; NotComparable. Without backward where eager's refuses."""
    source = program.source()
    try:
        exact, rounded = _oracles(program, source)
    except Exception as error:
        if program.inference:
            raise NotComparable(f"eager: {type(error).__name__}: {str(error)[:150]}") from error
        return check(dataclasses.replace(program, inference=True))
    if any(t is not None and not t.isfinite().all() for t in exact.values()):
        raise NotComparable("not finite")
    options = {"codegen": program.codegen, "recipe": program.recipe}
    if program.weights == "step":
        options["weight_cache"] = "step"
    try:
        found = _run(program, source, _backend(program, "te", **options))
    except Exception as error:
        if program.caller_writes and "modified by an inplace operation" in str(error):
            raise NotComparable("torch refuses the caller's write: backward reads what eager's does not") from error
        wrong = [f"{type(error).__name__}: {str(error)[:1500]}"]
    else:
        wrong = list(_differences(found, exact, rounded))
        if wrong and _reads_late(program, source):
            wrong = [line for line in wrong if "gradient" not in line]
    if wrong:
        _refuse_torchs_own(program, source, exact)
        raise Wrong("\n".join(wrong))


def _oracles(program: Program, source: str) -> tuple[Found, Found]:
    within = _Rounded(recipes.as_recipe(program.recipe))
    return _run(program, source, lambda model: model), _run(program, source, lambda model: model, within)


def _refuse_torchs_own(program: Program, source: str, exact: Found) -> None:
    try:
        plain = _run(program, source, _backend(program, "inductor" if program.codegen == "inductor" else "aot_eager"))
    except Exception as error:
        raise NotComparable(f"torch's own backend: {type(error).__name__}") from error
    if any(_differences(plain, exact, exact)):
        raise NotComparable("torch's own backend is wrong too")


def _differences(found: Found, exact: Found, rounded: Found) -> Iterator[str]:
    for name, right in exact.items():
        ours = found.get(name)
        if right is None or ours is None:
            if (right is None) != (ours is None):
                yield f"{name}: {'is None' if ours is None else 'is not None'}, unlike eager's"
        elif ours.shape != right.shape or ours.dtype != right.dtype:
            yield f"{name}: {ours.dtype} {tuple(ours.shape)}, eager has {right.dtype} {tuple(right.shape)}"
        else:
            norm = max(_norm(right), 1e-3)
            moved = _norm(rounded[name].double() - right.double()) / norm
            error = min(_norm(ours.double() - other.double()) for other in (right, rounded[name])) / norm
            if not error <= NEAR + BY_ROUNDINGS * moved:
                yield f"{name}: off by {error:.2g} of its norm, roundings move it by {moved:.2g}"


def _norm(t: Tensor) -> float:
    return float(t.double().norm())


def shrunk(program: Program, wrong: Callable[[Program], bool]) -> Program:
    """The program with as few writes and settings as are wrong still."""
    while True:
        fewer = [
            dataclasses.replace(program, writes=program.writes[:i] + program.writes[i + 1 :])
            for i in range(len(program.writes))
        ]
        simpler = {
            "inside": None,
            "weights": "",
            "dtype": "torch.float32",
            "codegen": "eager",
            "inference": True,
            "caller_writes": False,
        }
        fewer += [dataclasses.replace(program, **{k: v}) for k, v in simpler.items() if getattr(program, k) != v]
        smaller = next((p for p in fewer if wrong(p)), None)
        if smaller is None:
            return program
        program = smaller
