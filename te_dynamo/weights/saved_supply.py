"""What `torch.compile(..., fullgraph=True)(..).aot_compile` saves of a graph whose weights are kept: the compiled graph, and what its weights are.

No weights: the process that loads it has the model, and quantizes anew; frozen there they are kept.
"""

from __future__ import annotations

import pickle

from te_dynamo.cache_key import sources_digest
from te_dynamo.errors import KeptWeightError
from te_dynamo.torch_private.table import AOT_COMPILE
from te_dynamo.weights.cache import WeightSupply


class SavedSupply(WeightSupply):
    """A WeightSupply with the methods that torch's SerializableCallable asks for."""

    @classmethod
    def serialize_compile_artifacts(cls, supply: SavedSupply) -> bytes:
        from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as Bundled

        graph = Bundled.serialize_compile_artifacts(Bundled(supply.compiled))
        return pickle.dumps((sources_digest(), graph, supply.kept, supply.workspaces, supply.by_step, supply.check))

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> SavedSupply:
        from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as Bundled

        made_by, graph, *rest = pickle.loads(data)
        if made_by != sources_digest():
            raise KeptWeightError(
                "te_dynamo: another version of te_dynamo or Triton saved this graph, and may quantize weights otherwise than it reads them; "
                "expected the same: call aot_compile again"
            )
        return cls(Bundled.deserialize_compile_artifacts(graph), *rest)


def make_supply(*args: object) -> WeightSupply:
    """A WeightSupply of these arguments, one that aot_compile saves where this torch has it."""
    if not AOT_COMPILE.active:
        return WeightSupply(*args)  # type: ignore[arg-type]
    from torch._dynamo.aot_compile_types import SerializableCallable

    SerializableCallable.register(SavedSupply)
    return SavedSupply(*args)  # type: ignore[arg-type]
