"""What small random models are built of: blocks, each of which writes one or a few lines of a model's forward.

A block knows how its lines are written for the oracle too: there each linear is `linear(number, x, weight [N, K], bias)`, and what
casts up to fp32 casts to fp64. Everything else is the same text.
"""

from __future__ import annotations

import dataclasses
from typing import Any


class Writer:
    """Collects the lines of a model: `setup` of its __init__, `body` of its forward."""

    def __init__(self, oracle: bool, input_may_be_written: bool) -> None:
        self.oracle, self.input_may_be_written = oracle, input_may_be_written
        self.setup: list[str] = []
        self.body: list[str] = []
        self.linears: list[LinearCall] = []
        self.weights: dict[tuple[int, int], str] = {}
        self.indent, self.names = 0, 0

    def name(self, prefix: str) -> str:
        self.names += 1
        return f"{prefix}{self.names}"

    def line(self, text: str) -> None:
        self.body.append("    " * self.indent + text)

    def assign(self, expression: str) -> str:
        name = self.name("v")
        self.line(f"{name} = {expression}")
        return name

    def parameter(self, *shape: int, frozen: bool = False) -> str:
        name = "self." + self.name("w")
        scale = "" if len(shape) == 1 else f" / {shape[-1]} ** 0.5"
        self.setup.append(f"{name} = nn.Parameter(torch.randn({', '.join(map(str, shape))}){scale})")
        if frozen:
            self.setup.append(f"{name}.requires_grad_(False)")
        return name

    def module(self, prefix: str, constructor: str) -> str:
        name = "self." + self.name(prefix)
        self.setup.append(f"{name} = {constructor}")
        return name

    def to_fp32(self, x: str) -> str:
        return f"{x}.double()" if self.oracle else f"{x}.float()"


@dataclasses.dataclass(frozen=True)
class LinearCall:
    """One linear of a forward: its line in the body, its sizes, the path of its module, of its weight's where a function is called."""

    line: int
    n: int
    k: int
    path: str
    style: str


# ---- how a linear is written

STYLES: dict[str, tuple[str, str]] = {
    "module": ("nk", ""),
    "F.linear": ("nk", "F.linear({x}, {w}, {b})"),
    "F.linear of a transpose": ("kn", "F.linear({x}, {w}.t(), {b})"),
    "matmul": ("kn", "{x} @ {w}"),
    "matmul by .t()": ("nk", "{x} @ {w}.t()"),
    "matmul by .mT": ("nk", "torch.matmul({x}, {w}.mT)"),
    "mm": ("kn", "{x}.reshape(-1, {k}).mm({w}).reshape(*{x}.shape[:-1], {n})"),
    "addmm": ("kn", "torch.addmm({b}, {x}.reshape(-1, {k}), {w}).reshape(*{x}.shape[:-1], {n})"),
    "addmm by .t()": ("nk", "torch.addmm({b}, {x}.reshape(-1, {k}), {w}.t()).view(*{x}.shape[:-1], {n})"),
    "einsum": ("kn", "torch.einsum('...k,kn->...n', {x}, {w})"),
    "einsum by rows": ("nk", "torch.einsum('...k,nk->...n', {x}, {w})"),
    "rows": ("2nk", "F.linear({x}, {w}[{n}:], {b})"),
    "columns": ("n2k", "F.linear({x}, {w}[:, :{k}], {b})"),
    "chunk": ("2nk", "F.linear({x}, {w}.chunk(2)[0], {b})"),
    "scaled": ("nk", "F.linear({x}, {w} * 0.5, {b})"),
    "matmul by a chunk": ("k2n", "{x} @ {w}[:, {n}:]"),
    "matmul by one of two": ("2kn", "{x} @ {w}[1]"),
    "matmul by one unbound": ("2kn", "{x} @ {w}.unbind(0)[1]"),
    "matmul by a view": ("1kn", "{x} @ {w}.view({k}, {n})"),
    "matmul scaled": ("kn", "{x} @ ({w} * 0.5)"),
    "matmul by a copy": ("nk", "{x} @ {w}.t().contiguous()"),
    "tensordot": ("kn", "torch.tensordot({x}, {w}, dims=1)"),
    "inner": ("nk", "torch.inner({x}, {w})"),
    "weight on the left": ("nk", "({w} @ {x}.transpose(-1, -2)).transpose(-1, -2)"),
    "einsum from heads": ("3D", "torch.einsum('...hd,hdn->...n', {x}.unflatten(-1, (-1, 1)), {w})"),
    "einsum to heads": ("3D", "torch.einsum('...k,khd->...hd', {x}, {w}).flatten(-2)"),
}
"""How the weight is stored, and the product. Without {b} in it a bias is added behind it."""

_STORED = {
    "nk": (lambda n, k: (n, k), "{w}"),
    "kn": (lambda n, k: (k, n), "{w}.t()"),
}
_PARTS = {
    "rows": (lambda n, k: (2 * n, k), "{w}[{n}:]"),
    "chunk": (lambda n, k: (2 * n, k), "{w}.chunk(2)[0]"),
    "columns": (lambda n, k: (n, 2 * k), "{w}[:, :{k}]"),
    "matmul by a chunk": (lambda n, k: (k, 2 * n), "{w}[:, {n}:].t()"),
    "scaled": (lambda n, k: (n, k), "({w} * 0.5)"),
    "matmul by one of two": (lambda n, k: (2, k, n), "{w}[1].t()"),
    "matmul by one unbound": (lambda n, k: (2, k, n), "{w}[1].t()"),
    "matmul by a view": (lambda n, k: (1, k, n), "{w}.view({k}, {n}).t()"),
    "matmul scaled": (lambda n, k: (k, n), "({w}.t() * 0.5)"),
    "einsum from heads": (lambda n, k: (k, 1, n), "{w}.flatten(0, 1).t()"),
    "einsum to heads": (lambda n, k: (k, n, 1), "{w}.flatten(1).t()"),
}

MATCHED = set(STYLES)
"""Those that the documentation says are matched wherever sizes and dtypes allow it: all so far."""


@dataclasses.dataclass(frozen=True)
class Linear:
    """frozen: "", "weight", "bias" or "both". tied: reads a weight that is there already, if one of its shape is."""

    n: int
    style: str = "module"
    bias: bool = False
    frozen: str = ""
    tied: bool = False

    def write(self, w: Writer, x: str, k: int) -> tuple[str, int]:
        n = self.n
        if self.style == "module":
            return self._module(w, x, k), n
        shape, row_major = _PARTS.get(self.style) or _STORED[STYLES[self.style][0]]
        kept = w.weights.get(shape(n, k)) if self.tied else None
        weight = kept or w.parameter(*shape(n, k), frozen=self.frozen in ("weight", "both"))
        w.weights[shape(n, k)] = weight
        text = STYLES[self.style][1]
        has_bias = self.bias or "addmm" in self.style
        bias = w.parameter(n, frozen=self.frozen in ("bias", "both")) if has_bias else "None"
        behind = f" + {bias}" if has_bias and "{b}" not in text else ""
        given = bias if "{b}" in text else "None"
        return self._call(
            w, x, n, k, path_of(weight), row_major.format(w=weight, n=n, k=k), given,
            text.format(x=x, w=weight, b=given, n=n, k=k), behind,
        ), n  # fmt: skip

    def _module(self, w: Writer, x: str, k: int) -> str:
        name = w.module("lin", f"nn.Linear({k}, {self.n}, bias={self.bias})")
        if self.tied and (self.n, k) in w.weights and w.weights[self.n, k].count(".") == 2:
            w.setup.append(f"{name}.weight = {w.weights[self.n, k]}")
        else:
            w.weights[self.n, k] = f"{name}.weight"
        for part in ("weight", "bias") if self.frozen == "both" else filter(None, (self.frozen,)):
            if part == "weight" or self.bias:
                w.setup.append(f"{name}.{part}.requires_grad_(False)")
        return call_module(w, name, x, self.n, k)

    def _call(
        self, w: Writer, x: str, n: int, k: int, path: str, weight: str, bias: str, text: str, behind: str
    ) -> str:
        w.linears.append(LinearCall(len(w.body), n, k, path, self.style))
        if w.oracle:
            text = f"linear({len(w.linears) - 1}, {x}, {weight}, {bias})"
        return w.assign(text + behind)


def path_of(parameter: str) -> str:
    """What rules are asked with: the module of "self.lin1.weight", the parameter "self.w12" itself."""
    module, _, name = parameter.removeprefix("self.").rpartition(".")
    return module if name == "weight" else f"{module}.{name}".removeprefix(".")


def call_module(w: Writer, name: str, x: str, n: int, k: int) -> str:
    w.linears.append(LinearCall(len(w.body), n, k, name.removeprefix("self."), "module"))
    text = f"linear({len(w.linears) - 1}, {x}, {name}.weight, {name}.bias)"
    return w.assign(text if w.oracle else f"{name}({x})")


@dataclasses.dataclass(frozen=True)
class Twice:
    """One square linear, used two times."""

    between: str = ""

    def write(self, w: Writer, x: str, k: int) -> tuple[str, int]:
        name = w.module("lin", f"nn.Linear({k}, {k})")
        x = call_module(w, name, x, k, k)
        if self.between:
            x = w.assign(ACTIVATIONS[self.between].format(x=x))
        return call_module(w, name, x, k, k), k


@dataclasses.dataclass(frozen=True)
class Shared:
    """Linears that read one input, and what is made of their results."""

    first: Linear
    others: tuple[tuple[str, bool], ...]
    join: str = "sum"

    def write(self, w: Writer, x: str, k: int) -> tuple[str, int]:
        n = self.first.n
        results = [self.first.write(w, x, k)[0]]
        results += [Linear(n, style, bias).write(w, x, k)[0] for style, bias in self.others]
        if self.join == "attention":
            q, *rest = (w.assign(f"{r}.reshape(1, 1, -1, {n})") for r in results)
            key, value = rest[0], rest[-1]
            out = w.assign(f"F.scaled_dot_product_attention({q}, {key}, {value})")
            return w.assign(f"{out}.reshape({results[0]}.shape)"), n
        if self.join == "cat":
            return w.assign(f"torch.cat([{', '.join(results)}], -1)"), n * len(results)
        joined = {"sum": " + ", "product": " * "}[self.join].join(results)
        return w.assign(joined), n


@dataclasses.dataclass(frozen=True)
class Gated:
    """activation(gate(x)) * up(x), of two linears, or of one whose result is split."""

    n: int
    activation: str = "F.silu"
    form: str = "two"
    style: str = "module"
    bias: bool = False

    def write(self, w: Writer, x: str, k: int) -> tuple[str, int]:
        if self.form == "two":
            gate, up = (Linear(self.n, self.style, self.bias).write(w, x, k)[0] for _ in range(2))
        else:
            both = Linear(2 * self.n, self.style, self.bias).write(w, x, k)[0]
            gate, up = w.name("v"), w.name("v")
            split = {
                "chunk": f"{both}.chunk(2, -1)",
                "split": f"torch.split({both}, {self.n}, -1)",
                "slices": f"{both}[..., :{self.n}], {both}[..., {self.n}:]",
                "unflatten": f"{both}.unflatten(-1, (2, {self.n})).unbind(-2)",
            }[self.form]
            w.line(f"{gate}, {up} = {split}")
        return w.assign(f"{GATES[self.activation].format(x=gate)} * {up}"), self.n


# ---- what stands between linears

ACTIVATIONS = {
    "F.relu": "F.relu({x})",
    "F.silu": "F.silu({x})",
    "F.gelu": "F.gelu({x})",
    "F.gelu tanh": "F.gelu({x}, approximate='tanh')",
    "written silu": "({x} * torch.sigmoid({x}))",
    "written quick gelu": "({x} * torch.sigmoid(1.702 * {x}))",
    "written gelu": "({x} * 0.5 * (1.0 + torch.erf({x} / 2**0.5)))",
    "written gelu tanh": "(0.5 * {x} * (1.0 + torch.tanh({x} * 0.7978845608 * (1.0 + 0.044715 * {x} * {x}))))",
    "method relu": "{x}.relu()",
    "module": "nn.GELU()({x})",
    "tanh": "{x}.tanh()",
    "square relu": "F.relu({x}).square()",
}

GATES = {**ACTIVATIONS, "sigmoid": "torch.sigmoid({x})"}

VIEWS = {
    "rows": "{x}.reshape(-1, {k})",
    "there and back": "{x}.reshape(-1, {k}).reshape({x}.shape)",
    "one more": "{x}.unsqueeze(0)",
    "unflatten": "{x}.unflatten(-1, (2, -1)).flatten(-2)",
    "heads swapped": "{x}.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)",
    "flipped": "{x}.flip(-1)",
    "slice": "{x}[..., ::1]",
    "dropout": "F.dropout({x} * 1, 0.0)",  # of {x} itself eager gives {x}, and every compiled graph a copy
    "dropout off": "F.dropout({x} * 1, 0.5, training=False)",
    "times": "{x} * 0.5",
    "identity": "{x} + 0",
    "contiguous": "{x}.contiguous()",
    "mean subtracted": "{x} - {x}.mean(-1, keepdim=True)",
    "stacked": "torch.stack([{x}, {x}]).sum(0)",
    "expanded": "({x}.unsqueeze(0).expand(2, *{x}.shape) * 0.5).sum(0)",
}

STRIDED = {
    "columns of a wider one": "torch.cat([{x}, {x}], -1)[..., :{k}]",
    "every other column": "torch.cat([{x}, {x}], -1)[..., ::2]",
    "by columns": "{x}.reshape(-1, {k}).t().contiguous().t()",
    "transposed rows": "{x}.reshape(1, -1, {k}).transpose(0, 1)",
    "one row for all": "{x}.reshape(-1, {k}).mean(0, keepdim=True).expand(16, {k})",
}
"""Results that do not lie in memory as their shape says."""

IN_PLACE = ["{x}.add_(1)", "{x}.mul_(0.5)", "{x} += 0.25", "{x} *= 2", "{x}.relu_()", "F.silu({x}, inplace=True)"]

_RSQRT = "torch.rsqrt({f}.pow(2).mean(-1, keepdim=True) + 1e-5)"
NORMS = {
    "llama": ("{f} = {wide}", "{f} = {f} * " + _RSQRT, "{y} = {g} * {f}.to({x}.dtype)"),
    "gemma": ("{f} = {wide}", "{f} = {f} * " + _RSQRT, "{y} = ({f} * (1.0 + {g_wide})).to({x}.dtype)"),
    "t5": (
        "{f} = torch.rsqrt({wide}.square().mean(-1, keepdim=True) + 1e-5)",
        "{y} = {g} * ({x} * {f}).to({x}.dtype)",
    ),
    "plain": ("{f} = torch.rsqrt(({x} * {x}).mean(-1, keepdim=True) + 1e-5)", "{y} = {x} * {f} * {g}"),
    "olmo": ("{f} = {wide}", "{f} = {f} * " + _RSQRT, "{y} = ({g} * {f}).to({x}.dtype)"),
    "weight on the left": ("{f} = {wide}", "{f} = {g_wide} * ({f} * " + _RSQRT + ")", "{y} = {f}.to({x}.dtype)"),
    "no weight": ("{f} = {wide}", "{y} = ({f} * " + _RSQRT + ").to({x}.dtype)"),
    "cohere": (
        "{f} = {wide}",
        "{y} = {f}.mean(-1, keepdim=True)",
        "{f} = ({f} - {y}) * torch.rsqrt(({f} - {y}).pow(2).mean(-1, keepdim=True) + 1e-5)",
        "{y} = ({g_wide} * {f}).to({x}.dtype)",
    ),
    "modulated": (
        "{f} = {x}.mean(tuple(range(1, {x}.dim() - 1)) or 0, keepdim=True)",
        "{y} = F.layer_norm({x}, ({k},)) * (1 + {g} * {f}) + {f}",
    ),
    "F.rms_norm": ("{y} = F.rms_norm({x}, ({k},), {g}, 1e-5)",),
    "F.layer_norm": ("{y} = F.layer_norm({x}, ({k},), {g})",),
}
NORM_MODULES = {
    "nn.RMSNorm": "nn.RMSNorm({k}, eps=1e-5)",
    "nn.LayerNorm": "nn.LayerNorm({k})",
    "nn.LayerNorm without bias": "nn.LayerNorm({k}, bias=False)",
    "nn.LayerNorm without weight": "nn.LayerNorm({k}, elementwise_affine=False)",
}


@dataclasses.dataclass(frozen=True)
class Norm:
    kind: str = "nn.RMSNorm"

    def write(self, w: Writer, x: str, k: int) -> tuple[str, int]:
        if self.kind in NORM_MODULES:
            return w.assign(f"{w.module('norm', NORM_MODULES[self.kind].format(k=k))}({x})"), k
        gain = w.parameter(k) if self.kind != "no weight" else ""
        f, y = w.name("f"), w.name("v")
        names = {"x": x, "f": f, "y": y, "g": gain, "k": k, "wide": w.to_fp32(x), "g_wide": w.to_fp32(gain)}
        for line in NORMS[self.kind]:
            w.line(line.format(**names))
        return y, k


@dataclasses.dataclass(frozen=True)
class Expression:
    """One line that keeps the width: an activation or a view."""

    text: str

    def write(self, w: Writer, x: str, k: int) -> tuple[str, int]:
        return w.assign(self.text.format(x=x, k=k)), k


@dataclasses.dataclass(frozen=True)
class InPlace:
    """A write to what the block before it made."""

    text: str

    def write(self, w: Writer, x: str, k: int) -> tuple[str, int]:
        if x == "x" and not w.input_may_be_written:
            x = w.assign("x * 1")
        w.line(self.text.format(x=x))
        return x, k


# ---- blocks of blocks


def write_all(blocks: tuple[Any, ...], w: Writer, x: str, k: int) -> tuple[str, int]:
    for block in blocks:
        x, k = block.write(w, x, k)
    return x, k


def _back_to(width: int, w: Writer, x: str, k: int) -> str:
    return x if k == width else Linear(width).write(w, x, k)[0]


@dataclasses.dataclass(frozen=True)
class Around:
    """What `blocks` make of x, within `kind`, beside x itself.

    residual, in place, in place on x: their sum.   detach: they read x without its gradient.   checkpoint: under torch.utils.checkpoint.
    no_grad: under torch.no_grad().   both: what they make is also multiplied with x.
    """

    kind: str
    blocks: tuple[Any, ...]

    def write(self, w: Writer, x: str, k: int) -> tuple[str, int]:
        inner, width = self._inner(w, x, k)
        if self.kind == "checkpoint":
            return inner, width
        inner = _back_to(k, w, inner, width)
        if self.kind == "in place":
            w.line(f"{inner} += {x}.reshape({inner}.shape)")
            return inner, k
        if self.kind == "both":
            return w.assign(f"{inner} * {x}.reshape({inner}.shape) + {inner}"), k
        return w.assign(f"{x}.reshape({inner}.shape) + {inner}"), k

    def _inner(self, w: Writer, x: str, k: int) -> tuple[str, int]:
        if self.kind == "detach":
            return write_all(self.blocks, w, w.assign(f"{x}.detach()"), k)
        if self.kind == "no_grad":
            w.line("with torch.no_grad():")
            w.indent += 1
            result = write_all(self.blocks, w, w.assign(f"{x} * 1"), k)
            w.indent -= 1
            return result
        if self.kind == "checkpoint":
            function = w.name("part")
            w.line(f"def {function}({x}):")
            w.indent += 1
            inner, width = write_all(self.blocks, w, x, k)
            w.line(f"return {inner}")
            w.indent -= 1
            return w.assign(f"checkpoint({function}, {x}, use_reentrant=False)"), width
        return write_all(self.blocks, w, x, k)
