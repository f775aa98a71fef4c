"""Small models drawn by hypothesis, each of which prints as a program: the program, and the strategies."""

from __future__ import annotations

import dataclasses
import linecache
import textwrap
from collections.abc import Callable
from typing import Any

import torch
from helpers.fuzz.fuzz_blocks import (
    ACTIVATIONS,
    GATES,
    IN_PLACE,
    NORM_MODULES,
    NORMS,
    STRIDED,
    STYLES,
    VIEWS,
    Around,
    Expression,
    Gated,
    InPlace,
    Linear,
    LinearCall,
    Norm,
    Shared,
    Twice,
    Writer,
)
from hypothesis import strategies as st
from torch import nn

FILE = "fuzz_program.py"
"""The name under which a program's lines are known to tracebacks, and so to the records of what was matched."""

HEADER = """\
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

"""


OUTPUTS = {
    "one": "{y}",
    "and the input": "{y}, x",
    "and one between": "{y}, {first}",
    "twice": "{y}, {y}",
    "and detached": "{y} * 1, {y}.detach()",
    "and a view": "{y}, {y}.reshape(-1)",
    "in a dict": "{{'y': {y}, 'first': {first}}}",
}

RECIPES = {
    "'float8_current_scaling'": "float8_current_scaling",
    "Float8CurrentScaling(backward='high_precision')": "float8_current_scaling(backward='high_precision')",
    "'float8_block_scaling'": "float8_block_scaling",
    "'mxfp8'": "mxfp8",
    "MXFP8BlockScaling(scale_block=128)": "mxfp8(scale_block=128)",
    "NVFP4BlockScaling(stochastic_rounding=False)": "nvfp4(stochastic_rounding=False)",
    "MXFP8BlockScaling(backward='high_precision')": "mxfp8(backward='high_precision')",
}
"""As a user writes them, and as the records name them. Stochastic rounding is left out: nothing is compared bit by bit there."""

UPDATES = {
    "none": "",
    "in place": "for p in model.parameters(): p.mul_(0.5).add_(0.125)",
    "SGD": "torch.optim.SGD(model.parameters(), lr=0.05)",
    "AdamW": "torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3)",
    "AdamW fused": "torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3, fused=True)",
}


@dataclasses.dataclass(frozen=True)
class Program:
    """A model, its inputs and how it is compiled."""

    blocks: tuple[Any, ...]
    width: int = 32
    leading: tuple[tuple[int, ...], ...] = ((24,),)
    dtype: str = "torch.float32"
    autocast: bool = False
    input_requires_grad: bool = True
    inference: bool = False
    dynamic: bool | None = None
    recipe: str = "'float8_current_scaling'"
    rules: str = "[]"
    update: str = "none"
    outputs: str = "one"

    def written(self, oracle: bool) -> tuple[str, list[LinearCall]]:
        """The source of class Model, and its linears with their lines in it."""
        w = Writer(oracle, not self.input_requires_grad)
        x, k = "x", self.width
        first = x
        for index, block in enumerate(self.blocks):
            x, k = block.write(w, x, k)
            first = x if index == 0 else first
        w.line(f"return {OUTPUTS[self.outputs].format(y=x, first=first)}")
        head = HEADER + "class Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        head += textwrap.indent("\n".join(w.setup), " " * 8) + "\n\n    def forward(self, x):\n"
        start = head.count("\n") + 1
        calls = [dataclasses.replace(call, line=start + call.line) for call in w.linears]
        return head + textwrap.indent("\n".join(w.body), " " * 8) + "\n", calls

    def model(self, oracle: Callable[..., Any] | None = None) -> nn.Module:
        """The model, seeded. oracle: what computes `linear(number, x, weight, bias)`; the model is then the oracle's."""
        source, _ = self.written(oracle is not None)
        file = FILE if oracle is None else f"oracle_{FILE}"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        namespace: dict[str, Any] = {"linear": oracle, "__name__": "fuzz_program"}
        exec(compile(source, file, "exec"), namespace)
        torch.manual_seed(0)
        model = namespace["Model"]()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.startswith("norm") or name.endswith("bias"):  # ones and zeros would hide a lost factor
                    parameter.add_(0.25 * torch.randn_like(parameter))
        return model.to(torch.float64 if oracle is not None else self.torch_dtype)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype.removeprefix("torch."))

    @property
    def rounds_to(self) -> torch.dtype:
        """The coarsest dtype that any of its values is in."""
        return torch.bfloat16 if self.autocast else self.torch_dtype

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:
        text = UPDATES[self.update]
        return eval(text, {"torch": torch, "model": model}) if "optim" in text else None

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """The update after a step."""
        if optimizer is not None:
            optimizer.step()
        elif UPDATES[self.update]:
            with torch.no_grad():
                exec(UPDATES[self.update], {"model": model})

    def script(self, **options: str) -> str:
        """The whole as a program that runs by itself, compiled with `options` beside its own."""
        source, _ = self.written(False)
        given = {"recipe": self.recipe, "rules": self.rules, "codegen": "'eager'", **options}
        lines = [
            "torch.manual_seed(0)",
            f"model = Model().to({self.dtype})",
            "with torch.no_grad():",
            "    for name, p in model.named_parameters():",
            "        if name.startswith('norm') or name.endswith('bias'): p.add_(0.25 * torch.randn_like(p))",
            f"options = {{{', '.join(f'{name!r}: {value}' for name, value in given.items())}}}",
            f"compiled = torch.compile(model, backend='te', dynamic={self.dynamic}, options=options)",
            *([f"optimizer = {UPDATES[self.update]}"] if "optim" in UPDATES[self.update] else []),
            f"for step, leading in enumerate({self.leading}):",
            "    torch.manual_seed(step)",
            f"    x = torch.randn(*leading, {self.width})",
            f"    x.view(-1, {self.width})[-1:] *= 3",
            f"    x = x.to({self.dtype}).requires_grad_({self.input_requires_grad})",
            f"    with torch.autocast('cpu', torch.bfloat16, enabled={self.autocast}), torch.set_grad_enabled({not self.inference}):",
            "        out = compiled(x)",
            "    out = [y for y in torch.utils._pytree.tree_leaves(out) if y.requires_grad]",
            "    if out: torch.autograd.backward(out, [torch.randn_like(y) for y in out])",
        ]
        if "optim" in UPDATES[self.update]:
            lines.append("    optimizer.step(); optimizer.zero_grad()")
        elif UPDATES[self.update]:
            lines += ["    with torch.no_grad():", f"        {UPDATES[self.update]}"]
        recipes = "from te_dynamo.recipe import Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling\n\n"
        return source.replace("import checkpoint\n", "import checkpoint\n" + recipes) + "\n".join(["", *lines, ""])


# ---- strategies

_widths = st.sampled_from([32, 16, 64, 128, 48, 24, 20, 7])
_aligned = st.sampled_from([32, 64, 128, 16, 256])
_styles = st.sampled_from(list(STYLES))
_linears = st.builds(
    Linear,
    n=st.one_of(_aligned, _aligned, _aligned, _widths),
    style=_styles,
    bias=st.booleans(),
    frozen=st.sampled_from(["", "", "", "weight", "bias", "both"]),
    tied=st.booleans(),
)
_shared = st.builds(
    Shared,
    first=_linears,
    others=st.lists(st.tuples(_styles, st.booleans()), min_size=1, max_size=2).map(tuple),
    join=st.sampled_from(["sum", "product", "cat", "attention"]),
)
_plain_shared = st.builds(
    Shared,
    first=st.builds(Linear, n=st.sampled_from([128, 32, 256]), style=st.sampled_from(["module", "F.linear"])),
    others=st.lists(st.just(("module", False)), min_size=1, max_size=2).map(tuple),
    join=st.sampled_from(["sum", "product", "attention"]),
)
_gated = st.builds(
    Gated,
    n=_aligned,
    activation=st.sampled_from([*GATES, "F.silu", "written silu"]),
    form=st.sampled_from(["two", "two", "chunk", "split", "slices", "unflatten"]),
    style=st.one_of(st.just("module"), st.just("module"), _styles),
    bias=st.booleans(),
)
_expressions = st.sampled_from([*map(Expression, ACTIVATIONS.values()), *map(Expression, VIEWS.values())])
_activations = st.sampled_from([*map(Expression, ACTIVATIONS.values())])
_norms = st.builds(Norm, st.sampled_from([*NORM_MODULES, *NORMS]))
_with_linears = st.one_of(
    _linears, _gated, _shared, _plain_shared, st.builds(Twice, st.sampled_from(["", *ACTIVATIONS]))
)
_strided = st.sampled_from([*map(Expression, STRIDED.values())])
_between = st.one_of(_activations, _norms, _expressions, _strided, st.sampled_from([*map(InPlace, IN_PLACE)]))
_leaves = st.one_of(_with_linears, _between, _with_linears)


def _nested(blocks: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    kinds = st.sampled_from(["residual", "in place", "both", "detach", "no_grad", "checkpoint"])
    return st.builds(Around, kinds, st.lists(blocks, min_size=1, max_size=2).map(tuple))


_blocks = st.one_of(_leaves, _leaves, _nested(st.one_of(_leaves, _nested(_leaves))))
_leading = st.sampled_from([(24,), (2, 12), (1,), (3, 5), (1, 1), (2, 65), (160,), (2, 2, 4), (0,), ()])
_rules = st.sampled_from(["[]", "[]", "[]", "[('lin', None)]", "[('1', 'mxfp8')]", "[('lin', 'float8_block_scaling')]"])


@st.composite
def programs(draw: st.DrawFn, most_around: int = 2, most_steps: int = 3) -> Program:
    """Programs of a block with a linear, and up to so many blocks before and behind it."""
    linear = draw(_with_linears)
    before, after = (draw(st.lists(_blocks, max_size=most_around)) for _ in range(2))
    dtype = draw(st.sampled_from(["torch.float32", "torch.float32", "torch.bfloat16", "torch.float16"]))
    leading = draw(_leading)
    longer = draw(st.sampled_from([leading, leading, (*leading[:-1], 40)]))
    steps = draw(st.integers(1, most_steps))
    return Program(
        blocks=(*before, linear, *after),
        width=draw(st.one_of(_aligned, _aligned, _widths)),
        leading=(leading, longer, leading)[:steps],
        dtype=dtype,
        autocast=dtype == "torch.float32" and draw(st.sampled_from([False, False, True])),
        input_requires_grad=draw(st.sampled_from([True, True, False])),
        inference=draw(st.sampled_from([False] * 7 + [True])),
        dynamic=draw(st.sampled_from([None, None, True])),
        recipe=draw(st.sampled_from(list(RECIPES))),
        rules=draw(_rules),
        update=draw(st.sampled_from(list(UPDATES))) if steps > 1 else "none",
        outputs=draw(st.sampled_from(list(OUTPUTS))),
    )
