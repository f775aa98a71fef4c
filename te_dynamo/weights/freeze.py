"""`freeze`, `unfreeze` and `invalidate`: what is kept of a model's weights between calls, by the user's word."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from te_dynamo._compat import is_exporting
from te_dynamo.dialect.define import leaving
from te_dynamo.errors import InputError, KeptWeightError, UnsupportedError
from te_dynamo.options import flag
from te_dynamo.quantized.tensor import QuantizedTensor
from te_dynamo.weights.cache import dequantized, forget_weights, renew_weights
from te_dynamo.weights.checkpoint.torchao import is_torchao
from te_dynamo.weights.frozen import FROZEN, Frozen, drop, end_load, is_dropped, lend, restore, values_of


def freeze(model: nn.Module, *, drop_weights: bool = False) -> nn.Module:
    """Each weight of a linear that backend "te" compiles is quantized once, at the first call; returns the model.

    model:        a module, or what torch.compile made of one; before or after its first call.
    drop_weights: frees the high-precision values of `nn.Linear` weights once they are quantized. Names, shapes and dtype
                  stay: state_dict() gives the quantized values in the weight's own dtype, load_state_dict() takes any and
                  what it loads is quantized anew. Whatever becomes of a load, a weight that it did not write keeps what it
                  had. Values that are loaded are in memory until the next call; others are there again while their
                  own module is loaded, to be written over. Copies and pickles of the model have the quantized values too,
                  and are not frozen. Read outside of a compiled linear the values are NaN. A weight that something else in a compiled graph reads (a tied embedding) keeps its values.

    A weight that is written afterwards is quantized again at the next call, if its version counter, address or identity shows
    the write (`invalidate` otherwise). A call that would compute a frozen weight's gradient raises KeptWeightError: run under
    torch.no_grad(), set requires_grad to False (to train adapters beside it), or `unfreeze`.

    Raises KeptWeightError for parameters that a distributed wrapper moves or shares out (FSDP, DTensor) and for those made under
    torch.inference_mode, which have no version counter.
    """
    model, drop_weights = _unwrapped(model), flag("drop_weights", drop_weights)
    _check_unmanaged(model)
    added = []
    for module, name, parameter, path in _parameters(model):
        _check(parameter, path)
        if parameter not in FROZEN:
            FROZEN[parameter] = Frozen(path)
            added.append(parameter)
        _hooks.setdefault(module, _Hooks(module)).names[name] = path
    if added and model not in _refusing:
        _refusing[model] = model.register_forward_pre_hook(_refuse_export)
    if drop_weights:
        for parameter in _of_linears_alone(model):
            if not is_dropped(parameter):
                _drop(parameter)
    _compile_again(added)
    return model


def unfreeze(model: nn.Module) -> nn.Module:
    """Weights are quantized in each call again; returns the model. A dropped one gets the quantized values, in its own dtype.

    Raises KeptWeightError for one whose place holder was moved or cast since.
    """
    model = _unwrapped(model)
    parameters = list(dict.fromkeys(parameter for _, _, parameter, _ in _parameters(model) if parameter in FROZEN))
    for parameter, values in [(parameter, _values(parameter)) for parameter in parameters]:
        if is_dropped(parameter):
            restore(parameter, values)
        del FROZEN[parameter]
    forget_weights(parameters)
    for module in model.modules():
        if module in _hooks:
            _hooks.pop(module).remove()
        if module in _refusing:
            _refusing.pop(module).remove()
    _compile_again(parameters)
    return model


def invalidate(model: nn.Module) -> None:
    """After a write to weights that torch does not show (`parameter.data.copy_`, a numpy view): all are quantized again.

    What is kept of weights that are not frozen is freed meanwhile. What is kept of dropped weights stays, because it is all there is.
    """
    parameters = [parameter for _, _, parameter, _ in _parameters(_unwrapped(model))]
    renew_weights(parameter for parameter in parameters if parameter in FROZEN and not is_dropped(parameter))
    forget_weights(parameter for parameter in parameters if parameter not in FROZEN)


def _unwrapped(model: nn.Module) -> nn.Module:
    found = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
    if not isinstance(found, nn.Module):
        raise InputError(
            f"te_dynamo: weights are kept of a model: expected a torch.nn.Module, got {type(model).__name__}"
        )
    return found


def _parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter, str]]:
    """(owner, its name there, parameter, its path) of all that could be the weight of a linear."""
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            stored = isinstance(parameter, QuantizedTensor) or is_torchao(
                parameter
            )  # it is what freezing would make of it
            if parameter is not None and parameter.dim() >= 2 and parameter.is_floating_point() and not stored:
                yield module, name, parameter, f"{prefix}.{name}".removeprefix(".")


def _check_unmanaged(model: nn.Module) -> None:
    """FSDP's parameters may have any shape while they are not gathered."""
    for prefix, module in model.named_modules():
        if getattr(module, "_is_fsdp_managed_module", False):
            for name, parameter in module.named_parameters(prefix, recurse=False):
                raise _wrapped(name, parameter)


def _wrapped(path: str, parameter: nn.Parameter) -> KeptWeightError:
    return KeptWeightError(
        f"te_dynamo.freeze: {path!r} is a {type(parameter).__name__} of a distributed or wrapped module: its values "
        "change without a trace; freeze the plain model"
    )


def _check(parameter: nn.Parameter, path: str) -> None:
    if type(parameter) not in (nn.Parameter, FakeTensor):
        raise _wrapped(path, parameter)
    if parameter.is_inference():
        raise KeptWeightError(
            f"te_dynamo.freeze: {path!r} was made under torch.inference_mode and has no version counter; make the model "
            "outside of it"
        )


def _of_linears_alone(model: nn.Module) -> list[nn.Parameter]:
    """The weights that only nn.Linear modules own."""
    owners: dict[nn.Parameter, set[type]] = {}
    for module, _, parameter, _ in _parameters(model):
        owners.setdefault(parameter, set()).add(type(module))
    return [parameter for parameter, types in owners.items() if types == {nn.Linear}]


def _drop(parameter: nn.Parameter) -> None:
    """Drops its values; `copy.deepcopy` and pickles make a parameter that has the quantized ones, and is not frozen."""
    drop(parameter)
    this = weakref.ref(parameter)

    def with_values() -> nn.Parameter:
        parameter = this()
        assert parameter is not None
        copied = nn.Parameter(_values(parameter).clone(), parameter.requires_grad)
        vars(copied).update({name: value for name, value in vars(parameter).items() if name not in copying})
        return copied

    # Both look for these in the object first.
    copying = {
        "__deepcopy__": lambda _: with_values(),
        "__reduce_ex__": lambda protocol: with_values().__reduce_ex__(protocol),
    }
    vars(parameter).update(copying)


_refusing: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
"""A model that was frozen -> its hook that refuses an export."""


def _refuse_export(model: nn.Module, _: Any) -> None:
    ours = (
        not torch.compiler.is_dynamo_compiling() and leaving.get()
    )  # Dynamo, which te_dynamo.export does without, reads no ContextVar
    if (is_exporting() and not ours) or torch.jit.is_tracing():
        raise UnsupportedError(
            f"te_dynamo: {type(model).__name__} is frozen, and an export would have its weights in the model's precision, or NaN where they "
            "were dropped: call te_dynamo.unfreeze(model) first, or te_dynamo.export(model, args), which stores its codes"
        )


# --- state dicts of models with dropped weights ---------------------------------------------------------------


class _Hooks:
    """A module's hooks, and what they need to know.

    names:   of the parameters that were frozen here -> path.
    loading: of the frozen parameters that a load is about -> whether they are dropped.
    """

    def __init__(self, module: nn.Module) -> None:
        self.names: dict[str, str] = {}
        self.loading: dict[str, bool] = {}
        self._handles = (
            module.register_state_dict_post_hook(_save_values),
            module.register_load_state_dict_pre_hook(_before_load),
            module.register_load_state_dict_post_hook(_after_load),
        )

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


_hooks: weakref.WeakKeyDictionary[nn.Module, _Hooks] = weakref.WeakKeyDictionary()


def _values(parameter: nn.Parameter) -> torch.Tensor:
    """The values of a frozen parameter: its own while they are there, else the quantized ones. Raises as `values_of` does."""
    gone = is_dropped(parameter) and FROZEN[parameter].source is None
    return dequantized(parameter) if gone else values_of(parameter)


def _save_values(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    for name, parameter in module._parameters.items() if module in _hooks else ():
        if parameter is not None and prefix + name in state_dict and parameter in FROZEN:
            values = _values(parameter)
            if is_dropped(parameter):
                state_dict[prefix + name] = values


def _before_load(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
    """Lends dropped parameters their values: whatever becomes of the load, what it does not write stays what it was."""
    if module not in _hooks:
        return
    loading = _hooks[module].loading = {}
    for name, parameter in module._parameters.items():
        if parameter is None or parameter not in FROZEN or prefix + name not in state_dict:
            continue
        end_load(parameter, dequantized)  # one that was broken off
        loading[name] = is_dropped(parameter)
        if loading[name] and not metadata.get("assign_to_params_buffers", False):  # else nothing is copied
            lend(parameter, _values(parameter))


def _after_load(module: nn.Module, _: Any) -> None:
    """What was loaded is quantized at the next call, dropped as before; what assign=True put in place is frozen too."""
    if module not in _hooks:
        return
    hooks = _hooks[module]
    for name, dropped in hooks.loading.items():
        parameter = module._parameters.get(name)
        if parameter is None:
            continue
        if parameter not in FROZEN:
            path = hooks.names.get(name, name)
            _check(parameter, path)
            FROZEN[parameter] = Frozen(path)
            if dropped:
                _drop(parameter)
        end_load(parameter, dequantized)
        if not dropped:
            renew_weights([parameter])
    hooks.loading = {}


# --- graphs that were compiled before ---------------------------------------------------------------------------

_watched: dict[int, tuple[weakref.ref[CodeType], set[int]]] = {}
"""Code that Dynamo compiled with backend "te", by its id, and the ids of the parameters it reads.

Ids and no weak references, which would keep torch.utils.swap_tensors from swapping any model's parameters; of an id that
another tensor has by then, code is compiled once more than it had to.
"""


def watch(code: CodeType, parameters: Iterable[torch.Tensor]) -> None:
    """`code` is compiled again once one of `parameters` is frozen or not frozen any more."""
    for gone in [key for key, (ref, _) in _watched.items() if ref() is None]:
        del _watched[gone]
    read = _watched.setdefault(id(code), (weakref.ref(code), set()))[1]
    read.update(map(id, parameters))


def _compile_again(parameters: list[nn.Parameter]) -> None:
    reset_code: Callable[[CodeType], None] = torch._dynamo.eval_frame.reset_code
    ids = {id(parameter) for parameter in parameters}
    with torch._dynamo.convert_frame.compile_lock:  # as torch._dynamo.reset does
        for key, (ref, read) in list(_watched.items()):
            code = ref()
            if code is not None and ids & read:
                reset_code(code)
                del _watched[key]
