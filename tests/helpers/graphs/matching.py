"""What the matcher's tests need besides the matcher: a backend that only matches, and a short form of a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from te_dynamo.dialect.grouped_linear import GroupedLinearConfig
from te_dynamo.dialect.linear import LinearConfig
from te_dynamo.options import Options
from te_dynamo.passes.torch_ir.match import match
from te_dynamo.report import MatchRecord, Report

FP8 = "float8_current_scaling"

# ---- what the te operations compute, without FP8: a matched graph that runs on these must equal the user's


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, config: LinearConfig) -> list[Tensor]:
    assert x.dtype == weight.dtype and (bias is None or bias.dtype == x.dtype)
    return [F.linear(x, weight.t() if config.weight_transposed else weight, bias)]


def _grouped_linear(x: Tensor, weight: Tensor, offs: Tensor, config: GroupedLinearConfig) -> list[Tensor]:
    assert x.dtype == weight.dtype and offs.dtype == torch.int32
    return [F.grouped_mm(x, weight if config.weight_transposed else weight.transpose(1, 2), offs=offs)]


def _rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, before: bool, centered: bool, dtype: Any = None
) -> tuple[Tensor, Tensor]:
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    y = x.float() * rstd
    if before:
        y = y.to(x.dtype).float()
    if weight is not None:
        y = y * (weight.float() + float(centered))
    return y.to(dtype or x.dtype), rstd.flatten()


def _layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: Any = None) -> tuple[Tensor]:
    weight, bias = (None if t is None else t.float() for t in (weight, bias))
    return (F.layer_norm(x.float(), x.shape[-1:], weight, bias, eps).to(dtype or x.dtype),)


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "identity": lambda x: x,
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
}

_PLAIN: dict[Any, Callable[..., Any]] = {
    torch.ops.te.linear.default: _linear,
    torch.ops.te.grouped_linear.default: _grouped_linear,
    torch.ops.te.rms_norm.default: _rms_norm,
    torch.ops.te.layer_norm.default: _layer_norm,
    torch.ops.te.gelu.default: lambda x, approximate: F.gelu(x, approximate=approximate),
    torch.ops.te.silu.default: F.silu,
    torch.ops.te.relu.default: F.relu,
    torch.ops.te.gated.default: lambda gate, up, kind: _FUNCTIONS[kind](gate) * up,
}


def _use_plain(gm: fx.GraphModule) -> None:
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                node.target = _PLAIN.get(node.target, node.target)
            module.recompile()


# ---- a backend that only matches


class Matched:
    """A model (or function) compiled by a backend that only matches; `text` and `records` of all its graphs.

    run: what executes a matched graph: "plain" (the formulas above), "aot" (the same through AOTAutograd),
         "te" (the te operations through AOTAutograd) or "inductor" (those through Inductor).
    """

    def __init__(self, model: Any, run: str = "plain", dynamic: bool | None = None, **options: Any) -> None:
        self.module = model
        self.options = Options.parse(options)
        self.run = run
        self.graphs: list[fx.GraphModule] = []
        self.texts: list[str] = []
        self.report = Report()
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
        return "\n".join(self.texts)

    def _backend(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        match(gm, self.options, self.report, example_inputs)
        self.graphs.append(gm)
        self.texts.append(text(gm))
        if self.run in ("plain", "aot"):
            _use_plain(gm)
        if self.run == "plain":
            return gm.forward
        if self.run == "inductor":
            from torch._inductor.compile_fx import compile_fx

            return compile_fx(gm, example_inputs)
        return torch._dynamo.lookup_backend("aot_eager")(gm, example_inputs)


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
        shape = f": {str(value.dtype).removeprefix('torch.')}{list(value.shape)}" if isinstance(value, Tensor) else ""
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
        stored = " [K, N]" if value.weight_transposed and not isinstance(value, GroupedLinearConfig) else ""
        return f"dx={value.input_requires_grad} dw={value.weight_requires_grad}{stored}"
    return repr(value) if isinstance(value, (int, float, str, bool, type(None), torch.dtype, slice)) else "..."


def _short(node: fx.Node) -> str:
    """Dynamo's placeholder names spell the whole way to a parameter; its module and its name will do."""
    if node.op != "placeholder":
        return node.name
    name = node.name.removeprefix("l_self_").replace("modules_", "").replace("parameters_", "").strip("_")
    return name.removeprefix("l_")
