"""What is known of the weights that `fp8_all_gather` was asked for: how each travels, why, and the amaxes of those that travel in FP8.

All amaxes of a model come from one all-reduce (MAX) at the first gather after a write to a weight: once an optimizer step. Each
gather compares the shard's version counter and storage with those whose amax is known, so that no scale is older than its values. Ranks do not
ask each other: all of them write, or none.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from te_dynamo.dialect.quantize import INPUT_DTYPES, quantize_several
from te_dynamo.distributed.fp8_all_gather_shard import Asked, ShardedWeight, local_of
from te_dynamo.errors import UnsupportedError
from te_dynamo.kernels.layouts.block import BLOCK
from te_dynamo.quantized.quantizers import Quantizer

largest_magnitudes = torch.ops.aten._foreach_norm.Scalar
"""Of each tensor, NaN where one is NaN: on a GPU a few launches for all shards of a model, where a norm of each takes hundreds."""


class GatheredWeight:
    """The weight of one nn.Linear.

    module:    the linear. name: the weight's path. quantizer: how it travels, rows alone; None without a recipe.
    reason:    why it travels in the model's precision; "" while it travels in FP8.
    weights:   of the model, in its order: those that may share a cast, and of one scale a tensor an all-reduce.
    """

    def __init__(
        self, module: nn.Module, name: str, quantizer: Quantizer | None, weights: list[GatheredWeight], reason: str = ""
    ) -> None:
        self.name, self.quantizer, self.reason = name, quantizer, reason
        self._module, self._weights = weakref.ref(module), weights
        self._sharded: Any = None
        self._asked: Any = None  # in the last gather, an Asked
        self._amaxes_in: Callable[[torch.dtype], tuple[torch.Tensor, ...]] | None = None  # fp32 [1] each, by dtype
        self._place = 0  # of its own one, that of the values in the state `_known`
        self._known: tuple[Any, ...] | None = None
        self.replayed = False  # whether a CUDA graph gathers it or writes to it: then writes raise no counter
        WEIGHTS[module] = self

    def __deepcopy__(self, memo: Any) -> GatheredWeight:
        raise UnsupportedError(
            f"te_dynamo: {self.name} is gathered in FP8: copy the model before fp8_all_gather, call fully_shard before it is compiled, "
            "and leave what that ignores out of fp8_all_gather by a rule"
        )

    def travels(self, size: torch.Size, asked: Asked) -> bool:
        """Whether a weight that is asked for in that way travels in FP8; else `reason` says why not. size: of this rank's shard."""
        n = asked.outer_size[0]
        if not self.reason and size[1:] != asked.outer_size[1:]:
            self.reason = "it is not shared out by rows"
        if not self.reason and asked.dtype not in INPUT_DTYPES:
            self.reason = f"it is {asked.dtype}; te.quantize takes bf16, fp16 and fp32"
        quantizer = self.quantizer
        if not self.reason and quantizer is not None and not quantizer.one_scale:
            block = quantizer.rows_of_a_scale()
            whole = math.lcm(asked.ranks * block, BLOCK if block > 1 else 1)
            differ = {1: "differ in size", BLOCK: f"end inside of blocks of {BLOCK}"}.get(
                block, f"end inside of blocks of {block}, or of the {BLOCK} rows that scales are padded to"
            )
            if size == asked.outer_size:
                self.reason = "each rank has all of it, and FSDP2 takes no scales beside the codes then"
            elif n % whole:
                self.reason = f"{asked.ranks} shards of its {n} rows {differ}: N has to be a multiple of {whole}"
        return not self.reason

    def quantize(
        self, shard: ShardedWeight, asked: Asked, mesh: Any, capture: int
    ) -> list[tuple[ShardedWeight, Asked, list[torch.Tensor]]]:
        """(a shard, how it is asked for, its [codes, scale_inv]): this one, and those that were gathered like it before and have no codes
        of their values now. One launch casts all, in every format: seven of a layer, one by one, take the CPU longer than FSDP2's own work.

        Collective, where an amax is not known. Where the optimizer may be in a CUDA graph, each gather outside of graphs casts one weight anew.
        """
        quantizer = self.quantizer
        assert quantizer is not None
        self._asked = asked
        alone = self.may_be_written_unseen(capture)
        if quantizer.one_scale and (alone or self._known != self.state(capture)):
            self._reduce(mesh, shard.device, [self] if alone else self._weights, capture)
        others = [] if alone else [w for w in self._weights if w is not self and self._cast_alike(w, shard, capture)]
        together = [self, *others]
        shards = [shard, *(weight._shard() for weight in together[1:])]
        amaxes = [self._amaxes_in(asked.dtype)[weight._place] for weight in together] if self._amaxes_in else []
        buffers = quantize_several([each.plain for each in shards], asked.dtype, quantizer.form(), amaxes)
        return list(zip(shards, [weight._asked for weight in together], buffers, strict=True))

    def _cast_alike(self, other: GatheredWeight, shard: ShardedWeight, capture: int) -> bool:
        """Whether another weight was gathered, has codes of its values no more, and can be cast in one launch with this one's shard."""
        if other._asked is None or other._asked[1:] != self._asked[1:] or other.quantizer != self.quantizer:
            return False
        if other.may_be_written_unseen(capture):
            return False
        values = other._shard()
        alike = (values.dtype, values.device) == (shard.dtype, shard.device)
        known = not self._amaxes_in or (other._amaxes_in is self._amaxes_in and other._known == other.state(capture))
        return alike and known and not values.is_made(other._asked, capture)

    def state(self, capture: int) -> tuple[Any, ...]:
        """What a write to the values changes, by the parameter, its shard, a view of that or the plain tensor. Inductor's code raises the
        parameter's counter alone. And the CUDA graph that this is captured into."""
        parameter = self._parameter()
        shard = local_of(parameter)
        # Not the address: a shard that was on the CPU in between often gets the old one, and each rank its own.
        storage = StorageWeakRef(shard.plain.untyped_storage())
        return parameter._version, shard.base._version, shard.plain._version, storage, capture

    def may_be_written_unseen(self, capture: int) -> bool:
        """Whether what is made of the values now may be stale at the next gather: replays write, and raise no counter."""
        return self.replayed and not capture

    def _reduce(self, mesh: Any, device: torch.device, weights: list[GatheredWeight], capture: int) -> None:
        """Makes the amaxes of those weights known that are on this one's mesh."""
        own_mesh = self._parameter().device_mesh
        scaled = [w for w in weights if w.quantizer and w.quantizer.one_scale and not w.reason]
        these = [w for w in scaled if getattr(w._parameter(), "device_mesh", None) == own_mesh]
        shards = [weight._shard() for weight in these]
        full = [shard.plain for shard in shards if shard.numel()]
        found = iter(largest_magnitudes(full, torch.inf) if full else ())
        largest = [next(found) if shard.numel() else shard.plain.new_zeros(()) for shard in shards]
        amaxes = torch.stack(largest).to(device, torch.float32)
        amaxes = amaxes.nan_to_num(nan=torch.inf, posinf=torch.inf)  # NaN may get lost in MAX; both make the scale 1
        dist.all_reduce(amaxes, dist.ReduceOp.MAX, group=mesh.get_group())
        # Rounding keeps the order of values, so that these are the amaxes of what was rounded.
        amaxes_in = functools.cache(lambda dtype: amaxes.to(dtype).float().split(1))
        for place, weight in enumerate(these):
            weight._amaxes_in, weight._place, weight._known = amaxes_in, place, weight.state(capture)

    def _shard(self) -> ShardedWeight:
        shard = local_of(self._parameter())
        assert isinstance(shard, ShardedWeight)
        return shard

    def _parameter(self) -> Any:
        """The parameter that the optimizer has; a module that is gathered holds another. Of FSDP's it is a DTensor."""
        module = self._module()
        parameter = None if module is None else module._parameters["weight"]
        if isinstance(local_of(parameter), ShardedWeight):
            self._sharded = parameter
        return self._sharded


WEIGHTS: weakref.WeakKeyDictionary[nn.Module, GatheredWeight] = weakref.WeakKeyDictionary()
"""nn.Linear -> its GatheredWeight, of every model that `fp8_all_gather` was called with."""


def weight_of(parameter: Any) -> GatheredWeight | None:
    """What is known of a parameter that a module holds now: of a compiled graph's input while the module is gathered."""
    return next((w for module, w in list(WEIGHTS.items()) if module._parameters.get("weight") is parameter), None)
