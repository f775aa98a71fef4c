"""What several processes need beside torch's own wrappers."""

from te_dynamo.distributed.check_ranks import check_ranks
from te_dynamo.distributed.fp8_all_gather import fp8_all_gather
from te_dynamo.distributed.torchtitan import torchtitan_backend, torchtitan_options

__all__ = ["check_ranks", "fp8_all_gather", "torchtitan_backend", "torchtitan_options"]
