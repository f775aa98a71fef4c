"""Processes that the tests of a file share. They end with it: every group that gloo has made keeps threads that poll, which took idle
processes a fifth of two cores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.distributed.ranks import SIZE, Ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(tmp_path_factory.mktemp("ranks")) as processes:
        yield processes


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(tmp_path_factory.mktemp("four_ranks"), size=2 * SIZE) as processes:
        yield processes
