"""Helpers for tests: graphs' text, snapshots and differences, graphs for CUDA without a GPU, bytes of collectives."""

from te_dynamo.inspect.graphs.graph_text import graph_text
from te_dynamo.testing.fake_cuda import capture_on_fake_cuda, fake_cuda
from te_dynamo.testing.graph_diff import graph_diff
from te_dynamo.testing.snapshot import assert_graph
from te_dynamo.testing.wire import Wire, count_wire

__all__ = ["Wire", "assert_graph", "capture_on_fake_cuda", "count_wire", "fake_cuda", "graph_diff", "graph_text"]
