"""Processes that all files of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.distributed.ranks import SIZE, Ranks


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(tmp_path_factory.mktemp("ranks")) as processes:
        yield processes


@pytest.fixture(scope="session")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(tmp_path_factory.mktemp("four_ranks"), size=2 * SIZE) as processes:
        yield processes
