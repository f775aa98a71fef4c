"""Operations that can be fused, what fuses them, and a module that runs them: `te_dynamo.Sequential`."""

from te_dynamo.operations import (
    basic,
    define,  # noqa: F401  # registers the classes
    fused,
)
from te_dynamo.operations.basic import *  # noqa: F403
from te_dynamo.operations.fuser import FusedOps, Group, OperationFuser
from te_dynamo.operations.op import BasicOperation, FusedOperation, FusibleOperation, Parameter
from te_dynamo.operations.sequential import Sequential
from te_dynamo.operations.window import sliding_window

__all__ = [
    "BasicOperation",
    "FusedOperation",
    "FusedOps",
    "FusibleOperation",
    "Group",
    "OperationFuser",
    "Parameter",
    "Sequential",
    "fused",
    "sliding_window",
]
__all__ += basic.__all__
