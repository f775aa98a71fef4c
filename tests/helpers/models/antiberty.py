"""AntiBERTy, a BERT of antibodies' amino acids (Ruffolo et al., MIT licence), whose wheel holds its weights, and chains for it."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import random
from typing import Any

import pytest
import torch
from torch import Tensor

CHAIN = "EVQLVQSGPEVKKPGTSVKVSCKASGFTFMSSAVQWVRQARGQRLEWIGWIVIGSGNTNYAQKFQERVTITRDMSTSTAYMELSSLRSEDTAVYYCAAPYCSSISCNDGFDIWGQGTMVTVS"


def _folder() -> pathlib.Path:
    found = importlib.util.find_spec("antiberty")
    if found is None or found.origin is None:
        pytest.skip("antiberty is not installed")
    return pathlib.Path(found.origin).parent / "trained_models"


def antiberty() -> Any:
    """The trained model in bf16."""
    transformers = pytest.importorskip("transformers")
    weights = _folder() / "AntiBERTy_md_smooth"
    model = untrained().float()
    missing = model.load_state_dict(
        torch.load(weights / "pytorch_model.bin", map_location="cpu", weights_only=True), strict=False
    )
    assert not missing.missing_keys and isinstance(model, transformers.BertForMaskedLM)
    return model.bfloat16()


def untrained() -> Any:
    """One of its sizes in bf16."""
    transformers = pytest.importorskip("transformers")
    fields = json.loads((_folder() / "AntiBERTy_md_smooth" / "config.json").read_text())
    config = transformers.BertConfig(**{name: fields[name] for name in fields.keys() - {"architectures", "model_type"}})
    return transformers.BertForMaskedLM(config).eval().bfloat16()


def tokens_of(*chains: str) -> Tensor:
    """Of chains of one length, a row each."""
    letters = {letter: i for i, letter in enumerate((_folder() / "vocab.txt").read_text().split())}
    return torch.tensor([[letters["[CLS]"], *map(letters.__getitem__, chain), letters["[SEP]"]] for chain in chains])


def lineage(count: int) -> list[str]:
    """Chains, each an earlier one with four amino acids exchanged: some are near, others far."""
    draw, chains = random.Random(0), [CHAIN]
    while len(chains) < count:
        made = list(draw.choice(chains))
        for place in draw.sample(range(len(made)), 4):
            made[place] = draw.choice("ACDEFGHIKLMNPQRSTVWY")
        chains.append("".join(made))
    return chains


@torch.no_grad()
def embeddings(encoder: Any, chains: list[str], batch: int = 25) -> Tensor:
    """The mean of each chain's last hidden state, of length 1. encoder: the model's `bert`, compiled or not."""
    parts = tokens_of(*chains).split(batch)
    means = [encoder(input_ids=part).last_hidden_state.float().mean(1) for part in parts]
    return torch.nn.functional.normalize(torch.cat(means), dim=1)


def neighbours(vectors: Tensor, count: int) -> list[set[int]]:
    """For each, the others that are nearest."""
    near = vectors @ vectors.T
    near.fill_diagonal_(-2)
    return [set(row.tolist()) for row in near.topk(count).indices]


def kept(expected: Tensor, found: Tensor, count: int) -> float:
    """The share of nearest neighbours that stay."""
    pairs = zip(neighbours(expected, count), neighbours(found, count), strict=True)
    return sum(len(one & other) for one, other in pairs) / (count * len(expected))
