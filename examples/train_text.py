"""Trains a Hugging Face Llama twice on the same bytes, in bf16 and in a recipe, and compares the two.

    python examples/train_text.py                   # FP8; a GPU when there is one, else a small model on the CPU
    python examples/train_text.py --recipe mxfp8    # or float8_block_scaling, nvfp4, mxfp8-128 (one scale for 128 values)
    python examples/train_text.py --recipe float8_current_scaling,float8_block_scaling,mxfp8-128 --steps 500
    python examples/train_text.py --seeds 3 --recipe float8_current_scaling,bf16-eager

The model is transformers' own class, unchanged. The only difference between the runs is the backend given to
`torch.compile`. Writes loss.png, report.html and forward_graph.txt (of the first recipe) and summary.json to --out. Exits with status 1
when a loss of a recipe's run is more than 2% (NVFP4: 5%) away from the bf16 run's. A CPU runs the recipes' references, so no speed is
printed there; one without instructions for bf16 trains both in fp32. A large learning rate makes the first steps
chaotic: rounding alone may then decide where a run ends. `--seeds` trains each several times, from other weights on other batches, and
compares the means; `bf16-eager`, the same model uncompiled, shows how far rounding alone goes. A run that ends is written to --out at once;
`--resume` takes it from there, and writes no text.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model is made from a config: nothing is to be fetched

import matplotlib
import torch
from byte_text import ByteText, decode, english, standard_library
from rich.console import Console
from rich.table import Column, Table
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

import te_dynamo
from te_dynamo.recipe import Float8CurrentScaling, MXFP8BlockScaling, Recipe, by_name, names

matplotlib.use("Agg")
import matplotlib.pyplot as plt

TOLERANCE, TOLERANCE_4_BIT = 0.02, 0.05
RECIPES: dict[str, Recipe] = {name: by_name(name) for name in names()} | {
    "mxfp8-128": MXFP8BlockScaling(scale_block=128),
    "current-fast-sums": Float8CurrentScaling(fprop_fast_accum=True),
}
UNCOMPILED = "bf16-eager"
WIDTH = 88  # of what is printed
CHOICES = (*RECIPES, UNCOMPILED)
TEXTS = {"english": english, "source": standard_library}
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": dict(steps=300, layers=2, hidden=256, seq=128, batch=8, text="english", text_bytes=4_000_000, lr=2e-3),
    # Faster, the early steps are chaotic: at 2e-3 two bf16 runs of this size end 3% apart, at 6e-4 a format may by chance.
    "cuda": dict(steps=500, layers=8, hidden=2048, seq=1024, batch=16, text="source", text_bytes=32_000_000, lr=3e-4),
    "fast": dict(steps=8, layers=1, hidden=64, seq=32, batch=4, text="english", text_bytes=200_000, lr=2e-3),
}


@dataclasses.dataclass
class Run:
    """What one training run came to. Losses are mean cross entropies in nats a byte."""

    name: str
    seed: int
    losses: list[float]
    validation_loss: float
    tokens_per_second: float

    @property
    def final_loss(self) -> float:
        """Mean of the last tenth of the steps."""
        return statistics.fmean(self.losses[-max(1, len(self.losses) // 10) :])


def build_model(args: argparse.Namespace, seed: int) -> LlamaForCausalLM:
    """The same weights at every call with that seed."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 11 // 4,
        num_hidden_layers=args.layers,
        num_attention_heads=max(1, args.hidden // 64),
        max_position_embeddings=args.seq,
        use_cache=False,
    )
    return LlamaForCausalLM(config).to(args.device, args.dtype)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over the first tenth, then a cosine down to a tenth of the peak."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = torch.tensor((step - warmup) / max(1, steps - warmup))
    return peak * (0.55 + 0.45 * float(torch.cos(torch.pi * progress)))


def train_all(
    name: str, model: LlamaForCausalLM, compiled: Callable, text: ByteText, args: argparse.Namespace
) -> list[Run]:
    """A run for each seed of `model`, just built with the first of them, through `compiled`, its compiled form."""
    runs: list[Run] = []
    others = ("recipe", "seed", "seeds", "out", "resume")
    settings = {key: str(value) for key, value in vars(args).items() if key not in others}
    for seed in range(args.seed, args.seed + args.seeds):
        path = args.out / f"run-{name}-{seed}.json"
        if args.resume and path.exists() and (ended := json.loads(path.read_text()))["settings"] == settings:
            runs.append(Run(**ended["run"]))
            print(f"{name}, seed {seed}: as in {path}", flush=True)
            continue
        if runs:
            model.load_state_dict(build_model(args, seed).state_dict())
        runs.append(train(name, seed, model, compiled, text, args))
        path.write_text(json.dumps({"settings": settings, "run": dataclasses.asdict(runs[-1])}))
    return runs


def train(
    name: str, seed: int, model: LlamaForCausalLM, compiled: Callable, text: ByteText, args: argparse.Namespace
) -> Run:
    """Trains `model` from the weights that it has."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    losses, seconds = [], []
    batches = text.batches("train", args.steps, args.batch, args.seq, seed)

    def step(number: int, tokens: torch.Tensor) -> None:
        start = time.perf_counter()
        tokens = tokens.to(args.device)
        loss = compiled(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = learning_rate(number, args.steps, args.lr)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the GPU, so the clock below is honest
        seconds.append(time.perf_counter() - start)

    print(f"{name}, seed {seed}: the first step, which compiles, ", end="", flush=True)
    step(0, next(batches))
    print(f"took {seconds[0]:.0f} s", flush=True)
    bar = tqdm(batches, f"{name}, seed {seed}", args.steps, initial=1, unit="step", ncols=WIDTH)
    for number, tokens in enumerate(bar, 1):
        step(number, tokens)
        bar.set_postfix(loss=f"{losses[-1]:.3f}")
    # The median leaves out the step that compiles.
    speed = args.batch * args.seq / statistics.median(seconds)
    return Run(name, seed, losses, validation_loss(compiled, text, seed, args), speed)


def validation_loss(compiled: Callable, text: ByteText, seed: int, args: argparse.Namespace) -> float:
    """Mean loss of held-out batches. Gradients stay on: the training run's compiled graph serves again."""
    batches = text.batches("validation", 8, args.batch, args.seq, seed + 1)
    moved = (tokens.to(args.device) for tokens in batches)
    return statistics.fmean(compiled(input_ids=tokens, labels=tokens).loss.item() for tokens in moved)


@torch.inference_mode()
def generate(compiled: Callable, prompt: torch.Tensor, new_bytes: int) -> str:
    """Continuation of `prompt`, int64 [1, seq], drawn at temperature 0.3: whole words. A window of one length needs one compiled graph."""
    window, written = prompt, []
    generator = torch.Generator(prompt.device).manual_seed(0)
    for _ in range(new_bytes):
        chances = torch.softmax(compiled(input_ids=window).logits[:, -1].float() / 0.3, -1)
        following = torch.multinomial(chances, 1, generator=generator)
        written.append(following)
        window = torch.cat([window[:, 1:], following], dim=1)
    return decode(torch.cat(written, dim=1)[0])


def smooth(losses: list[float]) -> list[float]:
    """Exponential mean with weight 0.1 of the newest, each divided by the weights so far: its first values lean on nothing."""
    smoothed, mean, weight = [], 0.0, 0.0
    for loss in losses:
        mean, weight = mean + 0.1 * (loss - mean), weight + 0.1 * (1 - weight)
        smoothed.append(mean / weight)
    return smoothed


def plot(groups: list[list[Run]], path: pathlib.Path) -> None:
    """Loss curves, the mean over a group's runs: each step faint, an exponential mean over it. Below, how far the recipes' means are from the
    first group's, in the band that `compare` allows."""
    figure, (above, below) = plt.subplots(
        2, figsize=(7, 5.6), layout="constrained", sharex=True, height_ratios=(2.2, 1)
    )
    curves = [[statistics.fmean(step) for step in zip(*(run.losses for run in runs), strict=True)] for runs in groups]
    expected = smooth(curves[0])
    for runs, losses in zip(groups, curves, strict=True):
        (line,) = above.plot(smooth(losses), label=runs[0].name)
        above.plot(losses, color=line.get_color(), alpha=0.2, linewidth=0.8)
        below.plot([100 * (a / b - 1) for a, b in zip(smooth(losses), expected, strict=True)], color=line.get_color())
    seeds = len(groups[0])
    title = "Same model, same data, same seed" + (f"s: means of {seeds} runs" if seeds > 1 else "")
    above.set(ylabel="loss (nats a byte)", title=title)
    allowed = 100 * max(tolerance(runs[0].name) for runs in groups)
    low, high = below.get_ylim()
    below.axhspan(-allowed, allowed, color="tab:gray", alpha=0.15)
    below.set(xlabel="step", ylabel=f"% from {groups[0][0].name}", ylim=(min(low, -allowed), max(high, allowed)))
    above.legend()
    figure.savefig(path, dpi=150)


LOSSES = (("final_loss", "training loss*", ".4f"), ("validation_loss", "validation loss", ".4f"))
SPEED = (("tokens_per_second", "tokens/s**", ",.0f"),)


def compare(reference: list[Run], others: list[list[Run]], console: Console, speed: bool = True) -> bool:
    """Prints the means over each one's runs side by side, and how far single runs are from the reference's of their seed; whether both
    mean losses of every other one are within its tolerance of the reference's. speed: whether that is a column."""
    columns = (*LOSSES, *SPEED) if speed else LOSSES
    table = Table(
        Column("", no_wrap=True),
        caption="* mean of the last tenth of the steps" + ("; ** of the median step" if speed else ""),
    )
    for _, header, _ in columns:
        table.add_column(header, justify="right")
    close = True
    for runs in (reference, *others):
        cells = []
        for attribute, _, form in columns:
            values, expected = ([getattr(run, attribute) for run in group] for group in (runs, reference))
            mean = statistics.fmean(values)
            cell, difference = format(mean, form), mean / statistics.fmean(expected) - 1
            if runs is not reference:
                cell += f" {difference:+.2%}"
                if len(runs) > 1 and "loss" in attribute:
                    each = [value / other - 1 for value, other in zip(values, expected, strict=True)]
                    cell += f" ({', '.join(f'{one:+.2%}' for one in each)})"
            cells.append(cell)
            if "loss" in attribute:
                close = close and abs(difference) <= tolerance(runs[0].name)  # false for NaN
        table.add_row(runs[0].name, *cells)
    console.print(table)
    return close


def tolerance(recipe: str) -> float:
    """How far a recipe's losses may end from bf16's, as a share of them."""
    return TOLERANCE_4_BIT if recipe == "nvfp4" else TOLERANCE


def show_graphs(
    model: LlamaForCausalLM,
    tokens: torch.Tensor,
    options: dict[str, Any],
    recipe: Recipe,
    out: pathlib.Path,
    console: Console,
) -> None:
    """Prints what te_dynamo did to the model, and the beginning of the fused forward graph; writes all of both."""
    with te_dynamo.capture() as graphs:
        explanation = te_dynamo.explain(model, input_ids=tokens, labels=tokens, options=options)
    explanation.to_html(out / "report.html")
    graph = graphs["forward"]
    (out / "forward_graph.txt").write_text(graph + "\n")
    console.print("\nWhat became of the model:", style="bold")
    console.print(explanation.headline, markup=False, highlight=False)
    console.print("\n" + forced(model, tokens, recipe), markup=False, highlight=False)
    lines = graph.splitlines()
    first = next((number for number, line in enumerate(lines) if " = te." in line), 0)
    shown = lines[first : first + 16]
    console.print(f"\nThe forward graph after fusion, {len(shown)} of {len(lines)} lines:", style="bold")
    for line in shown:
        print(line if len(line) <= WIDTH else line[: WIDTH - 1] + "…")


def forced(model: LlamaForCausalLM, tokens: torch.Tensor, recipe: Recipe) -> str:
    """That a rule puts every linear layer in the recipe, and what te_dynamo would choose on an H200."""
    own = te_dynamo.explain(
        model,
        input_ids=tokens,
        labels=tokens,
        device="h200",
        options={"recipe": recipe, "rules": [("lm_head", None)]},
    )
    chosen = sum(linear.matched for linear in own.linears)
    gain = "" if chosen else ": a model of this size gains nothing from FP8"
    return (
        "This demo forces every linear layer but lm_head into the recipe, to show its losses. Without that rule te_dynamo "
        f"would take {chosen} of {len(own.linears)} linear layers on an H200{gain}."
    )


def parse_args() -> argparse.Namespace:
    """Command line; what is not given comes from DEFAULTS for the device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, value in DEFAULTS["cpu"].items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), choices=TEXTS if name == "text" else None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seeds", type=int, default=1, help="runs of each, with seeds from --seed on: means are compared"
    )
    parser.add_argument(
        "--recipe",
        default=["float8_current_scaling"],
        type=lambda names: names.split(","),
        metavar="NAME[,NAME...]",
        help="what is trained beside bf16: " + ", ".join(CHOICES),
    )
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out"))
    parser.add_argument("--resume", action="store_true", help="take runs of the same settings that ended from --out")
    parser.add_argument("--fast", action="store_true", help="a few steps of a tiny model, to see that all of it runs")
    args = parser.parse_args()
    if unknown := set(args.recipe) - set(CHOICES):
        parser.error(f"unknown recipe {', '.join(sorted(unknown))}; choose from {', '.join(CHOICES)}")
    if args.seeds < 1:
        parser.error(f"--seeds must be 1 or more, got {args.seeds}")
    if args.recipe[0] == UNCOMPILED:
        parser.error(f"the first recipe's graph is shown, and {UNCOMPILED} has none: name it later")
    device = torch.device(args.device).type
    bf16 = device != "cpu" or (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())
    args.dtype = torch.bfloat16 if bf16 else torch.float32  # a processor without bf16 emulates it, ten times as slowly
    for name, value in DEFAULTS["fast" if args.fast else device].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def main() -> int:
    args, console = parse_args(), Console(width=WIDTH)
    precision = str(args.dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")
    args.out.mkdir(parents=True, exist_ok=True)
    text = TEXTS[args.text](args.text_bytes)
    model = build_model(args, args.seed)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"LlamaForCausalLM with {parameters / 1e6:.1f}M parameters on {args.device}")
    print(f"{len(text.train) / 1e6:.1f} MB of text; {args.steps} steps of {args.batch} x {args.seq} bytes", flush=True)
    reference = train_all(precision, model, torch.compile(model, dynamic=False), text, args)

    others: list[list[Run]] = []
    trained: list[tuple[LlamaForCausalLM, Callable, dict[str, Any]]] = []
    for recipe in args.recipe:
        model = build_model(args, args.seed)
        if recipe == UNCOMPILED:
            others.append(train_all(recipe, model, model, text, args))
            continue
        # The head stays in bf16, as is usual: it is small here and its logits decide the loss. All else is named by a rule: in the
        # recipe also where a GPU would be faster in bf16, for its numbers are what is compared.
        options = {"rules": [("lm_head", None), ("", RECIPES[recipe])]}
        compiled = torch.compile(model, backend="te", options=options, dynamic=False)
        others.append(train_all(recipe, model, compiled, text, args))
        trained.append((model, compiled, options))

    plot([reference, *others], args.out / "loss.png")
    summary = {
        "arguments": vars(args) | {"out": str(args.out), "dtype": precision},
        "runs": [dataclasses.asdict(run) for runs in (reference, *others) for run in runs],
    }
    (args.out / "summary.json").write_text(json.dumps(summary, indent=1))
    model, compiled, options = trained[0]
    tokens = next(text.batches("train", 1, args.batch, args.seq, args.seed)).to(args.device)
    show_graphs(model, tokens, options, RECIPES[args.recipe[0]], args.out, console)
    if not args.resume:  # whose model may not have been trained here
        show_text(model, compiled, text, console, args)
    close = compare(reference, others, console, speed=torch.device(args.device).type == "cuda")
    console.print(f"In {args.out}/: report.html, the page of what was done; loss.png; forward_graph.txt; summary.json.")
    if not close:
        print(
            f"A loss differs from {precision}'s by more than {TOLERANCE:.0%} (NVFP4: {TOLERANCE_4_BIT:.0%}).",
            file=sys.stderr,
        )
    return 0 if close else 1


def show_text(
    model: LlamaForCausalLM, compiled: Callable, text: ByteText, console: Console, args: argparse.Namespace
) -> None:
    """Prints a held-out prompt and its continuation."""
    sample = next(text.batches("validation", 1, 1, args.seq, args.seed)).to(args.device)
    model.eval()
    written = generate(compiled, sample, new_bytes=16 if args.fast else 200)
    console.print(
        "\nA prompt from held-out text, │, and what the first recipe's model goes on to write:\n", style="bold"
    )
    console.print(decode(sample[0]) + "│" + written + "\n", markup=False, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
