"""`assert_graph`: a graph's text held in the test that reads it."""

from __future__ import annotations

from torch import fx

from te_dynamo.inspect.graphs.graph_text import graph_text


def assert_graph(graph: str | fx.Graph | fx.GraphModule, expected: str) -> None:
    """Raises AssertionError, with the difference, unless the text of `graph` is `expected`.

    graph:    a graph, or the text of one, such as `graphs["forward"]` of te_dynamo.capture.
    expected: a string literal in the test. With EXPECTTEST_ACCEPT=1 in the environment it is rewritten in its file.

    Needs the package expecttest, and raises ImportError where it is missing.
    """
    try:
        from expecttest import assert_expected_inline
    except ImportError as error:
        raise ImportError(
            "te_dynamo.testing.assert_graph needs the package expecttest: pip install expecttest"
        ) from error
    text = graph if isinstance(graph, str) else graph_text(graph)
    assert_expected_inline(text, expected, skip=1)  # the literal is our caller's
