"""The text of a graph: one statement a line with dtype[shape], the same on every supported torch.

    x: bf16[8, 64] = input
    b: f8e4m3[256, 64] = input
    b_scale_inv: f32[1] = input
    quantize: (f8e4m3[8, 64], f8e4m3[64, 16], f32[1]) = te.quantize(x, e4m3[row+column])
    gemm: bf16[8, 256] = te.gemm([quantize[0], quantize[2]], e4m3[row], [b, b_scale_inv], e4m3[row], bf16, fast_accum=False)
    return gemm, quantize[1]

What torch decides and may change is left out: its node numbers (values are numbered per operation), its
symbols (s0, s1 by first appearance), overload names, `getitem` nodes of tuples (folded into their use),
arguments at their default and addresses; a cast is `x.to(f32)` in whatever operation it is written. What a
reader needs stays: order, operands, shapes, dtypes, constants. Works on Torch-IR graphs and on aten graphs.

An input is called what its `meta[NAME]` says, where te_dynamo.capture has put the user's name there
("fc1.weight") or the forward graph's ("quantize[1]"), and otherwise what torch calls it.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import sympy
import torch
from torch import fx

from te_dynamo.inspect.graphs.dtype_names import DTYPE_NAMES
from te_dynamo.torch_private.private import compiling_ours

NAME = "te_dynamo_name"
"""Key of a placeholder's meta: the name to print it under."""

_INFIX = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.truediv: "/",
    operator.floordiv: "//",
    operator.matmul: "@",
    operator.pow: "**",
}
_NAMESPACES = {"torch._C._nn": "F", "torch.nn.functional": "F", "_operator": "operator", "math": "math"}
_NOISE = {
    "layout": torch.strided,
    "pin_memory": False,
}  # whether torch writes these out differs between releases
_UNKNOWN = object()  # a node without a recorded value; None is a value


def graph_text(graph: fx.Graph | fx.GraphModule, color: bool | Literal["auto"] = False) -> str:
    """The text of `graph`, statements separated by newlines, no trailing newline.

    color: with a terminal's colours, for print; "auto" has them where stdout is such a terminal.
    graph: a Torch-IR graph (values in meta["example_value"]) or an aten graph (meta["val"]). Bodies of
    higher-order operations are printed indented below their call when the graph has an owning module.

    Raises TypeError for anything that is not a graph.
    """
    if isinstance(graph, fx.GraphModule):
        graph = graph.graph
    if not isinstance(graph, fx.Graph):
        raise TypeError(f"graph_text: expected torch.fx.Graph or GraphModule, got {type(graph).__name__}")
    text = "\n".join(_Printer(graph, _Symbols()).lines())
    if not color:
        return text
    from te_dynamo.inspect.graphs.graph_colors import colored, terminal_shows_colors

    return colored(text) if color is True or terminal_shows_colors() else text


def statements(graph: fx.Graph) -> dict[fx.Node, tuple[str, str]]:
    """(name of the result, line in graph_text) of each node that has a line, in order."""
    printer = _Printer(graph, _Symbols())
    return {node: (printer.names.get(node, node.op), line) for node, line in printer.statements() if node is not None}


def output_names(graph: fx.Graph) -> list[tuple[str, Any]]:
    """(name in graph_text, value) of each result that `graph` returns; the value None where it is no node."""
    printer = _Printer(graph, _Symbols())
    printer.lines()
    results = next(iter(graph.find_nodes(op="output"))).args[0]
    results = results if isinstance(results, (tuple, list)) else [results]
    return [(printer._argument(r), _value(r) if isinstance(r, fx.Node) else None) for r in results]


class _Symbols:
    """Names of symbolic sizes: s0, s1 (and u0, u1 for unbacked ones) by first appearance."""

    def __init__(self) -> None:
        self._names: dict[sympy.Symbol, sympy.Symbol] = {}
        self._counts: dict[str, int] = {}

    def text(self, value: torch.SymInt | torch.SymFloat | torch.SymBool) -> str:
        expression = value.node.expr
        for symbol in sorted(expression.free_symbols, key=str):
            if symbol not in self._names:
                kind = re.match(r"[a-z]*", str(symbol)).group() or "s"  # type: ignore[union-attr]
                number = self._counts.get(kind, 0)
                self._counts[kind] = number + 1
                self._names[symbol] = sympy.Symbol(f"{kind}{number}", **symbol.assumptions0)
        return str(expression.xreplace(self._names))


class _Printer:
    """Prints one graph; a body gets a printer of its own that shares the symbols."""

    def __init__(self, graph: fx.Graph, symbols: _Symbols) -> None:
        self._graph = graph
        self._symbols = symbols
        self.names: dict[fx.Node, str] = {}
        self._taken: set[str] = set()
        self._bodies: dict[str, fx.Graph] = {}

    def lines(self) -> list[str]:
        return [line for _, line in self.statements()]

    def statements(self) -> Iterator[tuple[fx.Node | None, str]]:
        """(node, its line); None for a line of a body."""
        for node in self._graph.nodes:
            if node.op == "placeholder":
                self._name(node, self._placeholder_name(node))
        for node in self._graph.nodes:
            if node.op == "output":
                yield node, self._return(node)
            elif body := self._body_of(node):
                self._bodies[self._name(node, "body")] = body
            elif not _is_projection(node):
                yield node, self._statement(node)
                yield from ((None, line) for line in self._printed_bodies(node))

    # statements

    def _return(self, node: fx.Node) -> str:
        result = node.args[0]
        if isinstance(result, (tuple, list)):
            return f"return {', '.join(map(self._argument, result))}"
        return f"return {self._argument(result)}"

    def _statement(self, node: fx.Node) -> str:
        if node.op == "placeholder":
            name, text = self.names[node], "input"
        else:
            text, base = self._call(node)
            if "kernel_idx" in node.kwargs and "tensors_to_clone" not in node.kwargs:  # a launch that writes in place
                return f"{self._type(_written(node))} = {text}"
            name = self._name(node, base)
        value = _value(node)
        if value is _UNKNOWN:
            return f"{name} = {text}"
        if node.op == "placeholder" and isinstance(value, torch.SymInt):
            kind = "int" if value.node.expr.is_symbol else self._symbols.text(value)
            return f"{name}: {kind} = {text}"
        return f"{name}: {self._type(value)} = {text}"

    def _printed_bodies(self, node: fx.Node) -> list[str]:
        lines = []
        for used in node.all_input_nodes:
            if body := self._bodies.get(self.names.get(used, "")):
                lines.append(f"    {self.names[used]}:")
                lines.extend(f"        {line}" for line in _Printer(body, self._symbols).lines())
        return lines

    def _body_of(self, node: fx.Node) -> fx.Graph | None:
        if node.op != "get_attr" or self._graph.owning_module is None:
            return None
        attribute: Any = self._graph.owning_module
        for part in str(node.target).split("."):
            attribute = getattr(attribute, part, None)
        body = getattr(attribute, "graph", None)
        return body if isinstance(body, fx.Graph) else None

    # names

    def _name(self, node: fx.Node, base: str) -> str:
        name, number = base, 0
        while name in self._taken:
            number += 1
            name = f"{base}_{number}"
        self._taken.update((name, name.split("[")[0]))  # beside an input "quantize[1]", no other value is "quantize"
        self.names[node] = name
        return name

    def _placeholder_name(self, node: fx.Node) -> str:
        value = _value(node)
        if isinstance(value, torch.SymInt) and value.node.expr.is_symbol:
            return self._symbols.text(value)
        return node.meta.get(NAME) or input_name(str(node.target))

    # calls

    def _call(self, node: fx.Node) -> tuple[str, str]:
        """(text of the call, base of the result's name)"""
        if node.op == "get_attr":
            return f"attribute {node.target}", str(node.target).split(".")[-1].strip("_")
        if node.op == "call_method":
            receiver, *rest = node.args
            return f"{self._argument(receiver)}.{node.target}({self._arguments(rest, node.kwargs)})", str(node.target)
        if node.op == "call_module":
            return f"self.{node.target}({self._arguments(node.args, node.kwargs)})", str(node.target).split(".")[-1]
        target: Any = node.target
        if target in _INFIX and len(node.args) == 2:
            left, right = map(self._argument, node.args)
            return f"{left} {_INFIX[target]} {right}", target.__name__
        if target is operator.getitem:
            sliced, index = node.args
            items = index if isinstance(index, tuple) else (index,)
            return f"{self._argument(sliced)}[{', '.join(map(self._argument, items))}]", "getitem"
        if "kernel_idx" in node.kwargs:
            return self._kernel_launch(node)
        if (dtype := _cast_to(node)) is not None:
            return f"{self._argument(node.args[0])}.to({self._argument(dtype)})", "to"
        name = _callable_name(target)
        text = f"{name}({self._arguments(*_normalized(target, node.args, node.kwargs))})"
        return text, name.split(".")[-1].strip("_")

    def _kernel_launch(self, node: fx.Node) -> tuple[str, str]:
        """`triton.name[grid](argument=value)`: the indices torch stores differ from process to process."""
        from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

        kwargs: Any = node.kwargs
        kernel: Any = kernel_side_table.get_kernel(kwargs["kernel_idx"])
        while not hasattr(kernel, "__name__"):
            kernel = kernel.fn  # an autotuner around the jitted function
        constants = kernel_side_table.get_constant_args(kwargs["constant_args_idx"])
        arguments = {**constants, **kwargs["kwargs"]}
        grids = list(dict.fromkeys(map(self._argument, kwargs["grid"])))
        return (
            f"triton.{kernel.__name__}[{' | '.join(grids)}]({self._arguments((), arguments)})",
            kernel.__name__,
        )

    def _arguments(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> str:
        positional = [self._argument(value) for value in args]
        return ", ".join(positional + [f"{name}={self._argument(value)}" for name, value in kwargs.items()])

    def _argument(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            if value not in self.names and _is_projection(value):
                parent, index = value.args
                return f"{self._argument(parent)}[{index!r}]"
            return self.names.get(value, value.name)
        if isinstance(value, torch.Size) or type(value) is tuple:
            items = ", ".join(map(self._argument, value))
            return f"({items},)" if len(value) == 1 else f"({items})"
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(self._argument, value))}]"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key}: {self._argument(item)}" for key, item in value.items()) + "}"
        if isinstance(value, slice):
            parts = [value.start, value.stop] + ([value.step] if value.step is not None else [])
            return ":".join("" if part is None else self._argument(part) for part in parts)
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self._symbols.text(value)
        if value is Ellipsis:
            return "..."
        if isinstance(value, torch.dtype):
            return DTYPE_NAMES.get(value, str(value).removeprefix("torch."))
        if isinstance(value, (torch.memory_format, torch.layout)):
            return str(value).removeprefix("torch.")
        if isinstance(value, torch.device):
            return value.type
        if isinstance(value, torch.Tensor):
            return self._type(value)
        if callable(describe := getattr(value, "describe", None)) and not isinstance(value, type):
            return str(describe())
        if isinstance(value, type) or inspect.isroutine(value):
            return _callable_name(value)
        if hasattr(value, "__fx_repr__"):
            return str(value.__fx_repr__()[0])
        return re.sub(r" at 0x[0-9a-f]+", "", repr(value))

    # types

    def _type(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            sizes = ", ".join(self._constant(size) for size in value.shape)
            text = f"{DTYPE_NAMES.get(value.dtype, str(value.dtype).removeprefix('torch.'))}[{sizes}]"
            wrapper = type(value).__name__
            return (
                text if wrapper in ("Tensor", "Parameter", "FakeTensor", "FunctionalTensor") else f"{wrapper}({text})"
            )
        if isinstance(value, (tuple, list)):
            items = ", ".join(map(self._type, value))
            return f"({items},)" if len(value) == 1 else f"({items})"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key}: {self._type(item)}" for key, item in value.items()) + "}"
        return self._constant(value)


def _value(node: fx.Node) -> Any:
    return node.meta.get("val", node.meta.get("example_value", _UNKNOWN))


def _written(launch: fx.Node) -> dict[str, Any]:
    """The tensors that a launch writes, by the names of the kernel's arguments."""
    from torch._higher_order_ops.triton_kernel_wrap import get_mutated_tensors

    kwargs: Any = launch.kwargs
    values = {name: _value(arg) if isinstance(arg, fx.Node) else arg for name, arg in kwargs["kwargs"].items()}
    metadata = kwargs["tma_descriptor_metadata"]
    with compiling_ours():  # our kernels say what they write
        written = get_mutated_tensors(kwargs["kernel_idx"], kwargs["constant_args_idx"], values, metadata)
    return {name: values[name] for name in written}


def _is_projection(node: fx.Node) -> bool:
    """Whether `node` only takes one result out of an operation that returns several."""
    if node.op != "call_function" or node.target is not operator.getitem:
        return False
    parent, index = node.args
    if not isinstance(parent, fx.Node) or not isinstance(index, (int, str)):
        return False
    value = _value(parent)
    return isinstance(value, (tuple, list, dict)) or value is _UNKNOWN


def _cast_to(node: fx.Node) -> torch.dtype | None:
    """The dtype that `node` casts to, if it does nothing else: eager graphs and Inductor's spell it differently."""
    dtype = None
    if node.target is torch.ops.prims.convert_element_type.default:
        dtype = node.args[1]
    elif node.target is torch.ops.aten._to_copy.default and list(node.kwargs) == ["dtype"]:
        dtype = node.kwargs["dtype"]
    return dtype if isinstance(dtype, torch.dtype) else None


def input_name(name: str) -> str:
    """Dynamo's `L_self_modules_fc1_parameters_weight_` as "fc1.weight"; AOTAutograd's names as they are."""
    if re.fullmatch(r"(primals|tangents)_\d+|arg\d+_\d+", name):
        return name
    if not (source := re.match(r"[LlGg]_(.+?)_?$", name)):
        # a value saved by the forward graph, under its node's name there: the number is torch's
        base = re.sub(r"(_\d+)+$", "", name).strip("_")
        return "saved" if base in ("", "getitem") else base
    path = re.sub(r"_(modules|parameters|buffers)_", ".", source.group(1))
    return re.sub(r"^(self|fn)\.", "", path)  # "fn" is the root when a module of torch's own is compiled


def _callable_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.replace("::", ".")
    if isinstance(target, torch._ops.OpOverloadPacket):
        return target._qualified_op_name.replace("::", ".")
    if isinstance(target, torch._ops.HigherOrderOperator):
        return target.name()
    name = getattr(target, "__name__", type(target).__name__)
    module = getattr(target, "__module__", None) or ""
    if module in _NAMESPACES:
        return f"{_NAMESPACES[module]}.{name}"
    if getattr(torch, name, None) is target:
        return f"torch.{name}"
    return name


def _normalized(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments by schema: those at their default dropped, bools and what follows a gap by name."""
    if isinstance(target, torch._ops.OpOverloadPacket) and len(target.overloads()) == 1:
        target = getattr(target, target.overloads()[0])
    if not isinstance(target, torch._ops.OpOverload):
        return list(args), kwargs
    positional: list[Any] = []
    named: dict[str, Any] = {}
    gap = False
    for index, argument in enumerate(target._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name, _UNKNOWN)
        if value is _UNKNOWN or _is_default(argument, value) or _NOISE.get(argument.name, _UNKNOWN) == value:
            gap = True
        elif gap or argument.kwarg_only or isinstance(value, bool):
            named[argument.name] = value
            gap = True
        else:
            positional.append(value)
    return positional, named


def _is_default(argument: Any, value: Any) -> bool:
    if isinstance(value, fx.Node) or not argument.has_default_value():
        return False
    default = argument.default_value
    return type(default) is type(value) and bool(default == value)
