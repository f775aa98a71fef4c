"""nn.MultiheadAttention and nn.TransformerEncoderLayer, one node each in Dynamo's graph -> their parts, whose linears are matched.

    F.multi_head_attention_forward(query, key, value, ...)    ->    linear, heads, scaled_dot_product_attention, linear
    torch._transformer_encoder_layer_fwd(src, ...)            ->    the same with norms, activation and the other two linears

The parts of the first are those that torch's own function calls (inline.py). The second is the fast path of an encoder layer in
inference; its parts are those of the layer's slow path.
"""

from __future__ import annotations

import inspect
import math
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from te_dynamo.passes.torch_ir.match.autocast import may_be_autocast
from te_dynamo.passes.torch_ir.match.inline import CannotInline, inline_call
from te_dynamo.passes.torch_ir.match.patterns.linears.linear import RecipeFor, linear_record
from te_dynamo.passes.torch_ir.match.patterns.linears.products import LINEAR, Sizes
from te_dynamo.passes.torch_ir.match.values import calls, is_number, left_as_plain, tensor_of
from te_dynamo.passes.torch_ir.match.where import parameter_name, path_prefix
from te_dynamo.report import MatchRecord
from te_dynamo.user_code import module_here

_ATTENTION = {F.multi_head_attention_forward}
_ENCODER_LAYER = {torch._transformer_encoder_layer_fwd}


def match_attention(node: fx.Node, recipe_for: RecipeFor, outside: str = "") -> list[MatchRecord]:
    """Puts the parts of an attention or an encoder layer in the place of `node`, for match_linear to find; where they stay
    one call, a record for each linear in it. [] for any other node.

    recipe_for, outside: as for match_linear.
    """
    if calls(node, _ATTENTION):
        hidden, parts = _of_attention(node), _attention
    elif calls(node, _ENCODER_LAYER):
        hidden, parts = _of_encoder_layer(node), _encoder_layer
    else:
        return []
    found = [linear_record(node, weight, sizes, recipe_for) for weight, sizes in hidden]
    reason = (
        outside
        or _ignores_autocast(node)
        or left_as_plain(*(operand for operand in node.all_input_nodes if not is_number(operand)))
    )
    recipes = [recipe for _, recipe in found]
    recipes += [recipe_for(f"{path_prefix.get() or ''}{_owner(weight)}", "")[0] for weight, _ in hidden]
    if not reason and any(recipe is not None for recipe in recipes):
        try:
            for new in inline_call(node, parts):
                _name_after_weight(new)
            return []
        except CannotInline as error:
            reason = f"inside one call of torch's: {error}; write its projections as nn.Linear"
    for record, recipe in found:
        record.matched, record.recipe = False, ""
        record.reason = record.reason if recipe is None else reason
    return [record for record, _ in found]


def _ignores_autocast(node: fx.Node) -> str:
    """Why an encoder layer's fast path, which computes in the dtype of its weights, stays: its parts would follow autocast."""
    value = tensor_of(node) if calls(node, _ENCODER_LAYER) else None
    if value is None or not may_be_autocast(node, value.device):
        return ""
    return "inside one call of torch's that ignores autocast, its parts would not; write its projections as nn.Linear"


# F.multi_head_attention_forward asks first whether somebody overrides it, and the mode that records its calls does: this is its
# own code, where nobody does.
_attention: Any = types.FunctionType(
    F.multi_head_attention_forward.__code__,
    {**F.__dict__, "has_torch_function": lambda _: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)


def _encoder_layer(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
    """nn.TransformerEncoderLayer.forward, batch first, in inference; mask_type: 0 attn_mask, 1 key_padding_mask, 2 both."""

    def attend(x: Tensor) -> Tensor:
        batch, length = x.shape[:2]
        x = x.transpose(0, 1)
        merged = None if mask is None else _of_type(mask, mask_type, batch * num_heads, length)
        projections = (qkv_weight, qkv_bias, None, None, False, 0.0, proj_weight, proj_bias)
        y = _attention(
            x, x, x, embed_dim, num_heads, *projections, training=False, need_weights=False,
            attn_mask=merged, key_padding_mask=mask if mask_type == 1 else None,
        )[0]  # fmt: skip
        return y.transpose(0, 1)

    def feed_forward(x: Tensor) -> Tensor:
        h = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(h) if use_gelu else F.relu(h), ffn_weight_2, ffn_bias_2)

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), weight, bias, eps)

    if norm_first:
        x = src + attend(norm(src, norm_weight_1, norm_bias_1))
        return x + feed_forward(norm(x, norm_weight_2, norm_bias_2))
    x = norm(src + attend(src), norm_weight_1, norm_bias_1)
    return norm(x + feed_forward(x), norm_weight_2, norm_bias_2)


def _of_type(mask: Tensor, mask_type: int | None, heads: int, length: int) -> Tensor | None:
    """The attn_mask of a mask that nn.MultiheadAttention.merge_masks made; None for a key_padding_mask."""
    if mask_type == 1:
        return None
    return mask if mask_type == 0 else mask.reshape(heads, length, length)


def _of_attention(node: fx.Node) -> list[tuple[Any, Sizes]]:
    """(weight, sizes) of the projections of q, k, v and the output."""
    given = inspect.signature(F.multi_head_attention_forward).bind(*node.args, **node.kwargs).arguments
    width, packed = given["embed_dim_to_check"], given.get("in_proj_weight")
    found: list[tuple[Any, Sizes]] = []
    for name in ("query", "key", "value"):
        x, weight = tensor_of(given[name]), packed if packed is not None else given.get(f"{name[0]}_proj_weight")
        found.append((weight, () if x is None else (math.prod(x.shape[:-1]), width, x.shape[-1])))
    query = found[0][1]
    return [*found, (given["out_proj_weight"], query and (query[0], width, width))]


def _of_encoder_layer(node: fx.Node) -> list[tuple[Any, Sizes]]:
    """(weight, sizes) of the packed projection, the output's, and the two linears behind."""
    given = inspect.signature(_encoder_layer).bind(*node.args, **node.kwargs).arguments
    found: list[tuple[Any, Sizes]] = []
    src = tensor_of(given["src"])
    for name in ("qkv_weight", "proj_weight", "ffn_weight_1", "ffn_weight_2"):
        weight = tensor_of(given[name])
        known = src is not None and weight is not None and not src.is_nested
        found.append((given[name], (math.prod(src.shape[:-1]), *weight.shape) if known else ()))  # type: ignore[union-attr]
    return found


def _owner(weight: Any) -> str:
    """The path of the module that holds a parameter, as the compiled function spells it."""
    return parameter_name(weight).rpartition(".")[0]


def _name_after_weight(node: fx.Node) -> None:
    """A linear of a parameter that a module within holds (out_proj, linear1) has that module's path, for rules and explain."""
    owner, stack = _owner(node.args[1]) if calls(node, LINEAR) else "", node.meta.get("nn_module_stack")
    if owner and stack and module_here(node) != owner:
        node.meta["nn_module_stack"] = {**stack, owner: (owner, torch.nn.Linear)}
