"""`ShardedWeight`: a rank's part of a weight, which FSDP2 gathers as FP8 codes.

    fsdp_pre_all_gather     shard -> cast to param_dtype -> codes (uint8) by the whole weight's scale       travels
    fsdp_post_all_gather    all shards' codes -> GatheredQuantizedTensor [N, K], rows alone                 what te.linear multiplies

The optimizer, checkpoints and clipping compute with the shard's own values, in its own dtype. With one scale a tensor the amax is
that of all shards (fp8_all_gather_weight.py). A block of 128x128 (MXFP8: or of 32x32) lies in one shard, and so does a row; their scales travel too.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

from te_dynamo.distributed.capture import captured_into
from te_dynamo.errors import UnsupportedError
from te_dynamo.quantized.tensor import QuantizedTensor, written_by

if TYPE_CHECKING:
    from te_dynamo.distributed.fp8_all_gather_weight import GatheredWeight

aten = torch.ops.aten

_SAME_VALUES = {aten.alias.default, aten.detach.default}
"""Below autograd these would give the values a version counter of their own."""

_STAY_SHARDS = {
    aten.clone.default,
    aten.empty_like.default,  # Module.to_empty
    aten.new_zeros.default,
    aten._pin_memory.default,
    aten._to_copy.default,
}
"""What FSDP2, DTensor and Module.to make a shard of another by. Views stay shards too: a plain one, made below autograd, has a counter of its
own, so that nobody would see a write to it. All other results are plain tensors."""


class Asked(NamedTuple):
    """How FSDP2 asks for a weight: its whole size, among how many ranks, in which dtype it is quantized, on which stream."""

    outer_size: torch.Size
    ranks: int
    dtype: torch.dtype
    stream: Any


Given = tuple[tuple[torch.Tensor, ...], Any]
"""((what travels of this rank, ...), what it takes to read it)."""


@dataclasses.dataclass
class Made:
    """What FSDP2 is given, of values in that state. gathers: how often yet: forward's and backward's."""

    state: tuple[int, ...]
    asked: Asked
    given: Given
    gathers: int = 2


class ShardedWeight(torch.Tensor):
    """plain: the values. weight: what is known of the whole weight. base: whose version counter a write through any view of the shard raises."""

    plain: torch.Tensor
    weight: GatheredWeight
    base: torch.Tensor
    _made: Made | None = None
    _copied_scale: torch.Tensor | None = None
    """Whose value the whole weight's scale has: kept until the next one, since the copy is made on another stream than it."""

    @staticmethod
    def __new__(cls, plain: torch.Tensor, weight: GatheredWeight, base: torch.Tensor | None = None) -> ShardedWeight:
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            plain.shape,
            strides=plain.stride(),
            storage_offset=plain.storage_offset(),
            dtype=plain.dtype,
            device=plain.device,
        )
        self.plain, self.weight, self.base = plain, weight, plain if base is None else base
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __tensor_flatten__(self) -> tuple[list[str], GatheredWeight]:
        return ["plain"], self.weight

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], weight: GatheredWeight, *_: Any) -> ShardedWeight:
        return ShardedWeight(inner["plain"], weight)

    @classmethod
    @torch.compiler.disable  # as that of QuantizedTensor
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        plain_args, plain_kwargs = tree_map_only(ShardedWeight, lambda shard: shard.plain, (args, kwargs))
        result = plain_args[0] if func in _SAME_VALUES else func(*plain_args, **plain_kwargs)
        if func.is_view or func in _STAY_SHARDS:
            weight, base = args[0].weight, args[0].base if func.is_view else None
            # A view is an inference tensor where its base is one: it has the base's counter of writes.
            with torch.inference_mode(args[0].is_inference() if func.is_view else torch.is_inference_mode_enabled()):
                result = tree_map_only(torch.Tensor, lambda plain: ShardedWeight(plain, weight, base), result)
            return return_and_correct_aliasing(func, args, kwargs, result)
        written = [each for each in written_by(func, args, kwargs) if isinstance(each, ShardedWeight)]
        replayed = bool(written) and captured_into() > 0
        for shard in written:  # below autograd an operator raises no counter
            torch.autograd.graph.increment_version(shard.base)
            shard.weight.replayed |= replayed
        return args[0] if written and result is plain_args[0] else result

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Given:
        """As FSDP2 asks for it. What one call casts may be what the next calls ask for (GatheredWeight.quantize)."""
        # Memory that is freed goes back to the stream it was made on, which another one's reads do not hold up.
        stream = None if self.device.type == "cpu" else torch.accelerator.current_stream(self.device)
        asked = Asked(outer_size, mesh.size(), mp_policy.param_dtype or self.dtype, stream)
        capture = captured_into()
        self.weight.replayed |= capture > 0
        if not self.is_made(asked, capture):
            if not self.weight.travels(self.shape, asked):
                return (_padded(self.plain.to(asked.dtype), asked),), (outer_size, None, None)
            for shard, how, buffers in self.weight.quantize(self, asked, mesh, capture):
                shard._made = Made(shard.weight.state(capture), how, _given(buffers, how, shard.weight.quantizer))
        made = self._made
        assert made is not None
        made.gathers -= 1
        self._made = made if made.gathers and not self.weight.may_be_written_unseen(capture) else None
        return made.given

    def is_made(self, asked: Asked, capture: int) -> bool:
        """Whether the codes of the values as they are now are there, for the CUDA graph that this is captured into."""
        return self._made is not None and (self._made.state, self._made.asked) == (self.weight.state(capture), asked)

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """(the whole weight, tensors of its own that FSDP2 frees: none). With `out`, which lies in `outputs`, its scale is renewed where it is:
        Inductor's CUDA graphs take all of a weight to keep its address, and are captured again where it has another."""
        outer_size, codes_dtype, scale_inv = metadata
        renewed, self._copied_scale = scale_inv is not self._copied_scale, scale_inv
        if out is not None:
            if scale_inv is not None and renewed:
                local_of(out)._scale_inv.data.copy_(scale_inv)  # backward may read it: no version is raised
            return None
        whole = outputs[0].view(-1)[: outer_size.numel()].view(outer_size)
        if codes_dtype is None:
            return whole, ()
        quantizer = self.weight.quantizer
        assert quantizer is not None
        if scale_inv is None:
            scale_inv = outputs[1]
        named = dict(zip(quantizer.buffer_names(), [whole.view(codes_dtype), scale_inv], strict=True))
        gathered = GatheredQuantizedTensor(named, tuple(outer_size), param_dtype, quantizer)
        gathered.path = self.weight.name
        return gathered, ()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedWeight({self.plain!r})"


class GatheredQuantizedTensor(QuantizedTensor):
    """What is gathered. Only te.linear, which reads the buffers, multiplies by it: where the user's line says F.linear, nothing computes with
    the rounded values, neither eagerly nor in another backend's graph."""

    path = "a weight"  # where a compiler has made it

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, torch.Tensor], metadata: Mapping[str, Any], shape: tuple[int, ...], _: Any
    ) -> GatheredQuantizedTensor:
        return GatheredQuantizedTensor({name[1:]: buffer for name, buffer in inner.items()}, tuple(shape), **metadata)

    def _over(self, buffers: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> QuantizedTensor:
        tensor = super()._over(buffers, dtype)
        tensor.path = self.path  # type: ignore[attr-defined]
        return tensor

    def _read_by(self, func: Any) -> torch.Tensor:
        # te.linear reads the buffers, and has this for its gradient; Dynamo asks for the form of a result.
        if func.namespace == "te" or isinstance(getattr(self, self._flat[0][0]), FakeTensor):
            return super()._read_by(func)
        raise UnsupportedError(
            f"te_dynamo: {self.path} of {list(self.shape)} travels in FP8 (fp8_all_gather), and its linear is not compiled with backend "
            f'"te": {func} reads its values. Compile the module around the linear, and give fully_shard that module: Dynamo leaves a linear '
            'that fully_shard wraps by itself. Or leave it out by a rule: options={"rules": [(path, None)]} (te_dynamo.explain lists what is '
            "compiled)"
        )


# FSDP2 asks for it before every gather; to find it takes the CPU as long as a launch.
ShardedWeight.fsdp_pre_all_gather.__signature__ = inspect.signature(ShardedWeight.fsdp_pre_all_gather)  # type: ignore[attr-defined]


def local_of(tensor: Any) -> Any:
    """What this rank has of a DTensor, the tensor itself: to_local() may be a view of it, at another address. Any other value as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def _given(buffers: list[torch.Tensor], asked: Asked, quantizer: Any) -> Given:
    codes, scale_inv = buffers
    sent = _padded(codes.view(torch.uint8), asked)
    if quantizer.one_scale:
        return (sent,), (asked.outer_size, codes.dtype, scale_inv)
    # No block is cut, and all shards have equally many; rows of scales that are padding stay here.
    return (sent, scale_inv[: codes.shape[0]]), (asked.outer_size, codes.dtype, None)


def _padded(values: torch.Tensor, asked: Asked) -> torch.Tensor:
    """The shard with the rows that FSDP2 gathers of each rank: zeros behind those of the last ones, where they have fewer."""
    rows = -(-asked.outer_size[0] // asked.ranks)
    if values.shape[0] >= rows:  # the whole weight too: of `replicate`, and of shards along another dimension
        return values
    padded = values.new_zeros((rows, *values.shape[1:]))
    padded[: values.shape[0]].copy_(values)
    return padded
