"""Helpers for tests of graphs: their text, and graphs for CUDA without a GPU."""

from te_dynamo.inspect.graph_text import graph_text
from te_dynamo.testing.fake_cuda import capture_on_fake_cuda, fake_cuda

__all__ = ["capture_on_fake_cuda", "fake_cuda", "graph_text"]
