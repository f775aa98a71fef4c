"""Generates text with a checkpoint folder whose weights are FP8 or FP4, multiplied as they are stored.

    python examples/generate.py FOLDER --prompt "Once upon a time" --prompt "def main():"

The folder has a config.json of transformers, safetensors, and a tokenizer; without one the bytes of a prompt are its tokens. Prompts are padded
on the left to buckets, so that each bucket is compiled twice, for its prompts and for one token more, whatever their lengths.
"""

from __future__ import annotations

import argparse
import time
import warnings
from typing import Any

import torch
from rich.progress import Progress
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import te_dynamo

BUCKETS = (32, 128, 512, 2048, 8192)


def load(folder: str, device: str) -> Any:
    """The model with the folder's own codes; no 16-bit copy of a quantized weight is made."""
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.bfloat16)
    with torch.device(device):
        te_dynamo.load_checkpoint(model, folder)
    return te_dynamo.freeze(model.eval().requires_grad_(False))  # what the file has in 16 bits


def tokens_of(folder: str, prompts: list[str], vocabulary: int) -> tuple[list[list[int]], Any]:
    """(the tokens of each prompt, what makes text of tokens)"""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError):
        return [[byte % vocabulary for byte in prompt.encode()] for prompt in prompts], str
    return [tokenizer(prompt)["input_ids"] for prompt in prompts], tokenizer.decode


def batches(prompts: list[list[int]], device: str) -> dict[int, tuple[list[int], torch.Tensor, torch.Tensor]]:
    """Bucket -> (the prompts in it, their tokens, which of these are padding: 0)."""
    found: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        found.setdefault(next(size for size in BUCKETS if size >= len(prompt)), []).append(index)
    made = {}
    for size, indices in found.items():
        tokens, mask = (torch.zeros(len(indices), size, dtype=torch.long, device=device) for _ in range(2))
        for row, index in enumerate(indices):
            tokens[row, size - len(prompts[index]) :] = torch.tensor(prompts[index], device=device)
            mask[row, size - len(prompts[index]) :] = 1
        made[size] = indices, tokens, mask
    return made


def generate(model: Any, given: Any, count: int, title: str) -> tuple[dict[int, list[int]], float]:
    """(prompt -> its new tokens, tokens a second without compilations)"""
    results, seconds, made = {}, 0.0, 0
    with torch.no_grad(), Progress() as progress:
        bar = progress.add_task(title, total=2 * len(given))
        for indices, tokens, mask in given.values():
            for _ in range(2):  # the first compiles
                begin = time.perf_counter()
                out = model.generate(
                    tokens,
                    attention_mask=mask,
                    max_new_tokens=count,
                    min_new_tokens=count,
                    do_sample=False,
                    cache_implementation="static",
                    disable_compile=True,  # generate's own: the forward is compiled already
                    pad_token_id=0,
                )
                last = time.perf_counter() - begin
                progress.advance(bar)
            seconds, made = seconds + last, made + count * len(indices)
            results |= {index: row[tokens.shape[1] :].tolist() for index, row in zip(indices, out, strict=True)}
    return results, made / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--prompt", action="append", default=[], help="again for each further prompt")
    parser.add_argument("--tokens", type=int, default=32, help="how many to generate for each prompt")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--bf16", action="store_true", help="compare the speed with the dequantized model's")
    arguments = parser.parse_args()
    model = load(arguments.folder, arguments.device)
    prompts, text = tokens_of(arguments.folder, arguments.prompt or ["Once upon a time"], model.config.vocab_size)
    given = batches(prompts, arguments.device)
    forward = model.forward
    model.forward = torch.compile(forward, backend="te", dynamic=False)
    results, speed = generate(model, given, arguments.tokens, "as stored")
    for index in sorted(results):
        print(f"{(arguments.prompt or ['Once upon a time'])[index]!r} -> {text(results[index])!r}")
    print(f"as stored: {speed:.1f} tokens a second")
    if arguments.bf16:
        te_dynamo.unfreeze(model)
        model.forward = torch.compile(forward, dynamic=False)
        for module in model.modules():
            for name, weight in list(module.named_parameters(recurse=False)):
                if isinstance(weight, te_dynamo.QuantizedTensor):
                    setattr(module, name, torch.nn.Parameter(weight.dequantize(), requires_grad=False))
        print(f"in 16 bits: {generate(model, given, arguments.tokens, 'in 16 bits')[1]:.1f} tokens a second")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="te_dynamo: device cpu")
    main()
