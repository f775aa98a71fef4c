"""Fixtures of the tests of lowering."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.models.snapshot_models import kernels_everywhere

from te_dynamo.testing import fake_cuda


@pytest.fixture
def gpu() -> Iterator[None]:
    """Fake CUDA tensors, on a device with kernels as far as the package knows."""
    with fake_cuda(), kernels_everywhere():
        yield
