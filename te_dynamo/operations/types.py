"""What the methods of operations take and return, beside their input: of one basic operation, and of a fuser's list of them."""

from __future__ import annotations

from typing import Any, Optional

import torch

from te_dynamo.quantized.tensor_proto import TensorProto

Params = tuple[torch.Tensor, ...]
"""The parameters, extra inputs or extra outputs of one operation; Protos: the same without data."""
Protos = tuple[TensorProto, ...]

Saved = list[Optional[torch.Tensor]]
"""What one operation saves; None keeps its place."""

Grads = tuple[Optional[torch.Tensor], ...]
"""The gradients of Params."""

Forward = tuple[torch.Tensor, Saved]
"""(output, tensors to save): what `op_forward_compute` returns. Fake: what `op_forward_fake` does."""
Fake = tuple[TensorProto, list[Optional[TensorProto]]]

Backward = tuple[Optional[torch.Tensor], Grads]
"""(grad of the input, grads of the parameters)."""

FuserForward = tuple[torch.Tensor, list[Params], list[Saved]]
"""(output, extra outputs, tensors to save), the last two with an entry for each basic operation; FuserFake: the same in protos."""
FuserFake = tuple[TensorProto, list[Protos], list[list[Optional[TensorProto]]]]

FuserBackward = tuple[Optional[torch.Tensor], list[Grads], list[Grads]]
"""(grad of the input, grads of the parameters, of the extra inputs), the last two with an entry for each basic operation."""

TeCall = tuple[torch._ops.OpOverload, tuple[Any, ...]]
"""A `te::` operation and its arguments."""
