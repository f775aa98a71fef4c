"""Small models with writes in place, drawn from rules: what is computed, and between any two of its lines, through any kind of alias of any
value so far, by any writer. A program is text."""

from __future__ import annotations

import dataclasses
import random
import re
import textwrap

HEADER = """\
import operator
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from helpers.fuzz.write_operators import allowed, as_operator, as_triton, nonstrict

"""

# ---- what is computed: {v} a value of width K that is there, {n} a number of its own; the last line names the result

NORMS = {
    "module": (["self.norm{n} = nn.RMSNorm({k}, eps=1e-5)"], ["y{n} = self.norm{n}({v})"]),
    "layer module": (["self.norm{n} = nn.LayerNorm({k})"], ["y{n} = self.norm{n}({v})"]),
    "F.layer_norm": ([], ["y{n} = F.layer_norm({v}, ({k},), {gain}, None)"]),
    "F.rms_norm": ([], ["y{n} = F.rms_norm({v}, ({k},), {gain}, 1e-5)"]),
    "written": ([], [
        "h{n} = {v}.float()", "m{n} = h{n}.pow(2).mean(-1, keepdim=True)", "o{n} = h{n} * torch.rsqrt(m{n} + 1e-6)",
        "y{n} = {gain} * o{n}.to({v}.dtype)",
    ]),
    "gemma": ([], [
        "h{n} = {v}.float()", "o{n} = h{n} * torch.rsqrt(h{n}.pow(2).mean(-1, keepdim=True) + 1e-6)", "w{n} = 1 + {gain}",
        "y{n} = (o{n} * w{n}.float()).to({v}.dtype)",
    ]),
    "written layer norm": ([], [
        "h{n} = {v}.float()", "c{n} = h{n} - h{n}.mean(-1, keepdim=True)", "q{n} = c{n}.pow(2).mean(-1, keepdim=True)",
        "o{n} = c{n} * torch.rsqrt(q{n} + 1e-5)", "y{n} = {gain} * o{n}.to({v}.dtype)",
    ]),
    "modulated": (["self.ada{n} = nn.Linear({k}, {k})"], [
        "b{n} = self.ada{n}({v})[:1]", "s{n} = 1 + b{n}", "o{n} = F.layer_norm({v}, ({k},))", "y{n} = o{n} * s{n} + b{n}",
    ]),
    "none": ([], ["y{n} = {v} * 1"]),
}  # fmt: skip
PRODUCTS = {
    "module": (["self.lin{n} = nn.Linear({k}, {j}, bias={bias})"], ["y{n} = self.lin{n}({v})"]),
    "function": (["self.w{n} = nn.Parameter(torch.randn({j}, {k}) / 8)"], ["y{n} = F.linear({v}, self.w{n})"]),
    "by a transposition": (["self.w{n} = nn.Parameter(torch.randn({j}, {k}) / 8)"], ["t{n} = self.w{n}.t()", "y{n} = {v} @ t{n}"]),
    "of a swap": (["self.lin{n} = nn.Linear({k}, {j})"], ["t{n} = {v}.transpose(0, -2)", "y{n} = self.lin{n}(t{n}).transpose(0, -2)"]),
    "by a cast": (["self.other{n} = nn.Parameter(torch.randn({j}, {k}) / 8)"], ["t{n} = self.other{n}.to({v}.dtype)", "y{n} = F.linear({v}, t{n})"]),
    "by one of a stack": (["self.w{n} = nn.ParameterList([nn.Parameter(torch.randn({j}, {k}) / 8) for _ in range(2)])"], ["t{n} = torch.stack([self.w{n}[0], self.w{n}[1]])", "y{n} = F.linear({v}, t{n}[1])"]),
    "by a buffer": (["self.register_buffer('w{n}', torch.randn({j}, {k}) / 8)"], ["y{n} = F.linear({v}, self.w{n})"]),
    "twice": (["self.lin{n} = nn.Linear({k}, {j})"], ["z{n} = self.lin{n}({v})", "y{n} = z{n} + self.lin{n}({v} * 0.5)"]),
}  # fmt: skip
ACTIVATIONS = {
    "silu": ["a{n} = F.silu({v})"], "relu": ["a{n} = torch.relu({v})"], "gelu": ["a{n} = F.gelu({v})"],
    "gelu module": ["a{n} = nn.GELU(approximate='tanh')({v})"],
    "written silu": ["s{n} = torch.sigmoid({v})", "a{n} = {v} * s{n}"],
    "quick gelu": ["i{n} = 1.702 * {v}", "s{n} = torch.sigmoid(i{n})", "a{n} = {v} * s{n}"],
    "tanh gelu": [
        "p{n} = torch.pow({v}, 3.0)", "i{n} = 0.7978845608 * ({v} + 0.044715 * p{n})", "a{n} = 0.5 * {v} * (1.0 + torch.tanh(i{n}))",
    ],
    "written gelu": ["e{n} = torch.erf({v} / 2**0.5)", "a{n} = {v} * 0.5 * (1.0 + e{n})"],
    "square relu": ["r{n} = F.relu({v})", "a{n} = r{n} * r{n}"], "square": ["r{n} = F.relu({v})", "a{n} = r{n}.square()"],
    "power": ["r{n} = F.relu({v})", "a{n} = r{n} ** 2"],
}  # fmt: skip

# ---- what is written, and how

ALIASES = {
    "itself": "{v}", "view": "{v}.view(-1, {v}.shape[-1])", "reshape": "{v}.reshape(-1)", "flatten": "{v}.flatten()",
    "slice": "{v}[:1]", "most": "{v}[1:]", "columns": "{v}[..., ::2]", "index": "{v}[0]", "narrow": "{v}.narrow(0, 0, 1)",
    "chunk": "{v}.chunk(2, -1)[0]", "split": "torch.split({v}, 24, -1)[0]", "unbind": "{v}.unbind(0)[-1]", "swap": "{v}.transpose(0, -1)",
    "movedim": "{v}.movedim(0, -1)", "permute": "{v}.movedim(-1, 0)", "expand": "{v}.expand_as({v})",
    "unsqueeze": "{v}.unsqueeze(0)", "squeeze": "{v}.unsqueeze(0).squeeze(0)", "unflatten": "{v}.unflatten(-1, (-1, 1))",
    "select": "torch.select({v}, 0, 0)", "view_as": "{v}.view_as({v})",
    "same dtype": "{v}.to({v}.dtype)", "contiguous": "{v}.contiguous()", "T": "{v}.reshape(-1, {v}.shape[-1]).T",
}  # fmt: skip
UNTRACKED = ("", ".detach()", ".data")
"""In front of the alias; behind one of the last two autograd does not see the write."""

WRITERS = {
    "mul_": "{a}.mul_(-3)", "add_": "{a}.add_(5)", "zero_": "{a}.zero_()", "fill_": "{a}.fill_(2.5)", "neg_": "{a}.sub_(4).neg_()",
    "copy_": "{a}.copy_({a} * -2 + 1)", "clamp_": "{a}.clamp_(min=2.0)", "masked_fill_": "{a}.masked_fill_({a} > 0, -4.0)",
    "setitem": "{a}[:] = 3.0", "setitem of a mask": "{a}[{a} < 0] = 5.0", "augmented": "t = {a}\nt *= -3", "augmented add": "t = {a}\nt += 4",
    "operator": "operator.imul({a}, -3)", "dunder": "{a}.__iadd__(4)", "function": "torch.relu_({a}).mul_(-2)", "unbound": "torch.Tensor.mul_({a}, -3)",
    "out": "t = {u}\ntorch.mul(t, -3, out=t)", "other out": "torch.add({b}, 4.0, out={v}.detach())",
    "overload": "torch.ops.aten.mul_.Tensor({a}, {a} * 0 - 3)", "scalar overload": "torch.ops.aten.add_.Scalar({a}, 5)",
    "aten packet": "torch.ops.aten.mul_({a}, -3)", "packet": "torch.ops.te_fuzz.first({u}, {b})", "packet's second": "torch.ops.te_fuzz.second({b}, {u})",
    "packet returns": "torch.ops.te_fuzz.returns({b}, {u})", "packet of a list": "torch.ops.te_fuzz.many({b}, [{u}])",
    "overload's second": "torch.ops.te_fuzz.second.default({b}, {u})", "by name": "torch.ops.te_fuzz.second(out={u}, x={b})",
    "decorated": "as_operator({b}, {u})", "decorated packet": "torch.ops.te_fuzz.decorated({b}, {u})",
    "triton": "as_triton({b}, {u})", "triton packet": "torch.ops.te_fuzz.triton({b}, {u})",
    "allow_in_graph": "allowed({b}, {u})", "nonstrict_trace": "nonstrict({b}, {u})", "foreach": "torch._foreach_mul_([{a}], -3.0)",
    "foreach lists": "torch._foreach_add_([{a}], [{a} * 0 + 4])", "inplace": "F.relu({a}, inplace=True).add_(2)", "inplace by place": "F.leaky_relu({a}, -2.0, True)",
    "dropout": "F.dropout({a}, 1.0, True, True)", "init": "nn.init.constant_({u}, 3.0)", "init by name": "nn.init.constant_(tensor={u}, val=3.0)",
    "max_norm": "F.embedding(torch.arange(1), {u}.reshape(1, -1), max_norm=0.1)", "numpy": "{u}.numpy()[...] = 3.0",
    "batch_norm": "t = {u}.reshape(-1)\nF.batch_norm(t.expand(2, -1) + torch.arange(2.0)[:, None], t, torch.ones_like(t), training=True, momentum=1.0)  # t.add_(0)",
    "index_fill_": "{a}.index_fill_(0, torch.zeros(1, dtype=torch.long), -9.0)", "lerp_": "{a}.lerp_({a} * 0 + 4, 0.9)",
}  # fmt: skip
FORMS = {
    "t_": "{a}.t_()", "transpose_": "{a}.transpose_(0, 1)", "swapaxes_": "torch.Tensor.swapaxes_({a}, 0, -1)",
    "set_": "{a}.set_({a} * -3)", "squeeze_": "{a}.unsqueeze_(0).transpose_(1, 2).squeeze_(0)", "packet": "torch.ops.aten.t_({a})",
}  # fmt: skip
"""Writers of strides and storages; of square values, so that what follows fits."""
HOOKS = (
    ".register_forward_hook(lambda module, args, out: (out.detach().mul_(-3), None)[1])",
    ".register_forward_pre_hook(lambda module, args: (args[0].detach()[..., ::2].mul_(-3), None)[1])",
    ".register_forward_hook(lambda module, args, out: (module.weight.data.mul_(-2), None)[1])",
)
STATISTICS = "F.batch_norm({v}.reshape(-1, {v}.shape[-1]), self.mean, self.var, None, None, True, 0.9)"
"""Writes the buffer `var`, of any width that it fits."""


@dataclasses.dataclass(frozen=True)
class Write:
    """at: behind so many lines of the computation."""

    at: int
    lines: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Program:
    setup: tuple[str, ...]
    lines: tuple[str, ...]
    result: str
    writes: tuple[Write, ...]
    inside: tuple[int, int] | None
    """The lines that a checkpoint's body has, if any."""
    given: str
    """What the body reads."""
    dtype: str
    shape: tuple[int, ...]
    inference: bool
    x_requires_grad: bool
    weights: str
    recipe: str
    codegen: str
    caller_writes: bool = False
    """The last output, behind the call."""

    def body(self) -> list[str]:
        body: list[str] = []
        start, end = self.inside or (-1, -1)
        for i in range(len(self.lines) + 1):
            if i == start:
                body.append(f"def part({self.given}):")
            indent = "    " * (start <= i < end)
            if i == end:
                result = self.lines[end - 1].split(" = ")[0]
                body += [f"    return {result}", f"{result} = checkpoint(part, {self.given}, use_reentrant=False)"]
            body += [indent + line for write in self.writes if write.at == i for line in write.lines]
            body += [indent + line for line in self.lines[i : i + 1]]
        return [*body, f"return {self.result}"]

    def settings(self) -> str:
        """What the source does not say."""
        names = ("dtype", "shape", "inference", "x_requires_grad", "weights", "recipe", "codegen", "caller_writes")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)

    def source(self) -> str:
        setup = textwrap.indent("\n".join(self.setup), " " * 8)
        body = textwrap.indent("\n".join(self.body()), " " * 8)
        return f"{HEADER}class Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n{setup}\n\n    def forward(self, x, r):\n{body}\n"


class _Draw:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.setup = [
            "self.register_buffer('mean', torch.zeros(64))",
            "self.register_buffer('var', torch.rand(64) + 0.5)",
        ]
        self.lines: list[str] = []
        self.number = 0
        self.square = self.random.random() < 0.25
        self.spans: list[tuple[int, int]] = []  # the lines of what may become one operation
        self.values: list[tuple[int, str]] = [(0, "x"), (0, "r"), (0, "self.var")]

    def block(self, table: dict, v: str, k: int, j: int, **names: str) -> str:
        setup, lines = self.random.choice(list(table.values()))
        self.number += 1
        gain = (
            self.random.choice([f"self.g{self.number}", f"self.g{self.number}", "self.var"])
            if k == 64
            else f"self.g{self.number}"
        )
        names = {"n": self.number, "v": v, "k": k, "j": j, "gain": gain, "bias": self.random.random() < 0.5}
        for line in setup:
            self.setup.append(line.format(**names))
            name = line.format(**names).split(" = ")[0]
            if ".Linear" in line or "Norm" in line:
                name += ".weight"
            self.values.append(
                (0, f"self.w{self.number}" if "register" in line else name + ("[0]" if "List" in line else ""))
            )
        if any(gain in line.format(**names) for line in lines) and gain != "self.var":
            self.setup.append(f"{gain} = nn.Parameter(torch.rand({k}))")
            self.values.append((0, gain))
        start = len(self.lines)
        result = self.add([line.format(**names) for line in lines])
        self.spans.append((start, len(self.lines)))
        return result

    def add(self, lines: list[str]) -> str:
        for line in lines:
            self.lines.append(line)
            self.values.append((len(self.lines), line.split(" = ")[0]))
        return self.values[-1][1]

    def activation(self, v: str) -> str:
        self.number += 1
        lines = self.random.choice(list(ACTIVATIONS.values()))
        return self.add([line.format(n=self.number, v=v) for line in lines])

    def layer(self, v: str, width: int) -> str:
        y = self.block(NORMS, v, 64, 64)
        g = self.block(PRODUCTS, y, 64, width)
        form = self.random.choice(["gate", "gate", "chunk", "alone"])
        if form == "gate":
            u = self.block(PRODUCTS, y, 64, width)
        elif form == "chunk":
            self.number += 1
            u = self.add([f"f{self.number} = {g}.chunk(2, -1)[1].repeat_interleave(2, -1)"])
        start = len(self.lines)
        a = self.activation(g)
        if form != "alone":
            self.number += 1
            a = self.add([f"k{self.number} = {a} * {u}"])
        self.spans.append((start, len(self.lines)))
        d = self.block(PRODUCTS, a, width, 64)
        self.number += 1
        return self.add([f"v{self.number} = {v} + {d}" if self.random.random() < 0.5 else f"v{self.number} = {d} * 1"])

    def write(self, inference: bool, inside: tuple[int, int] | None) -> Write:
        spans = [(i, j) for i, j in self.spans if j - i > 1]
        start, end = self.random.choice(spans) if spans and self.random.random() < 0.75 else (0, len(self.lines))
        at = self.random.randint(start + 1, end - 1) if end - start > 1 else start
        there = [(i, v) for i, v in self.values if i <= at]
        if inside and inside[0] <= at < inside[1]:
            there = [(i, v) for i, v in there if i > inside[0]] or [(0, "x.clone()")]
        elif inside:
            there = [(i, v) for i, v in there if not inside[0] < i < inside[1]]
        read = set(re.findall(r"[\w.]+", "\n".join(self.lines[start:end])))
        of_span = [(i, v) for i, v in there if v in read or v.removesuffix(".weight").removesuffix("[0]") in read]
        v = self.random.choice(of_span if of_span and self.random.random() < 0.9 else there)[1]
        if self.random.random() < 0.04 and not self.square:
            return Write(at, (STATISTICS.format(v="x"),))
        weight = v.startswith("self.") and v != "self.var"
        if self.square and not weight and self.random.random() < 0.3:
            return Write(at, (self.random.choice(list(FORMS.values())).format(a=v),))
        kind, alias = self.random.choice(list(ALIASES.items()))
        writer = self.random.choice(list(WRITERS.values()))
        hidden = kind in ("chunk", "split", "unbind") or (weight and not inference)  # autograd lets nobody write these
        untracked = self.random.choice(UNTRACKED[1:] if hidden else (*UNTRACKED, ".data"))
        sure = untracked or ("" if inference else ".detach()")
        a, u = alias.format(v=v + untracked), alias.format(v=v + sure)
        text = writer.format(a=a, u=u, b=f"{v}.detach().clone()", v=v)
        return Write(at, tuple(text.split("\n")))


def drawn(seed: int) -> Program:
    """The program of that number."""
    draw = _Draw(seed)
    choice = draw.random.choice
    v = "x"
    if draw.random.random() < 0.3:
        v = draw.add(["b0 = x + r"])
    starts = []
    for _ in range(choice([1, 1, 2])):
        starts.append((len(draw.lines), v))
        v = draw.layer(v, 64 if draw.square else choice([64, 128]))
    inside = given = None
    if draw.random.random() < 0.2:
        start, given = choice(starts)
        later = [s for s, _ in starts if s > start]
        inside = (start, later[0] if later else len(draw.lines))
    inference = draw.random.random() < 0.4
    writes = sorted((draw.write(inference, inside) for _ in range(choice([1, 1, 2, 3]))), key=lambda w: w.at)
    shown = [name for at, name in draw.values if at and not (inside and inside[0] < at < inside[1])]
    result = ", ".join(dict.fromkeys([v, *draw.random.sample(shown, min(2, len(shown)))]))
    if draw.random.random() < 0.15:  # hooks of a module that write
        linears = [line.split(" = ")[0] for line in draw.setup if "nn.Linear" in line]
        if linears:
            name = choice(linears)
            draw.setup.append(name + choice(HOOKS))
    return Program(
        tuple(draw.setup), tuple(draw.lines), result, tuple(writes), inside, given or "x",
        dtype=choice(["torch.float32", "torch.float32", "torch.bfloat16"]),
        shape=(64, 64) if draw.square else choice([(2, 16, 64), (32, 64), (2, 16, 64)]),
        inference=inference, x_requires_grad=draw.random.random() < 0.5,
        weights=choice(["", "", "step", "freeze"] if inference else ["", "", "step"]),
        recipe=choice(["float8_current_scaling", "float8_current_scaling", "mxfp8"]),
        codegen="eager" if draw.random.random() < 0.95 else "inductor", caller_writes=draw.random.random() < 0.1,
    )  # fmt: skip
