"""`fp8_all_gather`: FSDP2 gathers the weights of linears in FP8, through its own extension points, for backend "te" to multiply by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from te_dynamo.dialect.quantize import INPUT_DTYPES
from te_dynamo.distributed.check_ranks import assert_same_where_checked
from te_dynamo.distributed.fp8_all_gather_shard import ShardedWeight, local_of
from te_dynamo.distributed.fp8_all_gather_weight import WEIGHTS, GatheredWeight
from te_dynamo.errors import UnsupportedError
from te_dynamo.options import Options
from te_dynamo.recipe import Recipe
from te_dynamo.user_code import without_wrappers
from te_dynamo.weights.frozen import FROZEN


def fp8_all_gather(model: nn.Module, *, options: Mapping[str, Any] | None = None) -> nn.Module:
    """The weights of `model`'s linears travel in FP8 from then on where FSDP2 gathers them; returns the model. Call it before `fully_shard`
    and behind `parallelize_module`.

    options: those of torch.compile(..., backend="te"). "recipe" and "rules" say which weights travel, and how. Rules are asked with paths in
             `model`; linears of a compiled block have paths in the block there.

    A rank casts its shard (to MixedPrecisionPolicy.param_dtype first) with the scale of the whole weight and sends the codes. The gathered
    QuantizedTensor has the bits of the gathered weight quantized. It is multiplied as it is, whatever FP8 costs. Parameters, gradients,
    optimizer states and state dicts stay what they are. Of a DTensor (tensor parallelism) the whole weight is the rank's own part.

    These travel in the model's precision, and `explain` notes the reason: what a rule leaves, weights of another module than nn.Linear, those that
    two modules share, DTensors other than shards and replicas, N or K (of a DTensor's part) that the GEMMs do not take, recipes other than
    current scaling, 128x128 blocks, MXFP8 with weight_block_dims=2 and, in a model of which no parameter trains, `float8_rowwise`; blocks that
    a shard cuts, rows that the ranks do not share evenly, and scales of a weight that each rank has whole.

    After `check_ranks` the ranks compare which weights travel how, and raise RanksDifferError together: every rank makes the call.

    Raises UnsupportedError after `fully_shard`, on a second call, and for frozen weights; in forward for a linear that travels in FP8 and is
    not compiled with the same recipe; InvalidOptionError for options that torch.compile would refuse.
    """
    model = getattr(model, "_orig_mod", model)
    _check(model)
    parsed = Options.parse(options).in_model(model)
    owners = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    trains = any(parameter.requires_grad for parameter in model.parameters())
    weights: list[GatheredWeight] = []
    travels: dict[str, str] = {}
    for wrapped, module in model.named_modules():
        path, parameter = without_wrappers(wrapped), module._parameters.get("weight")
        if type(module) is not nn.Linear or parameter is None:
            continue
        recipe, why = parsed.recipe_for(path)
        shared = owners[id(parameter)] > 1
        reason = _reason(parameter, shared, recipe, trains) if recipe is not None else why
        quantizer = None if recipe is None else recipe.weight_quantizer().with_usage(True, False)
        weight = GatheredWeight(module, f"{path}.weight".removeprefix("."), quantizer, weights, reason)
        travels[f"fp8_all_gather of {weight.name}"] = (
            f"left in {parameter.dtype}" if quantizer is None or reason else quantizer.describe()
        )
        if not reason:
            weights.append(weight)
            _wrap(module, weight)
    assert_same_where_checked(travels)
    return model


def _check(model: nn.Module) -> None:
    from torch.distributed.fsdp import FSDPModule

    for path, module in model.named_modules():
        if isinstance(module, FSDPModule):
            raise UnsupportedError(
                f"te_dynamo.distributed.fp8_all_gather: {path or 'the model'!r} is sharded already: call fp8_all_gather(model) before fully_shard"
            )
        if module in WEIGHTS:
            raise UnsupportedError(
                f"te_dynamo.distributed.fp8_all_gather: {path!r} was given to it before: call it once, with the options of the whole model"
            )
        for name, parameter in module._parameters.items():
            if parameter in FROZEN:
                raise UnsupportedError(
                    f"te_dynamo.distributed.fp8_all_gather: {path}.{name} is frozen: te_dynamo.unfreeze(model) before"
                )


def _reason(weight: nn.Parameter, shared: bool, recipe: Recipe, trains: bool) -> str:
    """Why a weight whose linear is in a recipe travels in the model's precision, "" if it does not."""
    from torch.distributed.tensor import Replicate, Shard

    part = local_of(weight)
    if type(part) not in (nn.Parameter, torch.Tensor):
        return f"it is a {type(part).__name__}, not a plain parameter"
    placements = () if part is weight else weight.placements  # type: ignore[attr-defined]
    if any(type(each) not in (Replicate, Shard) for each in placements):
        return f"it is a DTensor of {placements}; te.linear takes shards and replicas"
    if shared:
        return "another module holds it too"
    if weight.dtype not in INPUT_DTYPES:
        return f"it is {weight.dtype}; te.quantize takes bf16, fp16 and fp32"
    n, k = part.shape
    if n % recipe.alignment or k % recipe.alignment or not n or not k:
        return f"N = {n}, K = {k}{' of this rank' if placements else ''}: {recipe.gemms} need N and K to be multiples of {recipe.alignment}"
    quantizer = recipe.weight_quantizer()
    if not quantizer.columns_are_rows() and quantizer.scaling() != "row":
        return (
            f"{recipe.describe()}: dgrad reads columns that are not the rows' codes, so that both would have to travel"
        )
    if not quantizer.columns_are_rows() and trains:
        return (
            f"{recipe.describe()}: dgrad reads columns that are not the rows' codes, so that both would have to travel; rows travel alone "
            "where no parameter requires grad"
        )
    if recipe.backward != "quantized":
        return f"{recipe.describe()}: dgrad reads the weight in high precision"
    return ""


def _wrap(module: nn.Module, weight: GatheredWeight) -> None:
    parameter = module._parameters["weight"]
    assert parameter is not None
    shard = _with_local(parameter.data, lambda values: ShardedWeight(values, weight))
    module._parameters["weight"] = nn.Parameter(shard, parameter.requires_grad)
    module.register_state_dict_post_hook(_save_plain)
    module.register_load_state_dict_pre_hook(_assign_shards)


def _save_plain(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """A state dict holds plain tensors, over the same memory."""
    key = f"{prefix}weight"
    if key in state_dict:
        state_dict[key] = _with_local(state_dict[key], lambda shard: shard.plain if _is_shard(shard) else shard)


def _assign_shards(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
) -> None:
    """What load_state_dict(assign=True) puts in place of a parameter is a shard too."""
    key, weight = f"{prefix}weight", WEIGHTS[module]
    if metadata.get("assign_to_params_buffers", False) and key in state_dict:
        state_dict[key] = _with_local(
            state_dict[key], lambda values: values if _is_shard(values) else ShardedWeight(values, weight)
        )


def _is_shard(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, ShardedWeight)


def _with_local(tensor: torch.Tensor, change: Any) -> torch.Tensor:
    """A tensor or DTensor with another local tensor, and the same requires_grad."""
    from torch.distributed.tensor import DTensor

    with torch.no_grad():
        local = change(local_of(tensor))
        if not isinstance(tensor, DTensor):
            return local  # type: ignore[no-any-return]
        return DTensor.from_local(
            local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
