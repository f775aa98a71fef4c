"""`te-dynamo generate`: text by the file's own codes, few compilations, and one line for each wrong use."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import te_dynamo
from te_dynamo.command_line.failure import Failure
from te_dynamo.command_line.generate import (
    BUCKETS,
    Generator,
    _buckets,
    _check_fits,
    as_stored,
    in_16_bits,
    load,
    load_tokenizer,
)
from te_dynamo.command_line.main import main

transformers = pytest.importorskip("transformers")
EXAMPLE = Path(__file__).parents[2] / "examples" / "generate.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama in FP8 whose tokens are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    made = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=256)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    te_dynamo.save_checkpoint(model, made, "fp8", rules=[("lm_head", None)])
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(made)
    return made


def test_what_has_no_product_has_no_rule() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    assert as_stored(model) == {"rules": [("^(?:1)$", None)]}
    assert as_stored(model[:1]) == {}


@pytest.mark.slow
def test_each_bucket_is_compiled_once_and_the_cache_serves_all(folder: Path) -> None:
    """A prompt's tokens do not depend on what else is in its batch, and are those of the model without a compiler, padding or a static cache."""
    model, tokenizer = load(str(folder), "cpu"), load_tokenizer(str(folder))
    prompts = [tokenizer(text)["input_ids"] for text in ("one", "another prompt", "long " * 8)]
    with torch.no_grad():
        plain = [model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False) for prompt in prompts]
    generator = Generator(model, 2, 256, "te", {**as_stored(model), "codegen": "eager"})
    with te_dynamo.capture() as graphs:
        found, speed = generator(prompts, 6)
        assert generator.compiled == {1, 32, 128} and len(graphs.reports) == 3 and speed > 0
        assert generator([prompts[1], prompts[1][:4]], 6)[0][0] == found[1]
        assert len(graphs.reports) == 3
    assert found == [row[0, len(prompt) :].tolist() for row, prompt in zip(plain, prompts, strict=True)]
    matches = [match for report in graphs.reports for match in report.matches]
    assert all(match.matched == ("proj" in match.module) for match in matches if match.kind == "linear")
    assert not [p for p in in_16_bits(model).parameters() if isinstance(p, te_dynamo.QuantizedTensor)]


@pytest.mark.slow
def test_the_command_and_the_example(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = ["--tokens", "4", "--cache", "48", "--device", "cpu"]
    assert main(["generate", str(folder), "--prompt", "one", "--prompt", "two", *sizes, "--compare"]) == 0
    printed = capsys.readouterr()
    assert re.fullmatch(
        r"'one' -> .*\n'two' -> .*\nas stored: [\d.]+ tokens a second, after 2 compilations\n"
        r"in bfloat16: [\d.]+ tokens a second, as stored [\d.]+x\n",
        printed.out,
    ), printed.out
    assert not printed.err
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), str(folder), "one"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert capsys.readouterr().out.startswith("'one' -> ")


def test_compilations_are_bounded() -> None:
    """Below Dynamo's limit, with the one for single tokens, for any cache: of 64 to 128k tokens."""
    for cache in (64, 2048, 2**17):
        lengths = {length for length in (1, *BUCKETS, cache - 33) if length < cache - 32}
        found = _buckets([[0] * length for length in lengths], 32, cache)
        assert max(found) == cache - 32 and len(found) + 1 <= len(BUCKETS) + 2 < torch._dynamo.config.recompile_limit


def test_what_ends_a_text(folder: Path) -> None:
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[7, 9]))
    assert Generator._until_end(SimpleNamespace(_model=model), [1, 9, 7, 3]) == [1, 9]  # type: ignore[arg-type]


def test_a_folder_says_what_ends_a_text(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert load(str(tmp_path), "cpu").generation_config.eos_token_id == [7, 9]


@pytest.mark.parametrize(
    ("prompt", "count", "message"),
    [
        ([1, 64], 1, "prompt 2 has the token 64, and the model knows 64: its folder has the tokenizer of another"),
        ([1] * 30, 3, "prompt 2 has 30 tokens: with 3 new ones more than the model's 32 positions; --tokens says"),
    ],
)
def test_tokens_and_positions_that_a_model_lacks(prompt: list[int], count: int, message: str) -> None:
    config = SimpleNamespace(vocab_size=64, max_position_embeddings=32)
    _check_fits([[63] * 29], 3, config)
    with pytest.raises(Failure, match=message):
        _check_fits([[1], prompt], count, config)


def test_a_model_that_takes_no_static_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as Mamba."""

    def refuse(*args: object) -> None:
        raise ValueError("these are not used by the model: ['past_key_values']\nmore")

    monkeypatch.setattr("te_dynamo.command_line.generate.Generator", refuse)
    assert main(["generate", str(folder), "--prompt", "a"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("te-dynamo: LlamaForCausalLM does not generate with a static cache: ValueError: these are")


WRONG = [
    (["none", "--prompt", "a"], 2, "'none' is no checkpoint folder: it has no config.json; nothing is downloaded"),
    (["bare", "--prompt", "a"], 2, "bare has no tokenizer that transformers reads: copy tokenizer.json"),
    (["cut", "--prompt", "a"], 1, "these are in the model and not in the file: "),
    (["good", "--prompt", "a", "--device", "cuda:99"], 2, "--device cuda:99: torch can use "),
    (["good", "--prompt", "a" * 60, "--cache", "64"], 2, "prompt 1 has 60 tokens: with 32 new ones it has to have 1 to 31 in a cache of 64"),
    (["good", "--prompt", ""], 2, "prompt 1 has 0 tokens: "),
    (["good", "--prompt", "a", "--tokens", "0"], 2, "--tokens 0: expected 1 or more"),
    (["good"], 2, "the following arguments are required: --prompt; te-dynamo generate --help lists what there is"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "status", "line"), WRONG, ids=[f"{case[0][0]} {case[2][:9]}" for case in WRONG])
def test_a_failure_is_one_line(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    status: int,
    line: str,
) -> None:
    from safetensors.torch import load_file, save_file

    (tmp_path / "good").symlink_to(folder)
    for name in ("bare", "cut"):
        (tmp_path / name).mkdir()
        for file in folder.iterdir():
            if name == "cut" or "token" not in file.name:
                (tmp_path / name / file.name).symlink_to(file)
    tensors = load_file(folder / "model.safetensors")
    (tmp_path / "cut" / "model.safetensors").unlink()
    save_file(
        {name: t for name, t in tensors.items() if name != "model.norm.weight"}, tmp_path / "cut/model.safetensors"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["generate", *arguments]) == status
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1 and told[0].startswith("te-dynamo: ") and line in told[0], told
