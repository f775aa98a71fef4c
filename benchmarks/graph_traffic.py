"""GEMMs, kernels and bytes of a training step of one layer, with and without the fusions, counted from graphs: no GPU.

    python benchmarks/graph_traffic.py
    python benchmarks/graph_traffic.py --models Gemma,Whisper

The models are those of coverage.py with one layer, embedding and head included, and a block of DiT-XL/2. Counted in the graphs of forward
and backward that are made for an H200:

    gemms     products by a linear's operands, in FP8 or in 16 bits
    te        other te operations: quantizations, norms, activations
    others    what is left to Inductor, at best: neighbouring operations are one kernel; attention, a convolution, an embedding's lookup
              and its gradient are one each
    gib       bytes that all of these read and write once
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import warnings
from collections.abc import Iterable
from typing import Any

import report
import torch
from coverage import ARCHITECTURES, build
from environment import collect
from models import DiTBlock
from torch import fx, nn
from torch._higher_order_ops.triton_kernel_wrap import TritonKernelWrapperFunctional, TritonKernelWrapperMutation

PRODUCTS = ("te.gemm", "te.grouped_gemm", "aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.")
ALONE = ("scaled_dot_product", "convolution", "embedding", "index_put")
FREE = (
    "view",
    "reshape",
    "permute",
    "transpose",
    "expand",
    "unsqueeze",
    "squeeze",
    "slice",
    "select",
    "split",
    "alias",
)
FREE = (
    *FREE,
    "t.default",
    "detach",
    "getitem",
    "unbind",
    "as_strided",
    "_to_copy_view",
    "sym_size",
    "new_empty",
    "empty",
)
MODELS = ("GPT2", "Gemma", "Whisper", "CLIP", "DiT")
FUSIONS = {"with fusions": True, "without": False}


@dataclasses.dataclass(frozen=True)
class Row:
    model: str
    fusions: str
    gemms: int
    te: int
    others: int
    gib: float


class Named(nn.Module):
    """A model called with its keyword arguments in order."""

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        super().__init__()
        self.model, self.names = model, tuple(names)

    def forward(self, *args: Any) -> Any:
        return tuple(
            value
            for value in self.model(**dict(zip(self.names, args, strict=True))).values()
            if isinstance(value, torch.Tensor)
        )


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help="of: %(default)s")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    report.split_choices(parser, args, models=MODELS)
    cases = [(model, fusions) for model in args.models for fusions in FUSIONS]
    with concurrent.futures.ProcessPoolExecutor(args.workers, max_tasks_per_child=1) as pool:
        rows = list(pool.map(row_of, *zip(*cases, strict=True)))
    report.write(args.out, "graph_traffic", {**collect("cpu"), "device": "H200, simulated"}, rows)


def row_of(name: str, fusions: str) -> Row:
    """The counts of one model's step."""
    from te_dynamo.testing import capture_on_fake_cuda

    warnings.simplefilter("ignore")
    model, inputs = make(name)
    graphs = capture_on_fake_cuda(
        lambda: model,
        lambda device: tuple(
            torch.empty(x.shape, dtype=x.dtype, device=device, requires_grad=x.requires_grad) for x in inputs
        ),
        options={"fusions": FUSIONS[fusions], "codegen": "eager"},
    )
    counted = [
        count(graphs.graph(phase, i)) for phase in ("forward", "backward") for i in range(len(graphs.all(phase)))
    ]
    gemms, te, others, nbytes = map(sum, zip(*counted, strict=True))
    return Row(name, fusions, gemms, te, others, nbytes / 2**30)


def make(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """(the model, its positional arguments), on the device meta."""
    if name == "DiT":
        with torch.device("meta"):
            return DiTBlock(1152, 16).bfloat16(), (
                torch.zeros(32, 256, 1152, dtype=torch.bfloat16, requires_grad=True),
            )
    model, kwargs = build(next(found for found in ARCHITECTURES if found.name == name), layers=1)
    return Named(model, kwargs), tuple(kwargs.values())


def count(graph: fx.Graph) -> tuple[int, int, int, int]:
    """(GEMMs, other te operations, kernels left to Inductor at best, bytes of all of them)"""
    gemms = te = others = nbytes = 0
    group: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op != "call_function" or is_free(node):
            continue
        name = str(node.target)
        ours, product = name.startswith("te."), name.startswith(PRODUCTS)
        if is_launch(node):
            te, nbytes = te + 1, nbytes + bytes_of(launched(node))
            continue
        if ours or product or any(word in name for word in ALONE):
            gemms, te, others = gemms + product, te + (ours and not product), others + (not ours and not product)
            read = [] if name.startswith("te.hints") else node.all_input_nodes  # of that only the device
            nbytes += bytes_of([node, *{source(x) for x in read}])
            continue
        merged = [node]
        for neighbour in {source(x) for x in node.all_input_nodes} & group.keys():
            merged += [member for member in group[neighbour] if member not in merged]
        for member in merged:
            group[member] = merged
    for members in {id(found): found for found in group.values()}.values():
        inside = set(members)
        read = {source(x) for member in members for x in member.all_input_nodes} - inside
        written = [member for member in members if any(reader not in inside for reader in readers(member))]
        others, nbytes = others + 1, nbytes + bytes_of([*read, *written])
    return gemms, te, others, nbytes


def is_launch(node: fx.Node) -> bool:
    return isinstance(node.target, (TritonKernelWrapperMutation, TritonKernelWrapperFunctional))


def launched(node: fx.Node) -> set[fx.Node]:
    """The tensors that a launch of a lowered graph reads and writes; one that mends, where nothing is to be mended."""
    given = node.kwargs["kwargs"]
    names = [name for name in given if given.get("PASS") != "mend" or "partials" in name]
    return {given[name] for name in names if isinstance(given[name], fx.Node)}


def is_free(node: fx.Node) -> bool:
    """Whether it launches nothing: a view, an item of several results, a size."""
    name = str(node.target)
    return any(word in name for word in FREE) and not name.startswith("te.")


def source(node: fx.Node) -> fx.Node:
    """What a view views."""
    while node.op == "call_function" and is_free(node) and node.all_input_nodes:
        if "getitem" in str(node.target):
            return node
        node = node.all_input_nodes[0]
    return node


def readers(node: fx.Node) -> Iterable[fx.Node]:
    for user in node.users:
        if user.op == "call_function" and is_free(user):
            yield from readers(user)
        else:
            yield user


def bytes_of(nodes: Iterable[fx.Node]) -> int:
    values = [node.meta.get("val") for node in nodes]
    tensors = [x for value in values for x in (value if isinstance(value, (list, tuple)) else [value])]
    return sum(x.numel() * x.element_size() for x in tensors if isinstance(x, torch.Tensor))


if __name__ == "__main__":
    main()
