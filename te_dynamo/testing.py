"""Helpers for tests of graphs: their text, and graphs for CUDA without a GPU."""

from te_dynamo.fake_cuda import capture_on_fake_cuda, fake_cuda
from te_dynamo.graph_text import graph_text

__all__ = ["capture_on_fake_cuda", "fake_cuda", "graph_text"]
