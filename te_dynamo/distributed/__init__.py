"""What several processes need beside torch's own wrappers."""

from te_dynamo.distributed.check_ranks import check_ranks

__all__ = ["check_ranks"]
