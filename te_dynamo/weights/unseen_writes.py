"""Writes that raise no version counter, told to what goes by the counters of the weights that it keeps.

torch raises a tensor's version counter in an operator's kernel for the key ADInplaceOrView, or in its derivative. Operators
that have neither write in silence: torch's fused optimizers (`torch._fused_adamw_`), and those of extensions that declare
what they write and register nothing for it. An optimizer's step may also run no operator at all (a kernel of its own).

    operators   each that writes by its schema and raises no counter gets an ADInplaceOrView kernel, which says what was written
    optimizers  a hook behind `torch.optim.Optimizer.step` says that the parameters with a gradient were

Nothing else changes: no counter is raised for autograd to stumble over. What neither shows (`.data`, a storage, a kernel that
is launched by hand, a collective, the replay of a CUDA graph) is named in docs/weights.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

from te_dynamo.torch_private.table import UNSEEN_WRITES

Written = Callable[[Iterable[Tensor]], None]

_WRITES_NO_WEIGHT = {
    "prims", "inductor", "_c10d_functional", "symm_mem", "fsdp",  # buffers of torch's own compiler and collectives
    "quantized", "onednn", "mkldnn",  # tensors of 8 bits, and what Inductor's code makes for the CPU
}  # fmt: skip

_libraries: dict[str, torch.library.Library] = {}
_known: set[str] = set()


def tell_of_unseen_writes(written: Written) -> None:
    """From here on `written` is called with the tensors that an operator or an optimizer wrote without raising a counter.

    Called again it looks for operators that were defined since. A process has one `written`, that of its first call. Raises
    UnsupportedError on a torch without the names that this needs: a kept weight would be read after a write to it.
    """
    UNSEEN_WRITES.require()
    if not _libraries:
        register_optimizer_step_post_hook(lambda optimizer, *_: _tell_of_step(optimizer, written))
        _libraries["aten"] = torch.library.Library("aten", "IMPL")
    for name in silent_operators(_known):
        namespace, _, operator = name.partition("::")
        if namespace not in _libraries:
            _libraries[namespace] = torch.library.Library(namespace, "IMPL")
        _libraries[namespace].impl(operator, _telling(name, written), "ADInplaceOrView", with_keyset=True)


def silent_operators(known: set[str]) -> list[str]:
    """The operators that may write a weight and raise no counter, by qualified name ("aten::_fused_sgd_.tensor_lr").

    known: names that were looked at before, which all that have a schema are afterwards.
    """
    names = set(torch._C._dispatch_get_all_op_names()) - known
    silent = {name: _is_silent(name) for name in names}
    known |= {name for name, verdict in silent.items() if verdict is not None}
    return sorted(name for name, verdict in silent.items() if verdict)


def _is_silent(name: str) -> bool | None:
    """None of a name that has kernels, and no schema so far: nothing can call it."""
    namespace, _, operator = name.partition("::")
    if namespace in _WRITES_NO_WEIGHT or (namespace == "aten" and not operator.startswith("_fused_")):
        return (
            False  # of aten the others raise it, or write what is no weight: statistics, workspaces, gradients (a test)
        )
    if any(
        torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
        for key in ("CompositeImplicitAutograd", "ADInplaceOrView")
    ):
        return False
    schema = _schema(name)
    return schema and any(_is_written(argument) for argument in schema.arguments)


def _schema(name: str) -> Any:
    """None where it has none."""
    operator, _, overload = name.partition(".")
    try:
        return torch._C._get_schema(operator, overload)
    except RuntimeError:
        return None


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _telling(name: str, written: Written) -> Callable[..., Any]:
    """The kernel: what comes below it, then `written`."""
    namespace, _, operator = name.partition("::")
    packet, _, overload = operator.partition(".")
    below = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    arguments = [(i, a.name) for i, a in enumerate(below._schema.arguments) if _is_written(a)]

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        result = below.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, *args, **kwargs)
        values = [args[i] if i < len(args) else kwargs.get(name) for i, name in arguments]
        written(value for value in tree_leaves(values) if isinstance(value, Tensor))
        return result

    return run


def _tell_of_step(optimizer: torch.optim.Optimizer, written: Written) -> None:
    if torch.compiler.is_compiling():
        return  # a compiled step's writes raise counters when it runs, and its operators tell of theirs
    # Not by .grad: optimizers clear it, or read the gradient elsewhere.
    written(p for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
