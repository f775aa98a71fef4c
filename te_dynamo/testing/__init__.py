"""Helpers for tests of graphs: their text, snapshots and differences, and graphs for CUDA without a GPU."""

from te_dynamo.inspect.graph_text import graph_text
from te_dynamo.testing.fake_cuda import capture_on_fake_cuda, fake_cuda
from te_dynamo.testing.graph_diff import graph_diff
from te_dynamo.testing.snapshot import assert_graph

__all__ = ["assert_graph", "capture_on_fake_cuda", "fake_cuda", "graph_diff", "graph_text"]
