"""What a checkpoint of FP8 weights gains: forward at few and many tokens, and a training step of LoRA adapters.

    python benchmarks/checkpoint.py                                       # 4 Llama-8B blocks, 1 to 4096 tokens
    python benchmarks/checkpoint.py --quick --device cpu                  # does it run?
    python benchmarks/checkpoint.py --parts forward --recipes float8_block_scaling --tokens 1,16
    python benchmarks/checkpoint.py --case llama8b_block --parts lora --providers te,dequantized

`save_checkpoint` writes the bf16 model into a file in each recipe, `load_checkpoint` reads it, and backend "te" multiplies the file's codes.
Providers are compiled for all numbers of tokens first, then timed in turn with a cold L2, beside the bf16 model on Inductor. Errors are
relative Frobenius norms against bf16's, and have the rounding of the weights in them.

Forward: `plain` calls the model and waits for the CPU's launches too, `graph` replays a CUDA graph of the call. `tokens per second` is of
these blocks by `graph`. `weights MiB` is what loading allocates.

LoRA: a step is forward and backward with gradients of rank-16 adapters, on all linears, and of the input. All providers but bf16 have the
file of form "fp8", 128x128 blocks. `transformers` is its FP8Linear, which may take its kernels from the hub. `dequantized` multiplies in
bf16, by weights that each forward and each backward dequantizes. The peak counts weights, adapters, gradients, input, output and all that
the step allocates; `above weights MiB` is the peak without weights and adapters.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import gc
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import environment
import inference
import report
import torch
import train_blocks
from inference import REFERENCE, Candidate, layers, module_width, replayed
from models import Block, llama_block
from torch import nn
from train_blocks import Inputs, answer, cold_caches, memory, peak_memory, relative_error, training_step

import te_dynamo

FORMS = {
    "float8_block_scaling": "fp8",  # as DeepSeek and Qwen have it
    "float8_rowwise": "compressed-tensors",
    "float8_current_scaling": "compressed-tensors",
}
LORA_RECIPE = "float8_block_scaling"
RANK, ALPHA = 16, 32

CASES = {
    "llama8b": Block("4 Llama-8B blocks", layers(4, lambda: llama_block(4096, 14336, 32, 8)), (1, 4096, 4096)),
    "llama8b_block": Block("Llama-8B block", layers(1, lambda: llama_block(4096, 14336, 32, 8)), (1, 4096, 4096)),
    "tiny": Block("tiny Llama block", layers(1, lambda: llama_block(256, 512, 2, 1)), (1, 32, 256)),
}


@dataclasses.dataclass
class Row(inference.Row):
    """Forward by one provider, with how many tokens these blocks pass in a second."""

    tokens_per_second: float | None = None


@dataclasses.dataclass
class LoraRow(train_blocks.Row):
    """A training step of adapters by one provider. Gradients are those of adapters and of the input."""

    weights_mib: float | None = None
    above_weights_mib: float | None = None


def allocated(make: Callable[[], nn.Module], device: torch.device) -> tuple[nn.Module, float | None]:
    """What is made and the MiB that it holds, None on a CPU."""
    gc.collect()
    before = memory(device)
    made = make()
    gc.collect()
    return made, (memory(device) - before) / 2**20 if device.type == "cuda" else None


def loaded(base: nn.Module, folder: pathlib.Path) -> nn.Module:
    return te_dynamo.load_checkpoint(copy.deepcopy(base), folder)


def compile_te(module: nn.Module) -> Callable[..., Any]:
    return torch.compile(module, backend="te")


# --- models ---------------------------------------------------------------------------------------------------


def dequantized(codes: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    """bf16 [N, K] of e4m3 codes [N, K] and fp32 scales [N / 128, K / 128]."""
    blocks = codes.float().unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    return (blocks * scale_inv[:, None, :, None]).bfloat16().flatten(2).flatten(0, 1)


class DequantizedProduct(torch.autograd.Function):
    """Backward dequantizes again, so that no bf16 weight lives from forward to backward: as transformers' FP8Linear has it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, codes: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(codes, scale_inv)
        return x @ dequantized(codes, scale_inv).t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad @ dequantized(*ctx.saved_tensors), None, None


class DequantizedLinear(nn.Linear):
    """A linear of a DeepSeek file: `weight` in e4m3 and `weight_scale_inv`."""

    def __init__(self, like: nn.Linear) -> None:
        super().__init__(like.in_features, like.out_features, bias=False, device="meta")
        n, k = self.weight.shape
        self.weight_scale_inv = nn.Parameter(torch.empty(n // 128, k // 128, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return DequantizedProduct.apply(x, self.weight, self.weight_scale_inv)


def with_dequantized_linears(model: nn.Module) -> None:
    for name, module in [*model.named_modules()]:
        if isinstance(module, nn.Linear):
            model.set_submodule(name, DequantizedLinear(module))


def with_transformers_linears(model: nn.Module) -> None:
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    replace_with_fp8_linear(model, quantization_config=FineGrainedFP8Config(), pre_quantized=True)


def of_the_file(replace: Callable[[nn.Module], None]) -> Callable[[nn.Module, pathlib.Path], nn.Module]:
    """Other linears than te_dynamo's, which hold the file's tensors under the file's names."""

    def make(base: nn.Module, folder: pathlib.Path) -> nn.Module:
        from te_dynamo.weights.checkpoint.files import Files

        model, device = copy.deepcopy(base), next(base.parameters()).device
        replace(model)
        model.load_state_dict({name: tensor.to(device) for name, tensor in Files(folder).items()}, assign=True)
        return model

    return make


PROVIDERS: dict[str, tuple[Callable[[nn.Module, pathlib.Path], nn.Module], Callable[[nn.Module], Callable]]] = {
    REFERENCE: (lambda base, folder: copy.deepcopy(base), torch.compile),
    "te": (loaded, compile_te),
    "dequantized": (of_the_file(with_dequantized_linears), torch.compile),
    "transformers eager": (of_the_file(with_transformers_linears), lambda module: module),
    "transformers compiled": (of_the_file(with_transformers_linears), torch.compile),
}
"""How each makes the model, without adapters, and how it compiles it."""


# --- forward --------------------------------------------------------------------------------------------------


def prepare(folders: dict[str, pathlib.Path], tokens: list[int], provider: str, base: nn.Module) -> Candidate:
    """Compiled for each number of tokens, and seen to run, in a CUDA graph too. folders: of the providers that have a file."""
    device = next(base.parameters()).device
    make, compile_ = PROVIDERS["te" if provider in folders else provider]
    module, held = allocated(lambda: make(base, folders.get(provider)), device)
    call = compile_(module)
    for count in tokens:
        x = torch.randn(1, count, module_width(base), device=device, dtype=torch.bfloat16)
        with torch.no_grad():
            replayed(call, x) if x.is_cuda else call(x)
    return Candidate(provider, call, held)


def tokens_per_second(row: inference.Row) -> Row:
    us = row.graph_us or row.plain_us
    return Row(**vars(row), tokens_per_second=us and row.tokens / us * 1e6)


# --- LoRA -----------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """What peft makes of a linear, where peft is not installed."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, RANK, bias=False)
        self.lora_B = nn.Linear(RANK, base_layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x)) * (ALPHA / RANK)


def adapt(model: nn.Module, device: torch.device) -> nn.Module:
    """Adapters on all linears, in bf16 and with the same values for every provider; nothing else gets a gradient."""
    model.requires_grad_(False)
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    try:
        import peft

        config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=names)
        model = peft.inject_adapter_in_model(config, model)
    except ImportError:
        for name in names:
            model.set_submodule(name, Adapted(model.get_submodule(name)))
    generator = torch.Generator(device).manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            values = torch.randn(parameter.shape, generator=generator, device=device, dtype=torch.bfloat16)
            parameter.data = values * 0.01
    return model


def prepare_lora(
    folder: pathlib.Path, case: Block, provider: str, base: nn.Module, inputs: Inputs, reference: Any
) -> tuple[train_blocks.Candidate, Any]:
    """Compiles, measures memory and checks the numbers. Raises what the provider raises. folder: of the file."""
    device, row = inputs.x.device, LoraRow(case.title, provider)
    make, compile_ = PROVIDERS[provider]
    inputs.x.grad = None
    others = memory(device) - inputs.nbytes()
    module, row.weights_mib = allocated(lambda: adapt(make(base, folder), device), device)
    compiled = compile_(module)
    step = training_step(module, compiled, inputs)
    step()
    row.peak_mib = peak_memory(step, device, others)
    if row.peak_mib is not None and row.weights_mib is not None:
        row.above_weights_mib = row.peak_mib - row.weights_mib
    output, gradients = answer(module, compiled, inputs)
    assert inputs.x.grad is not None
    got = [output], [gradients, inputs.x.grad]
    reference = reference or got
    row.output_error, row.grad_error = (relative_error(*pair) for pair in zip(got, reference, strict=True))
    if max(row.output_error, row.grad_error) > train_blocks.LARGEST_ERROR:
        raise ArithmeticError(f"output error {row.output_error:.3f}, gradient error {row.grad_error:.3f} against bf16")
    return train_blocks.Candidate(row, step), reference


def parse_args() -> argparse.Namespace:
    parser = report.parser(__doc__, "a tiny block, 1 and 16 tokens, one round")
    parser.add_argument("--case", default="llama8b", choices=CASES)
    parser.add_argument("--parts", default=",".join(PARTS), help="of: %(default)s")
    parser.add_argument("--recipes", default=",".join(FORMS), help="of a forward, of: %(default)s")
    parser.add_argument("--tokens", default="1,16,64,512,4096", help="of a forward")
    parser.add_argument("--providers", default=",".join(PROVIDERS), help="of LoRA: %(default)s; bf16 always runs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    report.split_choices(parser, args, parts=PARTS, recipes=FORMS, providers=PROVIDERS)
    args.providers = [REFERENCE] + [p for p in args.providers if p != REFERENCE]
    args.tokens = [int(count) for count in args.tokens.split(",")]
    if args.quick:
        args.case, args.tokens, args.rounds = "tiny", [1, 16], 1
    return args


def forward(args: argparse.Namespace, facts: dict[str, str], case: Block, parent: pathlib.Path) -> None:
    folders = {recipe.removeprefix("float8_"): saved(case.make(), parent, recipe) for recipe in args.recipes}
    rows = inference.measure(
        (case.name, case.make),
        args.tokens,
        [REFERENCE, *folders],
        args.rounds,
        args.device,
        prepare=functools.partial(prepare, folders, args.tokens),
    )
    report.write(args.out, "checkpoint", facts, list(map(tokens_per_second, rows)), rounds=args.rounds)


def lora(args: argparse.Namespace, facts: dict[str, str], case: Block, parent: pathlib.Path) -> None:
    prepared = functools.partial(prepare_lora, saved(case.make(), parent, LORA_RECIPE))
    found = train_blocks.measure_block(case, args.providers, args.rounds, args.device, prepared)
    rows = [row if isinstance(row, LoraRow) else LoraRow(**vars(row)) for row in found]
    report.write(args.out, "checkpoint", facts, rows, "checkpoint_lora", rounds=args.rounds)


PARTS = {"forward": forward, "lora": lora}


def saved(model: nn.Module, parent: pathlib.Path, recipe: str) -> pathlib.Path:
    """The folder with the model in a recipe."""
    folder = parent / recipe
    if not folder.exists():
        te_dynamo.save_checkpoint(model, folder, FORMS[recipe], recipe=recipe)
    return folder


def main() -> None:
    args = parse_args()
    cold_caches()
    torch._dynamo.config.recompile_limit = 64  # all providers compile the same forward method
    torch._dynamo.config.automatic_dynamic_shapes = False  # each number of tokens has its own tiles
    facts = environment.collect(args.device) | {name: environment.version(name) for name in ("transformers", "peft")}
    torch.manual_seed(0)
    with torch.device(args.device):
        base = CASES[args.case].make().bfloat16().requires_grad_(False)
    case = dataclasses.replace(CASES[args.case], make=lambda: base)
    with tempfile.TemporaryDirectory() as parent:
        for part in args.parts:
            PARTS[part](args, facts, case, pathlib.Path(parent))
            torch._dynamo.reset()
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
