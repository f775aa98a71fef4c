"""Inductor lists the names of a graph's outputs once, not for each buffer that it uses again.

A forward whose activations are saved has hundreds of outputs, and kernels of ours many buffers: 0.4 s for eight blocks.
"""

from __future__ import annotations

import functools
from typing import Any

__all__ = ["list_outputs_once"]


@functools.cache
def list_outputs_once() -> None:
    """Tells Inductor; once a process. The outputs of a graph are settled when its code is written."""
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.virtualized import V

    generate = PythonWrapperCodegen.generate

    @functools.wraps(generate)
    def generate_with_names(self: Any, *args: Any, **kwargs: Any) -> Any:
        graph = V.graph
        names = graph.get_output_names()
        graph.get_output_names = lambda: names  # type: ignore[method-assign]
        try:
            return generate(self, *args, **kwargs)
        finally:
            del graph.get_output_names

    PythonWrapperCodegen.generate = generate_with_names  # type: ignore[method-assign]
