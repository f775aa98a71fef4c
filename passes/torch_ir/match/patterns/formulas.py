"""Activations written out in a model, in whatever order of their terms.

    silu         x * sigmoid(x)
    quick_gelu   x * sigmoid(1.702 x)
    gelu         0.5 x (1 + erf(x / sqrt(2)))
    gelu_tanh    0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
    relu2        relu(x)^2, where clamp(x, 0) is as good a relu

Each is a polynomial in x and t, where t is one function of a polynomial in x. The walk goes from the formula's last node upwards,
through sums, products, powers and quotients that nothing else reads. The tensor that it ends at is x. Two formulas are the same
where their coefficients are, so all spellings of one are.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from te_dynamo.passes.torch_ir.match.values import arguments, calls, tensor_of

ADD = ({operator.add, torch.add}, {"add", "__add__", "__radd__"})
MUL = ({operator.mul, torch.mul, torch.multiply}, {"mul", "__mul__", "__rmul__", "multiply"})
POW = ({operator.pow, torch.pow}, {"pow", "__pow__"})
SQUARE = ({torch.square}, {"square"})
RELU = ({F.relu, torch.relu, F.relu_, torch.relu_}, {"relu", "relu_"})
DIV = ({operator.truediv, torch.div, torch.divide, torch.true_divide}, {"div", "__truediv__", "divide", "true_divide"})

SIGMOID = ({torch.sigmoid, F.sigmoid, torch.special.expit}, {"sigmoid"})

CLAMP = ({torch.clamp, torch.clip, torch.clamp_min}, {"clamp", "clip", "clamp_min"})

_FUNCTIONS = {
    "sigmoid": SIGMOID,
    "tanh": ({torch.tanh, F.tanh}, {"tanh"}),
    "erf": ({torch.erf, torch.special.erf}, {"erf"}),
    "relu": RELU,
}

_Polynomial = dict[tuple[int, int], float]
"""{(i, j): the coefficient of x^i t^j}."""

_X: _Polynomial = {(1, 0): 1.0}
_T: _Polynomial = {(0, 1): 1.0}
_GELU: _Polynomial = {(1, 0): 0.5, (1, 1): 0.5}
_TANH = math.sqrt(2 / math.pi)

_KINDS: dict[str, tuple[str, _Polynomial, _Polynomial]] = {
    "silu": ("sigmoid", _X, {(1, 1): 1.0}),
    "quick_gelu": ("sigmoid", {(1, 0): 1.702}, {(1, 1): 1.0}),
    "gelu": ("erf", {(1, 0): math.sqrt(0.5)}, _GELU),
    "gelu_tanh": ("tanh", {(1, 0): _TANH, (3, 0): 0.044715 * _TANH}, _GELU),
    "relu2": ("relu", _X, {(0, 2): 1.0}),
}
"""{kind: (function, its argument, the result)}"""

_HIGHEST = 4
"""No formula above has a higher degree."""


@dataclasses.dataclass(frozen=True)
class Formula:
    """The activation `kind` of x, and the user's nodes that compute it, the last one at the end."""

    kind: str
    x: fx.Node
    nodes: tuple[fx.Node, ...]


def written_formula(node: Any) -> Formula | None:
    """The activation whose last operation `node` is; None where it is none."""
    if not any(calls(node, *operation) for operation in (MUL, POW, SQUARE, DIV)):
        return None
    reading = _Reading(node)
    try:
        result = reading.operation(node)
    except _NoFormulaError:
        return None
    for kind, (function, argument, expected) in _KINDS.items():
        if reading.function == function and _equal(reading.argument, argument) and _equal(result, expected):
            assert reading.x is not None
            return Formula(kind, reading.x, tuple(sorted(reading.nodes)))
    return None


class _NoFormulaError(Exception):
    """What is read is no polynomial in one tensor and one function of it."""


class _Reading:
    """A walk from a formula's last node to x, and what it has met."""

    def __init__(self, last: fx.Node) -> None:
        self.nodes = {last}
        self.x: fx.Node | None = None
        self.t: fx.Node | None = None
        self.function = ""
        self.argument: _Polynomial = {}

    def value(self, operand: Any) -> _Polynomial:
        """The polynomial that an operand is."""
        if isinstance(operand, (int, float)) and not isinstance(operand, bool):
            return {(0, 0): float(operand)}
        if not isinstance(operand, fx.Node) or tensor_of(operand) is None:
            raise _NoFormulaError
        if operand is self.t:
            return _T
        if len(operand.users) == 1 and operand is not self.x:
            if any(calls(operand, *operation) for operation in (ADD, MUL, POW, SQUARE, DIV)):
                self.nodes.add(operand)
                return self.operation(operand)
            for function, spellings in _FUNCTIONS.items():
                if calls(operand, *spellings):
                    return self._function(operand, function)
            if (clamped := _clamped_at_zero(operand)) is not None:
                return self._function(operand, "relu", clamped)
        return self._leaf(operand)

    def operation(self, node: fx.Node) -> _Polynomial:
        """The polynomial of a sum, product, power or quotient."""
        if node.kwargs or len(node.args) != (1 if calls(node, *SQUARE) else 2):
            raise _NoFormulaError
        a, *rest = map(self.value, node.args)
        if calls(node, *ADD):
            return _sum(a, rest[0])
        if calls(node, *MUL):
            return _product(a, rest[0])
        if calls(node, *SQUARE):
            return _product(a, a)
        if set(rest[0]) != {(0, 0)}:
            raise _NoFormulaError
        number = rest[0][0, 0]
        if calls(node, *DIV) and number:
            return _product(a, {(0, 0): 1 / number})
        if calls(node, *POW) and number in (2, 3):
            return _product(a, a) if number == 2 else _product(a, _product(a, a))
        raise _NoFormulaError

    def _function(self, node: fx.Node, function: str, x: Any = None) -> _Polynomial:
        if self.t is not None or (x is None and (len(node.args) != 1 or node.kwargs)):
            raise _NoFormulaError
        x = node.args[0] if x is None else x
        self.t, self.function = node, function
        self.nodes.add(node)
        # Of relu's formula x is read once, so nothing but its place tells it.
        self.argument = self._leaf(x) if function == "relu" else self.value(x)
        return _T

    def _leaf(self, node: Any) -> _Polynomial:
        if not isinstance(node, fx.Node) or self.x not in (None, node):
            raise _NoFormulaError
        self.x = node
        return _X


def _clamped_at_zero(node: fx.Node) -> Any:
    """x of clamp(x, min=0); None of any other node. Squared it is relu's square, whose gradient at 0 is 0 too."""
    if not calls(node, *CLAMP):
        return None
    given = arguments(node, "input", "min", "max") or {}
    least = given.get("min")
    return given.get("input") if isinstance(least, (int, float)) and least == 0 and given.get("max") is None else None


def _sum(a: _Polynomial, b: _Polynomial) -> _Polynomial:
    return {power: a.get(power, 0.0) + b.get(power, 0.0) for power in {*a, *b}}


def _product(a: _Polynomial, b: _Polynomial) -> _Polynomial:
    result: _Polynomial = {}
    for (i, j), c in a.items():
        for (k, m), d in b.items():
            result[i + k, j + m] = result.get((i + k, j + m), 0.0) + c * d
    if any(sum(power) > _HIGHEST for power in result):
        raise _NoFormulaError
    return result


def _equal(a: _Polynomial, b: _Polynomial) -> bool:
    """Whether they have the same terms, with coefficients that a model may have rounded to seven digits."""
    return set(a) == set(b) and all(math.isclose(a[power], b[power], rel_tol=1e-6) for power in a)
