"""The classes of operations, which `te_dynamo.Sequential` runs: `te_dynamo.ops.BasicLinear`, `te_dynamo.ops.RMSNorm` and the rest."""

from te_dynamo import operations
from te_dynamo.operations import *  # noqa: F403

__all__ = operations.__all__
