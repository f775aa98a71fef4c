"""What the matcher's tests need besides the matcher: the te operations where the package does not define them
yet, a backend that only matches, and a short form of a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._library.opaque_object import get_opaque_type_name

from te_dynamo.ops.linear import LinearConfig
from te_dynamo.options import Options
from te_dynamo.passes.match import match
from te_dynamo.report import MatchRecord, Report

# ---- stand-ins: the operations' schemas of docs/architecture.md over plain PyTorch, no FP8


def _rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, before: bool, centered: bool
) -> tuple[Tensor, Tensor]:
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    y = x.float() * rstd
    if before:
        y = y.to(x.dtype).float()
    if weight is not None:
        y = y * (weight.float() + float(centered))
    return y.to(x.dtype), rstd.flatten()


def _layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    f = x.float()
    y = F.layer_norm(
        f,
        x.shape[-1:],
        None if weight is None else weight.float(),
        None if bias is None else bias.float(),
        eps,
    )
    return y.to(x.dtype), f.mean(-1).flatten(), f.mean(-1).flatten()


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, config: Any) -> list[Tensor]:
    assert x.dtype == weight.dtype and (bias is None or bias.dtype == x.dtype)
    return [F.linear(x, weight, bias), x.new_empty(1)]


_NORM = "Tensor x, Tensor? weight"
_CONFIG = get_opaque_type_name(LinearConfig)
_STAND_INS: dict[str, tuple[str, Callable[..., Any]]] = {
    "linear": (f"({_NORM.replace('?', '')}, Tensor? bias, {_CONFIG} config) -> Tensor[]", _linear),
    "rms_norm": (
        f"({_NORM}, float eps, bool cast_before_weight, bool zero_centered) -> (Tensor, Tensor)",
        _rms_norm,
    ),
    "layer_norm": (f"({_NORM}, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)", _layer_norm),
    "gelu": (
        "(Tensor x, str approximate) -> Tensor",
        lambda x, approximate: F.gelu(x, approximate=approximate),
    ),
    "silu": ("(Tensor x) -> Tensor", F.silu),
    "relu": ("(Tensor x) -> Tensor", F.relu),
    "swiglu": ("(Tensor gate, Tensor up) -> Tensor", lambda gate, up: F.silu(gate) * up),
}

for _name, (_schema, _run) in _STAND_INS.items():
    if not hasattr(torch.ops.te, _name):
        torch.library.define(f"te::{_name}", _schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(f"te::{_name}", "CompositeImplicitAutograd")(_run)

# ---- a backend that only matches

FP8 = "float8_current_scaling"


class Matched:
    """A model (or function) compiled by a backend that only matches: `graphs` after matching, `records` of
    all of them.

    run: what executes a matched graph, "eager" (as it is), "aot" (through AOTAutograd) or "inductor".
    """

    def __init__(self, model: Any, run: str = "eager", dynamic: bool | None = None, **options: Any) -> None:
        self.options = Options.parse(options)
        self.run = run
        self.graphs: list[fx.GraphModule] = []
        self.report = Report()
        self.module = model
        torch._dynamo.reset()
        self._compiled = torch.compile(model, backend=self._backend, dynamic=dynamic)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)

    @property
    def records(self) -> list[MatchRecord]:
        return self.report.matches

    def reasons(self, kind: str = "linear") -> list[str]:
        return [record.reason for record in self.records if record.kind == kind]

    def text(self) -> str:
        return "\n".join(text(gm) for gm in self.graphs)

    def _backend(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        match(gm, self.options, self.report)
        self.graphs.append(gm)
        if self.run == "eager":
            return gm.forward
        if self.run == "aot":
            return torch._dynamo.lookup_backend("aot_eager")(gm, example_inputs)
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(gm, example_inputs)


# ---- a short form of a graph


def text(gm: fx.GraphModule, indent: str = "") -> str:
    """A statement a line, without placeholders; configurations as "...", bodies indented below their node."""
    lines = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "get_attr" and isinstance(getattr(gm, str(node.target)), fx.GraphModule):
            lines += [f"{indent}{node.name}:", text(getattr(gm, str(node.target)), indent + "    ")]
            continue
        if node.op == "output":
            lines.append(f"{indent}return {_argument(node.args[0])}")
            continue
        value = node.meta.get("example_value")
        shape = (
            f": {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
            if isinstance(value, Tensor)
            else ""
        )
        lines.append(f"{indent}{node.name}{shape} = {_call(node)}")
    return "\n".join(lines)


def _call(node: fx.Node) -> str:
    arguments = [_argument(a) for a in node.args] + [f"{k}={_argument(v)}" for k, v in node.kwargs.items()]
    if node.op == "call_method":
        return f"{arguments[0]}.{node.target}({', '.join(arguments[1:])})"
    name = (
        str(node.target)
        if isinstance(node.target, torch._ops.OpOverload)
        else getattr(node.target, "__name__", str(node.target))
    )
    return f"{name.removesuffix('.default')}({', '.join(arguments)})"


def _argument(value: Any) -> str:
    if isinstance(value, fx.Node):
        return _short(value)
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_argument, value))})"
    if isinstance(value, LinearConfig):
        return f"dx={value.input_requires_grad} dw={value.weight_requires_grad}"
    return (
        repr(value) if isinstance(value, (int, float, str, bool, type(None), torch.dtype, slice)) else "..."
    )


def _short(node: fx.Node) -> str:
    """Dynamo's placeholder names spell the whole way to a parameter; its module and its name will do."""
    if node.op != "placeholder":
        return node.name
    name = node.name.removeprefix("l_self_").replace("modules_", "").replace("parameters_", "").strip("_")
    return name.removeprefix("l_")
