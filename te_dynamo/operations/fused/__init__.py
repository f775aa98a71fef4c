"""The shipped fusions of operations, one file each, in the order in which they run."""

from te_dynamo.fusion_registry import Fusion

__all__ = ["SHIPPED"]

SHIPPED: dict[str, tuple[Fusion, ...]] = {"joint": (), "forward": (), "backward": ()}
