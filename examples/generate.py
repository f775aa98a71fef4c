"""Generates text with a checkpoint folder whose weights are FP8 or FP4, multiplied as they are stored.

    python examples/generate.py FOLDER "Once upon a time" "def main():"

`te-dynamo generate` from Python: one Generator serves call after call, and compiles only for a bucket that no prompt was in yet.
"""

from __future__ import annotations

import sys

import torch

from te_dynamo.command_line.generate import Generator, as_stored, load, load_tokenizer


def main(folder: str, *prompts: str) -> None:
    tokenizer, model = load_tokenizer(folder), load(folder, "cuda" if torch.cuda.is_available() else "cpu")
    generator = Generator(model, 1, 2048, "te", as_stored(model))
    for prompt in prompts:
        ((tokens,), speed) = generator([tokenizer(prompt)["input_ids"]], 32)
        print(f"{prompt!r} -> {tokenizer.decode(tokens)!r}, {speed:.1f} tokens a second")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
