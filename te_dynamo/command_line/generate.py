"""`te-dynamo generate`: continue prompts with a checkpoint folder of transformers, its weights as they are stored.

Prompts are padded on the left to buckets, and the cache is static: a bucket is compiled once, and one token after another once for all of them.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from te_dynamo.command_line.device import checked_device
from te_dynamo.command_line.failure import Failure, one_line
from te_dynamo.errors import CheckpointError
from te_dynamo.quantized.tensor import QuantizedTensor
from te_dynamo.weights.checkpoint.load import load_checkpoint

BUCKETS = (32, 128, 512, 2048, 8192)
"""Tokens of a padded prompt; one bucket more is all that the cache has room for. So a batch size has len(BUCKETS) + 2 compilations at most, which
is below the limit where Dynamo gives up."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", metavar="FOLDER", help="config.json, safetensors and a tokenizer, as transformers reads them"
    )
    parser.add_argument("--prompt", action="append", required=True, help="what to continue; once for each")
    parser.add_argument("--tokens", type=int, default=32, help="the most new tokens of each (default: 32)")
    parser.add_argument(
        "--cache", type=int, default=2048, help="tokens that a prompt and its new ones may be (default: 2048)"
    )
    parser.add_argument("--batch", type=int, default=8, help="the most prompts at a time (default: 8)")
    parser.add_argument(
        "--compare", action="store_true", help="also the speed of the same model in 16 bits, by Inductor"
    )
    parser.add_argument(
        "--device", default="", help="cpu, cuda: where the model runs (default: cuda where there is one)"
    )
    parser.add_argument("--debug", action="store_true", help="a failure has its traceback, and warnings are shown")


def run(parsed: argparse.Namespace) -> int:
    """Prints each prompt with what follows it, then tokens a second."""
    for name in ("tokens", "cache", "batch"):
        if getattr(parsed, name) < 1:
            raise Failure(f"--{name} {getattr(parsed, name)}: expected 1 or more", status=2)
    device = checked_device(parsed.device) or ("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = load_tokenizer(parsed.folder)
    prompts = [tokenizer(text)["input_ids"] for text in parsed.prompt]
    _buckets(prompts, parsed.tokens, parsed.cache)  # fails before minutes of loading
    model = load(parsed.folder, device)
    _check_fits(prompts, parsed.tokens, model.config.get_text_config())
    batch = min(parsed.batch, len(prompts))
    try:
        generator = Generator(model, batch, parsed.cache, "te", as_stored(model))
        found, speed = generator(prompts, parsed.tokens)
    except Exception as error:
        raise Failure(
            f"{type(model).__name__} does not generate with a static cache: {one_line(error)}; --debug shows where"
        ) from error
    for text, tokens in zip(parsed.prompt, found, strict=True):
        print(f"{text!r} -> {tokenizer.decode(tokens, skip_special_tokens=True)!r}")
    print(f"as stored: {speed:.1f} tokens a second, after {len(generator.compiled)} compilations")
    if parsed.compare:
        dtype = str(model.dtype).removeprefix("torch.")
        other = Generator(in_16_bits(model), batch, parsed.cache, "inductor")(prompts, parsed.tokens)[1]
        print(f"in {dtype}: {other:.1f} tokens a second, as stored {speed / other:.2f}x")
    return 0


def load(folder: str, device: str) -> Any:
    """The model of a folder with the file's own codes: no 16-bit copy of a quantized weight is made. Raises Failure."""
    transformers = _transformers(folder)
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.bfloat16)
        if (Path(folder) / "generation_config.json").is_file():  # which tokens end a text
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise Failure(
            f"{folder}: transformers cannot make its model: {one_line(error)}; --debug shows where"
        ) from error
    try:
        with torch.device(device):
            load_checkpoint(model, folder)
    except (CheckpointError, OSError) as error:
        raise Failure(one_line(error)) from error
    return model.eval().requires_grad_(False)


def load_tokenizer(folder: str) -> Any:
    """That of a folder. Raises Failure where it has none."""
    try:
        return _transformers(folder).AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Failure:
        raise
    except Exception as error:
        raise Failure(
            f"{folder} has no tokenizer that transformers reads: copy tokenizer.json and tokenizer_config.json there", 2
        ) from error


def _transformers(folder: str) -> Any:
    if not (Path(folder) / "config.json").is_file():
        raise Failure(f"{folder!r} is no checkpoint folder: it has no config.json; nothing is downloaded", status=2)
    try:
        import transformers
    except ImportError as error:
        raise Failure("generate needs the package transformers: pip install transformers", status=2) from error
    return transformers


def as_stored(model: nn.Module) -> dict[str, Any]:
    """Options of backend "te" that leave in 16 bits what the file has in 16 bits."""
    left = [
        re.escape(path)
        for path, module in model.named_modules()
        if not isinstance(module, nn.Embedding)  # which is read, and multiplies nothing
        and any(
            p is not None and p.dim() > 1 and not isinstance(p, QuantizedTensor) for p in module._parameters.values()
        )
    ]
    return {"rules": [(f"^(?:{'|'.join(left)})$", None)]} if left else {}


def in_16_bits(model: nn.Module) -> nn.Module:
    """The same model, its stored weights dequantized in place."""
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if isinstance(weight, QuantizedTensor):
                setattr(module, name, nn.Parameter(weight.dequantize(), requires_grad=False))
    return model


def _buckets(prompts: Sequence[Sequence[int]], count: int, cache: int) -> dict[int, list[int]]:
    """Bucket -> the prompts in it. Raises Failure for a prompt without a token, or with so many that `count` more do not fit."""
    room = cache - count
    sizes, found = [*(size for size in BUCKETS if size < room), room], dict[int, list[int]]()
    for index, prompt in enumerate(prompts):
        if (
            not 0 < len(prompt) < room
        ):  # one is padding: transformers drops a mask without any, and that is another graph
            raise Failure(
                f"prompt {index + 1} has {len(prompt)} tokens: with {count} new ones it has to have 1 to {room - 1} in a cache of {cache}; "
                "--cache and --tokens say how many",
                status=2,
            )
        found.setdefault(next(size for size in sizes if size > len(prompt)), []).append(index)
    return found


def _check_fits(prompts: Sequence[Sequence[int]], count: int, config: Any) -> None:
    """Raises Failure for tokens and positions that the model does not have: code compiled for a CPU ends the process at one."""
    words, places = getattr(config, "vocab_size", None), getattr(config, "max_position_embeddings", None)
    for index, prompt in enumerate(prompts):
        if words and max(prompt) >= words:
            raise Failure(
                f"prompt {index + 1} has the token {max(prompt)}, and the model knows {words}: its folder has the tokenizer of another",
                2,
            )
        if places and len(prompt) + count > places:
            raise Failure(
                f"prompt {index + 1} has {len(prompt)} tokens: with {count} new ones more than the model's {places} positions; --tokens says how many",
                2,
            )


class Generator:
    """Continues prompts with a model of transformers that it compiles, `batch` at a time.

    cache: how many tokens a prompt and what follows may be. backend, options: torch.compile's. compiled: the lengths that were compiled for,
    1 among them.
    """

    def __init__(
        self, model: Any, batch: int, cache: int, backend: str, options: Mapping[str, Any] | None = None
    ) -> None:
        from transformers import StaticCache

        vars(model).pop("forward", None)
        self._model, self._batch = model, batch
        self._cache = StaticCache(config=model.config, max_cache_len=cache)
        self.size, self.compiled = cache, set[int]()
        with torch.no_grad():  # memory for the cache, outside of what is compiled
            model(torch.zeros(batch, 1, dtype=torch.long, device=model.device), past_key_values=self._cache)
        model.forward = torch.compile(model.forward, backend=backend, dynamic=False, options=dict(options or {}))

    def __call__(self, prompts: Sequence[Sequence[int]], count: int) -> tuple[list[list[int]], float]:
        """(the new tokens of each prompt, tokens a second without compilations). Raises Failure for a prompt that is too long."""
        from tqdm import tqdm

        batches = list(self._batches(prompts, count))
        with tqdm(total=count * len(batches), unit="step", disable=None, leave=False) as bar:
            bar.set_description("compiling")
            for tokens, mask, _ in batches:
                if not {1, tokens.shape[1]} <= self.compiled:
                    self._run(tokens, mask, 2, None)
                    self.compiled |= {1, tokens.shape[1]}
            bar.set_description("generating")
            begin = time.perf_counter()
            found: dict[int, list[int]] = {}
            for tokens, mask, indices in batches:
                rows = self._run(tokens, mask, count, _Steps(bar)).tolist()
                found |= {
                    index: self._until_end(row[tokens.shape[1] :]) for index, row in zip(indices, rows, strict=False)
                }
            seconds = time.perf_counter() - begin
        return [found[index] for index in range(len(prompts))], sum(map(len, found.values())) / seconds

    def _batches(
        self, prompts: Sequence[Sequence[int]], count: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, list[int]]]:
        """(tokens, which of them are no padding, the prompts in it), all of one batch size."""
        for size, inside in _buckets(prompts, count, self.size).items():
            for first in range(0, len(inside), self._batch):
                indices = inside[first : first + self._batch]
                rows = [prompts[index] for index in indices]
                rows += rows[-1:] * (self._batch - len(rows))
                padded = [[0] * (size - len(row)) + list(row) for row in rows]
                mask = [[0] * (size - len(row)) + [1] * len(row) for row in rows]
                yield *(torch.tensor(each, device=self._model.device) for each in (padded, mask)), indices  # type: ignore[misc]

    @torch.no_grad()
    def _run(self, tokens: torch.Tensor, mask: torch.Tensor, count: int, streamer: Any) -> torch.Tensor:
        self._cache.reset()
        return self._model.generate(  # type: ignore[no-any-return]
            tokens,
            attention_mask=mask,
            past_key_values=self._cache,
            max_new_tokens=count,
            # Compiling, a text that ends at once would leave single tokens without a graph.
            min_new_tokens=0 if streamer else count,
            do_sample=False,
            disable_compile=True,  # generate's own: the forward is compiled already
            pad_token_id=0,
            streamer=streamer,
        )

    def _until_end(self, tokens: list[int]) -> list[int]:
        ends = self._model.generation_config.eos_token_id
        last = {ends} if isinstance(ends, int) else set(ends or ())
        return tokens[: next((i + 1 for i, token in enumerate(tokens) if token in last), len(tokens))]


class _Steps:
    """What generate tells of its steps, the prompt being the first."""

    def __init__(self, bar: Any) -> None:
        self._bar, self._is_prompt = bar, True

    def put(self, tokens: torch.Tensor) -> None:
        self._bar.update(not self._is_prompt)
        self._is_prompt = False

    def end(self) -> None:
        pass
