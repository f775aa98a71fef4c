"""What one pass saves, counted without a GPU: launches and bytes of a block's step, and how often a guess would be wrong.

    python benchmarks/one_pass.py                    # of a step of blocks, in the lowered graphs for an H200, beside the products
    python benchmarks/one_pass.py --steps 500        # trains the small model of examples/train_text.py: share of changed exponents

A tensor counts once a launch that reads or writes it; a launch that mends reads partial amaxes alone, as its guess held. Of training, amaxes
are those of unquantized x, weight and dy of each linear, in bf16.
"""

from __future__ import annotations

import collections
import pathlib
import sys
import warnings
from argparse import Namespace
from unittest import mock

import report
import torch
from graph_traffic import PRODUCTS, bytes_of, count, is_launch, launched, source
from models import BLOCKS
from torch import nn

from te_dynamo.kernels.quantize.current import scale_reference
from te_dynamo.kernels.runtime import availability
from te_dynamo.recipe import Float8CurrentScaling

RECIPES = {
    "two passes": Float8CurrentScaling(power_of_two_scales=True),
    "one pass": Float8CurrentScaling(power_of_two_scales=True, one_pass=True),
}


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--blocks", default="swiglu,gelu,llama8b", help="of: %(default)s")
    parser.add_argument("--steps", type=int, help="of training; without, blocks are counted")
    args = parser.parse_args()
    if args.steps:
        for kind, share in changed_exponents(args.steps).items():
            print(f"{kind:8} {share:.2%}")
        return
    for name in args.blocks.split(","):
        counted = {how: traffic(name, how) for how in RECIPES}
        for how, (launches, nbytes, others) in counted.items():
            ratio = nbytes / counted["two passes"][1]
            print(
                f"{name:8} {how:10} {launches:3} launches {nbytes / 1e6:6.0f} MB {ratio:.3f}, beside {others / 1e6:.0f} MB"
            )


def traffic(name: str, how: str) -> tuple[int, int, int]:
    """Of a step beside the products: (our launches, their bytes, those of Inductor's kernels, attention among them)."""
    from te_dynamo.testing import capture_on_fake_cuda

    warnings.simplefilter("ignore")
    torch._dynamo.reset()
    with torch.device("meta"):
        module = BLOCKS[name].make().bfloat16()
    available = mock.patch.object(availability, "kernels_available", lambda device: availability.Availability(True))
    with available:
        graphs = capture_on_fake_cuda(
            lambda: module,
            lambda device: (torch.empty(BLOCKS[name].shape, dtype=torch.bfloat16, device=device, requires_grad=True),),
            options={"recipe": RECIPES[how]},
        )
    launches = nbytes = total = 0
    for phase in ("lower.forward", "lower.backward"):
        for i in range(len(graphs.all(phase))):
            graph = graphs.graph(phase, i)
            _, ours, _, all_bytes = count(graph)
            products = [node for node in graph.nodes if str(node.target).startswith(PRODUCTS)]
            total += all_bytes - sum(bytes_of([node, *{source(x) for x in node.all_input_nodes}]) for node in products)
            nbytes += sum(bytes_of(launched(node)) for node in graph.nodes if is_launch(node))
            launches += ours
    return launches, nbytes, total - nbytes


# --- how often an exponent changes ------------------------------------------------------------------------------


def changed_exponents(steps: int) -> dict[str, float]:
    """By kind of tensor, the share of its quantizations whose scale is not the one of the step before."""
    sys.path.append(str(pathlib.Path(__file__).parents[1] / "examples"))
    import train_text
    from byte_text import english

    settings = {**train_text.DEFAULTS["cpu"], "steps": steps, "hidden": 128, "seq": 64}
    args = Namespace(**settings, device="cpu", dtype=torch.bfloat16, seed=0, seeds=1)
    model = train_text.build_model(args, 0)
    last: dict[tuple[str, str], float] = {}
    found: dict[str, list[bool]] = collections.defaultdict(list)
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            watch(module, path, last, found)
    train_text.train("bf16", 0, model, model, english(args.text_bytes), args)
    return {kind: sum(changed) / len(changed) for kind, changed in found.items()}


def watch(module: nn.Linear, path: str, last: dict[tuple[str, str], float], found: dict[str, list[bool]]) -> None:
    """Notes in `found` whether the scales of a linear's tensors are those in `last`."""

    def note(kind: str, x: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> None:
        scale = scale_reference(x.detach().abs().amax().float(), dtype, True, 0.0).item()
        if (path, kind) in last:
            found[kind].append(last[path, kind] != scale)
        last[path, kind] = scale

    def forward(module: nn.Linear, given: tuple[torch.Tensor, ...]) -> None:
        if torch.is_grad_enabled():
            note("x", given[0])
            note("weight", module.weight)

    module.register_forward_pre_hook(forward)
    module.register_full_backward_hook(lambda module, _, dy: note("dy", dy[0], torch.float8_e5m2))


if __name__ == "__main__":
    main()
